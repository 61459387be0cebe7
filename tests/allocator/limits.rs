//! Behaviour when memory runs out, by limit or by device.

use crate::common::prelude::*;
use cualloc::allocator::{Regime, ReliefHook, Scarcity};
use cualloc::error::Cause;

/// R7: a request waits for memory that is pending on another stream before it fails.
#[test]
fn r7_pending_memory_is_reclaimed_before_out_of_memory() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a, b]) = rig.scene_limit(3 * BLOCK);
        let [x, _y, z] = [0, 1, 2].map(|_| allocator.allocate(BLOCK, &a).unwrap());
        let busy = rig.busy(&b);
        for block in [&x, &z] {
            rig.stamp(block.ptr(), BLOCK, 1, &b);
            block.record_stream(&b).unwrap();
        }
        // The remaining block in the middle separates the two.
        drop((x, z));
        let both = allocator.allocate(2 * BLOCK, &a).unwrap();
        rig.stamp(both.ptr(), 2 * BLOCK, 2, &a);
        let stats = allocator.stats();
        assert_eq!(
            (stats.ooms, stats.all.reserved.current),
            (0, 3 * BLOCK as u64)
        );
        if !rig.packed() {
            assert!(stats.reclaim.released > 0);
        }
        drop(busy);
        assert_eq!(rig.mismatches(both.ptr(), 2 * BLOCK, 2, &a), 0);
    });
}

/// R7: the same where the device is full, not the limit reached.
#[test]
fn r7_full_device_is_a_limit() {
    each_simulated_on(SimConfig::with_devices(1, 256 << 20), |rig, sim| {
        const BLOCK: usize = 100 * MIB;
        let (allocator, [a, b]) = rig.scene();
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &a).unwrap());
        let busy = rig.busy(&b);
        for block in &blocks {
            block.record_stream(&b).unwrap();
        }
        drop(blocks);
        let large = allocator.allocate(220 * MIB, &a).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.ooms, 0);
        drop((large, busy));
        // Another process takes memory: an error that says so, and later all is well.
        sim.take_memory(0, 200 << 20);
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        let picture = out_of_memory(allocator.allocate(BLOCK, &a).unwrap_err());
        assert_eq!(picture.cause(), Cause::Others);
        assert_eq!(picture.driver_free, Some(56 << 20));
        sim.take_memory(0, 0);
        drop(allocator.allocate(BLOCK, &a).unwrap());
    });
}

/// R8: a cap can be used to its last byte, also after it was used in smaller pieces.
#[test]
fn r8_whole_cap_is_usable() {
    each(|rig| {
        const CAP: usize = 2 * MIB;
        let (allocator, [stream]) = rig.scene_limit(CAP);
        for (bytes, size) in [(256, 512), (1024, 1024), (512, 512), (64 * KIB, 64 * KIB)] {
            let allocate = |_| match allocator.allocate(bytes, &stream) {
                Ok(block) => Some(block),
                Err(error) => {
                    assert!(error.is_out_of_memory());
                    None
                }
            };
            let live: Vec<_> = (0..=CAP / size).map_while(allocate).collect();
            assert_eq!(live.len() * size, CAP, "blocks of {bytes}");
            let stats = allocator.stats();
            assert_eq!(stats.all.allocated.current, CAP as u64);
            assert_eq!(stats.all.reserved.current, CAP as u64);
        }
    });
}

/// R9: the limit counts bytes held from the driver, neither requests nor rounded sizes.
#[test]
fn r9_the_limit_counts_bytes_from_the_driver() {
    each(|rig| {
        const LIMIT: usize = 64 * MIB;
        let allocator = rig.checked_limit(LIMIT);
        assert_eq!(allocator.limit(), Some(LIMIT as u64));
        let stream = rig.stream();
        let mut live: Vec<Block> = Vec::new();
        for step in 0..400usize {
            let bytes = 1 + step * 7919 % (5 * MIB);
            if let Ok(block) = allocator.allocate(bytes, &stream) {
                live.push(block);
            }
            let reserved = allocator.stats().all.reserved.current;
            assert!(reserved <= LIMIT as u64);
            rig.assert_held(reserved);
            if step % 3 == 0 {
                live.remove(0);
            }
        }
        assert!(allocator.stats().ooms > 0, "the limit was never reached");
        // A request that passes it by its rounding fails, one that just fits does not.
        live.clear();
        drop(allocator.allocate(LIMIT, &stream).unwrap());
        let picture = out_of_memory(allocator.allocate(LIMIT + 1, &stream).unwrap_err());
        assert_eq!(picture.limit, Some(LIMIT as u64));
        assert_eq!(picture.requested, LIMIT as u64 + 1);
        // It can be set while blocks live; what is above stays until it goes.
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        allocator.set_limit(Some(16 * MIB as u64));
        assert!(allocator.allocate(24 * MIB, &stream).is_err());
        allocator.set_limit(None);
        drop(allocator.allocate(2 * LIMIT, &stream).unwrap());
    });
}

