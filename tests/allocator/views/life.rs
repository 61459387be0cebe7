//! The lifetime of views and of their handles.

use super::{PART, TWO, aliased, packed, rows, scattered, view_of};
use crate::common::prelude::*;
use crate::common::rng::Rng;

fn unmapped(rig: &Rig) -> u64 {
    rig.calls("cuMemUnmap")
}

/// A view that another stream still uses stays with its handles, even if its blocks were freed; once the host has
/// observed the stream's completion, both can be released.
#[test]
fn a_view_stays_while_another_stream_uses_it() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        block.record_stream(&b).unwrap();
        a.synchronize().unwrap();
        let hold = rig.hold(&b);
        rig.stamp(block.ptr(), TWO, 7, &b);
        drop(block);
        let before = unmapped(rig);
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!((trimmed.released, unmapped(rig)), (0, before));
        hold.release();
        b.synchronize().unwrap();
        let trimmed = allocator.trim(0).unwrap();
        // Whole handles in the free parts, and the view itself.
        assert_eq!(trimmed.released, (8 * MIB) as u64);
        assert_eq!(unmapped(rig), before + 4 + 1);
    });
}

/// A device-side wait allows the reuse of bytes, not the removal of a mapping: for that the host must have observed
/// completion.
#[test]
fn a_wait_on_the_device_does_not_end_a_view() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &b).unwrap();
        a.synchronize().unwrap();
        let hold = rig.hold(&b);
        rig.stamp(block.ptr(), TWO, 7, &b);
        drop(block);
        // The first stream takes all of it at home, behind waits, and is done with it by its heap.
        let parts = [PART, PART - MIB].map(|bytes| allocator.allocate(bytes, &a).unwrap());
        for part in &parts {
            assert_eq!(view_of(&allocator, part), None);
        }
        drop(parts);
        let before = unmapped(rig);
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!((trimmed.released, unmapped(rig)), (0, before));
        hold.release();
        a.synchronize().unwrap();
        b.synchronize().unwrap();
        assert_eq!(allocator.trim(0).unwrap().released, (8 * MIB) as u64);
    });
}

/// Memory of a live block in a view is not released, and keeps its contents.
#[test]
fn memory_of_a_live_block_in_a_view_is_not_released() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, kept) = scattered(rig, 4, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        rig.stamp(block.ptr(), TWO, 7, &a);
        a.synchronize().unwrap();
        allocator.synchronize().unwrap();
        // Two of the four free parts are aliased.
        assert_eq!(allocator.trim(0).unwrap().released, (8 * MIB) as u64);
        assert_eq!(aliased(&allocator), TWO as u64);
        assert_eq!(rig.mismatches(block.ptr(), TWO, 7, &a), 0);
        kept.assert_intact();
        drop(block);
        a.synchronize().unwrap();
        allocator.synchronize().unwrap();
        assert_eq!(allocator.trim(0).unwrap().released, (8 * MIB) as u64);
    });
}

/// At a limit idle views are unmapped if only their handles could be released.
#[test]
fn a_view_is_removed_for_memory_of_another_arena() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        let at = block.ptr();
        drop(block);
        a.synchronize().unwrap();
        allocator.synchronize().unwrap();
        let before = unmapped(rig);
        // Small blocks live in an arena of their own, which has no memory yet.
        let small = allocator.allocate(KIB, &a).unwrap();
        rig.stamp(small.ptr(), KIB, 5, &a);
        let stats = allocator.stats();
        assert!(stats.reclaim.released > 0);
        assert_eq!(stats.all.reserved.current, (4 * PART) as u64);
        // The view, and one handle.
        assert_eq!(unmapped(rig), before + 2);
        assert!(!allocator.owns(at));
        assert_eq!(rig.mismatches(small.ptr(), KIB, 5, &a), 0);
    });
}

/// Unused memory of the arena of small blocks is released for a stitch.
#[test]
fn r8_another_arena_is_released_for_a_stitch() {
    packed(|rig| {
        let a = rig.stream();
        let limit = 8 * PART + 2 * MIB;
        let allocator = rig.checked_limit(limit);
        drop(allocator.allocate(KIB, &a).unwrap());
        let _kept = rows(&allocator, &a, 4, PART);
        // All free handles are in one view, where a block keeps them from being given back.
        drop(allocator.allocate(17 * MIB, &a).unwrap());
        let cache = allocator.allocate(6 * MIB, &a).unwrap();
        rig.stamp(cache.ptr(), 6 * MIB, 1, &a);
        let block = allocator.allocate(12 * MIB, &a).unwrap();
        assert_eq!(view_of(&allocator, &block), view_of(&allocator, &cache));
        let stats = allocator.stats();
        assert_eq!(stats.all.reserved.current, limit as u64);
        assert_eq!(stats.small.reserved.current, 0);
        rig.stamp(block.ptr(), 12 * MIB, 2, &a);
        assert_eq!(rig.mismatches(cache.ptr(), 6 * MIB, 1, &a), 0);
    });
}

