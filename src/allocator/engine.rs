//! The allocator's inside: one lock around the books, driver calls outside it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::process;
use crate::driver::{
    Context, Device, Driver, DriverError, MemoryProperties, Stream, StreamKind, sys,
};

use super::addresses::Addresses;
use super::config::{Config, Limit, Policy};
use super::defaults::Defaults;
use super::error::Error;
use super::front::{Held, KeepAlive, Lock, PageTable};
use super::hooks::Hooks;
use super::leaving::Leaving;
use super::markers::is_capture_refusal;
use super::state::State;
use super::streams::{Holder, StreamKey};
use super::trial;

/// How often the last marker of a stream is recorded anew because others go on freeing what was used on
/// it, before it is taken for one that captures: no marker is recorded there.
const RETIREMENTS: u32 = 64;

/// Marker failures are logged this often at most: the first, then at every power of two.
#[derive(Debug, Default)]
pub(crate) struct RareLog(AtomicU64);

impl RareLog {
    /// Whether this occurrence should be logged, and the how-manieth it is.
    pub(crate) fn due(&self) -> Option<u64> {
        // A logger has locks, too.
        if process::is_forked_child() {
            return None;
        }
        let count = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_power_of_two().then_some(count)
    }
}

/// A stream as a call names it.
pub(crate) struct Named<'a> {
    pub key: StreamKey,
    pub raw: sys::CUstream,
    /// The caller's handle object, if it has one.
    pub stream: Option<&'a Stream>,
}

/// On cache lines of its own: around it lies what every call reads.
#[derive(Debug)]
#[repr(align(128))]
struct Apart<T>(T);

#[derive(Debug)]
pub(crate) struct Engine {
    /// Tells this allocator from every other one of the process; starts at 1.
    pub id: u64,
    /// Itself, for what has to outlive the call that it is in.
    me: Weak<Engine>,
    pub context: Context,
    pub device: Device,
    pub packed: bool,
    /// Whether memory may be used through second layouts, as far as the settings say,
    pub views: bool,
    /// whether the device is tested before that,
    pub self_test: bool,
    /// and whether it failed.
    pub views_failed: AtomicBool,
    pub properties: MemoryProperties,
    /// Devices that may access the memory: its own first.
    pub access: Vec<Device>,
    pub total_memory: u64,
    /// Address space of the device.
    pub addresses: Arc<Addresses>,
    pub hooks: Hooks,
    pub log: RareLog,
    /// Which front has which page.
    pub pages: Arc<PageTable>,
    /// Blocks on shelves, held by somebody or not: where there are none, no front is asked for one.
    pub on_shelves: Arc<AtomicU32>,
    /// Allocators that stand for this one.
    handles: AtomicUsize,
    /// Streams whose retirement was begun.
    retirements: AtomicU64,
    /// Every call asks whether its stream is captured, also where nothing else needs the driver.
    ask_captures: bool,
    /// Default streams, as raw calls name them.
    pub defaults: Defaults,
    state: Apart<Lock<State>>,
    lost: OnceLock<DriverError>,
    /// The allocator's id as long as fronts serve here and the context is not lost, then 0.
    at_once: AtomicU64,
    /// Blocks wait in the books to be freed by a call that may.
    pub deferred: AtomicBool,
    /// It is known that the allocator outlives its handles for a capture's sake.
    pub waits: AtomicBool,
    /// The number of the newest finding of a capture for which a wait for everything was refused.
    pub told: AtomicU64,
}

impl KeepAlive for Engine {}

pub(crate) type Guard<'a> = Held<'a, State>;

