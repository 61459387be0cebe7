//! The engine: one lock around the heap, and the driver calls that every feature needs.
//!
//! [`Engine`] owns the lock and what no lock guards. Its methods are in this module, in `naming` (streams as calls name
//! them) and `markers`, and in the files of `calls` for allocations and frees. The driver calls of a feature are
//! functions in the feature's own folder.

pub(crate) mod contexts;
pub(crate) mod decay;
pub(crate) mod device;
pub(crate) mod hooks;
pub(crate) mod idle;
pub(crate) mod leaving;
pub(crate) mod markers;
pub(crate) mod naming;
pub(crate) mod peers;
pub(crate) mod recorded;
pub(crate) mod release;
pub(crate) mod segment_hooks;
pub(crate) mod segments;
pub(crate) mod self_test;
pub(crate) mod trial;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::sys::CUresult;
use crate::driver::{Context, Device, Driver, DriverError, Feature, MemoryProperties, process};
use crate::locks::lines;
use crate::sync::event::EventPools;
use log::Level;

use crate::allocator::cache::stream_cache::{KeepAlive, PageTable};
use crate::allocator::config::{Config, Limit, Policy};
use crate::allocator::debug::Debug;
use crate::allocator::engine::decay::Decay;
use crate::allocator::engine::hooks::Hooks;
use crate::allocator::engine::segment_hooks::SegmentHooks;
use crate::allocator::engine::self_test::work::ViewTests;
use crate::allocator::heap::Heap;
use crate::allocator::physical::Bounds;
use crate::allocator::physical::access::Access;
use crate::allocator::physical::address::Addresses;
use crate::allocator::physical::commit::PhysicalConfig;
use crate::allocator::physical::policy::Rules;
use crate::allocator::suspend::host::Suspender;
use crate::error::{Error, RareLog};
use crate::locks::lock::{Held, Lock};
use crate::nvtx::{self, Tool};

/// A value on its own cache lines, because the fields around it are read by every call.
#[derive(Debug)]
#[repr(align(128))]
struct OwnCacheLine<T>(T);

/// The order of the fields places what a pair of calls reads on one cache line.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Engine {
    /// Unique number of the allocator in the process; starts at 1.
    pub id: u64,
    /// The allocator's id while stream caches may serve calls alone and the context is not lost; otherwise 0.
    fast: AtomicU64,
    /// Maps each page to its stream cache.
    pub pages: Arc<PageTable>,
    /// Number of blocks in large-block caches, live or free: while it is 0, no stream cache is searched.
    pub in_large_caches: Arc<AtomicU32>,
    /// The driver of the context.
    driver: Driver,
    /// Decay of idle memory, if it is on.
    pub decay: Option<Box<Decay>>,
    pub context: Context,
    /// Whether every call queries if its stream is capturing, even where it needs no other driver call.
    ask_captures: bool,
    /// Whether the program promises never to capture a stream that the allocator knows.
    pub no_captures: bool,
    /// Whether owners of raw streams may destroy them without retiring them.
    pub unretired: bool,
    /// Whether a default stream's special handle is refused while another context is current.
    pub context_checks: bool,
    /// Whether deferred frees wait in the heap for a call that may perform them.
    pub deferred: AtomicBool,
    /// Whether the log already says that the allocator outlives its handles because of a capture.
    pub orphan_logged: AtomicBool,
    /// Number of the newest finding of a capture for which a context-wide wait was refused.
    pub refused_finding: AtomicU64,
    /// A weak reference to itself, for work that outlives the current call.
    me: Weak<Engine>,
    pub device: Device,
    pub rules: Rules,
    pub views: ViewTests,
    pub properties: MemoryProperties,
    pub access: Access,
    pub total_memory: u64,
    /// Address space of the device.
    pub addresses: Arc<Addresses>,
    pub hooks: Hooks,
    pub segment_hooks: SegmentHooks,
    pub suspender: Suspender,
    /// Events that order the uses of typed buffers, in the allocator's own context.
    pub events: EventPools,
    /// Limits the log lines about markers that could not be recorded.
    pub log: RareLog,
    /// Number of handles to this engine.
    pub handles: AtomicUsize,
    /// Number of retirements begun.
    retirements: AtomicU64,
    heap: OwnCacheLine<Lock<Heap>>,
    lost: OnceLock<DriverError>,
    /// Number of open scopes of graph pools.
    pub scopes: AtomicU64,
    /// Debug modes, if any is on.
    pub debug: Option<Debug>,
}

