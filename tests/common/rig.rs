//! The driver under test: the simulator, or with `CUALLOC_TEST_DRIVER=cuda` the real one.

use std::ffi::{CStr, c_void};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy, Profile, Waits};
use cualloc::driver::{Context, Driver, Module, Stream, sys};
use cualloc::error::OutOfMemory;
use cualloc::sim::{Mode, SimConfig, Simulator};

/// Name of the variable that picks the driver: `sim` (default) or `cuda`.
pub const DRIVER_VARIABLE: &str = "CUALLOC_TEST_DRIVER";

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;
pub const GIB: usize = 1 << 30;

/// Whether tests run on a GPU.
pub fn on_cuda() -> bool {
    match std::env::var(DRIVER_VARIABLE).as_deref() {
        Ok("cuda") => true,
        Ok("sim") | Err(_) => false,
        Ok(other) => panic!("{DRIVER_VARIABLE}={other}: expected sim or cuda"),
    }
}

/// Name of the variable that picks one policy where a test would run with each: `packed` or `classic`.
pub const POLICY_VARIABLE: &str = "CUALLOC_TEST_POLICY";

fn policies() -> Vec<Policy> {
    match std::env::var(POLICY_VARIABLE).as_deref() {
        Ok("packed") => vec![Policy::Packed],
        Ok("classic") => vec![Policy::Classic],
        Ok(other) => panic!("{POLICY_VARIABLE}={other}: expected packed or classic"),
        Err(_) => vec![Policy::Packed, Policy::Classic],
    }
}

/// Runs a test once per segment policy, on a driver of its own each time.
pub fn each(test: impl Fn(&Rig)) {
    for policy in policies() {
        only(policy, &test);
    }
}

/// [`each`] on the simulator; on a GPU the test says that it skips.
pub fn each_simulated(test: impl Fn(&Rig, &Simulator)) {
    policies()
        .into_iter()
        .for_each(|policy| only_simulated(policy, &test));
}

/// [`only`] on the simulator; on a GPU the test says that it skips.
pub fn only_simulated(policy: Policy, test: impl Fn(&Rig, &Simulator)) {
    only(policy, |rig| {
        if let Some(sim) = rig.sim() {
            test(rig, sim);
        }
    });
}

/// [`each_simulated`] on a simulator with given properties.
pub fn each_simulated_on(config: SimConfig, test: impl Fn(&Rig, &Simulator)) {
    for policy in policies() {
        only_simulated_on(policy, config.clone(), &test);
    }
}

/// [`only_simulated`] on a simulator with given properties.
pub fn only_simulated_on(policy: Policy, config: SimConfig, test: impl Fn(&Rig, &Simulator)) {
    if on_cuda() {
        return eprintln!("SKIPPED on cuda: needs the simulator");
    }
    only_on(policy, config, |rig| {
        test(rig, rig.maybe_sim().expect("the simulator"));
    });
}

/// Calls of the driver in `act`, including queries that are not counted elsewhere.
pub fn calls_of(sim: &Simulator, act: impl FnOnce()) -> u64 {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    sim.before(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    act();
    sim.clear_hooks();
    calls.load(Ordering::Relaxed) as u64
}

/// The report of an error that must be an out-of-memory error.
pub fn out_of_memory(error: Error) -> OutOfMemory {
    match error {
        Error::OutOfMemory(picture) => *picture,
        other => panic!("{other:?}"),
    }
}

/// [`each_simulated`] with [interludes](super::interlude).
pub fn each_with_interludes(test: impl Fn(&Rig, &Simulator)) {
    each_simulated(|rig, sim| {
        super::interlude::install(sim);
        test(rig, sim);
    });
}

/// Runs a test with one segment policy. At its end nothing may have been reported.
pub fn only(policy: Policy, test: impl Fn(&Rig)) {
    only_on(policy, SimConfig::with_devices(1, 8 << 30), test);
}

/// [`only`] on a simulator with given properties.
pub fn only_on(policy: Policy, config: SimConfig, test: impl Fn(&Rig)) {
    let rig = Rig::new(policy, config);
    eprintln!("policy {policy:?}");
    test(&rig);
    rig.assert_clean();
}

/// A logger that fails tests whose lines come under a lock: a program's logger may call the library again.
struct Unlocked;

/// The checks of a rig, for programs with their own loggers.
pub fn assert_unlocked(record: &log::Record<'_>) {
    let locks = cualloc::sim::locks_held();
    assert_eq!(locks, 0, "a line is logged under a lock: {}", record.args());
}

impl log::Log for Unlocked {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        assert_unlocked(record);
    }

    fn flush(&self) {}
}

