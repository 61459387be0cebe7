//! The guard: a budget that can change, with relief hooks, policies, pressure and a reservation.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use crate::allocator::{Allocator, Config};
use crate::driver::{Context, Driver, MemInfo, Stream, process};

use super::block::{DeallocateError, ResourceBlock, Tag};
use super::clock::{Clock, SystemClock, Wakeup};
use super::error::ResourceError;
use super::foreign::guarded;
use super::gauge::{Charge, Gauge, Pressure, UNLIMITED};
use super::relief::{Hooks, ReliefHook};
use super::reservation::Reservation;
use super::traits::MemoryResource;

/// How often the waiting policy looks.
const POLL: Duration = Duration::from_millis(100);

/// What a [`Guard`] does when memory has run out and its hooks did not help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OomPolicy {
    /// Fail.
    #[default]
    Fail,
    /// Reap what is pending, give caches back to the driver, and try once more.
    FreeCaches,
    /// Look every 100 ms for at most this long whether there is room, and try once more.
    Wait(Duration),
    /// Run the checkpoint callback and fail.
    Checkpoint,
}

/// Figures of a [`Guard`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GuardStats {
    /// Bytes in use.
    pub used: u64,
    /// The budget in bytes; 0: none.
    pub budget: u64,
    /// The most bytes in use since the start or the last reset.
    pub peak: u64,
    /// Bytes free on the device, by the driver's account; 0 if it could not be asked.
    pub device_free: u64,
    /// Bytes of the device, likewise.
    pub device_total: u64,
    /// Live allocations.
    pub live_allocations: u64,
    /// Requests that failed at first and succeeded after the policy had done its work.
    pub oom_recoveries: u64,
}

/// A budget of 0 is none.
fn limit_of(budget: u64) -> u64 {
    match budget {
        0 => UNLIMITED,
        budget => budget,
    }
}

type Checkpoint = dyn Fn(&ResourceError) + Send + Sync;

/// Watches over a resource: a budget that can be set at run time, hooks that free memory when a
/// request would pass it, a policy for when that does not help, levels of pressure with listeners,
/// and memory held in reserve.
///
/// A request first runs into the budget, before any driver call. Then the hooks run, in the order of
/// their priority, until the request fits; then the policy. An out-of-memory error from below goes
/// the same way. Hooks, listeners and callbacks run without a lock and may use the guard.
///
/// ```
/// use cualloc::resource::{Guard, MemoryResource, OomPolicy, Pressure};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let guard = Guard::builder().budget(1000).policy(OomPolicy::FreeCaches).build(allocator)?;
/// let block = guard.allocate_block(960, &stream, "most".into())?;
/// assert_eq!(guard.pressure(), Pressure::High);
/// assert!(guard.allocate_block(41, &stream, "rest".into()).is_err());
/// guard.set_budget(0); // no budget
/// let more = guard.allocate_block(41, &stream, "rest".into())?;
/// # guard.deallocate_block(more)?;
/// # guard.deallocate_block(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Guard<R: MemoryResource> {
    inner: R,
    gauge: Arc<Gauge>,
    hooks: Hooks,
    policy: RwLock<OomPolicy>,
    checkpoint: RwLock<Option<Arc<Checkpoint>>>,
    recoveries: AtomicU64,
    clock: Arc<dyn Clock>,
    reserve: Mutex<Option<Box<ReserveOf>>>,
}

/// Gives the reserve back: bytes.
type ReserveOf = dyn FnMut() -> Result<u64, ResourceError> + Send;

impl<R: MemoryResource> Guard<R> {
    /// Bytes of the budget; 0: none.
    pub fn budget(&self) -> u64 {
        match self.gauge.limit() {
            UNLIMITED => 0,
            limit => limit,
        }
    }

    /// Sets the budget in bytes; 0: none. What is in use stays, also above the new budget.
    pub fn set_budget(&self, bytes: u64) {
        self.gauge.set_limit(limit_of(bytes));
    }

    /// The policy.
    pub fn policy(&self) -> OomPolicy {
        *process::read(&self.policy)
    }

    /// Sets the policy.
    pub fn set_policy(&self, policy: OomPolicy) {
        *process::write(&self.policy) = policy;
    }

