//! Segment hooks: functions of the program that follow which memory is mapped where.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::process;
use crate::foreign::guarded;
use crate::locks::held::Mutex;

/// A change of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentChange {
    /// They are about to be unmapped, and no request can obtain their memory: the hook revokes registrations and exports
    /// of it now.
    Death,
    /// They have been mapped, and no block has been allocated there yet, unless they are restored after a suspension.
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
    /// The graph pool that it belongs to ([`GraphPool::id`](crate::allocator::GraphPool::id)); none outside of graph pools.
    pub pool: Option<u64>,
}

/// The function of a hook.
type HookFunction = dyn Fn(SegmentChange, &[Segment]) + Send + Sync;

/// A hook that is called when memory is mapped and before it is unmapped: when the allocator obtains or returns memory,
/// and when memory is suspended or resumed. It serves registrations and exports, which follow the memory. Second
/// mappings of the same memory (views) are not reported.
///
/// A hook runs without any lock held, on the thread whose call changes the segments, once for all segments of the
/// change. It may allocate where memory is left, and free; to suspend or resume there returns
/// [`Error::InUse`](crate::Error::InUse), and [`Allocator::add_peer`](crate::Allocator::add_peer) would wait for the call
/// that runs the hook. If a release or suspension fails, hooks receive a [`Birth`](SegmentChange::Birth) for the segments
/// that stay. A panic in a hook is logged, and the other hooks are still called. Hooks are cheap to clone.
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

/// The segment hooks of an allocator.
#[derive(Debug, Default)]
pub(crate) struct SegmentHooks {
    list: Mutex<Vec<SegmentHook>>,
    /// Whether the list has entries: calls that obtain memory look at this first.
    any: AtomicBool,
}

impl SegmentHooks {
    /// Adds a hook, or replaces the one with its name; returns whether it replaced one.
    pub(crate) fn add(&self, hook: SegmentHook) -> bool {
        let replaced = self.take(&hook.name);
        process::lock(&self.list).push(hook);
        self.any.store(true, Ordering::Release);
        // A replaced hook is dropped without the lock.
        replaced.is_some()
    }

    /// Removes a hook, and returns whether it existed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        self.take(name).is_some()
    }

    fn take(&self, name: &str) -> Option<SegmentHook> {
        let mut hooks = process::lock(&self.list);
        let at = hooks.iter().position(|known| &*known.name == name);
        at.map(|at| hooks.remove(at))
    }

    /// Whether there may be hooks to call.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Calls all hooks, without the lock.
    pub(crate) fn notify(&self, change: SegmentChange, segments: &[Segment]) {
        if segments.is_empty() {
            return;
        }
        let hooks = process::lock(&self.list).clone();
        for hook in &hooks {
            guarded("a segment hook", || (hook.run)(change, segments));
        }
    }
}