/// The driver under test, and the simulator if it is that. Its counters count the calls of this rig alone.
pub fn driver_under_test(config: SimConfig) -> (Driver, Option<Simulator>) {
    if on_cuda() {
        let shared = Driver::load().expect("CUALLOC_TEST_DRIVER=cuda needs a driver");
        let library = shared.library().expect("a loaded driver has a library");
        // SAFETY: the driver's own library.
        (unsafe { Driver::open(library) }.unwrap(), None)
    } else {
        if log::set_logger(&Unlocked).is_ok() {
            log::set_max_level(log::LevelFilter::Trace);
        }
        let simulator = Simulator::new(config).unwrap();
        (simulator.driver().unwrap(), Some(simulator))
    }
}

/// A driver, a context and a policy to test with.
pub struct Rig {
    pub policy: Policy,
    pub driver: Driver,
    pub context: Context,
    simulator: Option<Simulator>,
    holds: AtomicUsize,
}

/// Settings with which a test knows exactly what is held: memory grows within 1 %, in small handles.
pub fn dense() -> Config {
    Config::new().profile(Profile::Dense).waits(Waits::Scarce)
}

impl Rig {
    /// The driver under test. Its counters count the calls of this rig alone.
    pub fn new(policy: Policy, config: SimConfig) -> Rig {
        let (driver, simulator) = driver_under_test(config);
        Rig::of(policy, driver, simulator)
    }

    /// A rig on the simulator with [interludes](super::interlude); none, with a word about it, on a GPU.
    pub fn with_interludes(policy: Policy) -> Option<Rig> {
        let rig = Rig::new(policy, SimConfig::with_devices(1, 8 << 30));
        super::interlude::install(rig.sim()?);
        Some(rig)
    }

    /// A rig on the simulator, some of whose functions are replaced by ones that call them; none, with a
    /// word about it, on a GPU.
    pub fn behind(
        policy: Policy,
        install: fn(sys::CuFunctions) -> sys::CuFunctions,
    ) -> Option<Rig> {
        Rig::behind_on(policy, SimConfig::with_devices(1, 8 << 30), install)
    }

    /// [`behind`](Self::behind) on a simulator with given properties.
    pub fn behind_on(
        policy: Policy,
        config: SimConfig,
        install: fn(sys::CuFunctions) -> sys::CuFunctions,
    ) -> Option<Rig> {
        if on_cuda() {
            eprintln!("SKIPPED on cuda: needs the simulator");
            return None;
        }
        let simulator = Simulator::new(config).unwrap();
        let functions = install(simulator.functions());
        // SAFETY: the simulator's functions, some of them behind ones of the same types.
        let driver = unsafe { Driver::from_functions(functions) }.unwrap();
        Some(Rig::of(policy, driver, Some(simulator)))
    }

    fn of(policy: Policy, driver: Driver, simulator: Option<Simulator>) -> Rig {
        let context = driver.context(0).unwrap();
        Rig {
            policy,
            driver,
            context,
            simulator,
            holds: AtomicUsize::new(0),
        }
    }

    pub fn packed(&self) -> bool {
        self.policy == Policy::Packed
    }

