//! How much memory a program makes the allocator hold.

use crate::common::prelude::*;
use cualloc::allocator::Waits;
use cualloc::driver::Feature;

/// S1.37: the second allocation of a size makes no driver call.
#[test]
fn s1_37_reuse_makes_no_driver_call_for_memory() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        for bytes in [100, 4 * KIB, MIB, 3 * MIB, 40 * MIB] {
            let first = allocator.allocate(bytes, &stream).unwrap();
            let ptr = first.ptr();
            drop(first);
            let before = rig.memory_calls();
            assert!(before > 0, "memory comes from the driver");
            let hits = allocator.stats().hits;
            let second = allocator.allocate(bytes, &stream).unwrap();
            assert_eq!(rig.memory_calls(), before, "{bytes}");
            assert_eq!(allocator.stats().hits, hits + 1);
            assert_eq!(second.ptr(), ptr);
        }
    });
}

/// R61: many freed blocks make room for fewer, larger ones; inside pages, too, whose freed blocks are at first kept as
/// they are.
#[test]
fn r61_freed_blocks_serve_larger_ones() {
    only(Policy::Packed, |rig| {
        // A page: 1 to 15 granules of 512 bytes, and 8 more.
        let page = (1..16).chain([8]).map(|granules| granules * 512);
        let pages = (0..32).flat_map(|_| page.clone()).collect();
        for (small, count, large, held) in [
            (vec![16 * MIB; 8], 4, 32 * MIB, 128 * MIB as u64),
            (pages, 32, 64 * KIB, 2 * MIB as u64),
        ] {
            let (allocator, [stream]) = rig.scene();
            let allocate = |bytes| allocator.allocate(bytes, &stream).unwrap();
            let small: Vec<Block> = small.into_iter().map(allocate).collect();
            assert_eq!(allocator.stats().all.reserved.current, held);
            drop(small);
            let _large = allocator.allocate_blocks(count, large, &stream);
            assert_eq!(allocator.stats().all.reserved.peak, held);
        }
    });
}

/// The bytes that may be held for a peak of live requests: a hundredth more or 16 MiB, and the small arena.
fn bound(rig: &Rig, allocator: &cualloc::Allocator) -> u64 {
    assert!(rig.packed());
    let peak = allocator.stats().all.requested.peak;
    peak + (peak / 100).max((16 * MIB) as u64) + allocator.stats().small.reserved.peak
}

/// R3: requests of always different sizes, with survivors between them, hold no more memory than the peak of live
/// bytes.
#[test]
fn r3_changing_sizes_do_not_run_away() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene();
        let mut live: Vec<Block> = Vec::new();
        let mut survivors: Vec<Block> = Vec::new();
        for round in 0..100 {
            for step in 0..6 {
                let bytes = (20 + (round * 17 + step * 29) % 91) * MIB + round * 512;
                if live.len() == 4 {
                    drop(live.remove((round + step) % 4));
                }
                live.push(allocator.allocate(bytes, &stream).unwrap());
                if step == 3 {
                    survivors.push(allocator.allocate(MIB / 2, &stream).unwrap());
                }
            }
            if survivors.len() > 32 {
                drop(survivors.remove(round % 32));
            }
        }
        let held = allocator.stats().all.reserved.peak;
        let bound = bound(rig, &allocator);
        assert!(held <= bound, "{held} bytes held, {bound} are enough");
    });
}

/// R60: if memory is scarce, surviving small blocks prevent neither the release of the memory between them nor its use
/// for larger blocks.
#[test]
fn r60_small_survivors_pin_little() {
    only(Policy::Packed, |rig| {
        let (allocator, stream) = (rig.checked_with(dense()), rig.stream());
        let pair = |_| [64 * MIB, MIB].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
        let pairs: Vec<[Block; 2]> = (0..32).map(pair).collect();
        let _survivors: Vec<Block> = pairs.into_iter().map(|[_, small]| small).collect();
        stream.synchronize().unwrap();
        let large = allocator.allocate(160 * MIB, &stream).unwrap();
        assert!(allocator.stats().all.reserved.peak <= bound(rig, &allocator));
        drop(large);
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        // A survivor of 1 MiB lies in one handle of 2 MiB, or across the border of two.
        let held = allocator.stats().all.reserved.current;
        assert!(held <= 32 * 2 * 2 * MIB as u64, "{held} bytes are pinned");
    });
}

