//! The public type of the allocator.

pub(crate) mod block;
pub(crate) mod carver;
pub(crate) mod checks;
pub(crate) mod graph;
pub(crate) mod guard;
pub(crate) mod range;
pub(crate) mod raw;
pub(crate) mod suspend;

use crate::allocator::calls::close;
use crate::allocator::calls::retire;
use crate::allocator::engine::contexts;
use crate::allocator::engine::idle;
use crate::allocator::engine::peers;
use crate::allocator::engine::self_test;
use crate::allocator::inspect::figures::{fragmentation, statistics};
use crate::allocator::inspect::snapshot::{block_info_around, snapshot};
use crate::error::memory::Bytes;
use crate::error::{Error, StreamMisuse};
use std::fmt;
use std::sync::Arc;

use crate::clock::Clock;
use crate::driver::{
    CallCounts, Context, Driver, MemoryProperties, Stream, kept_stream, process, sys,
};

use crate::allocator::api::block::Block;
use crate::allocator::cache::grant::{Grant, Missed};
use crate::allocator::cache::stream_cache::PageTable;
use crate::allocator::calls::cached::unaligned;
use crate::allocator::config::{Config, Policy};
use crate::allocator::debug::Debug;
use crate::allocator::engine::hooks::ReliefHook;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::recorded;
use crate::allocator::engine::{Engine, Shared};
use crate::allocator::heap::request::Checked;
use crate::allocator::report::{
    BlockInfo, Fragmentation, LimitText, SegmentInfo, SelfTest, Trimmed,
};
use crate::allocator::request::Request;
use crate::allocator::size;
use crate::allocator::stats::Stats;

/// A caching allocator for the memory of one device.
///
/// Clones are handles to the same allocator. All methods may be called from any thread. The allocator is closed when
/// its last handle and its last [`Block`] are dropped; [`close`](Self::close) does the same and returns errors.
///
/// # Streams
/// Memory follows stream order: a freed block is immediately reusable on its own stream; another stream reuses it only
/// when its uses are complete, or behind a wait for them. The driver's ids identify streams, so a new stream with the
/// handle value of an old one is a new stream.
///
/// The allocator keeps a stream that is passed as a [`Stream`] made by [`Stream::new`] alive as long as it needs it. A
/// stream that is passed as a raw handle (or borrowed) remains the caller's, who must call
/// [`retire_raw`](Self::retire_raw) (or [`retire`](Self::retire)) before destroying it. Until then its handle is used
/// only in calls that name it, or that free a block which was allocated or recorded on it. If a stream is destroyed
/// without being retired, the memory freed on it is not lost, but other streams can use it only after the whole context
/// has been synchronised.
///
/// # Default streams by handle
/// In a raw call null and 1 mean the legacy default stream of the *allocator's* context, and 2 the calling thread's
/// default stream in that context, whichever context is current and even if none is. They equal [`Stream::legacy`] and
/// [`Stream::per_thread`] of [`context`](Self::context), need no driver call to resolve, and the legacy one need not be
/// retired. The driver interprets the same handles in the current context. Therefore a caller with another current
/// context passes a stream of that context by its own handle. The default streams of another context have no handle
/// here: create a [`Stream`] for them from their context. With [`Config::context_checks`] (on in debug builds) a
/// special handle in a call with another current context is [`Error::WrongContext`].
///
/// # Forks
/// In a forked child every call that can fail returns [`Error::ForkedChild`]. The other calls return immediately, like
/// those of an allocator without memory, and change nothing: the heap's lock may be held by a thread that the child
/// does not have.
pub struct Allocator {
    pub(crate) engine: Shared,
    /// A copy of the engine's pointer: a free by address starts here, which saves a dependent cache line.
    pages: Arc<PageTable>,
}

impl Clone for Allocator {
    fn clone(&self) -> Self {
        self.engine.add_handle();
        Allocator {
            engine: Arc::clone(&self.engine),
            pages: Arc::clone(&self.pages),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        self.engine.remove_handle();
    }
}

impl Allocator {
    fn with_engine(engine: Shared) -> Self {
        let pages = Arc::clone(&engine.pages);
        Allocator { engine, pages }
    }

    /// Creates an allocator on a device's primary context, with the settings of the environment variable
    /// `CUALLOC_CONFIG`. Loads the driver on first use.
    ///
    /// # Errors
    /// [`Error::DriverUnavailable`], [`Error::InvalidConfig`], and driver errors.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let config = Config::from_env()?;
        let driver = Driver::load()?;
        let device = driver.device(ordinal)?;
        Self::with_config(&Context::primary(&device)?, config)
    }

