//! A block that is used and freed while the driver reports the progress of its stream.

use crate::common::prelude::*;

pub const BLOCK: usize = 12 * MIB;

/// Frees a block, another one beside the driver's `call`, and takes both on another stream: the first is
/// complete, and the second does not pass for it.
///
/// `prepare` makes the other stream known, `told` comes after the first free.
pub fn covers_no_later_free(
    call: &'static str,
    prepare: impl Fn(&Allocator, [&Stream; 2]),
    told: impl Fn(&Rig, &Stream),
) {
    each_with_interludes(|rig, sim| {
        let (allocator, [a, b]) = rig.scene();
        let early = allocator.allocate(BLOCK, &a).unwrap();
        let late = allocator.allocate(BLOCK, &a).unwrap();
        let (early_ptr, late_ptr) = (early.ptr(), late.ptr());
        prepare(&allocator, [&a, &b]);
        sim.set_mode(Mode::Manual);
        let (on, context) = (a.clone(), rig.context.clone());
        interlude::after(call, move || {
            let entered = context.enter().unwrap();
            // SAFETY: the block is live.
            unsafe { entered.memset_d8(late.ptr(), 1, BLOCK, on.raw()) }.unwrap();
            drop(late);
        });
        drop(early);
        told(rig, &a);
        let taken = [(); 2].map(|()| {
            let block = allocator.allocate(BLOCK, &b).unwrap();
            rig.stamp(block.ptr(), BLOCK, 2, &b);
            block
        });
        assert!(!interlude::is_due(), "{call} was not called");
        assert_eq!(taken[0].ptr(), early_ptr, "complete");
        rig.assert_clean();
        sim.complete_all();
        rig.assert_clean();
        // Either elsewhere, or behind a wait.
        assert!(taken[1].ptr() != late_ptr || super::waits(rig) > 0);
        drop(taken);
        sim.set_mode(Mode::Instant);
    });
}
