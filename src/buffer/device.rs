//! A typed buffer with its own memory.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::RangeBounds;
use std::sync::Arc;

use crate::allocator::{Allocator, Block, Request};
use crate::block::BlockId;
use crate::driver::{Device, KernelParam, Stream, sys};
use crate::resource::{Access, LaunchBuffer, MemoryResource, RawBlock, Source};

use super::element::{DeviceCopy, FillValue, Pod, bytes_of, check_aligned};
use super::flight::CopyInFlight;
use super::order::Memory;
use super::owner::{Foreign, Loan, Owner};
use super::pinned::PinnedBuffer;
use super::slice::{DeviceSlice, DeviceSliceMut, describe};
use crate::error::{Error, InvalidArgument, Refused};

/// Device memory for `len` elements, with one owner: the counterpart of a `Vec` with a fixed length.
///
/// The memory comes from an [`Allocator`], a pool, a stack of adaptors, or foreign code
/// ([`from_raw_parts`](Self::from_raw_parts)), and is returned to its source.
///
/// Memory that was never written is a `DeviceBuffer<MaybeUninit<T>>`, created by [`uninit`](Self::uninit) and converted
/// by [`assume_init`](Self::assume_init). A buffer without elements has no memory and makes no driver call. Every
/// buffer counts as `len * size_of::<T>()` requested bytes in [`Stats`](crate::Stats).
///
/// Dropping the buffer frees it in the order of its stream: work submitted before on that stream or through the buffer
/// may still use the memory.
///
/// `Send` and `Sync`. If its stream is a per-thread default stream, operations that need the stream fail on other
/// threads ([`Error::Stream`]). See the [module](crate::buffer) for the order of operations and for kernels.
///
/// ```compile_fail,E0382
/// # use cualloc::*;
/// fn use_after_free(buffer: DeviceBuffer<u32>) {
///     let _ = buffer.free();
///     buffer.len();
/// }
/// ```
/// ```compile_fail,E0505
/// # use cualloc::*;
/// fn part_outlives_buffer(buffer: DeviceBuffer<u32>) {
///     let part = buffer.as_slice();
///     drop(buffer);
///     part.len();
/// }
/// ```
/// ```compile_fail,E0502
/// # use cualloc::*;
/// fn two_borrows(mut buffer: DeviceBuffer<u32>, stream: &driver::Stream) {
///     let part = buffer.as_slice();
///     let _ = buffer.as_mut_slice().fill(1, stream);
///     part.len();
/// }
/// ```
pub struct DeviceBuffer<T: DeviceCopy> {
    /// None if there are no bytes.
    memory: Option<Memory>,
    /// The address of the first byte, for kernels that take the buffer as a parameter; 0 without memory.
    ptr: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    /// Allocates uninitialised memory for `len` elements, for use on `stream`, the buffer's home.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`] before any driver call, and those of [`Allocator::allocate_with`] or
    /// [`MemoryResource::allocate_block`].
    pub fn uninit(
        from: &impl Source,
        len: usize,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        let memory = match bytes_of::<T>(len)? {
            0 => None,
            bytes => Some(allocate::<T>(from, Request::new(bytes), stream)?),
        };
        Ok(DeviceBuffer::new(memory, len))
    }

    /// Like [`uninit`](Self::uninit), with the constraints of a request, whose size must be that of the elements. The
    /// memory is at least aligned for the type, whatever the request says.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] if the size is not a positive multiple of the element size, and as for
    /// [`uninit`](Self::uninit).
    pub fn uninit_with(
        from: &impl Source,
        request: Request,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        let bytes = request.bytes();
        let size = size_of::<T>();
        if size == 0 || bytes == 0 || !bytes.is_multiple_of(size) {
            let bytes = bytes as u64;
            return Err(Error::Invalid(InvalidArgument::Size { bytes }));
        }
        bytes_of::<T>(bytes / size)?;
        let memory = allocate::<T>(from, request, stream)?;
        Ok(DeviceBuffer::new(Some(memory), bytes / size))
    }

    /// Like [`uninit`](Self::uninit), but only from cached memory.
    pub(crate) fn uninit_cached(
        from: &impl Source,
        len: usize,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        match bytes_of::<T>(len)? {
            0 => Ok(DeviceBuffer::new(None, len)),
            bytes => Self::uninit_with(from, Request::new(bytes).cached_only(), stream),
        }
    }