    /// The simulator; without one the test says that it skips, and returns.
    pub fn sim(&self) -> Option<&Simulator> {
        if self.simulator.is_none() {
            eprintln!("SKIPPED on cuda: needs the simulator");
        }
        self.simulator.as_ref()
    }

    /// The simulator, if there is one, for checks that a test makes on top.
    pub fn maybe_sim(&self) -> Option<&Simulator> {
        self.simulator.as_ref()
    }

    /// How work completes on the simulator; nothing on a GPU.
    pub fn set_mode(&self, mode: Mode) {
        self.maybe_sim().inspect(|sim| sim.set_mode(mode));
    }

    /// Lets the simulator complete what a row further is due; nothing on a GPU.
    pub fn advance_row(&self) {
        self.maybe_sim().inspect(|sim| sim.advance_row());
    }

    /// The simulated device has allocated exactly this number of bytes.
    pub fn assert_held(&self, bytes: u64) {
        let held = self.driver_held().unwrap_or(bytes);
        assert_eq!(held, bytes, "the driver has given {held} bytes");
    }

    pub fn allocator(&self) -> Allocator {
        self.allocator_with(Config::new())
    }

    /// An allocator with the rig's policy.
    pub fn allocator_with(&self, config: Config) -> Allocator {
        Allocator::with_config(&self.context, config.policy(self.policy)).unwrap()
    }

    pub fn limited(&self, bytes: usize) -> Allocator {
        self.allocator_with(Config::new().limit(Some(bytes as u64)))
    }

