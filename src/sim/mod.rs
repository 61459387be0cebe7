//! A simulated driver: the same function table, filled with functions of this process.
//!
//! A [`Simulator`] has devices with physical memory, address space, streams and events, and obeys the rules of the real
//! driver. A test decides when work completes, can make any call fail ([`FailPlan`]), and gets a report of every race, use
//! of unmapped memory and broken rule.
//!
//! Operations read and write bytes when they complete, through the mapping in force then. Two operations on the same
//! physical bytes that nothing orders (stream order, event, observation by the host) are reported as a race, even if they
//! happened to run one after the other.
//!
//! Where drivers differ, the simulator does the worst of them. Calls that may wait, such as `cuMemFree`, wait for nothing
//! ([`SimConfig::strict_free`]). Work on missing memory breaks its context for good ([`SimConfig::sticky_errors`]). Values of
//! destroyed handles are reused immediately. A graph runs unordered nodes in an order that [`SimConfig::seed`] decides. In
//! debug builds a driver call by a thread that holds a lock of the library is reported. Graphs that allocate memory, or
//! contain graphs, are not modelled.
//!
//! ```
//! use cualloc::sim::{SimConfig, Simulator};
//!
//! let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
//! let driver = sim.driver()?;
//! assert_eq!(driver.device_count()?, 1);
//! assert!(sim.reports().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Kernels it can launch, from a module loaded with any image: `cualloc_fill(u64 pointer, u64
//! words, u32 seed)`, `cualloc_check(u64 pointer, u64 words, u32 seed, u64 bad)`,
//! `cualloc_spin(u64 nanoseconds)`.

mod address;
mod args;
#[macro_use]
mod call;
mod clocks;
mod config;
mod contents;
mod context;
mod costs;
mod execute;
mod graph;
mod hooks;
mod host;
mod kernels;
mod loaded;
mod memory;
mod objects;
mod physical;
mod plain;
mod pools;
mod race;
mod reports;
mod schedule;
#[cfg(unix)]
mod shared_contents;
mod sharing;
mod slots;
mod state;
mod streams;
mod table;
mod vmm;
mod work;

pub use config::{Mode, SimConfig, SimDevice};
pub use costs::FailPlan;
#[doc(hidden)]
pub use hooks::Moment;
pub use reports::{Leaks, Report, Site};
pub use state::LogEntry;

use crate::driver::{CallCounts, Context, Driver, LoadError, sys};
use crate::error::ConfigError;
use crate::locks::thread_id::as_thread;
use slots::Place;
use state::State;
use std::sync::{Arc, Weak};
use work::Work;

/// A simulated driver with its devices.
///
/// Up to 32 live in a process at a time; [`Simulator::new`] waits for a place. Dropping the last clone of one
/// frees its place, and every function of its tables then returns "driver shut down".
///
/// Thread safety: `Send` and `Sync`; all calls, of the driver and of this type, take one lock.
#[derive(Clone, Debug)]
pub struct Simulator(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    place: Arc<Place>,
    missing: Vec<String>,
}

/// The part of a simulator that its drivers keep: the place, which is not reused while they exist, and a reference.
struct SlotReference {
    _place: Arc<Place>,
    simulator: Weak<Inner>,
}

/// Work that is submitted and not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PendingOp {
    /// The id of its stream; for a node of a graph, the id of a hidden stream on which some of the nodes run.
    pub stream: u64,
    /// Its position in the stream's work, counted from 1.
    pub sequence: u64,
    /// The handle of the graph's node that it is; 0 for other work.
    pub node: u64,
    /// The driver call or kernel that it came from.
    pub kind: &'static str,
    /// The device ranges it touches, as address and bytes.
    pub ranges: Vec<(u64, u64)>,
    /// The row at which it was submitted.
    pub row: u64,
    /// Whether it may complete next: it is the first of its stream, and everything it waits for is complete.
    pub ready: bool,
}

/// How far a stream is, in operations. The operation of a sequence number is complete when `reached` is
/// at least that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Operations given to it: the sequence number of the last one.
    pub submitted: u64,
    /// Operations complete.
    pub reached: u64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.place.end();
    }
}

/// How many locks of the library the calling thread holds, for loggers and hooks of tests: they run under none. Builds
/// without debug assertions count no locks.
pub fn locks_held() -> u32 {
    crate::locks::held::locks()
}

impl Simulator {
    /// Creates a simulator.
    ///
    /// # Errors
    /// The fault of the configuration.
    pub fn new(config: SimConfig) -> Result<Simulator, ConfigError> {
        config.check()?;
        let missing = config.missing.clone();
        let place = Place::take(Box::new(State::new(config)));
        Ok(Simulator(Arc::new(Inner { place, missing })))
    }

