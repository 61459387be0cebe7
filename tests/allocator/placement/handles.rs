//! Blocks inside one physical handle, and blocks that must not lie in views.

use super::*;

fn segments(allocator: &Allocator, block: &Block) -> usize {
    let segments = allocator.segments_of(block.ptr(), block.size()).unwrap();
    segments.len()
}

#[test]
fn a_single_handle_holds_the_block_that_requests_it() {
    each(|rig| {
        let config = match rig.packed() {
            true => small_handles(),
            false => Config::new(),
        };
        let (allocator, [stream]) = rig.scene_with(config);
        let single = |bytes| Request::new(bytes).single_handle();
        let plain = allocator.allocate(20 * MIB, &stream).unwrap();
        assert_eq!(
            segments(&allocator, &plain),
            if rig.packed() { 10 } else { 1 }
        );
        drop(plain);
        let mut places = Vec::new();
        for bytes in [100, 200 * KIB, 3 * MIB, 20 * MIB, 20 * MIB] {
            let block = allocator.allocate_with(single(bytes), &stream).unwrap();
            assert_eq!(segments(&allocator, &block), 1, "{bytes} bytes");
            rig.stamp(block.ptr(), bytes, 3, &stream);
            places.push(block.ptr());
            allocator.check().unwrap();
        }
        // The handle that was made for the first is used again.
        assert_eq!(places[3], places[4]);
        let aligned = single(5 * MIB).align(1 << 20);
        let _small = allocator.allocate_with(single(9 * MIB), &stream).unwrap();
        let block = allocator.allocate_with(aligned, &stream).unwrap();
        assert!(block.ptr().is_multiple_of(1 << 20));
        assert_eq!(segments(&allocator, &block), 1);
    });
}

#[test]
fn a_single_handle_below_a_limit_takes_the_place_of_small_ones() {
    only(Policy::Packed, |rig| {
        let limit = 40 * MIB as u64;
        let (allocator, [stream]) = rig.scene_with(small_handles().limit(Some(limit)));
        drop(scatter(&allocator, &stream, 9));
        let single = |bytes| Request::new(bytes).single_handle();
        let block = allocator.allocate_with(single(32 * MIB), &stream).unwrap();
        assert_eq!(segments(&allocator, &block), 1);
        assert!(allocator.stats().all.reserved.peak <= limit);
        let error = allocator.allocate_with(single(32 * MIB), &stream);
        assert!(error.unwrap_err().is_out_of_memory());
    });
}

#[test]
fn a_single_handle_of_another_stream_is_waited_for() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene_with(small_handles().limit(Some(48 << 20)));
        let single = |bytes| Request::new(bytes).single_handle();
        let first = allocator.allocate_with(single(32 * MIB), &a).unwrap();
        drop(allocator.allocate(MIB, &b).unwrap());
        let hold = rig.hold(&a);
        rig.stamp(first.ptr(), 32 * MIB, 1, &a);
        let ptr = first.ptr();
        drop(first);
        let second = allocator.allocate_with(single(32 * MIB), &b).unwrap();
        assert_eq!(second.ptr(), ptr);
        rig.stamp(ptr, 32 * MIB, 2, &b);
        hold.release();
        assert_eq!(rig.mismatches(ptr, 32 * MIB, 2, &b), 0);
    });
}

#[test]
fn a_block_that_must_not_lie_in_a_view_costs_new_memory() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let _kept = scatter(&allocator, &stream, 20);
        let at_home = |bytes| Request::new(bytes).views(false);
        let block = allocator.allocate_with(at_home(40 * MIB), &stream).unwrap();
        let stats = allocator.stats();
        assert_eq!((stats.packing.views, stats.packing.view_live), (0, 0));
        assert_eq!(stats.all.reserved.current, 122 * MIB as u64);
        drop(block);
        let block = allocator.allocate(44 * MIB, &stream).unwrap();
        assert_eq!(allocator.stats().packing.view_live, 44 * MIB as u64);
        drop(block);
        // Nor does it take a view that is there.
        let _block = allocator.allocate_with(at_home(44 * MIB), &stream).unwrap();
        assert_eq!(allocator.stats().packing.view_live, 0);
    });
}