    /// An allocator that is [closed](Self::close) at the end of its scope, when the blocks of the test were dropped.
    pub fn checked(&self) -> Checked<'_> {
        self.checked_with(Config::new())
    }

    /// A [checked](Self::checked) allocator and streams to use it with.
    pub fn scene<const N: usize>(&self) -> (Checked<'_>, [Stream; N]) {
        self.scene_with(Config::new())
    }

    /// A [scene](Self::scene) below a limit.
    pub fn scene_limit<const N: usize>(&self, bytes: usize) -> (Checked<'_>, [Stream; N]) {
        (self.checked_limit(bytes), self.streams())
    }

    /// A [scene](Self::scene) with given settings.
    pub fn scene_with<const N: usize>(&self, config: Config) -> (Checked<'_>, [Stream; N]) {
        (self.checked_with(config), self.streams())
    }

    pub fn checked_limit(&self, bytes: usize) -> Checked<'_> {
        self.checked_with(Config::new().limit(Some(bytes as u64)))
    }

    pub fn checked_with(&self, config: Config) -> Checked<'_> {
        let allocator = self.allocator_with(config);
        Checked {
            rig: self,
            allocator,
            loses: AtomicBool::new(false),
        }
    }

    pub fn stream(&self) -> Stream {
        Stream::new(&self.context).unwrap()
    }

    pub fn streams<const N: usize>(&self) -> [Stream; N] {
        std::array::from_fn(|_| self.stream())
    }

    /// Calls of one driver function so far.
    pub fn calls(&self, name: &str) -> u64 {
        self.driver.calls().get(name)
    }

    /// Driver calls so far that take memory or give it back.
    pub fn memory_calls(&self) -> u64 {
        [
            "cuMemAlloc_v2",
            "cuMemFree_v2",
            "cuMemAddressReserve",
            "cuMemAddressFree",
            "cuMemCreate",
            "cuMemRelease",
            "cuMemMap",
            "cuMemUnmap",
            "cuMemSetAccess",
        ]
        .iter()
        .map(|name| self.calls(name))
        .sum()
    }

    /// Bytes of physical memory that the simulated device has given out.
    pub fn driver_held(&self) -> Option<u64> {
        self.simulator.as_ref().map(|sim| sim.memory_in_use(0))
    }

    /// Waits until the simulated device has got everything back: memory that cannot be named any more is released by
    /// whichever thread of the process gets to it. False if that takes very long.
    pub fn all_given_back(&self) -> bool {
        let begun = std::time::Instant::now();
        while self.driver_held().is_some_and(|held| held > 0) {
            if begun.elapsed() > std::time::Duration::from_secs(60) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Keeps a stream from going on until the result is released or dropped. On a GPU a host wait
    /// for the stream would never end while it is held; [`busy`](Self::busy) is for those.
    ///
    /// On the simulator work of all other streams then completes only by [`settle`](Self::settle),
    /// waits and the test's own choices.
    pub fn hold<'a>(&'a self, stream: &Stream) -> Hold<'a> {
        let gate = self.simulator.is_none().then(|| {
            let gate = Arc::new(Gate::default());
            let data = Arc::into_raw(Arc::clone(&gate)) as *mut c_void;
            let entered = self.context.enter().unwrap();
            // SAFETY: the stream is alive, the gate is counted for the callback.
            unsafe { entered.launch_host(stream.raw(), pass_gate, data) }.unwrap();
            gate
        });
        self.held(stream, gate)
    }

    /// Gives a stream work that takes a while and ends by itself (on the simulator: when a call
    /// waits for it, or when the result is released or dropped).
    pub fn busy<'a>(&'a self, stream: &Stream) -> Hold<'a> {
        self.busy_for(stream, 20_000_000)
    }

    /// [`busy`](Self::busy) for this number of nanoseconds on a GPU.
    pub fn busy_for<'a>(&'a self, stream: &Stream, nanos: u64) -> Hold<'a> {
        if self.simulator.is_none() {
            self.spin(stream, nanos);
        }
        self.held(stream, None)
    }

    fn held<'a>(&'a self, stream: &Stream, gate: Option<Arc<Gate>>) -> Hold<'a> {
        if let Some(sim) = &self.simulator {
            // The per-thread stream is one of the current context.
            let _entered = self.context.enter().unwrap();
            sim.set_mode(Mode::Manual);
            sim.busy(stream.raw(), 1_000_000).unwrap();
            self.holds.fetch_add(1, Ordering::Relaxed);
        }
        Hold {
            rig: self,
            stream: stream.id().unwrap(),
            gate,
            open: true,
        }
    }

    /// The kernels that the simulator knows, too.
    pub fn words(&self) -> Module {
        self.words_in(&self.context)
    }

    /// [`words`](Self::words) in another context.
    pub fn words_in(&self, context: &Context) -> Module {
        let text = concat!(include_str!("../../src/driver/words.ptx"), "\0");
        let text = CStr::from_bytes_with_nul(text.as_bytes()).unwrap();
        Module::from_ptx(context, text).unwrap()
    }

    fn spin(&self, stream: &Stream, nanos: u64) {
        let entered = self.context.enter().unwrap();
        let module = self.words();
        let kernel = module.function(c"cualloc_spin").unwrap();
        let mut nanos = nanos;
        let mut parameters = [(&raw mut nanos).cast::<c_void>()];
        // SAFETY: the kernel takes one 64-bit number; the module outlives the launch, see below.
        unsafe {
            entered.launch(
                &kernel,
                [1, 1, 1],
                [1, 1, 1],
                0,
                stream.raw(),
                &mut parameters,
            )
        }
        .unwrap();
        // Unloading would wait for the kernel.
        std::mem::forget(kernel);
        std::mem::forget(module);
    }

    /// Completes everything that was submitted to a stream; it must not be held, nor wait for one
    /// that is.
    pub fn settle(&self, stream: &Stream) {
        match &self.simulator {
            Some(sim) => {
                sim.complete_stream(stream.id().unwrap(), usize::MAX);
            }
            None => stream.synchronize().unwrap(),
        }
        assert!(stream.is_complete().unwrap(), "the stream is held up");
    }

    /// Fills memory with a word, in the order of a stream.
    pub fn stamp(&self, ptr: u64, bytes: usize, word: u32, stream: &Stream) {
        self.stamp_in(&self.context, ptr, bytes, word, stream);
    }

    /// [`stamp`](Self::stamp) in another context.
    pub fn stamp_in(&self, context: &Context, ptr: u64, bytes: usize, word: u32, stream: &Stream) {
        let entered = context.enter().unwrap();
        // SAFETY: the test owns the memory; the stream is alive.
        unsafe { entered.memset_d32(ptr, word, bytes / 4, stream.raw()) }.unwrap();
    }

    /// Words of a range that are not `word`, in the order of a stream, which is waited for.
    pub fn mismatches(&self, ptr: u64, bytes: usize, word: u32, stream: &Stream) -> usize {
        let mut read = vec![0u32; bytes / 4];
        let entered = self.context.enter().unwrap();
        // SAFETY: the buffer is large enough and outlives the copy, which is waited for.
        unsafe { entered.copy_device_to_host(read.as_mut_ptr().cast(), ptr, bytes, stream.raw()) }
            .unwrap();
        stream.synchronize().unwrap();
        read.iter().filter(|found| **found != word).count()
    }

    /// Nothing was done that a GPU would punish.
    pub fn assert_clean(&self) {
        if let Some(sim) = &self.simulator {
            let reports = sim.reports();
            assert!(reports.is_empty(), "{reports:#?}");
        }
    }

    /// Closes an allocator that may have lost memory to calls that failed. Another thread reports the ends of graphs.
    pub fn end(&self, allocator: &Allocator) {
        allocator.check().unwrap();
        super::wait_until("graphs are gone", || match allocator.close() {
            Err(Error::InUse { what: "graph", .. }) => false,
            closed => {
                closed.unwrap();
                true
            }
        });
        allocator.check().unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
    }

    /// Closes an allocator, after which the driver holds nothing of it.
    pub fn close(&self, allocator: &Allocator) {
        self.end(allocator);
        self.assert_held(0);
    }
}

