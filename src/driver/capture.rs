//! Stream capture.
//!
//! While a thread captures, the driver rejects calls such as allocations unless the thread's capture mode is relaxed;
//! [`Context::enter`](super::Context::enter) sets that mode.

use super::error::DriverError;
use super::graph::{Dependency, Graph};
use super::process;
use super::stream::Stream;
use super::symbols::Feature;
use super::sys::{self, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use super::table::{Driver, call, thin};
use std::ptr;

impl Driver {
    /// Whether a capture was begun through this crate into a graph with existing nodes; its own nodes may run
    /// concurrently with those.
    pub(crate) fn is_joined(&self, capture: u64) -> bool {
        self.found().is_joined(capture)
    }

    /// Returns the handles of the streams found capturing, each with the number of its finding; later findings have
    /// higher numbers.
    pub(crate) fn found_capturing(&self) -> Vec<(usize, u64)> {
        self.found().all()
    }

    /// Whether a stream may be capturing, according to the findings so far; false positives are possible.
    #[inline]
    pub(crate) fn may_be_capturing(&self, stream: CUstream) -> bool {
        self.found().may_have(stream) && self.has(Feature::CaptureInfo)
    }

    /// Removes a refuted finding.
    pub(crate) fn not_capturing(&self, number: u64) {
        self.found().revoke(number);
    }

    /// Records that the driver rejected a call because the stream is capturing.
    pub(crate) fn note_capture(&self, stream: CUstream) {
        self.found().add(stream, false);
    }

    /// Adds a stream that may be capturing, or may just have been, to those that calls watch.
    pub(crate) fn suspect_capture(&self, stream: CUstream) {
        self.found().add(stream, true);
    }

    /// Returns this crate's own streams that may be capturing: those whose capture was begun or found here and whose
    /// end was not observed.
    pub(crate) fn list_suspects(&self) -> Vec<Stream> {
        let suspects = self.found().watched();
        suspects
            .into_iter()
            .filter_map(|stream| self.own_stream(stream))
            .collect()
    }

    /// Checks whether watched captures are over. For this crate's own streams the driver is asked; other streams may no
    /// longer exist and must not be queried, so their captures expire after a number of reviews. Called once per
    /// [`REVIEW`](super::REVIEW) allocations that check for captures.
    #[cold]
    #[inline(never)]
    pub(crate) fn review_captures(&self) {
        for stream in self.found().watched() {
            let own = self.own_stream(stream);
            match own.map(|own| own.is_capturing()) {
                // The query has already updated the findings.
                Some(Ok(_)) => {}
                _ => self.found().age(stream),
            }
        }
    }
}

impl Stream {
    /// Starts capturing the stream into a graph.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::CaptureControl`].
    pub fn begin_capture(&self, mode: CUstreamCaptureMode) -> Result<(), DriverError> {
        let _entered = self.context().enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        self.begin(|driver| unsafe { driver.begin_capture(self.raw(), mode) })
    }

    fn begin(
        &self,
        begin: impl FnOnce(&Driver) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let driver = self.context().driver();
        // Added before the capture begins: otherwise other threads' calls would not watch for it.
        driver.found().add(self.raw(), true);
        let begun = begin(driver);
        match begun {
            // Added again: a query that ran before the capture began may have removed the entry.
            Ok(()) => driver.found().add(self.raw(), true),
            // SAFETY: the handle is valid by the contract under which it was made. A capture already in progress goes
            // on, and the query records it.
            Err(_) => drop(unsafe { driver.is_capturing(self.raw()) }),
        }
        begun
    }

    /// Ends the capture that was begun on the stream.
    ///
    /// Allocators whose last block was dropped during a capture are closed here, once their streams' work is complete,
    /// and blocks of driver pools that were dropped during it are freed.
    ///
    /// # Errors
    /// The driver's, such as `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`; the capture has ended then too.
    pub fn end_capture(&self) -> Result<Graph, DriverError> {
        let entered = self.context().enter()?;
        let (driver, mut raw) = (entered.driver(), ptr::null_mut());
        // SAFETY: the output is a local, and the handle is valid by the contract under which it was made.
        let ended = unsafe { call!(driver, cuStreamEndCapture(self.raw(), &mut raw)) };
        // SAFETY: as above. If ending failed, for example on the wrong thread, the capture goes on.
        let asked = unsafe { driver.is_capturing(self.raw()) };
        let graph = ended.map(|()| Graph::of(self.context(), raw));
        if matches!(asked, Ok(false)) {
            process::do_postponed();
        }
        graph
    }

    /// Starts capturing the stream, like [`Stream::begin_capture`], into an existing graph: the first captured node
    /// depends on `dependencies`, which are nodes of that graph. Ending the capture returns the same graph.
    ///
    /// # Errors
    /// The driver's, in which case the graph is lost; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::EdgeData`], `CUDA_ERROR_INVALID_HANDLE` for a graph of another driver.
    ///
    /// # Safety
    /// The nodes must belong to live graphs that no other thread uses during the call.
    pub unsafe fn begin_capture_into(
        &self,
        graph: Graph,
        dependencies: &[Dependency],
        mode: CUstreamCaptureMode,
    ) -> Result<(), DriverError> {
        let entered = self.context().enter()?;
        let driver = entered.driver();
        driver.refuse_foreign(graph.context().driver(), "cuStreamBeginCaptureToGraph")?;
        let has_nodes = !graph.nodes()?.is_empty();
        let (nodes, edges) = Dependency::to_arrays(dependencies);
        // SAFETY: the handles are valid by the contracts under which they were made, both arrays have the same length,
        // and the caller is responsible for the nodes.
        self.begin(|driver| unsafe {
            driver.begin_capture_to(self.raw(), graph.raw(), &nodes, &edges, mode)
        })?;
        // From here on the capture owns the graph.
        graph.forget();
        if has_nodes && let Ok(Some(id)) = self.capture_id() {
            driver.found().add_joined(id);
        }
        Ok(())
    }

    /// Starts capturing the stream; the capture ends when the result is dropped. Fails like [`Stream::begin_capture`].
    pub fn capture(&self, mode: CUstreamCaptureMode) -> Result<Capture<'_>, DriverError> {
        self.begin_capture(mode)?;
        Ok(Capture { stream: Some(self) })
    }

    /// Returns the capture that the stream is in and the dependencies of the next captured node; `None` if the stream
    /// is not being captured.
    ///
    /// # Errors
    /// The driver's: `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` for a capture that can only be ended,
    /// `CUDA_ERROR_LOSSY_QUERY` where an edge has data and the driver lacks
    /// [`Feature::EdgeData`], `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::CaptureInfo`].
    pub fn capture_info(&self) -> Result<Option<CaptureInfo>, DriverError> {
        let entered = self.context().enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        unsafe { entered.driver().capture_info(self.raw()) }
    }

    /// Returns the id of the capture that the stream is in, unique within the process; 0 if the capture is invalid and
    /// can only be ended; `None` if the stream is not being captured.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::CaptureInfo`].
    pub fn capture_id(&self) -> Result<Option<u64>, DriverError> {
        let entered = self.context().enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        let (status, id) = unsafe { entered.driver().state_of_capture(self.raw()) }?;
        Ok(match status {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => None,
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Some(id),
            _ => Some(0),
        })
    }
}

