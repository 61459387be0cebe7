//! External fragmentation, what streams keep from each other, and why memory grew.

use super::*;
use cualloc::allocator::GrowthReason;

#[test]
fn fragmentation_is_what_lies_outside_the_largest_run() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let mut blocks: Vec<Block> = allocator.allocate_blocks(10, 4 * MIB, &stream);
        assert_eq!(allocator.fragmentation().ratio(), 0.0);
        // Two free pieces side by side, one apart.
        for at in [7, 3, 2] {
            drop(blocks.remove(at));
        }
        let found = allocator.fragmentation();
        assert_eq!(
            (found.free, found.largest),
            (12 * MIB as u64, 8 * MIB as u64)
        );
        assert!(
            (found.ratio() - 1.0 / 3.0).abs() < 1e-9,
            "{}",
            found.ratio()
        );
        drop(blocks);
        assert_eq!(allocator.fragmentation().ratio(), 0.0);
    });
}

#[test]
fn stranded_bytes_are_reported_by_stream() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let _own = allocator.allocate(24 * MIB, &b).unwrap();
        let block = allocator.allocate(24 * MIB, &a).unwrap();
        let hold = rig.hold(&a);
        rig.stamp(block.ptr(), 24 * MIB, 1, &a);
        drop(block);
        let id = a.id().unwrap();
        let of = |stream_id| {
            let all = allocator.fragmentation().stranded;
            let found = all.into_iter().find(|s| s.stream_id == stream_id);
            found.map_or(0, |s| s.bytes)
        };
        assert_eq!(of(id), 24 * MIB as u64);
        if rig.packed() {
            // Pages belong to their stream, used or not.
            let small = allocator.allocate(1024, &a).unwrap();
            let page = 64 * KIB as u64;
            assert_eq!(of(id), 24 * MIB as u64 + page - 1024);
            drop(small);
        }
        hold.release();
        allocator.synchronize().unwrap();
        if rig.packed() {
            // Complete, so available to every stream.
            assert!(of(id) <= 64 * KIB as u64, "{}", of(id));
        }
    });
}

#[test]
fn the_last_growth_has_its_reason() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene_with(Config::new().handle(2 << 20));
        let last = || allocator.stats().packing.last_growth.unwrap();
        assert_eq!(allocator.stats().packing.last_growth, None);
        let _kept = scatter(&allocator, &a, 3);
        let short = last();
        assert_eq!((short.reason, short.added), (GrowthReason::Short, 2 << 20));
        // Three pieces of 2 MiB are free, none of 6; a request this small is grown for.
        let _block = allocator.allocate(6 * MIB, &a).unwrap();
        let unlocked = last();
        assert_eq!(unlocked.reason, GrowthReason::Fragmented);
        assert_eq!((unlocked.requested, unlocked.added), (6 << 20, 6 << 20));
        drop(allocator.allocate(MIB / 2, &b).unwrap());
        let hold = rig.hold(&a);
        let large = allocator.allocate(16 * MIB, &a).unwrap();
        rig.stamp(large.ptr(), 16 * MIB, 1, &a);
        drop(large);
        // The place that fits is still in use, and the cap allows more.
        let _other = allocator.allocate(16 * MIB, &b).unwrap();
        assert_eq!(last().reason, GrowthReason::Pending, "{:?}", last());
        hold.release();
    });
}

/// The place that lacks the fewest bytes is grown, not the lowest one.
#[test]
fn growth_adds_as_little_as_any_place_lacks() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let blocks = [2, 4, 2, 2].map(|mib| allocator.allocate(mib * MIB, &stream).unwrap());
        let [_low, gap, _wall, last] = blocks;
        drop(gap);
        assert_eq!(allocator.empty_cache().unwrap().released, 4 << 20);
        // The hole in the middle lacks 4 MiB, the end 2 MiB.
        let at = last.ptr();
        drop(last);
        let block = allocator.allocate(4 * MIB, &stream).unwrap();
        let growth = allocator.stats().packing.last_growth.unwrap();
        assert_eq!((block.ptr(), growth.added), (at, 2 << 20));
        assert_eq!(growth.reason, GrowthReason::Short);
    });
}

#[test]
fn bytes_in_views_are_counted_while_they_are_used() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let _kept = scatter(&allocator, &stream, 20);
        let block = allocator.allocate(39 * MIB, &stream).unwrap();
        let packing = allocator.stats().packing;
        let bytes = (packing.view_live, packing.view_bytes);
        assert_eq!(bytes, (39 * MIB as u64, 40 * MIB as u64));
        assert_eq!((packing.views, packing.view_maps), (1, 20));
        assert_eq!(allocator.fragmentation().view_live, 39 * MIB as u64);
        drop(block);
        let packing = allocator.stats().packing;
        assert_eq!((packing.view_live, packing.views), (0, 1));
    });
}