    /// Registers what [`OomPolicy::Checkpoint`] runs; no other policy does.
    pub fn set_checkpoint(&self, callback: impl Fn(&ResourceError) + Send + Sync + 'static) {
        let callback: Arc<Checkpoint> = Arc::new(callback);
        let mut place = process::write(&self.checkpoint);
        let old = place.replace(callback);
        drop(place);
        drop(old);
    }

    /// Adds a hook, or replaces the one of its name; whether one was replaced.
    pub fn add_hook(&self, hook: ReliefHook) -> bool {
        self.hooks.add(hook)
    }

    /// Removes a hook; whether it existed.
    pub fn remove_hook(&self, name: &str) -> bool {
        self.hooks.remove(name)
    }

    /// The level of pressure now.
    pub fn pressure(&self) -> Pressure {
        self.gauge.pressure()
    }

    /// Has a listener told of each change of level, whichever call caused it; its number. Several
    /// threads may tell it at the same time: each call's old level is another call's new one.
    pub fn on_pressure(
        &self,
        listener: impl Fn(Pressure, Pressure) + Send + Sync + 'static,
    ) -> u64 {
        self.gauge.add_listener(Arc::new(listener))
    }

    /// Removes a listener by its number; whether it existed.
    pub fn remove_listener(&self, number: u64) -> bool {
        self.gauge.remove_listener(number)
    }

    /// The figures.
    pub fn stats(&self) -> GuardStats {
        let device = self
            .inner
            .context()
            .enter()
            .and_then(|entered| entered.mem_info())
            .unwrap_or(MemInfo { free: 0, total: 0 });
        // Before the count, so that the peak is not below it.
        let used = self.gauge.used();
        GuardStats {
            used,
            budget: self.budget(),
            peak: self.gauge.peak().max(used),
            device_free: device.free,
            device_total: device.total,
            live_allocations: self.gauge.count(),
            oom_recoveries: self.recoveries.load(Ordering::Relaxed),
        }
    }

    /// Sets the peak to what is in use.
    pub fn reset_peak(&self) {
        self.gauge.reset_peak();
    }

    /// Gives the memory held in reserve back; bytes, 0 if none is held.
    ///
    /// # Errors
    /// As [`Reservation::release`].
    pub fn release_reservation(&self) -> Result<u64, ResourceError> {
        let held = process::lock(&self.reserve).take();
        let Some(mut release) = held else {
            return Ok(0);
        };
        let result = release();
        if result.is_err() {
            *process::lock(&self.reserve) = Some(release);
        }
        result
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    fn attempt(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        let charge: Charge = self.gauge.charge(bytes as u64)?;
        let mut block = self
            .inner
            .allocate_block_aligned(bytes, alignment, stream, tag)?;
        block.attach(charge);
        Ok(block)
    }

    /// Lets hooks free memory; whether the request then went through.
    fn relieve(
        &self,
        bytes: u64,
        mut attempt: impl FnMut() -> Result<ResourceBlock, ResourceError>,
        error: &mut ResourceError,
    ) -> Option<ResourceBlock> {
        let missing = || match self.gauge.remaining() {
            left if left < bytes => bytes - left,
            // The device is short, not the budget.
            _ => bytes,
        };
        let mut got = None;
        let mut try_again = || match attempt() {
            Ok(block) => {
                got = Some(block);
                true
            }
            Err(failure) => {
                *error = failure;
                !error.is_out_of_memory()
            }
        };
        self.hooks.run(
            || self.gauge.remaining(),
            missing,
            || {
                if try_again() {
                    return true;
                }
                // What hooks freed in stream order may have to be waited for.
                matches!(self.inner.reap(), Ok(left) if left > 0) && try_again()
            },
        );
        got
    }

    fn apply_policy(
        &self,
        bytes: u64,
        mut attempt: impl FnMut() -> Result<ResourceBlock, ResourceError>,
        error: ResourceError,
    ) -> Result<ResourceBlock, ResourceError> {
        match self.policy() {
            OomPolicy::Fail => return Err(error),
            OomPolicy::Checkpoint => {
                let callback = process::read(&self.checkpoint).clone();
                if let Some(callback) = callback {
                    guarded("a checkpoint callback", || callback(&error));
                }
                return Err(error);
            }
            // No waiting makes room for more than the whole budget.
            _ if self.gauge.is_too_small(bytes) => return Err(error),
            OomPolicy::FreeCaches => {
                self.inner.reap()?;
                self.inner.trim(0)?;
            }
            OomPolicy::Wait(timeout) => {
                let (start, wakeup) = (self.clock.now(), Wakeup::new());
                let end = start.saturating_add(timeout);
                let device_short = self.gauge.has_room(bytes);
                while self.clock.now() < end {
                    let next = self.clock.now().saturating_add(POLL).min(end);
                    self.clock.wait(next, &wakeup, wakeup.count());
                    self.inner.reap()?;
                    if !device_short && self.gauge.has_room(bytes) {
                        break;
                    }
                }
            }
        }
        let block = attempt()?;
        self.recoveries.fetch_add(1, Ordering::Relaxed);
        Ok(block)
    }
}

impl Guard<Allocator> {
    /// Sets up a guard.
    pub fn builder() -> GuardBuilder {
        GuardBuilder::default()
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Guard<R> {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        let attempt = || self.attempt(bytes, alignment, stream, tag);
        let mut error = match attempt() {
            Err(error) if error.is_out_of_memory() => error,
            other => return other,
        };
        if let Some(block) = self.relieve(bytes as u64, attempt, &mut error) {
            return Ok(block);
        }
        if !error.is_out_of_memory() {
            return Err(error);
        }
        self.apply_policy(bytes as u64, attempt, error)
    }

    #[inline]
    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), DeallocateError> {
        self.inner.deallocate_block(block)
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}

impl<R: MemoryResource> fmt::Debug for Guard<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("gauge", &self.gauge)
            .field("hooks", &self.hooks)
            .field("policy", &self.policy())
            .finish_non_exhaustive()
    }
}

