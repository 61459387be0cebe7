//! The state of this process: forked children, process exit, stream captures, recordings, and tools.
//!
//! A forked child may not use its parent's driver state, and handlers that run while the process exits may run after
//! the driver has shut down. Fork and exit handlers set a flag, so that a check costs one load and no system call.

mod state;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock, RwLockReadGuard, RwLockWriteGuard};

use crate::locks::held::{Held, Locked, Mutex, RwLock};
use crate::locks::lock;
use state::{
    CAPTURES, EXITING, FORKED, LOOK_OUT, RECORDING, RECORDS, SAMPLES, TOOL, change, now_bits,
};
pub(crate) use state::{Now, State, follow};

/// True in a child forked after a driver was started in its parent.
#[inline]
pub(crate) fn is_forked_child() -> bool {
    now_bits() & FORKED != 0
}

#[inline]
pub(super) fn is_exiting() -> bool {
    now_bits() & EXITING != 0
}

/// True once destructors must not call the driver any more.
#[inline]
pub(crate) fn is_unavailable() -> bool {
    now_bits() & (FORKED | EXITING) != 0
}

/// True while none of the conditions tracked by this module holds.
#[inline]
pub(crate) fn is_normal() -> bool {
    now_bits() == 0
}

/// True while at most a recording or a tool keeps calls from their caches.
#[inline]
pub(crate) fn is_unwatched() -> bool {
    now_bits() & LOOK_OUT == 0
}

/// True while a recording or a tool observes blocks.
#[inline(always)]
pub(crate) fn is_recording() -> bool {
    now_bits() & (RECORDS | TOOL) != 0
}

/// True once a tool observes blocks as well.
#[inline(always)]
pub(crate) fn has_tool() -> bool {
    now_bits() & TOOL != 0
}

/// Marks that a tool observes blocks from here on.
pub(crate) fn set_tool() {
    change(TOOL, 0);
}

/// Marks the beginning of a recording, with or without stacks.
pub(crate) fn begin_recording(stacks: bool) {
    change(RECORDS | if stacks { SAMPLES } else { 0 }, 0);
}

/// Marks that no recording is running any more.
pub(crate) fn end_recording() {
    change(0, RECORDING);
}

/// The number of captures in the process that calls watch for.
static WATCHED: Mutex<usize> = Mutex::new(0);
/// Whether there ever was a capture.
static CAPTURED: AtomicBool = AtomicBool::new(false);

/// Adds a known capture: until it is over, each call has to query its stream.
pub(crate) fn watch() {
    CAPTURED.store(true, Ordering::Relaxed);
    let mut watched = WATCHED.lock();
    *watched += 1;
    if *watched == 1 {
        change(CAPTURES, 0);
    }
}

/// Removes captures that are over, or no longer watched.
pub(crate) fn unwatch(captures: usize) {
    let mut watched = WATCHED.lock();
    let before = *watched;
    *watched = watched.saturating_sub(captures);
    if before > 0 && *watched == 0 {
        change(0, CAPTURES);
    }
}

/// True while a known capture is not over.
pub(crate) fn is_watching() -> bool {
    now_bits() & CAPTURES != 0
}

/// Whether any stream was captured in this process: its owner may capture again at any time.
#[inline]
pub(crate) fn has_captured() -> bool {
    CAPTURED.load(Ordering::Relaxed)
}

/// Work deferred because of a capture: one function per kind of work, and whether there is anything for it to do.
pub(crate) struct Postponed {
    work: OnceLock<fn()>,
    waits: AtomicBool,
}

/// Allocators waiting to be closed.
pub(crate) static ALLOCATORS: Postponed = Postponed::new();
/// Blocks of driver pools waiting to be freed.
pub(crate) static BLOCKS: Postponed = Postponed::new();

impl Postponed {
    const fn new() -> Postponed {
        Postponed {
            work: OnceLock::new(),
            waits: AtomicBool::new(false),
        }
    }

    /// Lets a later call, made after the capture has ended, run `work`.
    pub(crate) fn postpone(&self, work: fn()) {
        self.work.get_or_init(|| work);
        self.waits.store(true, Ordering::Release);
    }

    /// Whether no work is deferred.
    pub(crate) fn nothing_waits(&self) {
        self.waits.store(false, Ordering::Release);
    }

    fn run_postponed(&self) {
        if self.waits.load(Ordering::Acquire)
            && !is_unavailable()
            && let Some(work) = self.work.get()
        {
            work();
        }
    }
}

/// Runs deferred work, if there is any.
pub(crate) fn do_postponed() {
    ALLOCATORS.run_postponed();
    BLOCKS.run_postponed();
}

/// Returns an empty value for a forked child, in place of data behind a lock that a thread which does not exist there
/// may hold. The value is never freed, so it can have any lifetime.
#[cold]
fn nothing<'a, T: Default>() -> &'a T {
    Box::leak(Box::default())
}

