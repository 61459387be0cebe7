//! The cause of an out-of-memory error, whatever share of the bound is live; and the number that it names as missing.

use crate::causes::{named, raised, refused};
use crate::common::capturing::{Capturing, MODE, captured};
use crate::common::rng::Rng;
use crate::common::{RawStream, Rig};
use crate::scene::{MIB, Scene, alone};
use cualloc::allocator::{Allocator, Block, Config, Policy, Scope, Waits};
use cualloc::driver::{Stream, sys};
use cualloc::error::Cause;
use cualloc::sim::{FailPlan, SimConfig};

/// What an allocator can have in each of these tests, by its limit or by its device.
const BOUND: usize = 200 * MIB;

const POLICIES: [Policy; 2] = [Policy::Packed, Policy::Classic];

/// Every tenth share up to `most` percent, in both policies, as bytes of the bound.
fn shares(most: usize, mut test: impl FnMut(Policy, usize)) {
    for policy in POLICIES {
        for percent in (10..=most).step_by(10) {
            test(policy, BOUND / 100 * percent);
        }
    }
}

fn device() -> SimConfig {
    SimConfig::with_devices(1, BOUND as u64)
}

/// The settings of a policy.
fn settings(policy: Policy) -> &'static str {
    match policy {
        Policy::Classic => "policy=classic",
        _ => "policy=packed",
    }
}

fn limited(settings: &str) -> Scene {
    Scene::new(&format!("{settings},limit={BOUND}"))
}

#[test]
fn a_limit_at_every_share() {
    let _alone = alone();
    shares(100, |policy, live| {
        let scene = limited(settings(policy));
        let stream = scene.stream();
        let kept = scene.block(live, &stream);
        for more in [512, 100_000, 2 * MIB, 30 * MIB] {
            let picture = refused(&scene.allocator, BOUND - live + more, &stream);
            named(&picture, Cause::Limit);
            raised(&scene.allocator, &picture, &stream);
            scene.allocator.empty_cache().unwrap();
        }
        drop(kept);
    });
}

#[test]
fn others_at_every_share() {
    let _alone = alone();
    shares(100, |policy, live| {
        let scene = Scene::on(
            SimConfig::with_devices(1, 2 * BOUND as u64),
            settings(policy),
        );
        let stream = scene.stream();
        let (other, theirs) = scene.others(BOUND);
        let kept = scene.block(live, &stream);
        let asked = BOUND - live + 12 * MIB;
        let picture = refused(&scene.allocator, asked, &stream);
        named(&picture, Cause::Others);
        assert_eq!(picture.missing(), 12 << 20);
        drop(theirs);
        other.empty_cache().unwrap();
        drop(scene.block(asked, &stream));
        drop(kept);
    });
}

/// Memory that CUDA itself uses on a device cannot be freed.
#[test]
fn the_device_at_every_share() {
    let _alone = alone();
    shares(100, |policy, live| {
        for own in [0, 8 * MIB] {
            let scene = Scene::on(device(), settings(policy));
            let stream = scene.stream();
            let other = Allocator::with_config(&scene.context, Config::new()).unwrap();
            let of_cuda = (own > 0).then(|| {
                other
                    .allocate(own, &other.create_stream().unwrap())
                    .unwrap()
            });
            let kept = scene.block(live - own, &stream);
            let asked = BOUND - live + 4 * MIB;
            let picture = refused(&scene.allocator, asked, &stream);
            named(&picture, Cause::Device);
            assert!(picture.missing() >= 4 << 20);
            drop((of_cuda, kept));
            other.empty_cache().unwrap();
            drop(scene.block(asked, &stream));
        }
    });
}

/// The driver refuses memory that it reports as free, below the limit and without one.
#[test]
fn a_refusal_at_every_share() {
    let _alone = alone();
    shares(90, |policy, live| {
        for limit in ["", ",limit=200MiB"] {
            let scene = Scene::on(device(), &format!("{}{limit}", settings(policy)));
            let stream = scene.stream();
            let kept = scene.block(live, &stream);
            let asked = (BOUND - live) / 2;
            let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            for call in ["cuMemCreate", "cuMemAlloc_v2"] {
                let plan = FailPlan::call(call, code).unwrap();
                scene.simulator.fail(plan.times(10_000));
            }
            let picture = refused(&scene.allocator, asked, &stream);
            scene.simulator.clear_failures();
            named(&picture, Cause::Refused);
            let advice = picture.advice();
            assert!(advice.contains("although it reports"), "{advice}");
            drop(scene.block(asked, &stream));
            drop(kept);
        }
    });
}