/// See [`Rig::checked`].
pub struct Checked<'a> {
    rig: &'a Rig,
    allocator: Allocator,
    loses: AtomicBool,
}

impl Checked<'_> {
    /// A call may have failed that leaves memory behind which cannot be given back.
    pub fn may_lose(&self) {
        self.loses.store(true, Ordering::Relaxed);
    }
}

impl Deref for Checked<'_> {
    type Target = Allocator;

    fn deref(&self) -> &Allocator {
        &self.allocator
    }
}

impl Drop for Checked<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            match self.loses.load(Ordering::Relaxed) {
                true => self.rig.end(&self.allocator),
                false => self.rig.close(&self.allocator),
            }
        }
    }
}

/// A stream that is held up.
pub struct Hold<'a> {
    rig: &'a Rig,
    stream: u64,
    gate: Option<Arc<Gate>>,
    open: bool,
}

impl Hold<'_> {
    /// Lets the stream continue.
    pub fn release(mut self) {
        self.let_go();
    }

    fn let_go(&mut self) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        if let Some(gate) = &self.gate {
            gate.open();
        }
        if let Some(sim) = &self.rig.simulator {
            sim.complete_stream(self.stream, usize::MAX);
            if self.rig.holds.fetch_sub(1, Ordering::Relaxed) == 1 {
                sim.set_mode(Mode::Instant);
            }
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }
}

/// Runs on a thread of the driver.
unsafe extern "C" fn pass_gate(data: *mut c_void) {
    // SAFETY: counted for this call by `hold`.
    let gate = unsafe { Arc::from_raw(data.cast_const().cast::<Gate>()) };
    let mut open = gate.0.lock().unwrap_or_else(PoisonError::into_inner);
    while !*open {
        open = gate.1.wait(open).unwrap_or_else(PoisonError::into_inner);
    }
}
