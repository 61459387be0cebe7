//! The allocator as its users see it.

pub(crate) mod block;
pub(crate) mod carver;
pub(crate) mod checks;
pub(crate) mod graph;
pub(crate) mod guard;
pub(crate) mod raw;
pub(crate) mod suspend;

use crate::error::memory::Bytes;
use crate::error::{Error, StreamMisuse};
use std::fmt;
use std::sync::Arc;

use crate::clock::Clock;
use crate::driver::{
    CallCounts, Context, Driver, MemoryProperties, Stream, kept_stream, process, sys,
};

use crate::allocator::api::block::Block;
use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::PageTable;
use crate::allocator::config::{Config, Policy};
use crate::allocator::engine::debug_table::Debug;
use crate::allocator::engine::hooks::ReliefHook;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::recorded;
use crate::allocator::engine::small::unaligned;
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
/// Clones are handles to the same allocator. All methods may be called from any thread. The
/// allocator is closed when its last handle and its last [`Block`] were dropped; see [`close`](Self::close) for doing it with
/// errors.
///
/// # Streams
/// Memory belongs to the order of a stream: a freed block is reused on its own stream at once, and
/// on another one only when its uses are complete or that stream waits for them. Streams are told
/// apart by the driver's ids, so a new stream with the handle value of an old one is a new stream.
///
/// A stream that is passed as a [`Stream`] made by [`Stream::new`] is kept alive as long as the
/// allocator needs it. A stream that is passed as a raw handle (or borrowed) stays the caller's, who
/// must call [`retire_raw`](Self::retire_raw) (or [`retire`](Self::retire)) before destroying it.
/// Until then its handle is used only in calls that name it or that free a block which was
/// allocated or recorded on it. Memory freed on a stream that was destroyed without this is not
/// lost, but other streams get it only after the whole context was synchronised.
///
/// # Default streams by their handles
/// In a raw call null and 1 mean the legacy default stream of the *allocator's* context, and 2 the calling
/// thread's own default stream in that context: whichever context is current, and where none is. They
/// are the streams of [`Stream::legacy`] and [`Stream::per_thread`] with
/// [`context`](Self::context), named without a call of the driver, and the legacy one need not be retired. To the driver the same handles mean the streams of the context that is
/// current, so a caller who has another one current passes a stream of it by its own handle; the default
/// streams of another context have none: make a [`Stream`] of them, with their context. With
/// [`Config::context_checks`] (on in debug builds) a special handle beside another current context is
/// [`Error::WrongContext`].
///
/// # Forks
/// In a forked child of the process every call that can fail is [`Error::ForkedChild`]. The others answer
/// at once, as those of an allocator without memory, and change nothing: the heap may be locked by a
/// thread that the child does not have.
pub struct Allocator {
    pub(crate) engine: Shared,
    /// The engine's own: a free by pointer begins here, and has one cache line less to wait for.
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

    /// An allocator on a device's primary context, with the settings of the environment variable
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

    /// An allocator on a given context.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::NotSupported`] if the device cannot do what the settings
    /// ask for, [`Error::DeviceRefused`] if it says that it can and does not, and driver errors.
    pub fn with_config(context: &Context, config: Config) -> Result<Self, Error> {
        recorded::begin_by_environment();
        let engine = Engine::new(context, &config)?;
        engine.enrol();
        let allocator = Allocator::with_engine(engine);
        log::info!(
            "allocator {} on device {}: policy {}, {}, views {}",
            allocator.id(),
            allocator.engine.device.ordinal(),
            allocator.policy().name(),
            LimitText(allocator.limit()),
            if allocator.engine.views { "on" } else { "off" },
        );
        Ok(allocator)
    }

    /// A number that tells this allocator from every other one of the process; starts at 1 and is
    /// never used again.
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

    /// What its physical memory is made like: whether handles can be exported, and registered with network
    /// cards. Neither under the classic policy, or where the device refused such memory when it was tried.
    pub fn memory_properties(&self) -> MemoryProperties {
        self.engine.properties
    }

    /// The segment policy in effect: never [`Policy::Auto`].
    pub fn policy(&self) -> Policy {
        self.engine.rules.policy()
    }