impl KeepAlive for Engine {}

pub(crate) type Guard<'a> = Held<'a, Heap>;

/// Fails unless a device can access the memory of another one.
pub(crate) fn ensure_can_access(peer: &Device, device: &Device) -> Result<(), Error> {
    match peer.can_access_peer(device)? {
        true => Ok(()),
        false => Err(Error::NotSupported {
            what: "access from a peer device",
        }),
    }
}

impl Engine {
    pub(crate) fn new(context: &Context, config: &Config) -> Result<Shared, Error> {
        config.validate()?;
        let (driver, device) = (context.driver(), context.device());
        let tool = config.nvtx.then(nvtx::attach).flatten();
        if tool.is_some() {
            process::set_tool();
        }
        let total_memory = device.total_memory()?;
        let mut access = vec![device.clone()];
        for ordinal in &config.peers {
            let peer = driver.device(*ordinal)?;
            if peer == *device {
                continue;
            }
            ensure_can_access(&peer, device)?;
            access.push(peer);
        }
        let addresses = Addresses::of(driver, device.clone(), total_memory);
        // compute-sanitizer does not accept heaps in mapped memory.
        let tracked = tool.is_some_and(Tool::tracks_memory) && config.peers.is_empty();
        // No step after this one fails while address space is reserved for the allocator.
        let mapped = match config.policy {
            Policy::Classic => None,
            Policy::Auto if tracked => None,
            Policy::Auto | Policy::Packed => trial::memory_of(context, config.policy, &addresses)?,
        };
        let rules = match &mapped {
            Some(_) => Rules::Packed,
            None => Rules::Classic,
        };
        if !rules.maps() && !config.peers.is_empty() {
            return Err(Error::NotSupported {
                what: "peer access without virtual memory management",
            });
        }
        let limit = config.limit.map(|limit| match limit {
            Limit::Bytes(bytes) => bytes,
            Limit::Fraction(share) => (total_memory as f64 * share) as u64,
        });
        let headroom = match config.headroom_on(total_memory) {
            0 => 0,
            bytes => match context.mem_info() {
                Ok(info) if info.free >= bytes.saturating_mul(2) => bytes,
                _ => 0,
            },
        };
        let bounds = Bounds {
            limit,
            device: total_memory,
            headroom,
        };
        let properties = mapped.unwrap_or(MemoryProperties::plain(device));
        // Without ids, a stream is indistinguishable from an earlier one with the same handle.
        let unretired = config.unretired_streams && driver.has(Feature::StreamIds);
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let debug = Debug::of(config.debug);
        // With either of these, caches serve no call without a query of the stream.
        let ask_captures = config.capture_checks || debug.is_some();
        let fast_id = match rules.caches() && !ask_captures {
            true => id,
            false => 0,
        };
        let pages = Arc::new(PageTable::new(fast_id));
        let mut tuning = config.tuning();
        if !rules.maps() {
            // The profile belongs to the packed policy, and so does the order of waits that it implies.
            tuning.waits = config.waits.unwrap_or_default();
        }
        let engine = Arc::new_cyclic(|me| {
            let mut heap = Heap::new(
                (me.clone() as Weak<dyn KeepAlive>, id),
                Arc::clone(&pages),
                device.ordinal(),
                rules,
                bounds,
                tuning,
            );
            heap.streams.eager_markers = ask_captures;
            heap.streams.unretired = unretired;
            heap.caches.legacy = (!config.context_checks).then(|| context.legacy_id());
            heap.recorder.tool = tool.filter(|_| !rules.maps());
            Engine {
                id,
                me: me.clone(),
                driver: driver.clone(),
                context: context.clone(),
                device: device.clone(),
                rules,
                views: ViewTests::new(rules.maps() && config.views, config.self_test),
                properties,
                access: Access::new(access),
                total_memory,
                addresses,
                hooks: Hooks::default(),
                segment_hooks: SegmentHooks::default(),
                suspender: Suspender::new(config.host_cache),
                events: EventPools::of(context),
                log: RareLog::default(),
                handles: AtomicUsize::new(1),
                retirements: AtomicU64::new(0),
                ask_captures,
                no_captures: !config.captures,
                unretired,
                context_checks: config.context_checks,
                in_large_caches: Arc::clone(&heap.caches.in_large_caches),
                heap: OwnCacheLine(Lock::new(heap)),
                pages,
                lost: OnceLock::new(),
                fast: AtomicU64::new(fast_id),
                scopes: AtomicU64::new(0),
                decay: Decay::of(config).map(Box::new),
                debug,
                deferred: AtomicBool::new(false),
                orphan_logged: AtomicBool::new(false),
                refused_finding: AtomicU64::new(0),
            }
        });
        process::do_postponed();
        Ok(engine)
    }

