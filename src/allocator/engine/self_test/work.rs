//! The device work of the self-test of views.
//!
//! All work is submitted before anything is waited for: where other streams keep the device busy, each wait takes as
//! long as one of their kernels. Until the end the words that were read stay on the device; then they are copied to the
//! host.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::{DriverError, Entered, Function, Stream, sys};

use crate::allocator::size::PHYSICAL_GRANULE;
use crate::locks::held::Mutex;

/// Number of words written and read: more than the first-level caches of a few multiprocessors hold.
pub(crate) const WORDS: usize = 128 << 10;

/// Offset of the kernels' count of wrong words, past the words.
pub(crate) const COUNT_AT: u64 = 4 * WORDS as u64;

/// Distance from there to the words that were read.
const READ_BEHIND: u64 = 4 << 10;

/// Words that are copied or moved at a time; each round uses others.
const COPIED: usize = 32 << 10;

/// Number of rounds.
pub(crate) const ROUNDS: u32 = 3;

/// Words read in a round: the copied and the moved ones, in both directions.
const READ: usize = 2 * (COPIED + COPIED / 2);

const _: () = assert!(COPIED * ROUNDS as usize <= WORDS);
const _: () =
    assert!(COUNT_AT + READ_BEHIND + 4 * (READ * ROUNDS as usize) as u64 <= PHYSICAL_GRANULE);

/// Threads of a thread block, and thread blocks, of the kernels.
pub(crate) const THREADS: u32 = 256;

pub(crate) const BLOCKS: u32 = 64;

/// Resources that the work of a test uses until it is complete.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) stream: Stream,
    /// Unloading the kernels may wait for other work.
    pub(crate) kernels: Option<(Function, Function)>,
}

/// A test whose work could not be waited for.
#[derive(Debug)]
pub(crate) struct Unfinished {
    pub(crate) work: Work,
    /// The block of the test's memory and its two addresses, until it is released.
    pub(crate) memory: Option<(u32, [u64; 2])>,
}

/// Whether an allocator may use views, and the self-tests that decide it.
#[derive(Debug)]
pub(crate) struct ViewTests {
    /// Whether the settings allow views.
    pub(crate) enabled: bool,
    /// Whether the device is tested before the first view.
    pub(crate) required: bool,
    /// Whether the device failed the test.
    pub(crate) failed: AtomicBool,
    /// Tests that could not be waited for.
    pub(crate) unfinished: Mutex<Vec<Unfinished>>,
}

impl ViewTests {
    pub(crate) fn new(enabled: bool, required: bool) -> Self {
        ViewTests {
            enabled,
            required,
            failed: AtomicBool::new(false),
            unfinished: Mutex::default(),
        }
    }

    /// Whether views may be used, as far as is known.
    pub(crate) fn are_allowed(&self) -> bool {
        self.enabled && !self.failed.load(Ordering::Relaxed)
    }
}

/// Result of looking at tests that could not be waited for.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// Bytes released.
    pub released: u64,
    /// Whether none of the tests holds memory any more.
    pub is_over: bool,
}

/// The device work of a test: rounds of writes and reads.
pub(crate) struct Rounds<'a> {
    pub(crate) entered: &'a Entered<'a>,
    pub(crate) stream: sys::CUstream,
    /// Both addresses of the memory.
    pub(crate) sides: [u64; 2],
    pub(crate) kernels: Option<&'a (Function, Function)>,
}

/// A loop without an early exit can be vectorised.
fn all_are(found: &[u32], word: u32) -> bool {
    found.iter().fold(0, |wrong, found| wrong | (found ^ word)) == 0
}

impl Rounds<'_> {
    /// Whether every word that was written through one mapping was read through the other.
    pub(crate) fn run(&self) -> Result<bool, DriverError> {
        let all = (PHYSICAL_GRANULE / 4) as usize;
        // SAFETY: the memory belongs to the test and is at least that large.
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
                self.move_words(write + at, read + at, word ^ 0xffff, to)?;
                expected.push((COPIED / 2, word ^ 0xffff));
                to += 2 * COPIED as u64;
                if let Some((fill, check)) = self.kernels {
                    self.launches(fill, check, write, read, word)?;
                }
            }
        }
        let behind = (READ_BEHIND / 4) as usize;
        let found = vec![0; behind + READ * ROUNDS as usize];
        // The words were stored through the first mapping; the host reads them through the second.
        // SAFETY: the memory belongs to the test and holds that many words; the stream is alive.
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
        // SAFETY: the memory belongs to the test, and both ranges lie in it without overlap; the stream is alive.
        unsafe {
            self.entered
                .copy_device_to_device(to, from, 4 * words, self.stream)
        }
    }

    fn copies(&self, write: u64, read: u64, word: u32, to: u64) -> Result<(), DriverError> {
        // Loads the old words into the caches of the reading side.
        self.copy(to, read, COPIED)?;
        // SAFETY: the memory belongs to the test and holds that many words.
        unsafe { self.entered.memset_d32(write, word, COPIED, self.stream) }?;
        self.copy(to, read, COPIED)
    }

    fn move_words(&self, write: u64, read: u64, word: u32, to: u64) -> Result<(), DriverError> {
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
        // Loads the old words into the caches of the reading side.
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
        // SAFETY: the parameters match the declarations of the kernels; the memory belongs to the test; the module
        // stays loaded until the stream has been waited for.
        unsafe {
            self.entered
                .launch(kernel, grid, block, 0, self.stream, parameters)
        }
    }
}
