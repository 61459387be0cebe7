//! Memory of graph pools in recordings.

use crate::common::capturing::{Capturing, MODE};
use crate::recorder::{blocks, live};
use crate::scene::{MIB, Scene, alone, memory};
use cualloc::allocator::{Allocator, GraphPool, Scope};
use cualloc::driver::{Graph, Stream};
use cualloc::record::{Action, Recording, Snapshot};

/// Bytes that came from the driver less those that went back, by a recording.
fn held(recording: &Recording, allocator: &Allocator) -> u64 {
    let own = recording.events().iter();
    let own = own.filter(|event| u64::from(event.allocator) == allocator.id());
    let signed = own.map(|event| match event.action {
        Action::Map { .. } => event.bytes as i64,
        Action::Unmap { .. } => -(event.bytes as i64),
        _ => 0,
    });
    signed.sum::<i64>() as u64
}

/// A graph in which two blocks are used one after the other, and one is left.
fn captured(allocator: &Allocator, pool: &GraphPool, stream: &Stream) -> (Graph, Vec<u64>) {
    let scope = pool.enter(Scope::NextCapture).unwrap();
    let under_way = Capturing::begin(stream, MODE);
    let mut at = Vec::new();
    for bytes in [3 * MIB, 100_000] {
        let block = allocator.allocate(bytes, stream).unwrap();
        at.push(block.ptr());
    }
    let graph = under_way.end().unwrap();
    scope.leave().unwrap();
    (graph, at)
}

#[test]
fn memory_of_graph_pools_is_recorded_from_its_first_byte_to_its_last() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let allocator = &scene.allocator;
    let (stream, other) = (scene.stream(), scene.stream());
    let pool = allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    let before = allocator.allocate(5 * MIB, &stream).unwrap();
    scope.leave().unwrap();
    let recorder = memory();
    let (graph, addresses) = captured(allocator, &pool, &other);
    let recording = recorder.read().unwrap();
    let events = blocks(&recording, &scene);
    let kinds = [Action::Held, Action::Allocate, Action::Free];
    let counts = kinds.map(|kind| events.iter().filter(|e| e.action == kind).count());
    assert_eq!(counts, [1, 2, 2], "{events:?}");
    assert!(events[1..].iter().all(|e| addresses.contains(&e.address)));
    let handle = |stream: u32| recording.streams()[stream as usize].handle;
    assert_eq!(handle(events[1].stream), other.raw() as u64);
    assert_eq!(handle(events[0].stream), stream.raw() as u64);
    let now = live(&events);
    assert_eq!(
        now.into_iter().collect::<Vec<_>>(),
        [(before.ptr(), 5 * MIB as u64)]
    );
    let footprint = pool.footprint().unwrap();
    assert_eq!(held(&recording, allocator), footprint.physical);
    // Live blocks lie in held memory, as viewers of snapshots require.
    let snapshot = Snapshot::of(&recording);
    let json = snapshot.to_json();
    assert!(
        json.contains(&format!("\"address\":{}", before.ptr())),
        "{json}"
    );
    let own = Some(allocator.id() as u16);
    assert_eq!(recording.to_trace("pools", own).unwrap().rows().len(), 5);
    // A request that finds no memory in the pool is recorded, too.
    let scope = pool.enter(Scope::Thread).unwrap();
    assert!(allocator.allocate(1 << 37, &stream).is_err());
    drop((scope, before));
    drop(graph);
    pool.release().unwrap();
    allocator.empty_cache().unwrap();
    let recording = recorder.read().unwrap();
    let refused = |e: &&cualloc::record::Event| matches!(e.action, Action::OutOfMemory { .. });
    assert_eq!(recording.events().iter().filter(refused).count(), 1);
    assert!(live(&blocks(&recording, &scene)).is_empty());
    assert_eq!(held(&recording, allocator), 0);
    assert_eq!(allocator.stats().graph_pools, 0);
}

#[test]
fn streams_known_only_to_pools_are_distinguished() {
    let _alone = alone();
    let scene = Scene::new("policy=packed");
    let pool = scene.allocator.graph_pool().unwrap();
    let streams = [scene.stream(), scene.stream()];
    let recorder = memory();
    for _ in 0..3 {
        for stream in &streams {
            drop(captured(&scene.allocator, &pool, stream));
        }
    }
    let recording = recorder.read().unwrap();
    let events = blocks(&recording, &scene);
    let mut handles = events.iter().filter(|e| e.action == Action::Allocate);
    let expected = streams.iter().map(|stream| stream.raw() as u64);
    let expected = expected.cycle().flat_map(|handle| [handle; 2]);
    let handle = |stream: u32| recording.streams()[stream as usize].handle;
    assert_eq!(handles.clone().count(), 12);
    assert!(
        handles
            .by_ref()
            .map(|e| handle(e.stream))
            .eq(expected.take(12))
    );
    let own = recording.streams().iter();
    let own = own.filter(|stream| u64::from(stream.allocator) == scene.allocator.id());
    assert_eq!(own.count(), streams.len());
}
