//! What somebody else does while a driver call of the allocator is under way.

use std::cell::{Cell, RefCell};

use cualloc::driver::sys::*;

use super::hooked::hooked;

type Work = Box<dyn FnOnce()>;

thread_local! {
    /// A call, and what happens right after its next one on this thread.
    static NEXT: RefCell<Option<(&'static str, Work)>> = const { RefCell::new(None) };
    /// The same, right before it.
    static FIRST: RefCell<Option<(&'static str, Work)>> = const { RefCell::new(None) };
}

fn play(at: &'static std::thread::LocalKey<RefCell<Option<(&'static str, Work)>>>, call: &str) {
    let next = at.take();
    match next {
        Some((name, work)) if name == call => work(),
        other => at.set(other),
    }
}

fn begun(call: &str) {
    play(&FIRST, call);
}

fn played(call: &str) {
    play(&NEXT, call);
}

hooked! {
    /// Makes room for interludes in the calls of this thread; returns the table to use instead.
    before begun, after played;
    cuEventRecord(event: CUevent, stream: CUstream);
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    cuEventQuery(event: CUevent);
    cuMemsetD32Async(to: CUdeviceptr, value: u32, words: usize, stream: CUstream);
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
}

/// Has `work` done once, when the driver has done the next call of a name on this thread and before the
/// allocator knows. On a rig [with interludes](super::Rig::with_interludes).
pub fn after(call: &'static str, work: impl FnOnce() + 'static) {
    NEXT.set(Some((call, Box::new(work))));
}

/// [`after`], but right before the driver gets the call.
#[allow(dead_code)]
pub fn before(call: &'static str, work: impl FnOnce() + 'static) {
    FIRST.set(Some((call, Box::new(work))));
}

/// Whether a call has not come yet.
pub fn is_due() -> bool {
    NEXT.with_borrow(Option::is_some) || FIRST.with_borrow(Option::is_some)
}

/// Takes away what has not come yet.
pub fn clear() {
    NEXT.take();
    FIRST.take();
}
