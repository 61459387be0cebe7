//! Relief hooks, which let the program free memory before a request fails.

use std::cell::Cell;
use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::foreign::guarded;
use crate::locks::held::Mutex;

thread_local! {
    /// Whether a hook runs on this thread.
    static RUNS: Cell<bool> = const { Cell::new(false) };
}

/// A hook that frees memory which the program can do without: for allocators, and for
/// [`Relief`](crate::resource::Relief) over any resource.
///
/// Hooks run in order of priority, then of larger estimated yield, then of addition. They run without any lock held, so
/// a hook may allocate, free, and add or remove hooks. Requests made by a hook run no hooks: they fail if memory is
/// short. A panic in a hook is logged and counts as nothing freed. Hooks are cheap to clone.
///
/// ```
/// use cualloc::allocator::ReliefHook;
/// let hook = ReliefHook::new("activations", |missing| missing / 2)
///     .priority(1)
///     .estimated_yield(64 << 20)
///     .overhead(1 << 20);
/// assert_eq!(hook.name(), "activations");
/// ```
#[derive(Clone)]
pub struct ReliefHook {
    name: Arc<str>,
    estimated_yield: u64,
    overhead: u64,
    priority: i32,
    run: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
}

impl ReliefHook {
    /// Creates a hook with a unique name. The function receives the number of missing bytes and returns an estimate of
    /// the bytes that it freed; the allocator checks for itself.
    pub fn new(
        name: impl Into<Arc<str>>,
        run: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> ReliefHook {
        ReliefHook {
            name: name.into(),
            estimated_yield: 0,
            overhead: 0,
            priority: 0,
            run: Arc::new(run),
        }
    }

    /// Sets the priority: lower runs earlier; 0 by default.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the bytes that the hook will probably free: among equal priorities, larger runs earlier.
    pub fn estimated_yield(mut self, bytes: u64) -> Self {
        self.estimated_yield = bytes;
        self
    }

    /// Sets the bytes that the hook needs while it runs. The hook is skipped where a budget has less left. Allocators
    /// have no budget and run it regardless; its requests may then fail.
    pub fn overhead(mut self, bytes: u64) -> Self {
        self.overhead = bytes;
        self
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the hook can run within this number of bytes.
    pub(crate) fn runs_in(&self, bytes: u64) -> bool {
        self.overhead <= bytes
    }

    /// Asks the hook to free `missing` bytes, and returns the number of bytes that it reports.
    pub(crate) fn run(&self, missing: u64) -> u64 {
        /// Restores the thread's flag, also when a logger panics.
        struct Running(bool);
        impl Drop for Running {
            fn drop(&mut self) {
                RUNS.set(self.0);
            }
        }
        let _running = Running(RUNS.replace(true));
        let freed = guarded("a relief hook", || (self.run)(missing));
        freed.unwrap_or(0)
    }

    /// Hooks of a lower rank run earlier.
    fn rank(&self) -> (i32, Reverse<u64>) {
        (self.priority, Reverse(self.estimated_yield))
    }
}

impl fmt::Debug for ReliefHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReliefHook")
            .field("name", &self.name)
            .field("priority", &self.priority)
            .field("estimated_yield", &self.estimated_yield)
            .field("overhead", &self.overhead)
            .finish_non_exhaustive()
    }
}

/// Hooks in execution order.
#[derive(Default)]
pub(crate) struct Hooks(Mutex<Vec<ReliefHook>>);

impl Hooks {
    /// Adds a hook, or replaces the one with its name; returns whether it replaced one.
    pub(crate) fn add(&self, hook: ReliefHook) -> bool {
        let replaced = {
            let mut hooks = process::lock(&self.0);
            let known = hooks.iter().position(|known| known.name == hook.name);
            let replaced = known.map(|at| hooks.remove(at));
            let at = hooks.partition_point(|known| known.rank() <= hook.rank());
            hooks.insert(at, hook);
            replaced
        };
        // A replaced hook is dropped without the lock, because its drop may remove other hooks.
        replaced.is_some()
    }

    /// Whether there are no hooks.
    pub(crate) fn is_empty(&self) -> bool {
        process::lock(&self.0).is_empty()
    }

    /// Removes a hook, and returns whether it existed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = {
            let mut hooks = process::lock(&self.0);
            let at = hooks.iter().position(|known| &*known.name == name);
            at.map(|at| hooks.remove(at))
        };
        removed.is_some()
    }

    /// Runs a closure while the hooks are locked.
    #[cfg(all(test, unix, feature = "sim"))]
    pub(crate) fn while_locked<T>(&self, run: impl FnOnce() -> T) -> T {
        let _hooks = process::lock(&self.0);
        run()
    }

    /// Returns the hooks that may run now, in order: none while a hook runs on this thread.
    pub(crate) fn due(&self) -> Vec<ReliefHook> {
        match RUNS.get() {
            true => Vec::new(),
            false => process::lock(&self.0).clone(),
        }
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hooks = process::lock(&self.0);
        let names = hooks.iter().map(ReliefHook::name);
        f.debug_list().entries(names).finish()
    }
}
