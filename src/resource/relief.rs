//! Hooks that free memory when a budget is short.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::process;

use super::foreign::guarded;

/// Something that can free memory which the program can do without.
///
/// ```
/// use cualloc::resource::ReliefHook;
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
    order: u64,
    run: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
}

impl ReliefHook {
    /// A hook of a unique name. It gets the bytes that are missing and returns how many it really
    /// freed; what counts is what the budget shows afterwards.
    pub fn new(
        name: impl Into<Arc<str>>,
        run: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> ReliefHook {
        ReliefHook {
            name: name.into(),
            estimated_yield: 0,
            overhead: 0,
            priority: 0,
            order: 0,
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

    /// Bytes that it needs while it runs. It is passed over where that is more than there is.
    pub fn overhead(mut self, bytes: u64) -> Self {
        self.overhead = bytes;
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
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

/// The hooks of a guard, in the order in which they run.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    list: Mutex<Vec<ReliefHook>>,
    registered: AtomicU64,
}

impl Hooks {
    /// Adds a hook, or replaces the one of its name; whether one was replaced.
    pub(crate) fn add(&self, mut hook: ReliefHook) -> bool {
        hook.order = self.registered.fetch_add(1, Ordering::Relaxed);
        let replaced;
        {
            let mut list = process::lock(&self.list);
            replaced = list
                .iter()
                .position(|known| known.name == hook.name)
                .map(|at| list.remove(at));
            list.push(hook);
            list.sort_by_key(|hook| {
                let most_first = std::cmp::Reverse(hook.estimated_yield);
                (hook.priority, most_first, hook.order)
            });
        }
        // What the old one captured is dropped outside the lock.
        replaced.is_some()
    }

    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = {
            let mut list = process::lock(&self.list);
            let at = list.iter().position(|hook| &*hook.name == name);
            at.map(|at| list.remove(at))
        };
        removed.is_some()
    }

    /// Runs hooks until `done` says that it is enough; whether it did. `headroom` says how much
    /// there is for a hook to run in, `missing` how much is to be freed.
    pub(crate) fn run(
        &self,
        headroom: impl Fn() -> u64,
        missing: impl Fn() -> u64,
        mut done: impl FnMut() -> bool,
    ) -> bool {
        // A copy, so that hooks may add and remove hooks.
        let list = process::lock(&self.list).clone();
        for hook in list {
            if hook.overhead > headroom() {
                continue;
            }
            guarded("a relief hook", || (hook.run)(missing()));
            if done() {
                return true;
            }
        }
        false
    }
}