    /// Returns a strong reference to the engine, unless it is being dropped.
    pub(crate) fn keep(&self) -> Option<Shared> {
        self.me.upgrade()
    }

    /// Returns the number of retirements begun so far.
    #[inline]
    pub(crate) fn retirements(&self) -> u64 {
        self.retirements.load(Ordering::Acquire)
    }

    /// Counts a retirement that begins.
    pub(crate) fn count_retirement(&self) {
        self.retirements.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts another [`Allocator`](crate::allocator::Allocator) handle.
    pub(crate) fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts down the handles. The last one closes the engine, or leaves that to the last block.
    pub(crate) fn remove_handle(&self) {
        if self.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            process::do_postponed();
            self.abandon();
        }
    }

    /// Whether stream caches may serve a call without further checks.
    #[inline(always)]
    pub(crate) fn is_fast(&self) -> bool {
        self.fast_id() != 0 && process::is_unwatched()
    }

    /// Returns the id by which threads find their stream caches; 0, which matches none, if further checks are required.
    #[inline(always)]
    pub(crate) fn fast_id(&self) -> u64 {
        self.fast.load(Ordering::Relaxed)
    }

    /// Whether a call has to check more than its stream cache: the process was forked or is exiting, or captures
    /// streams.
    #[inline]
    pub(crate) fn needs_checks(&self) -> bool {
        !process::is_unwatched() || self.ask_captures
    }

    /// Returns the factory for physical memory, to be kept until what it maps is published.
    pub(crate) fn maker(&self) -> PhysicalConfig<'_> {
        PhysicalConfig {
            context: &self.context,
            properties: &self.properties,
            access: self.access.begin_mapping(),
        }
    }

    /// Whether the owner of a stream may begin to capture it at any time, so that calls which do not name it must not
    /// query it.
    pub(crate) fn may_capture(&self) -> bool {
        !self.no_captures && (self.needs_checks() || process::has_captured())
    }

    #[inline]
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Locks the heap. It is consistent whenever the lock is free, also after a panic elsewhere, because no foreign
    /// code runs under the lock.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.heap.0.lock()
    }

    /// Locks the heap for calls that cannot return [`Error::ForkedChild`]. Returns `None` in a forked child, where the
    /// lock may be held by a thread that does not exist there.
    pub(crate) fn readable(&self) -> Option<Guard<'_>> {
        (!process::is_forked_child()).then(|| self.lock())
    }

    /// Converts a driver error, and remembers a lost context.
    pub(crate) fn error(&self, error: DriverError) -> Error {
        if error.is_fatal() && !self.is_of_another(&error) {
            self.fast.store(0, Ordering::Relaxed);
            self.pages.stop();
            return Error::ContextLost(*self.lost.get_or_init(|| error));
        }
        Error::Driver(error)
    }

    /// Whether an error reports that a context other than the allocator's was destroyed; the allocator keeps its own
    /// alive.
    #[cold]
    fn is_of_another(&self, error: &DriverError) -> bool {
        let gone = DriverError::new("cuCtxGetId", CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        *error == gone && self.context.is_kept()
    }

    /// Whether the allocator is unusable: [`usable`](Self::usable) without the reason. In a forked child not even a
    /// lock may be taken.
    #[inline(always)]
    pub(crate) fn is_not_usable(&self) -> bool {
        process::is_unavailable() || (self.fast_id() == 0 && self.lost.get().is_some())
    }

    /// Checks whether the allocator is usable at all.
    #[inline]
    pub(crate) fn usable(&self) -> Result<(), Error> {
        match self.is_not_usable() {
            false => Ok(()),
            true => check_use(self),
        }
    }

    /// Locks the heap if the allocator is open and usable.
    pub(crate) fn open(&self) -> Result<Guard<'_>, Error> {
        self.usable()?;
        let heap = self.lock();
        if heap.closed {
            Err(Error::Closed)
        } else {
            Ok(heap)
        }
    }

    // ---- streams ---------------------------------------------------------------------------

    pub(crate) fn log_marker_failure(&self, error: &dyn std::error::Error) {
        if let Some(count) = self.log.due() {
            log::warn!("cannot record a marker (occurrence {count}): {error}");
        }
    }
}

