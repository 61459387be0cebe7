//! The buffers of a pool of page-locked memory: free, on lease, and with copies in flight.

use std::sync::{Mutex, PoisonError};

use crate::driver::{Context, DriverError, Event, HostAllocation, HostMemory, Stream, process};

use super::RareLog;
use crate::error::{Error, InvalidArgument};

/// The system locks memory in pages of this many bytes.
const PAGE: usize = 4096;

/// Settings of a [`PinnedPool`](super::PinnedPool).
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
    pub(super) oversize: bool,
    pub(super) flights: Vec<Flight>,
    /// The end of a copy could not be marked or seen: never reused, never freed.
    pub(super) lost: bool,
}

impl Buffer {
    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) generation: u64,
    /// The last returned at the end.
    pub(super) free: Vec<Buffer>,
    pub(super) in_flight: Vec<Buffer>,
    /// Not to be used again, and not to be freed yet.
    pub(super) leaving: Vec<Buffer>,
    pub(super) in_use: usize,
    pub(super) in_use_bytes: u64,
    /// Buffers of this generation that are being made, so that there are never too many.
    pub(super) making: usize,
    /// Buffers in flight that are being looked at, and their bytes.
    pub(super) looking: usize,
    pub(super) looking_bytes: u64,
    /// Pool buffers of this generation on lease.
    pub(super) pooled_in_use: usize,
    /// Leases of earlier generations.
    pub(super) old_leases: usize,
    pub(super) events: Vec<Event>,
}

impl State {
    pub(super) fn pooled(&self) -> usize {
        self.free.len() + self.in_flight.len() + self.looking + self.pooled_in_use + self.making
    }
}

pub(super) struct Inner {
    pub(super) context: Context,
    pub(super) config: PinnedConfig,
    pub(super) state: Mutex<State>,
    pub(super) log: RareLog,
}

impl State {
    /// A buffer that was being made is made, or is not.
    pub(super) fn made(&mut self, generation: u64) {
        if generation == self.generation {
            self.making -= 1;
        }
    }

    pub(super) fn leased(&mut self, buffer: &Buffer) {
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
        self.put_back(buffer)
    }

    /// Puts a buffer where it belongs; one that is to be freed now.
    fn put_back(&mut self, buffer: Buffer) -> Option<Buffer> {
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
    pub(super) fn usable(&self) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        Ok(())
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut process::lock(&self.state))
    }

    pub(super) fn mint(
        &self,
        bytes: usize,
        oversize: bool,
        generation: u64,
    ) -> Result<Buffer, Error> {
        let how = HostMemory {
            portable: true,
            ..HostMemory::default()
        };
        // Whole pages, so that no two buffers share one, and no more.
        let bytes =
            bytes
                .checked_next_multiple_of(PAGE)
                .ok_or(Error::Invalid(InvalidArgument::Size {
                    bytes: bytes as u64,
                }))?;
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
        let event = if stream.context().id() == self.context.id() {
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
            .partition(|event| event.context().id() == self.context.id());
        self.change(|state| state.events.extend(ours));
        drop(foreign);
    }

    /// Takes out the copies that are over; the error of a lost context marks the buffer as lost. The
    /// bytes that are initialised by them.
    pub(super) fn land(&self, buffer: &mut Buffer) -> Result<usize, Error> {
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
    pub(super) fn reap(&self) {
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
                state.put_back(buffer)
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
