//! The memory manager: typed slices of a device under a budget.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Context, KernelParam, Stream, process, sys};

use super::block::{Access, BlockIdentity, ResourceBlock, Tag};
use super::direct::DirectResource;
use super::meter::Meter;
use super::owned::OwnedBlock;
use super::recorder::{Buffer, Recordable};
use super::runtime::Runtime;
use super::traits::{MemoryResource, Outstanding};
use crate::error::{Error, InvalidArgument, Refused};

/// Settings of a [`Manager`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ManagerConfig {
    /// The ordinal of the device.
    pub device: usize,
    /// Bytes of live slices that are allowed; none for no bound.
    pub budget: Option<u64>,
    /// Where memory comes from. Without one typed slices are allocations of the driver's, and raw blocks
    /// are refused.
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
/// Memory comes from the runtime's stack. A manager without a runtime takes each slice straight from the
/// driver, as [`DirectResource`] does, in the context of the slice's stream.
///
/// The budget bounds what is live: a slice leaves it when it is dropped, also while its memory is
/// still pending below. [`outstanding`](Self::outstanding) tells both apart; to bound their sum put
/// a [`Budget`](super::Budget) into the runtime's stack. Both then apply, and refuse in the same
/// way.
///
/// ```
/// use cualloc::Error;
/// use cualloc::resource::{Manager, ManagerConfig, Runtime};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let runtime = Runtime::on(&context)?;
/// let manager = Manager::new(ManagerConfig::new(0, Some(1024)).runtime(&runtime))?;
/// let (_, stream) = runtime.streams().acquire()?;
/// let slice = manager.allocate::<f32>(256, &stream)?;
/// assert_eq!((manager.allocated(), manager.remaining()), (1024, Some(0)));
/// let refused = manager.allocate::<u8>(2048, &stream);
/// assert!(matches!(
///     refused,
///     Err(Error::OverBudget { requested: 2048, limit: 1024, .. })
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
    /// Of a manager without a runtime, one for each context.
    direct: Mutex<Vec<Arc<DirectResource>>>,
}