    /// Returns the table of its functions.
    pub fn functions(&self) -> sys::CuFunctions {
        let mut table = table::functions(self.0.place.slot);
        for name in &self.0.missing {
            table::remove(&mut table, name);
        }
        table
    }

    /// Creates a driver over its functions, with its own call counts. May be called repeatedly.
    ///
    /// # Errors
    /// As [`Driver::from_functions`]: a required function is missing, `cuInit` fails.
    pub fn driver(&self) -> Result<Driver, LoadError> {
        let ground = SlotReference {
            _place: self.0.place.clone(),
            simulator: Arc::downgrade(&self.0),
        };
        // SAFETY: the functions are those of the table's types, and stay callable for the life of
        // the process: without their simulator they return an error.
        unsafe { Driver::with_resource(self.functions(), Arc::new(ground)) }
    }

    /// Returns the primary context of a device, by a separate driver ([`Simulator::driver`]).
    ///
    /// # Errors
    /// As for [`Simulator::driver`]; [`LoadError::Init`] if the device does not exist.
    pub fn context(&self, ordinal: usize) -> Result<Context, LoadError> {
        self.driver()?.context(ordinal).map_err(LoadError::Init)
    }

    /// Returns the simulator of a driver, while it lives.
    pub(crate) fn of(driver: &Driver) -> Option<Simulator> {
        let ground = driver.ground()?.downcast_ref::<SlotReference>()?;
        ground.simulator.upgrade().map(Simulator)
    }

    /// Whether work completes rows after it was submitted.
    pub(crate) fn lags(&self) -> bool {
        let lags = |state: &mut State| matches!(state.mode, Mode::Lag(1..));
        self.with(lags).unwrap_or(false)
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut guard = slots::lock(self.0.place.slot);
        let state = guard.as_deref_mut()?;
        state.enter_thread();
        let result = run(state);
        let callbacks = state.take_callbacks();
        drop(guard);
        for callback in callbacks {
            callback.run();
        }
        Some(result)
    }

    /// Changes when work completes. Work that is due under the new mode completes immediately.
    pub fn set_mode(&self, mode: Mode) {
        self.with(|state| {
            state.mode = mode;
            state.pump();
        });
    }

    /// Begins the next row of [`Mode::Lag`], and completes the work that is due.
    pub fn advance_row(&self) {
        self.with(|state| {
            state.row += 1;
            if !state.active.is_empty() {
                state.pump();
            }
        });
    }

    /// All work that is not complete, stream by stream in the order of their first pending work,
    /// each stream's in order.
    pub fn pending(&self) -> Vec<PendingOp> {
        self.with(|state| {
            let mut list = Vec::new();
            for &queue in &state.active {
                let entry = &state.queues[queue as usize];
                for (index, op) in entry.ops.iter().enumerate() {
                    let ranges = op
                        .ranges()
                        .into_iter()
                        .filter(|range| range.1 > 0)
                        .collect();
                    list.push(PendingOp {
                        stream: entry.id,
                        sequence: op.seq,
                        node: op.place.map_or(0, |place| place.node),
                        kind: op.name,
                        ranges,
                        row: op.row,
                        ready: index == 0 && state.is_free(queue),
                    });
                }
            }
            list
        })
        .unwrap_or_default()
    }

    /// Returns the progress of a stream; `None` for an unknown id.
    pub fn progress(&self, stream: u64) -> Option<Progress> {
        self.with(|state| {
            let queue = state.queues.iter().find(|queue| queue.id == stream)?;
            Some(Progress {
                submitted: queue.submitted,
                reached: queue.done,
            })
        })
        .flatten()
    }

    /// The ids of the streams whose next operation may complete now: the legal choices.
    pub fn ready_streams(&self) -> Vec<u64> {
        self.with(|state| {
            let free = state.active.iter().filter(|&&queue| state.is_free(queue));
            free.map(|&queue| state.queues[queue as usize].id).collect()
        })
        .unwrap_or_default()
    }

    /// Completes the operation at `index` of [`Simulator::pending`] if it is ready; returns whether it was. Otherwise
    /// nothing changes.
    pub fn complete(&self, index: usize) -> bool {
        match self.pending().get(index) {
            Some(op) if op.ready => self.complete_stream(op.stream, 1) == 1,
            _ => false,
        }
    }

    /// Completes up to `count` operations of a stream, stopping where one waits for another stream;
    /// returns how many.
    pub fn complete_stream(&self, stream: u64, count: usize) -> usize {
        self.with(|state| {
            let found = state
                .active
                .iter()
                .find(|&&queue| state.queues[queue as usize].id == stream);
            let Some(&queue) = found else {
                return 0;
            };
            let mut done = 0;
            while done < count && state.is_free(queue) {
                state.step(queue);
                done += 1;
            }
            state.pump();
            done
        })
        .unwrap_or(0)
    }

