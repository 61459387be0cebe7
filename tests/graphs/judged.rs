//! The judge of the driver's calls ([`checker`](crate::checker)) beside programs that use graph pools. It knows what a
//! program tells it here, and the calls; nothing of the allocator.

use super::support::*;
use crate::checker::table::{Checker, install};
use cualloc::driver::sys::CuFunctions;

/// The pool that has memory, by a number that the program gives it.
pub const OURS: Option<u64> = Some(1);

/// The judge of a program; on a GPU there is none.
#[derive(Clone)]
pub struct Judge(Option<Arc<Checker>>);

fn before(functions: CuFunctions) -> CuFunctions {
    Checker::new(functions, 0).enter();
    install(functions)
}

/// As [`packed`], with a judge before the simulator.
pub fn judged(test: impl Fn(&Rig, &Judge)) {
    if on_cuda() {
        return packed(|rig| test(rig, &Judge(None)));
    }
    let Some(rig) = Rig::behind_on(Policy::Packed, late(), before) else {
        return;
    };
    let judge = Judge(Some(crate::checker::table::checker()));
    test(&rig, &judge);
    judge.finds_nothing("at the end");
    rig.assert_clean();
    Checker::leave();
}

impl Judge {
    /// A request that was sent to a pool, or to none, got a block.
    pub fn handed_out(&self, pool: Option<u64>, block: &Block, stream: &Stream) {
        if let Some(checker) = &self.0 {
            let mut tracker = checker.tracker();
            let stream = tracker.number(stream.raw());
            tracker.handed_out_of(pool, block.ptr(), block.requested() as u64, stream);
        }
    }

    /// A block was allocated and all its bytes were written, both as reported to the judge.
    pub fn used(
        &self,
        pool: Option<u64>,
        (rig, allocator): (&Rig, &Allocator),
        bytes: usize,
        stream: &Stream,
    ) -> Block {
        let block = allocator.allocate(bytes, stream).unwrap();
        self.handed_out(pool, &block, stream);
        rig.stamp(block.ptr(), bytes, bytes as u32, stream);
        block
    }

    /// Requests outside of captures may get what graphs of the pool write.
    pub fn reuses_graph_memory(&self) {
        if let Some(checker) = &self.0 {
            checker.tracker().reusing.extend(OURS);
        }
    }

    /// Another stream uses a block.
    pub fn recorded(&self, block: &Block, stream: &Stream) {
        if let Some(checker) = &self.0 {
            let mut tracker = checker.tracker();
            let stream = tracker.number(stream.raw());
            tracker.recorded(block.ptr(), stream);
        }
    }

    /// A block is freed, by a thread whose calls are judged as well.
    pub fn free(&self, block: Block) {
        if let Some(checker) = &self.0 {
            checker.enter();
            checker.tracker().freed(block.ptr());
        }
        drop(block);
    }

    /// A pool came back to an earlier time: blocks that were taken from their owners, and such as are live again.
    pub fn restored(&self, ceased: &[u64], revived: &[Block]) {
        let Some(checker) = &self.0 else { return };
        let mut tracker = checker.tracker();
        for block in ceased {
            tracker.freed(*block);
        }
        for block in revived {
            tracker.revived(1, block.ptr(), block.requested() as u64);
        }
    }

    pub fn finds_nothing(&self, when: &str) {
        let violation = self
            .0
            .as_ref()
            .and_then(|checker| checker.tracker().take_violation());
        if let Some(violation) = violation {
            panic!("{when}: {violation}");
        }
    }

    /// How many blocks it has judged.
    pub fn blocks(&self) -> u64 {
        self.0
            .as_ref()
            .map_or(0, |checker| checker.tracker().blocks)
    }
}
