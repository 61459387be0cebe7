//! Page-locked host memory on lease, with copies in flight.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Context, DriverError, Event, HostAllocation, HostMemory, Stream, process};

use super::RareLog;
use super::error::PoolError;
use super::pinned_lease::PinnedLease;

/// The system locks memory in pages of this many bytes.
const PAGE: usize = 4096;

/// Settings of a [`PinnedPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedConfig {
    /// Buffers to make at once.
    pub initial: usize,
    /// The most buffers there may be, in use, in flight and free.
    pub maximum: usize,
    /// Bytes of a buffer.
    pub buffer_bytes: usize,
    /// Whether a request above that gets a buffer of its own, which is not kept.
    pub oversize: bool,
}

impl Default for PinnedConfig {
    /// 4 buffers, at most 32, of 4 MiB, oversize allowed.
    fn default() -> Self {
        PinnedConfig {
            initial: 4,
            maximum: 32,
            buffer_bytes: 4 << 20,
            oversize: true,
        }
    }
}

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

/// Who touches host memory in a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// The device reads it.
    Read,
    /// The device writes it.
    Write,
}

/// A copy that may not be over: its end.
pub(super) struct Flight {
    pub(super) end: Event,
    pub(super) access: Access,
    /// Bytes from the start that a device's write initialises.
    pub(super) bytes: usize,
}

pub(super) struct Buffer {
    pub(super) memory: HostAllocation,
    pub(super) generation: u64,
    /// Of its own size, and freed when it comes back.
    oversize: bool,
    pub(super) flights: Vec<Flight>,
    /// The end of a copy could not be marked or seen: never reused, never freed.
    pub(super) lost: bool,
}

impl Buffer {
    fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) generation: u64,
    /// The last returned at the end.
    free: Vec<Buffer>,
    in_flight: Vec<Buffer>,
    /// Not to be used again, and not to be freed yet.
    leaving: Vec<Buffer>,
    in_use: usize,
    in_use_bytes: u64,
    /// Buffers of this generation that are being made, so that there are never too many.
    making: usize,
    /// Buffers in flight that are being looked at, and their bytes.
    looking: usize,
    looking_bytes: u64,
    /// Pool buffers of this generation on lease.
    pooled_in_use: usize,
    /// Leases of earlier generations.
    old_leases: usize,
    events: Vec<Event>,
}

impl State {
    fn pooled(&self) -> usize {
        self.free.len() + self.in_flight.len() + self.looking + self.pooled_in_use + self.making
    }
}

