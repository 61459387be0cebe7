//! Actions of another thread during a driver call of the allocator.

use std::cell::RefCell;
use std::thread::LocalKey;

use cualloc::sim::Simulator;

/// A driver function, and the action during its next call on this thread.
type Next = RefCell<Option<(&'static str, Box<dyn FnOnce()>)>>;

thread_local! {
    static BEFORE: Next = const { RefCell::new(None) };
    static AFTER: Next = const { RefCell::new(None) };
}

fn play(at: &'static LocalKey<Next>, call: &str) {
    match at.take() {
        Some((name, work)) if name == call => work(),
        other => at.set(other),
    }
}

/// Makes room for interludes in a simulator's calls.
pub fn install(sim: &Simulator) {
    sim.before(|moment| play(&BEFORE, moment.call));
    sim.after(|moment| play(&AFTER, moment.call));
}

/// Runs `work` once, after the driver has executed the next call with this name on this thread and before the allocator
/// gets the result. On a rig [with interludes](super::Rig::with_interludes).
pub fn after(call: &'static str, work: impl FnOnce() + 'static) {
    AFTER.set(Some((call, Box::new(work))));
}

/// [`after`], but right before the driver gets the call.
pub fn before(call: &'static str, work: impl FnOnce() + 'static) {
    BEFORE.set(Some((call, Box::new(work))));
}

/// Whether an action has not run yet.
pub fn is_due() -> bool {
    AFTER.with_borrow(Option::is_some) || BEFORE.with_borrow(Option::is_some)
}

/// Removes the actions that have not run yet.
pub fn clear() {
    AFTER.take();
    BEFORE.take();
}
