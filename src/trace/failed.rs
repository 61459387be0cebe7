//! Requests that failed in the recorded program.

use super::format::{Op, Trace};

impl Trace {
    /// The requests that failed: the index of the row of each, and its bytes.
    pub fn failed_requests(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let rows = self.rows().iter().enumerate();
        let failed = rows.filter(|(_, row)| row.op == Op::Oom);
        failed.map(|(index, row)| (index, row.bytes))
    }

    /// The [`requested_peak`](Self::requested_peak), had the requests that failed succeeded: each beside what was live
    /// when it was made.
    pub fn required_peak(&self) -> u64 {
        let rows = self.rows().iter().zip(self.live_bytes());
        let failed = rows.filter(|(row, _)| row.op == Op::Oom);
        let required = failed.map(|(row, live)| live.saturating_add(row.bytes));
        required.max().unwrap_or(0).max(self.requested_peak())
    }
}
