//! The work that a replay submits to the device between the allocator's calls: none, a use of each block before it is
//! freed, or a fill and a check of each block's words.

use super::format::Trace;
use super::stage::ReplayDevice;
use crate::driver::{DriverError, Entered, Function, Stream, WORD_KERNELS, sys};
use std::ffi::c_void;

/// Threads per thread block, which every GPU supports.
const THREADS: u32 = 256;

/// Number of thread blocks that occupy the largest GPUs, small enough to start quickly.
const GRID_LIMIT: u64 = 1024;

/// One in this many checks is delayed when there are several streams.
const DELAY_ONE_IN: u64 = 16;

/// The longest delay. A row is submitted in a few microseconds, so a delayed check is dozens of rows behind, any of
/// which could wrongly get its block.
const DELAY_NANOSECONDS: u64 = 200_000;

#[derive(Clone, Copy)]
pub(super) struct Use<'a> {
    pub(super) stream: &'a Stream,
    pub(super) address: sys::CUdeviceptr,
    pub(super) bytes: u64,
    pub(super) id: usize,
}

/// The work around the allocator's calls. A replay without work is compiled separately, so that its time is that of the
/// allocator.
pub(super) trait Work {
    /// Called when the block was just allocated.
    #[inline]
    fn allocated(&mut self, _: Use<'_>) -> Result<(), DriverError> {
        Ok(())
    }
    /// Called when the block is about to be freed.
    #[inline]
    fn releasing(&mut self, _: Use<'_>) -> Result<(), DriverError> {
        Ok(())
    }
    /// Called when a row is over.
    #[inline]
    fn row_over(&mut self) {}
    /// Returns the time that the simulator has charged for this work, in nanoseconds.
    fn modelled_nanos(&self) -> u64 {
        0
    }
}

pub(super) struct Nothing;

impl Work for Nothing {}

/// Kernels on the blocks' own streams.
pub(super) struct Kernels<'a> {
    stage: &'a ReplayDevice,
    entered: &'a Entered<'a>,
    fill: Function,
    check: Function,
    spin: Function,
    /// The counter of mismatches; `None`: blocks are used, not verified.
    mismatches: Option<sys::CUdeviceptr>,
    delays: bool,
    random: u64,
    replay: u32,
    modelled_nanos: u64,
}

