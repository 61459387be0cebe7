//! The memory manager: memory of a device under a budget of live bytes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Counter, Request};
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream, process};
use crate::error::{Error, Refused};

use super::block::RawBlock;
use super::cuda_memory::CudaMemory;
use super::meter::Meter;
use super::runtime::DeviceRuntime;
use super::table::next_source;
use super::traits::MemoryResource;
use super::usage::Usage;
use crate::locks::held::Mutex;

/// Gives out memory of one device up to a budget of live bytes, exact to the byte: a resource for buffers, columns,
/// tables and further adaptors. Cheap to clone; buffers keep it alive.
///
/// Memory comes from the runtime's stack. A manager without a runtime serves typed buffers only, each straight from
/// the driver, as [`CudaMemory`] does, in the context of the buffer's stream; raw blocks are refused then.
///
/// The budget bounds what is live: a block leaves it when it is deallocated, also while its memory is
/// still pending below. The [`usage`](MemoryResource::usage) of the runtime's stack tells both apart; to bound their
/// sum put a [`Budget`](super::Budget) into that. Both then apply, and refuse in the same way.
///
/// ```
/// use cualloc::resource::{DeviceRuntime, Manager, MemoryResource};
/// use cualloc::{DeviceBuffer, Error, Request};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let runtime = DeviceRuntime::on(&context)?;
/// let manager = Manager::new(0, Some(1024)).with_runtime(&runtime)?;
/// let (_, stream) = runtime.streams().acquire()?;
/// let buffer = DeviceBuffer::<f32>::zeroed(&manager, 256, &stream)?;
/// assert_eq!(manager.usage()?.remaining(), Some(0));
/// let refused = manager.allocate_block(&Request::new(2048), &stream);
/// assert!(matches!(
///     refused,
///     Err(Error::OverBudget { requested: 2048, limit: 1024, .. })
/// ));
/// drop(buffer);
/// assert_eq!(manager.usage()?.requested.current, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Manager(Arc<Inner>);

struct Inner {
    id: u64,
    ordinal: usize,
    runtime: Option<DeviceRuntime>,
    meter: Arc<Meter>,
    requests: AtomicU64,
    /// The resources of a manager without a runtime, one for each context.
    direct: Mutex<Vec<Arc<CudaMemory>>>,
}

impl Manager {
    /// A manager of a device, without a runtime, with a budget in bytes; none bounds nothing.
    pub fn new(ordinal: usize, budget: Option<u64>) -> Manager {
        Manager::of(ordinal, budget, None)
    }

    /// A manager of the same device and budget, whose memory comes from a runtime.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if the runtime is another device's.
    pub fn with_runtime(self, runtime: &DeviceRuntime) -> Result<Manager, Error> {
        let (expected, found) = (self.0.ordinal, runtime.resource().ordinal());
        if expected != found {
            return Err(Error::WrongDevice { expected, found });
        }
        let runtime = Some(runtime.clone());
        Ok(Manager::of(expected, self.0.meter.limit(), runtime))
    }

    fn of(ordinal: usize, budget: Option<u64>, runtime: Option<DeviceRuntime>) -> Manager {
        Manager(Arc::new(Inner {
            id: next_source(),
            ordinal,
            runtime,
            meter: Meter::new("manager", budget),
            requests: AtomicU64::new(0),
            direct: Mutex::default(),
        }))
    }

    /// The runtime, if one is attached.
    pub fn runtime(&self) -> Option<&DeviceRuntime> {
        self.0.runtime.as_ref()
    }

