//! Random blocks on random streams.

use super::draft::{Draft, Kind, Program, Random};
use crate::trace::format::Row;

const ROWS: usize = 1_000_000;
const SMALLEST: u64 = 512;
/// Powers of two between the smallest and the largest.
const OCTAVES: u32 = 20;
/// The usual bound on what is live.
const LIVE: u64 = 8 << 30;
/// What is live stays above this part of its bound.
const LOW_PART: u64 = 32;
/// Of so many rows at which a block would fit, so many are allocations where memory is always full.
const FULL: (u64, u64) = (3, 5);

pub(super) fn rows(program: &Program) -> Vec<Row> {
    let mut random = Random::new(program.seed);
    let by_seed = 1 << random.below(4);
    let streams = program.streams.unwrap_or(by_seed).max(1);
    let high = program.live.unwrap_or(LIVE).max(SMALLEST);
    let (low, (of, parts)) = match program.kind {
        Kind::Churn => (0, FULL),
        _ => (high / LOW_PART, (1, 2)),
    };
    let mut draft = Draft::default();
    while draft.rows.len() < program.rows.unwrap_or(ROWS) {
        let bytes = random.log_uniform(SMALLEST, OCTAVES);
        let stream = random.below(u64::from(streams)) as u16;
        let wanted = random.below(parts) < of || draft.live_bytes < low;
        let live = draft.live.len() as u64;
        if draft.live_bytes + bytes <= high && (wanted || live == 0) {
            draft.allocate(bytes, stream);
        } else if live > 0 {
            let at = random.below(live) as usize;
            draft.free_at(at);
        }
    }
    draft.rows
}
