//! Each way to run out of memory is named, and what is advised makes the request succeed.

use crate::common::capturing::{captured, leave_work};
use crate::common::{RawStream, Rig};
use crate::scene::{MIB, Scene, alone};
use cualloc::Error;
use cualloc::allocator::{Allocator, Block, Config, Policy, Scope};
use cualloc::driver::Stream;
use cualloc::error::{Cause, OutOfMemory};
use cualloc::sim::SimConfig;

pub fn refused(allocator: &Allocator, bytes: usize, stream: &Stream) -> OutOfMemory {
    match allocator.allocate(bytes, stream) {
        Err(Error::OutOfMemory(picture)) => *picture,
        other => panic!("no refusal: {other:?}"),
    }
}

/// The picture names the cause in all its forms.
pub fn named(picture: &OutOfMemory, cause: Cause) {
    let report = picture.report();
    assert_eq!(picture.cause(), cause, "{report}");
    let line = |name: &str| {
        report
            .lines()
            .find(|line| line.trim_start().starts_with(name))
    };
    assert!(line("cause").unwrap().ends_with(cause.name()), "{report}");
    assert!(
        line("advice").unwrap().ends_with(&picture.advice()),
        "{report}"
    );
    assert!(
        line("asked for").is_some() && line("held").is_some(),
        "{report}"
    );
    let json = picture.to_json();
    assert!(
        json.contains(&format!("\"cause\":\"{}\"", cause.name())),
        "{json}"
    );
    let (requested, reserved) = (picture.requested, picture.reserved);
    assert!(
        json.contains(&format!("\"requested\":{requested},")),
        "{json}"
    );
    assert!(
        json.contains(&format!("\"reserved\":{reserved},")),
        "{json}"
    );
    assert_eq!(json.matches('{').count(), json.matches('}').count());
}

#[test]
fn a_limit() {
    let _alone = alone();
    let scene = Scene::new("limit=32MiB");
    let stream = scene.stream();
    let kept = scene.allocator.allocate(24 * MIB, &stream).unwrap();
    let picture = refused(&scene.allocator, 16 * MIB, &stream);
    named(&picture, Cause::Limit);
    let need: u64 = picture.allocated + picture.requested;
    assert!(picture.advice().contains(&format!("at least {need} bytes")));
    scene.allocator.set_limit(Some(need));
    drop(scene.allocator.allocate(16 * MIB, &stream).unwrap());
    drop(kept);
}

#[test]
fn a_limit_that_others_leave_no_room_to_raise() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "limit=32MiB");
    let stream = scene.stream();
    let other = Allocator::with_config(&scene.context, Config::new()).unwrap();
    let theirs = other
        .allocate(200 * MIB, &other.create_stream().unwrap())
        .unwrap();
    let picture = refused(&scene.allocator, 120 * MIB, &stream);
    named(&picture, Cause::Limit);
    let (need, advice) = (120 * MIB, picture.advice());
    assert!(
        advice.contains(&format!("at least {need} bytes")),
        "{advice}"
    );
    assert!(advice.contains("Others hold"), "{advice}");
    // The first half of the advice is not enough.
    scene.allocator.set_limit(Some(need as u64));
    named(&refused(&scene.allocator, need, &stream), Cause::Others);
    drop(theirs);
    other.empty_cache().unwrap();
    drop(scene.allocator.allocate(need, &stream).unwrap());
}

#[test]
fn others_on_the_device() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "");
    let stream = scene.stream();
    let other = Allocator::with_config(&scene.context, Config::new()).unwrap();
    let theirs = other
        .allocate(180 * MIB, &other.create_stream().unwrap())
        .unwrap();
    let picture = refused(&scene.allocator, 120 * MIB, &stream);
    named(&picture, Cause::Others);
    assert!(
        picture.advice().contains("Others hold"),
        "{}",
        picture.advice()
    );
    assert_eq!(picture.others(), Some(180 * MIB as u64));
    let text = picture.to_string();
    assert!(text.contains(", others hold 180.00 MiB"), "{text}");
    drop(theirs);
    other.empty_cache().unwrap();
    drop(scene.allocator.allocate(120 * MIB, &stream).unwrap());
}

