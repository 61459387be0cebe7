//! The recorder: what is recorded, in which order, and where it goes.

use std::collections::BTreeMap;
use std::process::{Command, Output};

use crate::common::rng::Rng;
use crate::common::{Folder, assert_matches, wait_until};
use crate::scene::{MIB, Scene, alone, memory, scene};
use cualloc::Error;
use cualloc::allocator::Request;
use cualloc::driver::sys;
use cualloc::record::{Action, Context, Event, Recorder, RecorderError, Recording, Target};
use cualloc::trace::{Replay, Trace};

/// The events of one allocator that are about blocks.
pub fn blocks(recording: &Recording, scene: &Scene) -> Vec<Event> {
    let id = scene.allocator.id() as u16;
    let of = |event: &&Event| event.allocator == id;
    let events = recording.events().iter().filter(of);
    let about_blocks = |event: &&Event| {
        matches!(
            event.action,
            Action::Allocate | Action::Free | Action::Held | Action::Use
        )
    };
    events.filter(about_blocks).copied().collect()
}

/// What is live at the end, by the events, each of which must make sense after those before it.
pub fn live(events: &[Event]) -> BTreeMap<u64, u64> {
    let mut live = BTreeMap::new();
    for event in events {
        match event.action {
            Action::Allocate | Action::Held => {
                let before = live.insert(event.address, event.bytes);
                assert_eq!(before, None, "{event:?} over a live block");
            }
            Action::Free => {
                let bytes = live.remove(&event.address);
                assert_eq!(bytes, Some(event.bytes), "{event:?} of another block");
            }
            _ => {}
        }
    }
    live
}

#[test]
fn every_entry_point_of_an_allocation_and_of_a_free_is_recorded_once() {
    let _alone = alone();
    for settings in [
        "policy=packed",
        "policy=classic",
        "policy=packed,tune.capture_checks=on",
    ] {
        let scene = Scene::new(settings);
        let (allocator, stream) = (&scene.allocator, scene.stream());
        let recorder = memory();
        let mut expected = Vec::new();
        let mut says =
            |action, address, bytes: usize| expected.push((action, address, bytes as u64));
        // Twice, so that the second round finds caches filled.
        for bytes in [1000, 4096, 3 * MIB, 1000, 4096, 3 * MIB, 100_000, 100_000] {
            let block = allocator.allocate(bytes, &stream).unwrap();
            says(Action::Allocate, block.ptr(), bytes);
            says(Action::Free, block.ptr(), bytes);
            drop(block);
            let block = allocator
                .allocate_with(Request::new(bytes), &stream)
                .unwrap();
            says(Action::Allocate, block.ptr(), bytes);
            says(Action::Free, block.ptr(), bytes);
            block.free().unwrap();
            // SAFETY: the stream is alive, and no other work uses the memory.
            unsafe {
                let ptr = allocator.allocate_raw(bytes, stream.raw()).unwrap();
                says(Action::Allocate, ptr, bytes);
                says(Action::Free, ptr, bytes);
                allocator.free_raw(ptr).unwrap();
            }
        }
        let recording = recorder.read().unwrap();
        let found = blocks(&recording, &scene);
        let found: Vec<_> = found
            .iter()
            .map(|e| (e.action, e.address, e.bytes))
            .collect();
        assert_eq!(found, expected, "{settings}");
        assert!(recorder.finish().is_ok());
        allocator.check().unwrap();
    }
}

#[test]
fn uses_refusals_and_memory_of_the_driver_are_recorded() {
    let _alone = alone();
    let scene = Scene::new("policy=packed,limit=64MiB");
    let streams = [scene.stream(), scene.stream()];
    let recorder = memory();
    let block = scene.block(5 * MIB, &streams[0]);
    block.record_stream(&streams[1]).unwrap();
    let small = scene.block(512, &streams[0]);
    small.record_use(&streams[1]).unwrap();
    assert!(scene.allocator.allocate(100 * MIB, &streams[0]).is_err());
    let (first, second) = (block.ptr(), small.ptr());
    drop((block, small));
    scene.allocator.empty_cache().unwrap();
    let recording = recorder.read().unwrap();
    let uses: Vec<_> = blocks(&recording, &scene)
        .into_iter()
        .filter(|event| event.action == Action::Use)
        .collect();
    assert_eq!(
        uses.iter().map(|e| e.address).collect::<Vec<_>>(),
        [first, second]
    );
    let handles = uses
        .iter()
        .map(|e| recording.streams()[e.stream as usize].handle);
    assert!(
        handles
            .into_iter()
            .all(|handle| handle == streams[1].raw() as u64)
    );
    let refused = recording
        .events()
        .iter()
        .find(|e| matches!(e.action, Action::OutOfMemory { .. }));
    assert_eq!(refused.unwrap().bytes, 100 * MIB as u64);
    let sum = |map: bool| -> u64 {
        let of = |e: &&Event| match e.action {
            Action::Map { .. } => map,
            Action::Unmap { .. } => !map,
            _ => false,
        };
        let id = scene.allocator.id() as u16;
        let own = recording.events().iter().filter(|e| e.allocator == id);
        own.filter(of).map(|e| e.bytes).sum()
    };
    let reserved = scene.allocator.stats().all.reserved;
    assert_eq!(sum(true) - sum(false), reserved.current);
    assert_eq!(sum(true), reserved.total_allocated);
}