impl<'a> Kernels<'a> {
    /// Loads the kernels, and with `verify` allocates and clears the counter.
    pub(super) fn new(
        stage: &'a ReplayDevice,
        entered: &'a Entered<'a>,
        trace: &Trace,
        verify: bool,
        seed: u64,
    ) -> Result<Kernels<'a>, DriverError> {
        let module = entered.load_module(WORD_KERNELS)?;
        let mut kernels = Kernels {
            stage,
            entered,
            fill: module.function(c"cualloc_fill")?,
            check: module.function(c"cualloc_check")?,
            spin: module.function(c"cualloc_spin")?,
            mismatches: None,
            delays: verify && trace.streams().len() > 1,
            random: seed,
            replay: 0,
            modelled_nanos: 0,
        };
        if verify {
            let word = entered.mem_alloc(size_of::<u32>())?;
            kernels.mismatches = Some(word);
            let stream = Stream::new(stage.own())?;
            // SAFETY: the word was just allocated and is freed only by `finish`.
            unsafe { entered.memset_d32(word, 0, 1, stream.raw()) }?;
            stream.synchronize()?;
        }
        Ok(kernels)
    }

    /// Gives blocks from here on other words than in earlier replays.
    pub(super) fn begin_replay(&mut self) {
        self.replay = self.replay.wrapping_add(1);
    }

    /// Waits for the device and reads the number of wrong words; frees the counter.
    pub(super) fn finish(mut self) -> Result<Option<u64>, DriverError> {
        self.entered.synchronize()?;
        let Some(word) = self.mismatches else {
            return Ok(None);
        };
        let stream = Stream::new(self.stage.own())?;
        // SAFETY: one word, that `new` allocated.
        let count = unsafe { self.entered.read_words(word, vec![0], stream.raw()) }?;
        self.free_word()?;
        Ok(Some(count.into_iter().map(u64::from).sum()))
    }

    /// Frees the counter once all work of the context is complete.
    fn free_word(&mut self) -> Result<(), DriverError> {
        let Some(word) = self.mismatches else {
            return Ok(());
        };
        self.entered.synchronize()?;
        // SAFETY: all work of the context was waited for, and no one else knows the word.
        unsafe { self.entered.mem_free(word) }?;
        self.mismatches = None;
        Ok(())
    }

    /// Returns the first word of a block: mixed, so that two blocks that overlap in any way have different words.
    fn words_of(&self, block: Use<'_>) -> (u64, u32) {
        let mixed = mix(block.id as u64 ^ (u64::from(self.replay) << 40));
        (block.bytes / size_of::<u32>() as u64, mixed as u32)
    }

    fn launch(
        &mut self,
        function: &Function,
        words: u64,
        stream: &Stream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let before = self.stage.modelled_nanos();
        let grid = words.div_ceil(u64::from(THREADS)).clamp(1, GRID_LIMIT) as u32;
        // SAFETY: the parameters are those of the kernel's text, and the driver copies them before
        // it returns. The addresses are of a live block and of the counter.
        let launched = unsafe {
            self.entered.launch(
                function,
                [grid, 1, 1],
                [THREADS, 1, 1],
                0,
                stream.raw(),
                parameters,
            )
        };
        if let (Some(before), Some(after)) = (before, self.stage.modelled_nanos()) {
            self.modelled_nanos += after.saturating_sub(before);
        }
        launched
    }

    fn spin(&mut self, mut nanoseconds: u64, stream: &Stream) -> Result<(), DriverError> {
        let function = self.spin.clone();
        self.launch(&function, 1, stream, &mut [(&raw mut nanoseconds).cast()])
    }

    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.random)
    }
}

impl Drop for Kernels<'_> {
    fn drop(&mut self) {
        // A failure may be transient, and there is no later chance to retry.
        if let Err(error) = self.free_word().or_else(|_| self.free_word()) {
            log::warn!("leaking the counter of mismatches: {error}");
        }
    }
}

impl Work for Kernels<'_> {
    fn allocated(&mut self, block: Use<'_>) -> Result<(), DriverError> {
        let (mut words, mut seed) = self.words_of(block);
        if self.mismatches.is_none() || words == 0 {
            return Ok(());
        }
        let mut address = block.address;
        let function = self.fill.clone();
        self.launch(
            &function,
            words,
            block.stream,
            &mut [
                (&raw mut address).cast(),
                (&raw mut words).cast(),
                (&raw mut seed).cast(),
            ],
        )
    }

    fn releasing(&mut self, block: Use<'_>) -> Result<(), DriverError> {
        let (mut words, mut seed) = self.words_of(block);
        let Some(mut mismatches) = self.mismatches.filter(|_| words > 0) else {
            // Without a check, this work is the block's last use.
            return self.spin(0, block.stream);
        };
        if self.delays && self.random().is_multiple_of(DELAY_ONE_IN) {
            let nanoseconds = self.random() % DELAY_NANOSECONDS;
            self.spin(nanoseconds, block.stream)?;
        }
        let mut address = block.address;
        let function = self.check.clone();
        self.launch(
            &function,
            words,
            block.stream,
            &mut [
                (&raw mut address).cast(),
                (&raw mut words).cast(),
                (&raw mut seed).cast(),
                (&raw mut mismatches).cast(),
            ],
        )
    }

    fn row_over(&mut self) {
        self.stage.advance_row();
    }

    fn modelled_nanos(&self) -> u64 {
        self.modelled_nanos
    }
}

/// A bijection that spreads every bit of `value` over all bits of the result.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
