//! The state of one simulator, behind the lock of its slot.

use super::address::Addresses;
use super::call::{Call, R, fail};
use super::clocks::Clock;
use super::config::{Mode, SimConfig};
use super::costs::{Counters, FailPlan, Fault, cost};
use super::graph::{Graphs, Link};
use super::objects::{Callback, Pool};
use super::physical::{Alloc, HostBlock, Mapping};
use super::race::Entry;
use super::reports::{Report, Site};
use super::work::Queue;
use crate::driver::sys::CUresult;
use crate::locks::thread_id::ThreadId;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of simulators created in this process.
static SIMULATORS: AtomicU64 = AtomicU64::new(0);
/// Maximum number of reports kept; later ones are only counted.
const MAX_REPORTS: usize = 1000;

/// First handle value of contexts, streams and events; far from each other, so that a handle of one
/// kind is never taken for another.
pub(super) const CONTEXT_BASE: u64 = 0x1000_0000_0000;
pub(super) const STREAM_BASE: u64 = 0x1100_0000_0000;
pub(super) const EVENT_BASE: u64 = 0x1200_0000_0000;
pub(super) const HANDLE_STEP: u64 = 0x40;
/// Device addresses: plain allocations, then reservations.
pub(super) const PLAIN: (u64, u64) = (0x0a00_0000_0000, 0x0f00_0000_0000);
pub(super) const RESERVED: (u64, u64) = (0x2000_0000_0000, 0x4000_0000_0000);

pub(super) struct Device {
    /// Physical bytes held.
    pub(super) used: u64,
    /// Physical bytes that "another process" holds.
    pub(super) taken: u64,
    pub(super) default_pool: Option<u64>,
    pub(super) pool: Option<u64>,
}

pub(super) struct Ctx {
    /// Identifies its present life; unlike its handle it is never reused.
    pub(super) id: u64,
    pub(super) device: usize,
    pub(super) retains: u64,
    pub(super) alive: bool,
    pub(super) lost: Option<CUresult>,
    pub(super) legacy: Option<u32>,
    pub(super) per_thread: HashMap<u64, u32>,
    /// Blocking queues, which the legacy stream synchronises with.
    pub(super) blocking: Vec<u32>,
    /// Devices whose plain memory this context may use.
    pub(super) peers: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Recorded {
    Never,
    At {
        queue: u32,
        seq: u64,
        clock: Arc<Clock>,
    },
    Captured {
        capture: u64,
        /// Operations that wait for it depend on these nodes.
        links: Arc<[Link]>,
    },
}

pub(super) struct Event {
    pub(super) ctx: usize,
    pub(super) state: Recorded,
}

/// The state of one thread.
pub(super) struct Thread {
    pub(super) id: u64,
    pub(super) current: Option<usize>,
    /// The stream capture mode: 0 global, 1 thread local, 2 relaxed.
    pub(super) mode: u32,
    pub(super) label: u32,
}

/// One logged call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogEntry {
    /// Name of the function.
    pub call: &'static str,
    /// Its arguments as `name=value, ...`.
    pub arguments: String,
    /// The calling thread: a number of its own, the same in all simulators.
    pub thread: u64,
    /// Its result.
    pub result: CUresult,
}

