//! The definition of a generated program, and the tools to create its rows.

use super::super::format::{Op, Row};
use std::collections::VecDeque;

/// The kind of a generated program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// Few, very large blocks on one stream, of sizes that never repeat: from 64 MiB to 2 GiB,
    /// evenly over the logarithm, 4 to 12 of them live.
    Large,
    /// Training with parameters sharded over devices, on three streams: parameters of a layer are
    /// gathered on one, used on another and dropped again, gradients are reduced on the third.
    Sharded,
    /// Blocks of 512 bytes to 512 MiB, evenly over the logarithm, on random streams, freed in random order. Live memory
    /// varies between a maximum (8 GiB by default) and a 32nd of it.
    Random,
    /// Like [`Kind::Random`], but live memory stays just below the maximum.
    Churn,
}

/// A program to generate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Program {
    /// The kind of program.
    pub kind: Kind,
    /// The seed of all random numbers.
    pub seed: u64,
    /// The number of rows; `None`: the default of the kind (12,000 for [`Kind::Large`], four training steps for
    /// [`Kind::Sharded`], 1,000,000 for the random ones).
    pub rows: Option<usize>,
    /// The number of streams of a random program, from 1; `None`: 1, 2, 4 or 8, depending on the seed.
    pub streams: Option<u16>,
    /// The maximum of live bytes of a random program; `None`: 8 GiB.
    pub live: Option<u64>,
}

impl Program {
    /// Creates the default program of a kind.
    pub fn new(kind: Kind, seed: u64) -> Program {
        Program {
            kind,
            seed,
            rows: None,
            streams: None,
            live: None,
        }
    }
}

/// Pseudo-random numbers: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        // Small seeds are common, and their sequences should not begin alike.
        let mut random = Random(seed ^ 0x5851_F42D_4C95_7F2D);
        random.next();
        random
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    /// From 0 to `bound - 1`; 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// From `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// From `low` on to below `low << octaves`, evenly over the logarithm.
    pub(super) fn log_uniform(&mut self, low: u64, octaves: u32) -> u64 {
        let octave = self.below(u64::from(octaves));
        let mut bits = self.next();
        // Computes 2 to the power of a binary fraction by square roots: their results are the same on every machine,
        // which is not guaranteed for powers.
        let (mut factor, mut root) = (1.0f64, 2.0f64);
        for _ in 0..32 {
            root = root.sqrt();
            if bits & 1 == 1 {
                factor *= root;
            }
            bits >>= 1;
        }
        ((low << octave) as f64 * factor) as u64
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CreatedBlock {
    pub(super) id: usize,
    pub(super) bytes: u64,
    pub(super) stream: u32,
}

/// Creates the rows of a program, a few at a time.
pub(super) trait RowSource {
    fn make(&mut self, draft: &mut Draft) -> bool;
}

/// The release point of a block that a row frees.
#[derive(Clone, Copy, Debug)]
pub(super) enum Release {
    /// The row frees nothing.
    Never,
    /// At the row itself.
    Here,
    /// At the row with this index, at which its last use completes.
    At(usize),
    /// At a row that does not exist yet.
    Later,
}

/// A row that was not returned yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) row: Row,
    /// The release point of its block.
    pub(super) bytes: u64,
    pub(super) release: Release,
}

/// A program being generated: the rows created and not yet returned.
#[derive(Debug, Default)]
pub(super) struct Draft {
    ready: VecDeque<Ready>,
    /// Number of rows and blocks created so far.
    pub(super) rows: usize,
    pub(super) blocks: usize,
}

impl Draft {
    pub(super) fn allocate(&mut self, bytes: u64, stream: u32) -> CreatedBlock {
        let block = CreatedBlock {
            id: self.blocks,
            bytes,
            stream,
        };
        self.blocks += 1;
        self.push(Op::Allocate, block, Release::Never);
        block
    }

    pub(super) fn fail(&mut self, bytes: u64, stream: u32) {
        let id = 0;
        self.push(Op::Oom, CreatedBlock { id, bytes, stream }, Release::Never);
    }

    pub(super) fn free(&mut self, block: CreatedBlock) {
        self.push(Op::Free, block, Release::Here);
    }

    /// Frees a block that another stream still uses; returns the index of the row.
    pub(super) fn free_late(&mut self, block: CreatedBlock) -> usize {
        self.push(Op::Free, block, Release::Later);
        self.rows - 1
    }

    /// Frees a block whose last use completes `lag` rows later.
    pub(super) fn free_until(&mut self, block: CreatedBlock, rows: usize) {
        self.push(Op::Free, block, Release::At(self.rows + rows));
    }

    /// Ends the last use of a block, freed late at the row with this index if there is one.
    pub(super) fn complete(&mut self, block: CreatedBlock, late: Option<usize>) {
        // Rows that wait for this are still queued.
        let first = self.rows - self.ready.len();
        let waits = late.and_then(|row| row.checked_sub(first));
        if let Some(ready) = waits.and_then(|at| self.ready.get_mut(at)) {
            ready.release = Release::At(self.rows);
        }
        self.push(Op::Complete, block, Release::Here);
    }

    /// Returns the next row; `None` if more rows must be created first.
    pub(super) fn next(&mut self) -> Option<Ready> {
        match self.ready.front()?.release {
            Release::Later => None,
            _ => self.ready.pop_front(),
        }
    }

    /// Returns the next row after the end of the program: uses not completed by then never complete.
    pub(super) fn rest(&mut self) -> Option<Ready> {
        let mut ready = self.ready.pop_front()?;
        if matches!(ready.release, Release::Later) {
            ready.release = Release::Here;
        }
        Some(ready)
    }

    fn push(&mut self, op: Op, block: CreatedBlock, release: Release) {
        self.rows += 1;
        self.ready.push_back(Ready {
            row: Row {
                op,
                stream: block.stream,
                id: block.id,
                bytes: block.bytes,
            }
            .normalized(),
            bytes: block.bytes,
            release,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_random_numbers_are_those_of_the_named_generator() {
        // The first numbers of SplitMix64 from state 0, as published with it.
        let mut random = Random(0);
        assert_eq!(random.next(), 0xE220_A839_7B1D_CDAF);
        assert_eq!(random.next(), 0x6E78_9E6A_A1B9_65F4);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
            assert!((5..=7).contains(&random.between(5, 7)));
        }
        assert!(
            counts.iter().all(|c| (9_500..10_500).contains(c)),
            "{counts:?}"
        );
    }

    #[test]
    fn sizes_are_even_over_the_logarithm() {
        let mut random = Random::new(1);
        let (mut octaves, mut upper) = ([0u32; 5], 0);
        for _ in 0..100_000 {
            let size = random.log_uniform(64, 5);
            assert!((64..2048).contains(&size));
            octaves[(size / 64).ilog2() as usize] += 1;
            // Half of an octave lies above the square root of 2.
            let octave = 1u64 << size.ilog2();
            upper += u32::from(size * size >= 2 * octave * octave);
        }
        assert!(
            octaves.iter().all(|c| (19_000..21_000).contains(c)),
            "{octaves:?}"
        );
        assert!((48_000..52_000).contains(&upper), "{upper}");
    }
}