    /// Tests whether the device keeps memory the same through two addresses, if views are allowed
    /// and nobody has tested it in this process, and says what is known then. Else the test is made
    /// before the first view is built. Takes a few milliseconds, 2 MiB and a stream of its own for
    /// that time, and waits for its own work; loading its kernels may wait for everything in the context.
    /// The test before the first view does without kernels unless all known streams stand idle.
    ///
    /// # Errors
    /// Driver errors.
    pub fn test_views(&self) -> Result<SelfTest, Error> {
        self.engine.test_views()
    }

    /// Makes a stream on the allocator's context.
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
    /// [`Error::Invalid`], [`Error::OutOfMemory`], [`Error::Capturing`], [`Error::WrongDevice`],
    /// [`Error::Stream`], [`Error::Closed`], a lost context, and driver errors. Nothing is lost in any
    /// of them.
    #[inline]
    pub fn allocate(&self, bytes: usize, stream: &Stream) -> Result<Block, Error> {
        let grant = match unaligned(bytes) {
            Some(small) => match self.engine.hit(stream.id_at_hand(), small) {
                Ok(grant) => grant,
                Err(missed) => self.engine.miss(bytes, stream, missed)?,
            },
            None => self.engine.allocate_large(bytes, stream)?,
        };
        Ok(Block::new(&self.engine, grant, bytes))
    }

    /// [`allocate`](Self::allocate) with wishes.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and [`Error::Invalid`]; [`Error::NotCached`] if the request is
    /// [for cached memory only](Request::cached_only) and there is none.
    pub fn allocate_with(&self, request: Request, stream: &Stream) -> Result<Block, Error> {
        let grant = self
            .engine
            .allocate(&self.engine.named(stream)?, &request)?;
        Ok(Block::new(&self.engine, grant, request.bytes()))
    }

    /// Allocates from cached memory alone: at the first of the addresses `near` that is free, else the best
    /// fit. Also returns those of the addresses that lie in free memory still.
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

    /// The allocator that a block came from.
    pub(crate) fn of(block: &Block) -> Self {
        let engine: *const Engine = block.engine();
        // SAFETY: every engine lies in an `Arc`, and this one is alive while its block is.
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

    /// Tells the allocator that a stream gets no more work. Records its last marker, so that
    /// everything freed on it can be shared when that has completed, and forgets its handle. Blocks
    /// that are live on it stay valid and may be freed later.
    ///
    /// Buffers, columns and workspaces may go on all the same, also on other threads in the same moment: what
    /// they give the stream from then on is a new stream's work to the allocator, and counted at their free.
    /// Of a [`Block`] the allocator does not know what it is used for: `unsafe` code that gave the stream work
    /// with it later records the stream once more ([`Block::record_stream`]) before the free.
    ///
    /// Never waits for work, unless another thread waits for a context that is not the allocator's and has the
    /// stream. If it fails, everything is as it was.
    ///
    /// # Errors
    /// [`Error::Stream`] for a stream that is not known, and for the per-thread default stream where only another
    /// thread's is; [`Error::Capturing`], driver errors.
    pub fn retire(&self, stream: &Stream) -> Result<(), Error> {
        self.retire_named(&self.engine.named(stream)?)
    }

    fn retire_named(&self, named: &Named<'_>) -> Result<(), Error> {
        let retired = self.engine.retire(named);
        // Memory that no allocator tracks may use a stream which this one does not know.
        if let Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) = retired {
            kept_stream::retire(self.engine.driver(), named.raw);
        }
        retired
    }

