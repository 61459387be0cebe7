//! Classifies the driver's answers about captures.
//!
//! The callers decide on the consequence: reject the call, wait by other means, or try again later.

use crate::driver::sys::CUresult;
use crate::driver::{Context, DriverError, Stream};
use crate::error::Error;

/// Whether no work or events may be submitted to a stream: because it is being captured, or because it is the legacy
/// stream and a blocking stream of its context is being captured. Returned errors are never about captures.
#[inline]
pub(crate) fn is_capturing(stream: &Stream) -> Result<bool, DriverError> {
    classify_error(stream.is_capturing())
}

/// Rejects a stream that [is being captured](is_capturing) with [`Error::Capturing`].
#[inline]
pub(crate) fn refuse_capture(stream: &Stream) -> Result<(), Error> {
    match is_capturing(stream)? {
        true => Err(Error::Capturing {
            stream: stream.raw() as usize,
        }),
        false => Ok(()),
    }
}

/// Returns the handle of a stream of this crate that is capturing in a context: one whose capture was begun or found
/// here and is not over.
fn own_capture_in(context: &Context) -> Option<usize> {
    let suspects = context.driver().list_suspects();
    let mut there = suspects
        .iter()
        .filter(|stream| stream.context().id() == context.id());
    // The driver reports a capture in its answer. Only the legacy stream, which is not among these, returns an error
    // for it.
    let captures = |stream: &&Stream| matches!(is_capturing(stream), Ok(true));
    there.find(captures).map(|stream| stream.raw() as usize)
}

/// Returns the handle of a stream that is capturing in a context, and whose capture would be invalidated by waiting for
/// the whole context: one of this crate's streams, including each thread's default stream, or the legacy stream (0),
/// which represents the blocking ones. Only the loss of the context is returned as an error; other failures will be
/// reported by the wait itself.
pub(crate) fn invalidated_by_wait(context: &Context) -> Result<Option<usize>, DriverError> {
    if let Some(stream) = own_capture_in(context) {
        return Ok(Some(stream));
    }
    match is_capturing(&Stream::legacy(context)) {
        Ok(capturing) => Ok(capturing.then_some(0)),
        Err(error) if error.is_fatal() => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns the handle of a stream known to be capturing in a context: one that was found capturing before, or whose
/// capture was begun here, or the legacy stream (0), which represents the blocking ones. Returned errors are never
/// about captures.
pub(crate) fn capture_in(context: &Context) -> Result<Option<usize>, DriverError> {
    if let Some((stream, _)) = context.driver().found_capturing().first() {
        return Ok(Some(*stream));
    }
    if let Some(stream) = own_capture_in(context) {
        return Ok(Some(stream));
    }
    let _entered = context.enter()?;
    // SAFETY: the null handle is valid while a context is current.
    let answer = unsafe { context.driver().is_capturing(std::ptr::null_mut()) };
    Ok(classify_error(answer)?.then_some(0))
}

#[inline]
fn classify_error(answer: Result<bool, DriverError>) -> Result<bool, DriverError> {
    match answer {
        Err(error) if error.code() == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
        answer => answer,
    }
}

/// Whether the driver's answer is about a capture, of the stream or of the work recorded in the event.
pub(crate) fn is_of_capture(code: CUresult) -> bool {
    use CUresult as Code;
    [
        Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        Code::CUDA_ERROR_STREAM_CAPTURE_MERGE,
        Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        Code::CUDA_ERROR_CAPTURED_EVENT,
    ]
    .contains(&code)
}

/// Whether a query or a wait failed because the event was recorded in a capture: one in progress, or an ended one,
/// after which drivers report the event as an invalid value.
pub(crate) fn is_void_event(code: CUresult) -> bool {
    is_of_capture(code) || code == CUresult::CUDA_ERROR_INVALID_VALUE
}

/// Whether a wait of a stream or of the host failed because its event has become invalid.
pub(crate) fn is_void_wait(error: &DriverError) -> bool {
    ["cuStreamWaitEvent", "cuEventSynchronize"].contains(&error.call())
        && is_void_event(error.code())
}

/// Whether the driver rejected a call because some stream is being captured.
pub(crate) fn is_capture_refusal(code: CUresult) -> bool {
    code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        || code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
}