/// R12: building an out-of-memory error cannot fail.
#[test]
fn r12_error_path_cannot_fail() {
    each_simulated(|rig, sim| {
        let (allocator, [stream]) = rig.scene_limit(16 * MIB);
        let kept = allocator.allocate(12 * MIB, &stream).unwrap();
        for name in ["cuMemGetInfo_v2", "cuThreadExchangeStreamCaptureMode"] {
            sim.fail(
                FailPlan::call(name, CUresult::CUDA_ERROR_NOT_SUPPORTED)
                    .unwrap()
                    .times(1000),
            );
            let result = allocator.allocate(32 * MIB, &stream);
            sim.clear_failures();
            let picture = out_of_memory(result.unwrap_err());
            assert_eq!(picture.allocated, 12 * MIB as u64, "{name}");
            if name == "cuMemGetInfo_v2" {
                assert_eq!((picture.driver_free, picture.driver_total), (None, None));
            }
            assert!(picture.to_string().contains("out of memory"));
            allocator.check().unwrap();
        }
        drop(kept);
        drop(allocator.allocate(16 * MIB, &stream).unwrap());
    });
}

/// R14: the error reports the request, the available memory, and what holds the rest.
#[test]
fn r14_error_reports_the_state_of_memory() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.limited(4 * BLOCK);
        let a = rig.stream();
        let mut kept = allocator.allocate_blocks(4, BLOCK, &a);
        drop(kept.remove(0));
        // Free memory, pinned or not, that does not suffice even with everything given back.
        let picture = out_of_memory(allocator.allocate(2 * BLOCK, &a).unwrap_err());
        assert_eq!(picture.device, 0);
        assert_eq!(picture.requested, 2 * BLOCK as u64);
        assert_eq!(picture.limit, Some(4 * BLOCK as u64));
        assert_eq!(picture.reserved, 4 * BLOCK as u64);
        assert_eq!(picture.allocated, 3 * BLOCK as u64);
        assert_eq!(picture.cached, BLOCK as u64);
        assert_eq!(picture.largest_free, BLOCK as u64);
        assert!(picture.driver_total >= picture.driver_free && picture.driver_free.is_some());
        drop(kept);
        // A small live block pins a large segment.
        let allocator = rig.limited(20 * MIB);
        let last = allocator.allocate_blocks(4, 5 * MIB, &a).pop().unwrap();
        let picture = out_of_memory(allocator.allocate(18 * MIB, &a).unwrap_err());
        let pinned = picture.pinned.first().expect("something pins memory");
        assert_eq!(pinned.block, last.ptr());
        assert!(pinned.live < pinned.bytes);
        let text = picture.report();
        for part in ["18.00 MiB", "20.00 MiB", "limit", "pinned"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    });
}