/// State, id and graph of a capture; the nodes that the next node depends on, the data of the edges to them (null for
/// ordinary edges), and their number.
type CaptureState = (
    CUstreamCaptureStatus,
    u64,
    sys::CUgraph,
    *const sys::CUgraphNode,
    *const sys::CUgraphEdgeData,
    usize,
);

/// Queries about captures. Streams are live, or special handles, and nodes belong to live graphs.
impl Driver {
    thin! {
        unsafe fn begin_capture(&self, stream: CUstream, mode: CUstreamCaptureMode)
            = cuStreamBeginCapture_v2(stream, mode);

        unsafe fn begin_capture_to(&self, stream: CUstream, graph: sys::CUgraph, nodes: &[sys::CUgraphNode],
            edges: &[sys::CUgraphEdgeData], mode: CUstreamCaptureMode
        ) = cuStreamBeginCaptureToGraph(stream, graph, nodes.as_ptr(), edges.as_ptr(), nodes.len(), mode);

        /// Returns the state and the id. Unlike [`capture_v2`](Self::capture_v2), it succeeds if edges have data.
        unsafe fn state_of_capture(&self, stream: CUstream) -> state: (CUstreamCaptureStatus, u64)
            = cuStreamGetCaptureInfo_v2(
                stream, &mut state.0, &mut state.1, ptr::null_mut(), ptr::null_mut(), ptr::null_mut());

        #[inline]
        unsafe fn capture_v2(&self, stream: CUstream) -> state: CaptureState = cuStreamGetCaptureInfo_v2(
            stream, &mut state.0, &mut state.1, &mut state.2, &mut state.3, &mut state.5);

        #[inline]
        unsafe fn capture_v3(&self, stream: CUstream) -> state: CaptureState = cuStreamGetCaptureInfo_v3(
            stream, &mut state.0, &mut state.1, &mut state.2, &mut state.3, &mut state.4, &mut state.5);

        unsafe fn update_dependencies(&self, stream: CUstream, nodes: *mut sys::CUgraphNode,
            edges: *const sys::CUgraphEdgeData, count: usize, flags: u32
        ) = cuStreamUpdateCaptureDependencies_v2(stream, nodes, edges, count, flags);
    }
}

