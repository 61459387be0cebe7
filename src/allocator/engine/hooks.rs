//! Hooks that can free memory when there is none: the user's last word before an error.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::driver::process;

/// Frees memory that the program can do without. Gets the number of bytes that are missing and
/// returns how many it freed, as far as it knows; the allocator looks for itself.
pub type ReliefHook = dyn Fn(u64) -> u64 + Send + Sync;

/// The hooks of an allocator, in order of registration. Called without any lock held, so a hook may
/// allocate, free, and add or remove hooks.
#[derive(Default)]
pub(crate) struct Hooks(Mutex<Vec<(String, Arc<ReliefHook>)>>);

impl Hooks {
    /// Adds a hook, or replaces the one of that name; whether one was replaced.
    pub(crate) fn set(&self, name: String, hook: Arc<ReliefHook>) -> bool {
        let replaced = {
            let mut hooks = process::lock(&self.0);
            match hooks.iter_mut().find(|(known, _)| *known == name) {
                Some(known) => Some(std::mem::replace(&mut known.1, hook)),
                None => {
                    hooks.push((name, hook));
                    None
                }
            }
        };
        // What it captured is dropped without the lock: it may remove hooks of its own.
        replaced.is_some()
    }

    /// Removes a hook; whether it existed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = {
            let mut hooks = process::lock(&self.0);
            let at = hooks.iter().position(|(known, _)| known == name);
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

    /// The hooks as they are now.
    pub(crate) fn all(&self) -> Vec<Arc<ReliefHook>> {
        let hooks = process::lock(&self.0);
        hooks.iter().map(|(_, hook)| Arc::clone(hook)).collect()
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hooks = process::lock(&self.0);
        f.debug_list()
            .entries(hooks.iter().map(|(name, _)| name))
            .finish()
    }
}