/// R63: memory that was split for one stream is available to another one, merged, once the first has finished with it.
#[test]
fn r63_split_memory_is_not_its_streams_for_ever() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene_limit(GIB);
        // Known from the start, so that frees are marked.
        drop(allocator.allocate(MIB, &b).unwrap());
        b.synchronize().unwrap();
        drop(allocator.allocate_blocks(64, 16 * MIB, &a));
        a.synchronize().unwrap();
        // The stream continues to use a small part of it.
        let kept = allocator.allocate_blocks(4, 512 * KIB, &a);
        let hold = rig.hold(&a);
        rig.stamp(kept[0].ptr(), 512 * KIB, 9, &a);
        let calls = || (rig.memory_calls(), rig.calls("cuStreamWaitEvent"));
        let before = calls();
        let theirs = allocator.allocate(GIB - 4 * MIB, &b).unwrap();
        rig.stamp(theirs.ptr(), GIB - 4 * MIB, 3, &b);
        rig.settle(&b);
        assert_eq!(calls(), before);
        hold.release();
    });
}

/// R36: three streams that pass on blocks hold hardly more than the live bytes, if they may wait for each other.
#[test]
fn r36_a_pipeline_of_streams_holds_little() {
    only(Policy::Packed, |rig| {
        let (allocator, [load, compute, store]) =
            rig.scene_with(Config::new().waits(Waits::Always));
        let follow = |after: &Stream, before: &Stream| {
            let event = rig.context.enter().unwrap().create_event().unwrap();
            event.record(before).unwrap();
            after.wait(&event).unwrap();
        };
        rig.set_mode(Mode::Lag(3));
        let mut results: Vec<Block> = Vec::new();
        for round in 0..200 {
            let bytes = (64 + round * 7 % 13) * MIB;
            let batch = allocator.allocate(bytes, &load).unwrap();
            rig.stamp(batch.ptr(), bytes, 1, &load);
            follow(&compute, &load);
            let work = allocator.allocate(2 * bytes, &compute).unwrap();
            let result = allocator.allocate(bytes / 2, &compute).unwrap();
            for block in [&batch, &work, &result] {
                rig.stamp(block.ptr(), MIB, 2, &compute);
            }
            batch.record_use(&compute).unwrap();
            drop((batch, work));
            follow(&store, &compute);
            rig.stamp(result.ptr(), MIB, 3, &store);
            result.record_use(&store).unwrap();
            results.push(result);
            if results.len() > 4 {
                drop(results.remove(0));
            }
            rig.advance_row();
        }
        let all = allocator.stats().all;
        let (held, live) = (all.reserved.peak, all.requested.peak);
        assert!(held * 10 <= live * 11, "{held} bytes held for {live} live");
    });
}

/// R47: a block of one allocator does not keep its cached memory from another allocator of the
/// device.
#[test]
fn r47_a_live_block_strands_no_memory() {
    const MEMORY: u64 = 1 << 30;
    only_simulated_on(
        Policy::Packed,
        SimConfig::with_devices(1, MEMORY),
        |rig, _| {
            let [first, second] = [(); 2].map(|()| rig.allocator());
            let stream = rig.stream();
            let large = first.allocate(900 * MIB, &stream).unwrap();
            let small = first.allocate(MIB, &stream).unwrap();
            rig.stamp(small.ptr(), MIB, 5, &stream);
            drop(large);
            stream.synchronize().unwrap();
            let other = first.clone();
            second.add_relief_hook(cualloc::allocator::ReliefHook::new(
                "the other",
                move |_| other.trim(0).map_or(0, |trimmed| trimmed.released),
            ));
            let theirs = second.allocate(1000 * MIB, &stream).unwrap();
            assert!(first.stats().all.reserved.current <= 4 << 20);
            rig.stamp(theirs.ptr(), 1000 * MIB, 6, &stream);
            assert_eq!(rig.mismatches(small.ptr(), MIB, 5, &stream), 0);
            drop((theirs, small));
            first.close().unwrap();
            second.close().unwrap();
        },
    );
}

/// R19: every handle of a block can be exported, without being asked for when it was allocated.
#[test]
#[cfg(unix)]
fn r19_packed_memory_is_exportable() {
    only(Policy::Packed, |rig| {
        if !rig.driver.has(Feature::HandleFromAddress) || !rig.driver.has(Feature::VmmExport) {
            return eprintln!("SKIPPED: the driver cannot export handles");
        }
        let (allocator, [stream]) = rig.scene();
        for bytes in [KIB, 30 * MIB] {
            let block = allocator.allocate(bytes, &stream).unwrap();
            let entered = rig.context.enter().unwrap();
            for offset in (0..bytes as u64).step_by(2 * MIB) {
                let handle = entered.retain_handle(block.ptr() + offset).unwrap();
                // SAFETY: the handle was retained just now, and is released once.
                unsafe {
                    entered.export_fd(handle).unwrap();
                    entered.mem_release(handle).unwrap();
                }
            }
        }
    });
}
