//! The capacity of rings, and the events that cannot displace others.

use crate::recorder::blocks;
use crate::scene::{MIB, Scene, alone, memory, scene};
use cualloc::record::{Action, Recording};
use cualloc::sim::SimConfig;

#[test]
fn all_blocks_that_are_live_at_the_start_are_held() {
    const BLOCKS: usize = 40_000;
    let (_alone, scene, stream) = scene("");
    let live: Vec<_> = (0..BLOCKS).map(|_| scene.block(512, &stream)).collect();
    let recorder = memory();
    let recording = recorder.read().unwrap();
    assert_eq!(recording.lost(), 0);
    let held = blocks(&recording, &scene);
    assert_eq!(held.len(), BLOCKS);
    assert!(held.iter().all(|event| event.action == Action::Held));
    drop(live);
}

#[test]
fn large_blocks_push_out_neither_devices_nor_streams_nor_memory() {
    let _alone = alone();
    let devices = SimConfig::with_devices(2, 1 << 30);
    let scene = Scene::on_device(devices, 1, "policy=classic");
    let stream = scene.stream();
    let recorder = memory();
    for _ in 0..40_000 {
        drop(scene.block(3 * MIB, &stream));
    }
    let recording = recorder.read().unwrap();
    assert!(recording.lost() > 0);
    let id = scene.allocator.id() as u16;
    assert_eq!(recording.device_of(id), 1);
    let event = *blocks(&recording, &scene).last().unwrap();
    let used = recording.streams()[event.stream as usize];
    assert_eq!(used.handle, stream.raw() as u64);
    let own = recording.events().iter().filter(|e| e.allocator == id);
    let mapped = own.filter(|e| matches!(e.action, Action::Map { .. }));
    let reserved = scene.allocator.stats().all.reserved.current;
    assert_eq!(mapped.map(|e| e.bytes).sum::<u64>(), reserved);
}

#[cfg(target_os = "linux")]
#[test]
fn events_without_a_ring_are_counted() {
    use cualloc::record::{Recorder, Recording, Target};
    use std::os::unix::fs::MetadataExt;
    const STREAMS: usize = 70;
    let _alone = alone();
    let folder = crate::common::Folder::new("record-missed");
    let path = folder.file("ring.rec");
    let scene = Scene::new("");
    let recorder = Recorder::start(Target::Mapped(&path)).unwrap();
    // A hole would end the process if the disk were full when it is written to.
    let file = std::fs::metadata(&path).unwrap();
    assert!(file.blocks() * 512 >= file.len(), "{file:?}");
    let streams: Vec<_> = (0..STREAMS).map(|_| scene.stream()).collect();
    for stream in &streams {
        for _ in 0..10 {
            drop(scene.block(512, stream));
        }
    }
    drop(recorder);
    let recording = Recording::read(&std::fs::read(&path).unwrap()).unwrap();
    let found = blocks(&recording, &scene).len();
    assert!(found < 20 * STREAMS, "{found}");
    assert_eq!(found as u64 + recording.lost(), 20 * STREAMS as u64);
}

/// The file of a thread that was too slow lacks frees: what lies where they were tells of them.
#[test]
fn a_block_at_the_address_of_a_live_one_reveals_a_lost_free() {
    const ALLOCATE: u64 = 1;
    const FREE: u64 = 2;
    let records = [
        (ALLOCATE, 0x1000, 5000),
        (ALLOCATE, 0x4000, 512),
        (FREE, 0x4000, 512),
        (ALLOCATE, 0x8000, 512),
        // Over the first, at its middle; then over this and the one behind it.
        (ALLOCATE, 0x1200, 1000),
        (ALLOCATE, 0x1000, 0x7200),
        (FREE, 0x1000, 0x7200),
    ];
    let records = (1u64..).zip(records);
    let records = records.map(|(time, (kind, at, size))| [time, at | kind, size, 0]);
    let whole = crate::recorded::recording(0, &[], records);
    // Where nothing was lost, nothing is made up.
    assert_eq!(Recording::read(&whole).unwrap().events().len(), 7);
    // The number of lost events is before the records.
    let mut lost = whole;
    lost[64 + 16] = 3;
    let recording = Recording::read(&lost).unwrap();
    assert!(recording.is_complete());
    let events = recording.events().iter();
    let events = events.map(|e| (e.action == Action::Free, e.address, e.bytes));
    let expected = [
        (false, 0x1000, 5000),
        (false, 0x4000, 512),
        (true, 0x4000, 512),
        (false, 0x8000, 512),
        (true, 0x1000, 5000),
        (false, 0x1200, 1000),
        (true, 0x8000, 512),
        (true, 0x1200, 1000),
        (false, 0x1000, 0x7200),
        (true, 0x1000, 0x7200),
    ];
    assert!(events.eq(expected), "{:?}", recording.events());
    let trace = recording.to_trace("lost", None).unwrap();
    assert_eq!(trace.requested_peak(), 0x7200);
}