#[test]
fn blocks_live_at_the_start_are_held() {
    let (_alone, scene, stream) = scene("");
    let small = scene.block(700, &stream);
    let large = scene.block(9 * MIB, &stream);
    let gone = scene.block(2 * MIB, &stream);
    drop(gone);
    // The code that starts the recording did not allocate them.
    let before = Context::new("starter").enter();
    let recorder = memory();
    before.enter();
    let later = scene.block(700, &stream);
    let freed = large.ptr();
    drop(large);
    let recording = recorder.read().unwrap();
    let events = blocks(&recording, &scene);
    let held = events.iter().filter(|e| e.action == Action::Held);
    assert_eq!(held.count(), 2);
    assert!(
        events[..2]
            .iter()
            .all(|e| e.action == Action::Held && e.time == 0 && e.context == 0)
    );
    let live = live(&events);
    assert_eq!(live.get(&small.ptr()), Some(&700));
    assert_eq!(live.get(&later.ptr()), Some(&700));
    assert_eq!(live.get(&freed), None);
    let reserved: u64 = recording
        .events()
        .iter()
        .filter(|e| matches!(e.action, Action::Map { .. }) && e.time == 0)
        .map(|e| e.bytes)
        .sum();
    assert!(reserved >= 11 * MIB as u64, "{reserved}");
}

#[test]
fn threads_lose_no_event_that_had_room() {
    let _alone = alone();
    let scene = Scene::new("");
    const THREADS: usize = 16;
    const PAIRS: usize = 700;
    let recorder = memory();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (allocator, stream) = (&scene.allocator, scene.stream());
            scope.spawn(move || {
                for pair in 0..PAIRS {
                    let bytes = 512 * (1 + (pair + thread) % 20);
                    let block = allocator.allocate(bytes, &stream).unwrap();
                    if pair % 7 == 0 {
                        drop(allocator.allocate(3 * MIB, &stream).unwrap());
                    }
                    drop(block);
                }
            });
        }
    });
    let recording = recorder.read().unwrap();
    assert_eq!(recording.lost(), 0);
    let events = blocks(&recording, &scene);
    assert_eq!(events.len(), 2 * THREADS * (PAIRS + PAIRS.div_ceil(7)));
    assert!(live(&events).is_empty());
    assert!(events.is_sorted_by_key(|event| event.time));
}

#[test]
fn threads_that_share_a_stream_are_recorded_in_an_order_that_can_be() {
    let (_alone, scene, stream) = scene("");
    let recorder = memory();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (allocator, stream) = (&scene.allocator, &stream);
            scope.spawn(move || {
                for pair in 0..2000 {
                    let bytes = 512 * (1 + (pair + thread) % 5);
                    drop(allocator.allocate(bytes, stream).unwrap());
                }
            });
        }
    });
    let recording = recorder.read().unwrap();
    assert_eq!(recording.lost(), 0);
    assert!(live(&blocks(&recording, &scene)).is_empty());
}

#[test]
fn events_without_room_are_counted() {
    let (_alone, scene, stream) = scene("");
    let recorder = memory();
    for _ in 0..40_000 {
        drop(scene.block(512, &stream));
    }
    let recording = recorder.read().unwrap();
    let found = blocks(&recording, &scene).len() as u64;
    assert!(recording.lost() > 0);
    assert!(
        recording.lost() + found >= 80_000 && found >= 32_767,
        "{found}"
    );
}

#[test]
fn contexts_are_those_of_the_thread() {
    let (_alone, scene, stream) = scene("");
    let forward = Context::new("model;forward");
    let recorder = memory();
    let before = forward.enter();
    let block = scene.block(4096, &stream);
    assert_eq!(before.enter(), forward);
    drop(block);
    let recording = recorder.read().unwrap();
    let events = blocks(&recording, &scene);
    assert_eq!(recording.context(events[0].context), Some("model;forward"));
    assert_eq!(events[1].context, before.id());
    assert_eq!(recording.context(0), None);
}

