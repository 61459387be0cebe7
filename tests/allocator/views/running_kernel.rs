//! While a kernel runs, memory is obtained, stitched and released without a wait for it.

use super::{TWO, packed, scattered, view_of};
use crate::common::prelude::*;

/// How long the kernel runs on a GPU: far longer than anything that is done beside it.
const KERNEL_NANOS: u64 = 1_000_000_000;

/// The kernel has not ended, so nothing can have waited for it.
fn running(stream: &Stream, after: &str) {
    assert!(
        !stream.is_complete().unwrap(),
        "{after} waited for a kernel"
    );
}

/// S1.17, R54: growth, stitching, eviction and release wait for no kernel, neither for one that uses
/// other memory nor for one whose memory was freed.
#[test]
fn packed_memory_moves_while_a_kernel_runs() {
    packed(|rig| {
        let [a, k] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let theirs = allocator.allocate(MIB, &k).unwrap();
        rig.stamp(theirs.ptr(), MIB, 1, &k);
        k.synchronize().unwrap();
        let kernel = rig.busy_for(&k, KERNEL_NANOS);
        rig.stamp(theirs.ptr(), MIB, 2, &k);
        running(&k, "the launch");
        drop(theirs);
        running(&k, "a free");

        let stitched = allocator.allocate(TWO - MIB, &a).unwrap();
        assert!(view_of(&allocator, &stitched).is_some());
        rig.stamp(stitched.ptr(), TWO - MIB, 3, &a);
        rig.settle(&a);
        running(&k, "a stitch");

        allocator.set_limit(None);
        let grown = allocator.allocate(40 * MIB, &a).unwrap();
        running(&k, "a growth");
        rig.stamp(grown.ptr(), 40 * MIB, 4, &a);
        drop((stitched, grown));
        rig.settle(&a);

        let before = rig.calls("cuMemUnmap");
        let trimmed = allocator.trim(0).unwrap();
        assert!(trimmed.released > 40 << 20, "{trimmed:?}");
        assert!(rig.calls("cuMemUnmap") > before + 20);
        running(&k, "a trim that evicted a view");

        let _again = allocator.allocate(TWO, &a).unwrap();
        running(&k, "a growth where memory was given back");
        kernel.release();
        k.synchronize().unwrap();
    });
}

/// A segment of the classic policy is released by a call that waits for all work of its context, which the packed
/// policy avoids. If this test ever fails, the test above proves nothing.
#[test]
fn a_classic_segment_is_released_only_after_the_kernel() {
    // The simulator's call waits as the measured one does.
    let config = SimConfig {
        strict_free: false,
        ..SimConfig::with_devices(1, 8 << 30)
    };
    only_on(Policy::Classic, config, |rig| {
        let (allocator, [a, k]) = rig.scene();
        drop(allocator.allocate(TWO, &a).unwrap());
        let kernel = rig.busy_for(&k, KERNEL_NANOS);
        running(&k, "the launch");
        assert!(allocator.trim(0).unwrap().released > 0);
        assert!(k.is_complete().unwrap(), "the call did not wait");
        kernel.release();
    });
}
