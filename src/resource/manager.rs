//! The memory manager: typed slices of a device under a budget.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Stream, sys};

use super::block::{Access, BlockIdentity, DeallocateError, Tag};
use super::error::ResourceError;
use super::meter::{Charge, Meter};
use super::owned::OwnedBlock;
use super::recorder::{Buffer, Recordable};
use super::runtime::Runtime;
use super::traits::{MemoryResource, Outstanding};

/// Settings of a [`Manager`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ManagerConfig {
    /// The ordinal of the device.
    pub device: usize,
    /// Bytes of live slices that are allowed; none for no bound.
    pub budget: Option<u64>,
    /// Where memory comes from. Without one every allocation is an error.
    pub runtime: Option<Runtime>,
}

impl ManagerConfig {
    /// A budget in bytes for a device, without a runtime.
    pub fn new(device: usize, budget: Option<u64>) -> ManagerConfig {
        ManagerConfig {
            device,
            budget,
            runtime: None,
        }
    }

    /// Attaches a runtime.
    pub fn runtime(mut self, runtime: &Runtime) -> ManagerConfig {
        self.runtime = Some(runtime.clone());
        self
    }
}

/// Gives out typed slices of one device's memory, up to a budget of live bytes, exact to the byte.
/// Cheap to clone; slices keep it alive.
///
/// The budget bounds what is live: a slice leaves it when it is dropped, also while its memory is
/// still pending below. [`outstanding`](Self::outstanding) tells both apart; to bound their sum put
/// a [`Budget`](super::Budget) into the runtime's stack. Both then apply, and refuse in the same
/// way.
///
/// ```
/// use cualloc::resource::{Manager, ManagerConfig, ResourceError, Runtime};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// let runtime = Runtime::on(&context)?;
/// let manager = Manager::new(ManagerConfig::new(0, Some(1024)).runtime(&runtime))?;
/// let (_, stream) = runtime.streams().acquire()?;
/// let slice = manager.allocate::<f32>(256, &stream)?;
/// assert_eq!((manager.allocated(), manager.remaining()), (1024, Some(0)));
/// let refused = manager.allocate::<u8>(2048, &stream);
/// assert!(matches!(
///     refused,
///     Err(ResourceError::OutOfBudget { requested: 2048, limit: 1024, .. })
/// ));
/// drop(slice);
/// assert_eq!(manager.allocated(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Manager(Arc<Inner>);

struct Inner {
    id: u64,
    device: usize,
    runtime: Option<Runtime>,
    meter: Arc<Meter>,
    requests: AtomicU64,
}

impl Manager {
    /// A manager.
    ///
    /// # Errors
    /// [`ResourceError::WrongDevice`] if the runtime is another device's.
    pub fn new(config: ManagerConfig) -> Result<Manager, ResourceError> {
        if let Some(runtime) = &config.runtime
            && runtime.device() != config.device
        {
            return Err(ResourceError::WrongDevice {
                expected: config.device,
                found: runtime.device(),
            });
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Ok(Manager(Arc::new(Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device: config.device,
            runtime: config.runtime,
            meter: Meter::new("manager", config.budget),
            requests: AtomicU64::new(0),
        })))
    }

    /// Tells it from every other manager of the process; starts at 1 and is never used again.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The ordinal of the device.
    pub fn device(&self) -> usize {
        self.0.device
    }

    /// The runtime, if one is attached.
    pub fn runtime(&self) -> Option<&Runtime> {
        self.0.runtime.as_ref()
    }

    /// Allocates `count` elements, whose contents are undefined. No elements, or elements without
    /// a size, give an empty slice without a driver call.
    ///
    /// # Errors
    /// [`ResourceError::NoRuntime`], [`ResourceError::SizeOverflow`],
    /// [`ResourceError::OutOfBudget`] by this budget or one below, and any other of the runtime's.
    /// Nothing has changed then.
    pub fn allocate<T>(&self, count: usize, stream: &Stream) -> Result<Slice<T>, ResourceError> {
        self.allocate_tagged(count, stream, Tag::default())
    }

    /// [`allocate`](Self::allocate) with a label.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_tagged<T>(
        &self,
        count: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Slice<T>, ResourceError> {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        let size = size_of::<T>();
        let overflow = ResourceError::SizeOverflow { count, size };
        let bytes = count.checked_mul(size).ok_or(overflow)?;
        if bytes == 0 {
            return Ok(Slice::of(self, 0, count, Held::default()));
        }
        let runtime = self.runtime().ok_or(ResourceError::NoRuntime {
            device: self.device(),
        })?;
        // An error below drops the charge.
        let charge = self.0.meter.charge(bytes as u64)?;
        let resource = Arc::clone(runtime.resource());
        let align = align_of::<T>();
        let block = resource.allocate_block_aligned(bytes, align, stream, tag)?;
        let ptr = block.ptr();
        let held = Held {
            block: Some(OwnedBlock::from_parts(resource, block)),
            charge: Some(charge),
            external: false,
        };
        Ok(Slice::of(self, ptr, count, held))
    }

    /// Names memory that somebody else owns as a slice: it counts against no budget, belongs to no
    /// block, and is not freed.
    ///
    /// # Safety
    /// `ptr` is the address of `count` elements of device memory of this device, aligned for `T`,
    /// that outlive the slice.
    pub unsafe fn external<T>(&self, ptr: sys::CUdeviceptr, count: usize) -> Slice<T> {
        let held = Held {
            external: true,
            ..Held::default()
        };
        Slice::of(self, ptr, count, held)
    }

