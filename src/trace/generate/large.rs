//! Few, very large blocks that never repeat.

use super::draft::{Draft, Program, Random};
use crate::trace::format::Row;

const ROWS: usize = 12_000;
const SMALLEST: u64 = 64 << 20;
/// Powers of two between the smallest and the largest.
const OCTAVES: u32 = 5;
const LIVE_MIN: usize = 4;
const LIVE_MAX: usize = 12;

pub(super) fn rows(program: &Program) -> Vec<Row> {
    let mut random = Random::new(program.seed);
    let mut draft = Draft::default();
    while draft.rows.len() < program.rows.unwrap_or(ROWS) {
        let live = draft.live.len();
        let more = live <= LIVE_MIN || (live < LIVE_MAX && random.below(2) == 0);
        if more {
            let bytes = random.log_uniform(SMALLEST, OCTAVES);
            draft.allocate(bytes, 0);
        } else {
            let at = random.below(live as u64) as usize;
            draft.free_at(at);
        }
    }
    draft.rows
}
