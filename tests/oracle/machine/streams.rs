//! Streams of the program: its own, and such as foreign code makes.

use cualloc::Error;
use cualloc::driver::{DriverError, Entered, Stream, sys};
use cualloc::error::StreamMisuse;

use super::{Done, Held, Machine};

pub(super) enum Handle {
    Owned(Stream),
    Raw(sys::CUstream),
    /// A default stream: never destroyed.
    Special(sys::CUstream),
}

pub(super) struct Lane {
    pub handle: Handle,
    /// Its number in the judge's tracker.
    pub number: usize,
    /// Whether the allocator keeps the stream alive.
    pub kept: bool,
}

impl Lane {
    pub fn raw(&self) -> sys::CUstream {
        match &self.handle {
            Handle::Owned(stream) => stream.raw(),
            Handle::Raw(raw) | Handle::Special(raw) => *raw,
        }
    }
}

fn outcome(call: &'static str, code: Option<sys::CUresult>) -> Result<(), DriverError> {
    match code {
        Some(sys::CUresult::CUDA_SUCCESS) => Ok(()),
        other => Err(DriverError::new(
            call,
            other.unwrap_or(sys::CUresult::CUDA_ERROR_NOT_FOUND),
        )),
    }
}

/// A stream as foreign code makes it.
fn create_raw(entered: &Entered<'_>) -> Result<sys::CUstream, DriverError> {
    let mut stream = std::ptr::null_mut();
    let create = entered.driver().functions().cuStreamCreate;
    // SAFETY: the pointer is to a local handle; the context is current.
    let code = create.map(|create| unsafe { create(&mut stream, 1) });
    outcome("cuStreamCreate", code).map(|()| stream)
}

pub(super) fn destroy_raw(entered: &Entered<'_>, stream: sys::CUstream) -> Result<(), DriverError> {
    let destroy = entered.driver().functions().cuStreamDestroy_v2;
    // SAFETY: made by `create_raw`, retired where it has to be, and not used again.
    let code = destroy.map(|destroy| unsafe { destroy(stream) });
    outcome("cuStreamDestroy_v2", code)
}

impl Machine<'_> {
    pub fn new_stream(&mut self, raw: bool) -> Done {
        let handle = match raw {
            true => Handle::Raw(self.own(create_raw)?),
            false => Handle::Owned(self.own(|_| Stream::new(&self.context))?),
        };
        let mut lane = Lane {
            handle,
            number: 0,
            kept: false,
        };
        lane.number = self.checker.tracker().number(lane.raw());
        self.lanes.push(lane);
        Ok(())
    }

    pub(super) fn lane(&self, pick: u32) -> usize {
        pick as usize % self.lanes.len()
    }

    pub fn leave(&mut self, pick: u32, retire: bool) -> Done {
        let at = self.lane(pick);
        if self.lanes.len() < 2 || matches!(self.lanes[at].handle, Handle::Special(_)) {
            return Ok(());
        }
        let (number, raw) = (self.lanes[at].number, self.lanes[at].raw());
        // SAFETY: a live stream of the context.
        let last = self.own(|entered| unsafe {
            let event = entered.create_event()?;
            entered.record(&event, raw)?;
            Ok(event)
        })?;
        self.checker.tracker().left(number);
        let named = |b: &Held| b.owner == number || b.recorded.iter().any(|r| r.0 == number);
        let needed = matches!(self.lanes[at].handle, Handle::Raw(_))
            && (!self.setup.stream_ids || self.any_held(named));
        if retire || needed {
            for _ in 0..2 {
                let result = match &self.lanes[at].handle {
                    Handle::Owned(stream) => self.alloc.retire(stream),
                    // SAFETY: the stream is live, and gets no more work.
                    _ => unsafe { self.alloc.retire_raw(raw) },
                };
                match result {
                    Err(Error::Stream(StreamMisuse::Unknown { .. })) => break,
                    result => {
                        if self.tolerate(result)?.is_some() {
                            break;
                        }
                    }
                }
                self.mend();
            }
        }
        let lane = self.lanes.swap_remove(at);
        self.finals.insert(number, last);
        match lane.handle {
            Handle::Owned(stream) => drop(stream),
            Handle::Raw(raw) => {
                self.own(|entered| destroy_raw(entered, raw))?;
            }
            Handle::Special(_) => {}
        }
        Ok(())
    }
}
