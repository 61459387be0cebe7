//! Hooks that can free memory when there is none: the user's last word before an error.

use std::cell::Cell;
use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::foreign::guarded;
use crate::locks::held::Mutex;

thread_local! {
    /// A hook runs on this thread.
    static RUNS: Cell<bool> = const { Cell::new(false) };
}

/// Something that can free memory which the program can do without: for allocators, and for
/// [`Relief`](crate::resource::Relief) over any resource.
///
/// Hooks run by priority, the larger yield first among equals, then in the order in which they were added;
/// without any lock held, so a hook may allocate, free, and add or remove hooks. For requests that it makes itself
/// no hook runs, neither itself nor another: they fail if memory is short. A panic in it is logged, and counts as nothing
/// freed. Cheap to clone.
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
    /// A hook of a unique name. It gets the bytes that are missing and returns how many it freed, as far
    /// as it knows; whoever asked looks for itself.
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

    /// Lower runs earlier; 0 by default.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Bytes that it will probably free: more runs earlier among equal priorities.
    pub fn estimated_yield(mut self, bytes: u64) -> Self {
        self.estimated_yield = bytes;
        self
    }

    /// Bytes that it needs while it runs. It is passed over where a budget has less left; allocators,
    /// which have no budget, run it all the same, and its request for them may fail.
    pub fn overhead(mut self, bytes: u64) -> Self {
        self.overhead = bytes;
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it can run in so many bytes.
    pub(crate) fn runs_in(&self, bytes: u64) -> bool {
        self.overhead <= bytes
    }

    /// Asks it for so many bytes; how many it says that it freed.
    pub(crate) fn run(&self, missing: u64) -> u64 {
        /// Ends it, also where a logger panics.
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

/// Hooks in the order in which they run.
#[derive(Default)]
pub(crate) struct Hooks(Mutex<Vec<ReliefHook>>);

impl Hooks {
    /// Adds a hook, or replaces the one of its name; whether one was replaced.
    pub(crate) fn add(&self, hook: ReliefHook) -> bool {
        let replaced = {
            let mut hooks = process::lock(&self.0);
            let known = hooks.iter().position(|known| known.name == hook.name);
            let replaced = known.map(|at| hooks.remove(at));
            let at = hooks.partition_point(|known| known.rank() <= hook.rank());
            hooks.insert(at, hook);
            replaced
        };
        // What it captured is dropped without the lock: it may remove hooks of its own.
        replaced.is_some()
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        process::lock(&self.0).is_empty()
    }

    /// Removes a hook; whether it existed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = {
            let mut hooks = process::lock(&self.0);
            let at = hooks.iter().position(|known| &*known.name == name);
            at.map(|at| hooks.remove(at))
        };
        removed.is_some()
    }

    /// Runs while the hooks are locked.
    #[cfg(all(test, unix, feature = "sim"))]
    pub(crate) fn while_locked<T>(&self, run: impl FnOnce() -> T) -> T {
        let _hooks = process::lock(&self.0);
        run()
    }

    /// The hooks that may run now, in their order: none while one runs on this thread.
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
