//! A typed buffer that owns its memory.

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

/// Device memory for `len` elements, with one owner: what `Vec` with a fixed length is on the host.
///
/// The memory is that of an [`Allocator`], a pool, a stack of adaptors, or of others
/// ([`from_raw_parts`](Self::from_raw_parts)); whoever it came from takes it back.
///
/// Memory that nobody has written yet is a `DeviceBuffer<MaybeUninit<T>>`, which
/// [`uninit`](Self::uninit) makes and [`assume_init`](Self::assume_init) ends. A buffer of no elements
/// has no memory and makes no driver call. Every buffer holds `len * size_of::<T>()` bytes, by which
/// the requested bytes of [`Stats`](crate::Stats) rise and fall.
///
/// Dropping the buffer frees it, in the order of its stream: work that was given to it or to the
/// buffer before may still use the memory.
///
/// `Send` and `Sync`; what needs its stream, if that is a per-thread default stream, is refused on other threads
/// ([`Error::Stream`]). See the [module](crate::buffer) for the order of operations and for kernels.
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
    /// The address of the first byte, for kernels that take the buffer; 0 without memory.
    ptr: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    /// Memory for `len` elements that is not initialised, for use on `stream`, the buffer's home.
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

    /// [`uninit`](Self::uninit) with the wishes of a request, whose bytes are those of the elements. Where the
    /// request asks for less, the memory is aligned for the type all the same.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] if so many bytes are no number of elements above 0, and as
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

    /// [`uninit`](Self::uninit) from cached memory, or not at all.
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

    /// Elements whose bytes are all zero. Returns before the memory is written; everything done to
    /// the buffer comes after that.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed(from: &impl Source, len: usize, stream: &Stream) -> Result<Self, Error> {
        // SAFETY: zeroed in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(from, len, stream)?.assume_init() };
        buffer.as_mut_slice().set_zero(stream)?;
        Ok(buffer)
    }

    /// Elements that all have one value. Returns before the memory is written, as
    /// [`zeroed`](Self::zeroed).
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn filled(from: &impl Source, len: usize, value: T, stream: &Stream) -> Result<Self, Error>
    where
        T: FillValue,
    {
        // SAFETY: filled in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(from, len, stream)?.assume_init() };
        buffer.as_mut_slice().fill(value, stream)?;
        Ok(buffer)
    }

    /// A copy of a slice. Waits until the copy is done.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(from: &impl Source, values: &[T], stream: &Stream) -> Result<Self, Error> {
        // SAFETY: all of it is written before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(from, values.len(), stream)?.assume_init() };
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }

    /// A buffer of the first `len` elements in a block.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`], [`InvalidArgument::Misaligned`]; with
    /// the block.
    ///
    /// # Safety
    /// `stream` is the stream that the block was allocated on, the work that initialises the elements
    /// was given to it (or it waits for that work), and so does it for every other use of the block.
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

    /// A buffer over memory of others, which `owner` keeps: dropping that releases it.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::Misaligned`]; driver errors. The owner is dropped then.
    ///
    /// # Safety
    /// `len` elements at `ptr` are device memory of the stream's device, live until the owner is dropped, and
    /// nobody else's until then. The work that initialises them was given to `stream`, or it waits for that
    /// work; and what the owner does in its drop comes after everything that the stream was given before.
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

    /// A buffer of the first `len` elements of a resource's block that is as large, at home on the stream that it
    /// was allocated on. The resource sees by itself when that stream is retired.
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

    /// The memory; none if there are no bytes.
    pub(crate) fn into_memory(self) -> Option<Memory> {
        self.memory
    }

    /// Memory in which so many elements are.
    pub(crate) fn from_memory(memory: Memory, len: usize) -> Self {
        Self::new(Some(memory), len)
    }

    /// The home with its id, and the resource's block.
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

    /// Gives up the allocator's block. Everything done to the buffer was given to the block's stream, or that
    /// stream waits for it.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the memory is not an allocator's own, or there is none. Where a stream that
    /// was given work could not be ordered, what keeps that from being made up for: [`Error::Capturing`],
    /// [`Error::Stream`], driver errors; and those of [`Block::record_stream`]. With the buffer.
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

    /// Frees the buffer; unlike a drop it reports failures, and gives the buffer back with them.
    ///
    /// # Errors
    /// What keeps a stream that was given work from being ordered, as [`into_block`](Self::into_block);
    /// [`Block::free`] or [`MemoryResource::deallocate_block`].
    pub fn free(self) -> Result<(), Refused<DeviceBuffer<T>>> {
        let len = self.len;
        match self.memory.map(Memory::free) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(failed)) => Err(failed.map(|memory| Self::new(Some(memory), len))),
        }
    }

    // ---- observation -----------------------------------------------------------------------

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes: of the elements, not of the block.
    pub fn byte_len(&self) -> usize {
        self.as_slice().byte_len()
    }

    /// Address of the first element, for kernels and foreign code; 0 if the buffer has no memory.
    ///
    /// Using it is for `unsafe` code, which answers for the memory's life and for order: work on the
    /// buffer's own stream, given to it while the buffer lives, is in order. Work on another stream
    /// needs [`prepare_use`](Self::prepare_use) ahead of it and
    /// [`finish_use`](Self::finish_use) behind it.
    pub fn as_device_ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// The buffer's home: the stream that it was allocated on. `None` if it has no memory.
    pub fn stream(&self) -> Option<&Stream> {
        self.memory.as_ref().map(Memory::stream)
    }

    /// The device that the memory is on. `None` if the buffer has no memory.
    pub fn device(&self) -> Option<&Device> {
        self.memory.as_ref().map(|memory| memory.context().device())
    }

    /// The block under the buffer, by name. `None` if it has no memory, or memory of others.
    pub fn id(&self) -> Option<BlockId> {
        let memory = self.memory.as_ref()?;
        memory.owner().identity(memory.stream_id())
    }

    /// The resource that the memory goes back to. `None` if there is no memory, or that is of others.
    pub fn home(&self) -> Option<Arc<dyn MemoryResource>> {
        match self.memory.as_ref()?.owner() {
            Owner::Block(block) => Some(Arc::new(Allocator::of(block))),
            Owner::Resource(loan) => Some(Arc::clone(&loan.resource)),
            Owner::Foreign(_) => None,
        }
    }

    // ---- order -----------------------------------------------------------------------------

    fn with(&self, run: impl FnOnce(&Memory) -> Result<(), Error>) -> Result<(), Error> {
        self.memory.as_ref().map_or(Ok(()), run)
    }

    /// Lets everything that `stream` is given from now on come after everything done to the buffer so
    /// far. Does not wait. Where the resource puts accesses in order
    /// ([`UseTracking::Access`](crate::resource::UseTracking::Access)), also after those that launches on other streams
    /// were recorded with, as the access needs it.
    ///
    /// # Errors
    /// [`Error::Stream`], [`Error::Capturing`], and driver errors.
    pub fn prepare_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        self.with(|memory| memory.prepare_use(stream, access))
    }

    /// Lets everything done to the buffer from now on, its free included, come after everything that
    /// `stream` was given so far. Does not wait, unless an event cannot be had.
    ///
    /// # Errors
    /// As [`prepare_use`](Self::prepare_use). Later operations make up for it then, or are refused until
    /// they can, and the memory is not reused before `stream` is done with it. A stream that is being captured
    /// is the exception: whoever captures work answers for the memory's life until the graph is gone.
    pub fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        self.with(|memory| memory.finish_use(stream, access))
    }

    /// Says that another stream uses the buffer: the memory is reused only when everything which that stream
    /// was given until the free has completed, or behind it. For work that `unsafe` code launches; the buffer's
    /// own operations see to themselves.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.with(|memory| memory.record(stream, false))
    }

    /// Says that another stream used the buffer and will not again: reuse waits only for what that
    /// stream was given so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        self.with(|memory| memory.record(stream, true))
    }

    /// The same memory as bytes; it is freed once, with the result.
    pub fn into_bytes(self) -> DeviceBuffer<u8>
    where
        T: Pod,
    {
        let bytes = self.byte_len();
        DeviceBuffer::new(self.memory, bytes)
    }

    // ---- parts and operations --------------------------------------------------------------

    /// All of it, for reading.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice::new(self.memory.as_ref(), self.as_device_ptr(), self.len)
    }

    /// All of it, for writing.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, T> {
        // SAFETY: the buffer is borrowed exclusively for as long.
        unsafe { DeviceSliceMut::new(self.as_slice()) }
    }

    /// A part of it, for reading.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'_, T>, Error> {
        self.as_slice().slice(range)
    }

    /// A part of it, for writing.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<DeviceSliceMut<'_, T>, Error> {
        let part = self.as_slice().slice(range)?;
        // SAFETY: the buffer is borrowed exclusively for as long.
        Ok(unsafe { DeviceSliceMut::new(part) })
    }

    /// [`DeviceSliceMut::copy_from_slice`] to all of it: waits.
    ///
    /// # Errors
    /// As there.
    pub fn copy_from_slice(&mut self, source: &[T]) -> Result<(), Error> {
        self.as_mut_slice().copy_from_slice(source)
    }

    /// [`DeviceSlice::copy_to_slice`] of all of it: waits.
    ///
    /// # Errors
    /// As there.
    pub fn copy_to_slice(&self, target: &mut [T]) -> Result<(), Error> {
        self.as_slice().copy_to_slice(target)
    }

    /// [`DeviceSlice::to_vec`] of all of it: waits.
    ///
    /// # Errors
    /// As there.
    pub fn to_vec(&self) -> Result<Vec<T>, Error> {
        self.as_slice().to_vec()
    }

    /// [`DeviceSliceMut::upload`] to all of it: does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn upload(
        &mut self,
        host: PinnedBuffer<T>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<T>>> {
        self.as_mut_slice().upload(host, stream)
    }

    /// [`DeviceSlice::download`] of all of it: does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn download(
        &self,
        host: impl Into<PinnedBuffer<MaybeUninit<T>>>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<MaybeUninit<T>>>> {
        self.as_slice().download(host, stream)
    }

    /// [`DeviceSliceMut::copy_from`] to all of it: does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn copy_from(&mut self, source: &DeviceSlice<'_, T>, stream: &Stream) -> Result<(), Error> {
        self.as_mut_slice().copy_from(source, stream)
    }

    /// [`DeviceSliceMut::fill`] of all of it: does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn fill(&mut self, value: T, stream: &Stream) -> Result<(), Error>
    where
        T: FillValue,
    {
        self.as_mut_slice().fill(value, stream)
    }
}

impl<T: DeviceCopy> DeviceBuffer<MaybeUninit<T>> {
    /// Says that the elements are initialised.
    ///
    /// # Safety
    /// Every element has been written, by work that comes before everything done to the buffer from
    /// now on.
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

/// A launch tracks a buffer by the block under it, and takes memory of others for external.
impl<T: DeviceCopy> LaunchBuffer for DeviceBuffer<T> {
    fn launch_id(&self) -> Option<BlockId> {
        self.id()
    }

    fn is_external(&self) -> bool {
        self.memory.is_some() && self.id().is_none()
    }
}

// SAFETY: the address of its first element is what the driver reads.
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