#[test]
fn refused_addresses_are_not_called_memory() {
    let _alone = alone();
    let device = SimConfig {
        address_space: 512 << 20,
        ..SimConfig::with_devices(1, 24 << 30)
    };
    let scene = Scene::on(device, "policy=packed");
    let stream = scene.stream();
    let picture = refused(&scene.allocator, 600 * MIB, &stream);
    named(&picture, Cause::Refused);
    let advice = picture.advice();
    assert!(
        advice.contains("refuses address space, not memory"),
        "{advice}"
    );
    // Where memory lacks, too, that is the cause.
    scene.allocator.set_limit(Some(100 << 20));
    named(&refused(&scene.allocator, 600 * MIB, &stream), Cause::Limit);
}

#[test]
fn pending_work_at_every_share() {
    let _alone = alone();
    shares(90, |policy, live| {
        let rig = Rig::new(policy, SimConfig::default());
        let allocator = rig.limited(BOUND);
        let (raw, other, capturing) = (RawStream::new(&rig), rig.stream(), rig.stream());
        let rest = BOUND - live;
        // SAFETY: the stream is alive, and nothing uses the block.
        unsafe {
            let ptr = allocator.allocate_raw(rest - 2 * MIB, raw.raw()).unwrap();
            allocator.free_raw(ptr).unwrap();
        }
        let kept = allocator.allocate(live, &other).unwrap();
        // Known, so that it is asked before anything waits for the whole context.
        drop(allocator.allocate(512, &capturing).unwrap());
        captured(&rig, capturing.raw(), || {
            let picture = refused(&allocator, rest - 2 * MIB, &other);
            named(&picture, Cause::Pending);
            let streams = &picture.pending;
            assert_eq!(streams[0].bytes, (rest - 2 * MIB) as u64);
        });
        allocator.synchronize().unwrap();
        drop(allocator.allocate(rest - 2 * MIB, &other).unwrap());
        drop(kept);
    });
}

/// Pending memory serves a request in handles that lie apart, and in a part of a handle.
#[test]
fn pending_memory_in_pieces() {
    let _alone = alone();
    let rig = Rig::new(Policy::Packed, SimConfig::default());
    let limited = |mib: usize| {
        let config = Config::new().policy(Policy::Packed).waits(Waits::Never);
        rig.allocator_with(config.limit(Some((mib * MIB) as u64)))
    };
    let [stream, other] = rig.streams();
    let allocator = limited(80);
    let mut blocks: Vec<Option<Block>> = (0..4)
        .map(|at| {
            Some(
                allocator
                    .allocate(20 * MIB, [&stream, &other][at % 2])
                    .unwrap(),
            )
        })
        .collect();
    let busy = rig.busy(&other);
    drop((blocks[1].take(), blocks[3].take()));
    named(&refused(&allocator, 40 * MIB, &stream), Cause::Pending);
    // More than what is pending does not come of it.
    named(&refused(&allocator, 60 * MIB, &stream), Cause::Limit);
    drop(busy);
    allocator.synchronize().unwrap();
    drop(allocator.allocate(40 * MIB, &stream).unwrap());

    let allocator = limited(2);
    let kept = allocator.allocate(MIB, &stream).unwrap();
    let freed = allocator.allocate(MIB, &other).unwrap();
    let busy = rig.busy(&other);
    drop(freed);
    named(&refused(&allocator, MIB, &stream), Cause::Pending);
    named(&refused(&allocator, MIB + 512, &stream), Cause::Limit);
    drop(busy);
    allocator.synchronize().unwrap();
    drop(allocator.allocate(MIB, &stream).unwrap());
    drop(kept);
}