    /// Creates an allocator on a given context.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::NotSupported`] if the device does not support a setting,
    /// [`Error::DeviceRefused`] if the device reports support but refuses the call, and driver errors.
    pub fn with_config(context: &Context, config: Config) -> Result<Self, Error> {
        recorded::begin_by_environment();
        let engine = Engine::new(context, &config)?;
        self_test::recall(&engine);
        recorded::register(&engine);
        let allocator = Allocator::with_engine(engine);
        log::info!(
            "allocator {} on device {}: policy {}, {}, views {}",
            allocator.id(),
            allocator.engine.device.ordinal(),
            allocator.policy().name(),
            LimitText(allocator.limit()),
            if allocator.engine.views.enabled {
                "on"
            } else {
                "off"
            },
        );
        Ok(allocator)
    }

    /// Returns the allocator's number, which is unique in the process; numbers start at 1 and are never reused.
    pub fn id(&self) -> u64 {
        self.engine.id
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.engine
    }

    /// The context that the memory belongs to.
    pub fn context(&self) -> &Context {
        &self.engine.context
    }

    /// Returns the properties of the physical memory: whether its handles can be exported, and registered with network
    /// cards. Both are false under the classic policy, and where the device refused such memory at creation.
    pub fn memory_properties(&self) -> MemoryProperties {
        self.engine.properties
    }

    /// The segment policy in effect: never [`Policy::Auto`].
    pub fn policy(&self) -> Policy {
        self.engine.rules.policy()
    }

    /// Tests whether a write through one mapping is visible through another, unless views are disabled or the device
    /// has already been tested in this process, and returns the result so far. Without this call the test runs before
    /// the first view is built. The test takes a few milliseconds, uses 2 MiB and a temporary stream, and waits for its
    /// own work; loading its kernels may wait for all work in the context. The test before the first view runs without
    /// kernels unless all known streams are idle.
    ///
    /// # Errors
    /// Driver errors.
    pub fn test_views(&self) -> Result<SelfTest, Error> {
        self_test::run(&self.engine)
    }

    /// Creates a stream on the allocator's context.
    ///
    /// # Errors
    /// Driver errors.
    pub fn create_stream(&self) -> Result<Stream, Error> {
        self.engine.usable()?;
        Stream::new(&self.engine.context).map_err(|e| self.engine.error(e))
    }

    // ---- allocation ------------------------------------------------------------------------

    /// Allocates `bytes` (at least 1) for use on a stream.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::OutOfMemory`], [`Error::Capturing`], [`Error::WrongDevice`], [`Error::Stream`],
    /// [`Error::Closed`], a lost context, and driver errors. No memory is lost with any of them.
    #[inline]
    pub fn allocate(&self, bytes: usize, stream: &Stream) -> Result<Block, Error> {
        let grant = match unaligned(bytes) {
            Some(small) => match self.engine.hit(stream.cached_id(), small) {
                Ok(grant) => grant,
                Err(missed) => self.engine.miss(bytes, stream, missed)?,
            },
            None => self.engine.miss(bytes, stream, Missed(None))?,
        };
        Ok(Block::new(&self.engine, grant, bytes))
    }

    /// Like [`allocate`](Self::allocate), with constraints.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and [`Error::Invalid`]; [`Error::NotCached`] if the request is
    /// [for cached memory only](Request::cached_only) and no cached memory fits.
    pub fn allocate_with(&self, request: Request, stream: &Stream) -> Result<Block, Error> {
        let grant = self
            .engine
            .allocate(&self.engine.named(stream)?, &request, Missed(None))?;
        Ok(Block::new(&self.engine, grant, request.bytes()))
    }

    /// Allocates from cached memory only: at the first free address of `near`, or else by best fit. Also returns the
    /// addresses of `near` that still lie in free memory.
    pub(crate) fn allocate_near(
        &self,
        request: &Request,
        stream: &Stream,
        near: &[sys::CUdeviceptr],
    ) -> Result<(Option<Grant>, Vec<u64>), Error> {
        let checked = Checked::of(request)?;
        let named = self.engine.named(stream)?;
        self.engine.allocate_cached(&named, &checked, near)
    }

    /// Returns the allocator that a block belongs to.
    pub(crate) fn of(block: &Block) -> Self {
        let engine: *const Engine = block.engine();
        // SAFETY: every engine lives in an `Arc`, and a block keeps its engine alive.
        let engine = unsafe {
            Arc::increment_strong_count(engine);
            Arc::from_raw(engine)
        };
        engine.add_handle();
        {
            let mut heap = engine.lock();
            if heap.orphaned {
                heap.set_orphaned(false);
            }
        }
        Allocator::with_engine(engine)
    }

