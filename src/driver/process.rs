//! What happened to this process: forked children, process exit, stream captures, recordings, and tools.
//!
//! A forked child may not use its parent's driver state, and handlers that run while the process
//! exits may run after the driver has shut down. Both are noticed by handlers that set a flag, so
//! that asking costs one load and no system call.

mod state;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock, RwLockReadGuard, RwLockWriteGuard};

use crate::locks::held::{Held, Locked, Mutex, RwLock};
use state::{
    CAPTURES, EXITING, FORKED, LOOK_OUT, RECORDING, RECORDS, SAMPLES, TOOL, change, now_bits,
};
pub(crate) use state::{Now, State, follow};

/// True in a child forked after a driver was started in its parent.
#[inline]
pub(crate) fn is_forked_child() -> bool {
    now_bits() & FORKED != 0
}

/// True once exit handlers run.
#[inline]
pub(super) fn is_exiting() -> bool {
    now_bits() & EXITING != 0
}

/// True where a drop must not call the driver any more.
#[inline]
pub(crate) fn is_gone() -> bool {
    now_bits() & (FORKED | EXITING) != 0
}

/// True as long as nothing of what this module tells apart has happened.
#[inline]
pub(crate) fn is_quiet() -> bool {
    now_bits() == 0
}

/// True as long as nothing but a recording or a tool keeps calls from their caches.
#[inline]
pub(crate) fn is_unwatched() -> bool {
    now_bits() & LOOK_OUT == 0
}

/// True while somebody is told what blocks do: a recording, or a tool.
#[inline(always)]
pub(crate) fn is_recording() -> bool {
    now_bits() & (RECORDS | TOOL) != 0
}

/// True once a tool is told, too.
#[inline(always)]
pub(crate) fn has_tool() -> bool {
    now_bits() & TOOL != 0
}

/// A tool is told from here on.
pub(crate) fn set_tool() {
    change(TOOL, 0);
}

/// A recording begins, with stacks or without.
pub(crate) fn begin_recording(stacks: bool) {
    change(RECORDS | if stacks { SAMPLES } else { 0 }, 0);
}

/// No recording runs any more.
pub(crate) fn end_recording() {
    change(0, RECORDING);
}

/// Captures that calls look out for, in all of the process.
static WATCHED: Mutex<usize> = Mutex::new(0);
/// Whether there ever was one.
static CAPTURED: AtomicBool = AtomicBool::new(false);

/// One more capture is known: until it is over each call has to ask about its stream.
pub(crate) fn watch() {
    CAPTURED.store(true, Ordering::Relaxed);
    let mut watched = WATCHED.lock();
    *watched += 1;
    if *watched == 1 {
        change(CAPTURES, 0);
    }
}

/// So many captures are over, or not looked out for any more.
pub(crate) fn unwatch(captures: usize) {
    let mut watched = WATCHED.lock();
    let before = *watched;
    *watched = watched.saturating_sub(captures);
    if before > 0 && *watched == 0 {
        change(0, CAPTURES);
    }
}

/// True while a capture is known that is not over.
pub(crate) fn is_watching() -> bool {
    now_bits() & CAPTURES != 0
}

/// Whether streams were captured in this process: their owners may do so again at any time.
#[inline]
pub(crate) fn has_captured() -> bool {
    CAPTURED.load(Ordering::Relaxed)
}

/// What could not be done while something captured: one piece of work of its kind in the process, and whether
/// there is anything for it to do.
pub(crate) struct Postponed {
    work: OnceLock<fn()>,
    waits: AtomicBool,
}

/// Allocators that are to be closed.
pub(crate) static ALLOCATORS: Postponed = Postponed::new();
/// Blocks of the driver's pools that are to be freed.
pub(crate) static BLOCKS: Postponed = Postponed::new();

impl Postponed {
    const fn new() -> Postponed {
        Postponed {
            work: OnceLock::new(),
            waits: AtomicBool::new(false),
        }
    }

