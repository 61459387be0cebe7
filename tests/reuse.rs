//! When freed memory is handed out again: on its own stream at once, on others in order.
#![cfg(feature = "sim")]

mod common;

use common::*;

/// S1.40, S1.7: what another stream may still use is not handed out.
#[test]
fn s1_40_recorded_block_is_not_reused_while_the_stream_runs() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let block = allocator.allocate(4 * MIB, &a).unwrap();
        let ptr = block.ptr();
        rig.stamp(ptr, 4 * MIB, 1, &a);
        a.synchronize().unwrap();
        let hold = rig.hold(&b);
        block.record_stream(&b).unwrap();
        rig.stamp(ptr, 4 * MIB, 2, &b);
        drop(block);
        let other = allocator.allocate(4 * MIB, &a).unwrap();
        rig.stamp(other.ptr(), 4 * MIB, 3, &a);
        if other.ptr() == ptr {
            assert!(
                !a.is_complete().unwrap(),
                "neither another address nor a wait"
            );
        }
        hold.release();
        assert_eq!(rig.mismatches(other.ptr(), 4 * MIB, 3, &a), 0);
        drop(other);
        rig.close(&allocator);
    });
}
