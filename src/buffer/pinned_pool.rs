//! A pool of page-locked host memory.

#![forbid(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::driver::{Context, process};
use crate::error::{Error, InvalidArgument, RareLog};
use crate::locks::held::Mutex;
use crate::resource::Usage;
use crate::sync::event::EventPools;

use super::element::{DeviceCopy, bytes_of};
use super::pinned::{HostBlock, PinnedBuffer};

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
    /// 4 blocks initially, at most 32, of 4 MiB, oversize allowed.
    pub const fn new() -> Self {
        PinnedConfig {
            initial: 4,
            maximum: 32,
            buffer_bytes: 4 << 20,
            oversize: true,
        }
    }

    /// Sets how many blocks are made with the pool.
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

/// Page-locked host memory for copies to and from devices: blocks of one size that are made once and reused, the last
/// returned first.
///
/// Clones are handles to the same pool; all methods may be called from any thread. Driver calls are made without the
/// pool's lock. A [`PinnedBuffer`] of the pool returns when it is dropped, also as a part of a
/// [`CopyInFlight`](crate::CopyInFlight), and its block is handed out again only after the copy. A return never waits
/// for the device, except that of an oversize block, which it frees: the driver may wait for running work.
///
/// ```
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, DeviceBuffer};
/// use cualloc::pool::{PinnedConfig, PinnedPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let pool = PinnedPool::new(&context, PinnedConfig::new())?;
/// let mut on_device = DeviceBuffer::<f32>::zeroed(&allocator, 1000, &stream)?;
/// drop(on_device.upload(pool.acquire(1000)?.write(&[1.5; 1000])?, &stream)?);
/// let copy = on_device.download(pool.acquire(1000)?, &stream)?;
/// assert_eq!(copy.wait()?[..], [1.5; 1000]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

pub(crate) struct Inner {
    context: Context,
    config: PinnedConfig,
    state: Mutex<State>,
    events: EventPools,
    log: RareLog,
}

/// The blocks that are not in use, and the figures of all.
#[derive(Default)]
struct State {
    generation: u64,
    /// Blocks to be handed out; the last returned at the end.
    free: Vec<HostBlock>,
    /// Blocks that work may still use, to be kept afterwards or freed.
    waiting: Vec<HostBlock>,
    /// Waiting blocks that a call has taken out to query them: they may be free in a moment.
    looked_at: usize,
    /// Of this generation: blocks in use, their bytes, the bytes of all blocks, hits and misses.
    usage: Usage,
    /// Blocks of the pool's own size that exist or are being made, of which there is a maximum.
    pooled: usize,
}

impl State {
    /// Reserves the place of a block of the pool's own size, if it is wanted and below the maximum; the generation.
    fn begin(&mut self, config: &PinnedConfig, wanted: impl Fn(&State) -> bool) -> Option<u64> {
        let may = wanted(self) && self.pooled < config.maximum;
        self.pooled += usize::from(may);
        may.then_some(self.generation)
    }

    /// Counts a block as in use, unless a restart has begun another generation while it was made.
    fn lend(&mut self, block: &HostBlock) {
        if block.generation == self.generation {
            self.usage.blocks.add(1);
            self.usage.used.add(block.bytes() as u64);
        }
    }

    /// Takes back a block that was in use. Returns it if it is to be freed now.
    fn returned(&mut self, block: HostBlock, own_size: usize) -> Option<HostBlock> {
        if block.generation == self.generation {
            self.usage.blocks.sub(1);
            self.usage.used.sub(block.bytes() as u64);
        }
        self.put_away(block, own_size)
    }

    /// Puts a block that is not in use where it belongs. Returns it if it is to be freed now.
    fn put_away(&mut self, mut block: HostBlock, own_size: usize) -> Option<HostBlock> {
        let busy = block.is_busy();
        if block.generation == self.generation {
            let pooled = block.bytes() == own_size;
            if pooled && !block.is_lost() {
                match busy {
                    true => self.waiting.push(block),
                    false => self.free.push(block),
                }
                return None;
            }
            self.usage.reserved.sub(block.bytes() as u64);
            self.pooled -= usize::from(pooled);
            block.generation = 0;
        }
        if busy {
            self.waiting.push(block);
            return None;
        }
        Some(block)
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
        let state = State {
            generation: 1,
            ..State::default()
        };
        let pool = PinnedPool(Arc::new(Inner {
            context: context.clone(),
            config,
            state: Mutex::new(state),
            events: EventPools::of(context),
            log: RareLog::default(),
        }));
        pool.warm_up(config.initial)?;
        Ok(pool)
    }

    /// Makes blocks until `blocks` are free, as far as the maximum allows.
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