/// R8: a view in use is not unmapped for other requests, but free memory beside it serves small blocks, to the last
/// byte. Then a request fails and changes nothing.
#[test]
fn r8_a_view_in_use_stays_at_a_limit() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        rig.stamp(block.ptr(), TWO, 7, &a);
        a.synchronize().unwrap();
        let before = unmapped(rig);
        let left = 2 * PART - TWO;
        let small: Vec<_> = (0..left / (32 * KIB))
            .map(|_| allocator.allocate(32 * KIB, &a).unwrap())
            .collect();
        for (word, block) in (0..).zip(&small) {
            rig.stamp(block.ptr(), 32 * KIB, word, &a);
        }
        let all = allocator.stats().all;
        assert_eq!(all.allocated.current, all.reserved.current);
        assert_eq!(allocator.stats().ooms, 0);
        allocator.allocate(1, &a).unwrap_err();
        assert_eq!(allocator.stats().ooms, 1);
        assert_eq!(unmapped(rig), before);
        for (word, block) in (0..).zip(&small) {
            assert_eq!(rig.mismatches(block.ptr(), 32 * KIB, word, &a), 0);
        }
        assert_eq!(rig.mismatches(block.ptr(), TWO, 7, &a), 0);
    });
}

/// A trim that has nothing to release keeps views.
#[test]
fn a_trim_to_more_than_is_held_keeps_views() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        let at = block.ptr();
        drop(block);
        a.synchronize().unwrap();
        allocator.synchronize().unwrap();
        let calls = rig.memory_calls();
        allocator.trim(allocator.cached()).unwrap();
        assert_eq!(allocator.allocate(TWO, &a).unwrap().ptr(), at);
        assert_eq!(rig.memory_calls(), calls);
    });
}

/// A retired stream that used a view does not keep the view: its last marker is its last use.
#[test]
fn r24_a_retired_stream_does_not_keep_a_view() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        a.synchronize().unwrap();
        let gone = RawStream::new(rig);
        let borrowed = gone.borrowed();
        let hold = rig.hold(&borrowed);
        rig.stamp(block.ptr(), TWO, 7, &borrowed);
        allocator
            .raw_record_stream(block.ptr(), gone.raw())
            .unwrap();
        drop(block);
        allocator.raw_retire(gone.raw()).unwrap();
        let before = unmapped(rig);
        allocator.trim(0).unwrap();
        assert_eq!(unmapped(rig), before, "the stream still runs");
        hold.release();
        borrowed.synchronize().unwrap();
        drop(borrowed);
        gone.destroy();
        // Others may take its place in the heap.
        let others: [_; 3] = rig.streams();
        for other in &others {
            drop(allocator.allocate(KIB, other));
        }
        assert_eq!(allocator.trim(0).unwrap().released, (8 * MIB) as u64);
    });
}

/// A stream that is the only one gets markers if views take much address space, because no other call determines which
/// of them are idle. A marker that fails does not fail the request.
#[test]
fn a_stream_that_works_alone_is_marked_for_its_views() {
    for failing in [None, Some("cuEventRecord"), Some("cuEventQuery")] {
        only_on(
            Policy::Packed,
            SimConfig::with_devices(1, 24 << 20),
            |rig| {
                let Some(sim) = rig.sim() else { return };
                let (allocator, [stream]) = rig.scene_with(Config::new().headroom(0));
                if let Some(call) = failing {
                    let plan = FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
                    sim.fail(plan.times(u64::MAX));
                }
                let (mut rng, mut live) = (Rng::new(1), Vec::new());
                for _ in 0..3000 {
                    if !rng.chance(40) || live.is_empty() {
                        match allocator.allocate(1 + rng.index(10 * MIB), &stream) {
                            Ok(block) => {
                                live.push(block);
                                continue;
                            }
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                    }
                    drop(live.swap_remove(rng.index(live.len())));
                }
                assert!(rig.calls("cuEventRecord") > 0, "{failing:?}");
                sim.clear_failures();
            },
        );
    }
}
