//! How much one allocation may map, and how what it created instead is paid back.
//!
//! Mapping costs the driver's time per handle, so a stitch of hundreds of small handles would make
//! one allocation wait for milliseconds. A stitch of many handles spends a token; without one, or
//! beyond what a token allows, it maps the largest free handles only and creates the rest, beyond the
//! soft cap if it must be. Later large allocations give that back, a few handles each. Above half of
//! a hard limit none of this holds: there memory always wins. Nothing here reads a clock: times are counted
//! in handles.

use crate::allocator::engine::{Engine, Guard};
use crate::allocator::size::PACKED_SMALL_LIMIT;

impl Engine {
    /// After an allocation of so many bytes: gives a part back of what an earlier one created beyond
    /// the soft cap. Never waits; what cannot go now goes with a later allocation.
    pub(crate) fn repay(&self, heap: Guard<'_>, stream: u32, bytes: u64) {
        if !heap.physical.bursts.debt || bytes <= PACKED_SMALL_LIMIT {
            return;
        }
        let mut heap = match self.poll_for(heap, stream) {
            Ok(heap) => heap,
            Err(error) => return log::debug!("nothing was repaid: {error}"),
        };
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
