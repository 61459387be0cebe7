//! Who is told of segments, and page-locked memory between suspensions.

use std::fmt;
use std::sync::Arc;

use crate::driver::{HostAllocation, process};
use crate::foreign::guarded;
use crate::locks::held::Mutex;

/// What happens to segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentChange {
    /// They are about to be unmapped: whoever registered or exported their memory takes that back now.
    Death,
    /// They were made anew at their old addresses.
    Birth,
}

/// A piece of physical memory at its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Segment {
    /// Tells it from every other segment that the allocator ever tells of, also of those at the same address.
    pub id: u64,
    /// Its first byte.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// What a hook does.
type Told = dyn Fn(SegmentChange, &[Segment]) + Send + Sync;

/// Is told when memory is suspended and when it comes back, so that registrations and exports can be renewed.
///
/// Runs without any lock held, on the thread that suspends or resumes, once for all segments. It may allocate where
/// memory is left, and free; to suspend or resume there is [`Error::InUse`](crate::Error::InUse). Where a suspension fails, the segments
/// are born again. A panic in it is logged and goes no further: other hooks are told all the same. Cheap to clone.
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
    run: Arc<Told>,
}

impl SegmentHook {
    /// A hook of a unique name.
    pub fn new(
        name: impl Into<Arc<str>>,
        run: impl Fn(SegmentChange, &[Segment]) + Send + Sync + 'static,
    ) -> SegmentHook {
        SegmentHook {
            name: name.into(),
            run: Arc::new(run),
        }
    }

    /// Its name.
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

/// What suspensions need beside the heap.
#[derive(Debug, Default)]
pub(crate) struct Suspender {
    /// Page-locked memory for the next time.
    pub(crate) spare: Mutex<Vec<HostAllocation>>,
    hooks: Mutex<Vec<SegmentHook>>,
}

impl Suspender {
    /// Adds a hook, or replaces the one of its name; whether one was replaced.
    pub(crate) fn add_hook(&self, hook: SegmentHook) -> bool {
        let replaced = self.take_hook(&hook.name);
        process::lock(&self.hooks).push(hook);
        // What it captured is dropped without the lock.
        replaced.is_some()
    }

    /// Removes a hook; whether it existed.
    pub(crate) fn remove_hook(&self, name: &str) -> bool {
        self.take_hook(name).is_some()
    }

    fn take_hook(&self, name: &str) -> Option<SegmentHook> {
        let mut hooks = process::lock(&self.hooks);
        let at = hooks.iter().position(|known| &*known.name == name);
        at.map(|at| hooks.remove(at))
    }

    /// Tells all hooks, without the lock.
    pub(crate) fn tell(&self, change: SegmentChange, segments: &[Segment]) {
        if segments.is_empty() {
            return;
        }
        let hooks = process::lock(&self.hooks).clone();
        for hook in &hooks {
            guarded("a segment hook", || (hook.run)(change, segments));
        }
    }

    /// Frees page-locked memory that is kept for the next time.
    pub(crate) fn drop_spare(&self) {
        let spare = std::mem::take(&mut *process::lock(&self.spare));
        drop(spare);
    }
}
