//! Test hooks before and after driver calls, without the simulator's lock.

use crate::driver::sys::CUresult;
use crate::locks::thread_id::ThreadId;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// How many simulators can live at a time; a further one waits until one is dropped.
pub(super) const SLOT_COUNT: usize = 32;

/// A call of the driver, as a hook sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moment {
    /// Name of the function.
    pub call: &'static str,
    /// How many calls there were since the first hook was set, with this one.
    pub number: u64,
    /// The calling thread, numbered as in [`LogEntry::thread`](super::LogEntry::thread).
    pub thread: u64,
    /// The result of the call; `None` before it.
    pub result: Option<CUresult>,
}

type Hook = Arc<dyn Fn(&Moment) + Send + Sync>;

#[derive(Clone, Default)]
pub(super) struct Hooks {
    pub(super) before: Option<Hook>,
    pub(super) after: Option<Hook>,
}

struct Place {
    any: AtomicBool,
    calls: AtomicU64,
    hooks: RwLock<Hooks>,
}

static PLACES: [Place; SLOT_COUNT] = [const {
    Place {
        any: AtomicBool::new(false),
        calls: AtomicU64::new(0),
        hooks: RwLock::new(Hooks {
            before: None,
            after: None,
        }),
    }
}; SLOT_COUNT];

thread_local! {
    /// Whether this thread is in a hook; calls made there run no hooks.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread runs the function of a user object.
    static CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Restores a thread's cell when dropped, also after a panic.
struct Restore<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Restore<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Runs the function of a user object. A real driver calls it on its own thread, and it must not call the driver.
pub(super) fn as_callback(run: impl FnOnce()) {
    let _restore = Restore(&CALLBACK, CALLBACK.replace(true));
    run();
}

/// Whether the calling thread is in such a function.
pub(super) fn is_callback() -> bool {
    CALLBACK.get()
}

/// Changes the hooks of a place.
pub(super) fn set(slot: usize, change: impl FnOnce(&mut Hooks)) {
    let place = &PLACES[slot];
    let mut hooks = place.hooks.write().unwrap_or_else(PoisonError::into_inner);
    change(&mut hooks);
    let any = hooks.before.is_some() || hooks.after.is_some();
    if !place.any.swap(any, Ordering::AcqRel) {
        place.calls.store(0, Ordering::Relaxed);
    }
}

/// A call between its hooks.
pub(super) struct HookedCall {
    hooks: Hooks,
    moment: Moment,
}

impl HookedCall {
    fn run(hook: Option<&Hook>, moment: &Moment) {
        if let Some(hook) = hook {
            let _restore = Restore(&INSIDE, INSIDE.replace(true));
            hook(moment);
        }
    }

    /// Ends the call.
    pub(super) fn end(mut self, result: CUresult) {
        self.moment.result = Some(result);
        HookedCall::run(self.hooks.after.as_ref(), &self.moment);
    }
}

/// Begins a call; `None` where no hook is set, or the call is a hook's own.
pub(super) fn begin(slot: usize, call: &'static str) -> Option<HookedCall> {
    let place = &PLACES[slot];
    if !place.any.load(Ordering::Acquire) || INSIDE.get() {
        return None;
    }
    let hooks = place.hooks.read().unwrap_or_else(PoisonError::into_inner);
    let between = HookedCall {
        hooks: hooks.clone(),
        moment: Moment {
            call,
            number: place.calls.fetch_add(1, Ordering::Relaxed) + 1,
            thread: ThreadId::current().number(),
            result: None,
        },
    };
    drop(hooks);
    HookedCall::run(between.hooks.before.as_ref(), &between.moment);
    Some(between)
}
