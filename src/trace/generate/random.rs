//! Random blocks on random streams.

use super::draft::{CreatedBlock, Draft, Kind, Program, Random, RowSource};

pub(super) const ROWS: usize = 1_000_000;
const SMALLEST: u64 = 512;
/// Powers of two between the smallest and the largest.
const OCTAVES: u32 = 20;
const LIVE: u64 = 8 << 30;
/// Live memory stays above this fraction of its maximum.
const LOW_PART: u64 = 32;
/// The share of allocations, as a fraction, among the rows at which a block would fit, if memory is always full.
const FULL: (u64, u64) = (3, 5);

pub(super) struct RandomProgram {
    random: Random,
    streams: u64,
    /// The range of live bytes.
    low: u64,
    high: u64,
    /// The share of allocations, as a fraction, among the rows at which a block would fit.
    share: (u64, u64),
    live: Vec<CreatedBlock>,
    live_bytes: u64,
}

impl RandomProgram {
    pub(super) fn new(program: &Program) -> RandomProgram {
        let mut random = Random::new(program.seed);
        let by_seed = 1 << random.below(4);
        let high = program.live.unwrap_or(LIVE).max(SMALLEST);
        let (low, share) = match program.kind {
            Kind::Churn => (0, FULL),
            _ => (high / LOW_PART, (1, 2)),
        };
        RandomProgram {
            random,
            streams: u64::from(program.streams.unwrap_or(by_seed).max(1)),
            low,
            high,
            share,
            live: Vec::new(),
            live_bytes: 0,
        }
    }
}

impl RowSource for RandomProgram {
    fn make(&mut self, draft: &mut Draft) -> bool {
        let bytes = self.random.log_uniform(SMALLEST, OCTAVES);
        let stream = self.random.below(self.streams) as u32;
        let (of, parts) = self.share;
        let wanted = self.random.below(parts) < of || self.live_bytes < self.low;
        let live = self.live.len() as u64;
        let fits = bytes <= self.high.saturating_sub(self.live_bytes);
        if fits && (wanted || live == 0) {
            self.live.push(draft.allocate(bytes, stream));
            self.live_bytes += bytes;
        } else if live > 0 {
            let at = self.random.below(live) as usize;
            let block = self.live.swap_remove(at);
            self.live_bytes -= block.bytes;
            draft.free(block);
        }
        true
    }
}
