//! The memory manager: memory of a device under a budget of live bytes.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::allocator::{Counter, Request};
use crate::block::{BlockId, Tag};
use crate::driver::{Context, KernelParam, Stream, process, sys};
use crate::error::{Error, InvalidArgument, Refused};

use super::block::{Access, RawBlock};
use super::cuda_memory::CudaMemory;
use super::launch::LaunchBuffer;
use super::meter::Meter;
use super::owned::OwnedBlock;
use super::runtime::DeviceRuntime;
use super::table::next_source;
use super::traits::MemoryResource;
use super::usage::Usage;

/// Gives out memory of one device up to a budget of live bytes, exact to the byte: as typed slices, and as a
/// resource for columns, tables, buffers and further adaptors. Cheap to clone; slices keep it alive.
///
/// Memory comes from the runtime's stack. A manager without a runtime gives typed slices only, each straight from
/// the driver, as [`CudaMemory`] does, in the context of the slice's stream; raw blocks are refused then.
///
/// The budget bounds what is live: a block leaves it when it is deallocated, also while its memory is
/// still pending below. The [`usage`](MemoryResource::usage) of the runtime's stack tells both apart; to bound their
/// sum put a [`Budget`](super::Budget) into that. Both then apply, and refuse in the same way.
///
/// ```
/// use cualloc::resource::{DeviceRuntime, Manager, MemoryResource};
/// use cualloc::{Error, Request};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let runtime = DeviceRuntime::on(&context)?;
/// let manager = Manager::new(0, Some(1024)).with_runtime(&runtime)?;
/// let (_, stream) = runtime.streams().acquire()?;
/// let slice = manager.allocate::<f32>(256, &stream)?;
/// assert_eq!(manager.usage()?.remaining(), Some(0));
/// let refused = manager.allocate_block(&Request::new(2048), &stream);
/// assert!(matches!(
///     refused,
///     Err(Error::OverBudget { requested: 2048, limit: 1024, .. })
/// ));
/// drop(slice);
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
    /// Of a manager without a runtime, one for each context.
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

    fn below(&self) -> Result<&Arc<dyn MemoryResource>, Error> {
        let device = self.0.ordinal;
        let runtime = self.runtime().ok_or(Error::NoRuntime { device })?;
        Ok(runtime.resource())
    }

    /// Where slices for a stream come from.
    fn source(&self, stream: &Stream) -> Result<Arc<dyn MemoryResource>, Error> {
        if let Some(runtime) = self.runtime() {
            return Ok(Arc::clone(runtime.resource()));
        }
        let context = stream.context();
        let (expected, found) = (self.0.ordinal, context.device().ordinal());
        if expected != found {
            return Err(Error::WrongDevice { expected, found });
        }
        let of_context = |known: &&Arc<CudaMemory>| {
            let known: Option<&Context> = known.context();
            known.is_some_and(|known| known.id() == context.id())
        };
        let mut direct = process::lock(&self.0.direct);
        let known = direct.iter().find(of_context).map(Arc::clone);
        Ok(known.unwrap_or_else(|| {
            let new = Arc::new(CudaMemory::new(context));
            direct.push(Arc::clone(&new));
            new
        }))
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
        let size = size_of::<T>();
        let overflow = Error::Invalid(InvalidArgument::TooLarge {
            len: count,
            element_bytes: size,
        });
        let Some(bytes) = count.checked_mul(size) else {
            self.0.requests.fetch_add(1, Ordering::Relaxed);
            return Err(overflow);
        };
        if bytes == 0 {
            self.0.requests.fetch_add(1, Ordering::Relaxed);
            return Ok(Slice::of(self, 0, count, None, false));
        }
        let request = Request::new(bytes).align(align_of::<T>()).tag(tag);
        let source = Managed {
            manager: self.clone(),
            below: self.source(stream)?,
        };
        let block = source.allocate_block(&request, stream)?;
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

    fn take(
        &self,
        below: &dyn MemoryResource,
        request: &Request,
        stream: &Stream,
    ) -> Result<RawBlock, Error> {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        // An error below drops the charge.
        let charge = self.0.meter.charge(request.bytes() as u64)?;
        let mut block = below.allocate_block(request, stream)?;
        block.attach(charge);
        Ok(block)
    }

    fn give(
        &self,
        below: &dyn MemoryResource,
        mut block: RawBlock,
    ) -> Result<(), Refused<RawBlock>> {
        // It ends here, also while the memory is pending below.
        let charge = block.detach(&self.0.meter);
        below.deallocate_block(block).map_err(|mut failure| {
            charge
                .into_iter()
                .for_each(|charge| failure.value.attach(charge));
            failure
        })
    }
}

// SAFETY: passes everything on.
unsafe impl MemoryResource for Manager {
    /// As [`MemoryResource::allocate_block`]; [`Error::NoRuntime`].
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        self.take(self.below()?, request, stream)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        match self.below() {
            Ok(below) => self.give(below, block),
            Err(error) => Err(Refused::new(block, error)),
        }
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

/// A manager over what a slice's memory came from.
#[derive(Clone)]
struct Managed {
    manager: Manager,
    below: Arc<dyn MemoryResource>,
}

// SAFETY: passes everything on.
unsafe impl MemoryResource for Managed {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        self.manager.take(&*self.below, request, stream)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.manager.give(&*self.below, block)
    }

    fn ordinal(&self) -> usize {
        self.below.ordinal()
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&*self.below)
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

    /// Who its block is; none for an empty slice and for memory of somebody else.
    pub fn id(&self) -> Option<BlockId> {
        self.block.as_ref().and_then(OwnedBlock::id)
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
        match (&self.block, self.id()) {
            (Some(owned), Some(block)) => owned.resource().prepare_use(&block, stream, access),
            _ => Ok(()),
        }
    }

    /// Says that the work was given to the stream.
    ///
    /// # Errors
    /// As [`MemoryResource::finish_use`].
    pub fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        match (&self.block, self.id()) {
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

impl<T> LaunchBuffer for Slice<T> {
    fn launch_id(&self) -> Option<BlockId> {
        self.id()
    }

    fn is_external(&self) -> bool {
        self.external && self.bytes() > 0
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
            .field("block", &self.id())
            .finish_non_exhaustive()
    }
}
