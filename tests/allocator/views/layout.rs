//! Placement of blocks in views.

use super::{PART, TWO, aliased, packed, scattered, view_of};
use crate::common::prelude::*;

/// R3, R61: scattered free memory serves a block larger than any piece, to the last byte.
#[test]
fn scattered_memory_serves_one_block() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let created = rig.calls("cuMemCreate");
        let block = allocator.allocate(TWO, &a).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        assert_eq!(allocator.stats().reclaim.stitched, 1);
        assert_eq!(aliased(&allocator), TWO as u64);
        rig.stamp(block.ptr(), TWO, 7, &a);
        // The byte that is left of the free parts is the last to be had.
        let rest = allocator.allocate(2 * PART - TWO, &a).unwrap();
        rig.stamp(rest.ptr(), 2 * PART - TWO, 8, &a);
        assert_matches!(allocator.allocate(MIB / 2, &a), Err(Error::OutOfMemory(_)));
        let all = allocator.stats().all;
        assert_eq!(all.allocated.current, all.reserved.current);
        assert_eq!(rig.calls("cuMemCreate"), created);
        assert_eq!(rig.mismatches(block.ptr(), TWO, 7, &a), 0);
        assert_eq!(rig.mismatches(rest.ptr(), 2 * PART - TWO, 8, &a), 0);
    });
}

/// A view is kept: the same request is served again without a driver call, and so is any other that finds contiguous
/// memory there.
#[test]
fn a_kept_view_serves_without_a_driver_call() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let first = allocator.allocate(TWO, &a).unwrap();
        let at = first.ptr();
        drop(first);
        let calls = rig.memory_calls();
        let again = allocator.allocate(TWO, &a).unwrap();
        assert_eq!(again.ptr(), at);
        drop(again);
        // Now the first of its bytes is taken at home.
        let taken = allocator.allocate(MIB, &a).unwrap();
        rig.stamp(taken.ptr(), MIB, 3, &a);
        let behind = allocator.allocate(TWO - MIB, &a).unwrap();
        assert_eq!(behind.ptr(), at + MIB as u64);
        rig.stamp(behind.ptr(), TWO - MIB, 4, &a);
        let stats = allocator.stats();
        assert_eq!((stats.reclaim.views, stats.reclaim.stitched), (2, 1));
        assert_eq!(rig.memory_calls(), calls);
        assert_eq!(rig.mismatches(taken.ptr(), MIB, 3, &a), 0);
        assert_eq!(rig.mismatches(behind.ptr(), TWO - MIB, 4, &a), 0);
    });
}

/// Several live blocks share a view, each with separate bytes.
#[test]
fn blocks_share_a_view() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 4, &a);
        let whole = allocator.allocate(17 * MIB, &a).unwrap();
        let (at, base) = (whole.ptr(), view_of(&allocator, &whole).unwrap());
        drop(whole);
        let calls = rig.memory_calls();
        let blocks = [6 * MIB, 7 * MIB].map(|bytes| allocator.allocate(bytes, &a).unwrap());
        assert_eq!(
            blocks.each_ref().map(|b| b.ptr()),
            [at, at + 6 * MIB as u64]
        );
        for (word, block) in (1..).zip(&blocks) {
            assert_eq!(view_of(&allocator, block), Some(base));
            rig.stamp(block.ptr(), block.requested(), word, &a);
        }
        let [first, second] = blocks;
        assert_eq!(rig.mismatches(first.ptr(), first.requested(), 1, &a), 0);
        drop(first);
        let first = allocator.allocate(6 * MIB, &a).unwrap();
        assert_eq!(first.ptr(), at);
        rig.stamp(at, 6 * MIB, 9, &a);
        assert_eq!(rig.mismatches(second.ptr(), second.requested(), 2, &a), 0);
        assert_eq!(rig.memory_calls(), calls);
    });
}