/// Also where they take turns at one stream cache, and so at one ring.
#[test]
fn threads_that_share_a_stream_keep_their_contexts() {
    const PAIRS: usize = 3000;
    let (_alone, scene, stream) = scene("");
    let names = ["shared;first", "shared;second", ""];
    let contexts = names.map(|name| match name {
        "" => Context::NONE,
        name => Context::new(name),
    });
    // Quick from the first pair on.
    drop(scene.block(512, &stream));
    let recorder = memory();
    let turn = std::sync::Barrier::new(names.len());
    std::thread::scope(|scope| {
        for (thread, context) in contexts.into_iter().enumerate() {
            let (allocator, stream, turn) = (&scene.allocator, &stream, &turn);
            scope.spawn(move || {
                let before = context.enter();
                for pair in 0..PAIRS {
                    drop(allocator.allocate(512 * (1 + thread), stream).unwrap());
                    if pair % 100 == 0 {
                        turn.wait();
                    }
                }
                before.enter();
            });
        }
    });
    let recording = recorder.read().unwrap();
    assert_eq!(recording.lost(), 0);
    let events = blocks(&recording, &scene);
    assert_eq!(events.len(), 2 * names.len() * PAIRS);
    for event in events {
        let thread = event.bytes as usize / 512 - 1;
        assert_eq!(event.context, contexts[thread].id(), "{event:?}");
    }
}

#[test]
fn a_second_recording_is_refused_and_a_later_one_is_not() {
    let (_alone, scene, stream) = scene("");
    let first = memory();
    drop(scene.block(512, &stream));
    assert_matches!(Recorder::start(Target::Memory), Err(RecorderError::Busy));
    drop(first);
    drop(scene.block(512, &stream));
    let second = memory();
    assert_eq!(blocks(&second.read().unwrap(), &scene), []);
    drop(scene.block(512, &stream));
    assert_eq!(blocks(&second.read().unwrap(), &scene).len(), 2);
    // Nor if nothing happens between one and the next.
    drop(second);
    let third = memory();
    drop(scene.block(512, &stream));
    assert_eq!(blocks(&third.read().unwrap(), &scene).len(), 2);
}

#[test]
fn a_file_has_all_events_and_a_dump_those_in_the_rings() {
    let _alone = alone();
    let folder = Folder::new("record-file");
    let (path, dump) = (folder.file("run.rec"), folder.file("dump.rec"));
    let scene = Scene::new("");
    let stream = scene.stream();
    let recorder = Recorder::start(Target::File(&path)).unwrap();
    // More than a ring has room for in all, but never more than that before the thread has written it.
    for round in 0..3 {
        for _ in 0..8_000 {
            drop(scene.block(512, &stream));
        }
        if round == 0 {
            recorder.dump(&dump).unwrap();
        }
        let written = 32 * 16_000 * (round + 1);
        wait_until("the records are in the file", || {
            std::fs::metadata(&path).unwrap().len() >= written
        });
    }
    let dumped = Recording::read(&std::fs::read(&dump).unwrap()).unwrap();
    assert_eq!(blocks(&dumped, &scene).len(), 16_000);
    assert!(dumped.is_complete());
    let recorded = recorder.finish().unwrap();
    let read = Recording::read(&std::fs::read(&path).unwrap()).unwrap();
    assert!(read.is_complete());
    assert_eq!((read.lost(), recorded.lost), (0, 0));
    assert_eq!(blocks(&read, &scene).len(), 48_000);
    let missing = folder.file("no/such/folder");
    assert_matches!(
        Recorder::start(Target::File(&missing)),
        Err(RecorderError::Io(_))
    );
    // A folder, or a device, stays what it is.
    assert_matches!(
        Recorder::start(Target::File(folder.path())),
        Err(RecorderError::Io(_))
    );
    // A failed start does not prevent later ones.
    drop(memory());
}

#[cfg(unix)]
#[test]
fn files_are_their_owners_alone_and_follow_no_link() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let _alone = alone();
    let folder = Folder::new("record-link");
    let (path, victim) = (folder.file("run.rec"), folder.file("victim"));
    std::fs::write(&victim, "precious").unwrap();
    let write: [fn(&std::path::Path); 3] = [
        |path| drop(Recorder::start(Target::File(path)).unwrap()),
        |path| memory().dump(path).unwrap(),
        |path| {
            if cfg!(target_os = "linux") {
                drop(Recorder::start(Target::Mapped(path)).unwrap());
            } else {
                memory().dump(path).unwrap();
            }
        },
    ];
    for write in write {
        let _ = std::fs::remove_file(&path);
        symlink(&victim, &path).unwrap();
        write(&path);
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        let made = std::fs::symlink_metadata(&path).unwrap();
        assert!(made.is_file());
        assert_eq!(made.permissions().mode() & 0o777, 0o600);
        assert!(Recording::read(&std::fs::read(&path).unwrap()).is_ok());
    }
    // Nothing is left beside them.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_recording_replays_to_equal_peaks() {
    let _alone = alone();
    let program = Trace::from_rows("program", rows()).unwrap();
    let simulated = || Scene::new("policy=packed");
    let scene = simulated();
    let folder = Folder::new("record-replay");
    let path = folder.file("run.rec");
    let recorder = Recorder::start(Target::File(&path)).unwrap();
    let first = Replay::new(&program).run(&scene.context).unwrap();
    assert_eq!(recorder.finish().unwrap().lost, 0);
    let recording = Recording::read(&std::fs::read(&path).unwrap()).unwrap();
    let again = recording.to_trace("again", None).unwrap();
    assert_eq!(again.requested_peak(), program.requested_peak());
    let other = simulated();
    let second = Replay::new(&again).run(&other.context).unwrap();
    assert_eq!(first.reserved_peak, second.reserved_peak);
}

