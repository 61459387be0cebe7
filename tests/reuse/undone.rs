//! Steps that fail after they began: memory is what it was before, to everybody.

use std::cell::Cell;

use crate::common::*;
use cualloc::Config;
use cualloc::allocator::{Allocator, Block, Error, Policy};
use cualloc::driver::{Stream, sys};
use cualloc::sim::FailPlan;

/// Where the block of the test lies before an aligned one.
const HEAD: usize = 100 * KIB;
/// Memory that a stream uses, from [`HEAD`] on.
const USED: usize = 16 * MIB - HEAD;
const ALIGNED: usize = 24 * MIB;

/// An allocator in which [`USED`] bytes are free that `a` uses without end, the address of these, and the
/// live block before them. The second stream is known.
fn beside_pending<'a>(rig: &'a Rig, [a, b]: [&Stream; 2]) -> (Allocator, u64, Block, Hold<'a>) {
    let config = Config::new().limit(Some(32 << 20)).views(false);
    let allocator = rig.allocator_with(config.policy(Policy::Packed));
    let wall = allocator.allocate(HEAD, a).unwrap();
    let used = allocator.allocate(USED, a).unwrap();
    drop(allocator.allocate(66 * KIB, b).unwrap());
    let hold = rig.hold(a);
    rig.stamp(used.ptr(), USED, 1, a);
    let at = used.ptr();
    drop(used);
    (allocator, at, wall, hold)
}

/// Whether something that a stream may have at once lies in the memory in use.
fn hands_out(allocator: &Allocator, stream: &Stream, at: u64) -> bool {
    let got = allocator.allocate_at_hand(MIB, 1, stream, &[]).unwrap();
    got.is_some_and(|block| (at..at + USED as u64).contains(&block.ptr()))
}

/// D1: an aligned growth beside memory that another stream uses, of which any call fails. The gap before
/// the block was taken for the asking stream's own.
#[test]
fn d1_a_growth_that_fails_keeps_the_uses_of_what_lay_beside_it() {
    let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
    for name in ["cuStreamWaitEvent", "cuCtxGetCurrent", "cuCtxSetCurrent"] {
        let (over, failed) = (Cell::new(false), Cell::new(0));
        for nth in 1.. {
            only(Policy::Packed, |rig| {
                let Some(sim) = rig.sim() else {
                    return over.set(true);
                };
                let [a, b, c] = rig.streams();
                let (allocator, at, wall, hold) = beside_pending(rig, [&a, &b]);
                sim.fail(FailPlan::call(name, code).unwrap().nth(nth));
                let result = allocator.allocate_aligned(ALIGNED, 2 * MIB, &b);
                over.set(sim.clear_failures() > 0);
                if let Err(error) = &result {
                    assert!(matches!(error, Error::Driver(_)), "{error:?}");
                    failed.set(failed.get() + 1);
                    allocator.check().unwrap();
                    for stream in [&b, &c] {
                        assert!(!hands_out(&allocator, stream, at), "{name} {nth}");
                    }
                }
                drop((result, hold, wall));
                rig.close(&allocator);
            });
            if over.get() {
                break;
            }
        }
        assert!(on_cuda() || failed.get() > 0, "{name} is not called");
    }
}

/// D1: what lies before the aligned block of a growth is the asking stream's, behind its wait: no third
/// stream has it at once.
#[test]
fn d1_the_gap_before_a_grown_block_follows_its_stream() {
    only(Policy::Packed, |rig| {
        let [a, b, c] = rig.streams();
        let (allocator, at, wall, hold) = beside_pending(rig, [&a, &b]);
        let waits = rig.calls("cuStreamWaitEvent");
        let block = allocator.allocate_aligned(ALIGNED, 2 * MIB, &b).unwrap();
        assert_eq!(rig.calls("cuStreamWaitEvent"), waits + 1);
        assert!(block.ptr() > at && block.ptr() < at + USED as u64);
        assert!(!hands_out(&allocator, &c, at), "two streams use it");
        assert!(hands_out(&allocator, &b, at), "behind its own wait");
        rig.stamp(block.ptr(), ALIGNED, 2, &b);
        drop(hold);
        drop((block, wall));
        rig.close(&allocator);
    });
}
