//! The guard: relief over a budget.

use std::sync::Arc;

use crate::allocator::{Allocator, Config};
use crate::driver::{Context, Driver};

use super::budget::Budget;
use super::clock::Clock;
use super::relief::{OomPolicy, Relief};
use super::traits::MemoryResource;
use crate::error::Error;

/// Watches over a resource: a [`Budget`] that can be set at run time, and [`Relief`] for requests that it,
/// or the device, refuses. A request runs into the budget before any driver call.
///
/// The budget is [`inner`](Relief::inner), with its limit, its pressure and its listeners.
///
/// ```
/// use cualloc::resource::{Guard, MemoryResource, OomPolicy, Pressure};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let guard = Guard::builder().budget(Some(1000)).policy(OomPolicy::FreeCaches).build(allocator)?;
/// let block = guard.allocate_block(960, &stream, "most".into())?;
/// assert_eq!(guard.inner().pressure(), Pressure::High);
/// assert!(guard.allocate_block(41, &stream, "rest".into()).is_err());
/// guard.inner().set_limit(None);
/// let more = guard.allocate_block(41, &stream, "rest".into())?;
/// # guard.deallocate_block(more)?;
/// # guard.deallocate_block(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Guard<R> = Relief<Budget<R>>;

/// Figures of a [`Guard`]. Bytes, unless a name says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GuardStats {
    /// Bytes that count against the budget, live and pending.
    pub used: u64,
    /// The budget, if there is one.
    pub budget: Option<u64>,
    /// The most of them since the start or the last reset.
    pub peak: u64,
    /// Bytes free on the device, by the driver's account; none if it could not be asked.
    pub device_free: Option<u64>,
    /// Bytes of the device, likewise.
    pub device_total: Option<u64>,
    /// Allocations that have not left.
    pub live_allocations: u64,
    /// Requests that failed at first and went through after hooks or the policy had done their work.
    pub oom_recoveries: u64,
}

impl<R: MemoryResource> Guard<R> {
    /// The figures.
    pub fn stats(&self) -> GuardStats {
        let budget = self.inner();
        let device = budget.context().enter();
        let device = device.and_then(|entered| entered.mem_info()).ok();
        // Before the peak, so that the peak is not below it.
        let used = budget.used();
        GuardStats {
            used,
            budget: budget.limit(),
            peak: budget.peak().max(used),
            device_free: device.map(|device| device.free),
            device_total: device.map(|device| device.total),
            live_allocations: budget.allocations(),
            oom_recoveries: self.recoveries(),
        }
    }
}

impl Guard<Allocator> {
    /// Sets up a guard.
    pub fn builder() -> GuardBuilder {
        GuardBuilder::default()
    }
}

/// Sets up a [`Guard`]. By default there is no budget and no reserve, and the policy is
/// [`OomPolicy::Fail`].
#[derive(Debug, Clone, Default)]
pub struct GuardBuilder {
    device: Option<usize>,
    budget: Option<u64>,
    reserve: usize,
    policy: OomPolicy,
    clock: Option<Arc<dyn Clock>>,
}

impl GuardBuilder {
    /// The ordinal of the device; that of the resource, or 0, if not set.
    pub fn device(mut self, ordinal: usize) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// The budget in bytes; 0 allows nothing.
    pub fn budget(mut self, bytes: Option<u64>) -> Self {
        self.budget = bytes;
        self
    }

    /// Bytes to hold in reserve, which count against the budget; see [`Relief::with_reserve`].
    pub fn reserve(mut self, bytes: usize) -> Self {
        self.reserve = bytes;
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
    /// [`Error::WrongDevice`]; those of [`Relief::with_reserve`].
    pub fn build<R: MemoryResource>(self, inner: R) -> Result<Guard<R>, Error> {
        let found = inner.device();
        let expected = self.device.unwrap_or(found);
        if expected != found {
            return Err(Error::WrongDevice { expected, found });
        }
        let mut relief = Relief::new(Budget::new(inner, self.budget)).with_policy(self.policy);
        if let Some(clock) = self.clock {
            relief = relief.with_clock(clock);
        }
        relief.with_reserve(self.reserve)
    }

    /// Guards a new allocator on the device, of a given driver.
    ///
    /// # Errors
    /// As [`Allocator::with_config`] and [`build`](Self::build).
    pub fn open(self, driver: &Driver) -> Result<Guard<Allocator>, Error> {
        let device = driver.device(self.device.unwrap_or(0))?;
        let context = Context::primary(&device)?;
        let allocator = Allocator::with_config(&context, Config::new())?;
        self.build(allocator)
    }
}
