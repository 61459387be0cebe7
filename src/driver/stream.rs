//! Streams, and the meaning of raw stream handles.

use super::context::{Context, Entered, Owner};
use super::deferred::Deferred;
use super::error::DriverError;
use super::event::Event;
use super::process;
use super::registry::Entry;
use super::symbols::{Call, Feature};
use super::sys::{self, CUstream_flags, CUstreamCaptureStatus};
use super::table::{Driver, call, thin};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The handle that always means the legacy default stream of the current context.
const LEGACY: usize = 1;
/// The handle that always means the calling thread's default stream in the current context.
const PER_THREAD: usize = 2;

/// A stream of a context: owned, borrowed, or one of the two default streams.
///
/// Cheap to clone. An owned stream is destroyed with its last clone, which does not wait: submitted work runs on.
/// `Send` and `Sync`; the per-thread default stream is a different queue on each thread that uses it.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

/// The kind of a [`Stream`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum StreamKind {
    /// Alive while clones exist: created here and destroyed with the last one, or kept alive by an owner object.
    Owned,
    /// A foreign stream, whose owner determines its lifetime.
    Borrowed,
    /// The context's default stream, which all threads share.
    LegacyDefault,
    /// The default stream, in this context, of the thread that uses it.
    PerThreadDefault,
}

/// An id that no stream has.
pub(crate) const NO_ID: u64 = u64::MAX;

struct Inner {
    context: Context,
    raw: sys::CUstream,
    kind: StreamKind,
    /// [`NO_ID`] for the per-thread default stream, whose id depends on the calling thread.
    id: u64,
    /// Whether it is destroyed here.
    created: bool,
    /// The object that keeps the stream alive, if there is one; otherwise the caller guarantees it.
    _owner: Owner,
}

// SAFETY: a stream handle may be used from any thread; the driver synchronises.
unsafe impl Send for Inner {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for Inner {}

impl Driver {
    pub(crate) fn owned_stream(&self, id: u64) -> Option<Stream> {
        self.streams().find(id).map(Stream)
    }

    pub(crate) fn own_stream(&self, raw: usize) -> Option<Stream> {
        let streams: Vec<Arc<Inner>> = self.streams().all();
        let own = streams.into_iter().find(|own| own.raw as usize == raw);
        own.map(Stream)
    }
}

impl Stream {
    /// Creates a stream that does not synchronise with the legacy default stream.
    pub fn new(context: &Context) -> Result<Stream, DriverError> {
        Stream::create(context, None)
    }

    /// Like [`Stream::new`], with a priority: lower numbers are more urgent, and the driver clamps them to the range of
    /// the device.
    pub fn with_priority(context: &Context, priority: i32) -> Result<Stream, DriverError> {
        Stream::create(context, Some(priority))
    }

    fn create(context: &Context, priority: Option<i32>) -> Result<Stream, DriverError> {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        let mut raw = ptr::null_mut();
        let entered = context.enter()?;
        let driver = entered.driver();
        context.deferred().destroy(driver, false);
        match priority {
            // SAFETY: the pointer is to a local handle.
            None => unsafe { call!(driver, cuStreamCreate(&mut raw, flags)) }?,
            // SAFETY: as above.
            Some(priority) => unsafe {
                call!(
                    driver,
                    cuStreamCreateWithPriority(&mut raw, flags, priority)
                )
            }?,
        }
        // Owned from here on, so that an error below destroys it.
        let mut inner = Inner {
            context: context.clone(),
            raw,
            kind: StreamKind::Owned,
            id: NO_ID,
            created: true,
            _owner: None,
        };
        // SAFETY: the stream has just been created in the current context.
        let id = unsafe { driver.stream_id(raw) }?.unwrap_or_else(next_substitute);
        inner.id = id;
        let inner = Arc::new(inner);
        driver
            .streams()
            .lock()
            .insert(id, Entry::while_used(&inner));
        drop(entered);
        Ok(Stream(inner))
    }

    /// Wraps a foreign stream, or a default stream by its special handle (null, 1, 2).
    ///
    /// # Errors
    /// Currently none.
    ///
    /// # Safety
    /// `raw` must be a live stream of `context` or a special handle, and outlive the result and its clones.
    pub unsafe fn from_raw(context: &Context, raw: sys::CUstream) -> Result<Stream, DriverError> {
        let kind = match raw as usize {
            0 | LEGACY => StreamKind::LegacyDefault,
            PER_THREAD => StreamKind::PerThreadDefault,
            _ => StreamKind::Borrowed,
        };
        let id = match kind {
            // SAFETY: the caller is responsible for the stream.
            StreamKind::Borrowed => unsafe { id_of(context, raw) }?,
            StreamKind::PerThreadDefault => NO_ID,
            _ => context.legacy_id(),
        };
        Ok(Stream::of(context, raw, (kind, id), None))
    }