/// R1: after the waits for the work that holds all fitting memory, that memory serves the request without new memory.
#[test]
fn r1_memory_that_waits_made_free_is_found() {
    each(|rig| {
        // Too little for a marker of its own when it is freed, and half of what there is.
        const BLOCK: usize = MIB - 512;
        let (allocator, [a, b]) = rig.scene_limit(2 * MIB);
        let kept = allocator.allocate(MIB, &a).unwrap();
        let block = allocator.allocate(BLOCK, &b).unwrap();
        let ptr = block.ptr();
        let busy = rig.busy(&b);
        // An older marker of the stream, which the free comes after.
        kept.record_use(&b).unwrap();
        rig.stamp(ptr, BLOCK, 1, &b);
        drop(block);
        // Address space is no memory: a view may be thought of.
        let calls = || rig.memory_calls() - rig.calls("cuMemAddressReserve");
        let (made, before) = (calls(), allocator.stats());
        assert_eq!(before.markers, 1);
        let again = allocator.allocate(BLOCK, &a).unwrap();
        assert_eq!((again.ptr(), calls()), (ptr, made));
        let stats = allocator.stats();
        let released = before.reclaim.released;
        assert_eq!((stats.ooms, stats.reclaim.released), (0, released));
        // A GPU may be done by itself.
        if rig.maybe_sim().is_some() {
            assert_eq!(
                (stats.reclaim.host_waits, stats.reclaim.synchronised),
                (1, 1)
            );
            assert_eq!(stats.stream_waits, before.stream_waits);
        }
        rig.stamp(ptr, BLOCK, 2, &a);
        drop(busy);
        assert_eq!(rig.mismatches(ptr, BLOCK, 2, &a), 0);
    });
}

/// A request that can never succeed releases no cached memory, unless a hook might raise the limit.
#[test]
fn a_request_beyond_all_memory_fails_immediately() {
    each(|rig| {
        const BLOCK: usize = 6 * MIB;
        let (allocator, [stream, other]) = rig.scene_limit(4 * BLOCK);
        let warm = || drop([BLOCK, 4096].map(|bytes| allocator.allocate(bytes, &stream).unwrap()));
        warm();
        let (held, calls) = (allocator.stats().all.reserved.current, rig.memory_calls());
        let device = rig.context.device().total_memory().unwrap() as usize;
        for bytes in [4 * BLOCK + 1, device + 1, 1 << 40] {
            let picture = out_of_memory(allocator.allocate(bytes, &stream).unwrap_err());
            assert_eq!(picture.requested, bytes as u64);
        }
        warm();
        let stats = allocator.stats();
        assert_eq!(
            (stats.all.reserved.current, rig.memory_calls()),
            (held, calls)
        );
        assert_eq!(
            (stats.ooms, stats.reclaim.flushed, stats.reclaim.released),
            (3, 0, 0)
        );
        // Of a limit that was set below what is held this may be all that there is.
        allocator.set_limit(Some(MIB as u64));
        let busy = rig.busy(&stream);
        warm();
        drop(allocator.allocate(BLOCK, &other).unwrap());
        drop(busy);
        assert_eq!(allocator.stats().ooms, 3);
        allocator.set_limit(Some(4 * BLOCK as u64));
        let raised = allocator.clone();
        let raise = move |_| {
            raised.set_limit(Some(8 * BLOCK as u64));
            0
        };
        allocator.add_relief_hook(ReliefHook::new("raise", raise));
        drop(allocator.allocate(5 * BLOCK, &stream).unwrap());
        let picture = out_of_memory(allocator.allocate(device + 1, &stream).unwrap_err());
        assert_eq!(
            (picture.requested, allocator.stats().reclaim.hooks),
            (device as u64 + 1, 1)
        );
        allocator.remove_relief_hook("raise");
    });
}

/// S1.22
#[test]
fn s1_22_debug_text_names_the_figures() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let figures = |allocator: &Allocator| {
            let text = format!("{allocator:?}");
            ["device", "allocated", "peak", "cached"].map(|name| {
                let found = text
                    .split([' ', '{', '}'])
                    .skip_while(|word| *word != format!("{name}:"));
                let value = found.skip(1).find(|word| !word.is_empty());
                let value = value.unwrap_or_else(|| panic!("no {name} in {text}"));
                value.trim_end_matches(',').parse::<u64>().unwrap()
            })
        };
        assert_eq!(figures(&allocator), [0; 4]);
        let large = allocator.allocate(12 * MIB, &stream).unwrap();
        let small = allocator.allocate(1024, &stream).unwrap();
        let live = 12 * MIB as u64 + 1024;
        let reserved = allocator.stats().all.reserved.current;
        assert_eq!(figures(&allocator), [0, live, live, reserved - live]);
        drop(large);
        let cached = allocator.stats().all.reserved.current - 1024;
        assert!(cached >= 12 * MIB as u64);
        assert_eq!(figures(&allocator), [0, 1024, live, cached]);
        drop(small);
        rig.close(&allocator);
        assert_eq!(figures(&allocator), [0, 0, live, 0]);
    });
}

