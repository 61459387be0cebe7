//! Few, very large blocks that never repeat.

use super::draft::{CreatedBlock, Draft, Program, Random, RowSource};

pub(super) const ROWS: usize = 12_000;
const SMALLEST: u64 = 64 << 20;
/// Powers of two between the smallest and the largest.
const OCTAVES: u32 = 5;
const LIVE_MIN: usize = 4;
const LIVE_MAX: usize = 12;

pub(super) struct Large {
    random: Random,
    live: Vec<CreatedBlock>,
}

impl Large {
    pub(super) fn new(program: &Program) -> Large {
        Large {
            random: Random::new(program.seed),
            live: Vec::new(),
        }
    }
}

impl RowSource for Large {
    fn make(&mut self, draft: &mut Draft) -> bool {
        let live = self.live.len();
        let more = live <= LIVE_MIN || (live < LIVE_MAX && self.random.below(2) == 0);
        if more {
            let bytes = self.random.log_uniform(SMALLEST, OCTAVES);
            self.live.push(draft.allocate(bytes, 0));
        } else {
            let at = self.random.below(live as u64) as usize;
            draft.free(self.live.swap_remove(at));
        }
        true
    }
}
