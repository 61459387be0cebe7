//! What the driver says about captures, classified once.
//!
//! Rooms decide what follows from it: refuse the call, wait by other means, or try again later.

use crate::driver::sys::CUresult;
use crate::driver::{Context, DriverError, Stream};
use crate::error::Error;

/// Whether a stream must not be given work or events of ours: it is being captured, or it is the legacy
/// stream, behind which a blocking stream of its context is. No error is about captures.
#[inline]
pub(crate) fn is_capturing(stream: &Stream) -> Result<bool, DriverError> {
    classified(stream.is_capturing())
}

/// Refuses a stream that [is being captured](is_capturing) with [`Error::Capturing`].
#[inline]
pub(crate) fn refuse_capture(stream: &Stream) -> Result<(), Error> {
    match is_capturing(stream)? {
        true => Err(Error::Capturing {
            stream: stream.raw() as usize,
        }),
        false => Ok(()),
    }
}

/// The handle of a stream of this crate's that captures in a context: one whose capture was begun here, or found,
/// and is not over.
fn own_capture_in(context: &Context) -> Option<usize> {
    let suspects = context.driver().own_suspects();
    let mut there = suspects
        .iter()
        .filter(|stream| stream.context().id() == context.id());
    // The driver tells a capture by its answer. Only the legacy stream, which is none of these, has an error for it.
    let captures = |stream: &&Stream| matches!(is_capturing(stream), Ok(true));
    there.find(captures).map(|stream| stream.raw() as usize)
}

/// The handle of a stream that captures in a context, whose capture a wait for all of that would spoil: one of this
/// crate's, or the legacy stream (0), which answers for the blocking ones. Each thread's own default stream is one of
/// these. Errors say that the context is lost; what else goes wrong the wait itself will say.
pub(crate) fn spoilt_by_wait(context: &Context) -> Result<Option<usize>, DriverError> {
    if let Some(stream) = own_capture_in(context) {
        return Ok(Some(stream));
    }
    match is_capturing(&Stream::legacy(context)) {
        Ok(capturing) => Ok(capturing.then_some(0)),
        Err(error) if error.is_fatal() => Err(error),
        Err(_) => Ok(None),
    }
}

/// The handle of a stream that captures in a context, as far as that is known: one that was found
/// capturing before, or whose capture was begun here, or the legacy stream (0), which answers for the blocking ones.
/// No error is about captures.
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
    Ok(classified(answer)?.then_some(0))
}

#[inline]
fn classified(answer: Result<bool, DriverError>) -> Result<bool, DriverError> {
    match answer {
        Err(error) if error.code() == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
        answer => answer,
    }
}

/// Whether the driver's answer is about a capture, of the stream or of what the event was recorded in.
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

/// Whether a question or a wait was answered so because the event was recorded in a capture: one under
/// way, or one that has ended, after which drivers call such an event an invalid value.
pub(crate) fn is_void_event(code: CUresult) -> bool {
    is_of_capture(code) || code == CUresult::CUDA_ERROR_INVALID_VALUE
}

/// Whether a wait was refused because of its event, which has lost its meaning by then.
pub(crate) fn is_void_wait(error: &DriverError) -> bool {
    error.call() == "cuStreamWaitEvent" && is_void_event(error.code())
}

/// Whether the driver refused a call because a stream somewhere is being captured.
pub(crate) fn is_capture_refusal(code: CUresult) -> bool {
    code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        || code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
}
