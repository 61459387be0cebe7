//! Workloads for a memory source, defined down to each size and slot, and the code that runs them.
//!
//! The sequences equal those that a C++ program draws with `std::mt19937_64` and `std::uniform_real_distribution` (as
//! libstdc++ computes it), so that allocators in both languages can run the same workload.

// Programs that include this file use different parts of it.
#![allow(dead_code)]

use rand_mt::Mt64;

fn real(random: &mut Mt64, low: f64, high: f64) -> f64 {
    // Rounding may yield the upper end; it is then replaced by the next smaller number.
    let unit = (random.next_u64() as f64 / 2_f64.powi(64)).min(1.0_f64.next_down());
    unit * (high - low) + low
}

fn below(random: &mut Mt64, bound: usize) -> usize {
    (random.next_u64() % bound as u64) as usize
}

fn sizes(random: &mut Mt64, count: usize, low: usize, high: usize) -> Vec<usize> {
    let (low, high) = ((low as f64).ln(), (high as f64).ln());
    let size = |_| real(random, low, high).exp() as usize;
    (0..count).map(size).collect()
}

pub fn log_uniform_sizes(count: usize, seed: u64, low: usize, high: usize) -> Vec<usize> {
    sizes(&mut Mt64::new(seed), count, low, high)
}

fn picks(random: &mut Mt64, operations: usize, slots: usize) -> Vec<u32> {
    let pick = |_| below(random, slots) as u32;
    (0..operations).map(pick).collect()
}

/// Random slots: an operation fills an empty slot or empties a full one. Sizes come from a table whose length is a
/// power of two, indexed by the number of the operation.
pub struct Churn {
    pub sizes: Vec<usize>,
    pub picks: Vec<u32>,
    slots: usize,
}

impl Churn {
    pub fn log_uniform(
        slots: usize,
        operations: usize,
        seed: u64,
        low: usize,
        high: usize,
    ) -> Churn {
        let mut random = Mt64::new(seed);
        Churn {
            sizes: sizes(&mut random, 8192, low, high),
            picks: picks(&mut random, operations, slots),
            slots,
        }
    }

    /// Builds the workload of one of several threads: 64 slots, sizes of 512 bytes doubled up to seven times.
    pub fn of_thread(thread: usize, operations: usize) -> Churn {
        let (mut random, slots) = (Mt64::new(thread as u64), 64);
        Churn {
            sizes: (0..256).map(|_| 512 << below(&mut random, 8)).collect(),
            picks: picks(&mut random, operations, slots),
            slots,
        }
    }

    /// Builds the same slots, all of one size.
    pub fn of_thread_sized(thread: usize, operations: usize, bytes: usize) -> Churn {
        Churn {
            sizes: vec![bytes],
            ..Churn::of_thread(thread, operations)
        }
    }

    pub fn operations(&self) -> usize {
        self.picks.len()
    }

    /// Starts with empty slots.
    pub fn slots<S: Source>(&self) -> Slots<S> {
        (0..self.slots).map(|_| None).collect()
    }

    pub fn run<S: Source>(
        &self,
        source: &S,
        stream: &S::Stream,
        slots: &mut Slots<S>,
        operations: usize,
    ) -> Result<(), Failure> {
        let picks = &self.picks[..operations.min(self.picks.len())];
        // The sizes repeat cyclically.
        for picks in picks.chunks(self.sizes.len()) {
            for (pick, bytes) in picks.iter().zip(&self.sizes) {
                let slot = &mut slots[*pick as usize];
                if slot.is_some() {
                    source.clear(slot)?;
                } else {
                    let block = source.allocate(*bytes, stream)?;
                    // The slot is empty, so there is no block to drop.
                    std::mem::forget(slot.replace(block));
                }
            }
        }
        Ok(())
    }
}

/// The live blocks of a [`Churn`].
pub type Slots<S> = Vec<Option<<S as Source>::Block>>;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

pub trait Source: Sync {
    /// The source's stream type; created by the thread that uses it.
    type Stream;
    type Block;

    fn stream(&self, index: usize) -> Self::Stream;

    fn allocate(&self, bytes: usize, stream: &Self::Stream) -> Result<Self::Block, Failure>;

    fn free(&self, block: Self::Block) -> Result<(), Failure>;

    /// Frees the block in a slot, in place if the source frees that way.
    #[inline]
    fn clear(&self, slot: &mut Option<Self::Block>) -> Result<(), Failure> {
        slot.take().map_or(Ok(()), |block| self.free(block))
    }
}

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