    /// Allocates elements whose bytes are all zero. Returns before the memory is written; every later operation on the
    /// buffer is ordered after that.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed(from: &impl Source, len: usize, stream: &Stream) -> Result<Self, Error> {
        // SAFETY: zeroed in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(from, len, stream)?.assume_init() };
        buffer.as_mut_slice().set_zero(stream)?;
        Ok(buffer)
    }

    /// Allocates elements that all have one value. Returns before the memory is written, like [`zeroed`](Self::zeroed).
    /// Fails like [`zeroed`](Self::zeroed).
    pub fn filled(from: &impl Source, len: usize, value: T, stream: &Stream) -> Result<Self, Error>
    where
        T: FillValue,
    {
        // SAFETY: filled in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(from, len, stream)?.assume_init() };
        buffer.as_mut_slice().fill(value, stream)?;
        Ok(buffer)
    }

    /// Allocates a copy of a slice. Waits until the copy is done. Fails like [`zeroed`](Self::zeroed).
    pub fn from_slice(from: &impl Source, values: &[T], stream: &Stream) -> Result<Self, Error> {
        // SAFETY: all elements are written before any other use of the buffer.
        let mut buffer = unsafe { Self::uninit(from, values.len(), stream)?.assume_init() };
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }

    /// Creates a buffer of the first `len` elements in a block.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`], [`InvalidArgument::Misaligned`]; they return the
    /// block.
    ///
    /// # Safety
    /// `stream` is the stream that the block was allocated on. The work that initialises the elements, and all other
    /// work that uses the block, was submitted to it, or the stream waits for that work.
    pub unsafe fn from_block(
        block: Block,
        len: usize,
        stream: &Stream,
    ) -> Result<Self, Refused<Block>> {
        let fits = || {
            let (needed, usable) = (bytes_of::<T>(len)?, block.size() as usize);
            if needed > usable {
                return Err(InvalidArgument::TooSmall { needed, usable }.into());
            }
            check_aligned::<T>(block.ptr())
        };
        if let Err(error) = fits() {
            return Err(Refused::new(block, error));
        }
        let memory = Memory::new(Owner::Block(block), stream.clone(), stream.own_id());
        Ok(Self::new(Some(memory), len))
    }

    /// Creates a buffer over foreign memory, which dropping `owner` releases.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::Misaligned`]; driver errors. The owner is then dropped.
    ///
    /// # Safety
    /// `len` elements at `ptr` are memory of the stream's device, live and not used by other code until the owner is
    /// dropped. The work that initialises them was submitted to `stream`, or the stream waits for that work. Whatever
    /// the owner does when dropped is ordered after all work submitted to the stream before.
    pub unsafe fn from_raw_parts(
        ptr: sys::CUdeviceptr,
        len: usize,
        stream: &Stream,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self, Error> {
        if bytes_of::<T>(len)? == 0 {
            return Ok(Self::new(None, len));
        }
        check_aligned::<T>(ptr)?;
        let owner = Box::new(owner);
        let foreign = Owner::Foreign(Box::new(Foreign { ptr, owner }));
        let memory = Memory::new(foreign, stream.clone(), stream.id()?);
        Ok(Self::new(Some(memory), len))
    }

    /// Creates a buffer of the first `len` elements of a resource's block of that size; its home is the stream that the
    /// block was allocated on. The resource itself detects when that stream is retired.
    #[inline]
    pub(crate) fn of_resource(
        resource: Arc<dyn MemoryResource>,
        block: RawBlock,
        stream: &Stream,
        len: usize,
    ) -> Self {
        let id = block.id().stream_id();
        let owner = Owner::Resource(Loan { resource, block });
        Self::new(Some(Memory::new(owner, stream.clone(), id)), len)
    }

    pub(crate) fn into_memory(self) -> Option<Memory> {
        self.memory
    }

    /// Creates a buffer over memory that contains `len` elements.
    pub(crate) fn from_memory(memory: Memory, len: usize) -> Self {
        Self::new(Some(memory), len)
    }

    /// Returns the home stream with its id, and the resource's block.
    pub(crate) fn loan(&self) -> Option<(&Stream, u64, &Loan)> {
        let memory = self.memory.as_ref()?;
        match memory.owner() {
            Owner::Resource(loan) => Some((memory.stream(), memory.stream_id(), loan)),
            _ => None,
        }
    }

    #[inline(always)]
    fn new(memory: Option<Memory>, len: usize) -> Self {
        DeviceBuffer {
            ptr: memory.as_ref().map_or(0, Memory::ptr),
            memory,
            len,
            elements: PhantomData,
        }
    }

    /// Converts the buffer to the allocator's block. All work done on the buffer was submitted to the block's stream,
    /// or that stream waits for it.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the memory does not come directly from an allocator, or there is none. If earlier
    /// work on another stream could not be ordered, the reason why that still fails: [`Error::Capturing`],
    /// [`Error::Stream`], driver errors; and those of [`Block::record_stream`]. They return the buffer.
    pub fn into_block(self) -> Result<Block, Refused<DeviceBuffer<T>>> {
        let len = self.len;
        match self.memory.map(Memory::into_block) {
            Some(Ok(block)) => Ok(block),
            Some(Err(failed)) => Err(failed.map(|memory| Self::new(Some(memory), len))),
            None => {
                let what = "a block of a buffer without memory";
                let none = Self::new(None, len);
                Err(Refused::new(none, Error::NotSupported { what }))
            }
        }
    }

    /// Frees the buffer; unlike a drop it reports failures, and returns the buffer with them.
    ///
    /// # Errors
    /// The reason why earlier work on another stream cannot be ordered, as for [`into_block`](Self::into_block); those
    /// of [`Block::free`] or [`MemoryResource::deallocate_block`].
    pub fn free(self) -> Result<(), Refused<DeviceBuffer<T>>> {
        let len = self.len;
        match self.memory.map(Memory::free) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(failed)) => Err(failed.map(|memory| Self::new(Some(memory), len))),
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size of the elements in bytes, not that of the block.
    pub fn byte_len(&self) -> usize {
        self.as_slice().byte_len()
    }

    /// Returns the address of the first element, for kernels and foreign code; 0 if the buffer has no memory.
    ///
    /// Using it requires `unsafe` code, which is responsible for the memory's lifetime and for order. Work submitted to
    /// the buffer's own stream while the buffer lives is ordered. Work on another stream needs
    /// [`prepare_use`](Self::prepare_use) before it and [`finish_use`](Self::finish_use) after it.
    pub fn as_device_ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Returns the buffer's home: the stream that it was allocated on. `None` if it has no memory.
    pub fn stream(&self) -> Option<&Stream> {
        self.memory.as_ref().map(Memory::stream)
    }

    /// Returns the device that has the memory. `None` if the buffer has no memory.
    pub fn device(&self) -> Option<&Device> {
        self.memory.as_ref().map(|memory| memory.context().device())
    }

    /// Returns the id of the block under the buffer. `None` if it has no memory, or foreign memory.
    pub fn id(&self) -> Option<BlockId> {
        let memory = self.memory.as_ref()?;
        memory.owner().identity(memory.stream_id())
    }

    /// Returns the resource that the memory returns to. `None` if there is no memory, or if it is foreign.
    pub fn home(&self) -> Option<Arc<dyn MemoryResource>> {
        match self.memory.as_ref()?.owner() {
            Owner::Block(block) => Some(Arc::new(Allocator::of(block))),
            Owner::Resource(loan) => Some(Arc::clone(&loan.resource)),
            Owner::Foreign(_) => None,
        }
    }

    fn with(&self, run: impl FnOnce(&Memory) -> Result<(), Error>) -> Result<(), Error> {
        self.memory.as_ref().map_or(Ok(()), run)
    }

    /// Orders everything submitted to `stream` from now on after all operations on the buffer so far. Does not wait. If
    /// the resource orders accesses ([`UseTracking::Access`](crate::resource::UseTracking::Access)), also orders it
    /// after recorded launches on other streams, as the kind of access requires.
    ///
    /// # Errors
    /// [`Error::Stream`], [`Error::Capturing`], and driver errors.
    pub fn prepare_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        self.with(|memory| memory.prepare_use(stream, access))
    }

    /// Orders all operations on the buffer from now on, including its free, after everything submitted to `stream` so
    /// far. Waits only if no event can be created.
    ///
    /// # Errors
    /// As for [`prepare_use`](Self::prepare_use). After an error, later operations establish the order, or fail until
    /// they can, and the memory is not reused before the work of `stream` is complete. A stream that is being captured
    /// is the exception: the code that captures work is responsible for the memory's lifetime until the graph is
    /// destroyed.
    pub fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        self.with(|memory| memory.finish_use(stream, access))
    }

    /// Records that another stream uses the buffer: the memory is reused only after the work submitted to that stream
    /// before the free, or ordered behind it. For work launched by `unsafe` code; the buffer's own operations record
    /// their uses.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.with(|memory| memory.record(stream, false))
    }

    /// Records that another stream has used the buffer for the last time: reuse waits only for the work submitted to
    /// that stream so far. Fails like [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        self.with(|memory| memory.record(stream, true))
    }

    /// Converts the buffer to one of bytes over the same memory.
    pub fn into_bytes(self) -> DeviceBuffer<u8>
    where
        T: Pod,
    {
        let bytes = self.byte_len();
        DeviceBuffer::new(self.memory, bytes)
    }

    /// Returns all of it, for reading.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice::new(self.memory.as_ref(), self.as_device_ptr(), self.len)
    }

    /// Returns all of it, for writing.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, T> {
        // SAFETY: the buffer is borrowed exclusively for the lifetime of the result.
        unsafe { DeviceSliceMut::new(self.as_slice()) }
    }

    /// Returns a part of it, for reading. Fails with [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'_, T>, Error> {
        self.as_slice().slice(range)
    }

    /// Returns a part of it, for writing. Fails with [`Error::OutOfBounds`].
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<DeviceSliceMut<'_, T>, Error> {
        let part = self.as_slice().slice(range)?;
        // SAFETY: the buffer is borrowed exclusively for the lifetime of the result.
        Ok(unsafe { DeviceSliceMut::new(part) })
    }

    /// [`DeviceSliceMut::copy_from_slice`] to the whole buffer: waits.
    pub fn copy_from_slice(&mut self, source: &[T]) -> Result<(), Error> {
        self.as_mut_slice().copy_from_slice(source)
    }

    /// [`DeviceSlice::copy_to_slice`] of the whole buffer: waits.
    pub fn copy_to_slice(&self, target: &mut [T]) -> Result<(), Error> {
        self.as_slice().copy_to_slice(target)
    }

    /// [`DeviceSlice::to_vec`] of the whole buffer: waits.
    pub fn to_vec(&self) -> Result<Vec<T>, Error> {
        self.as_slice().to_vec()
    }

    /// [`DeviceSliceMut::upload`] to the whole buffer: does not wait.
    pub fn upload(
        &mut self,
        host: PinnedBuffer<T>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<T>>> {
        self.as_mut_slice().upload(host, stream)
    }

    /// [`DeviceSlice::download`] of the whole buffer: does not wait.
    pub fn download(
        &self,
        host: impl Into<PinnedBuffer<MaybeUninit<T>>>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<MaybeUninit<T>>>> {
        self.as_slice().download(host, stream)
    }

    /// [`DeviceSliceMut::copy_from`] to the whole buffer: does not wait.
    pub fn copy_from(&mut self, source: &DeviceSlice<'_, T>, stream: &Stream) -> Result<(), Error> {
        self.as_mut_slice().copy_from(source, stream)
    }

    /// [`DeviceSliceMut::fill`] of the whole buffer: does not wait.
    pub fn fill(&mut self, value: T, stream: &Stream) -> Result<(), Error>
    where
        T: FillValue,
    {
        self.as_mut_slice().fill(value, stream)
    }
}

impl<T: DeviceCopy> DeviceBuffer<MaybeUninit<T>> {
    /// Declares the elements initialised.
    ///
    /// # Safety
    /// Every element has been written, by work ordered before all operations on the buffer from now on.
    pub unsafe fn assume_init(self) -> DeviceBuffer<T> {
        DeviceBuffer::new(self.memory, self.len)
    }
}

fn allocate<T: DeviceCopy>(
    from: &impl Source,
    request: Request,
    stream: &Stream,
) -> Result<Memory, Error> {
    let alignment = request.alignment().max(align_of::<T>());
    Memory::allocate(from, request.align(alignment).of::<T>(), stream)
}

/// A launch tracks a buffer by the block under it; foreign memory counts as external.
impl<T: DeviceCopy> LaunchBuffer for DeviceBuffer<T> {
    fn launch_id(&self) -> Option<BlockId> {
        self.id()
    }

    fn is_external(&self) -> bool {
        self.memory.is_some() && self.id().is_none()
    }
}

// SAFETY: the driver reads the parameter's value, the address of the first element, from the field `ptr`.
unsafe impl<T: DeviceCopy> KernelParam for DeviceBuffer<T> {
    fn as_param(&self) -> *const c_void {
        (&raw const self.ptr).cast()
    }
}

impl<T: DeviceCopy> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("DeviceBuffer", &self.as_slice(), f)
    }
}
