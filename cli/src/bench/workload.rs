//! What is asked of a source of memory, to the last size and slot, and how it is driven.
//!
//! The sequences are those that a C++ program draws with `std::mt19937_64` and
//! `std::uniform_real_distribution` (as libstdc++ computes it), so that allocators in both languages can
//! be given the same work.

// Programs that share this file each use their own part of it.
#![allow(dead_code)]

/// The 64-bit Mersenne Twister with the parameters of C++'s `std::mt19937_64` (Nishimura, "Tables of
/// 64-bit Mersenne Twisters", 2000).
pub struct Twister {
    state: [u64; Self::WORDS],
    at: usize,
}

impl Twister {
    const WORDS: usize = 312;
    const MIDDLE: usize = 156;
    const MATRIX: u64 = 0xb502_6f5a_a966_19e9;
    const UPPER: u64 = !0 << 31;

    pub fn new(seed: u64) -> Twister {
        let mut state = [seed; Self::WORDS];
        for index in 1..Self::WORDS {
            let before = state[index - 1];
            state[index] = 6_364_136_223_846_793_005_u64
                .wrapping_mul(before ^ (before >> 62))
                .wrapping_add(index as u64);
        }
        let at = Self::WORDS;
        Twister { state, at }
    }

    pub fn next(&mut self) -> u64 {
        if self.at == Self::WORDS {
            self.twist();
        }
        let mut word = self.state[self.at];
        self.at += 1;
        word ^= (word >> 29) & 0x5555_5555_5555_5555;
        word ^= (word << 17) & 0x71d6_7fff_eda6_0000;
        word ^= (word << 37) & 0xfff7_eee0_0000_0000;
        word ^ (word >> 43)
    }

    fn twist(&mut self) {
        for index in 0..Self::WORDS {
            let following = self.state[(index + 1) % Self::WORDS];
            let mixed = (self.state[index] & Self::UPPER) | (following & !Self::UPPER);
            let odd = if mixed & 1 == 1 { Self::MATRIX } else { 0 };
            let middle = self.state[(index + Self::MIDDLE) % Self::WORDS];
            self.state[index] = middle ^ (mixed >> 1) ^ odd;
        }
        self.at = 0;
    }

    /// Uniform in `low..high`.
    fn real(&mut self, low: f64, high: f64) -> f64 {
        // Rounding may reach the upper end, which is then replaced by its neighbour below.
        let unit = (self.next() as f64 / 2_f64.powi(64)).min(1.0_f64.next_down());
        unit * (high - low) + low
    }

    /// Sizes whose logarithm is uniform.
    fn sizes(&mut self, count: usize, low: usize, high: usize) -> Vec<usize> {
        let (low, high) = ((low as f64).ln(), (high as f64).ln());
        let size = |_| self.real(low, high).exp() as usize;
        (0..count).map(size).collect()
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Sizes whose logarithm is uniform.
pub fn log_uniform_sizes(count: usize, seed: u64, low: usize, high: usize) -> Vec<usize> {
    Twister::new(seed).sizes(count, low, high)
}

/// Random slots that are filled where empty and emptied where full: one operation each. Sizes come from
/// a table that is a power of two long, by the number of the operation.
pub struct Churn {
    pub sizes: Vec<usize>,
    /// The slot of each operation.
    pub picks: Vec<u32>,
    slots: usize,
}

impl Churn {
    /// Sizes whose logarithm is uniform.
    pub fn log_uniform(
        slots: usize,
        operations: usize,
        seed: u64,
        low: usize,
        high: usize,
    ) -> Churn {
        let mut twister = Twister::new(seed);
        let sizes = twister.sizes(8192, low, high);
        let picks = (0..operations)
            .map(|_| twister.below(slots) as u32)
            .collect();
        Churn {
            sizes,
            picks,
            slots,
        }
    }

    /// What one of several threads does: 64 slots, 512 bytes doubled up to seven times.
    pub fn of_thread(thread: usize, operations: usize) -> Churn {
        let mut twister = Twister::new(thread as u64);
        let sizes = (0..256).map(|_| 512 << twister.below(8)).collect();
        let picks = (0..operations).map(|_| twister.below(64) as u32).collect();
        let slots = 64;
        Churn {
            sizes,
            picks,
            slots,
        }
    }

    /// The same slots, all of one size.
    pub fn of_thread_sized(thread: usize, operations: usize, bytes: usize) -> Churn {
        let sizes = vec![bytes];
        Churn {
            sizes,
            ..Churn::of_thread(thread, operations)
        }
    }

    pub fn operations(&self) -> usize {
        self.picks.len()
    }

    /// Empty slots to begin with.
    pub fn slots<S: Source>(&self) -> Slots<S> {
        (0..self.slots).map(|_| None).collect()
    }

    /// Runs the first operations.
    ///
    /// # Errors
    /// The source's.
    pub fn run<S: Source>(
        &self,
        source: &S,
        stream: &S::Stream,
        slots: &mut Slots<S>,
        operations: usize,
    ) -> Result<(), Failure> {
        let picks = &self.picks[..operations.min(self.picks.len())];
        // The sizes go round.
        for picks in picks.chunks(self.sizes.len()) {
            for (pick, bytes) in picks.iter().zip(&self.sizes) {
                let slot = &mut slots[*pick as usize];
                if slot.is_some() {
                    source.clear(slot)?;
                } else {
                    let block = source.allocate(*bytes, stream)?;
                    // It is empty: no need to look for a block to drop.
                    std::mem::forget(slot.replace(block));
                }
            }
        }
        Ok(())
    }
}

/// The live blocks of a [`Churn`].
pub type Slots<S> = Vec<Option<<S as Source>::Block>>;

/// Why a source gave nothing.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Something that gives memory and takes it back.
pub trait Source: Sync {
    /// What it calls a stream; made by the thread that uses it.
    type Stream;
    type Block;

    fn stream(&self, index: usize) -> Self::Stream;

    /// # Errors
    /// Whatever it fails with.
    fn allocate(&self, bytes: usize, stream: &Self::Stream) -> Result<Self::Block, Failure>;

    /// # Errors
    /// Whatever it fails with.
    fn free(&self, block: Self::Block) -> Result<(), Failure>;

    /// Frees what a slot holds, where it lies if that is how the source frees.
    ///
    /// # Errors
    /// Whatever it fails with.
    #[inline]
    fn clear(&self, slot: &mut Option<Self::Block>) -> Result<(), Failure> {
        slot.take().map_or(Ok(()), |block| self.free(block))
    }
}

/// An allocation and its free, again and again.
///
/// # Errors
/// The source's.
pub fn pairs<S: Source>(
    source: &S,
    bytes: usize,
    stream: &S::Stream,
    count: usize,
) -> Result<(), Failure> {
    for _ in 0..count {
        source.free(source.allocate(std::hint::black_box(bytes), stream)?)?;
    }
    Ok(())
}
