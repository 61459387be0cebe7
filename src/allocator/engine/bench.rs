//! The work of a test of second layouts.
//!
//! Everything is submitted before anything is waited for: where other streams keep the device at work, each wait takes
//! as long as a kernel of theirs. What was read stays on the device meanwhile, and is copied to the host at the end.

use std::ffi::c_void;

use crate::driver::{DriverError, Entered, Function, Stream, sys};

use crate::allocator::size::PHYSICAL_GRANULE;

/// Words that are written and read: more than the first-level caches of a few multiprocessors hold.
pub(crate) const WORDS: usize = 128 << 10;

/// Where kernels count wrong words, from the start of the memory: behind the words.
pub(crate) const COUNT_AT: u64 = 4 * WORDS as u64;

/// Bytes from there to what was read.
const READ_BEHIND: u64 = 4 << 10;

/// Words that are copied or moved in one go, others in each round.
const COPIED: usize = 32 << 10;

/// How often everything is done.
pub(crate) const ROUNDS: u32 = 3;

/// Words that are read in a round: what was copied and what was moved, either way round.
const READ: usize = 2 * (COPIED + COPIED / 2);

const _: () = assert!(COPIED * ROUNDS as usize <= WORDS);
const _: () =
    assert!(COUNT_AT + READ_BEHIND + 4 * (READ * ROUNDS as usize) as u64 <= PHYSICAL_GRANULE);

/// Threads of a block of threads, and blocks, of the kernels.
pub(crate) const THREADS: u32 = 256;

pub(crate) const BLOCKS: u32 = 64;

/// What the work of a test needs until it is over.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) stream: Stream,
    /// Unloading them may wait for other work.
    pub(crate) kernels: Option<(Function, Function)>,
}

/// A test that could not be waited for.
#[derive(Debug)]
pub(crate) struct Unfinished {
    pub(crate) work: Work,
    /// Its block and both addresses, until they are given back.
    pub(crate) memory: Option<(u32, [u64; 2])>,
}

/// What came of tests that could not be waited for.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// Bytes given back.
    pub released: u64,
    /// None of them holds memory any more.
    pub is_over: bool,
}

/// Kernels and the addresses that they work on.
pub(crate) struct Bench<'a> {
    pub(crate) entered: &'a Entered<'a>,
    pub(crate) stream: sys::CUstream,
    /// Both addresses of the memory.
    pub(crate) sides: [u64; 2],
    pub(crate) kernels: Option<&'a (Function, Function)>,
}

/// Without a way out of the loop, which vectors have none of.
fn all_are(found: &[u32], word: u32) -> bool {
    found.iter().fold(0, |wrong, found| wrong | (found ^ word)) == 0
}

impl Bench<'_> {
    /// Whether every word that was written through one side was read through the other.
    pub(crate) fn run(&self) -> Result<bool, DriverError> {
        let all = (PHYSICAL_GRANULE / 4) as usize;
        // SAFETY: the memory is the test's, and that large.
        unsafe { self.entered.memset_d32(self.sides[0], 0, all, self.stream) }?;
        let (mut word, mut expected) = (0x5eed_0000, Vec::new());
        let mut to = self.sides[0] + COUNT_AT + READ_BEHIND;
        for round in 0..u64::from(ROUNDS) {
            let at = round * 4 * COPIED as u64;
            for (write, read) in [(0, 1), (1, 0)] {
                word += 1;
                let (write, read) = (self.sides[write], self.sides[read]);
                self.copies(write + at, read + at, word, to)?;
                expected.push((COPIED, word));
                to += 4 * COPIED as u64;
                self.moves(write + at, read + at, word ^ 0xffff, to)?;
                expected.push((COPIED / 2, word ^ 0xffff));
                to += 2 * COPIED as u64;
                if let Some((fill, check)) = self.kernels {
                    self.launches(fill, check, write, read, word)?;
                }
            }
        }
        let behind = (READ_BEHIND / 4) as usize;
        let found = vec![0; behind + READ * ROUNDS as usize];
        // What was read lies there through the first side: the host reads it through the second.
        // SAFETY: the memory is the test's, and has as many words; the stream is alive.
        let found = unsafe {
            self.entered
                .read_words(self.sides[1] + COUNT_AT, found, self.stream)
        }?;
        let (counts, mut read) = found.split_at(behind);
        let mut good = counts.first() == Some(&0);
        for (words, word) in expected {
            let (first, rest) = read.split_at(words.min(read.len()));
            good &= all_are(first, word);
            read = rest;
        }
        Ok(good)
    }

    fn copy(&self, to: u64, from: u64, words: usize) -> Result<(), DriverError> {
        // SAFETY: the memory is the test's, and has as many words in either place, apart; the stream is alive.
        unsafe {
            self.entered
                .copy_device_to_device(to, from, 4 * words, self.stream)
        }
    }

    fn copies(&self, write: u64, read: u64, word: u32, to: u64) -> Result<(), DriverError> {
        // Brings the old words into the caches on the reading side.
        self.copy(to, read, COPIED)?;
        // SAFETY: the memory is the test's, and has as many words.
        unsafe { self.entered.memset_d32(write, word, COPIED, self.stream) }?;
        self.copy(to, read, COPIED)
    }

    fn moves(&self, write: u64, read: u64, word: u32, to: u64) -> Result<(), DriverError> {
        let half = COPIED / 2;
        let behind = 2 * COPIED as u64;
        // SAFETY: as above.
        unsafe { self.entered.memset_d32(write, word, half, self.stream) }?;
        self.copy(read + behind, read, half)?;
        self.copy(to, write + behind, half)
    }

    fn launches(
        &self,
        fill: &Function,
        check: &Function,
        write: u64,
        read: u64,
        seed: u32,
    ) -> Result<(), DriverError> {
        let count = self.sides[0] + COUNT_AT;
        let ignored = count + 4;
        // Brings the old words into the caches on the reading side.
        self.check(check, read, seed, ignored)?;
        let (mut ptr, mut words, mut first) = (write, WORDS as u64, seed);
        let mut parameters = [
            (&raw mut ptr).cast::<c_void>(),
            (&raw mut words).cast(),
            (&raw mut first).cast(),
        ];
        self.launch(fill, &mut parameters)?;
        self.check(check, read, seed, count)
    }

    pub(crate) fn check(
        &self,
        check: &Function,
        mut ptr: u64,
        mut seed: u32,
        mut count: u64,
    ) -> Result<(), DriverError> {
        let mut words = WORDS as u64;
        let mut parameters = [
            (&raw mut ptr).cast::<c_void>(),
            (&raw mut words).cast(),
            (&raw mut seed).cast(),
            (&raw mut count).cast(),
        ];
        self.launch(check, &mut parameters)
    }

    pub(crate) fn launch(
        &self,
        kernel: &Function,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let (grid, block) = ([BLOCKS, 1, 1], [THREADS, 1, 1]);
        // SAFETY: the parameters are those that the kernels' text declares; the memory is the
        // test's; the module is loaded until the stream was waited for.
        unsafe {
            self.entered
                .launch(kernel, grid, block, 0, self.stream, parameters)
        }
    }
}