/// If addresses would have sufficed, the error names the driver's refusal of them.
#[test]
fn r14_error_names_the_failure_behind_it() {
    // So little that what was reserved at first has no room for a view.
    only_simulated_on(
        Policy::Packed,
        SimConfig::with_devices(1, 32 << 20),
        |rig, sim| {
            let (allocator, [stream]) = rig.scene_limit(26 * MIB);
            let mut kept: Vec<Block> = [5, 5, 5, 5, 6]
                .map(|mib| allocator.allocate(mib * MIB, &stream).unwrap())
                .into();
            kept.remove(3);
            kept.remove(1);
            stream.synchronize().unwrap();
            // The parts are not side by side, so a view is needed.
            let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
            sim.fail(
                FailPlan::call("cuMemAddressReserve", code)
                    .unwrap()
                    .times(1000),
            );
            let result = allocator.allocate(9 * MIB, &stream);
            sim.clear_failures();
            let picture = out_of_memory(result.unwrap_err());
            assert_eq!(picture.driver.map(|error| error.code()), Some(code));
            allocator.check().unwrap();
            drop(allocator.allocate(9 * MIB, &stream).unwrap());
        },
    );
}

/// R2: the release of memory that a failed growth left behind is retried before a request fails at a limit.
#[test]
fn r2_a_failed_release_is_repeated_at_a_limit() {
    each_simulated(|rig, sim| {
        if !rig.packed() {
            return;
        }
        let (allocator, [stream]) = rig.scene_limit(16 * MIB);
        let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
        for name in ["cuMemSetAccess", "cuMemUnmap"] {
            sim.fail(FailPlan::call(name, code).unwrap().times(1000));
        }
        assert!(allocator.allocate(12 * MIB, &stream).is_err());
        sim.clear_failures();
        allocator.check().unwrap();
        assert!(allocator.stats().all.reserved.current >= 12 * MIB as u64);
        drop(allocator.allocate(16 * MIB, &stream).unwrap());
    });
}

/// Growth for any request leaves the headroom free on the device, and the report names it.
#[test]
fn growth_leaves_the_headroom_of_the_device_free() {
    const HEADROOM: usize = 100 * MIB;
    each_simulated_on(SimConfig::with_devices(1, 1 << 30), |rig, sim| {
        let free = || rig.context.mem_info().unwrap().free as usize;
        let (allocator, [a]) = rig.scene_with(Config::new().headroom(HEADROOM as u64));
        let mut blocks = Vec::new();
        for bytes in [64 * MIB, 8 * MIB, 3 * MIB, 40 * KIB, 512] {
            let picture = loop {
                match allocator.allocate(bytes, &a) {
                    Ok(block) => blocks.push(block),
                    Err(error) => break out_of_memory(error),
                }
            };
            assert!(free() >= HEADROOM, "{} left", free());
            assert_eq!(picture.headroom, HEADROOM as u64);
            assert_eq!(picture.cause(), Cause::Device);
            assert!(picture.report().contains("headroom 100.00 MiB"));
        }
        assert!(free() < HEADROOM + 20 * MIB, "{} left", free());
        if rig.packed() {
            let regime = allocator.stats().packing.regime;
            assert_eq!(regime, Regime::Scarce(Scarcity::Device));
        }
        // Others may take it; then nothing grows, and nothing that is held is given back for it.
        let held = allocator.stats().all.reserved.current;
        sim.take_memory(0, 60 << 20);
        drop(blocks.remove(0));
        drop(allocator.allocate(64 * MIB, &a).unwrap());
        assert_eq!(allocator.stats().all.reserved.current, held);
    });
}

/// The default is 2 % of the device, and 0 if less than twice as much is free.
#[test]
fn a_device_filled_by_other_programs_has_no_headroom() {
    only_simulated_on(
        Policy::Packed,
        SimConfig::with_devices(1, 1000 << 20),
        |rig, _sim| {
            let headroom = || rig.checked().stats().headroom >> 20;
            assert_eq!(headroom(), 20);
            for (taken, expected) in [(960, 20), (961, 0)] {
                rig.sim().unwrap().take_memory(0, taken << 20);
                assert_eq!(headroom(), expected, "{taken} MiB taken");
            }
            let allocator = rig.checked();
            let _block = allocator.allocate(38 * MIB, &rig.stream()).unwrap();
        },
    );
}