    /// Wraps a foreign stream with an object that keeps it alive: the object is dropped with the last clone of the
    /// result, including those that allocators keep.
    ///
    /// # Errors
    /// The driver's; then `owner` has been dropped.
    ///
    /// # Safety
    /// `raw` must be a live stream of `context` while `owner` exists, and not a special handle.
    pub unsafe fn from_raw_with_owner(
        context: &Context,
        raw: sys::CUstream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Stream, DriverError> {
        let owner: Owner = Some(Box::new(owner));
        // SAFETY: the caller is responsible for the stream.
        let id = unsafe { id_of(context, raw) }?;
        Ok(Stream::of(context, raw, (StreamKind::Owned, id), owner))
    }

    /// Returns the context's legacy default stream, which all threads share.
    pub fn legacy(context: &Context) -> Stream {
        let raw = ptr::without_provenance_mut(LEGACY);
        let kind = (StreamKind::LegacyDefault, context.legacy_id());
        Stream::of(context, raw, kind, None)
    }

    /// Returns the context's per-thread default stream, which means the queue of the thread that uses it.
    pub fn per_thread(context: &Context) -> Stream {
        let raw = ptr::without_provenance_mut(PER_THREAD);
        Stream::of(context, raw, (StreamKind::PerThreadDefault, NO_ID), None)
    }

    fn of(
        context: &Context,
        raw: sys::CUstream,
        (kind, id): (StreamKind, u64),
        owner: Owner,
    ) -> Stream {
        Stream(Arc::new(Inner {
            context: context.clone(),
            raw,
            kind,
            id,
            created: false,
            _owner: owner,
        }))
    }

    /// Returns the driver's handle.
    #[inline]
    pub fn raw(&self) -> sys::CUstream {
        self.0.raw
    }

    /// Returns the stream's id, unique within the process: handle values are reused, ids are not. It is the driver's
    /// id, queried when the `Stream` was created. The id of a default stream is unknown to the driver and at least
    /// 2^63: each context has one for its legacy default stream, and one per thread for its per-thread default stream,
    /// of which the calling thread's is returned.
    ///
    /// If the driver has no ids ([`Feature::StreamIds`]), each owned or borrowed `Stream` (not each clone) gets its
    /// own.
    ///
    /// # Errors
    /// Currently none.
    #[inline]
    pub fn id(&self) -> Result<u64, DriverError> {
        Ok(self.own_id())
    }

    /// Returns the [`id`](Self::id), which every stream has.
    #[inline]
    pub(crate) fn own_id(&self) -> u64 {
        match self.0.id {
            NO_ID => self.0.context.per_thread_id(),
            id => id,
        }
    }

    /// Returns the stream's id, if it is known without asking the driver.
    #[inline]
    pub(crate) fn known_id(&self) -> Option<u64> {
        Some(self.cached_id()).filter(|id| *id != NO_ID)
    }

    /// Returns the stream's id, or [`NO_ID`] if it is not known without asking the driver.
    #[inline(always)]
    pub(crate) fn cached_id(&self) -> u64 {
        self.0.id
    }

    /// Whether the other stream is a clone of this one: not only the same stream, but with the same lifetime.
    #[inline]
    pub(crate) fn is_clone_of(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the context that the stream belongs to.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn kind(&self) -> StreamKind {
        self.0.kind
    }

    /// Returns the number of clones, including this one. If it is one, no other code can submit work through a clone,
    /// and no other thread can create one.
    #[doc(hidden)]
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Blocks the calling thread until all work submitted to the stream has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let entered = self.0.context.enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        unsafe { entered.stream_synchronize(self.0.raw) }
    }

    /// Whether all work submitted to the stream has completed.
    ///
    /// # Errors
    /// The driver's, including those of the work itself.
    pub fn is_complete(&self) -> Result<bool, DriverError> {
        let entered = self.0.context.enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        unsafe { entered.is_idle(self.0.raw) }
    }

    /// Whether the stream is being captured into a graph, even if the capture is invalid.
    #[inline]
    pub fn is_capturing(&self) -> Result<bool, DriverError> {
        // SAFETY: the handle is valid by the contract under which it was made.
        let ask = || unsafe { self.0.context.driver().is_capturing(self.0.raw) };
        match self.0.kind {
            // These handles mean the same stream in every current context.
            StreamKind::Owned | StreamKind::Borrowed => ask(),
            StreamKind::LegacyDefault | StreamKind::PerThreadDefault => {
                let _switched = self.0.context.switch()?;
                ask()
            }
        }
    }

    /// Records an event that will be waited for or queried ([`Event::record`]). Fails if the stream is capturing by
    /// then, because the event then belongs to a graph and means nothing outside of it. The caller has checked for a
    /// capture before, but another thread may have begun one since.
    pub(crate) fn mark(&self, event: &Event) -> Result<(), DriverError> {
        let entered = self.0.context.enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        unsafe { entered.record(event, self.0.raw) }?;
        // SAFETY: as above, and the context is current.
        if unsafe { entered.driver().is_capturing(self.0.raw) }? {
            let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            return Err(DriverError::new("cuEventRecord", code));
        }
        Ok(())
    }

    /// Makes all work submitted to the stream from now on wait for the work recorded in `event`. The event may belong
    /// to another context or device.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` for an event of another driver.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let (driver, other) = (self.0.context.driver(), event.context().driver());
        driver.refuse_foreign(other, "cuStreamWaitEvent")?;
        let entered = self.0.context.enter()?;
        // SAFETY: the handle is valid by the contract under which it was made.
        unsafe { entered.stream_wait(self.0.raw, event) }
    }

