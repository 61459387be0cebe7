//! Page-locked host memory that is made once and used again and again.

#![forbid(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

use crate::buffer::{DeviceCopy, HostBlock, HostPool, PinnedBuffer, host_bytes};
use crate::driver::{Context, process};
use crate::error::{Error, InvalidArgument};
use crate::sync::event::EventPools;

use super::RareLog;

/// The system locks memory in pages of this many bytes.
const PAGE: usize = 4096;

/// Settings of a [`PinnedPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedConfig {
    initial: usize,
    maximum: usize,
    buffer_bytes: usize,
    oversize: bool,
}

impl PinnedConfig {
    /// 4 blocks at once, at most 32, of 4 MiB, oversize allowed.
    pub const fn new() -> Self {
        PinnedConfig {
            initial: 4,
            maximum: 32,
            buffer_bytes: 4 << 20,
            oversize: true,
        }
    }

    /// Sets how many blocks are made at once.
    pub const fn initial(mut self, blocks: usize) -> Self {
        self.initial = blocks;
        self
    }

    /// Sets the most blocks that there may be: in use, in flight and free.
    pub const fn maximum(mut self, blocks: usize) -> Self {
        self.maximum = blocks;
        self
    }

    /// Sets the bytes of a block.
    pub const fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Sets whether a request for more than a block gets memory of its own, which is not kept.
    pub const fn oversize(mut self, on: bool) -> Self {
        self.oversize = on;
        self
    }
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Figures of a [`PinnedPool`]: of its current generation, but for `stale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PinnedStats {
    /// Blocks in use, oversize ones included.
    pub in_use: usize,
    /// Blocks to be had at once.
    pub free: usize,
    /// Blocks that were returned while copies were in flight.
    pub in_flight: usize,
    /// Blocks there are: the three together.
    pub total: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks of earlier generations, and such as are to be freed, that copies still use or that are in use.
    pub stale: usize,
    /// The generation, counted from 1.
    pub generation: u64,
}

/// Page-locked host memory for copies to and from devices: blocks of one size that are made once and
/// used again and again, the last returned first.
///
/// Clones are handles to the same pool; all methods may be called from any thread. Driver calls are
/// made without the pool's lock. A [`PinnedBuffer`] of the pool returns when it is dropped, also as a part of a
/// [`CopyInFlight`](crate::CopyInFlight), and its block is handed out again only after the copy.
///
/// Returning never waits for the device, except that an oversize block is freed by it, which the
/// driver may do only after work that runs.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, DeviceBuffer};
/// use cualloc::pool::{PinnedConfig, PinnedPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let pool = PinnedPool::new(&context, PinnedConfig::new())?;
/// let mut on_device = DeviceBuffer::<f32>::zeroed(&allocator, 1000, &stream)?;
/// drop(on_device.upload(pool.acquire(1000)?.write(&[1.5; 1000])?, &stream)?);
/// let copy = on_device.download(pool.acquire(1000)?, &stream)?;
/// assert_eq!(copy.wait()?[..], [1.5; 1000]);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

struct Inner {
    context: Context,
    config: PinnedConfig,
    state: Mutex<State>,
    events: EventPools,
    log: RareLog,
}

/// The blocks that nobody uses, and numbers of all.
#[derive(Default)]
struct State {
    generation: u64,
    /// Blocks to be handed out; the last returned at the end.
    free: Vec<HostBlock>,
    /// Blocks that work may still use, to be kept afterwards or freed.
    waiting: Vec<HostBlock>,
    /// Blocks of this generation: in use, in flight and free.
    blocks: usize,
    /// Their bytes.
    bytes: u64,
    /// Those in use.
    in_use: usize,
    /// Those of the pool's own size, and those that are being made, of which there is a maximum.
    pooled: usize,
    /// Blocks of earlier generations, and such as are to be freed.
    stale: usize,
}

impl State {
    /// A block of the pool's own size is to be made, if it is wanted and there may be one more; the generation.
    fn begin(&mut self, config: &PinnedConfig, wanted: impl Fn(&State) -> bool) -> Option<u64> {
        let may = wanted(self) && self.pooled < config.maximum;
        self.pooled += usize::from(may);
        may.then_some(self.generation)
    }

    /// A block was made, and is in use.
    fn made(&mut self, block: &HostBlock) {
        if block.generation == self.generation {
            self.blocks += 1;
            self.bytes += block.bytes() as u64;
            self.in_use += 1;
        } else {
            // Restarted while it was made.
            self.stale += 1;
        }
    }

    /// A block of the pool's own size was not made.
    fn not_made(&mut self, generation: u64) {
        if generation == self.generation {
            self.pooled -= 1;
        }
    }

    /// Takes back a block that was in use; one that is to be freed now.
    fn returned(&mut self, block: HostBlock, own_size: usize) -> Option<HostBlock> {
        if block.generation == self.generation {
            self.in_use -= 1;
        }
        self.settle(block, own_size)
    }

    /// Puts a block that is not in use where it belongs; one that is to be freed now.
    fn settle(&mut self, mut block: HostBlock, own_size: usize) -> Option<HostBlock> {
        let busy = block.is_busy();
        let pooled = block.bytes() == own_size;
        if block.generation == self.generation {
            if pooled && !block.is_lost() {
                let list = if busy {
                    &mut self.waiting
                } else {
                    &mut self.free
                };
                list.push(block);
                return None;
            }
            self.blocks -= 1;
            self.bytes -= block.bytes() as u64;
            self.pooled -= usize::from(pooled);
            self.stale += 1;
            block.generation = 0;
        }
        if busy {
            self.waiting.push(block);
            return None;
        }
        self.stale -= 1;
        Some(block)
    }

    fn stats(&self) -> PinnedStats {
        PinnedStats {
            in_use: self.in_use,
            free: self.free.len(),
            in_flight: self.blocks - self.in_use - self.free.len(),
            total: self.blocks,
            bytes: self.bytes,
            stale: self.stale,
            generation: self.generation,
        }
    }
}

impl PinnedPool {
    /// A pool with its initial blocks. They are usable with every context.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] for blocks of 0 bytes, or too many, [`InvalidArgument::Contradiction`] for more
    /// initial blocks than the maximum, driver errors.
    pub fn new(context: &Context, mut config: PinnedConfig) -> Result<PinnedPool, Error> {
        if config.buffer_bytes == 0 {
            return Err(InvalidArgument::Size { bytes: 0 }.into());
        }
        config.buffer_bytes = pages(config.buffer_bytes)?;
        if config.initial > config.maximum {
            return Err(Error::Invalid(InvalidArgument::Contradiction {
                larger: "initial",
                value: config.initial as u64,
                bound: "maximum",
                limit: config.maximum as u64,
            }));
        }
        let pool = PinnedPool(Arc::new(Inner {
            context: context.clone(),
            config,
            state: Mutex::new(State {
                generation: 1,
                ..State::default()
            }),
            events: EventPools::of(context),
            log: RareLog::default(),
        }));
        pool.warm_up(config.initial)?;
        Ok(pool)
    }

    /// Makes blocks until so many are free, as far as the maximum allows.
    ///
    /// # Errors
    /// Driver errors; blocks made before stay.
    pub fn warm_up(&self, blocks: usize) -> Result<(), Error> {
        self.0.reap()?;
        let wanted = |state: &State| state.free.len() < blocks;
        while let Some(generation) = self.0.change(|state| state.begin(&self.0.config, wanted)) {
            let made = self.0.make(self.0.config.buffer_bytes, generation)?;
            self.0.take_back(made);
        }
        Ok(())
    }

    /// A buffer of `len` elements that are not initialised: in a free block, or a new one up to the maximum, or
    /// above the size of a block one of its own.
    ///
    /// # Errors
    /// [`Error::Exhausted`], [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`] for more than a block if
    /// oversize is not allowed, [`InvalidArgument::Misaligned`] for an element type of unusual alignment, driver
    /// errors. Nothing has changed then.
    pub fn acquire<T: DeviceCopy>(
        &self,
        len: usize,
    ) -> Result<PinnedBuffer<MaybeUninit<T>>, Error> {
        self.0.reap()?;
        let config = &self.0.config;
        let bytes = host_bytes::<T>(len)?;
        let oversize = bytes > config.buffer_bytes;
        if oversize && !config.oversize {
            return Err(Error::Invalid(InvalidArgument::TooSmall {
                needed: bytes,
                usable: config.buffer_bytes,
            }));
        }
        let found = self.0.change(|state| {
            if oversize {
                return Ok(Err(state.generation));
            }
            if let Some(block) = state.free.pop() {
                state.in_use += 1;
                return Ok(Ok(block));
            }
            state
                .begin(config, |_| true)
                .map(Err)
                .ok_or(Error::Exhausted {
                    what: "buffers",
                    maximum: config.maximum,
                })
        })?;
        let mut block = match found {
            Ok(block) => block,
            Err(generation) if oversize => self.0.make(pages(bytes)?, generation)?,
            Err(generation) => self.0.make(config.buffer_bytes, generation)?,
        };
        block.home = Some(Arc::clone(&self.0) as Arc<dyn HostPool>);
        PinnedBuffer::over(block, len)
    }

    /// Begins a new generation, for when the device's state was lost: blocks in use are not taken back
    /// any more, free ones are freed, and the figures begin anew. Returns the new generation.
    pub fn restart(&self) -> u64 {
        let (generation, free) = self.0.change(|state| {
            let free = std::mem::take(&mut state.free);
            *state = State {
                generation: state.generation + 1,
                stale: state.stale + state.blocks - free.len(),
                waiting: std::mem::take(&mut state.waiting),
                ..State::default()
            };
            (state.generation, free)
        });
        // Freed without the lock.
        drop(free);
        generation
    }

    /// Frees free blocks until at most `keep` bytes of them are left, the longest idle first; returns how many
    /// bytes went.
    pub fn trim(&self, keep: u64) -> u64 {
        // In a forked child there are none.
        let _ = self.0.reap();
        let own_size = self.0.config.buffer_bytes;
        let gone = self.0.change(|state| {
            let kept = usize::try_from(keep / own_size as u64).unwrap_or(usize::MAX);
            let surplus = state.free.len().saturating_sub(kept);
            state.blocks -= surplus;
            state.pooled -= surplus;
            state.bytes -= (surplus * own_size) as u64;
            state.free.drain(..surplus).collect::<Vec<_>>()
        });
        // Freed without the lock.
        (gone.len() * own_size) as u64
    }

    /// The figures, all of one instant, after looking which copies are over.
    pub fn usage(&self) -> PinnedStats {
        let _ = self.0.reap();
        self.0.change(|state| state.stats())
    }

    /// The generation, counted from 1.
    pub fn generation(&self) -> u64 {
        self.0.change(|state| state.generation)
    }
}

