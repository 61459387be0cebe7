//! Each way to run out of memory is named, and what is advised makes the request succeed: where a rig is used, also on
//! a GPU.

use crate::common::capturing::{captured, leave_work};
use crate::common::{RawStream, Rig, each, only};
use crate::scene::{MIB, Scene, alone};
use cualloc::Error;
use cualloc::allocator::{Allocator, Block, Config, Policy, Scope, Waits};
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
    assert!(line("held").is_some() && line("live").is_some(), "{report}");
    let headline = report.lines().next().unwrap();
    let figures = ["requested ", "live ", "bound ", "missing "];
    let named = format!("({})", cause.name());
    assert!(headline.contains(&named), "{headline}");
    assert!(figures.iter().all(|f| headline.contains(f)), "{headline}");
    let text = picture.to_string();
    assert!(text.starts_with(headline) && text.ends_with(&picture.advice()));
    assert!(!text.contains('\n'), "{text}");
    let json = picture.to_json();
    let cause = format!("\"cause\":\"{}\"", cause.name());
    assert!(json.contains(&cause), "{json}");
    for (name, bytes) in [
        ("requested", picture.requested),
        ("reserved", picture.reserved),
        ("live", picture.live()),
        ("missing", picture.missing()),
    ] {
        assert!(json.contains(&format!("\"{name}\":{bytes},")), "{json}");
    }
    let parsed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_value(picture).unwrap(), parsed);
}

/// The missing bytes that the first line of a text shows: what a person reads there.
pub fn shown_missing(text: &str) -> u64 {
    let headline = text.lines().next().unwrap();
    let (_, shown) = headline.split_once("missing ").unwrap();
    let (figure, rest) = shown.split_once(' ').unwrap();
    let unit = rest.trim_end_matches(|c: char| !c.is_alphabetic());
    let unit: String = unit.chars().take_while(|c| c.is_alphabetic()).collect();
    let unit = match unit.as_str() {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        _ => 1_073_741_824.0,
    };
    (figure.parse::<f64>().unwrap() * unit) as u64
}

/// Raises the limit by what the report shows as missing, and no more: the request succeeds.
pub fn raised(allocator: &Allocator, picture: &OutOfMemory, stream: &Stream) {
    let limit = picture.limit.unwrap();
    let missing = shown_missing(&picture.report());
    assert!(missing >= picture.missing() && missing > 0);
    let slack = missing - picture.missing();
    assert!(
        slack <= picture.missing() / 50 + 1,
        "{missing} of {}",
        picture.missing()
    );
    allocator.set_limit(Some(limit + missing));
    let served = allocator.allocate(picture.requested as usize, stream);
    drop(served.unwrap_or_else(|error| panic!("{error}, after {}", picture.report())));
    allocator.set_limit(Some(limit));
}

#[test]
fn a_limit() {
    let _alone = alone();
    each(|rig| {
        let (allocator, stream) = (rig.limited(64 * MIB), rig.stream());
        let kept = allocator.allocate(48 * MIB, &stream).unwrap();
        let picture = refused(&allocator, 32 * MIB, &stream);
        named(&picture, Cause::Limit);
        let need = picture.allocated + picture.requested;
        let advice = picture.advice();
        assert!(advice.contains(&format!("to {need} bytes")), "{advice}");
        assert_eq!(picture.missing(), 16 << 20);
        raised(&allocator, &picture, &stream);
        allocator.empty_cache().unwrap();
        allocator.set_limit(Some(need - 1));
        named(&refused(&allocator, 32 * MIB, &stream), Cause::Limit);
        drop(kept);
        rig.close(&allocator);
    });
}

