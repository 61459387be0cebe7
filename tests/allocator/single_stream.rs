//! A single stream: large blocks are allocated and freed on a short path through the heap, with the same result as on
//! the long one.

use crate::common::prelude::*;

const LARGE: usize = 3 * MIB;

fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

/// Blocks side by side.
fn row<const N: usize>(allocator: &Allocator, stream: &Stream, mib: [usize; N]) -> [Block; N] {
    let whole = mib.iter().sum::<usize>() * MIB;
    drop(allocator.allocate(whole, stream).unwrap());
    let row = mib.map(|mib| allocator.allocate(mib * MIB, stream).unwrap());
    let next = |pair: &[Block]| pair[0].ptr() + pair[0].size() == pair[1].ptr();
    assert!(row.windows(2).all(next));
    row
}

/// R24: the last marker of a stream covers later frees on it, also while there is no other stream.
#[test]
fn r24_memory_freed_on_a_retired_stream_is_covered() {
    packed(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(4 * MIB);
        for others in [false, true] {
            let block = allocator.allocate(LARGE, &a).unwrap();
            allocator.retire(&a).unwrap();
            a.synchronize().unwrap();
            drop(block);
            let synchronised = rig.calls("cuCtxSynchronize");
            if others {
                drop(allocator.allocate(LARGE, &b).unwrap());
            } else {
                let trimmed = allocator.trim(0).unwrap();
                assert_eq!((trimmed.released, trimmed.pending), (4 * MIB as u64, 0));
            }
            assert_eq!(rig.calls("cuCtxSynchronize"), synchronised);
            assert_eq!(allocator.stats().streams, u64::from(others));
        }
    });
}

/// S3.29: memory that has been idle longest is released first, even if other idle memory lies higher.
#[test]
fn s3_29_memory_that_is_idle_longest_is_released_first() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let [low, _low_wall, high, _high_wall] = row(&allocator, &stream, [6, 2, 6, 2]);
        let (first, second) = (low.ptr(), high.ptr());
        drop(low);
        drop(high);
        let held = |ptr: u64| {
            let mut segments = allocator.snapshot().into_iter();
            segments.any(|s| s.address <= ptr && ptr < s.address + s.size)
        };
        assert!(held(first) && held(second));
        let trimmed = allocator.trim(6 * MIB as u64).unwrap();
        assert!(trimmed.released > 0);
        assert!(!held(first), "freed first");
        assert!(held(second), "freed last");
    });
}

/// S1.6: memory that was complete when its stream was retired is equal to any other in best fit.
#[test]
fn s1_6_memory_of_a_destroyed_stream_is_found() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (allocator, [gone, stream]) = rig.scene();
        drop(allocator.allocate(LARGE, &gone).unwrap());
        allocator.synchronize().unwrap();
        let [hole, _wall, rest, _end] = row(&allocator, &stream, [2, 2, 8, 2]);
        let place = hole.ptr();
        hole.record_stream(&gone).unwrap();
        drop((hole, rest));
        // The only stream is known to be idle, and nothing else is queried.
        let code = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED;
        sim.fail(FailPlan::call("cuEventQuery", code).unwrap().nth(2));
        allocator.trim(u64::MAX).unwrap_err();
        sim.clear_failures();
        allocator.retire(&gone).unwrap();
        assert_eq!(allocator.stats().streams, 1);
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        assert_eq!(block.ptr(), place, "the tightest place");
    });
}