pub(super) struct State {
    pub(super) config: SimConfig,
    pub(super) mode: Mode,
    pub(super) initialised: bool,
    pub(super) ended: bool,
    pub(super) counters: Counters,
    plans: Vec<FailPlan>,
    log: Option<Vec<LogEntry>>,
    reports: Vec<Report>,
    pub(super) report_count: u64,
    labels: Vec<String>,
    label_ids: HashMap<String, u32>,
    pub(super) threads: Vec<Thread>,
    thread_index: HashMap<u64, usize>,
    /// The calling thread, as an index into `threads`.
    pub(super) thread: usize,
    pub(super) devices: Vec<Device>,
    pub(super) ctxs: Vec<Ctx>,
    any_lost: bool,
    pub(super) deny_waits: bool,
    pub(super) row: u64,
    pub(super) queues: Vec<Queue>,
    pub(super) active: Vec<u32>,
    pub(super) dead_queues: Vec<u32>,
    pub(super) streams: Vec<Option<u32>>,
    pub(super) free_streams: Vec<usize>,
    pub(super) events: Vec<Option<Event>>,
    pub(super) free_events: Vec<usize>,
    /// The operations that the host has observed complete; every later submission comes after them.
    pub(super) host: Arc<Clock>,
    pub(super) host_version: u64,
    /// Whether the present call reports an error although it is executed: the host then observes nothing by it.
    pub(super) silent: bool,
    pub(super) graphs: Graphs,
    /// The state of the random numbers.
    pub(super) dice: u64,
    pub(super) plain: Addresses,
    /// Plain ranges freed while work was pending.
    pub(super) quarantine: Vec<(u64, u64)>,
    /// Units of plain memory that hold small allocations, by their first address.
    pub(super) slabs: BTreeMap<u64, super::physical::Slab>,
    pub(super) reserve: Addresses,
    pub(super) reservations: BTreeMap<u64, u64>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    pub(super) allocs: Vec<Option<Alloc>>,
    pub(super) free_allocs: Vec<u32>,
    pub(super) handles: HashMap<u64, u32>,
    pub(super) next_handle: u64,
    /// Handle values of released memory, which are reused from the last one on.
    pub(super) free_handles: Vec<u64>,
    pub(super) history_entries: u64,
    pub(super) history_limit: u64,
    pub(super) host_blocks: BTreeMap<u64, HostBlock>,
    pub(super) next_host_life: u64,
    /// Number of the simulator in this process.
    pub(super) number: u64,
    /// Shared memory: an allocation, or a pool, by its number.
    pub(super) shared: HashMap<u64, u32>,
    pub(super) next_share: u64,
    pub(super) next_block_id: u64,
    pub(super) pools: HashMap<u64, Pool>,
    pub(super) next_pool: u64,
    pub(super) pool_blocks: BTreeMap<u64, super::objects::Live>,
    pub(super) functions: HashMap<u64, (usize, super::objects::Kernel)>,
    pub(super) modules: HashMap<u64, usize>,
    pub(super) next_module: u64,
    pub(super) free_modules: Vec<u64>,
    pub(super) next_ctx_id: u64,
    pub(super) free_ctxs: Vec<usize>,
    callbacks: Vec<Callback>,
    pub(super) now: Call,
}

impl State {
    pub(super) fn new(config: SimConfig) -> State {
        let devices = config.devices.iter();
        let ctxs = (0..config.devices.len()).map(Ctx::new).collect();
        State {
            mode: config.mode,
            initialised: false,
            ended: false,
            counters: Counters::default(),
            plans: Vec::new(),
            log: None,
            reports: Vec::new(),
            report_count: 0,
            labels: vec![String::new()],
            label_ids: HashMap::new(),
            threads: Vec::new(),
            thread_index: HashMap::new(),
            thread: 0,
            devices: devices
                .map(|_| Device {
                    used: 0,
                    taken: 0,
                    default_pool: None,
                    pool: None,
                })
                .collect(),
            ctxs,
            any_lost: false,
            deny_waits: false,
            row: 0,
            queues: Vec::new(),
            active: Vec::new(),
            dead_queues: Vec::new(),
            streams: Vec::new(),
            free_streams: Vec::new(),
            events: Vec::new(),
            free_events: Vec::new(),
            host: Arc::default(),
            host_version: 0,
            silent: false,
            graphs: Graphs::default(),
            dice: config.seed,
            plain: Addresses::new(PLAIN.0, PLAIN.1),
            quarantine: Vec::new(),
            slabs: BTreeMap::new(),
            reserve: Addresses::new(
                RESERVED.0,
                RESERVED
                    .0
                    .saturating_add(config.address_space)
                    .min(RESERVED.1),
            ),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            allocs: Vec::new(),
            free_allocs: Vec::new(),
            handles: HashMap::new(),
            next_handle: 1,
            free_handles: Vec::new(),
            history_entries: 0,
            history_limit: 1 << 14,
            host_blocks: BTreeMap::new(),
            next_host_life: 1,
            number: SIMULATORS.fetch_add(1, Ordering::Relaxed),
            shared: HashMap::new(),
            next_share: 1,
            next_block_id: 1,
            pools: HashMap::new(),
            next_pool: 1,
            pool_blocks: BTreeMap::new(),
            functions: HashMap::new(),
            modules: HashMap::new(),
            next_module: 1,
            free_modules: Vec::new(),
            next_ctx_id: 1,
            free_ctxs: Vec::new(),
            callbacks: Vec::new(),
            now: Call::cuInit,
            config,
        }
    }