    /// Makes all work submitted to the stream from now on wait for all work submitted to `other` so far. Fails like
    /// [`wait`](Self::wait).
    pub fn wait_for(&self, other: &Stream) -> Result<(), DriverError> {
        let event = Event::new(&other.0.context)?;
        event.record(other)?;
        self.wait(&event)
    }

    /// Fills `bytes` bytes at `to` with `value`, in the order of the stream.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The memory must be writable where the stream runs, and stay so until the fill has completed; no other code may
    /// access it during that time.
    pub unsafe fn memset(
        &self,
        to: sys::CUdeviceptr,
        value: u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let entered = self.0.context.enter()?;
        // SAFETY: the caller is responsible for the memory.
        unsafe { entered.memset_d8(to, value, bytes, self.0.raw) }
    }

    /// Copies `bytes` bytes between any two addresses of the unified address space, in the order of the stream.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both ranges must be accessible where the stream runs, stay so until the copy has completed, and not overlap;
    /// during that time no other code may write to them, or access the written range.
    pub unsafe fn memcpy(
        &self,
        to: sys::CUdeviceptr,
        from: sys::CUdeviceptr,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let entered = self.0.context.enter()?;
        // SAFETY: the caller is responsible for the memory.
        unsafe { entered.copy(to, from, bytes, self.0.raw) }
    }
}

impl Event {
    /// Records all work submitted to `stream` so far. Replaces an earlier record, but waits that were already submitted
    /// keep it.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` if event and stream differ in their context or driver.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        let driver = stream.context().driver();
        driver.refuse_foreign(self.context().driver(), "cuEventRecord")?;
        let entered = stream.context().enter()?;
        // SAFETY: the stream's handle is valid by the contract under which it was made.
        unsafe { entered.record(self, stream.raw()) }
    }
}

debug_fields!(Stream, self => raw: self.0.raw, kind: self.0.kind, id: self.0.id);

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.created {
            return;
        }
        let id = self.id;
        if id != NO_ID && !process::is_unavailable() {
            // The removed entry is dropped after the lock is released.
            let entry = self.context.driver().streams().lock().remove(&id);
            drop(entry);
        }
        self.context.release(Deferred::Stream(self.raw));
    }
}