impl Manager {
    /// A manager.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if the runtime is another device's.
    pub fn new(config: ManagerConfig) -> Result<Manager, Error> {
        if let Some(runtime) = &config.runtime
            && runtime.device() != config.device
        {
            return Err(Error::WrongDevice {
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
            direct: Mutex::default(),
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

    /// The runtime's stack under this manager's budget: for raw blocks, columns, tables and further
    /// adaptors. Clones share the budget.
    ///
    /// # Errors
    /// [`Error::NoRuntime`].
    ///
    /// ```
    /// use std::sync::Arc;
    /// use cualloc::column::{Column, ElementType};
    /// use cualloc::resource::{Manager, ManagerConfig, Runtime};
    /// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
    /// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
    /// # let driver = sim.driver()?;
    /// # let context = driver.context(0)?;
    /// let runtime = Runtime::on(&context)?;
    /// let manager = Manager::new(ManagerConfig::new(0, Some(1024)).runtime(&runtime))?;
    /// let (_, stream) = runtime.streams().acquire()?;
    /// let column = Column::uninit_in(Arc::new(manager.resource()?), ElementType::F32, 100, &stream)?;
    /// assert_eq!(manager.allocated(), 400);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resource(&self) -> Result<Managed, Error> {
        let runtime = self.runtime().ok_or(Error::NoRuntime {
            device: self.device(),
        })?;
        Ok(self.over(Arc::clone(runtime.resource())))
    }

    fn over(&self, resource: Arc<dyn MemoryResource>) -> Managed {
        Managed {
            manager: self.clone(),
            resource,
        }
    }

    /// Where slices for a stream come from.
    fn source(&self, stream: &Stream) -> Result<Managed, Error> {
        if self.runtime().is_some() {
            return self.resource();
        }
        let context = stream.context();
        let (expected, found) = (self.device(), context.device().ordinal());
        if expected != found {
            return Err(Error::WrongDevice { expected, found });
        }
        let mut direct = process::lock(&self.0.direct);
        let known = direct
            .iter()
            .find(|known| known.context().id() == context.id());
        let resource = match known {
            Some(known) => Arc::clone(known),
            None => {
                let new = Arc::new(DirectResource::new(context));
                direct.push(Arc::clone(&new));
                new
            }
        };
        Ok(self.over(resource))
    }

    /// Allocates `count` elements, whose contents are undefined. No elements, or elements without
    /// a size, give an empty slice without a driver call.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`Error::OverBudget`] by this budget or one below, and
    /// any other of the runtime's; [`Error::WrongDevice`] without a runtime for a stream of
    /// another device. Nothing has changed then.
    pub fn allocate<T>(&self, count: usize, stream: &Stream) -> Result<Slice<T>, Error> {
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
    ) -> Result<Slice<T>, Error> {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        let size = size_of::<T>();
        let overflow = Error::Invalid(InvalidArgument::TooLarge {
            len: count,
            element_bytes: size,
        });
        let bytes = count.checked_mul(size).ok_or(overflow)?;
        if bytes == 0 {
            return Ok(Slice::of(self, 0, count, None, false));
        }
        let source = self.source(stream)?;
        let block = source.take(bytes, align_of::<T>(), stream, tag)?;
        let (ptr, block) = (block.ptr(), OwnedBlock::from_parts(source, block));
        Ok(Slice::of(self, ptr, count, Some(block), false))
    }

    /// Names memory that somebody else owns as a slice: it counts against no budget, belongs to no
    /// block, and is not freed.
    ///
    /// # Safety
    /// `ptr` is the address of `count` elements of device memory of this device, aligned for `T`,
    /// that outlive the slice.
    pub unsafe fn external<T>(&self, ptr: sys::CUdeviceptr, count: usize) -> Slice<T> {
        Slice::of(self, ptr, count, None, true)
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
    /// [`Error::OverBudget`].
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
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

/// The memory that a [`Manager`] bounds, as a resource: blocks count against the manager's budget while
/// they are live. Cheap to clone.
#[derive(Clone)]
pub struct Managed {
    manager: Manager,
    resource: Arc<dyn MemoryResource>,
}

impl Managed {
    /// The manager.
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    fn take(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        // An error below drops the charge.
        let charge = self.manager.0.meter.charge(bytes as u64)?;
        let mut block = self
            .resource
            .allocate_block_aligned(bytes, alignment, stream, tag)?;
        block.attach(charge);
        Ok(block)
    }
}

impl fmt::Debug for Managed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Managed").field(&self.manager).finish()
    }
}

// SAFETY: passes everything on.
unsafe impl MemoryResource for Managed {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        self.manager.0.requests.fetch_add(1, Ordering::Relaxed);
        self.take(bytes, alignment, stream, tag)
    }

    fn deallocate_block(&self, mut block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        // It ends here, also while the memory is pending below.
        let charge = block.detach(&self.manager.0.meter);
        self.resource
            .deallocate_block(block)
            .map_err(|mut failure| {
                charge
                    .into_iter()
                    .for_each(|charge| failure.value.attach(charge));
                failure
            })
    }

    fn headroom(&self) -> Option<u64> {
        let below = self.resource.headroom();
        self.manager.remaining().into_iter().chain(below).min()
    }

    fn context(&self) -> &Context {
        self.resource.context()
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&*self.resource)
    }
}

/// `len` elements of device memory that go back to their [`Manager`] when they are dropped.
///
/// `Send` and `Sync`: it is an address with a lifetime; nothing in it is read on the host.
pub struct Slice<T> {
    manager: Manager,
    ptr: sys::CUdeviceptr,
    len: usize,
    block: Option<OwnedBlock<Managed>>,
    external: bool,
    elements: PhantomData<fn() -> T>,
}

impl<T> Slice<T> {
    fn of(
        manager: &Manager,
        ptr: sys::CUdeviceptr,
        len: usize,
        block: Option<OwnedBlock<Managed>>,
        external: bool,
    ) -> Slice<T> {
        Slice {
            manager: manager.clone(),
            ptr,
            len,
            block,
            external,
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

    /// The block under it; none for an empty slice and for memory of somebody else.
    pub fn block(&self) -> Option<BlockIdentity> {
        self.block.as_ref().and_then(OwnedBlock::identity)
    }

    /// The block, with its charge: for a [`Column`](crate::column::Column) of it. None for an empty slice
    /// and for memory of somebody else.
    pub fn into_owned(self) -> Option<OwnedBlock<Arc<dyn MemoryResource>>> {
        let owned = self.block?;
        let resource: Arc<dyn MemoryResource> = Arc::new(owned.resource().clone());
        Some(OwnedBlock::from_parts(resource, owned.into_block()?))
    }

    /// The same memory as bytes; it is freed once, with the result.
    pub fn into_bytes(self) -> Slice<u8> {
        Slice {
            len: self.bytes(),
            manager: self.manager,
            ptr: self.ptr,
            block: self.block,
            external: self.external,
            elements: PhantomData,
        }
    }

    /// Lets work given to a stream from now on access the slice. Memory without a block needs
    /// nothing.
    ///
    /// # Errors
    /// As [`MemoryResource::prepare_use`].
    pub fn prepare_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        match (&self.block, self.block()) {
            (Some(owned), Some(block)) => owned.resource().prepare_use(&block, stream, access),
            _ => Ok(()),
        }
    }

    /// Says that the work was given to the stream.
    ///
    /// # Errors
    /// As [`MemoryResource::finish_use`].
    pub fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        match (&self.block, self.block()) {
            (Some(owned), Some(block)) => owned.resource().finish_use(&block, stream, access),
            _ => Ok(()),
        }
    }

    /// Frees it; unlike a drop it reports failures, and gives the slice back with them.
    ///
    /// # Errors
    /// As [`MemoryResource::deallocate_block`].
    pub fn free(mut self) -> Result<(), Refused<Slice<T>>> {
        let Some(owned) = self.block.take() else {
            return Ok(());
        };
        let resource = owned.resource().clone();
        match owned.free() {
            Ok(()) => Ok(()),
            Err(Refused { value, error }) => {
                self.block = Some(OwnedBlock::from_parts(resource, *value));
                Err(Refused::new(self, error))
            }
        }
    }
}

impl<T> Recordable for Slice<T> {
    fn buffer(&self) -> Buffer {
        match self.block() {
            Some(block) => Buffer::Block(block),
            None if self.bytes() == 0 => Buffer::Empty,
            None if self.external => Buffer::External,
            None => Buffer::Untracked,
        }
    }
}

// SAFETY: the address of its first element is what the driver reads.
unsafe impl<T> KernelParam for Slice<T> {
    fn as_param(&self) -> *const c_void {
        (&raw const self.ptr).cast()
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
