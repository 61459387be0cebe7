//! Requests that failed, in recordings and what becomes of them.

use crate::common::Folder;
use crate::scene::{MIB, Scene, alone, memory, scene};
use cualloc::allocator::Scope;
use cualloc::error::Cause;
use cualloc::record::{
    Action, Context, Event, FailedRequest, Recorder, Recording, Snapshot, Target,
};
use cualloc::sim::SimConfig;
use cualloc::trace::{Op, Row};

/// The events about the scene's allocator.
fn own(recording: &Recording, scene: &Scene) -> Vec<Event> {
    let id = scene.allocator.id() as u16;
    let events = recording.events().iter();
    events
        .filter(|event| event.allocator == id)
        .copied()
        .collect()
}

fn failed(recording: &Recording, scene: &Scene) -> Vec<FailedRequest> {
    recording.failed_requests(Some(scene.allocator.id() as u16))
}

/// Causes, limits and what was free, from memory, a file and a file of rings.
#[test]
fn a_recording_has_the_failed_requests_and_their_causes() {
    let _alone = alone();
    let folder = Folder::new("failed");
    let path = folder.file("run.rec");
    for target in [Target::Memory, Target::File(&path), Target::Mapped(&path)] {
        if matches!(target, Target::Mapped(_)) && !cfg!(target_os = "linux") {
            continue;
        }
        let device = SimConfig::with_devices(2, 256 << 20);
        let scene = Scene::on_device(device, 1, "policy=packed,limit=64MiB");
        let (allocator, streams) = (&scene.allocator, [scene.stream(), scene.stream()]);
        let kept = allocator.allocate(40 * MIB, &streams[0]).unwrap();
        let recorder = Recorder::start(target).unwrap();
        let before = Context::new("first").enter();
        assert!(allocator.allocate(30 * MIB + 1, &streams[1]).is_err());
        Context::new("second").enter();
        allocator.set_limit(Some(100 << 20));
        assert!(allocator.allocate(70 * MIB, &streams[0]).is_err());
        allocator.set_limit(None);
        assert!(allocator.allocate(300 * MIB, &streams[1]).is_err());
        before.enter();
        let bytes = match target {
            Target::Memory => {
                let mut bytes = Vec::new();
                recorder.write(&mut bytes).unwrap();
                bytes
            }
            _ => {
                recorder.finish().unwrap();
                std::fs::read(&path).unwrap()
            }
        };
        let recording = Recording::read(&bytes).unwrap();
        let events = own(&recording, &scene);
        let refused = |e: &&Event| matches!(e.action, Action::OutOfMemory { .. });
        let refused: Vec<&Event> = events.iter().filter(refused).collect();
        let handle = |e: &&Event| recording.streams()[e.stream as usize].handle;
        let handles: Vec<u64> = refused.iter().map(handle).collect();
        let [a, b] = streams.each_ref().map(|stream| stream.raw() as u64);
        assert_eq!(handles, [b, a, b]);
        assert!(refused.iter().all(|e| e.address == 0));
        let id = allocator.id() as u16;
        assert_eq!(recording.device_of(id), 1);
        assert_eq!(recording.device_memory_of(id), Some(256 << 20));
        assert_eq!(recording.limit_of(id), None);
        let limits: Vec<_> = events
            .iter()
            .filter_map(|e| match e.action {
                Action::Limit(limit) => Some((limit, e.bytes)),
                _ => None,
            })
            .collect();
        let limit = |mib: u64| (Some(mib << 20), 0);
        assert_eq!(limits, [limit(64), limit(100), (None, 0)]);
        let found = failed(&recording, &scene);
        let told: Vec<_> = found
            .iter()
            .map(|f| (f.bytes, f.cause, f.missing, f.limit, f.context.as_deref()))
            .collect();
        let mib = |mib: u64| Some(mib << 20);
        let expected = [
            (
                (30 << 20) + 1,
                Some(Cause::Limit),
                mib(8),
                mib(64),
                Some("first"),
            ),
            (
                70 << 20,
                Some(Cause::Limit),
                mib(10),
                mib(100),
                Some("second"),
            ),
            (
                300 << 20,
                Some(Cause::Device),
                mib(84),
                None,
                Some("second"),
            ),
        ];
        assert_eq!(told, expected);
        for one in &found {
            assert_eq!((one.device, one.device_memory), (1, Some(256 << 20)));
            assert_eq!(one.device_free, Some(216 << 20));
        }
        let advice = found[0].advice();
        assert!(
            advice.starts_with("Raise the limit by 8388608 bytes (8.00 MiB) to 75497472"),
            "{advice}"
        );
        drop(kept);
    }
}

