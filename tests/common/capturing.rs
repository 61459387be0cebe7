//! Captures, begun and ended through the crate or as by other code.

use cualloc::allocator::{Allocator, GraphPool, Policy, Scope};
use cualloc::driver::{DriverError, Graph, Stream, sys};
use cualloc::sim::SimConfig;

use super::{MIB, RawStream, Rig, only_on};

pub const MODE: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// Runs `act` while `stream` is captured; the capture must not notice.
pub fn captured(rig: &Rig, stream: sys::CUstream, act: impl FnOnce()) {
    // SAFETY: the caller's stream is alive.
    let stream = unsafe { Stream::from_raw(&rig.context, stream) }.unwrap();
    let capturing = Capturing::begin(&stream, MODE);
    act();
    // A capture that was spoilt ends with an error.
    drop(capturing.end().unwrap());
}

/// A capture that ends with its test, also if that panics: an open one would prevent all other tests on the device from
/// waiting for the context.
pub struct Capturing(Option<Stream>);

impl Capturing {
    pub fn begin(stream: &Stream, mode: sys::CUstreamCaptureMode) -> Capturing {
        stream.begin_capture(mode).unwrap();
        Capturing::begun(stream)
    }

    /// For a capture that was begun otherwise.
    pub fn begun(stream: &Stream) -> Capturing {
        Capturing(Some(stream.clone()))
    }

    pub fn end(mut self) -> Result<Graph, DriverError> {
        self.0.take().unwrap().end_capture()
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            drop(stream.end_capture());
        }
    }
}

/// Captures what a closure gives the stream, with memory of a pool.
pub fn capture(pool: &GraphPool, stream: &Stream, work: impl FnOnce()) -> Graph {
    capture_output(pool, stream, work).0
}

/// [`capture`], and what the closure returns.
pub fn capture_output<T>(
    pool: &GraphPool,
    stream: &Stream,
    work: impl FnOnce() -> T,
) -> (Graph, T) {
    let scope = pool.enter(Scope::NextCapture).unwrap();
    let under_way = Capturing::begin(stream, MODE);
    let output = work();
    let graph = under_way.end().unwrap();
    scope.leave().unwrap();
    (graph, output)
}

/// An allocator with packed memory, a pool and streams, which are closed at the end; then nothing may be left.
pub fn pooled_on<const N: usize>(
    config: SimConfig,
    test: impl Fn(&Rig, Allocator, GraphPool, [Stream; N]),
) {
    only_on(Policy::Packed, config, |rig| {
        let (allocator, streams) = rig.scene::<N>();
        let pool = allocator.graph_pool().unwrap();
        test(rig, allocator.clone(), pool, streams.clone());
        streams.iter().for_each(|stream| rig.settle(stream));
    });
}

/// A free on a raw stream that no marker covers: closing needs the whole context.
pub fn leave_work(allocator: &Allocator, stream: &RawStream) {
    // SAFETY: the stream is alive, and nothing uses the block.
    unsafe {
        let ptr = allocator.allocate_raw(4 * MIB, stream.raw()).unwrap();
        allocator.free_raw(ptr).unwrap();
    }
}

/// Begins a capture by the table's own function, as code outside of the crate would.
pub fn begin(rig: &Rig, stream: sys::CUstream) -> impl FnOnce() + 'static {
    begin_in(rig, stream, MODE)
}

/// [`begin`] in a mode.
#[allow(dead_code)]
pub fn begin_in(
    rig: &Rig,
    stream: sys::CUstream,
    mode: sys::CUstreamCaptureMode,
) -> impl FnOnce() + 'static {
    let functions = rig.sim().unwrap().functions();
    let stream = stream as usize;
    move || {
        let begin = functions.cuStreamBeginCapture_v2.unwrap();
        // SAFETY: the caller's stream is alive.
        let code = unsafe { begin(stream as sys::CUstream, mode) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}

/// Ends a capture in the same way; the driver's answer.
pub fn end(rig: &Rig, stream: sys::CUstream) -> impl FnOnce() -> sys::CUresult + 'static {
    let functions = rig.sim().unwrap().functions();
    let stream = stream as usize;
    move || {
        let mut graph: sys::CUgraph = std::ptr::null_mut();
        let end = functions.cuStreamEndCapture.unwrap();
        // SAFETY: the caller's stream is alive, and the output is a local.
        let code = unsafe { end(stream as sys::CUstream, &mut graph) };
        if !graph.is_null() {
            // SAFETY: made just now.
            let code = unsafe { functions.cuGraphDestroy.unwrap()(graph) };
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        }
        code
    }
}
