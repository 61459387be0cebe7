//! Events.

use super::context::{Context, Current, Entered};
use super::error::DriverError;
use super::owed::Owed;
use super::sys::{self, CUevent_flags};
use super::table::call;
use std::fmt;
use std::ptr;

/// An event of a context, without timing. Owned events are destroyed on drop, which is legal while
/// work still refers to them; borrowed ones are left alone.
///
/// `Send` and `Sync`: may be recorded, queried and waited for from any thread. An event that was
/// never recorded counts as complete.
pub struct Event {
    context: Context,
    raw: sys::CUevent,
    kind: EventKind,
}

/// Who an [`Event`] belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EventKind {
    /// Created here, destroyed on drop.
    Owned,
    /// Somebody else's: never destroyed here.
    Borrowed,
}

// SAFETY: an event handle may be used from any thread; the driver synchronises.
unsafe impl Send for Event {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Event {}

impl Event {
    /// An event that somebody else owns.
    ///
    /// # Safety
    /// `raw` must be a live event of `context`, and stay alive as long as the result.
    pub unsafe fn from_raw(context: &Context, raw: sys::CUevent) -> Event {
        Event {
            context: context.clone(),
            raw,
            kind: EventKind::Borrowed,
        }
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// The context that the event belongs to: it can be recorded on streams of that context only,
    /// but waited for everywhere.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Whether the event is owned or borrowed.
    pub fn kind(&self) -> EventKind {
        self.kind
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("raw", &self.raw)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.kind == EventKind::Borrowed {
            return;
        }
        self.context.release(Owed::Event(self.raw));
    }
}

impl Entered<'_> {
    /// A new event without timing, owned by the result.
    ///
    /// # Errors
    /// The driver's.
    pub fn create_event(&self) -> Result<Event, DriverError> {
        self.context().debts().pay(self.driver(), false);
        let mut raw = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING.0;
        // SAFETY: the pointer is to a local handle.
        unsafe { call!(self.driver(), cuEventCreate(&mut raw, flags)) }?;
        Ok(Event {
            context: self.context().clone(),
            raw,
            kind: EventKind::Owned,
        })
    }

    /// Makes `event` stand for everything submitted to `stream` so far; an earlier record is
    /// forgotten, while waits that were already submitted keep it.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` if event and stream differ in their context.
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle that means the default stream here; it and the
    /// event are of this driver.
    pub unsafe fn record(&self, event: &Event, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller vouches for the stream.
        unsafe { call!(self.driver(), cuEventRecord(event.raw, stream)) }
    }

    /// True if the work that `event` stands for has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself; `CUDA_ERROR_INVALID_HANDLE` for an event of
    /// another driver.
    pub fn query(&self, event: &Event) -> Result<bool, DriverError> {
        self.driver()
            .refuse_foreign(event.context.driver(), "cuEventQuery")?;
        // SAFETY: the event is alive.
        match unsafe { call!(self.driver(), cuEventQuery(event.raw)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_ready() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Blocks the calling thread until the work that `event` stands for has completed.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.driver()
            .refuse_foreign(event.context.driver(), "cuEventSynchronize")?;
        // SAFETY: the event is alive.
        unsafe { call!(self.driver(), cuEventSynchronize(event.raw)) }
    }

    /// Lets everything that is submitted to `stream` from now on start only after the work that
    /// `event` stands for. The event may belong to another context or device.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Entered::record`].
    pub unsafe fn stream_wait(
        &self,
        stream: sys::CUstream,
        event: &Event,
    ) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller vouches for the stream.
        unsafe { call!(self.driver(), cuStreamWaitEvent(stream, event.raw, 0)) }
    }
}

impl Current<'_> {
    /// As [`Entered::record`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn record(
        &self,
        event: &Event,
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller vouches for the stream.
        unsafe { call!(self.driver, cuEventRecord(event.raw, stream)) }
    }

    /// As [`Entered::stream_wait`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn stream_wait(
        &self,
        stream: sys::CUstream,
        event: &Event,
    ) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller vouches for the stream.
        unsafe { call!(self.driver, cuStreamWaitEvent(stream, event.raw, 0)) }
    }
}
