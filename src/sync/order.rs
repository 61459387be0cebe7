//! Order between two streams, and waits on the host.

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, DriverError, Stream, StreamKind, sys};
use crate::error::Error;

use super::capture::{is_capturing, spoilt_by_wait};
use super::event::{EventPools, Pooled};

/// Lets later work of `second` come after the work of `first` so far. After an error nothing is ordered.
pub(crate) fn order(
    first: &Stream,
    second: &Stream,
    events: &EventPools,
) -> Result<(), DriverError> {
    events.record(first)?.hold_back(second)
}

/// Waits on the host for the work of `stream` so far, by all means: an event, the stream, the whole context. If none
/// succeeds, the error is that of the first.
pub(crate) fn wait(stream: &Stream, events: &EventPools) -> Result<(), DriverError> {
    let by_event = || events.record(stream)?.wait();
    by_event().or_else(|error| {
        // A wait for what is captured cannot end, and would spoil the capture.
        match is_capturing(stream) {
            Ok(false) => stream
                .synchronize()
                .or_else(|_| wait_for_context(stream.context()))
                .map_err(|_| error),
            Ok(true) | Err(_) => Err(error),
        }
    })
}

/// Waits on the host for what `event` stands for, which was recorded on the stream of `user`, maybe by another
/// thread; if that fails, by all means. If none succeeds, the error is that of the first.
pub(crate) fn wait_for(event: &Pooled, user: &KeptStream) -> Result<(), DriverError> {
    event.wait().or_else(|error| {
        let waited = user.with(|stream| match stream {
            Some(stream) if stream.kind() != StreamKind::PerThreadDefault => {
                wait(stream, event.pools())
            }
            // It was retired, or the handle may mean another stream on this thread.
            _ => wait_for_context(user.stream().context()),
        });
        waited.map_err(|_| error)
    })
}

/// Waits on the host for all work of a context. While something is known to capture there it does not ask the driver,
/// which would refuse, and spoil the capture: the error is what it would say.
pub(crate) fn wait_for_context(context: &Context) -> Result<(), DriverError> {
    if spoilt_by_wait(context)?.is_some() {
        let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return Err(DriverError::new("cuCtxSynchronize", code));
    }
    context.enter()?.synchronize()
}

/// Waits on the host until a context does no more of what it was given: all work is done, or the context
/// is lost or gone and runs nothing any more.
pub(crate) fn wait_until_idle(context: &Context) -> Result<(), DriverError> {
    match wait_for_context(context) {
        Err(error) if ends_work(error) => Ok(()),
        result => result,
    }
}

/// Whether an error says that the context does no work any more.
pub(crate) fn ends_work(error: DriverError) -> bool {
    error.is_fatal() || error.code() == sys::CUresult::CUDA_ERROR_INVALID_CONTEXT
}

/// How often a wait is tried again whose failure says nothing about the work.
const TRIES: u32 = 100;

/// How an operation ended that was waited for.
#[must_use]
pub(crate) enum Ended {
    /// The device is out of host memory that the operation used: it is complete, or was never submitted, or its context
    /// is lost and the work with it.
    Over(Result<(), Error>),
    /// It was submitted, and no wait for it succeeds.
    Unseen(DriverError),
}

/// Waits until the end of an operation is seen, or cannot be, that was given to a stream with this result.
pub(crate) fn see_end(stream: &Stream, result: Result<(), Error>, events: &EventPools) -> Ended {
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