    /// Bytes of live slices.
    pub fn allocated(&self) -> u64 {
        self.0.meter.used()
    }

    /// The most of them since the start or the last reset; never below
    /// [`allocated`](Self::allocated).
    pub fn peak(&self) -> u64 {
        self.0.meter.peak()
    }

    /// Sets the peak to what is live.
    pub fn reset_peak(&self) {
        self.0.meter.reset_peak();
    }

    /// Requests for memory since the start or the last reset, also those that failed: 0 over a
    /// measured region proves that it allocates nothing.
    pub fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }

    /// Sets the number of requests to 0.
    pub fn reset_requests(&self) {
        self.0.requests.store(0, Ordering::Relaxed);
    }

    /// The budget in bytes.
    pub fn budget(&self) -> Option<u64> {
        self.0.meter.limit()
    }

    /// Bytes that are left of the budget; none without one.
    pub fn remaining(&self) -> Option<u64> {
        self.0.meter.remaining()
    }

    /// Whether `bytes` would fit now, without taking them.
    ///
    /// # Errors
    /// [`ResourceError::OutOfBudget`].
    pub fn check(&self, bytes: u64) -> Result<(), ResourceError> {
        self.0.meter.check(bytes)
    }

    /// Live and pending bytes of the runtime, other users' included; nothing without a runtime.
    pub fn outstanding(&self) -> Outstanding {
        self.runtime()
            .map(|runtime| runtime.resource().outstanding())
            .unwrap_or_default()
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager")
            .field("device", &self.0.device)
            .field("meter", &self.0.meter)
            .finish_non_exhaustive()
    }
}

/// What a slice owns. The fields are dropped in this order.
#[derive(Debug, Default)]
struct Held {
    block: Option<OwnedBlock<Arc<dyn MemoryResource>>>,
    #[expect(dead_code, reason = "held for its drop")]
    charge: Option<Charge>,
    external: bool,
}

/// `len` elements of device memory that go back to their [`Manager`] when they are dropped.
///
/// `Send` and `Sync`: it is an address with a lifetime; nothing in it is read on the host.
pub struct Slice<T> {
    manager: Manager,
    ptr: sys::CUdeviceptr,
    len: usize,
    held: Held,
    elements: PhantomData<fn() -> T>,
}

impl<T> Slice<T> {
    fn of(manager: &Manager, ptr: sys::CUdeviceptr, len: usize, held: Held) -> Slice<T> {
        Slice {
            manager: manager.clone(),
            ptr,
            len,
            held,
            elements: PhantomData,
        }
    }

    /// The first element's address; 0 if there are no bytes.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        // Checked when it was made.
        self.len * size_of::<T>()
    }

    /// The manager.
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// The runtime's block; none for an empty slice and for memory of somebody else.
    pub fn block(&self) -> Option<BlockIdentity> {
        self.held.block.as_ref().and_then(OwnedBlock::identity)
    }

    /// The same memory as bytes; it is freed once, with the result.
    pub fn into_bytes(self) -> Slice<u8> {
        Slice {
            len: self.bytes(),
            manager: self.manager,
            ptr: self.ptr,
            held: self.held,
            elements: PhantomData,
        }
    }

    /// Lets work given to a stream from now on access the slice. Memory without a block needs
    /// nothing.
    ///
    /// # Errors
    /// As [`MemoryResource::prepare_use`].
    pub fn prepare_use(&self, stream: &Stream, access: Access) -> Result<(), ResourceError> {
        match (&self.held.block, self.block()) {
            (Some(owned), Some(block)) => owned.resource().prepare_use(&block, stream, access),
            _ => Ok(()),
        }
    }

    /// Says that the work was given to the stream.
    ///
    /// # Errors
    /// As [`MemoryResource::finish_use`].
    pub fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), ResourceError> {
        match (&self.held.block, self.block()) {
            (Some(owned), Some(block)) => owned.resource().finish_use(&block, stream, access),
            _ => Ok(()),
        }
    }

    /// Frees it; unlike a drop it reports failures, and gives the slice back with them.
    ///
    /// # Errors
    /// As [`MemoryResource::deallocate_block`].
    pub fn free(mut self) -> Result<(), SliceFreeError<T>> {
        let Some(owned) = self.held.block.take() else {
            return Ok(());
        };
        let resource = Arc::clone(owned.resource());
        match owned.free() {
            Ok(()) => Ok(()),
            Err(DeallocateError { block, error }) => {
                self.held.block = Some(OwnedBlock::from_parts(resource, *block));
                Err(SliceFreeError {
                    slice: Box::new(self),
                    error,
                })
            }
        }
    }
}

/// A slice that could not be freed, and why. It is still allocated.
#[derive(Debug, thiserror::Error)]
#[error("the slice at {:#x} could not be freed", slice.ptr())]
pub struct SliceFreeError<T> {
    /// The slice.
    pub slice: Box<Slice<T>>,
    /// The reason.
    #[source]
    pub error: ResourceError,
}

impl<T> Recordable for Slice<T> {
    fn buffer(&self) -> Buffer {
        match self.block() {
            Some(block) => Buffer::Block(block),
            None if self.bytes() == 0 => Buffer::Empty,
            None if self.held.external => Buffer::External,
            None => Buffer::Untracked,
        }
    }
}

impl<T> fmt::Debug for Slice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("len", &self.len)
            .field("block", &self.block())
            .finish_non_exhaustive()
    }
}
