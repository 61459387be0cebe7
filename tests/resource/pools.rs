//! Behaviour of pools beyond the common suite.

use std::sync::Arc;

use cualloc::pool::*;
use cualloc::resource::*;
use cualloc::{DeviceBuffer, Error};

use crate::common::*;
use crate::suite::{native, threshold, typed};
use crate::{held, take};

/// A block of one pool is nothing to another, and stays what it was.
#[test]
fn s1_44_pools_refuse_foreign_blocks() {
    each(|rig| {
        let pools: Vec<Arc<dyn MemoryResource>> = vec![
            Arc::new(typed(rig)),
            Arc::new(threshold(rig)),
            Arc::new(native(rig)),
            Arc::new(native(rig)),
            Arc::new(WorkspacePool::new(&rig.allocator())),
            Arc::new(WorkspacePool::exact(&rig.allocator())),
        ];
        let stream = rig.stream();
        // All of them are at their first block.
        let blocks: Vec<_> = pools
            .iter()
            .map(|pool| take(&pool, 1000, &stream))
            .collect();
        for (at, (mine, mut block)) in pools.iter().zip(blocks).enumerate() {
            let id = block.id();
            let others = pools.iter().enumerate().filter(|(n, _)| *n != at);
            for (_, other) in others {
                let live = held(&other);
                let refused = other.deallocate_block(block).unwrap_err();
                assert_matches!(refused.error, Error::UseAfterFree { .. });
                block = *refused.value;
                assert_eq!((other.state(&id), held(&other)), (BlockState::Free, live));
                assert!(other.record_use(&id, &stream).is_err());
            }
            assert_eq!(mine.state(&id), BlockState::Live);
            mine.deallocate_block(block).unwrap();
            assert_eq!(mine.state(&id), BlockState::Free);
        }
    });
}

/// The typed pool gives a block of equal size the memory that came back last, as a resource too.
#[test]
fn s2_2_the_last_returned_comes_first_as_a_resource() {
    each(|rig| {
        let pool = typed(rig);
        let stream = rig.stream();
        let blocks: Vec<_> = (0..4).map(|_| take(&pool, MIB, &stream)).collect();
        let at: Vec<_> = blocks.iter().map(RawBlock::ptr).collect();
        let [a, b, c, d] = <[_; 4]>::try_from(blocks).unwrap();
        for block in [b, d] {
            pool.deallocate_block(block).unwrap();
        }
        let next = take(&pool, MIB, &stream);
        assert_eq!(next.ptr(), at[3]);
        let then = DeviceBuffer::<u8>::uninit(&pool, MIB, &stream).unwrap();
        assert_eq!(
            then.as_device_ptr(),
            at[1],
            "buffers and blocks share what came back"
        );
        assert_eq!(pool.usage().unwrap().blocks.total_freed, 2);
        for block in [a, c, next] {
            pool.deallocate_block(block).unwrap();
        }
    });
}

/// Memory above the threshold is released when a block is freed.
#[test]
fn s3_5_threshold_holds_for_blocks() {
    only(cualloc::Policy::Packed, |rig| {
        let pool = threshold(rig);
        pool.set_release_threshold(Some(4 * MIB as u64)).unwrap();
        let stream = rig.stream();
        let block = take(&pool, 64 * MIB, &stream);
        pool.deallocate_block(block).unwrap();
        assert!(pool.usage().unwrap().cached_bytes() <= 4 * MIB as u64);
    });
}
