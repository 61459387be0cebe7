//! The relief adaptor: hooks and a policy for out-of-memory conditions.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::allocator::{Hooks, ReliefHook, Request};
use crate::driver::{Stream, process};
use crate::foreign::guarded;

use super::block::RawBlock;
use super::traits::MemoryResource;
use super::usage::Usage;
use crate::clock::{Clock, Wakeup};
use crate::error::{Error, Refused};
use crate::locks::held::RwLock;

/// The interval of [`OomPolicy::Wait`].
const POLL: Duration = Duration::from_millis(100);

/// The action of a [`Relief`] when memory has run out and its hooks did not help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OomPolicy {
    /// Fail.
    #[default]
    Fail,
    /// Reap, release caches to the driver, and try once more.
    FreeCaches,
    /// Reap every 100 ms, for at most this long, until there is room, and try once more.
    Wait(Duration),
    /// Run the checkpoint callback and fail.
    Checkpoint,
}

type Checkpoint = dyn Fn(&Error) + Send + Sync;

/// Handles out-of-memory errors of a resource: by hooks that free memory, and a policy if they do not suffice.
///
/// When a request fails because a budget or the device has no memory left, the hooks run in the order of their priority
/// until the request succeeds, and then the policy applies. For a request above the whole limit of a budget, no hook
/// runs, no cache is emptied, and there is no wait. Hooks and the checkpoint callback run without a lock and may use
/// the resource. A reserve is a [`DeviceBuffer`](crate::DeviceBuffer) of the resource that a hook drops.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::{DeviceBuffer, resource::{Budget, MemoryResource, Relief, ReliefHook}};
/// use std::sync::{Arc, Mutex};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let allocator = Allocator::with_config(&sim.driver()?.context(0)?, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let relief = Arc::new(Relief::new(Budget::new(allocator, Some(1000))));
/// let cached = DeviceBuffer::<u8>::zeroed(&relief, 800, &stream)?;
/// let cache = Mutex::new(Some(cached));
/// relief.add_relief_hook(ReliefHook::new("cache", move |_missing| {
///     cache.lock().ok().and_then(|mut cache| cache.take()).map_or(0, |buffer| buffer.byte_len() as u64)
/// }));
/// let block = relief.allocate_block(&Request::new(500).tag("work"), &stream)?;
/// assert_eq!(relief.usage()?.recoveries, 1);
/// # relief.deallocate_block(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Relief<R: MemoryResource> {
    inner: R,
    hooks: Hooks,
    policy: RwLock<(OomPolicy, Option<Arc<Checkpoint>>)>,
    recoveries: AtomicU64,
    clock: Clock,
}

impl<R: MemoryResource> Relief<R> {
    /// Creates it over another resource, without hooks, with [`OomPolicy::Fail`].
    pub fn new(inner: R) -> Relief<R> {
        Relief {
            inner,
            hooks: Hooks::default(),
            policy: RwLock::default(),
            recoveries: AtomicU64::new(0),
            clock: Clock::default(),
        }
    }

    /// Replaces the clock of [`OomPolicy::Wait`]: for tests.
    #[doc(hidden)]
    pub fn with_clock(mut self, clock: &Clock) -> Relief<R> {
        self.clock = clock.clone();
        self
    }

    /// The policy.
    pub fn policy(&self) -> OomPolicy {
        process::read(&self.policy).0
    }

    /// Sets the policy.
    pub fn set_policy(&self, policy: OomPolicy) {
        process::write(&self.policy).0 = policy;
    }

    /// Registers the callback of [`OomPolicy::Checkpoint`]; no other policy runs it.
    pub fn set_checkpoint(&self, callback: impl Fn(&Error) + Send + Sync + 'static) {
        let callback: Arc<Checkpoint> = Arc::new(callback);
        let old = process::write(&self.policy).1.replace(callback);
        // Foreign code: dropped without the lock.
        drop(old);
    }

    /// Adds a hook, or replaces the one of its name; whether one was replaced.
    pub fn add_relief_hook(&self, hook: ReliefHook) -> bool {
        self.hooks.add(hook)
    }