pub(super) struct Inner {
    context: Context,
    config: PinnedConfig,
    state: Mutex<State>,
    log: RareLog,
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
/// # let context = Context::primary(&driver, driver.device(0)?)?;
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
    /// [`PoolError::InvalidSize`] for buffers of 0 bytes, [`PoolError::Contradiction`] for more initial
    /// buffers than the maximum, driver errors.
    pub fn new(context: &Context, config: PinnedConfig) -> Result<PinnedPool, PoolError> {
        if config.buffer_bytes == 0 {
            return Err(PoolError::InvalidSize { requested: 0 });
        }
        if config.initial > config.maximum {
            return Err(PoolError::Contradiction {
                larger: "initial",
                value: config.initial as u64,
                bound: "maximum",
                limit: config.maximum as u64,
            });
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
    pub fn warm_up(&self, free: usize) -> Result<(), PoolError> {
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
    /// [`PoolError::MaximumReached`], [`PoolError::Oversize`], driver errors. Nothing has changed then.
    pub fn acquire(&self, bytes: usize) -> Result<PinnedLease<u8>, PoolError> {
        self.0.usable()?;
        self.0.reap();
        let config = &self.0.config;
        let oversize = bytes > config.buffer_bytes;
        if oversize && !config.oversize {
            return Err(PoolError::Oversize {
                requested: bytes,
                capacity: config.buffer_bytes,
            });
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
                return Err(PoolError::MaximumReached {
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
                    Ok::<_, PoolError>(buffer)
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

impl State {
    /// A buffer that was being made is made, or is not.
    fn made(&mut self, generation: u64) {
        if generation == self.generation {
            self.making -= 1;
        }
    }

    fn leased(&mut self, buffer: &Buffer) {
        if buffer.generation != self.generation {
            // Restarted while it was made.
            self.old_leases += 1;
            return;
        }
        self.in_use += 1;
        self.in_use_bytes += buffer.bytes();
        self.pooled_in_use += usize::from(!buffer.oversize);
    }

    /// Takes a buffer back; one that is to be freed now.
    pub(super) fn returned(&mut self, buffer: Buffer) -> Option<Buffer> {
        if buffer.generation == self.generation {
            self.in_use -= 1;
            self.in_use_bytes -= buffer.bytes();
            self.pooled_in_use -= usize::from(!buffer.oversize);
        } else {
            self.old_leases -= 1;
        }
        self.settle(buffer)
    }

    /// Puts a buffer where it belongs; one that is to be freed now.
    fn settle(&mut self, buffer: Buffer) -> Option<Buffer> {
        let busy = buffer.lost || !buffer.flights.is_empty();
        let keep = buffer.generation == self.generation && !buffer.oversize && !buffer.lost;
        match (keep, busy) {
            (true, false) => self.free.push(buffer),
            (true, true) => self.in_flight.push(buffer),
            (false, true) => self.leaving.push(buffer),
            (false, false) => return Some(buffer),
        }
        None
    }
}

impl Inner {
    fn usable(&self) -> Result<(), PoolError> {
        if process::is_forked_child() {
            return Err(crate::Error::ForkedChild.into());
        }
        Ok(())
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut process::lock(&self.state))
    }

    fn mint(&self, bytes: usize, oversize: bool, generation: u64) -> Result<Buffer, PoolError> {
        let how = HostMemory {
            portable: true,
            ..HostMemory::default()
        };
        // Whole pages, so that no two buffers share one, and no more.
        let bytes = bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(PoolError::InvalidSize {
                requested: bytes as u64,
            })?;
        let memory = self.context.enter()?.host_allocation(bytes, how)?;
        Ok(Buffer {
            memory,
            generation,
            oversize,
            flights: Vec::new(),
            lost: false,
        })
    }

    fn event(&self) -> Result<Event, DriverError> {
        match self.change(|state| state.events.pop()) {
            Some(event) => Ok(event),
            None => self.context.enter()?.create_event(),
        }
    }

    /// Marks the end of what a stream was given so far.
    pub(super) fn mark(&self, stream: &Stream) -> Result<Event, DriverError> {
        let event = if stream.context().key() == self.context.key() {
            self.event()?
        } else {
            stream.context().enter()?.create_event()?
        };
        stream.mark(&event)?;
        Ok(event)
    }

    fn keep_events(&self, events: Vec<Event>) {
        let (ours, foreign): (Vec<Event>, Vec<Event>) = events
            .into_iter()
            .partition(|event| event.context().key() == self.context.key());
        self.change(|state| state.events.extend(ours));
        drop(foreign);
    }

    /// Takes out the copies that are over; the error of a lost context marks the buffer as lost. The
    /// bytes that are initialised by them.
    pub(super) fn land(&self, buffer: &mut Buffer) -> Result<usize, PoolError> {
        let (mut initialised, mut over, mut left) = (0, Vec::new(), Vec::new());
        let mut failure = None;
        for flight in buffer.flights.drain(..) {
            let done = flight
                .end
                .context()
                .enter()
                .and_then(|entered| entered.query(&flight.end));
            match done {
                Ok(true) => {
                    if flight.access == Access::Write {
                        initialised = initialised.max(flight.bytes);
                    }
                    over.push(flight.end);
                }
                Ok(false) => left.push(flight),
                Err(error) => {
                    failure = Some(error);
                    left.push(flight);
                }
            }
        }
        buffer.flights = left;
        self.keep_events(over);
        match failure {
            None => Ok(initialised),
            Some(error) => {
                // What a device does after such a failure nobody can tell. Any other is that of the
                // question alone, which can be asked again.
                buffer.lost |= error.is_fatal();
                Err(error.into())
            }
        }
    }

    /// Looks which returned buffers can be used again, or freed.
    fn reap(&self) {
        let waiting = self.change(|state| {
            let flying = std::mem::take(&mut state.in_flight);
            // They keep their places while they are looked at.
            state.looking += flying.len();
            state.looking_bytes += flying.iter().map(Buffer::bytes).sum::<u64>();
            let leaving = std::mem::take(&mut state.leaving);
            let flying = flying.into_iter().map(|buffer| (buffer, true));
            let leaving = leaving.into_iter().map(|buffer| (buffer, false));
            flying.chain(leaving).collect::<Vec<_>>()
        });
        for (mut buffer, placed) in waiting {
            if !buffer.lost
                && let Err(error) = self.land(&mut buffer)
                && buffer.lost
                && let Some(count) = self.log.due()
            {
                log::warn!("page-locked memory is leaked ({count} such events): {error}");
            }
            let gone = self.change(|state| {
                if placed && buffer.generation == state.generation {
                    state.looking -= 1;
                    state.looking_bytes -= buffer.bytes();
                }
                state.settle(buffer)
            });
            // Freed without the lock.
            drop(gone);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut waiting = std::mem::take(&mut state.in_flight);
        waiting.append(&mut state.leaving);
        let gone = self.context.driver().drops_nothing();
        for buffer in waiting {
            if gone {
                std::mem::forget(buffer);
                continue;
            }
            let wait = |flight: &Flight| {
                let context = flight.end.context();
                let by_event = || context.enter()?.wait(&flight.end);
                by_event().or_else(|_| context.enter()?.synchronize())
            };
            let ended = buffer.flights.iter().try_for_each(wait).is_ok();
            if buffer.lost || !ended {
                std::mem::forget(buffer.memory);
            }
        }
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
