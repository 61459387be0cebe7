//! The allocator's inside: one lock around the heap, driver calls outside it.

pub(crate) mod bench;
pub(crate) mod calls;
pub(crate) mod close;
pub(crate) mod contexts;
pub(crate) mod debug;
pub(crate) mod debug_table;
pub(crate) mod decay;
pub(crate) mod free;
pub(crate) mod graph;
pub(crate) mod graph_again;
pub(crate) mod graph_pools;
pub(crate) mod graph_uses;
pub(crate) mod hooks;
pub(crate) mod large_cache;
pub(crate) mod leaving;
pub(crate) mod markers;
pub(crate) mod naming;
pub(crate) mod orphans;
pub(crate) mod recorded;
pub(crate) mod release;
pub(crate) mod segments;
pub(crate) mod self_test;
pub(crate) mod small;
pub(crate) mod suspend;
pub(crate) mod trial;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::sys::CUresult;
use crate::driver::{Context, Device, Driver, DriverError, Feature, MemoryProperties, process};
use crate::sync::event::EventPools;

use crate::allocator::cache::stream_cache::{KeepAlive, PageTable};
use crate::allocator::config::{Config, Limit, Policy};
use crate::allocator::engine::bench::Unfinished;
use crate::allocator::engine::debug_table::Debug;
use crate::allocator::engine::decay::Decay;
use crate::allocator::engine::hooks::Hooks;
use crate::allocator::engine::segments::Suspender;
use crate::allocator::heap::Heap;
use crate::allocator::physical::Bounds;
use crate::allocator::physical::address::Addresses;
use crate::allocator::physical::commit::Maker;
use crate::allocator::physical::policy::Rules;
use crate::error::{Error, RareLog};
use crate::locks::held::Mutex;
use crate::locks::lock::{Held, Lock};
use crate::nvtx::{self, Tool};

/// On cache lines of its own: around it lies what every call reads.
#[derive(Debug)]
#[repr(align(128))]
struct OwnCacheLine<T>(T);

/// In this order: what a pair of calls reads is on one line.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Engine {
    /// Tells this allocator from every other one of the process; starts at 1.
    pub id: u64,
    /// The allocator's id as long as stream caches serve here and the context is not lost, then 0.
    at_once: AtomicU64,
    /// Which stream cache has which page.
    pub pages: Arc<PageTable>,
    /// Blocks in large-block caches, held by somebody or not: where there are none, no stream cache is asked
    /// for one.
    pub in_large_caches: Arc<AtomicU32>,
    /// The number of the newest finding of a capture for which a wait for everything was refused.
    pub told: AtomicU64,
    /// Every call asks whether its stream is captured, also where nothing else needs the driver.
    ask_captures: bool,
    /// The program promises that it captures no stream which the allocator knows.
    pub no_captures: bool,
    /// Owners of raw streams do not promise to retire them.
    pub unretired: bool,
    /// Who names a default stream by its handle while another context is current is refused.
    pub context_checks: bool,
    /// Blocks wait in the heap to be freed by a call that may.
    pub deferred: AtomicBool,
    /// It is known that the allocator outlives its handles for a capture's sake.
    pub waits: AtomicBool,
    pub context: Context,
    /// Itself, for what has to outlive the call that it is in.
    me: Weak<Engine>,
    pub device: Device,
    pub rules: Rules,
    /// Whether memory may be used through second layouts, as far as the settings say.
    pub views: bool,
    /// Whether the device is tested before memory is used so.
    pub self_test: bool,
    /// Whether the device failed that test.
    pub views_failed: AtomicBool,
    pub properties: MemoryProperties,
    /// Devices that may access the memory: its own first.
    pub access: Vec<Device>,
    pub total_memory: u64,
    /// Address space of the device.
    pub addresses: Arc<Addresses>,
    pub hooks: Hooks,
    pub suspender: Suspender,
    /// Events that put the uses of typed buffers in order, of the allocator's own context.
    pub events: EventPools,
    /// Of markers that could not be recorded.
    pub log: RareLog,
    /// Allocators that stand for this one.
    handles: AtomicUsize,
    /// Streams whose retirement was begun.
    retirements: AtomicU64,
    /// Tests of views that could not be waited for.
    pub unfinished: Mutex<Vec<Unfinished>>,
    heap: OwnCacheLine<Lock<Heap>>,
    lost: OnceLock<DriverError>,
    /// Open scopes of graph pools.
    pub scopes: AtomicU64,
    /// When idle memory goes back, if it does so by itself.
    pub decay: Option<Decay>,
    /// What looks for errors of the program, if anything does.
    pub debug: Option<Debug>,
}

