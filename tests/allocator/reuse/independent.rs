//! Streams that the program does not order stay independent while memory is available.

use crate::common::prelude::*;
use cualloc::allocator::Waits;

/// Lengths on both sides of every border between small, large, viewed and huge blocks.
const SIZES: [usize; 7] = [512, 40 * KIB, 96 * KIB, MIB, 4 * MIB, 64 * MIB, GIB];

/// Why the memory that a request finds is pending on other streams.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// Allocated by the requesting stream, used by the other ones.
    Recorded,
    /// Allocated and freed by the other streams.
    Foreign,
    /// Pieces of both kinds beside each other, none long enough alone.
    Scattered,
}

const SHAPES: [Shape; 3] = [Shape::Recorded, Shape::Foreign, Shape::Scattered];

/// Leaves about `bytes` free that `others` may still use.
fn leave_pending(
    allocator: &Allocator,
    bytes: usize,
    (own, others): (&Stream, &[Stream]),
    shape: Shape,
) {
    let recorded = |bytes: usize| {
        let block = allocator.allocate(bytes, own).unwrap();
        for other in others {
            block.record_stream(other).unwrap();
        }
        block
    };
    let foreign = |bytes: usize, of: usize| {
        let owner = &others[of % others.len()];
        allocator.allocate(bytes, owner).unwrap()
    };
    let blocks: Vec<Block> = match shape {
        Shape::Recorded => vec![recorded(bytes)],
        Shape::Foreign => vec![foreign(bytes, 0)],
        Shape::Scattered => {
            let part = (bytes / 4).max(512);
            let pair = |n| [recorded(part), foreign(part, n)];
            (0..2).flat_map(pair).collect()
        }
    };
    drop(blocks);
}

fn settings(rig: &Rig, waits: Waits) -> [Config; 2] {
    let config = Config::new().waits(waits);
    // Markers of full batches alone, or of every stream that is asked.
    let watched = config.clone().capture_checks(true);
    [config, watched].map(|config| config.policy(rig.policy))
}

#[test]
fn a_request_is_not_ordered_behind_another_stream_while_the_device_has_memory() {
    each(|rig| {
        for (waits, bytes, shape, streams) in [Waits::Scarce, Waits::Never]
            .into_iter()
            .flat_map(|waits| SIZES.map(|bytes| (waits, bytes)))
            .flat_map(|(waits, bytes)| SHAPES.map(|shape| (waits, bytes, shape)))
            .flat_map(|(waits, bytes, shape)| [1, 3].map(|n| (waits, bytes, shape, n)))
        {
            for config in settings(rig, waits) {
                let (allocator, [main]) = rig.scene_with(config);
                let sides: [Stream; 3] = rig.streams();
                let sides = &sides[..streams];
                let holds: Vec<_> = sides.iter().map(|side| rig.hold(side)).collect();
                leave_pending(&allocator, bytes, (&main, sides), shape);
                let block = allocator.allocate(bytes, &main).unwrap();
                let stats = allocator.stats();
                let case = format!("{waits:?} {bytes} {shape:?} {streams}");
                assert_eq!(stats.reclaim.waited, 0, "{case}");
                assert_eq!(stats.stream_waits + stats.reclaim.host_waits, 0, "{case}");
                // The side streams wait for this work: it ends although they do not.
                rig.stamp(block.ptr(), bytes, 1, &main);
                main.synchronize().unwrap();
                assert!(!sides[0].is_complete().unwrap(), "{case}");
                for hold in holds {
                    hold.release();
                }
            }
        }
    });
}