/// A capture of a stream. Dropping it ends the capture and discards its graph, unless it was [ended](Capture::end)
/// before.
#[derive(Debug)]
#[must_use = "the capture ends when this is dropped"]
pub struct Capture<'a> {
    /// None once it has ended.
    stream: Option<&'a Stream>,
}

impl Capture<'_> {
    /// Ends the capture ([`Stream::end_capture`]).
    ///
    /// # Errors
    /// As for [`Stream::end_capture`]; the capture is over then too, except on a wrong thread.
    pub fn end(mut self) -> Result<Graph, DriverError> {
        match self.stream.take() {
            Some(stream) => stream.end_capture(),
            None => Err(DriverError::new(
                "cuStreamEndCapture",
                sys::CUresult::CUDA_ERROR_ILLEGAL_STATE,
            )),
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take()
            && let Err(error) = stream.end_capture()
            && !process::is_unavailable()
        {
            log::debug!("cannot end an abandoned capture: {error}");
        }
    }
}

/// The state of a capture as seen from one of its streams ([`Stream::capture_info`]).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CaptureInfo {
    /// The id of the capture, unique within the process.
    pub id: u64,
    /// The graph under construction. Objects may be retained on it and nodes added to it; it must not be destroyed.
    pub graph: sys::CUgraph,
    /// The dependencies of the next node captured on the stream.
    pub dependencies: Vec<Dependency>,
}

impl Driver {
    /// [`Stream::capture_info`] for a raw handle. The thread's capture mode does not matter.
    ///
    /// # Errors
    /// As for [`Stream::capture_info`].
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle for a default stream of the current context.
    #[doc(hidden)]
    pub unsafe fn capture_info(
        &self,
        stream: CUstream,
    ) -> Result<Option<CaptureInfo>, DriverError> {
        // SAFETY: the caller's contract.
        let read = unsafe { self.read_capture(stream, |dependency| dependency) }?;
        Ok(read.map(|(id, graph, dependencies)| CaptureInfo {
            id,
            graph,
            dependencies,
        }))
    }

    /// [`capture_info`](Self::capture_info) in parts: the id, the graph, and each dependency as converted by `each`.
    /// Also updates the findings.
    ///
    /// # Errors
    /// As for `capture_info`.
    ///
    /// # Safety
    /// As for `capture_info`.
    #[inline]
    pub(crate) unsafe fn read_capture<T, D: FromIterator<T>>(
        &self,
        stream: CUstream,
        each: impl Fn(Dependency) -> T,
    ) -> Result<Option<(u64, sys::CUgraph, D)>, DriverError> {
        let asked = self.found().newest();
        let with_edges = self.has(Feature::EdgeData);
        // SAFETY: the caller is responsible for the stream.
        let (status, id, graph, nodes, edges, count) = unsafe {
            match with_edges {
                true => self.capture_v3(stream),
                false => self.capture_v2(stream),
            }
        }?;
        match status {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {
                self.record_answer(stream, false, asked);
                return Ok(None);
            }
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => {
                self.record_answer(stream, true, asked);
            }
            _ => {
                self.record_answer(stream, true, asked);
                let name = match with_edges {
                    true => "cuStreamGetCaptureInfo_v3",
                    false => "cuStreamGetCaptureInfo_v2",
                };
                let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
                return Err(DriverError::new(name, code));
            }
        }
        let read = |index: usize| {
            // SAFETY: the driver's arrays have `count` elements and stay unchanged until the next call with this
            // stream; null stands for ordinary edges.
            unsafe {
                Dependency {
                    node: *nodes.add(index),
                    edge: match edges.is_null() {
                        true => sys::CUgraphEdgeData::default(),
                        false => *edges.add(index),
                    },
                }
            }
        };
        let dependencies = (0..count).map(|index| each(read(index)));
        Ok(Some((id, graph, dependencies.collect())))
    }

    /// Replaces the dependencies of the next node captured on a stream, or adds to them.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without [`Feature::EdgeData`].
    ///
    /// # Safety
    /// As for [`Driver::capture_info`]; the nodes belong to the stream's capture.
    #[doc(hidden)]
    pub unsafe fn set_capture_dependencies(
        &self,
        stream: CUstream,
        dependencies: &[Dependency],
        add: bool,
    ) -> Result<(), DriverError> {
        type Flags = sys::CUstreamUpdateCaptureDependencies_flags;
        let (mut nodes, edges) = Dependency::to_arrays(dependencies);
        // An empty vector's pointer is dangling, so null is passed instead.
        let (list, data) = match dependencies.is_empty() {
            true => (ptr::null_mut(), ptr::null()),
            false => (nodes.as_mut_ptr(), edges.as_ptr()),
        };
        let flags = match add {
            true => Flags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES,
            false => Flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES,
        };
        // SAFETY: the arrays have the stated length, and the caller is responsible for stream and nodes.
        unsafe { self.update_dependencies(stream, list, data, dependencies.len(), flags.0) }
    }
}