    /// A buffer of `len` elements that are not initialised: in a free block, in a new one up to the maximum, or, above
    /// the size of a block, in one of its own.
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
        let bytes = bytes_of::<T>(len)?;
        let oversize = bytes > config.buffer_bytes;
        if oversize && !config.oversize {
            return Err(Error::Invalid(InvalidArgument::TooSmall {
                needed: bytes,
                usable: config.buffer_bytes,
            }));
        }
        let mut block = match oversize {
            true => self.0.make(pages(bytes)?, self.generation())?,
            false => self.0.free_or_new()?,
        };
        block.home = Some(Arc::clone(&self.0));
        PinnedBuffer::over(block, len)
    }

    /// Begins a new generation, after the device's state was lost: blocks in use do not return to the pool, free ones
    /// are freed, and the figures start from 0. Returns the new generation.
    pub fn restart(&self) -> u64 {
        let (generation, free) = self.0.change(|state| {
            let free = std::mem::take(&mut state.free);
            *state = State {
                generation: state.generation + 1,
                waiting: std::mem::take(&mut state.waiting),
                looked_at: state.looked_at,
                ..State::default()
            };
            (state.generation, free)
        });
        // Freed without the lock.
        drop(free);
        generation
    }

    /// Frees free blocks until at most `keep` bytes of them are left, the longest idle first; returns the freed bytes.
    pub fn trim(&self, keep: u64) -> u64 {
        // In a forked child there are none.
        let _ = self.0.reap();
        let own_size = self.0.config.buffer_bytes;
        let gone = self.0.change(|state| {
            let kept = usize::try_from(keep / own_size as u64).unwrap_or(usize::MAX);
            let surplus = state.free.len().saturating_sub(kept);
            state.pooled -= surplus;
            state.usage.reserved.sub((surplus * own_size) as u64);
            state.free.drain(..surplus).collect::<Vec<_>>()
        });
        // Freed without the lock.
        (gone.len() * own_size) as u64
    }

    /// The figures of the generation at one instant, after a query of the copies in flight: blocks in use and their
    /// bytes, the bytes of all blocks as reserved, those of blocks that returned with work in flight as pending, and the
    /// number of free blocks.
    pub fn usage(&self) -> Usage {
        // In a forked child there is nothing.
        let _ = self.0.reap();
        let own_size = self.0.config.buffer_bytes;
        self.0.change(|state| {
            let usage = state.usage;
            let free = (state.free.len() * own_size) as u64;
            Usage {
                pending: usage.cached_bytes() - free,
                cached_blocks: state.free.len() as u64,
                requests: usage.hits + usage.misses,
                ..usage
            }
        })
    }

    /// The generation, counted from 1.
    pub fn generation(&self) -> u64 {
        self.0.generation()
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

    /// A block of the pool's own size, for use: a free one, else a new one up to the maximum.
    fn free_or_new(&self) -> Result<HostBlock, Error> {
        loop {
            let (free, begun, looked_at) = self.change(|state| {
                let Some(block) = state.free.pop() else {
                    let begun = state.begin(&self.config, |_| true);
                    return (None, begun, state.looked_at);
                };
                state.lend(&block);
                state.usage.hits += 1;
                (Some(block), None, 0)
            });
            match (free, begun) {
                (Some(block), _) => return Ok(block),
                (None, Some(generation)) => return self.make(self.config.buffer_bytes, generation),
                // Another call is about to find out whether blocks are free.
                (None, None) if looked_at > 0 => std::thread::yield_now(),
                (None, None) => {
                    let (what, maximum) = ("buffers", self.config.maximum);
                    return Err(Error::Exhausted { what, maximum });
                }
            }
        }
    }

    /// Makes a block, for use; one of the pool's own size was [begun](State::begin).
    fn make(&self, bytes: usize, generation: u64) -> Result<HostBlock, Error> {
        let made = HostBlock::new(&self.context, bytes, self.events.clone());
        self.change(|state| match made {
            Ok(mut block) => {
                block.generation = generation;
                if generation == state.generation {
                    state.usage.reserved.add(bytes as u64);
                    state.usage.misses += 1;
                }
                state.lend(&block);
                Ok(block)
            }
            Err(error) => {
                // There may be another one in its place.
                if bytes == self.config.buffer_bytes && generation == state.generation {
                    state.pooled -= 1;
                }
                Err(error)
            }
        })
    }

    /// Queries which blocks can be reused, or freed.
    fn reap(&self) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        let waiting = self.change(|state| {
            state.looked_at += state.waiting.len();
            std::mem::take(&mut state.waiting)
        });
        for mut block in waiting {
            let before = block.is_lost();
            if let Err(error) = block.look()
                && block.is_lost() != before
                && let Some(count) = self.log.due()
            {
                log::warn!("leaking page-locked memory (occurrence {count}): {error}");
            }
            let gone = self.change(|state| {
                state.looked_at -= 1;
                state.put_away(block, self.config.buffer_bytes)
            });
            // Freed without the lock.
            drop(gone);
        }
        Ok(())
    }

    /// The generation whose blocks copies may use.
    pub(super) fn generation(&self) -> u64 {
        self.change(|state| state.generation)
    }

    /// Takes back a dropped block with the work that may still use it. Makes no driver call, except to free a block
    /// that is not kept.
    pub(super) fn take_back(&self, block: HostBlock) {
        if process::is_forked_child() {
            // A forked child has no pool to return it to.
            return std::mem::forget(block);
        }
        let gone = self.change(|state| state.returned(block, self.config.buffer_bytes));
        // Freed without the lock.
        drop(gone);
    }
}

debug_fields!(PinnedPool, self => config: self.0.config, usage: self.usage());