#[test]
fn a_block_in_one_handle_comes_from_a_new_handle_before_a_wait() {
    only(Policy::Packed, |rig| {
        for (waits, waited) in [(Waits::Scarce, 0), (Waits::Never, 0), (Waits::Always, 1)] {
            let (allocator, [main, side]) = rig.scene_with(dense().waits(waits));
            let request = || Request::new(24 * MIB).single_handle();
            let hold = rig.hold(&side);
            let block = allocator.allocate_with(request(), &main).unwrap();
            block.record_stream(&side).unwrap();
            drop(block);
            let _block = allocator.allocate_with(request(), &main).unwrap();
            assert_eq!(allocator.stats().reclaim.waited, waited, "{waits:?}");
            hold.release();
        }
    });
}

#[test]
fn at_the_limit_the_setting_decides_whether_a_request_waits_or_fails() {
    each(|rig| {
        for bytes in [96 * KIB, 4 * MIB, 64 * MIB] {
            for waits in [Waits::Scarce, Waits::Always, Waits::Never] {
                let config = Config::new().waits(waits);
                let probe = rig.allocator_with(config.clone());
                let [main, side] = rig.streams();
                drop(probe.allocate(bytes, &main).unwrap());
                let limit = probe.stats().all.reserved.current;
                rig.close(&probe);

                let allocator = rig.checked_with(config.limit(Some(limit)));
                let hold = rig.busy(&side);
                // The whole limit is pending on the side stream.
                let fill = || {
                    let block = allocator.allocate(bytes, &main).ok()?;
                    block.record_stream(&side).unwrap();
                    Some(block)
                };
                let blocks: Vec<Block> = std::iter::from_fn(fill).collect();
                assert!(!blocks.is_empty());
                drop(blocks);
                let before = allocator.stats();
                let second = allocator.allocate(bytes, &main);
                let stats = allocator.stats();
                let waited = stats.stream_waits + stats.reclaim.host_waits
                    - (before.stream_waits + before.reclaim.host_waits);
                let synchronised = stats.reclaim.synchronised - before.reclaim.synchronised;
                let case = format!("{waits:?} {bytes}");
                match waits {
                    Waits::Never => {
                        // A wait of the host for the requesting stream itself is allowed.
                        assert_eq!(stats.stream_waits - before.stream_waits, 0, "{case}");
                        assert_eq!(synchronised, 0, "{case}");
                        if rig.maybe_sim().is_some() {
                            assert!(!side.is_complete().unwrap(), "{case}");
                        }
                        assert_matches!(second, Err(Error::OutOfMemory(_)), "{case}");
                    }
                    _ => {
                        assert!(waited > 0, "{case}");
                        assert!(second.is_ok(), "{case}");
                    }
                }
                hold.release();
                side.synchronize().unwrap();
                drop(second);
                // The failure cost nothing: the memory serves once the work is complete.
                drop(allocator.allocate(bytes, &main).unwrap());
            }
        }
    });
}

#[test]
fn memory_that_others_released_is_requested_before_a_wait() {
    for policy in [Policy::Packed, Policy::Classic] {
        only_simulated_on(
            policy,
            SimConfig::with_devices(1, GIB as u64),
            |rig, sim| {
                let (allocator, [main, side]) = rig.scene();
                let hold = rig.hold(&side);
                let pending = |bytes| {
                    let block = allocator.allocate(bytes, &main).unwrap();
                    block.record_stream(&side).unwrap();
                    drop(block);
                };
                pending(100 * MIB);
                // The driver refuses once, as it does when others hold the rest.
                let call = match rig.packed() {
                    true => "cuMemCreate",
                    false => "cuMemAlloc_v2",
                };
                let code = cualloc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
                sim.fail(FailPlan::call(call, code).unwrap().times(1));
                let _first = allocator.allocate(100 * MIB, &main).unwrap();
                let before = allocator.stats();
                // The refusal is known, but there is memory by now.
                let _second = allocator.allocate(100 * MIB, &main).unwrap();
                let after = allocator.stats();
                assert_eq!(after.stream_waits, before.stream_waits);
                assert!(after.all.reserved.current > before.all.reserved.current);
                hold.release();
            },
        );
    }
}
