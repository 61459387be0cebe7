//! Stream capture.
//!
//! While a thread captures, the driver refuses calls such as allocations unless the thread's mode
//! is relaxed; [`Context::enter`](super::Context::enter) takes care of that.

use super::context::{Context, Entered};
use super::error::DriverError;
use super::owed::Owed;
use super::process;
use super::stream::Stream;
use super::sys::{self, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use super::table::{Driver, call};
use std::ffi::c_void;
use std::fmt;
use std::ptr;

impl Driver {
    /// The streams that were found capturing, by their handles, each with the number of the finding:
    /// a later one has a higher number.
    pub(crate) fn found_capturing(&self) -> Vec<(usize, u64)> {
        self.found().all()
    }

    /// Forgets a finding that was refuted.
    pub(crate) fn not_capturing(&self, number: u64) {
        self.found().refute(number);
    }

    /// Notes a stream that the driver refused because it captures.
    pub(crate) fn saw_capture(&self, stream: CUstream) {
        self.found().add(stream, false);
    }

    /// Calls look out for a stream that may be capturing, or may just have been.
    pub(crate) fn suspect_capture(&self, stream: CUstream) {
        self.found().add(stream, true);
    }

    /// Now and then looks whether captures that calls look out for are over: of streams that are this crate's the
    /// driver says so, of others nobody may ask it, and they are taken for over after a while. Called once in
    /// [`REVIEW`](super::REVIEW) allocations that have to look out.
    #[cold]
    #[inline(never)]
    pub(crate) fn review_captures(&self) {
        for stream in self.found().watched() {
            let own = self.own_stream(stream);
            match own.map(|own| own.is_capturing()) {
                // The answer has replaced what was known.
                Some(Ok(_)) => {}
                _ => self.found().age(stream),
            }
        }
    }
}

/// A graph that a capture has made, destroyed on drop. `Send`; a graph may be used by one thread
/// at a time.
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: a graph is not tied to a thread, and cannot be shared without a lock (it is not `Sync`).
unsafe impl Send for Graph {}

impl Graph {
    /// The driver's handle.
    pub fn raw(&self) -> sys::CUgraph {
        self.raw
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("raw", &self.raw)
            .finish_non_exhaustive()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.context.release(Owed::Graph(self.raw));
    }
}

impl Stream {
    /// Starts capturing the stream into a graph.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::CaptureControl`](super::Feature::CaptureControl).
    pub fn begin_capture(&self, mode: CUstreamCaptureMode) -> Result<(), DriverError> {
        let entered = self.context().enter()?;
        // Before it begins, or calls of other threads would not look out for it.
        entered.driver().found().add(self.raw(), true);
        // SAFETY: the handle is valid by the contract under which it was made.
        let begun = unsafe { call!(entered.driver(), cuStreamBeginCapture_v2(self.raw(), mode)) };
        if begun.is_err() {
            // SAFETY: as above. One that was under way goes on; the answer is noted.
            let _noted = unsafe { entered.driver().is_capturing(self.raw()) };
        }
        begun
    }

    /// Ends the capture that was begun on the stream.
    ///
    /// Allocators whose last block was dropped during a capture are closed here, after their streams'
    /// work is complete, and blocks of the driver's pools that were dropped then are freed.
    ///
    /// # Errors
    /// The driver's, such as `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`; the capture has ended then
    /// too.
    pub fn end_capture(&self) -> Result<Graph, DriverError> {
        let entered = self.context().enter()?;
        let (driver, mut raw) = (entered.driver(), ptr::null_mut());
        // SAFETY: the output is a local, and the handle is valid by the contract under which it was made.
        let ended = unsafe { call!(driver, cuStreamEndCapture(self.raw(), &mut raw)) };
        // SAFETY: as above. Where it was refused, as on the wrong thread, the capture goes on.
        let asked = unsafe { driver.is_capturing(self.raw()) };
        let graph = ended.map(|()| Graph {
            context: self.context().clone(),
            raw,
        });
        if matches!(asked, Ok(false)) {
            process::do_postponed();
        }
        graph
    }

    /// The id of the capture that the stream is in, unique while the process lives, and 0 if the capture has
    /// become invalid and can only be ended; `None` if the stream is not being captured.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::CaptureInfo`](super::Feature::CaptureInfo).
    pub fn capture_id(&self) -> Result<Option<u64>, DriverError> {
        let entered = self.context().enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, ptr::null_mut());
        let (no_nodes, no_count) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the outputs are locals or null, which is allowed for these; the handle is valid by the
        // contract under which it was made.
        unsafe {
            call!(
                entered.driver(),
                cuStreamGetCaptureInfo_v2(
                    self.raw(),
                    &mut status,
                    &mut id,
                    &mut graph,
                    no_nodes,
                    no_count
                )
            )
        }?;
        Ok(match status {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => None,
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Some(id),
            _ => Some(0),
        })
    }
}

#[doc(hidden)]
impl Entered<'_> {
    /// Calls `destroy(data)` once `graph` and every executable made from it are gone.
    /// After an error it is never called.
    ///
    /// # Safety
    /// `graph` must be live; `data` must be good for `destroy`, which runs on a thread of the
    /// driver, must not unwind and must not call the driver.
    pub unsafe fn on_graph_destroyed(
        &self,
        graph: sys::CUgraph,
        destroy: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<(), DriverError> {
        /// The only flag that the driver accepts for such an object: no synchronisation.
        const NO_DESTRUCTOR_SYNC: u32 = 1;
        /// The graph takes over our reference instead of adding its own.
        const MOVE: u32 = 1;
        let mut object = ptr::null_mut();
        // SAFETY: the output is a local, and the caller vouches for function and data.
        unsafe {
            call!(
                self.driver(),
                cuUserObjectCreate(&mut object, data, Some(destroy), 1, NO_DESTRUCTOR_SYNC)
            )
        }?;
        // SAFETY: the object has just been made with one reference; the caller vouches for the
        // graph.
        unsafe {
            call!(
                self.driver(),
                cuGraphRetainUserObject(graph, object, 1, MOVE)
            )
        }
    }
}
