//! Page-locked host memory on lease, with copies in flight.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::driver::Context;

use super::RareLog;
use super::pinned_buffers::{Buffer, Inner, PinnedConfig, State};
use super::pinned_lease::PinnedLease;
use crate::error::{Error, InvalidArgument};

/// Figures of a [`PinnedPool`]: of its current generation, but for `stale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PinnedStats {
    /// Buffers on lease, oversize ones included.
    pub in_use: usize,
    /// Buffers to be had at once.
    pub free: usize,
    /// Buffers that were returned while copies were in flight.
    pub in_flight: usize,
    /// Buffers there are: the three together.
    pub total: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Buffers of earlier generations, and such as are to be freed, that copies still use or that are
    /// on lease.
    pub stale: usize,
    /// The generation, counted from 1.
    pub generation: u64,
}

/// Page-locked host memory for copies to and from devices: buffers of one size that are made once and
/// leased again and again, the last returned first.
///
/// Clones are handles to the same pool; all methods may be called from any thread. Driver calls are
/// made without the pool's lock. A lease that is dropped while a copy is in flight returns without
/// waiting, and its buffer is leased again only after the copy.
///
/// Returning never waits for the device, except that an oversize buffer is freed by it, which the
/// driver may do only after work that runs.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::{Context, Stream};
/// use cualloc::pool::{PinnedConfig, PinnedPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let pool = PinnedPool::new(&context, PinnedConfig::default())?;
/// let mut lease = pool.acquire(4000)?.typed::<f32>(1000)?;
/// lease.write(&[1.0; 10])?;
/// assert_eq!(lease.initialised()?, &[1.0; 10]);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

impl PinnedPool {
    /// A pool with its initial buffers. They are usable with every context.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] for buffers of 0 bytes, [`InvalidArgument::Contradiction`] for more initial
    /// buffers than the maximum, driver errors.
    pub fn new(context: &Context, config: PinnedConfig) -> Result<PinnedPool, Error> {
        if config.buffer_bytes == 0 {
            return Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }));
        }
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
            log: RareLog::default(),
        }));
        pool.warm_up(config.initial)?;
        Ok(pool)
    }

    /// Makes buffers until `free` are free, as far as the maximum allows.
    ///
    /// # Errors
    /// Driver errors; buffers made before stay.
    pub fn warm_up(&self, free: usize) -> Result<(), Error> {
        self.0.usable()?;
        self.0.reap();
        loop {
            let begun = self.0.change(|state| {
                let wanted = state.free.len() < free && state.pooled() < self.0.config.maximum;
                state.making += usize::from(wanted);
                wanted.then_some(state.generation)
            });
            let Some(generation) = begun else {
                return Ok(());
            };
            let made = self.0.mint(self.0.config.buffer_bytes, false, generation);
            let late = self.0.change(|state| {
                state.made(generation);
                match made {
                    Ok(buffer) if buffer.generation == state.generation => {
                        state.free.push(buffer);
                        Ok(None)
                    }
                    Ok(buffer) => Ok(Some(buffer)),
                    Err(error) => Err(error),
                }
            })?;
            drop(late);
        }
    }

    /// Leases at least `bytes`: a free buffer, or a new one up to the maximum, or above the size of a
    /// buffer one of its own. Its bytes are not initialised.
    ///
    /// # Errors
    /// [`Error::Exhausted`], [`InvalidArgument::TooSmall`], driver errors. Nothing has changed then.
    pub fn acquire(&self, bytes: usize) -> Result<PinnedLease<u8>, Error> {
        self.0.usable()?;
        self.0.reap();
        let config = &self.0.config;
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
            if let Some(buffer) = state.free.pop() {
                state.leased(&buffer);
                return Ok(Ok(buffer));
            }
            if state.pooled() >= config.maximum {
                return Err(Error::Exhausted {
                    what: "buffers",
                    maximum: config.maximum,
                });
            }
            state.making += 1;
            Ok(Err(state.generation))
        })?;
        let buffer = match found {
            Ok(buffer) => buffer,
            Err(generation) => {
                let size = if oversize { bytes } else { config.buffer_bytes };
                let made = self.0.mint(size, oversize, generation);
                self.0.change(|state| {
                    if !oversize {
                        state.made(generation);
                    }
                    let buffer = made?;
                    state.leased(&buffer);
                    Ok::<_, Error>(buffer)
                })?
            }
        };
        Ok(PinnedLease::new(buffer, Arc::clone(&self.0)))
    }

    /// Begins a new generation, for when the device's state was lost: leased buffers are not taken back
    /// any more, free ones are freed, and the figures begin anew. Returns the new generation.
    pub fn restart(&self) -> u64 {
        let (generation, free) = self.0.change(|state| {
            state.generation += 1;
            state.old_leases += state.in_use;
            state.in_use = 0;
            state.in_use_bytes = 0;
            state.pooled_in_use = 0;
            state.making = 0;
            state.looking = 0;
            state.looking_bytes = 0;
            let flying = std::mem::take(&mut state.in_flight);
            state.leaving.extend(flying);
            (state.generation, std::mem::take(&mut state.free))
        });
        // Freed without the lock.
        drop(free);
        self.0.reap();
        generation
    }

    /// Frees free buffers until at most `keep` are left, the longest idle first; returns how many went.
    pub fn trim(&self, keep: usize) -> usize {
        self.0.reap();
        let gone: Vec<Buffer> = self.0.change(|state| {
            let surplus = state.free.len().saturating_sub(keep);
            state.free.drain(..surplus).collect()
        });
        gone.len()
    }

    /// The figures, all of one instant, after looking which copies are over.
    pub fn stats(&self) -> PinnedStats {
        self.0.reap();
        self.0.change(|state| {
            let of = |buffers: &[Buffer]| buffers.iter().map(Buffer::bytes).sum::<u64>();
            PinnedStats {
                in_use: state.in_use,
                free: state.free.len(),
                in_flight: state.in_flight.len() + state.looking,
                total: state.in_use + state.free.len() + state.in_flight.len() + state.looking,
                bytes: state.in_use_bytes
                    + of(&state.free)
                    + of(&state.in_flight)
                    + state.looking_bytes,
                stale: state.leaving.len() + state.old_leases,
                generation: state.generation,
            }
        })
    }

    /// The generation, counted from 1.
    pub fn generation(&self) -> u64 {
        self.0.change(|state| state.generation)
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("config", &self.0.config)
            .field("stats", &self.stats())
            .finish()
    }
}
