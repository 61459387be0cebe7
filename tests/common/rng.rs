//! Random numbers that are the same on every machine.

/// SplitMix64: every seed is a good one.
#[derive(Clone)]
pub struct Rng(u64);

/// The increment of the state per number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    pub fn new(seed: u64) -> Rng {
        // Seeds that are a step apart would give the same numbers, one later.
        Rng(mixed(seed.wrapping_add(STEP)))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mixed(self.0)
    }

    /// Uniform in `0..bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// An index into `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the elements of a list that is not empty.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.index(list.len())]
    }

    /// Log-uniform in `1..=max`: each magnitude is as likely as the next.
    pub fn log_uniform(&mut self, max: u64) -> u64 {
        let bits = self.below(u64::from(max.ilog2()) + 1);
        ((1 << bits) + self.below(1 << bits)).min(max)
    }
}