#[test]
fn a_limit_that_cannot_be_raised_beside_other_programs() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "limit=32MiB");
    let stream = scene.stream();
    let (other, theirs) = scene.others(200 * MIB);
    let picture = refused(&scene.allocator, 120 * MIB, &stream);
    named(&picture, Cause::Limit);
    let (need, advice) = (120 * MIB, picture.advice());
    assert!(advice.contains(&format!("to {need} bytes")), "{advice}");
    assert!(advice.contains("Others hold"), "{advice}");
    // The first half of the advice is not enough.
    scene.allocator.set_limit(Some(need as u64));
    named(&refused(&scene.allocator, need, &stream), Cause::Others);
    drop(theirs);
    other.empty_cache().unwrap();
    drop(scene.block(need, &stream));
}

#[test]
fn others_on_the_device() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "");
    let stream = scene.stream();
    let (other, theirs) = scene.others(180 * MIB);
    let picture = refused(&scene.allocator, 120 * MIB, &stream);
    named(&picture, Cause::Others);
    assert!(
        picture.advice().contains("Others hold"),
        "{}",
        picture.advice()
    );
    assert_eq!(picture.others(), Some(180 * MIB as u64));
    assert_eq!(picture.missing(), 44 << 20);
    let text = picture.report();
    assert!(
        text.contains("bound 76.00 MiB (what others leave)"),
        "{text}"
    );
    assert!(text.contains("others hold 180.00 MiB"), "{text}");
    drop(theirs);
    other.empty_cache().unwrap();
    drop(scene.block(120 * MIB, &stream));
}

/// Live blocks of graph pools count as live, and against the limit.
#[test]
fn memory_of_graph_pools() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "limit=128MiB");
    let stream = scene.stream();
    let pool = scene.allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    let inside = scene.block(100 * MIB, &stream);
    drop(scope);
    let picture = refused(&scene.allocator, 64 * MIB, &stream);
    named(&picture, Cause::Limit);
    let held = scene.allocator.stats().graph_pools;
    assert_eq!(held, pool.footprint().unwrap().physical);
    assert_eq!((picture.graph_pools, picture.others()), (held, Some(0)));
    let need = held + 64 * MIB as u64;
    let advice = picture.advice();
    assert!(advice.contains(&format!("to {need} bytes")), "{advice}");
    assert_eq!(picture.live(), held);
    let text = picture.report();
    assert!(
        text.contains("100.00 MiB of what is held, 100.00 MiB of it live"),
        "{text}"
    );
    raised(&scene.allocator, &picture, &stream);
    drop(inside);
}

#[test]
fn pieces_between_live_blocks() {
    let _alone = alone();
    for policy in [Policy::Classic, Policy::Packed] {
        only(policy, |rig| {
            let (allocator, stream) = (rig.limited(64 * MIB), rig.stream());
            let mut blocks: Vec<Option<Block>> = (0..6)
                .map(|_| Some(allocator.allocate(8 * MIB, &stream).unwrap()))
                .collect();
            for block in blocks.iter_mut().step_by(2) {
                drop(block.take());
            }
            // The second does what the first advises.
            if policy == Policy::Classic {
                let picture = refused(&allocator, 24 * MIB, &stream);
                named(&picture, Cause::Fragmented);
                let advice = picture.advice();
                assert!(advice.contains("policy=packed"), "{advice}");
                let bounds = |ptr: u64| {
                    let mut holes = picture.holes.iter();
                    holes.any(|hole| hole.before == Some(ptr) || hole.after == Some(ptr))
                };
                assert!(blocks.iter().flatten().any(|block| bounds(block.ptr())));
            } else {
                drop(allocator.allocate(24 * MIB, &stream).unwrap());
            }
            drop(blocks);
            rig.close(&allocator);
        });
    }
}

