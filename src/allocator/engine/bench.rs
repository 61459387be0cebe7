//! The work of a test of second layouts.

use std::ffi::c_void;

use crate::driver::{DriverError, Entered, Function, Stream, sys};

use crate::allocator::size::PHYSICAL_GRANULE;

/// Words that are written and read: more than the first-level caches of a few multiprocessors hold.
pub(crate) const WORDS: usize = 128 << 10;

/// Where a kernel counts wrong words, from the start of the memory: behind the words.
pub(crate) const COUNT_AT: u64 = PHYSICAL_GRANULE / 2;

/// How often everything is done.
pub(crate) const ROUNDS: u32 = 3;

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
        let mut good = true;
        let mut found = vec![0; WORDS];
        let mut word = 0x5eed_0000;
        for _ in 0..ROUNDS {
            for (write, read) in [(0, 1), (1, 0)] {
                word += 1;
                let (write, read) = (self.sides[write], self.sides[read]);
                good &= self.copies(write, read, word, &mut found)?;
                good &= self.moves(write, read, word ^ 0xffff, &mut found)?;
                if let Some((fill, check)) = self.kernels {
                    good &= self.launches(fill, check, write, read, word)?;
                }
            }
        }
        Ok(good)
    }

    pub(crate) fn read(&self, from: u64, found: &mut Vec<u32>) -> Result<(), DriverError> {
        let read = std::mem::take(found);
        // SAFETY: the memory is the test's, and has as many words; the stream is alive.
        *found = unsafe { self.entered.read_words(from, read, self.stream) }?;
        Ok(())
    }

    pub(crate) fn copies(
        &self,
        write: u64,
        read: u64,
        word: u32,
        found: &mut Vec<u32>,
    ) -> Result<bool, DriverError> {
        self.read(read, found)?;
        // SAFETY: the memory is the test's, and has as many words.
        unsafe { self.entered.memset_d32(write, word, WORDS, self.stream) }?;
        self.read(read, found)?;
        Ok(all_are(found, word))
    }

    pub(crate) fn moves(
        &self,
        write: u64,
        read: u64,
        word: u32,
        found: &mut Vec<u32>,
    ) -> Result<bool, DriverError> {
        let half = WORDS / 2;
        // SAFETY: the memory is the test's; the halves do not overlap.
        unsafe {
            self.entered.memset_d32(write, word, half, self.stream)?;
            let behind = read + half as u64 * 4;
            self.entered
                .copy_device_to_device(behind, read, half * 4, self.stream)?;
        }
        self.read(write, found)?;
        Ok(all_are(found, word))
    }

    pub(crate) fn launches(
        &self,
        fill: &Function,
        check: &Function,
        write: u64,
        read: u64,
        seed: u32,
    ) -> Result<bool, DriverError> {
        let count = self.sides[0] + COUNT_AT;
        let ignored = count + 4;
        // SAFETY: two words of the test's memory behind the words under test.
        unsafe { self.entered.memset_d32(count, 0, 2, self.stream) }?;
        // Brings the old words into the caches on the reading side.
        self.check(check, read, seed, ignored)?;
        let (mut ptr, mut words, mut first) = (write, WORDS as u64, seed);
        let mut parameters = [
            (&raw mut ptr).cast::<c_void>(),
            (&raw mut words).cast(),
            (&raw mut first).cast(),
        ];
        self.launch(fill, &mut parameters)?;
        self.check(check, read, seed, count)?;
        let mut wrong = vec![0];
        self.read(count, &mut wrong)?;
        Ok(wrong == [0])
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
