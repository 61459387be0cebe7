//! Requests that failed in the recorded program.

use super::format::{Op, Trace};

impl Trace {
    /// The failed requests: the row index and the size of each.
    pub fn failed_requests(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let rows = self.rows().iter().enumerate();
        let failed = rows.filter(|(_, row)| row.op == Op::Oom);
        failed.map(|(index, row)| (index, row.bytes))
    }

    /// Returns what the [`requested_peak`](Self::requested_peak) would be had the failed requests succeeded, each in
    /// addition to the blocks live at its time.
    pub fn required_peak(&self) -> u64 {
        let rows = self.rows().iter().zip(self.live_bytes());
        let failed = rows.filter(|(row, _)| row.op == Op::Oom);
        let required = failed.map(|(row, live)| live.saturating_add(row.bytes));
        required.max().unwrap_or(0).max(self.requested_peak())
    }
}