/// Shared ownership of the engine of an allocator and its blocks.
pub(crate) type Shared = Arc<Engine>;

impl Engine {
    /// Whether an error of a driver call concerns only the context of the stream or event that the call used, and not
    /// the allocator's: that context was destroyed, or its handles cannot be trusted.
    pub(crate) fn is_unreachable(&self, context: &Context, error: &DriverError) -> bool {
        context.id() != self.context.id()
            && matches!(
                error.code(),
                CUresult::CUDA_ERROR_INVALID_CONTEXT
                    | CUresult::CUDA_ERROR_INVALID_HANDLE
                    | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            )
    }

    /// Converts the error of a driver call that used an object of a context. If that context is
    /// [unreachable](Self::is_unreachable), the heap records this, and the allocator stays usable.
    pub(crate) fn error_in(&self, context: &Context, error: DriverError) -> Error {
        if !self.is_unreachable(context, &error) {
            return self.error(error);
        }
        let device = context.device().ordinal();
        if error.code() == CUresult::CUDA_ERROR_INVALID_HANDLE {
            let news = {
                let heap = &mut *self.lock();
                let known = heap.streams.distrust_of(context.id()).is_some();
                let streams = heap.streams.distrust(context.id(), error);
                for stream in &streams {
                    heap.caches.stop_queries(*stream);
                }
                !known && !streams.is_empty()
            };
            if news {
                lines::log(
                    Level::Warn,
                    module_path!(),
                    format_args!(
                        "allocator {}: a context on device {device} is not used until its streams are retired: {error}",
                        self.id
                    ),
                );
            }
        } else {
            self.end_context(context);
        }
        Error::Driver(error)
    }

    /// Records that another context was destroyed with all its objects.
    pub(crate) fn end_context(&self, context: &Context) {
        lines::log(
            Level::Warn,
            module_path!(),
            format_args!(
                "allocator {}: a context on device {} was destroyed before its streams were retired",
                self.id,
                context.device().ordinal()
            ),
        );
        let held = self.lock().end_context(context.id(), &self.context);
        drop(held);
    }
}

impl Engine {
    /// Whether requests may go to graph pools.
    #[inline]
    pub(crate) fn is_scoped(&self) -> bool {
        self.scopes.load(Ordering::Relaxed) > 0
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::{Allocator, Config};
    use crate::driver::sys::CUresult;
    use crate::driver::{Context, DriverError, Stream};
    use crate::error::Error;
    use crate::sim::{SimConfig, Simulator};

    #[test]
    fn a_destroyed_foreign_context_does_not_lose_our_own() {
        let sim = Simulator::new(SimConfig::default()).unwrap();
        let driver = sim.driver().unwrap();
        let of = |context| Allocator::with_config(context, Config::new()).unwrap();
        let gone = DriverError::new("cuCtxGetId", CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);

        let ours = driver.context(0).unwrap();
        let (allocator, stream) = (of(&ours), Stream::new(&ours).unwrap());
        assert!(matches!(allocator.engine().error(gone), Error::Driver(_)));
        drop(allocator.allocate(4096, &stream).unwrap());
        allocator.close().unwrap();

        let raw = sim.create_context(0).unwrap();
        // SAFETY: the test only checks that the context is reported as destroyed.
        let theirs = unsafe { Context::from_raw(&driver, raw) }.unwrap();
        let allocator = of(&theirs);
        assert!(sim.destroy_context(raw));
        let lost = allocator.engine().error(gone);
        assert!(matches!(lost, Error::ContextLost(_)), "{lost}");
    }
}

/// [`Engine::usable`] where the allocator may not be.
#[cold]
fn check_use(engine: &Engine) -> Result<(), Error> {
    if engine.driver().is_forked_child() {
        return Err(Error::ForkedChild);
    }
    if engine.driver().is_exiting() {
        return Err(Error::Exiting);
    }
    match engine.lost.get() {
        Some(error) => Err(Error::ContextLost(*error)),
        None => Ok(()),
    }
}