/// A request that fails in a graph pool, and one of a stream that only the pool knows.
#[test]
fn a_request_that_fails_in_a_pool_is_recorded_with_its_stream() {
    let (_alone, scene, stream) = scene("policy=packed,limit=32MiB");
    let recorder = memory();
    let pool = scene.allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    assert!(scene.allocator.allocate(50 * MIB, &stream).is_err());
    drop(scope);
    let recording = recorder.read().unwrap();
    let events = own(&recording, &scene);
    let mut refused = events
        .iter()
        .filter(|e| matches!(e.action, Action::OutOfMemory { .. }));
    let event = refused.next().unwrap();
    assert_eq!(
        recording.streams()[event.stream as usize].handle,
        stream.raw() as u64
    );
    assert!(refused.next().is_none());
    let found = failed(&recording, &scene);
    assert_eq!(
        (found[0].cause, found[0].missing),
        (Some(Cause::Limit), Some(18 << 20))
    );
}

/// Rows of traces and entries of snapshots, which are read back.
#[test]
fn failed_requests_go_into_exports() {
    let _alone = alone();
    let scene = Scene::new("policy=packed,limit=64MiB");
    let streams = [scene.stream(), scene.stream()];
    let recorder = memory();
    let kept = scene.block(40 * MIB, &streams[0]);
    let before = Context::new("step;attention").enter();
    assert!(scene.allocator.allocate(48 * MIB, &streams[1]).is_err());
    before.enter();
    drop(kept);
    let recording = recorder.read().unwrap();
    let only = Some(scene.allocator.id() as u16);
    let trace = recording.to_trace("failed", only).unwrap();
    let row = |op, id, bytes, stream| Row {
        op,
        stream,
        id,
        bytes,
    };
    let rows = trace.rows();
    let of = |at: usize| rows[at].stream;
    assert_eq!(
        rows,
        [
            row(Op::Allocate, 0, 40 << 20, of(0)),
            row(Op::Oom, 0, 48 << 20, of(1)),
            row(Op::Free, 0, 0, of(0)),
        ]
    );
    assert_ne!(of(0), of(1));
    assert_eq!(trace.failed_requests().collect::<Vec<_>>(), [(1, 48 << 20)]);
    assert_eq!(
        (trace.requested_peak(), trace.required_peak()),
        (40 << 20, 88 << 20)
    );
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains(&format!("\noom,0,50331648,{}\n", of(1))),
        "{text}"
    );
    let snapshot = Snapshot::of(&recording);
    let free = failed(&recording, &scene)[0].device_free.unwrap();
    assert_eq!(free, (80 << 30) - (40 << 20));
    let json = snapshot.to_json();
    let entry = format!(
        "{{\"action\":\"oom\",\"device_free\":{free},\"size\":{},\"stream\":{}",
        48 << 20,
        streams[1].raw() as u64
    );
    assert!(json.contains(&entry), "{json}");
    let after = json.split(&entry).nth(1).unwrap();
    assert!(after[..200].contains("attention"), "{after}");
    for file in [json.into_bytes(), snapshot.to_pickle()] {
        let read = Snapshot::read(&file).unwrap();
        let failed = read.failed_requests(0);
        let told: Vec<_> = failed
            .iter()
            .map(|f| (f.bytes, f.device_free, f.cause))
            .collect();
        assert_eq!(told, [(48 << 20, Some(free), None)]);
        let trace = read.to_trace("again", 0).unwrap();
        assert_eq!(trace.failed_requests().count(), 1);
        assert_eq!(trace.required_peak(), 88 << 20);
    }
}

/// A recording need not say why a request failed and what was free, and no limits.
#[test]
fn failed_requests_without_a_cause_are_read() {
    let record = |kind: u64, at: u64, bytes: u64| [20, at | kind, bytes, 7 << 32 | 2 << 16 | 5];
    let records = [
        record(1, 4096, 3000),
        record(6, 0, 9000),
        // A cause that no version has, of another ring, and one whose request was lost.
        record(13, 512, 77),
        record(6, 1024, 10_000),
        record(13, 512, 1),
    ];
    let recording = Recording::read(&crate::recorded::recording(0, &[], records)).unwrap();
    let failed = recording.failed_requests(None);
    let told: Vec<_> = failed
        .iter()
        .map(|f| (f.bytes, f.cause, f.missing, f.device_free, f.limit))
        .collect();
    let unknown = (9000, None, None, None, None);
    assert_eq!(told, [unknown, (10_000, None, Some(512), Some(1024), None)]);
    assert_eq!(recording.device_memory_of(7), None);
    assert_eq!(recording.to_trace("old", None).unwrap().rows().len(), 3);
    assert!(failed[0].advice().is_empty());
    assert_eq!(failed[1].advice(), "The device had 1.00 KiB free.");
}