/// Without waits freed memory of another stream is not to be had while its work is unfinished.
#[test]
fn unfinished_work_at_every_share_without_waits() {
    let _alone = alone();
    shares(90, |policy, live| {
        let rig = Rig::new(policy, SimConfig::default());
        let config = Config::new().waits(Waits::Never).limit(Some(BOUND as u64));
        let allocator = rig.allocator_with(config.policy(policy));
        let [stream, other] = rig.streams();
        let kept = allocator.allocate(live, &stream).unwrap();
        let freed = allocator.allocate(BOUND - live, &other).unwrap();
        let busy = rig.busy(&other);
        drop(freed);
        let picture = refused(&allocator, BOUND - live, &stream);
        named(&picture, Cause::Pending);
        let id = other.id().unwrap();
        assert!(picture.advice().contains(&format!("streams {id} ")));
        drop(busy);
        allocator.synchronize().unwrap();
        drop(allocator.allocate(BOUND - live, &stream).unwrap());
        drop(kept);
    });
}

#[test]
fn guards_at_every_share() {
    let _alone = alone();
    shares(90, |policy, live| {
        let scene = limited(settings(policy));
        let stream = scene.stream();
        let kept = scene.block(live, &stream);
        let rest = BOUND - live;
        let block = scene.block(rest, &stream);
        let guard = scene.allocator.guard(block.ptr(), rest as u64).unwrap();
        drop(block);
        let picture = refused(&scene.allocator, rest, &stream);
        named(&picture, Cause::Pools);
        drop(guard);
        drop(scene.block(rest, &stream));
        drop(kept);
    });
}

/// Memory that a graph was captured with stays with the pool, whether any block there is live or not.
#[test]
fn graph_pools_at_every_share() {
    let _alone = alone();
    for tenths in 1..=9 {
        let scene = limited("policy=packed");
        let (stream, capturing) = (scene.stream(), scene.stream());
        let rest = BOUND - BOUND / 10 * tenths;
        let pool = scene.allocator.graph_pool().unwrap();
        let scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&capturing, MODE);
        drop(scene.block(rest, &capturing));
        let graph = under_way.end().unwrap();
        scope.leave().unwrap();
        let kept = scene.block(BOUND - rest, &stream);
        let picture = refused(&scene.allocator, rest, &stream);
        named(&picture, Cause::Pools);
        assert!(picture.advice().contains("Release graph pools"));
        // Within the pool the graph's memory is what another capture may have.
        let scope = pool.enter(Scope::Thread).unwrap();
        named(&refused(&scene.allocator, 2 * BOUND, &stream), Cause::Limit);
        drop(graph);
        let part = scene.allocator.allocate(MIB, &stream).unwrap();
        drop(scope);
        // A pool with a live block returns nothing to the driver.
        named(&refused(&scene.allocator, rest, &stream), Cause::Limit);
        drop(part);
        pool.release().unwrap();
        drop(scene.block(rest, &stream));
        drop(kept);
    }
}

/// Fills the bound with blocks and keeps a share of each group of this size: no two neighbouring groups are wholly
/// free.
fn scattered(
    scene: &Scene,
    stream: &Stream,
    (bytes, group): (usize, usize),
    kept: usize,
) -> Vec<Block> {
    let mut blocks: Vec<Option<Block>> = (0..BOUND / bytes)
        .map(|_| Some(scene.block(bytes, stream)))
        .collect();
    for (at, block) in blocks.iter_mut().enumerate() {
        if at % group >= kept {
            drop(block.take());
        }
    }
    blocks.into_iter().flatten().collect()
}

/// Segments are held by a part of their blocks; packed memory serves the same request.
#[test]
fn scattered_memory_at_every_share_of_classic() {
    let _alone = alone();
    for tenths in 1..=9 {
        let program = |policy: &str| {
            let scene = limited(policy);
            let stream = scene.stream();
            let kept = scattered(&scene, &stream, (2 * MIB, 10), tenths);
            (scene, stream, kept)
        };
        let asked = (20 - 2 * tenths + 1).max(12) * MIB;
        let (scene, stream, kept) = program("policy=classic");
        let picture = refused(&scene.allocator, asked, &stream);
        named(&picture, Cause::Fragmented);
        assert!(picture.advice().contains("policy=packed"));
        raised(&scene.allocator, &picture, &stream);
        drop(kept);
        let (scene, stream, kept) = program("policy=packed");
        drop(scene.block(asked, &stream));
        drop(kept);
    }
}