impl KeepAlive for Engine {}

pub(crate) type Guard<'a> = Held<'a, Heap>;

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
            if !peer.can_access_peer(device)? {
                return Err(Error::NotSupported {
                    what: "access from a peer device",
                });
            }
            access.push(peer);
        }
        let addresses = Addresses::of(driver, device.clone(), total_memory);
        // compute-sanitizer refuses heaps in mapped memory.
        let tracked = tool.is_some_and(Tool::tracks_memory) && config.peers.is_empty();
        // Nothing after this fails while address space is reserved for the allocator.
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
        // Without ids a stream cannot be told from one that had its handle before.
        let unretired = config.unretired_streams && driver.has(Feature::StreamIds);
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let debug = Debug::of(config.debug);
        // Nothing is served or taken back without a look at the stream then.
        let ask_captures = config.capture_checks || debug.is_some();
        let at_once = match rules.caches() && !ask_captures {
            true => id,
            false => 0,
        };
        let pages = Arc::new(PageTable::new(at_once));
        let mut tuning = config.tuning();
        if !rules.maps() {
            // The profile is the packed policy's, and so is the order of waits that it brings.
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
            heap.streams.watchful = ask_captures;
            heap.streams.unretired = unretired;
            heap.caches.legacy = (!config.context_checks).then(|| context.legacy_id());
            heap.tool = tool.filter(|_| !rules.maps());
            Engine {
                id,
                me: me.clone(),
                context: context.clone(),
                device: device.clone(),
                rules,
                views: rules.maps() && config.views,
                self_test: config.self_test,
                views_failed: AtomicBool::new(false),
                properties,
                access,
                total_memory,
                addresses,
                hooks: Hooks::default(),
                suspender: Suspender::default(),
                events: EventPools::of(context),
                log: RareLog::default(),
                handles: AtomicUsize::new(1),
                retirements: AtomicU64::new(0),
                ask_captures,
                no_captures: !config.captures,
                unretired,
                context_checks: config.context_checks,
                in_large_caches: Arc::clone(&heap.caches.in_large_caches),
                unfinished: Mutex::default(),
                heap: OwnCacheLine(Lock::new(heap)),
                pages,
                lost: OnceLock::new(),
                at_once: AtomicU64::new(at_once),
                scopes: AtomicU64::new(0),
                decay: Decay::of(config),
                debug,
                deferred: AtomicBool::new(false),
                waits: AtomicBool::new(false),
                told: AtomicU64::new(0),
            }
        });
        process::do_postponed();
        engine.recall_aliasing();
        Ok(engine)
    }

    /// Itself, unless it is going.
    pub(crate) fn keep(&self) -> Option<Shared> {
        self.me.upgrade()
    }

    /// How many streams were about to be retired so far.
    #[inline]
    pub(crate) fn retirements(&self) -> u64 {
        self.retirements.load(Ordering::Acquire)
    }

    /// One more.
    pub(crate) fn count_retirement(&self) {
        self.retirements.fetch_add(1, Ordering::AcqRel);
    }

    /// Another [`Allocator`](crate::allocator::Allocator) stands for this engine.
    pub(crate) fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::Relaxed);
    }

    /// One less; the last one closes the engine, or leaves that to the last block.
    pub(crate) fn remove_handle(&self) {
        if self.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            process::do_postponed();
            self.abandon();
        }
    }

    /// Nobody can ask for memory any more: gives everything back, now or when the last block goes.
    pub(crate) fn abandon(&self) {
        if self.usable().is_err() || self.handles.load(Ordering::Acquire) > 0 {
            return;
        }
        if self.debug.is_some() && !self.lock().orphaned {
            self.free_deferred();
            self.release_quarantine(0);
            self.report_leaks();
        }
        {
            let mut heap = self.lock();
            if heap.closed {
                return;
            }
            heap.set_orphaned(true);
        }
        // With the last of them it ends, or is told that it cannot.
        self.free_deferred();
        if self.outlives_capture() {
            return;
        }
        match self.close() {
            Ok(()) | Err(Error::Guarded { .. } | Error::Closed) => {}
            // The last block, or one of those that come before it, may be one of a stream that captures.
            Err(Error::InUse { .. })
                if self.deferred.load(Ordering::Relaxed) || self.lock().graphs.are_leased() =>
            {
                self.outlive_capture();
            }
            Err(Error::InUse { .. }) => {}
            Err(Error::Capturing { .. }) => self.outlive_capture(),
            // What the driver refused this once it may do when it is asked again.
            Err(error) => self.outlive_refusal(&error),
        }
    }

    /// [`unwatched`](Self::unwatched), and nobody records what stream caches do.
    #[inline(always)]
    pub(crate) fn unseen(&self) -> bool {
        self.at_once_id() != 0 && process::is_quiet()
    }

    /// Whether stream caches may serve a call without a look at anything else.
    #[inline(always)]
    pub(crate) fn unwatched(&self) -> bool {
        self.at_once_id() != 0 && process::is_unwatched()
    }

    /// The id by which threads find their stream caches; 0, which finds none, where more is to be looked at.
    #[inline(always)]
    pub(crate) fn at_once_id(&self) -> u64 {
        self.at_once.load(Ordering::Relaxed)
    }

    /// Whether a call has to look at more than its stream cache: the process forked or ends, or somebody
    /// captures streams.
    #[inline]
    pub(crate) fn watchful(&self) -> bool {
        !process::is_unwatched() || self.ask_captures
    }

    /// What the driver's memory is made like.
    pub(crate) fn maker(&self) -> Maker<'_> {
        Maker {
            context: &self.context,
            properties: &self.properties,
            access: &self.access,
        }
    }

    /// Whether the owner of a stream may begin to capture it at any time: it is not asked by others then.
    pub(crate) fn may_capture(&self) -> bool {
        !self.no_captures && (self.watchful() || process::has_captured())
    }

    #[inline]
    pub(crate) fn driver(&self) -> &Driver {
        self.context.driver()
    }

    /// The heap. They are consistent whenever the lock is free, also after a panic elsewhere: no
    /// foreign code runs under the lock.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.heap.0.lock()
    }

    /// The heap, for calls that cannot say [`Error::ForkedChild`]: none in a child, where the lock may be
    /// held by a thread that does not exist there.
    pub(crate) fn readable(&self) -> Option<Guard<'_>> {
        (!process::is_forked_child()).then(|| self.lock())
    }

    /// Turns a driver's error into ours, and remembers a lost context.
    pub(crate) fn error(&self, error: DriverError) -> Error {
        if error.is_fatal() && !self.is_of_another(&error) {
            self.at_once.store(0, Ordering::Relaxed);
            self.pages.stop();
            return Error::ContextLost(*self.lost.get_or_init(|| error));
        }
        Error::Driver(error)
    }

    /// Whether an error says that a context which was looked at is gone, and that is not ours: ours is kept.
    #[cold]
    fn is_of_another(&self, error: &DriverError) -> bool {
        let gone = DriverError::new("cuCtxGetId", CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        *error == gone && self.context.is_kept()
    }

    /// Whether calls make no sense any more: [`usable`](Self::usable) without the reason. In a forked child not even a
    /// lock may be taken.
    #[inline(always)]
    pub(crate) fn is_past_use(&self) -> bool {
        process::is_gone() || self.lost.get().is_some()
    }

    /// Whether calls make sense at all.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        if self.driver().is_forked_child() {
            return Err(Error::ForkedChild);
        }
        if self.driver().is_exiting() {
            return Err(Error::Exiting);
        }
        match self.lost.get() {
            Some(error) => Err(Error::ContextLost(*error)),
            None => Ok(()),
        }
    }

    /// The heap, if the allocator is open and usable.
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

/// The shared inside of an allocator and its blocks.
pub(crate) type Shared = Arc<Engine>;

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::{Allocator, Config};
    use crate::driver::sys::CUresult;
    use crate::driver::{Context, DriverError, Stream};
    use crate::error::Error;
    use crate::sim::{SimConfig, Simulator};

    #[test]
    fn a_context_of_somebody_else_that_is_gone_is_no_loss_of_ours() {
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
        // SAFETY: whoever asks finds out that it is gone.
        let theirs = unsafe { Context::from_raw(&driver, raw) }.unwrap();
        let allocator = of(&theirs);
        assert!(sim.destroy_context(raw));
        let lost = allocator.engine().error(gone);
        assert!(matches!(lost, Error::ContextLost(_)), "{lost}");
    }
}