    /// [`retire`](Self::retire) by handle: must come before the handle is destroyed.
    ///
    /// # Errors
    /// As [`retire`](Self::retire), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// `stream` must be a live stream, or a special handle, which means a default stream of the allocator's
    /// context ([`Allocator`]). No block that was allocated or recorded
    /// on it is used on it by work submitted later. Once this has returned, the stream may be destroyed, and
    /// so may its context if that is not the allocator's and no other stream of it is known here.
    pub unsafe fn retire_raw(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.engine.named_raw(stream) }?;
        self.retire_named(&named)
    }

    /// Takes the caller's word that a stream's handle lives until it is [retired](Self::retire_raw). It is a stream
    /// like those of this crate then: calls by its handle need not ask the driver which stream it is, and memory
    /// that was freed on it gets its markers in calls which do not name it, when somebody asks for that memory. It is
    /// not asked whether it is idle by other calls than its own, since that would spoil a capture which its owner
    /// begins in the same moment, unless [`Config::captures`] promises that there is none.
    ///
    /// Of a stream that is known already all that was freed on it is held so from now on. A stream of this crate and
    /// the legacy default stream are kept anyway: nothing changes.
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

    /// Records a marker on a stream now, so that what was freed on it so far can be trimmed or
    /// shared when its work is done. Not needed for correctness.
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
        let known = self.engine.known(&named)?;
        self.engine.mark(known, named.key)
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// Whether a live block lies around `ptr`.
    pub fn owns(&self, ptr: sys::CUdeviceptr) -> bool {
        let Some(mut heap) = self.engine.readable() else {
            return false;
        };
        heap.caches.small_around(ptr).is_some() || heap.large_around(ptr).is_some()
    }

    /// The live block around `ptr`: its base, size, stream and uses.
    pub fn block_of(&self, ptr: sys::CUdeviceptr) -> Option<BlockInfo> {
        self.engine.readable()?.block_info_around(ptr)
    }

    /// Usable bytes of the live block that starts at `ptr`.
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

    /// Allocates and frees `bytes`, so that a later block of so many fits without a driver call. Classic policy: a
    /// segment for such a request.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn reserve(&self, bytes: usize, stream: &Stream) -> Result<(), Error> {
        self.allocate(bytes, stream).map(drop)
    }

    /// Gives memory that nobody uses back to the driver until at most `keep` bytes of it are held: what has been
    /// idle longest first (a run of free memory counts as idle since its last part was freed), within one run
    /// from its end. Never waits for the device itself: what is still in use is only counted, with the streams
    /// that it waits for. (The classic policy's segments are freed by `cuMemFree`, which may wait for other work
    /// of their context.)
    ///
    /// What was freed on a raw stream can go only after a marker was seen complete: call
    /// [`mark_raw`](Self::mark_raw) before the work ends, or [`empty_cache`](Self::empty_cache), which waits.
    ///
    /// # Errors
    /// Driver errors. What could not be unmapped or freed stays allocated, and the next call tries again. A handle
    /// whose release failed counts as given back: the driver has its memory, or it is lost until the process ends.
    pub fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        self.engine.trim(keep).inspect(|done| self.log_trim(done))
    }

    /// Gives all memory that nobody uses back to the driver, and waits on the host where only a wait tells that
    /// nobody does: for the markers that the allocator recorded on streams which do not capture, and for all work
    /// of their contexts if memory is left on which only their owners could record one (raw streams that were not
    /// adopted), nothing there is known to capture, and no scope of a graph pool waits for captures. Of
    /// graph pools that were released, graphs that are just gone are waited for, for 5 ms at most.
    ///
    /// What a capture keeps from being waited for is no error: it is pending in the result, with its streams.
    ///
    /// # Errors
    /// As [`trim`](Self::trim), and driver errors of the work that was waited for.
    pub fn empty_cache(&self) -> Result<Trimmed, Error> {
        self.engine
            .empty_cache()
            .inspect(|done| self.log_trim(done))
    }

    /// Gives back what [`Config::decay`] says is idle for long enough, if it is time to look; bytes that went back. For
    /// programs that make no calls while they are idle: from a timer of theirs. Never waits. Without that setting, or
    /// too early, it does nothing.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn decay(&self) -> Result<u64, Error> {
        match &self.engine.decay {
            Some(decay) => self.engine.decay(decay),
            None => Ok(0),
        }
    }

    /// Has [`Config::decay`] go by another clock, from its time now on: for tests.
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

    /// Waits until all work of the contexts involved is complete. All free memory can then be used
    /// by every stream, or trimmed.
    ///
    /// # Errors
    /// [`Error::Capturing`] while a stream there is being captured; driver errors, among them those
    /// of the work itself. After a `CUDA_ERROR_INVALID_HANDLE` about another context, whose streams have to be retired
    /// first, that error again: everything else is complete then.
    pub fn synchronize(&self) -> Result<(), Error> {
        drop(self.engine.open()?);
        process::do_postponed();
        self.engine.synchronise(true)
    }

    /// Sets or lifts the bound on bytes held from the driver. Memory above a lowered bound stays
    /// until it is trimmed.
    pub fn set_limit(&self, bytes: Option<u64>) {
        let Some(mut heap) = self.engine.readable() else {
            return;
        };
        heap.physical.limit = bytes;
        heap.tell_limit();
        drop(heap);
        log::info!("allocator {}: {}", self.id(), LimitText(bytes));
    }

    /// The bound on bytes held from the driver.
    pub fn limit(&self) -> Option<u64> {
        self.engine.readable()?.physical.limit
    }

    /// Adds a hook that is asked to free memory before a request fails, after everything that the
    /// allocator itself can do without stopping the device. Replaces a hook of the same name;
    /// whether one was replaced. Hooks run without any lock held.
    pub fn add_relief_hook(&self, hook: ReliefHook) -> bool {
        self.engine.hooks.add(hook)
    }

    /// Removes a hook; whether it existed.
    pub fn remove_relief_hook(&self, name: &str) -> bool {
        self.engine.hooks.remove(name)
    }

    /// Gives everything back to the driver and refuses further calls. Waits for the allocator's own
    /// markers, and for the whole context where a raw stream left work without one. On an error the
    /// allocator stays open and owns what could not be given back.
    ///
    /// The driver reports the end of a graph some time after it was destroyed. While reports come in, the call looks
    /// again; else it returns [`Error::InUse`] for graphs that have memory of a
    /// [`GraphPool`](crate::allocator::GraphPool), and a later call may succeed.
    ///
    /// Dropping the last handle does the same, as soon as no block is live; what a capture or the driver refuses
    /// is done when a capture was ended through this crate, or by a later call of any allocator.
    /// After a lost context, in a forked child and while the process exits nothing is touched.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Guarded`], [`Error::Closed`], a lost context, driver errors;
    /// [`Error::Capturing`] if the context has to be waited for while a stream of it is being captured;
    /// [`Error::StillHeld`] while another thread is in a [`trim`](Self::trim), which has memory in hand that
    /// this call cannot give back: nothing is lost, and a close after that trim finds it gone.
    pub fn close(&self) -> Result<(), Error> {
        process::do_postponed();
        self.engine.close_after_graphs()
    }

    // ---- observation -----------------------------------------------------------------------

    /// All figures, at one instant.
    pub fn stats(&self) -> Stats {
        let heap = self.engine.readable();
        heap.map_or_else(Stats::default, |heap| heap.statistics())
    }

    /// How far the free memory could serve: a walk over all of it.
    pub fn fragmentation(&self) -> Fragmentation {
        let Some(mut heap) = self.engine.readable() else {
            return Fragmentation::default();
        };
        heap.clear_large_caches();
        heap.fragmentation()
    }

    /// Bytes held from the driver that no live block occupies. Cheaper than [`stats`](Self::stats).
    pub fn cached(&self) -> u64 {
        let Some(mut heap) = self.engine.readable() else {
            return 0;
        };
        let (_, allocated) = heap.live_totals();
        heap.stats.all.reserved.current.saturating_sub(allocated)
    }

    /// Calls of the driver so far, by name, as the function table counted them: those of everything
    /// that uses the same [`Driver`].
    pub fn driver_calls(&self) -> CallCounts {
        self.engine.driver().calls()
    }

    /// Sets all peaks to the current values, at one instant.
    pub fn reset_peaks(&self) {
        if let Some(mut heap) = self.engine.readable() {
            heap.reset_peaks();
        }
    }

    /// All segments with their blocks, by address, at one instant.
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.stats_and_snapshot().1
    }

    /// [`stats`](Self::stats) and [`snapshot`](Self::snapshot) of the same instant.
    pub fn stats_and_snapshot(&self) -> (Stats, Vec<SegmentInfo>) {
        let Some(mut heap) = self.engine.readable() else {
            return Default::default();
        };
        heap.clear_large_caches();
        (heap.statistics(), heap.snapshot())
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

impl crate::allocator::heap::Heap {
    fn block_info_around(&mut self, ptr: sys::CUdeviceptr) -> Option<BlockInfo> {
        if let Some((_, run, stream)) = self.caches.small_around(ptr) {
            return Some(self.run_info(stream, &run, &[]));
        }
        let id = self.large_around(ptr)?;
        Some(self.block_info(id))
    }

    fn statistics(&self) -> Stats {
        let mut stats = self.stats;
        stats.free = self.extents.free_bytes();
        stats.free_blocks = self.extents.spaces().map(|s| s.piece_count() as u64).sum();
        stats.largest_free = self
            .extents
            .spaces()
            .map(|s| s.largest_piece())
            .max()
            .unwrap_or(0);
        stats.nodes = self.extents.records.len() as u64;
        stats.limit = self.physical.limit;
        stats.headroom = self.physical.headroom;
        stats.graph_pools = self.graphs.held;
        self.add_caches(&mut stats);
        stats.packing = self.packing();
        stats
    }
}