    // ---- streams ---------------------------------------------------------------------------

    /// Declares that a stream receives no more work. Records its last marker, so that memory freed on it can be shared
    /// once that completes, and forgets its handle. Live blocks of the stream stay valid and may be freed later.
    ///
    /// Buffers, columns and workspaces may continue to use the stream, even concurrently on other threads: the
    /// allocator treats work that they submit from then on as work of a new stream, and accounts for it when they are
    /// freed. The allocator cannot see the uses of a [`Block`]: `unsafe` code that submits work with it later records
    /// the stream again ([`Block::record_stream`]) before the free.
    ///
    /// Never waits for work, unless another thread waits for the stream's context and that is not the allocator's. On
    /// failure nothing has changed.
    ///
    /// # Errors
    /// [`Error::Stream`] for an unknown stream, and for the per-thread default stream if only that of another thread is
    /// known; [`Error::Capturing`], driver errors.
    pub fn retire(&self, stream: &Stream) -> Result<(), Error> {
        self.retire_named(&self.engine.named(stream)?)
    }

    fn retire_named(&self, named: &Named<'_>) -> Result<(), Error> {
        let retired = retire::retire(&self.engine, named);
        // Memory outside this allocator may use a stream that the allocator does not know.
        if let Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) = retired {
            kept_stream::retire(self.engine.driver(), named.raw);
        }
        retired
    }

    /// Like [`retire`](Self::retire), by handle; it must be called before the handle is destroyed.
    ///
    /// # Errors
    /// As [`retire`](Self::retire), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle, which means a default stream of the allocator's context
    /// ([`Allocator`]). Work submitted later on the stream uses no block that was allocated or recorded on it. After
    /// this call has returned, the stream may be destroyed, and so may its context, if that is not the allocator's and
    /// no other stream of it is known here.
    pub unsafe fn retire_raw(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        self.retire_named(&named)
    }

    /// Adopts a stream: the caller promises that its handle stays valid until it is [retired](Self::retire_raw). The
    /// allocator then treats it like a stream of this crate: calls by its handle need no driver query to identify it,
    /// and when another request needs memory that was freed on it, calls that do not name the stream record its
    /// markers. Only calls that name the stream query whether it is idle, because a query would invalidate a capture
    /// that its owner begins concurrently, unless [`Config::captures`] promises that there is none.
    ///
    /// If the stream is already known, the promise also covers everything freed on it so far. Adopting a stream of this
    /// crate or the legacy default stream changes nothing.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for the per-thread default stream; [`Error::WrongContext`] for a stream of another
    /// context than the allocator's; [`Error::Capturing`], [`Error::Closed`], driver errors.
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle ([`Allocator`]), and stay alive until
    /// [`retire_raw`](Self::retire_raw) has succeeded for it, or the allocator is closed.
    pub unsafe fn adopt_raw(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        self.engine.adopt(&named)
    }

    /// Records a marker on a stream now, so that memory freed on it so far can be released or shared when its work is
    /// done. Correctness does not require it.
    ///
    /// # Errors
    /// [`Error::Stream`], [`Error::Capturing`], [`Error::WrongContext`], driver errors.
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle, which means a default stream of the allocator's
    /// context ([`Allocator`]).
    pub unsafe fn mark_raw(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        self.engine.refuse_capture(&named)?;
        let known = retire::known(&self.engine, &named)?;
        self.engine.mark(known, named.key)
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// Whether `ptr` lies in a live block.
    pub fn owns(&self, ptr: sys::CUdeviceptr) -> bool {
        let Some(mut heap) = self.engine.readable() else {
            return false;
        };
        heap.caches.small_around(ptr).is_some() || heap.large_around(ptr).is_some()
    }

    /// Returns the live block around `ptr`: its base, size, stream and uses.
    pub fn block_of(&self, ptr: sys::CUdeviceptr) -> Option<BlockInfo> {
        block_info_around(&mut *self.engine.readable()?, ptr)
    }

    /// Returns the usable bytes of the live block that starts at `ptr`.
    pub fn usable_size(&self, ptr: sys::CUdeviceptr) -> Option<u64> {
        let mut heap = self.engine.readable()?;
        if let Some((_, run, _)) = heap.caches.small_around(ptr) {
            return (run.ptr == ptr).then_some(u64::from(run.granules) * size::GRANULE);
        }
        let id = heap.large_around(ptr)?;
        let hot = &heap.extents.records[id];
        let bytes = match self.engine.debug.as_ref().is_some_and(Debug::guards) {
            true => heap.extents.records.cold(id).requested,
            false => hot.bytes(),
        };
        (hot.addr == ptr).then_some(bytes)
    }

    // ---- memory ----------------------------------------------------------------------------

    /// Allocates and frees `bytes`, so that a later block of that size needs no driver call. Under the classic policy
    /// it adds a segment for such a request.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn reserve(&self, bytes: usize, stream: &Stream) -> Result<(), Error> {
        self.allocate(bytes, stream).map(drop)
    }

    /// Releases unused memory to the driver until at most `keep` bytes of it are left: the memory that has been idle
    /// longest first (a run of free memory counts as idle since its last part was freed), within one run from its end.
    /// It never waits for the device: memory that is still in use is only counted, with the streams that it is pending
    /// on. (Segments of the classic policy are freed by `cuMemFree`, which may wait for other work of their context.)
    /// Page-locked host memory of earlier suspensions is freed as well.
    ///
    /// Memory that was freed on a raw stream can be released only after a marker on it was observed complete: call
    /// [`mark_raw`](Self::mark_raw) before the work ends, or [`empty_cache`](Self::empty_cache), which waits.
    ///
    /// # Errors
    /// Driver errors. Memory that could not be unmapped or freed stays reserved, and the next call tries again. A
    /// handle whose release failed counts as released: either the driver has its memory, or it is leaked until the
    /// process ends.
    pub fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        close::trim(&self.engine, keep).inspect(|done| self.log_trim(done))
    }

    /// [`trim`](Self::trim), except that page-locked host memory stays, which the next suspension uses.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn trim_device(&self, keep: u64) -> Result<Trimmed, Error> {
        close::trim_device(&self.engine, keep).inspect(|done| self.log_trim(done))
    }

    /// Releases all unused memory to the driver, and waits on the host where only a wait can show that memory is
    /// unused. It waits for the markers that the allocator recorded on streams that are not capturing. It waits for all
    /// work of a context if memory is left there on which only the owners of its streams could record a marker (raw
    /// streams that were not adopted), no capture is known there, and no scope of a graph pool expects one. For graphs
    /// of released graph pools that were just destroyed it waits at most 5 ms.
    ///
    /// A capture that prevents a wait is not an error: the result reports the memory as pending, with its streams.
    ///
    /// # Errors
    /// As [`trim`](Self::trim), and driver errors of the work that it waited for.
    pub fn empty_cache(&self) -> Result<Trimmed, Error> {
        close::empty_cache(&self.engine).inspect(|done| self.log_trim(done))
    }

    /// Releases memory that has been idle as long as [`Config::decay`] says, if a check is due, and returns the bytes
    /// released. It is meant for programs that make no calls while they are idle, and call it from a timer. It never
    /// waits. Without that setting, or before a check is due, it does nothing.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn decay(&self) -> Result<u64, Error> {
        match &self.engine.decay {
            Some(decay) => idle::release_idle(&self.engine, decay),
            None => Ok(0),
        }
    }

    /// Replaces the clock of [`Config::decay`]: for tests.
    pub fn set_clock(&self, clock: Clock) {
        if let Some(decay) = &self.engine.decay {
            decay.set_clock(clock);
        }
    }

    fn log_trim(&self, done: &Trimmed) {
        log::debug!(
            "allocator {}: released {} to the driver, {} pending",
            self.id(),
            Bytes(done.released),
            Bytes(done.pending)
        );
    }

    /// Waits until all work of the contexts involved is complete. Afterwards every stream can use all free memory, and
    /// it can be trimmed.
    ///
    /// # Errors
    /// [`Error::Capturing`] while a stream of these contexts is capturing; driver errors, including those of the work
    /// itself. After a `CUDA_ERROR_INVALID_HANDLE` from another context, whose streams have to be retired first, the
    /// call returns that error, and everything else is complete.
    pub fn synchronize(&self) -> Result<(), Error> {
        drop(self.engine.open()?);
        process::do_postponed();
        contexts::synchronise(&self.engine, true)
    }

    /// Sets or removes the limit on bytes obtained from the driver. Memory above a lowered limit stays until it is
    /// trimmed.
    pub fn set_limit(&self, bytes: Option<u64>) {
        let Some(mut heap) = self.engine.readable() else {
            return;
        };
        heap.physical.limit = bytes;
        heap.recorder.record_limit(bytes);
        drop(heap);
        log::info!("allocator {}: {}", self.id(), LimitText(bytes));
    }

    /// Returns the limit on bytes obtained from the driver.
    pub fn limit(&self) -> Option<u64> {
        self.engine.readable()?.physical.limit
    }

    /// Lets another device access the memory, in addition to those of [`Config::peers`]: all memory that is reserved
    /// now or later, except for segments of another allocator ([`graph_pool_over`](Self::graph_pool_over)). Returns
    /// once the device has access. Threads that allocate meanwhile are not blocked. Access cannot be revoked. Does
    /// nothing for a device that has access.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the device cannot access the memory of this one, and under the classic policy;
    /// [`Error::Closed`]; driver errors, also if no device has this ordinal. If a driver call failed, the device may
    /// have access to part of the memory, and the call can be repeated.
    pub fn add_peer(&self, ordinal: usize) -> Result<(), Error> {
        peers::add(&self.engine, ordinal)
    }

    /// Adds a hook that is called to free memory before a request fails, after every step that the allocator itself can
    /// take without stopping the device. Replaces a hook of the same name, and returns whether it did. Hooks run
    /// without any lock held.
    pub fn add_relief_hook(&self, hook: ReliefHook) -> bool {
        self.engine.hooks.add(hook)
    }

    /// Removes a hook, and returns whether it existed.
    pub fn remove_relief_hook(&self, name: &str) -> bool {
        self.engine.hooks.remove(name)
    }

    /// Releases everything to the driver and refuses further calls. Waits for the allocator's own markers, and for the
    /// whole context if a raw stream left work without a marker. On an error the allocator stays open and owns what
    /// could not be released.
    ///
    /// The driver reports the end of a graph some time after it was destroyed. The call repeats its check while reports
    /// arrive; otherwise it returns [`Error::InUse`] for graphs that hold memory of a
    /// [`GraphPool`](crate::allocator::GraphPool), and a later call may succeed.
    ///
    /// Dropping the last handle does the same as soon as no block is live. Steps that a capture or the driver prevents
    /// are done when a capture is ended through this crate, or by a later call of any allocator. After a lost context,
    /// in a forked child and during process exit, the driver is not called.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Guarded`], [`Error::Closed`], a lost context, driver errors; [`Error::Capturing`] if
    /// the context has to be synchronised while one of its streams is capturing; [`Error::StillHeld`] while a
    /// [`trim`](Self::trim) on another thread owns memory that this call cannot release: nothing is lost, and a close
    /// after that trim finds it released.
    pub fn close(&self) -> Result<(), Error> {
        process::do_postponed();
        close::close_after_graphs(&self.engine)
    }

    // ---- observation -----------------------------------------------------------------------

    /// Returns all statistics at one instant.
    pub fn stats(&self) -> Stats {
        let heap = self.engine.readable();
        heap.map_or_else(Stats::default, |heap| statistics(&heap))
    }

    /// Returns the external fragmentation. The call visits all free memory.
    pub fn fragmentation(&self) -> Fragmentation {
        let Some(mut heap) = self.engine.readable() else {
            return Fragmentation::default();
        };
        heap.clear_large_caches();
        fragmentation(&heap)
    }

    /// Returns the reserved bytes that no live block occupies. Cheaper than [`stats`](Self::stats).
    pub fn cached(&self) -> u64 {
        let Some(mut heap) = self.engine.readable() else {
            return 0;
        };
        let (_, allocated) = heap.live_totals();
        heap.stats.all.reserved.current.saturating_sub(allocated)
    }

    /// Returns the number of driver calls so far, by name. The function table counts them, so they include those of
    /// everything that uses the same [`Driver`].
    pub fn driver_calls(&self) -> CallCounts {
        self.engine.driver().calls()
    }

    /// Sets all peaks to the current values, at one instant.
    pub fn reset_peaks(&self) {
        if let Some(mut heap) = self.engine.readable() {
            heap.reset_peaks();
        }
    }

    /// Returns all segments with their blocks, by address, at one instant.
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.stats_and_snapshot().1
    }

    /// Returns [`stats`](Self::stats) and [`snapshot`](Self::snapshot) of the same instant.
    pub fn stats_and_snapshot(&self) -> (Stats, Vec<SegmentInfo>) {
        let Some(mut heap) = self.engine.readable() else {
            return Default::default();
        };
        heap.clear_large_caches();
        (statistics(&heap), snapshot(&heap))
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("Allocator")
            .field("device", &self.engine.device.ordinal())
            .field("policy", &self.policy())
            .field("allocated", &stats.all.allocated.current)
            .field("peak", &stats.all.allocated.peak)
            .field("cached", &stats.cached())
            .field("reserved", &stats.all.reserved.current)
            .finish()
    }
}
