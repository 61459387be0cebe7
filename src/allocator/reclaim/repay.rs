//! How much one allocation may map, and how what it created instead is paid back.
//!
//! Mapping costs the driver's time per handle, so a stitch of hundreds of small handles would make
//! one allocation wait for milliseconds. A stitch of many handles spends a token; without one, or
//! beyond what a token allows, it maps the largest free handles only and creates the rest, beyond the
//! soft cap if it must be. Later large allocations give that back, a few handles each. Above half of
//! a hard limit none of this holds: there memory always wins. Nothing here reads a clock: times are counted
//! in handles.

use crate::allocator::engine::Engine;

impl Engine {
    /// After a large allocation: gives a part back of what an earlier one created beyond
    /// the soft cap. Never waits; what cannot go now goes with a later allocation.
    pub(crate) fn repay(&self, stream: u32) {
        if let Err(error) = self.poll_for(stream) {
            return log::debug!("nothing was repaid: {error}");
        }
        let mut heap = self.lock();
        let plan = heap.plan_repayment();
        let handles = plan.len() as u64;
        let slot = &heap.streams[stream];
        // What one stream alone frees is never marked otherwise.
        let mark =
            (handles == 0 && heap.physical.bursts.debt && !slot.covered()).then_some(slot.key);
        drop(heap);
        if let Some(key) = mark {
            return self.mark_all([(stream, key)]);
        }
        if handles == 0 {
            return;
        }
        match self.release(plan) {
            Ok(released) => {
                let mut heap = self.lock();
                heap.physical.bursts.figures.repaid += handles;
                heap.physical.bursts.figures.repaid_bytes += released;
            }
            Err(error) => log::debug!("less was repaid than planned: {error}"),
        }
    }
}