/// Locks a mutex; for callers that cannot return [`ForkedChild`](crate::Error::ForkedChild).
#[inline]
pub(crate) fn lock<T: Default>(mutex: &Mutex<T>) -> Locked<'_, T> {
    let mutex = if is_forked_child() { nothing() } else { mutex };
    mutex.lock()
}

/// Like [`lock`], for a lock of the hot path.
#[inline(always)]
pub(crate) fn hot_lock<T: Default>(lock: &lock::Lock<T>) -> lock::Held<'_, T> {
    let lock = if is_forked_child() { nothing() } else { lock };
    lock.lock()
}

#[inline]
pub(crate) fn read<T: Default>(lock: &RwLock<T>) -> Held<RwLockReadGuard<'_, T>> {
    let lock = if is_forked_child() { nothing() } else { lock };
    lock.read()
}

#[inline]
pub(crate) fn write<T: Default>(lock: &RwLock<T>) -> Held<RwLockWriteGuard<'_, T>> {
    let lock = if is_forked_child() { nothing() } else { lock };
    lock.write()
}

/// Registers the fork handler, once per process; called just before the first `cuInit`.
pub(super) fn watch_forks() {
    static ONCE: Once = Once::new();
    let mut registered = true;
    ONCE.call_once(|| registered = imp::register_fork_handler());
    // Not inside `call_once`: the logger may load a driver.
    if !registered {
        log::warn!("cannot register a fork handler: forked children are not detected");
    }
}

/// Registers a function to be called when the process exits.
pub(crate) fn at_exit(handler: extern "C" fn()) {
    if !imp::register_at_exit(handler) {
        log::warn!("{NO_EXIT_HANDLER}");
    }
}

const NO_EXIT_HANDLER: &str = "cannot register an exit handler: drops at exit may call the driver";

/// Registers the exit handler; called after a successful `cuInit`, so that it runs before the handlers that the driver
/// registers there (exit handlers run in reverse order).
pub(super) fn watch_exit(from_library: bool) {
    static FUNCTIONS: Once = Once::new();
    static LIBRARY: Once = Once::new();
    let once = if from_library { &LIBRARY } else { &FUNCTIONS };
    let mut registered = true;
    once.call_once(|| registered = imp::register_exit_handler());
    if !registered {
        log::warn!("{NO_EXIT_HANDLER}");
    }
}

#[cfg(any(unix, windows))]
mod imp {
    #[cfg(unix)]
    use super::FORKED;
    use super::{EXITING, change};
    use std::ffi::c_int;

    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
        #[cfg(unix)]
        fn pthread_atfork(
            prepare: Option<extern "C" fn()>,
            parent: Option<extern "C" fn()>,
            child: Option<extern "C" fn()>,
        ) -> c_int;
    }

    extern "C" fn on_exit() {
        change(EXITING, 0);
    }

    pub(super) fn register_exit_handler() -> bool {
        register_at_exit(on_exit)
    }

    pub(super) fn register_at_exit(handler: extern "C" fn()) -> bool {
        // SAFETY: the handler is a function of this library, which stays loaded while the process lives.
        unsafe { atexit(handler) == 0 }
    }

    #[cfg(unix)]
    extern "C" fn in_child() {
        change(FORKED, 0);
    }

    #[cfg(unix)]
    pub(super) fn register_fork_handler() -> bool {
        // SAFETY: the handler is async-signal-safe: it only changes statics and takes no lock.
        unsafe { pthread_atfork(None, None, Some(in_child)) == 0 }
    }

    #[cfg(not(unix))]
    pub(super) fn register_fork_handler() -> bool {
        true
    }
}

#[cfg(not(any(unix, windows)))]
mod imp {
    pub(super) fn register_exit_handler() -> bool {
        true
    }
    pub(super) fn register_at_exit(_: extern "C" fn()) -> bool {
        true
    }
    pub(super) fn register_fork_handler() -> bool {
        true
    }
}

#[cfg(all(test, unix, feature = "sim"))]
pub(crate) use child::child_output;

#[cfg(all(test, unix, feature = "sim"))]
mod child {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    unsafe extern "C" {
        fn fork() -> i32;
        fn alarm(seconds: u32) -> u32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }

    /// Runs a function in a forked child, with the locks that the caller holds; returns whether it completed with
    /// `true`. An alarm ends a child that waits for a lock.
    pub(crate) fn child_output(run: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child uses only its own memory and locks, and ends here.
        let pid = unsafe { fork() };
        if pid == 0 {
            // SAFETY: as above.
            unsafe { alarm(30) };
            let good = catch_unwind(AssertUnwindSafe(run)).unwrap_or(false);
            // SAFETY: as above.
            unsafe { _exit(i32::from(!good)) }
        }
        let mut status = -1;
        // SAFETY: a child of this process, and a local.
        unsafe { waitpid(pid, &mut status, 0) == pid && status == 0 }
    }
}