    /// Removes a hook; whether it existed.
    pub fn remove_relief_hook(&self, name: &str) -> bool {
        self.hooks.remove(name)
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Runs the hooks and the policy for a failed request, and returns the result of the last attempt.
    #[cold]
    fn relieve(
        &self,
        bytes: u64,
        attempt: impl Fn() -> Result<RawBlock, Error>,
        mut error: Error,
    ) -> Result<RawBlock, Error> {
        if !never_fits(&error) {
            match self.run_hooks(bytes, &attempt, error) {
                Err(last) if last.is_out_of_memory() => error = last,
                done => return self.recovered(done),
            }
        }
        let (policy, checkpoint) = process::read(&self.policy).clone();
        match policy {
            OomPolicy::Checkpoint => {
                if let Some(callback) = checkpoint {
                    guarded("a checkpoint callback", || callback(&error));
                }
                return Err(error);
            }
            OomPolicy::Fail => return Err(error),
            _ if never_fits(&error) => return Err(error),
            OomPolicy::FreeCaches => {
                self.inner.reap()?;
                self.inner.trim(0)?;
            }
            OomPolicy::Wait(timeout) => self.wait(bytes, timeout)?,
        }
        self.recovered(attempt())
    }

    fn recovered(&self, done: Result<RawBlock, Error>) -> Result<RawBlock, Error> {
        if done.is_ok() {
            self.recoveries.fetch_add(1, Ordering::Relaxed);
        }
        done
    }

    /// Runs hooks until the request succeeds or fails for another reason.
    fn run_hooks(
        &self,
        bytes: u64,
        attempt: impl Fn() -> Result<RawBlock, Error>,
        mut error: Error,
    ) -> Result<RawBlock, Error> {
        for hook in self.hooks.due() {
            let room = self.inner.headroom();
            if room.is_some_and(|room| !hook.runs_in(room)) {
                continue;
            }
            // If every budget has room, the device lacks memory: how many bytes is not known.
            let missing = bytes.checked_sub(room.unwrap_or(0)).filter(|it| *it > 0);
            hook.run(missing.unwrap_or(bytes));
            match attempt() {
                Err(last) if last.is_out_of_memory() => error = last,
                done => return done,
            }
        }
        Err(error)
    }

    /// Reaps at intervals until the budgets have room, or for the whole time if the device is short of memory.
    fn wait(&self, bytes: u64, timeout: Duration) -> Result<(), Error> {
        let has_room = || self.inner.headroom().is_none_or(|room| bytes <= room);
        let device_short = has_room();
        let wakeup = Arc::<Wakeup>::default();
        let end = self.clock.now().saturating_add(timeout);
        while self.clock.now() < end {
            let next = self.clock.now().saturating_add(POLL).min(end);
            self.clock.wait(next, &wakeup, wakeup.count());
            self.inner.reap()?;
            if !device_short && has_room() {
                break;
            }
        }
        Ok(())
    }
}

/// Whether a request exceeds the whole limit of a budget.
fn never_fits(error: &Error) -> bool {
    matches!(error, Error::OverBudget { requested, limit, .. } if requested > limit)
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Relief<R> {
    #[inline]
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let attempt = || self.inner.allocate_block(request, stream);
        match attempt() {
            Err(error) if error.is_out_of_memory() => {
                self.relieve(request.bytes() as u64, attempt, error)
            }
            done => done,
        }
    }

    #[inline]
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.inner.deallocate_block(block)
    }

    /// As the resource below, with the recoveries, and the device's memory if the driver reports it.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.inner.usage()?;
        usage.recoveries += self.recoveries.load(Ordering::Relaxed);
        let context = self.inner.context();
        usage.device_memory = context.and_then(|context| context.mem_info().ok());
        Ok(usage)
    }

    fn reset_accumulated_stats(&self) {
        self.recoveries.store(0, Ordering::Relaxed);
        self.inner.reset_accumulated_stats();
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}

debug_fields!([R: MemoryResource + fmt::Debug] Relief<R>, self =>
    inner: self.inner, hooks: self.hooks, policy: self.policy()
);
