//! How much memory a program makes the allocator hold.

use crate::common::*;
use cualloc::allocator::Policy;

/// S1.37: the second allocation of a size asks nothing of the driver.
#[test]
fn s1_37_reuse_makes_no_driver_call_for_memory() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
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
        rig.close(&allocator);
    });
}

/// R61: many freed blocks make room for fewer, larger ones.
#[test]
fn r61_freed_blocks_serve_larger_ones() {
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let small: Vec<_> = (0..8)
            .map(|_| allocator.allocate(16 * MIB, &stream).unwrap())
            .collect();
        assert_eq!(allocator.stats().all.reserved.current, 128 * MIB as u64);
        drop(small);
        let large: Vec<_> = (0..4)
            .map(|_| allocator.allocate(32 * MIB, &stream).unwrap())
            .collect();
        assert_eq!(allocator.stats().all.reserved.peak, 128 * MIB as u64);
        drop(large);
        rig.close(&allocator);
    });
}