/// What graph pools hold is the allocator's own, and counts in the limit.
#[test]
fn memory_of_graph_pools() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "limit=128MiB");
    let stream = scene.stream();
    let pool = scene.allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    let inside = scene.allocator.allocate(100 * MIB, &stream).unwrap();
    drop(scope);
    let picture = refused(&scene.allocator, 64 * MIB, &stream);
    named(&picture, Cause::Limit);
    let held = scene.allocator.stats().graph_pools;
    assert_eq!(held, pool.footprint().unwrap().physical);
    assert_eq!((picture.graph_pools, picture.others()), (held, Some(0)));
    let need = held + 64 * MIB as u64;
    let advice = picture.advice();
    assert!(
        advice.contains(&format!("at least {need} bytes")),
        "{advice}"
    );
    let text = picture.to_string();
    assert!(text.contains(", graph pools hold 100.00 MiB"), "{text}");
    assert!(!text.contains("others hold"), "{text}");
    scene.allocator.set_limit(Some(need));
    drop(scene.allocator.allocate(64 * MIB, &stream).unwrap());
    drop(inside);
}

#[test]
fn pieces_between_live_blocks() {
    let _alone = alone();
    let program = |settings: &str| {
        let scene = Scene::new(settings);
        let stream = scene.stream();
        let mut blocks: Vec<Option<Block>> = (0..6)
            .map(|_| Some(scene.allocator.allocate(8 * MIB, &stream).unwrap()))
            .collect();
        for block in blocks.iter_mut().step_by(2) {
            drop(block.take());
        }
        (scene, stream, blocks)
    };
    let (scene, stream, blocks) = program("policy=classic,limit=64MiB");
    let picture = refused(&scene.allocator, 24 * MIB, &stream);
    named(&picture, Cause::Fragmented);
    assert!(
        picture.advice().contains("policy=packed"),
        "{}",
        picture.advice()
    );
    assert!(!picture.holes.is_empty());
    let bounds = |ptr: u64| {
        let mut holes = picture.holes.iter();
        holes.any(|hole| hole.before == Some(ptr) || hole.after == Some(ptr))
    };
    assert!(blocks.iter().flatten().any(|block| bounds(block.ptr())));
    let (scene, stream, _blocks) = program("policy=packed,limit=64MiB");
    drop(scene.allocator.allocate(24 * MIB, &stream).unwrap());
}

#[test]
fn work_that_is_pending() {
    let _alone = alone();
    let rig = Rig::new(Policy::Packed, SimConfig::default());
    let allocator = rig.limited(6 * MIB);
    let (raw, other, capturing) = (RawStream::new(&rig), rig.stream(), rig.stream());
    leave_work(&allocator, &raw);
    // Known, so that it is asked before anybody waits for the whole context.
    drop(allocator.allocate(512, &capturing).unwrap());
    captured(&rig, capturing.raw(), || {
        let picture = refused(&allocator, 4 * MIB, &other);
        named(&picture, Cause::Pending);
        assert!(picture.report().contains("without a marker"));
        assert!(picture.advice().contains("end captures"));
    });
    allocator.synchronize().unwrap();
    drop(allocator.allocate(4 * MIB, &other).unwrap());
}

#[test]
fn guards() {
    let _alone = alone();
    let scene = Scene::new("policy=packed,limit=32MiB");
    let stream = scene.stream();
    let block = scene.allocator.allocate(20 * MIB, &stream).unwrap();
    let guard = scene.allocator.guard(block.ptr(), 20 << 20).unwrap();
    drop(block);
    let picture = refused(&scene.allocator, 20 * MIB, &stream);
    named(&picture, Cause::Guarded);
    drop(guard);
    drop(scene.allocator.allocate(20 * MIB, &stream).unwrap());
}

#[test]
fn more_than_the_device() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "");
    let stream = scene.stream();
    let kept = scene.allocator.allocate(100 * MIB, &stream).unwrap();
    let picture = refused(&scene.allocator, 200 * MIB, &stream);
    named(&picture, Cause::Device);
    assert!(picture.advice().contains("free what is live"));
    drop(kept);
    drop(scene.allocator.allocate(200 * MIB, &stream).unwrap());
}
