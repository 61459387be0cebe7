//! A program repeated with changed sizes.

use super::draft::{CreatedBlock, Draft, Random, RowSource};
use crate::trace::format::{Op, Trace};

pub(super) struct Varied<'a> {
    trace: &'a Trace,
    random: Random,
    percent: u64,
    /// Number of copies left, including the current one.
    copies: usize,
    /// Index of the next row of the trace.
    row: usize,
    /// The blocks of this copy so far.
    blocks: Vec<CreatedBlock>,
}

impl Varied<'_> {
    pub(super) fn new(trace: &Trace, copies: usize, percent: u8, seed: u64) -> Varied<'_> {
        Varied {
            trace,
            random: Random::new(seed),
            percent: u64::from(percent.min(99)),
            copies,
            row: 0,
            blocks: Vec::new(),
        }
    }

    fn vary_size(&mut self, bytes: u64) -> u64 {
        let share = self.random.between(100 - self.percent, 100 + self.percent);
        let vary_size = u128::from(bytes) * u128::from(share) / 100;
        u64::try_from(vary_size).unwrap_or(u64::MAX).max(1)
    }
}

impl RowSource for Varied<'_> {
    fn make(&mut self, draft: &mut Draft) -> bool {
        if self.copies == 0 {
            return false;
        }
        let Some(row) = self.trace.rows().get(self.row) else {
            for (block, made) in self.trace.allocations().iter().zip(self.blocks.drain(..)) {
                if block.released.is_none() {
                    draft.free(made);
                }
            }
            self.copies -= 1;
            self.row = 0;
            return true;
        };
        // A number is drawn at every row, so that sizes do not depend on each other.
        let bytes = self.vary_size(row.bytes);
        match (row.op, self.blocks.get(row.id).copied()) {
            (Op::Free, Some(made)) => match self.trace.allocations()[row.id].released {
                Some(at) if at > self.row => draft.free_until(made, at - self.row),
                _ => draft.free(made),
            },
            (Op::Complete, Some(made)) => draft.complete(made, None),
            (Op::Oom, _) => draft.fail(bytes, row.stream),
            _ => self.blocks.push(draft.allocate(bytes, row.stream)),
        }
        self.row += 1;
        true
    }
}