/// Without views whole handles between live blocks are scattered, too; with views they serve the request.
#[test]
fn scattered_memory_at_every_share_without_views() {
    let _alone = alone();
    for tenths in 1..=9 {
        let program = |views: &str| {
            let scene = limited(&format!("policy=packed,tune.views={views}"));
            let stream = scene.stream();
            // Granted at one address after the other, with a live block behind each run of free ones.
            let kept = scattered(&scene, &stream, (MIB, 10), tenths);
            (scene, stream, kept)
        };
        let asked = 14 * MIB;
        let (scene, stream, kept) = program("off");
        let picture = scene.allocator.allocate(asked, &stream);
        let free = BOUND - kept.len() * MIB;
        if let Err(cualloc::Error::OutOfMemory(picture)) = picture {
            named(&picture, Cause::Fragmented);
            assert!(picture.advice().contains("tune.views=on"));
            raised(&scene.allocator, &picture, &stream);
        } else {
            // The holes had whole handles to give back.
            assert!(free >= 2 * asked, "{free}");
        }
    }
}

/// Pieces of handles that are held by a part of their blocks cannot be joined. They count as fragmentation up to nine
/// tenths of the bound, and beyond that the memory is simply full.
#[test]
fn pieces_of_handles_at_every_share() {
    let _alone = alone();
    for kept in 1..=15 {
        let scene = limited("policy=packed");
        let stream = scene.stream();
        let blocks = scattered(&scene, &stream, (128 << 10, 16), kept);
        let full = blocks.len() * (128 << 10) > BOUND / 10 * 9;
        let picture = refused(&scene.allocator, 4 * MIB, &stream);
        let cause = match full {
            true => Cause::Limit,
            false => Cause::Fragmented,
        };
        named(&picture, cause);
        raised(&scene.allocator, &picture, &stream);
        assert!(picture.advice().contains("limit"));
    }
}

/// A limit that blocks of one size nearly use up is the cause, although more is free than was asked for.
#[test]
fn memory_that_is_simply_full() {
    let _alone = alone();
    const BLOCK: usize = 640 << 10;
    for policy in POLICIES {
        for gap in [0, 7, 50] {
            let scene = Scene::new(&format!("{},limit=512MiB", settings(policy)));
            let stream = scene.stream();
            let mut blocks = Vec::new();
            let bytes = |at: usize| if at % 100 < gap { BLOCK - 9000 } else { BLOCK };
            while let Ok(block) = scene.allocator.allocate(bytes(blocks.len()), &stream) {
                blocks.push(block);
                assert!(blocks.len() < 1000);
            }
            let picture = refused(&scene.allocator, BLOCK, &stream);
            assert!(picture.live() > 475 << 20, "{}", picture.report());
            named(&picture, Cause::Limit);
            raised(&scene.allocator, &picture, &stream);
        }
    }
}

/// After random programs, too, the request succeeds once the limit is raised by what the report shows as missing.
#[test]
fn the_limit_raised_by_what_is_missing_serves_the_request() {
    let _alone = alone();
    let mut failures = 0;
    for seed in 1..=40 {
        for policy in [
            "policy=packed",
            "policy=packed,tune.views=off",
            "policy=classic",
        ] {
            let mut random = Rng::new(seed);
            let scene = Scene::new(&format!("{policy},limit=50348425"));
            let streams = [scene.stream(), scene.stream()];
            let mut live: Vec<Block> = Vec::new();
            for _ in 0..300 {
                let stream = &streams[random.index(2)];
                let bytes = match random.index(8) {
                    0 => 1 + random.index(60_000),
                    1..=5 => 1 + random.index(3 * MIB),
                    6 => 1 + random.index(12 * MIB),
                    _ => 1 + random.index(60 * MIB),
                };
                match scene.allocator.allocate(bytes, stream) {
                    Ok(block) => live.push(block),
                    Err(cualloc::Error::OutOfMemory(picture)) => {
                        failures += 1;
                        raised(&scene.allocator, &picture, stream);
                    }
                    Err(error) => panic!("{error}"),
                }
                if live.len() > 12 || random.below(3) == 0 {
                    let at = random.index(live.len().max(1));
                    if at < live.len() {
                        drop(live.swap_remove(at));
                    }
                }
            }
        }
    }
    assert!(failures > 1000, "{failures}");
}