#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Blocks the calling thread until all work submitted to `stream`, valid as for [`Entered::record`], has
        /// completed.
        pub unsafe fn stream_synchronize(&self, stream: sys::CUstream) = cuStreamSynchronize(stream);
    }

    /// Whether all work submitted to `stream` has completed; errors include those of the work itself.
    ///
    /// # Safety
    /// As for [`Entered::record`].
    pub(crate) unsafe fn is_idle(&self, stream: sys::CUstream) -> Result<bool, DriverError> {
        // SAFETY: the caller is responsible for the stream.
        match unsafe { call!(self.driver(), cuStreamQuery(stream)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_ready() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Queries about raw handles: `stream` must be a live stream, or a special handle while its context is current.
#[doc(hidden)]
impl Driver {
    /// Returns the id of a stream; none if the driver has no ids. Not counted, and writes to no shared memory: it costs
    /// about as much as two driver queries. Fails with `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` for a stream that is
    /// being captured, without affecting the capture.
    #[inline]
    pub unsafe fn stream_id(&self, stream: sys::CUstream) -> Result<Option<u64>, DriverError> {
        if !self.has(Feature::StreamIds) {
            return Ok(None);
        }
        // Drivers reject a query for the id of a capturing stream and invalidate the capture.
        // SAFETY: the caller is responsible for the stream.
        if unsafe { self.is_capturing(stream) }? {
            let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            return Err(DriverError::new("cuStreamGetId", code));
        }
        // SAFETY: as above.
        unsafe { self.known_id(stream) }
    }

    /// [`stream_id`](Self::stream_id) of a stream that is not capturing: one query instead of two. It invalidates a
    /// capture if there is one.
    ///
    /// # Safety
    /// As for [`Driver::stream_id`].
    #[inline]
    pub(crate) unsafe fn uncaptured_id(
        &self,
        stream: sys::CUstream,
    ) -> Result<Option<u64>, DriverError> {
        if !self.has(Feature::StreamIds) {
            return Ok(None);
        }
        // SAFETY: the caller's contract.
        unsafe { self.known_id(stream) }
    }

    /// [`uncaptured_id`](Self::uncaptured_id) for a driver that has ids.
    #[inline(always)]
    unsafe fn known_id(&self, stream: sys::CUstream) -> Result<Option<u64>, DriverError> {
        let mut id = 0;
        // SAFETY: the caller is responsible for the stream; the pointer is to a local integer.
        unsafe { call!(uncounted self, cuStreamGetId(stream, &mut id)) }?;
        Ok(Some(id))
    }

    /// Whether the driver reports that a stream is not captured. Cheap, because it builds no error: a caller that needs
    /// the reason calls [`is_capturing`](Self::is_capturing) afterwards.
    ///
    /// # Safety
    /// The stream is alive, or a special handle whose context is current.
    #[inline(always)]
    pub(crate) unsafe fn is_uncaptured(&self, stream: sys::CUstream) -> bool {
        // SAFETY: the caller's contract.
        unsafe { self.ask_capture(stream) == Ok(false) }
    }

    /// [`is_capturing`](Self::is_capturing) with the bare code of a failure, which is cheaper than an error.
    #[inline(always)]
    unsafe fn ask_capture(&self, stream: sys::CUstream) -> Result<bool, sys::CUresult> {
        let Some(ask) = self.functions().cuStreamIsCapturing else {
            return Err(sys::CUresult::CUDA_ERROR_NOT_FOUND);
        };
        if process::is_forked_child() {
            return Err(sys::CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let asked = self.found().newest();
        // SAFETY: the caller is responsible for the stream; the pointer is to a local.
        match unsafe { ask(stream, &mut status) } {
            sys::CUresult::CUDA_SUCCESS => {
                let capturing = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                self.record_answer(stream, capturing, asked);
                Ok(capturing)
            }
            code => Err(code),
        }
    }

    /// Whether the stream is being captured into a graph, even if the capture is invalid. Not counted. Fails with
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` for the legacy default stream while a blocking stream of its context is
    /// captured.
    #[inline]
    pub unsafe fn is_capturing(&self, stream: sys::CUstream) -> Result<bool, DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.ask_capture(stream) }
            .map_err(|code| self.failed(Call::cuStreamIsCapturing, code))
    }

    /// Records the driver's answer about a stream; `asked` is the newest finding before the query.
    #[inline(always)]
    pub(super) fn record_answer(&self, stream: sys::CUstream, capturing: bool, asked: u64) {
        if capturing {
            self.found().add(stream, false);
        } else {
            self.found().remove(stream, asked);
        }
    }

    thin! {
        /// Returns the context of a stream; for a special handle the calling thread's current context, or
        /// `CUDA_ERROR_INVALID_CONTEXT` if there is none.
        pub unsafe fn stream_context(&self, stream: sys::CUstream) -> context: sys::CUcontext
            = cuStreamGetCtx(stream, &mut context);
    }
}

/// Returns the id of a stream that is not a default stream.
///
/// # Safety
/// `raw` must be a live stream of `context`.
unsafe fn id_of(context: &Context, raw: sys::CUstream) -> Result<u64, DriverError> {
    // SAFETY: the caller is responsible for the stream.
    Ok(unsafe { context.driver().stream_id(raw) }?.unwrap_or_else(next_substitute))
}

/// Returns a fresh id, for drivers without ids.
fn next_substitute() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
