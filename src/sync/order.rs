//! Order between two streams, and waits on the host.

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, DriverError, Stream, StreamKind, sys};
use crate::error::Error;

use super::capture::{invalidated_by_wait, is_capturing};
use super::event::{EventPools, Pooled};

/// Orders later work of `second` after the work of `first` so far. After an error nothing is ordered.
pub(crate) fn order(
    first: &Stream,
    second: &Stream,
    events: &EventPools,
) -> Result<(), DriverError> {
    events.record(first)?.hold_back(second)
}

/// Waits on the host for the work of `stream` so far, trying in turn an event, the stream, and the whole context. If
/// all fail, returns the first error.
pub(crate) fn wait(stream: &Stream, events: &EventPools) -> Result<(), DriverError> {
    let by_event = || events.record(stream)?.wait();
    by_event().or_else(|error| {
        // Waiting for captured work cannot end, and would invalidate the capture.
        match is_capturing(stream) {
            Ok(false) => stream
                .synchronize()
                .or_else(|_| wait_for_context(stream.context()))
                .map_err(|_| error),
            Ok(true) | Err(_) => Err(error),
        }
    })
}

/// Waits on the host for `event`, which was recorded on the stream of `user`, possibly by another thread; if that
/// fails, by the other means. If all fail, returns the first error.
pub(crate) fn wait_for(event: &Pooled, user: &KeptStream) -> Result<(), DriverError> {
    event.wait().or_else(|error| {
        let waited = user.with(|stream| match stream {
            Some(stream) if stream.kind() != StreamKind::PerThreadDefault => {
                wait(stream, event.pools())
            }
            // The stream was retired, or the handle may mean another stream on this thread.
            _ => wait_for_context(user.stream().context()),
        });
        waited.map_err(|_| error)
    })
}

/// Waits on the host for all work of a context. While a capture there is known, it returns the error without calling
/// the driver, which would fail and invalidate the capture.
pub(crate) fn wait_for_context(context: &Context) -> Result<(), DriverError> {
    if invalidated_by_wait(context)?.is_some() {
        let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return Err(DriverError::new("cuCtxSynchronize", code));
    }
    context.enter()?.synchronize()
}

/// Waits on the host until a context no longer runs submitted work: all work is complete, or the context is lost or
/// destroyed.
pub(crate) fn wait_until_idle(context: &Context) -> Result<(), DriverError> {
    match wait_for_context(context) {
        Err(error) if ends_work(error) => Ok(()),
        result => result,
    }
}

/// Whether an error means that the context runs no work any more.
pub(crate) fn ends_work(error: DriverError) -> bool {
    error.is_fatal() || error.code() == sys::CUresult::CUDA_ERROR_INVALID_CONTEXT
}

/// Number of times that a wait is repeated if its failure does not concern the work.
const TRIES: u32 = 100;

/// How an operation that was waited for ended.
#[must_use]
pub(crate) enum Ended {
    /// The device no longer accesses the host memory of the operation: it is complete, or was never submitted, or its
    /// context is lost and the work with it.
    Over(Result<(), Error>),
    /// It was submitted, and every wait for it failed.
    Unseen(DriverError),
}

/// Waits until the end of an operation, submitted to a stream with this result, is observed or cannot be.
pub(crate) fn observe_end(
    stream: &Stream,
    result: Result<(), Error>,
    events: &EventPools,
) -> Ended {
    let mut tries = 0;
    loop {
        match wait(stream, events) {
            Ok(()) => return Ended::Over(result),
            Err(error) if ends_work(error) || stream.context().driver().is_forked_child() => {
                return Ended::Over(result.and(Err(error.into())));
            }
            Err(error) if tries == TRIES => return Ended::Unseen(error),
            Err(_) => std::thread::yield_now(),
        }
        tries += 1;
    }
}