/// A block that lacks a few handles gets them behind a view's free end, also while the view's stream cache
/// is in use.
#[test]
fn a_view_is_extended() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 4, &a);
        let mapped = || rig.calls("cuMemMap");
        let first = allocator.allocate(TWO, &a).unwrap();
        let (at, base) = (first.ptr(), view_of(&allocator, &first).unwrap());
        drop(first);
        let before = mapped();
        let longer = allocator.allocate(TWO + 4 * MIB, &a).unwrap();
        assert_eq!((longer.ptr(), mapped() - before), (at, 2));
        rig.stamp(at, TWO + 4 * MIB, 1, &a);
        assert_eq!(rig.mismatches(at, TWO + 4 * MIB, 1, &a), 0);
        drop(longer);

        let cache = allocator.allocate(6 * MIB, &a).unwrap();
        rig.stamp(cache.ptr(), 6 * MIB, 2, &a);
        let before = mapped();
        // 7 MiB are open behind it, 4 more are scattered elsewhere.
        let back = allocator.allocate(11 * MIB, &a).unwrap();
        assert_eq!(cache.ptr(), at);
        assert_eq!((back.ptr(), mapped() - before), (at + 6 * MIB as u64, 2));
        assert_eq!(view_of(&allocator, &back), Some(base));
        rig.stamp(back.ptr(), 11 * MIB, 3, &a);
        assert_eq!(rig.mismatches(cache.ptr(), 6 * MIB, 2, &a), 0);
        assert_eq!(rig.mismatches(back.ptr(), 11 * MIB, 3, &a), 0);
    });
}

/// A long run is found again wherever it lies in a view, also in handles that were added to the view later. A view that
/// was removed is not searched.
#[test]
fn a_long_run_in_a_view_is_found_again() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 16, &a);
        let mapped = || rig.calls("cuMemMap");
        drop(allocator.allocate(36 * MIB, &a).unwrap());
        let before = mapped();
        let cache = allocator.allocate(36 * MIB, &a).unwrap();
        assert_eq!(mapped(), before, "the whole view");
        let back = allocator.allocate(29 * MIB, &a).unwrap();
        let base = view_of(&allocator, &cache);
        assert_eq!(view_of(&allocator, &back), base);
        assert!(mapped() > before);
        allocator.check().unwrap();
        drop(back);
        let before = mapped();
        let back = allocator.allocate(29 * MIB, &a).unwrap();
        assert_eq!((view_of(&allocator, &back), mapped()), (base, before));
        drop((cache, back));
        let all = allocator.allocate(65 * MIB, &a).unwrap();
        assert_eq!((view_of(&allocator, &all), mapped()), (base, before));
        rig.stamp(all.ptr(), 65 * MIB, 1, &a);
        assert_eq!(rig.mismatches(all.ptr(), 65 * MIB, 1, &a), 0);
        drop(all);
        assert!(allocator.trim(0).unwrap().released > 0);
        assert_eq!(allocator.stats().packing.views, 0);
        drop(allocator.allocate(36 * MIB, &a).unwrap());
    });
}

/// A block in a view has the requested alignment.
#[test]
fn blocks_in_views_are_aligned() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let first = allocator.allocate(TWO, &a).unwrap();
        drop(first);
        for align in [2 * MIB, MIB, 4 * KIB] {
            let request = Request::new(7 * MIB).align(align);
            let block = allocator.allocate_with(request, &a).unwrap();
            assert!(view_of(&allocator, &block).is_some());
            assert!(block.ptr().is_multiple_of(align as u64), "{align}");
            rig.stamp(block.ptr(), 7 * MIB, 5, &a);
            assert_eq!(rig.mismatches(block.ptr(), 7 * MIB, 5, &a), 0);
        }
    });
}

/// Without views, scattered memory is released, and obtained again in one piece.
#[test]
fn views_can_be_turned_off() {
    packed(|rig| {
        let a = rig.stream();
        let config = Config::new().views(false).limit(Some(4 * PART as u64));
        let allocator = rig.checked_with(config);
        let [_first, second, _third, fourth] =
            [(); 4].map(|()| allocator.allocate(PART, &a).unwrap());
        drop((second, fourth));
        let block = allocator.allocate(TWO, &a).unwrap();
        assert_eq!(view_of(&allocator, &block), None);
        let reclaim = allocator.stats().reclaim;
        assert_eq!((reclaim.views, reclaim.stitched), (0, 0));
        assert!(reclaim.released > 0);
    });
}