    /// Whether `bytes` would fit now, without taking them.
    ///
    /// # Errors
    /// [`Error::OverBudget`].
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        self.0.meter.check(bytes)
    }

    /// What a request goes to. Only the memory of typed owners comes from elsewhere than a runtime.
    fn below(&self, request: &Request, stream: &Stream) -> Result<Arc<dyn MemoryResource>, Error> {
        if let Some(runtime) = self.runtime() {
            return Ok(Arc::clone(runtime.resource()));
        }
        let (context, expected) = (stream.context(), self.0.ordinal);
        if request.element.is_none() {
            return Err(Error::NoRuntime { device: expected });
        }
        let found = context.device().ordinal();
        if expected != found {
            return Err(Error::WrongDevice { expected, found });
        }
        let of_context = |known: &Arc<CudaMemory>| {
            let known = known.context().map(Context::id);
            known == Some(context.id())
        };
        let mut direct = process::lock(&self.0.direct);
        if let Some(known) = direct.iter().find(|known| of_context(known)) {
            return Ok(Arc::<CudaMemory>::clone(known));
        }
        let new = Arc::new(CudaMemory::new(context));
        direct.push(Arc::clone(&new));
        Ok(new)
    }

    /// Where a block came from.
    fn source(&self, id: &BlockId) -> Option<Arc<dyn MemoryResource>> {
        if let Some(runtime) = self.runtime() {
            return Some(Arc::clone(runtime.resource()));
        }
        let direct = process::lock(&self.0.direct);
        let source = direct.iter().find(|known| known.id() == id.source());
        Some(Arc::<CudaMemory>::clone(source?))
    }
}

// SAFETY: passes everything on.
unsafe impl MemoryResource for Manager {
    /// As [`MemoryResource::allocate_block`]; [`Error::NoRuntime`]. Without a runtime also [`Error::WrongDevice`]
    /// for a stream of another device.
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        let below = self.below(request, stream)?;
        // An error below drops the charge.
        let charge = self.0.meter.charge(request.bytes() as u64)?;
        let mut block = below.allocate_block(request, stream)?;
        block.attach(charge);
        Ok(block)
    }

    fn deallocate_block(&self, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let Some(source) = self.source(&block.id()) else {
            let error = block.id().gone();
            return Err(Refused::new(block, error));
        };
        // It ends here, also while the memory is pending below.
        let charge = block.detach(&self.0.meter);
        source.deallocate_block(block).map_err(|mut failure| {
            charge
                .into_iter()
                .for_each(|charge| failure.value.attach(charge));
            failure
        })
    }

    fn state(&self, id: &BlockId) -> BlockState {
        self.source(id)
            .map_or(BlockState::Free, |source| source.state(id))
    }

    fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&**self.runtime()?.resource())
    }

    /// A number of its own.
    fn id(&self) -> u64 {
        self.0.id
    }

    /// As the runtime says, but for what the manager bounds: live bytes, the number of live blocks, requests
    /// (also those that failed: none over a measured region prove that it allocates nothing), and the limit. What is
    /// pending below does not count.
    fn usage(&self) -> Result<Usage, Error> {
        let below = self.upstream().map(MemoryResource::usage).transpose()?;
        let mut usage = below.unwrap_or_default();
        usage.requested = self.0.meter.counter();
        usage.blocks = Counter {
            current: self.0.meter.count(),
            ..Counter::default()
        };
        usage.pending = 0;
        usage.requests = self.0.requests.load(Ordering::Relaxed);
        usage.limit = self.0.meter.limit();
        Ok(usage)
    }

    fn headroom(&self) -> Option<u64> {
        let below = self.upstream().and_then(MemoryResource::headroom);
        self.0.meter.remaining().into_iter().chain(below).min()
    }

    fn reset_peak_stats(&self) {
        self.0.meter.reset_peak();
        if let Some(below) = self.upstream() {
            below.reset_peak_stats();
        }
    }

    fn reset_accumulated_stats(&self) {
        self.0.requests.store(0, Ordering::Relaxed);
        if let Some(below) = self.upstream() {
            below.reset_accumulated_stats();
        }
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager")
            .field("ordinal", &self.0.ordinal)
            .field("meter", &self.0.meter)
            .finish_non_exhaustive()
    }
}
