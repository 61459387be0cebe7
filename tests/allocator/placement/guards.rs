//! Guards keep memory in place, whichever call frees it.

use super::*;
use cualloc::Stats;
use cualloc::error::InvalidArgument;

fn guarded(stats: &Stats) -> u64 {
    stats.packing.guarded
}

#[test]
fn segments_cover_a_block_in_the_order_of_its_addresses() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let _before = allocator.allocate(3 * MIB + 512, &stream).unwrap();
        let blocks = [100, 70_000, 33 * MIB].map(|b| allocator.allocate(b, &stream).unwrap());
        for block in &blocks {
            let (from, bytes) = (block.ptr(), block.requested() as u64);
            for (from, bytes) in [(from, bytes), (from + bytes / 3, bytes / 2)] {
                let segments = allocator.segments_of(from, bytes).unwrap();
                let mut at = from;
                for segment in &segments {
                    assert_eq!(segment.address, at);
                    assert!(segment.offset + segment.bytes <= segment.handle_bytes);
                    assert_eq!(segment.handle.is_some(), rig.packed());
                    at += segment.bytes;
                }
                assert_eq!(at, from + bytes);
            }
            for bad in [(from, 0), (from, block.size() + 1), (from, u64::MAX)] {
                let refused = allocator.segments_of(bad.0, bad.1);
                assert_matches!(refused, Err(Error::Invalid(InvalidArgument::Range { .. })));
            }
        }
        assert_matches!(allocator.guard(64, 1), Err(Error::NotOurs { .. }));
        let free = blocks[2].ptr();
        drop(blocks);
        assert_matches!(allocator.guard(free, 1), Err(Error::NotLive { .. }));
    });
}

#[test]
fn a_block_freed_under_guards_stays_until_the_last_guard_is_dropped() {
    each(|rig| {
        for bytes in [512, 100 * KIB, 24 * MIB] {
            let (allocator, [stream]) = rig.scene();
            let block = allocator.allocate(bytes, &stream).unwrap();
            let (ptr, size) = (block.ptr(), block.size());
            let guards = [0, 1].map(|_| allocator.guard(ptr, 512).unwrap());
            let segments = guards[0].segments().to_vec();
            assert_eq!((guards[0].ptr(), guards[0].bytes()), (ptr, 512));
            drop(block);
            assert_matches!(allocator.raw_free(ptr), Err(Error::NotLive { .. }));
            for _ in 0..2 {
                let stats = allocator.stats();
                assert_eq!((guarded(&stats), stats.all.allocated.current), (size, 0));
                let other = allocator.allocate(bytes, &stream).unwrap();
                assert!(other.ptr() + other.size() <= ptr || ptr + size <= other.ptr());
                drop(other);
                allocator.synchronize().unwrap();
                allocator.trim(0).unwrap();
                allocator.check().unwrap();
                assert!(allocator.stats().all.reserved.current >= segments[0].handle_bytes);
                assert_matches!(allocator.close(), Err(Error::Guarded { .. }));
            }
            let [first, last] = guards;
            drop(first);
            assert_eq!(guarded(&allocator.stats()), size);
            drop(last);
            assert_eq!(guarded(&allocator.stats()), 0);
            allocator.check().unwrap();
            let next = allocator.allocate(bytes, &stream).unwrap();
            assert_eq!(next.ptr(), ptr);
        }
    });
}

/// R21: uses by other streams last until the block's free, not until the end of its guard.
#[test]
fn r21_a_guard_forgets_no_use_of_another_stream() {
    each(|rig| {
        const BLOCK: usize = 24 * MIB;
        let (allocator, [a, b, c]) = rig.scene();
        let block = allocator.allocate(BLOCK, &a).unwrap();
        let ptr = block.ptr();
        block.record_stream(&b).unwrap();
        let hold = rig.hold(&b);
        rig.stamp(ptr, BLOCK, 7, &b);
        let guard = allocator.guard(ptr, 512).unwrap();
        drop(block);
        drop(guard);
        allocator.check().unwrap();
        let other = allocator.allocate(BLOCK, &c).unwrap();
        // Elsewhere, or behind a wait: the stamps are in order.
        rig.stamp(other.ptr(), BLOCK, 8, &c);
        hold.release();
        assert_eq!(rig.mismatches(other.ptr(), BLOCK, 8, &c), 0);
    });
}

#[test]
fn a_view_stays_while_a_freed_block_in_it_is_guarded() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let kept = scatter(&allocator, &stream, 20);
        let block = allocator.allocate(40 * MIB, &stream).unwrap();
        let ptr = block.ptr();
        let guard = allocator.guard(ptr + 512, 39 * MIB as u64).unwrap();
        assert_eq!(guard.segments().len(), 20);
        drop(block);
        allocator.check().unwrap();
        drop(kept);
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        let stats = allocator.stats();
        assert_eq!((stats.packing.views, guarded(&stats)), (1, 40 * MIB as u64));
        // All memory except the guarded handles was released.
        assert_eq!(stats.large.reserved.current, 40 * MIB as u64);
        allocator.check().unwrap();
        // Their bytes are not usable at home either.
        let home = allocator.allocate(60 * MIB, &stream).unwrap();
        rig.stamp(home.ptr(), 60 * MIB, 1, &stream);
        rig.stamp(ptr, 40 * MIB, 2, &stream);
        assert_eq!(rig.mismatches(home.ptr(), 60 * MIB, 1, &stream), 0);
        drop((home, guard));
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().packing.views, 0);
    });
}

#[test]
fn a_guard_keeps_its_allocator_open() {
    each(|rig| {
        let allocator = rig.allocator();
        let block = allocator.allocate(4 * MIB, &rig.stream()).unwrap();
        let guard = allocator.guard(block.ptr(), 4 * MIB as u64).unwrap();
        drop((block, allocator));
        if let Some(held) = rig.driver_held() {
            assert!(held >= 4 * MIB as u64);
        }
        drop(guard);
        rig.assert_held(0);
    });
}