/// Sets up a [`Guard`]. By default there is no budget and no reservation, and the policy is
/// [`OomPolicy::Fail`].
#[derive(Clone, Default)]
pub struct GuardBuilder {
    device: Option<usize>,
    budget: u64,
    reservation: usize,
    policy: OomPolicy,
    clock: Option<Arc<dyn Clock>>,
}

impl GuardBuilder {
    /// The ordinal of the device; that of the resource, or 0, if not set.
    pub fn device(mut self, ordinal: usize) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// The budget in bytes; 0: none.
    pub fn budget(mut self, bytes: u64) -> Self {
        self.budget = bytes;
        self
    }

    /// Bytes of device memory to hold in reserve; they count against no budget.
    pub fn reservation(mut self, bytes: usize) -> Self {
        self.reservation = bytes;
        self
    }

    /// The policy.
    pub fn policy(mut self, policy: OomPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// The clock that [`OomPolicy::Wait`] goes by; the system's if not set.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Guards a resource.
    ///
    /// # Errors
    /// [`ResourceError::WrongDevice`]; those of the reservation.
    pub fn build<R>(self, inner: R) -> Result<Guard<R>, ResourceError>
    where
        R: MemoryResource + Clone + 'static,
    {
        let found = inner.device();
        let expected = self.device.unwrap_or(found);
        if expected != found {
            return Err(ResourceError::WrongDevice { expected, found });
        }
        let reserve = if self.reservation == 0 {
            None
        } else {
            let stream = Stream::legacy_default(inner.context())?;
            let mut held = Reservation::new(inner.clone(), self.reservation, &stream)?;
            let release: Box<ReserveOf> = Box::new(move || held.release());
            Some(release)
        };
        Ok(Guard {
            inner,
            gauge: Gauge::new("guard", limit_of(self.budget)),
            hooks: Hooks::default(),
            policy: RwLock::new(self.policy),
            checkpoint: RwLock::default(),
            recoveries: AtomicU64::new(0),
            clock: self
                .clock
                .unwrap_or_else(|| Arc::new(SystemClock::default())),
            reserve: Mutex::new(reserve),
        })
    }

    /// Guards a new allocator on the device, of a given driver.
    ///
    /// # Errors
    /// As [`Allocator::with_config`] and [`build`](Self::build).
    pub fn open(self, driver: &Driver) -> Result<Guard<Allocator>, ResourceError> {
        let device = driver.device(self.device.unwrap_or(0))?;
        let context = Context::primary(driver, device)?;
        let allocator = Allocator::with_config(&context, Config::new())?;
        self.build(allocator)
    }
}

impl fmt::Debug for GuardBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardBuilder")
            .field("device", &self.device)
            .field("budget", &self.budget)
            .field("reservation", &self.reservation)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}
