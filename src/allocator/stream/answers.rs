//! What the driver's answers say about captures.

use crate::driver::DriverError;
use crate::driver::sys::CUresult;

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

/// Whether a wait was refused because of the marker, which is gone by then.
pub(crate) fn is_void_wait(error: &DriverError) -> bool {
    error.call() == "cuStreamWaitEvent" && is_void_event(error.code())
}

/// Whether the driver refused a call because a stream somewhere is being captured.
pub(crate) fn is_capture_refusal(code: CUresult) -> bool {
    code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        || code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
}