    /// Sets `thread` to the calling thread.
    pub(super) fn enter_thread(&mut self) {
        let id = ThreadId::current().number();
        if self
            .threads
            .get(self.thread)
            .is_some_and(|thread| thread.id == id)
        {
            return;
        }
        self.thread = match self.thread_index.get(&id) {
            Some(&index) => index,
            None => {
                self.threads.push(Thread {
                    id,
                    current: None,
                    mode: 0,
                    label: 0,
                });
                self.thread_index.insert(id, self.threads.len() - 1);
                self.threads.len() - 1
            }
        };
    }

    /// Counts a call, then executes it with `run` or fails it, according to the plans.
    pub(super) fn enter(&mut self, call: Call, run: impl FnOnce(&mut State) -> R) -> R {
        let fault = self.begin(call)?;
        let Some(fault) = fault else {
            return run(self);
        };
        if fault.executed {
            self.silent = true;
            // The fault replaces the result.
            let _ = run(self);
            self.silent = false;
        }
        if fault.sticky {
            self.lose_current_context(fault.code);
        }
        fail(fault.code)
    }

    /// The first steps of every call. Returns the fault that a plan has for it.
    fn begin(&mut self, call: Call) -> R<Option<Fault>> {
        self.enter_thread();
        self.now = call;
        let nanos = match call {
            // Costs are per mapping in the range; the calls add them up themselves.
            Call::cuMemSetAccess | Call::cuMemUnmap => 0,
            _ => cost(call),
        };
        self.counters.count(call, nanos);
        let locks = crate::locks::held::locks();
        if locks > 0 {
            let call = call.name();
            self.report(Report::UnderLock { call, locks });
        }
        if self.ended {
            return fail(CUresult::CUDA_ERROR_DEINITIALIZED);
        }
        let mut fault = None;
        if !self.plans.is_empty() {
            // All plans see every call, so that each counts for itself.
            for plan in &mut self.plans {
                if plan.hits(call) {
                    fault = fault.or(Some(plan.fault));
                }
            }
            self.plans.retain(|plan| plan.times > 0);
        }
        if fault.is_none_or(|fault| fault.executed) && (self.any_lost || !self.initialised) {
            self.begin_unusual(call)?;
        }
        Ok(fault)
    }

    /// Refuses a call that the function of a user object makes: the driver may wait for its own thread there.
    #[cold]
    pub(super) fn refuse_in_callback(&mut self, call: Call) -> R {
        self.enter_thread();
        self.now = call;
        self.misuse("called by the function of a user object", 0);
        fail(CUresult::CUDA_ERROR_NOT_PERMITTED)
    }