    /// Completes all pending work, in a legal order.
    pub fn complete_all(&self) {
        self.with(|state| {
            loop {
                let free = state
                    .active
                    .iter()
                    .copied()
                    .find(|&queue| state.is_free(queue));
                match free {
                    Some(queue) => state.step(queue),
                    None => {
                        state.drop_idle();
                        break;
                    }
                }
            }
        });
    }

    /// Makes calls fail as planned. Plans are cumulative; each counts calls from now on independently.
    pub fn fail(&self, plan: FailPlan) {
        self.with(|state| state.plan(plan));
    }

    /// Removes all plans; returns how many were not finished.
    pub fn clear_failures(&self) -> usize {
        self.with(State::clear_plans).unwrap_or(0)
    }

    /// Rejects host waits from now on: each returns `CUDA_ERROR_UNKNOWN` and is reported, even without anything to wait
    /// for.
    pub fn deny_host_waits(&self, on: bool) {
        self.with(|state| state.deny_waits = on);
    }

    /// Sets a text that reports add to operations submitted by the calling thread from now on; an empty text adds
    /// nothing.
    pub fn set_site(&self, label: &str) {
        self.with(|state| state.set_label(label));
    }

    /// Returns the findings so far; at most the first 1000 since they were last taken.
    pub fn reports(&self) -> Vec<Report> {
        self.with(|state| state.reports().to_vec())
            .unwrap_or_default()
    }

    /// Like [`Simulator::reports`], and clears them.
    pub fn take_reports(&self) -> Vec<Report> {
        self.with(State::take_reports).unwrap_or_default()
    }

    /// Returns the number of findings since they were last taken, including those not kept.
    pub fn report_count(&self) -> u64 {
        self.with(|state| state.report_count).unwrap_or(0)
    }

    /// Calls of all drivers by name, those that drivers do not count included, with their modelled
    /// nanoseconds, waits included; handle operations are counted by drivers alone.
    pub fn calls(&self) -> CallCounts {
        self.with(|state| state.counters.calls())
            .unwrap_or_default()
    }

    /// Modelled nanoseconds of all calls.
    pub(crate) fn nanos(&self) -> u64 {
        self.with(|state| state.counters.nanos).unwrap_or(0)
    }

    /// Returns the number of calls that wait for the device (synchronise calls, `cuMemFree`), and of those that had
    /// something to wait for.
    pub fn waits(&self) -> (u64, u64) {
        self.with(|state| (state.counters.waits, state.counters.blocked_waits))
            .unwrap_or_default()
    }

    /// Starts a log of all calls, or stops and clears it.
    pub fn record_log(&self, on: bool) {
        self.with(|state| state.set_logging(on));
    }

    /// Returns the calls logged so far, oldest first, and clears the log.
    pub fn take_log(&self) -> Vec<LogEntry> {
        self.with(State::take_log).unwrap_or_default()
    }

    /// Returns the bytes of physical memory that the program holds on a device; 0 for an unknown one.
    pub fn memory_in_use(&self, device: usize) -> u64 {
        self.with(|state| state.devices.get(device).map_or(0, |device| device.used))
            .unwrap_or(0)
    }

    /// Sets the number of bytes that "another process" holds on the device. If it exceeds the free memory, nothing is
    /// free.
    pub fn take_memory(&self, device: usize, bytes: u64) {
        self.with(|state| {
            if let Some(device) = state.devices.get_mut(device) {
                device.taken = bytes;
            }
        });
    }

    /// Returns what still exists. Default streams and default pools are not included.
    pub fn leaks(&self) -> Leaks {
        self.with(|state| {
            let origin = |origin: &physical::Origin| {
                state
                    .mappings
                    .values()
                    .filter(|mapping| &mapping.origin == origin)
                    .count()
            };
            let plain = state
                .mappings
                .values()
                .filter(|mapping| matches!(mapping.origin, physical::Origin::Plain(_)));
            let held = state
                .allocs
                .iter()
                .flatten()
                .filter(|alloc| alloc.references > 0);
            Leaks {
                handles: held.count(),
                mappings: origin(&physical::Origin::Vmm),
                reservations: state.reservations.len(),
                allocations: plain.count(),
                pool_allocations: state.pool_blocks.len(),
                pools: state.user_pools(),
                streams: state.streams.iter().flatten().count(),
                events: state.events.iter().flatten().count(),
                host: state.host_blocks.len(),
                graphs: state.graphs.graphs.iter().count(),
                executables: state.graphs.execs.iter().count(),
                user_objects: state.graphs.objects.iter().count(),
                bytes: state.devices.iter().map(|device| device.used).sum(),
            }
        })
        .unwrap_or_default()
    }

