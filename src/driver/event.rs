//! Events.

use super::context::{Context, Current, Entered};
use super::deferred::Deferred;
use super::error::DriverError;
use super::sys::{self, CUevent_flags};
use super::table::{call, thin};
use std::ptr;

/// An event of a context, without timing. Owned events are destroyed on drop, which is allowed while work still refers
/// to them; borrowed ones are not.
///
/// `Send` and `Sync`: may be recorded, queried and waited for on any thread. An event that was never recorded counts as
/// complete.
pub struct Event {
    context: Context,
    raw: sys::CUevent,
    /// Whether it is destroyed on drop.
    owned: bool,
}

// SAFETY: an event handle may be used from any thread; the driver synchronises.
unsafe impl Send for Event {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without timing.
    pub fn new(context: &Context) -> Result<Event, DriverError> {
        context.enter()?.create_event()
    }

    /// Wraps a foreign event.
    ///
    /// # Safety
    /// `raw` must be a live event of `context`, and outlive the result.
    pub unsafe fn from_raw(context: &Context, raw: sys::CUevent) -> Event {
        Event {
            context: context.clone(),
            raw,
            owned: false,
        }
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Returns the context that the event belongs to: the event can be recorded only on streams of that context, but
    /// waited for anywhere.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Whether the recorded work has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself.
    pub fn is_complete(&self) -> Result<bool, DriverError> {
        self.context.enter()?.query(self)
    }

    /// Blocks the calling thread until the recorded work has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.context.enter()?.wait(self)
    }
}

debug_fields!(Event, self => raw: self.raw, owned: self.owned);

impl Drop for Event {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        self.context.release(Deferred::Event(self.raw));
    }
}

#[doc(hidden)]
impl Entered<'_> {
    /// Creates an event without timing, owned by the result.
    pub fn create_event(&self) -> Result<Event, DriverError> {
        self.context().deferred().destroy(self.driver(), false);
        let mut raw = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING.0;
        // SAFETY: the pointer is to a local handle.
        unsafe { call!(self.driver(), cuEventCreate(&mut raw, flags)) }?;
        Ok(Event {
            context: self.context().clone(),
            raw,
            owned: true,
        })
    }

    thin! {
        /// [`Event::record`]. `stream` must be a live stream, or a special handle for a default stream of the current
        /// context; stream and event belong to this driver.
        pub unsafe fn record(&self, event: &Event, stream: sys::CUstream) = cuEventRecord(event.raw, stream);

        /// [`Stream::wait`](super::Stream::wait). The conditions of [`Entered::record`] apply, except that the event
        /// may belong to any context.
        pub unsafe fn stream_wait(&self, stream: sys::CUstream, event: &Event) = cuStreamWaitEvent(stream, event.raw, 0);
    }

    /// Whether the work recorded in `event` has completed.
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

    /// Blocks the calling thread until the work recorded in `event` has completed.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.driver()
            .refuse_foreign(event.context.driver(), "cuEventSynchronize")?;
        // SAFETY: the event is alive.
        unsafe { call!(self.driver(), cuEventSynchronize(event.raw)) }
    }
}

impl Current<'_> {
    thin! {
        /// As [`Entered::record`].
        pub(crate) unsafe fn record(&self, event: &Event, stream: sys::CUstream) = cuEventRecord(event.raw, stream);

        /// As [`Entered::stream_wait`].
        pub(crate) unsafe fn stream_wait(&self, stream: sys::CUstream, event: &Event)
            = cuStreamWaitEvent(stream, event.raw, 0);
    }
}