    #[cold]
    fn begin_unusual(&mut self, call: Call) -> R {
        let free = matches!(
            call,
            Call::cuInit | Call::cuDriverGetVersion | Call::cuGetErrorName | Call::cuGetErrorString
        );
        if free {
            return Ok(());
        }
        if !self.initialised {
            return fail(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        let local = matches!(
            call,
            Call::cuCtxGetCurrent
                | Call::cuCtxSetCurrent
                | Call::cuDeviceGet
                | Call::cuDeviceGetCount
                | Call::cuDeviceGetAttribute
                | Call::cuThreadExchangeStreamCaptureMode
        );
        let current = self.threads[self.thread].current;
        match current.and_then(|ctx| self.ctxs[ctx].lost) {
            Some(code) if !local => fail(code),
            _ => Ok(()),
        }
    }

    /// Makes every later call on the context return `code`.
    pub(super) fn lose(&mut self, ctx: usize, code: CUresult) {
        if let Some(ctx) = self.ctxs.get_mut(ctx) {
            ctx.lost = Some(code);
            self.any_lost = true;
        }
    }

    /// [`lose`](State::lose) for the calling thread's context, or, without one, for all live contexts.
    fn lose_current_context(&mut self, code: CUresult) {
        match self.threads[self.thread].current {
            Some(ctx) => self.lose(ctx, code),
            None => {
                for ctx in 0..self.ctxs.len() {
                    if self.ctxs[ctx].alive {
                        self.lose(ctx, code);
                    }
                }
            }
        }
    }

    /// Records an error of the queue's work that breaks its context: every later call on the context returns it.
    pub(super) fn fault(&mut self, queue: u32) {
        if self.config.sticky_errors {
            let ctx = self.queues[queue as usize].ctx;
            self.lose(ctx, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }

    pub(super) fn plan(&mut self, plan: FailPlan) {
        self.plans.push(plan);
    }

    pub(super) fn clear_plans(&mut self) -> usize {
        std::mem::take(&mut self.plans).len()
    }

    pub(super) fn logging(&self) -> bool {
        self.log.is_some()
    }

    pub(super) fn set_logging(&mut self, on: bool) {
        self.log = on.then(Vec::new);
    }

    pub(super) fn log(&mut self, call: Call, arguments: String, result: CUresult) {
        if let Some(log) = &mut self.log {
            log.push(LogEntry {
                call: call.name(),
                arguments,
                thread: self.threads[self.thread].id,
                result,
            });
        }
    }

    pub(super) fn take_log(&mut self) -> Vec<LogEntry> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn defer(&mut self, callback: Callback) {
        self.callbacks.push(callback);
    }

    pub(super) fn take_callbacks(&mut self) -> Vec<Callback> {
        std::mem::take(&mut self.callbacks)
    }

    pub(super) fn report(&mut self, report: Report) {
        self.report_count += 1;
        if self.reports.len() < MAX_REPORTS {
            self.reports.push(report);
        }
    }

    /// Reports a broken rule of the current call.
    pub(super) fn misuse(&mut self, rule: &'static str, value: u64) {
        let call = self.now.name();
        self.report(Report::Misuse { call, rule, value });
    }

    /// Reports the use of a destroyed or invalid handle.
    pub(super) fn dead(&mut self, object: &'static str, value: u64, existed: bool) {
        let call = self.now.name();
        self.report(match existed {
            true => Report::Destroyed {
                call,
                object,
                value,
            },
            false => Report::Unknown {
                call,
                object,
                value,
            },
        });
    }

    pub(super) fn reports(&self) -> &[Report] {
        &self.reports
    }

    pub(super) fn take_reports(&mut self) -> Vec<Report> {
        self.report_count = 0;
        std::mem::take(&mut self.reports)
    }

    pub(super) fn set_label(&mut self, label: &str) {
        self.enter_thread();
        let id = match self.label_ids.get(label) {
            Some(&id) => id,
            None if label.is_empty() => 0,
            None => {
                let id = self.labels.len() as u32;
                self.labels.push(label.to_owned());
                self.label_ids.insert(label.to_owned(), id);
                id
            }
        };
        self.threads[self.thread].label = id;
    }

    pub(super) fn site(&self, entry: &Entry) -> Site {
        Site {
            kind: entry.kind,
            stream: entry.stream,
            sequence: entry.position,
            node: entry.node,
            address: entry.address,
            bytes: entry.bytes,
            label: self
                .labels
                .get(entry.label as usize)
                .cloned()
                .unwrap_or_default(),
        }
    }

    /// The current context of the calling thread.
    pub(super) fn current(&mut self) -> R<usize> {
        match self.threads[self.thread].current {
            Some(ctx) => Ok(ctx),
            None => {
                let call = self.now.name();
                self.report(Report::WrongContext { call });
                fail(CUresult::CUDA_ERROR_INVALID_CONTEXT)
            }
        }
    }
}

impl Ctx {
    pub(super) fn new(device: usize) -> Ctx {
        Ctx {
            id: 0,
            device,
            retains: 0,
            alive: false,
            lost: None,
            legacy: None,
            per_thread: HashMap::new(),
            blocking: Vec::new(),
            peers: 0,
        }
    }
}