impl Engine {
    pub(crate) fn new(context: &Context, config: &Config) -> Result<Shared, Error> {
        config.validate()?;
        let (driver, device) = (context.driver(), context.device());
        let mapped = match config.policy {
            Policy::Classic => None,
            Policy::Auto | Policy::Packed => trial::memory_of(context, config.policy)?,
        };
        let packed = mapped.is_some();
        if !packed && !config.peers.is_empty() {
            return Err(Error::NotSupported {
                what: "peer access without virtual memory management",
            });
        }
        let mut access = vec![device];
        for ordinal in &config.peers {
            let peer = driver.device(*ordinal)?;
            if peer == device {
                continue;
            }
            if !driver.can_access_peer(peer, device)? {
                return Err(Error::NotSupported {
                    what: "access from a peer device",
                });
            }
            access.push(peer);
        }
        let total_memory = driver.total_memory(device)?;
        let limit = config.limit.map(|limit| match limit {
            Limit::Bytes(bytes) => bytes,
            Limit::Fraction(share) => (total_memory as f64 * share) as u64,
        });
        let properties = mapped.unwrap_or(MemoryProperties::plain(device));
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let pages = Arc::new(PageTable::new());
        let engine = Arc::new_cyclic(|me| {
            let mut state = State::new(
                (me.clone() as Weak<dyn KeepAlive>, id),
                Arc::clone(&pages),
                device.ordinal(),
                packed,
                limit,
                config.tuning(),
            );
            state.streams.watchful = config.capture_checks;
            Engine {
                id,
                me: me.clone(),
                context: context.clone(),
                device,
                packed,
                views: packed && config.views,
                self_test: config.self_test,
                views_failed: AtomicBool::new(false),
                properties,
                access,
                total_memory,
                addresses: Addresses::of(driver, device, total_memory),
                hooks: Hooks::default(),
                log: RareLog::default(),
                handles: AtomicUsize::new(1),
                retirements: AtomicU64::new(0),
                ask_captures: config.capture_checks,
                defaults: Defaults::new(config.context_checks),
                on_shelves: Arc::clone(&state.fronts.on_shelves),
                state: Apart(Lock::new(state)),
                pages,
                lost: OnceLock::new(),
                at_once: AtomicU64::new(if packed && !config.capture_checks {
                    id
                } else {
                    0
                }),
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

    /// Another [`Allocator`](super::Allocator) stands for this engine.
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
        {
            let mut state = self.lock();
            if state.closed {
                return;
            }
            state.set_orphaned(true);
        }
        // With the last of them it ends, or is told that it cannot.
        self.free_deferred();
        if self.outlives_capture() {
            return;
        }
        match self.close() {
            Ok(()) | Err(Error::Guarded { .. } | Error::Closed) => {}
            // The last block, or one of those that come before it, may be one of a stream that captures.
            Err(Error::LiveBlocks { .. }) if self.deferred.load(Ordering::Relaxed) => {
                self.outlive_capture();
            }
            Err(Error::LiveBlocks { .. }) => {}
            Err(Error::Capturing { .. }) => self.outlive_capture(),
            // What the driver refused this once it may do when it is asked again.
            Err(error) => self.outlive_refusal(&error),
        }
    }

    /// Whether fronts may serve a call without a look at anything else.
    #[inline(always)]
    pub(crate) fn unwatched(&self) -> bool {
        self.at_once_id() != 0 && process::is_quiet()
    }

    /// The id by which threads find their fronts; 0, which finds none, where more is to be looked at.
    #[inline(always)]
    pub(crate) fn at_once_id(&self) -> u64 {
        self.at_once.load(Ordering::Relaxed)
    }

    /// Whether a call has to look at more than its front: the process forked or ends, or somebody
    /// captures streams.
    #[inline]
    pub(crate) fn watchful(&self) -> bool {
        !process::is_quiet() || self.ask_captures
    }

    #[inline]
    pub(crate) fn driver(&self) -> &Driver {
        self.context.driver()
    }

    /// The books. They are consistent whenever the lock is free, also after a panic elsewhere: no
    /// foreign code runs under the lock.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.state.0.lock()
    }

    /// The books, for calls that cannot say [`Error::ForkedChild`]: none in a child, where the lock may be
    /// held by a thread that does not exist there.
    pub(crate) fn readable(&self) -> Option<Guard<'_>> {
        (!process::is_forked_child()).then(|| self.lock())
    }

    /// Turns a driver's error into ours, and remembers a lost context.
    pub(crate) fn error(&self, error: DriverError) -> Error {
        if error.is_fatal() {
            self.at_once.store(0, Ordering::Relaxed);
            return Error::ContextLost(*self.lost.get_or_init(|| error));
        }
        Error::Driver(error)
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

    /// The books, if the allocator is open and usable.
    pub(crate) fn open(&self) -> Result<Guard<'_>, Error> {
        self.usable()?;
        let state = self.lock();
        if state.closed {
            Err(Error::Closed)
        } else {
            Ok(state)
        }
    }

    // ---- streams ---------------------------------------------------------------------------

    /// Streams of another driver are refused: ids tell apart the streams of one.
    #[inline]
    pub(crate) fn same_driver(&self, stream: &Stream) -> Result<(), Error> {
        if self.driver().same_library(stream.context().driver()) {
            return Ok(());
        }
        Err(Error::ForeignDriver)
    }

    pub(crate) fn named<'a>(&self, stream: &'a Stream) -> Result<Named<'a>, Error> {
        self.usable()?;
        self.same_driver(stream)?;
        let id = stream.id().map_err(|e| self.unnamed(stream.raw(), e))?;
        Ok(Named {
            key: StreamKey::Id(id),
            raw: stream.raw(),
            stream: Some(stream),
        })
    }

    /// Why a stream could not be named. Drivers refuse to say the id of one that is being captured.
    pub(crate) fn unnamed(&self, raw: sys::CUstream, error: DriverError) -> Error {
        if !is_capture_refusal(error.code()) {
            return self.error(error);
        }
        // The legacy stream, which stands behind others, is asked whenever it matters.
        if error.code() != sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            self.driver().saw_capture(raw);
        }
        Error::Capturing {
            stream: raw as usize,
        }
    }

    /// Names a stream by its handle. Handle values are reused, so the driver is asked for the id
    /// each time.
    ///
    /// # Safety
    /// `raw` must be a live stream or a special handle.
    pub(crate) unsafe fn named_raw(&self, raw: sys::CUstream) -> Result<Named<'static>, Error> {
        self.usable()?;
        let key = if is_special(raw) {
            self.special_key(raw)?
        } else {
            // SAFETY: the caller vouches for the stream.
            match unsafe { self.driver().stream_id(raw) } {
                Ok(Some(id)) => StreamKey::Id(id),
                Ok(None) => StreamKey::Handle(raw as usize),
                Err(error) => return Err(self.unnamed(raw, error)),
            }
        };
        Ok(Named {
            key,
            raw,
            stream: None,
        })
    }

    /// Refuses a stream that is being captured: memory of a graph outlives the order of the stream.
    #[inline]
    pub(crate) fn refuse_capture(&self, named: &Named<'_>) -> Result<(), Error> {
        if is_special(named.raw) {
            let context = named.stream.map_or(&self.context, Stream::context);
            return self.refuse_special_capture(named, context);
        }
        // SAFETY: whoever made the name vouched for the stream.
        match unsafe { self.driver().is_capturing(named.raw) } {
            Ok(false) => Ok(()),
            capturing => self.refuse_if(named, capturing),
        }
    }

    /// [`refuse_capture`](Self::refuse_capture) of a default stream of a context.
    #[inline(never)]
    pub(crate) fn refuse_special_capture(
        &self,
        named: &Named<'_>,
        context: &Context,
    ) -> Result<(), Error> {
        let entered = context.enter().map_err(|e| self.error(e))?;
        // SAFETY: special handles are valid while a context is current.
        let capturing = unsafe { self.driver().is_capturing(named.raw) };
        drop(entered);
        self.refuse_if(named, capturing)
    }

    #[cold]
    #[inline(never)]
    fn refuse_if(
        &self,
        named: &Named<'_>,
        capturing: Result<bool, DriverError>,
    ) -> Result<(), Error> {
        match capturing {
            Ok(false) => Ok(()),
            Ok(true) => Err(Error::Capturing {
                stream: named.raw as usize,
            }),
            Err(error) if error.code() == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
                Err(Error::Capturing {
                    stream: named.raw as usize,
                })
            }
            Err(error) => Err(self.error(error)),
        }
    }

    /// The slot of a stream, registered if it is new.
    pub(crate) fn slot<'a>(
        &'a self,
        mut state: Guard<'a>,
        named: &Named<'_>,
    ) -> Result<(Guard<'a>, u32), Error> {
        let kept = named.stream.filter(|stream| {
            !matches!(
                stream.kind(),
                StreamKind::Borrowed | StreamKind::PerThreadDefault
            )
        });
        if let Some(stream) = state.streams.find(named.key) {
            let slot = &mut state.streams[stream];
            if let (Holder::Foreign(_), Some(kept)) = (&slot.holder, kept) {
                // It was named by its handle until now.
                let former = std::mem::replace(&mut slot.holder, Holder::Kept(kept.clone()));
                slot.former = Some(former);
            }
            return Ok((state, stream));
        }
        drop(state);
        let context = self.context_of(named)?;
        // A handle may be that of a stream which somebody here destroys.
        let by_handle = match named.key {
            StreamKey::Id(id) if named.stream.is_none() => self.driver().owned_stream(id),
            _ => None,
        };
        let holder = match kept.cloned().or(by_handle) {
            Some(stream) => Holder::Kept(stream),
            None => Holder::foreign(),
        };
        self.prune();
        let former = std::mem::take(&mut self.lock().streams.former);
        drop(former);
        state = self.lock();
        let stream = state.adopt(named.key, named.raw as usize, context, holder);
        Ok((state, stream))
    }

    fn context_of(&self, named: &Named<'_>) -> Result<Context, Error> {
        if let Some(stream) = named.stream {
            return Ok(stream.context().clone());
        }
        if is_special(named.raw) {
            return Ok(self.context.clone());
        }
        // SAFETY: whoever made the name vouched for the stream.
        let raw = unsafe { self.driver().stream_context(named.raw) }.map_err(|e| self.error(e))?;
        if raw == self.context.raw() {
            return Ok(self.context.clone());
        }
        // SAFETY: the context of a live stream is alive, and stays so while the stream is in use.
        unsafe { Context::from_raw(self.driver(), raw) }.map_err(|e| self.error(e))
    }

    /// Memory of this device is allocated on streams of this device.
    pub(crate) fn same_device(&self, state: &State, stream: u32) -> Result<(), Error> {
        let other = state.streams[stream].context.device();
        if other == self.device {
            return Ok(());
        }
        Err(Error::WrongDevice {
            device: self.device.ordinal(),
            stream_device: other.ordinal(),
        })
    }

    /// Lets go of streams that only we still hold: records their last marker and drops them.
    fn prune(&self) {
        let alone: Vec<(u32, StreamKey)> = {
            let state = self.lock();
            let kept = state
                .streams
                .iter()
                .filter_map(|(at, slot)| match &slot.holder {
                    Holder::Kept(stream)
                        if stream.kind() == StreamKind::Owned
                            && !state.streams.is_held_elsewhere(stream) =>
                    {
                        Some((at, slot.key))
                    }
                    _ => None,
                });
            kept.collect()
        };
        for (stream, key) in alone {
            if let Err(error) = self.retire_slot(stream, key) {
                self.log_marker_failure(&error);
            }
        }
    }

    /// Records the last marker of a stream and forgets its handle.
    ///
    /// The key tells whether the slot is still that stream's: without the lock another thread may
    /// have retired it, and a new stream moved in.
    pub(crate) fn retire_slot(&self, stream: u32, key: StreamKey) -> Result<(), Error> {
        let gone = |state: &State| {
            let slot = &state.streams[stream];
            !slot.in_use || slot.key != key || matches!(slot.holder, Holder::Retired)
        };
        let leaving = {
            let mut state = self.lock();
            if gone(&state) {
                return Ok(());
            }
            Leaving::begin(self, &mut state, stream, key)
        };
        let mut state;
        let mut rounds = 0;
        loop {
            self.mark(stream, key)?;
            state = self.lock();
            if gone(&state) {
                break;
            }
            if state.streams[stream].covered() {
                let home;
                (state, home) = self.bring_home(state, stream)?;
                if home || gone(&state) {
                    break;
                }
            }
            let slot = &state.streams[stream];
            // Somebody freed on the stream meanwhile, or captures it.
            rounds += 1;
            if rounds == RETIREMENTS {
                return Err(Error::Capturing { stream: slot.raw });
            }
            drop(state);
        }
        if gone(&state) {
            return Ok(());
        }
        let slot = &mut state.streams[stream];
        let former = std::mem::replace(&mut slot.holder, Holder::Retired);
        let before = slot.former.take();
        let context = match former {
            // Of theirs nothing is left but the marker, which is ours.
            Holder::Foreign(_) => Some(std::mem::replace(&mut slot.context, self.context.clone())),
            _ => None,
        };
        leaving.end();
        state.flush_fronts_of(stream);
        state.recycle(stream);
        drop(state);
        // Another thread that frees a block of the stream may be about to ask or mark it. What we keep is
        // destroyed if nobody else holds it: a driver call, so outside the lock.
        former.let_go();
        before.into_iter().for_each(Holder::let_go);
        if let Some(context) = context {
            self.let_go_of_context(stream, &context);
        }
        Ok(())
    }

    pub(crate) fn log_marker_failure(&self, error: &dyn std::error::Error) {
        if let Some(count) = self.log.due() {
            log::warn!("a marker could not be recorded ({count} times so far): {error}");
        }
    }
}

/// The null, legacy and per-thread handles.
#[inline]
pub(crate) fn is_special(raw: sys::CUstream) -> bool {
    (raw as usize) <= 2
}

/// Whether the handle means a different stream on each thread.
pub(crate) fn is_per_thread(raw: usize) -> bool {
    raw == 2
}

/// The shared inside of an allocator and its blocks.
pub(crate) type Shared = Arc<Engine>;