/// Whole pages, so that no two blocks share one.
fn pages(bytes: usize) -> Result<usize, Error> {
    let whole = bytes.checked_next_multiple_of(PAGE);
    whole.ok_or(Error::Invalid(InvalidArgument::Size {
        bytes: bytes as u64,
    }))
}

impl Inner {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut process::lock(&self.state))
    }

    /// Makes a block, for use; one of the pool's own size was [begun](State::begin).
    fn make(&self, bytes: usize, generation: u64) -> Result<HostBlock, Error> {
        let made = HostBlock::new(&self.context, bytes, self.events.clone());
        self.change(|state| match made {
            Ok(mut block) => {
                block.generation = generation;
                state.made(&block);
                Ok(block)
            }
            Err(error) => {
                if bytes == self.config.buffer_bytes {
                    state.not_made(generation);
                }
                Err(error)
            }
        })
    }

    /// Looks which blocks can be used again, or freed.
    fn reap(&self) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        let waiting = self.change(|state| std::mem::take(&mut state.waiting));
        for mut block in waiting {
            let before = block.is_lost();
            if let Err(error) = block.look()
                && block.is_lost() != before
                && let Some(count) = self.log.due()
            {
                log::warn!("page-locked memory is leaked ({count} such events): {error}");
            }
            let gone = self.change(|state| state.settle(block, self.config.buffer_bytes));
            // Freed without the lock.
            drop(gone);
        }
        Ok(())
    }
}

impl HostPool for Inner {
    fn generation(&self) -> u64 {
        self.change(|state| state.generation)
    }

    fn take_back(&self, block: HostBlock) {
        if process::is_forked_child() {
            // There is nothing to give back to.
            return std::mem::forget(block);
        }
        let gone = self.change(|state| state.returned(block, self.config.buffer_bytes));
        // Freed without the lock.
        drop(gone);
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("config", &self.0.config)
            .field("usage", &self.usage())
            .finish()
    }
}