    /// Has `work` done by a later call that may find the capture ended.
    pub(crate) fn postpone(&self, work: fn()) {
        self.work.get_or_init(|| work);
        self.waits.store(true, Ordering::Release);
    }

    /// Nothing is postponed any more.
    pub(crate) fn nothing_waits(&self) {
        self.waits.store(false, Ordering::Release);
    }

    fn make_up(&self) {
        if self.waits.load(Ordering::Acquire)
            && !is_gone()
            && let Some(work) = self.work.get()
        {
            work();
        }
    }
}

/// Does what was postponed, if there is anything.
pub(crate) fn do_postponed() {
    ALLOCATORS.make_up();
    BLOCKS.make_up();
}

/// What a forked child finds instead of what is behind a lock, which a thread may hold that does not
/// exist there: something empty. It is never freed, so callers need not say how long they keep it.
#[cold]
fn nothing<'a, T: Default>() -> &'a T {
    Box::leak(Box::default())
}

/// Locks; for calls that cannot say [`ForkedChild`](crate::Error::ForkedChild).
#[inline]
pub(crate) fn lock<T: Default>(mutex: &Mutex<T>) -> Locked<'_, T> {
    let mutex = if is_forked_child() { nothing() } else { mutex };
    mutex.lock()
}

/// As [`lock`].
#[inline]
pub(crate) fn read<T: Default>(lock: &RwLock<T>) -> Held<RwLockReadGuard<'_, T>> {
    let lock = if is_forked_child() { nothing() } else { lock };
    lock.read()
}

/// As [`lock`].
#[inline]
pub(crate) fn write<T: Default>(lock: &RwLock<T>) -> Held<RwLockWriteGuard<'_, T>> {
    let lock = if is_forked_child() { nothing() } else { lock };
    lock.write()
}

/// Registers the fork handler, once per process; call it just before the first `cuInit`.
pub(super) fn watch_forks() {
    static ONCE: Once = Once::new();
    let mut registered = true;
    ONCE.call_once(|| registered = imp::register_fork_handler());
    // Not in there: the logger may load a driver.
    if !registered {
        log::warn!("cannot register a fork handler: forked children are not detected");
    }
}

/// Has a function called when the process exits.
pub(crate) fn at_exit(handler: extern "C" fn()) {
    if !imp::register_at_exit(handler) {
        log::warn!("{NO_EXIT_HANDLER}");
    }
}

const NO_EXIT_HANDLER: &str = "cannot register an exit handler: drops at exit may call the driver";

/// Registers the exit handler; call it after a successful `cuInit`, so that it runs before the
/// handlers which the driver registered in there (they run in reverse order).
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
        // SAFETY: the handler is a function of this library, which is there as long as the process.
        unsafe { atexit(handler) == 0 }
    }

    #[cfg(unix)]
    extern "C" fn in_child() {
        change(FORKED, 0);
    }

    #[cfg(unix)]
    pub(super) fn register_fork_handler() -> bool {
        // SAFETY: the handler is async-signal-safe: it only changes statics, and takes no lock.
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
pub(crate) use child::child_says;

#[cfg(all(test, unix, feature = "sim"))]
mod child {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    unsafe extern "C" {
        fn fork() -> i32;
        fn alarm(seconds: u32) -> u32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }

    /// Runs in a forked child, as it is with the locks that the caller holds; whether it came to an end, and
    /// to the right one. One that waits for a lock is ended by an alarm.
    pub(crate) fn child_says(run: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child uses memory and locks of its own alone, and ends here.
        let pid = unsafe { fork() };
        if pid == 0 {
            // SAFETY: as above.
            unsafe { alarm(30) };
            let good = catch_unwind(AssertUnwindSafe(run)).unwrap_or(false);
            // SAFETY: as above.
            unsafe { _exit(i32::from(!good)) }
        }
        let mut status = -1;
        // SAFETY: our child, and a local.
        unsafe { waitpid(pid, &mut status, 0) == pid && status == 0 }
    }
}