/// Allocations and frees of many sizes, drawn.
fn rows() -> Vec<cualloc::trace::Row> {
    use cualloc::trace::{Op, Row};
    let (mut rows, mut live, mut next) = (Vec::new(), Vec::new(), 0);
    let mut rng = Rng::new(1);
    for _ in 0..4000 {
        let (op, id, bytes) = if live.len() < 40 || rng.chance(50) {
            let most = 1 << (9 + rng.below(15));
            live.push(next);
            next += 1;
            (Op::Allocate, next - 1, 1 + rng.below(most))
        } else {
            (Op::Free, live.swap_remove(rng.index(live.len())), 0)
        };
        rows.push(Row {
            op,
            stream: 0,
            id,
            bytes,
        });
    }
    rows
}

// ---- programs that know nothing of it ----------------------------------------------------------

const CASE: &str = "CUALLOC_TEST_RECORD_CASE";

fn child(case: &str, record: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "recorder::child_entry",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(CASE, case)
        .env("CUALLOC_RECORD", record);
    command.output().unwrap()
}

#[test]
fn child_entry() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let scene = Scene::new("");
    let stream = scene.stream();
    for _ in 0..50 {
        drop(scene.block(4096, &stream));
    }
    let kept = scene.block(3 * MIB, &stream);
    match case.as_str() {
        "exit" => std::process::exit(0),
        "abort" => std::process::abort(),
        _ => drop(kept),
    }
}

#[test]
fn a_variable_records_a_program_that_exits() {
    let folder = Folder::new("record-exit");
    let output = child("exit", folder.file("run-%p.rec").to_str().unwrap());
    assert!(output.status.success(), "{output:?}");
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 1);
    let path = files[0].as_ref().unwrap().path();
    assert!(!path.to_str().unwrap().contains("%p"));
    let recording = Recording::read(&std::fs::read(path).unwrap()).unwrap();
    assert!(recording.is_complete());
    let trace = recording.to_trace("run", None).unwrap();
    assert_eq!(trace.rows().len(), 101);
    let times = recording.row_times(None);
    assert!(times.len() == 101 && times.is_sorted() && times[0] < times[100]);
    assert_eq!(trace.requested_peak(), 3 * MIB as u64);
}

#[cfg(target_os = "linux")]
#[test]
fn a_mapped_ring_outlives_an_abort() {
    let folder = Folder::new("record-abort");
    let path = folder.file("ring.rec");
    let output = child("abort", &format!("ring:{}", path.to_str().unwrap()));
    assert!(!output.status.success());
    let recording = Recording::read(&std::fs::read(path).unwrap()).unwrap();
    let trace = recording.to_trace("run", None).unwrap();
    assert_eq!(trace.rows().len(), 101);
    assert_eq!(trace.requested_peak(), 3 * MIB as u64);
}

/// A recording tells of small blocks by ways of its own: none of them leads past a capture.
#[test]
fn a_stream_that_captures_gets_nothing_while_a_recording_runs() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let (allocator, stream) = (&scene.allocator, scene.stream());
    let recorder = memory();
    drop(allocator.allocate(1000, &stream).unwrap());
    drop(allocator.allocate(3 * MIB, &stream).unwrap());
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    for bytes in [1000, 3 * MIB] {
        let request = Request::new(bytes);
        // SAFETY: the stream is alive, and there is no memory to use.
        let raw = unsafe { allocator.allocate_raw(bytes, stream.raw()) };
        let answers = [
            allocator.allocate(bytes, &stream).map(drop),
            allocator.allocate_with(request, &stream).map(drop),
            raw.map(drop),
        ];
        for answer in answers {
            assert_matches!(answer, Err(Error::Capturing { .. }));
        }
    }
    drop(stream.end_capture().unwrap());
    drop(allocator.allocate(1000, &stream).unwrap());
    assert_eq!(allocator.stats().all.allocated.current, 0);
    recorder.finish().unwrap();
}
