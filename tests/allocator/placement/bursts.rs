//! One allocation maps at most 100 handles, now and then 300; what it creates instead is paid back.

use super::*;
use cualloc::Policy;

const MIB_2: u64 = 2 << 20;

/// An allocation of so many scattered handles.
fn take(allocator: &Allocator, handles: usize, stream: &Stream) -> Block {
    allocator.allocate(handles * 2 * MIB, stream).unwrap()
}

#[test]
fn a_token_pays_for_more_than_a_hundred_maps_and_without_one_the_rest_is_created() {
    only_on(Policy::Packed, large_device(), |rig| {
        let allocator = rig.checked_with(small_handles());
        let stream = rig.stream();
        let _kept = scatter(&allocator, &stream, 17 * 110);
        let held = allocator.stats().all.reserved.current;
        let mut blocks: Vec<Block> = Vec::new();
        for spent in 1..=16 {
            blocks.push(take(&allocator, 110, &stream));
            let bursts = allocator.stats().packing.bursts;
            assert_eq!(bursts.spent, spent);
            assert_eq!((bursts.cut, bursts.largest), (0, 110));
        }
        assert_eq!(allocator.stats().all.reserved.current, held);
        blocks.push(take(&allocator, 110, &stream));
        let bursts = allocator.stats().packing.bursts;
        assert_eq!((bursts.spent, bursts.cut, bursts.unbounded), (16, 1, 0));
        // The 90 largest free handles are mapped, and 10 are made.
        let grown = held + 20 * MIB_2;
        assert_eq!(allocator.stats().all.reserved.current, grown);
        let segments = allocator.segments_of(blocks[16].ptr(), blocks[16].size());
        assert_eq!(segments.unwrap().len(), 100);
        // An allocation of bearable size needs no token.
        drop(blocks.pop());
        assert_eq!(allocator.stats().packing.bursts.spent, 16);
        allocator.check().unwrap();
    });
}

#[test]
fn more_than_three_hundred_maps_are_never_made_at_once() {
    only_on(Policy::Packed, large_device(), |rig| {
        let allocator = rig.checked_with(small_handles());
        let stream = rig.stream();
        let _kept = scatter(&allocator, &stream, 320);
        let held = allocator.stats().all.reserved.current;
        let _block = take(&allocator, 320, &stream);
        let stats = allocator.stats();
        let bursts = stats.packing.bursts;
        assert_eq!((bursts.cut, bursts.spent), (1, 0));
        assert_eq!(stats.all.reserved.current, held + 230 * MIB_2);
    });
}

#[test]
fn near_the_limit_memory_wins_over_the_number_of_maps() {
    only_on(Policy::Packed, large_device(), |rig| {
        // Twice as much as would be held is far from the limit.
        for (limit, near) in [
            (1300 * MIB, true),
            (2 * 1740 * MIB, true),
            (2 * 1744 * MIB, false),
        ] {
            let allocator = rig.checked_with(small_handles().limit(Some(limit as u64)));
            let stream = rig.stream();
            let _kept = scatter(&allocator, &stream, 320);
            let held = allocator.stats().all.reserved.current;
            let _block = take(&allocator, 320, &stream);
            let stats = allocator.stats();
            let bursts = stats.packing.bursts;
            if near {
                assert_eq!((bursts.unbounded, bursts.cut, bursts.spent), (1, 0, 0));
                assert_eq!((bursts.largest, stats.all.reserved.current), (320, held));
            } else {
                assert_eq!((bursts.unbounded, bursts.cut, bursts.spent), (0, 1, 0));
            }
        }
    });
}

/// What lies beyond the soft cap goes back with later large allocations, 8 handles at a time, once
/// nobody can touch it any more.
#[test]
fn what_was_created_instead_is_paid_back_by_later_allocations() {
    only_on(Policy::Packed, large_device(), |rig| {
        let allocator = rig.checked_with(small_handles());
        let stream = rig.stream();
        let _kept = scatter(&allocator, &stream, 320);
        // What was freed before may still be in use.
        let hold = rig.hold(&stream);
        let _block = take(&allocator, 320, &stream);
        let stats = allocator.stats();
        let beyond = stats.all.reserved.current - stats.packing.soft_cap;
        assert_eq!(beyond, 230 * MIB_2 - (16 << 20));
        for _ in 0..20 {
            drop(allocator.allocate(MIB, &stream).unwrap());
        }
        assert_eq!(allocator.stats().packing.bursts.repaid, 0);
        hold.release();
        rig.settle(&stream);
        let mut before = 0;
        for _ in 0..60 {
            drop(allocator.allocate(MIB, &stream).unwrap());
            let repaid = allocator.stats().packing.bursts.repaid;
            assert!(repaid - before <= 8, "{before} to {repaid} at once");
            before = repaid;
            // Small requests repay nothing.
            drop(allocator.allocate(512, &stream).unwrap());
            assert_eq!(allocator.stats().packing.bursts.repaid, before);
        }
        let stats = allocator.stats();
        let bursts = stats.packing.bursts;
        // The first small request has added the arena of pages since.
        let owed = beyond + stats.small.reserved.current;
        assert_eq!((bursts.repaid, bursts.repaid_bytes), (owed / MIB_2, owed));
        let held = stats.all.reserved.current;
        assert!(held <= stats.packing.soft_cap && held + MIB_2 > stats.packing.soft_cap);
        allocator.check().unwrap();
    });
}