#[test]
fn work_that_is_pending() {
    let _alone = alone();
    let rig = Rig::new(Policy::Packed, SimConfig::default());
    let allocator = rig.limited(6 * MIB);
    let (raw, other, capturing) = (RawStream::new(&rig), rig.stream(), rig.stream());
    leave_work(&allocator, &raw);
    // The stream is known, so it is queried before a wait for the whole context.
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

/// Work is the cause only where its end makes the request succeed.
#[test]
fn pending_work_that_does_not_help() {
    let _alone = alone();
    let rig = Rig::new(Policy::Packed, SimConfig::default());
    for others in [false, true] {
        let config = Config::new().limit(Some(64 << 20)).waits(Waits::Never);
        let allocator = rig.allocator_with(config);
        let (own, other) = (rig.stream(), rig.stream());
        let freed = allocator.allocate(30 * MIB, &own).unwrap();
        let elsewhere = others.then(|| allocator.allocate(30 * MIB, &other).unwrap());
        let held = [&own, &other].map(|stream| rig.busy(stream));
        drop((freed, elsewhere));
        // Freed memory that the stream may use already is what a larger request needs beside the new.
        let (bytes, cause) = match others {
            true => (40 * MIB, Cause::Pending),
            false => (66 * MIB, Cause::Limit),
        };
        named(&refused(&allocator, bytes, &own), cause);
        drop(held);
        allocator.synchronize().unwrap();
        assert_eq!(allocator.allocate(bytes, &own).is_ok(), others);
        rig.close(&allocator);
    }
    // Free memory on both sides of the end of a segment is no run.
    let rig = Rig::new(Policy::Classic, SimConfig::default());
    let config = Config::new().limit(Some(40 << 20)).waits(Waits::Never);
    let allocator = rig.allocator_with(config);
    let (own, other) = (rig.stream(), rig.stream());
    let mut blocks: Vec<Block> = (0..4)
        .map(|_| allocator.allocate(9 * MIB, &own).unwrap())
        .collect();
    let held = rig.busy(&other);
    for block in blocks.drain(1..3) {
        block.record_stream(&other).unwrap();
    }
    let picture = refused(&allocator, 16 * MIB, &own);
    if rig.maybe_sim().is_some() {
        assert!(picture.largest_run >= 16 << 20, "{picture}");
    }
    named(&picture, Cause::Limit);
    drop(held);
    allocator.synchronize().unwrap();
    refused(&allocator, 16 * MIB, &own);
}

#[test]
fn guards() {
    let _alone = alone();
    only(Policy::Packed, |rig| {
        let (allocator, stream) = (rig.limited(32 * MIB), rig.stream());
        let block = allocator.allocate(20 * MIB, &stream).unwrap();
        let guard = allocator.guard(block.ptr(), 20 << 20).unwrap();
        drop(block);
        let picture = refused(&allocator, 20 * MIB, &stream);
        named(&picture, Cause::Pools);
        assert!(picture.advice().contains("Drop the guards"));
        drop(guard);
        drop(allocator.allocate(20 * MIB, &stream).unwrap());
        // The guard keeps one piece of a run, which no request of that size fits in alone.
        let blocks = [8, 8, 8].map(|mib| allocator.allocate(mib * MIB, &stream).unwrap());
        let guard = allocator.guard(blocks[1].ptr(), 8 << 20).unwrap();
        drop(blocks);
        named(&refused(&allocator, 26 * MIB, &stream), Cause::Pools);
        drop(guard);
        drop(allocator.allocate(26 * MIB, &stream).unwrap());
        rig.close(&allocator);
    });
}

#[test]
fn more_than_the_device() {
    let _alone = alone();
    let scene = Scene::on(SimConfig::with_devices(1, 256 << 20), "");
    let stream = scene.stream();
    let kept = scene.block(100 * MIB, &stream);
    let picture = refused(&scene.allocator, 200 * MIB, &stream);
    named(&picture, Cause::Device);
    let advice = picture.advice();
    let words = "Free 44.00 MiB of what is live";
    assert!(advice.starts_with(words), "{advice}");
    drop(kept);
    drop(scene.block(200 * MIB, &stream));
    each(|rig| {
        let allocator = rig.allocator_with(Config::new());
        let stream = rig.stream();
        let memory = rig.context.device().total_memory().unwrap() as usize;
        let picture = refused(&allocator, memory + 512 * MIB, &stream);
        named(&picture, Cause::Device);
        drop(allocator.allocate(16 * MIB, &stream).unwrap());
        rig.close(&allocator);
    });
}