    /// Returns the current bytes at a device address; `None` where nothing is mapped. Undefined bytes read as 0xdb.
    pub fn read_memory(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        self.with(|state| {
            let mut data = Vec::new();
            let end = address.checked_add(bytes as u64)?;
            let mut at = address;
            while at < end {
                let (start, mapping) = state.mapping_at(at)?;
                let len = (start + mapping.bytes).min(end) - at;
                let alloc = state.allocs[mapping.alloc as usize].as_ref()?;
                alloc
                    .contents
                    .read(at - start, len, |_, len, content| match content {
                        Some(content) => data.extend(content.bytes(len as usize)),
                        None => data.resize(data.len() + len as usize, 0xdb),
                    });
                at += len;
            }
            Some(data)
        })
        .flatten()
    }

    /// Creates a context on a device beside the primary one, as foreign code may; `None` for an
    /// unknown device.
    pub fn create_context(&self, device: usize) -> Option<sys::CUcontext> {
        let created = self.with(|state| {
            // Handles are numbers here; a raw pointer does not leave the closure.
            (device < state.devices.len()).then(|| state.create_ctx(device) as usize)
        });
        created.flatten().map(|handle| handle as sys::CUcontext)
    }

    /// Destroys such a context, with its streams, events and plain memory; returns whether it existed.
    pub fn destroy_context(&self, context: sys::CUcontext) -> bool {
        let value = context as usize;
        self.with(|state| match state.ctx(value as sys::CUcontext) {
            Ok(ctx) => state.destroy_ctx(ctx).is_ok(),
            Err(_) => false,
        })
        .unwrap_or(false)
    }

    /// Resets the primary context of a device, as foreign code may: its streams, events, modules and plain memory are
    /// destroyed, and handles retained before are invalid until the context is retained again. Returns whether it
    /// existed.
    pub fn reset_primary(&self, device: usize) -> bool {
        self.with(|state| {
            device < state.devices.len()
                && state.ctxs[device].alive
                && state.destroy_ctx(device).is_ok()
        })
        .unwrap_or(false)
    }

    /// Whether the primary context of a device lives; `None` for an unknown device.
    pub fn primary_is_active(&self, device: usize) -> Option<bool> {
        self.with(|state| (device < state.devices.len()).then(|| state.ctxs[device].alive))
            .flatten()
    }

    /// Breaks the primary context of a device: every later call on it returns `code`.
    pub fn lose_context(&self, device: usize, code: sys::CUresult) {
        self.with(|state| state.lose(device, code));
    }

    /// Shuts the driver down, as at process exit: every later call returns
    /// `CUDA_ERROR_DEINITIALIZED`.
    pub fn shutdown(&self) {
        self.with(|state| state.ended = true);
    }

    /// Sets a hook to run before each driver call, replacing the former one. It plays the role of another thread that
    /// acts at that moment. It runs in the calling thread without the simulator's lock, so it may call the driver and
    /// this type, as itself or [as another thread](Simulator::as_thread); its own calls run no hooks. With several
    /// calling threads it may run concurrently.
    #[doc(hidden)]
    pub fn before(&self, hook: impl Fn(&Moment) + Send + Sync + 'static) {
        hooks::set(self.0.place.slot, |hooks| {
            hooks.before = Some(Arc::new(hook));
        });
    }

    /// Like [`Simulator::before`], after each call: the driver has executed it and the caller has not got the result
    /// yet.
    #[doc(hidden)]
    pub fn after(&self, hook: impl Fn(&Moment) + Send + Sync + 'static) {
        hooks::set(self.0.place.slot, |hooks| {
            hooks.after = Some(Arc::new(hook));
        });
    }

    /// Removes both hooks. Those that are running continue.
    #[doc(hidden)]
    pub fn clear_hooks(&self) {
        hooks::set(self.0.place.slot, |hooks| *hooks = hooks::Hooks::default());
    }

    /// Runs a function as another thread from the view of simulated drivers: with its own current context, capture
    /// mode, default stream and captures. The same number means the same thread.
    #[doc(hidden)]
    pub fn as_thread<T>(&self, thread: u32, run: impl FnOnce() -> T) -> T {
        as_thread(thread, run)
    }

    /// Submits work that keeps a stream busy until the mode completes it, without touching memory: like a kernel that
    /// uses other memory only.
    ///
    /// # Errors
    /// The code that a launch would return.
    pub fn busy(&self, stream: sys::CUstream, nanos: u64) -> Result<(), sys::CUresult> {
        let value = stream as usize;
        let busy = |state: &mut State| state.enqueue(value as sys::CUstream, Work::Spin, nanos);
        self.with(busy)
            .unwrap_or(Err(sys::CUresult::CUDA_ERROR_DEINITIALIZED))
    }
}
