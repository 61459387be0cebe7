//! Segment hooks, and page-locked memory kept between suspensions.

use std::fmt;
use std::sync::Arc;

use crate::driver::{HostAllocation, process};
use crate::foreign::guarded;
use crate::locks::held::Mutex;

/// A change of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentChange {
    /// They are about to be unmapped: the hook revokes registrations and exports of their memory now.
    Death,
    /// They have been recreated at their old addresses.
    Birth,
}

/// Physical memory at its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Segment {
    /// Unique id among all segments that the allocator ever reports, including those at the same address.
    pub id: u64,
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// The function of a hook.
type HookFunction = dyn Fn(SegmentChange, &[Segment]) + Send + Sync;

/// A hook that is called when memory is suspended and when it is resumed, so that registrations and exports can be
/// renewed.
///
/// A hook runs without any lock held, on the thread that suspends or resumes, once for all segments. It may allocate
/// where memory is left, and free; to suspend or resume there returns [`Error::InUse`](crate::Error::InUse). If a
/// suspension fails, hooks receive a [`Birth`](SegmentChange::Birth) for the segments. A panic in a hook is logged, and
/// the other hooks are still called. Hooks are cheap to clone.
///
/// ```
/// use cualloc::allocator::{SegmentChange, SegmentHook};
/// let hook = SegmentHook::new("registrations", |change, segments| match change {
///     SegmentChange::Death => println!("{} segments are to be deregistered", segments.len()),
///     _ => println!("{} segments may be registered", segments.len()),
/// });
/// assert_eq!(hook.name(), "registrations");
/// ```
#[derive(Clone)]
pub struct SegmentHook {
    name: Arc<str>,
    run: Arc<HookFunction>,
}

impl SegmentHook {
    /// Creates a hook with a unique name.
    pub fn new(
        name: impl Into<Arc<str>>,
        run: impl Fn(SegmentChange, &[Segment]) + Send + Sync + 'static,
    ) -> SegmentHook {
        SegmentHook {
            name: name.into(),
            run: Arc::new(run),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for SegmentHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentHook")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// State of suspensions outside the heap.
#[derive(Debug, Default)]
pub(crate) struct Suspender {
    /// Page-locked memory kept for the next suspension.
    pub(crate) spare: Mutex<Vec<HostAllocation>>,
    hooks: Mutex<Vec<SegmentHook>>,
}

impl Suspender {
    /// Adds a hook, or replaces the one with its name; returns whether it replaced one.
    pub(crate) fn add_hook(&self, hook: SegmentHook) -> bool {
        let replaced = self.take_hook(&hook.name);
        process::lock(&self.hooks).push(hook);
        // A replaced hook is dropped without the lock.
        replaced.is_some()
    }

    /// Removes a hook, and returns whether it existed.
    pub(crate) fn remove_hook(&self, name: &str) -> bool {
        self.take_hook(name).is_some()
    }

    fn take_hook(&self, name: &str) -> Option<SegmentHook> {
        let mut hooks = process::lock(&self.hooks);
        let at = hooks.iter().position(|known| &*known.name == name);
        at.map(|at| hooks.remove(at))
    }

    /// Calls all hooks, without the lock.
    pub(crate) fn notify(&self, change: SegmentChange, segments: &[Segment]) {
        if segments.is_empty() {
            return;
        }
        let hooks = process::lock(&self.hooks).clone();
        for hook in &hooks {
            guarded("a segment hook", || (hook.run)(change, segments));
        }
    }

    /// Frees the page-locked memory that is kept for the next suspension.
    pub(crate) fn drop_spare(&self) {
        let spare = std::mem::take(&mut *process::lock(&self.spare));
        drop(spare);
    }
}
