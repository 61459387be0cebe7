//! A pool of page-locked host memory.

#![forbid(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::driver::Context;
use crate::error::{Error, InvalidArgument, RareLog};
use crate::locks::held::Mutex;
use crate::resource::Usage;
use crate::sync::event::EventPools;

use super::element::{DeviceCopy, bytes_of};
use super::host::{HostPool, State, pages};
use super::pinned::PinnedBuffer;

pub use super::host::PinnedConfig;

/// A pool of page-locked host memory: blocks of one size that are reused, the last returned first.
///
/// Clones are handles to the same pool; all methods may be called from any thread. A [`PinnedBuffer`] of the pool
/// returns when it is dropped, also as a part of a [`CopyInFlight`](crate::CopyInFlight), and its block is handed out
/// again only after the copy. A drop does not wait for the device, except that of an oversize block, which is freed.
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
pub struct PinnedPool(Arc<HostPool>);

impl PinnedPool {
    /// Creates a pool with its initial blocks, which are usable with every context.
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
        let pool = PinnedPool(Arc::new(HostPool {
            context: context.clone(),
            config,
            state: Mutex::new(state),
            events: EventPools::of(context),
            log: RareLog::default(),
        }));
        pool.warm_up(config.initial)?;
        Ok(pool)
    }

    /// Allocates blocks until `blocks` are free or the maximum is reached.
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

    /// Returns a buffer of `len` uninitialised elements: in a free block, in a new one up to the maximum, or, above the
    /// size of a block, in one of its own.
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

    /// Begins a new generation, for instance after a context was lost, and returns its number: blocks in use do not
    /// return to the pool, free ones are freed, and the figures start from 0.
    pub fn restart(&self) -> u64 {
        let (generation, free) = self.0.change(|state| {
            let free = std::mem::take(&mut state.free);
            *state = State {
                generation: state.generation + 1,
                waiting: std::mem::take(&mut state.waiting),
                queried: state.queried,
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
        // In a forked child the reap fails, but there the pool has no blocks.
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

    /// Returns consistent figures of the generation, after a query of the copies in flight: blocks in use and their
    /// bytes, all bytes as reserved, those of returned blocks with work in flight as pending, and the number of free
    /// blocks.
    pub fn usage(&self) -> Usage {
        // In a forked child the reap fails, but there the pool has no blocks.
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

debug_fields!(PinnedPool, self => config: self.0.config, usage: self.usage());
