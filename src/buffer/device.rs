//! A typed buffer that owns its memory.

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::RangeBounds;

use crate::allocator::{Allocator, Block};
use crate::driver::{Device, Stream, sys};

use super::element::{DeviceCopy, FillValue, bytes_of};
use super::flight::CopyInFlight;
use super::order::Memory;
use super::pinned::PinnedBuffer;
use super::slice::{DeviceSlice, DeviceSliceMut, describe};
use crate::error::{Error, InvalidArgument, Refused};

/// Device memory for `len` elements, with one owner: what `Vec` with a fixed length is on the host.
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
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    /// Memory for `len` elements that is not initialised, for use on `stream`, the buffer's home.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`] before any driver call, and those of
    /// [`Allocator::allocate_with`].
    pub fn uninit(
        alloc: &Allocator,
        len: usize,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        let memory = allocate::<T>(alloc, len, stream)?;
        Ok(DeviceBuffer::new(memory, len))
    }

    /// Elements whose bytes are all zero. Returns before the memory is written; everything done to
    /// the buffer comes after that.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed(alloc: &Allocator, len: usize, stream: &Stream) -> Result<Self, Error> {
        // SAFETY: zeroed in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(alloc, len, stream)?.assume_init() };
        buffer.as_mut_slice().set_zero(stream)?;
        Ok(buffer)
    }

    /// Elements that all have one value. Returns before the memory is written, as
    /// [`zeroed`](Self::zeroed).
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn filled(alloc: &Allocator, len: usize, value: T, stream: &Stream) -> Result<Self, Error>
    where
        T: FillValue,
    {
        // SAFETY: filled in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(alloc, len, stream)?.assume_init() };
        buffer.as_mut_slice().fill(value, stream)?;
        Ok(buffer)
    }

    /// A copy of a slice. Waits until the copy is done.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(alloc: &Allocator, values: &[T], stream: &Stream) -> Result<Self, Error> {
        // SAFETY: all of it is written before anything else can be done to it.
        let mut buffer = unsafe { Self::uninit(alloc, values.len(), stream)?.assume_init() };
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
        let error = match bytes_of::<T>(len) {
            None => Error::Invalid(InvalidArgument::TooLarge {
                len,
                element_bytes: size_of::<T>(),
            }),
            Some(needed) if needed as u64 > block.size() => {
                Error::Invalid(InvalidArgument::TooSmall {
                    needed,
                    usable: block.size() as usize,
                })
            }
            Some(_) if !block.ptr().is_multiple_of(align_of::<T>() as u64) => {
                Error::Invalid(InvalidArgument::Misaligned {
                    ptr: block.ptr(),
                    alignment: align_of::<T>(),
                })
            }
            Some(_) => {
                let memory = Memory::from_block(block, stream)?;
                return Ok(Self::new(Some(memory), len));
            }
        };
        Err(Refused::new(block, error))
    }

    /// A buffer without elements.
    pub(crate) fn empty() -> Self {
        Self::new(None, 0)
    }

    /// A buffer of the first `len` elements of memory that is as large.
    #[inline(always)]
    pub(crate) fn over(memory: Memory, len: usize) -> Self {
        Self::new(Some(memory), len)
    }

    /// The home and its id; on another thread the handle of a per-thread default stream has another one.
    pub(crate) fn home(&self) -> Option<(Stream, u64)> {
        self.memory.as_ref().map(Memory::home)
    }

    #[inline(always)]
    fn new(memory: Option<Memory>, len: usize) -> Self {
        DeviceBuffer {
            memory,
            len,
            elements: PhantomData,
        }
    }

    /// Gives up the block; `None` if the buffer has no memory. Everything done to the buffer was given
    /// to the block's stream, or that stream waits for it.
    ///
    /// # Errors
    /// Where a stream that was given work could not be ordered, what keeps that from being made up for:
    /// [`Error::Capturing`], [`Error::Stream`], driver errors; and those of
    /// [`Block::record_stream`]; with the buffer.
    pub fn into_block(self) -> Result<Option<Block>, Refused<DeviceBuffer<T>>> {
        let len = self.len;
        match self.memory.map(Memory::into_block) {
            None => Ok(None),
            Some(Ok(block)) => Ok(Some(block)),
            Some(Err((memory, error))) => Err(Refused::new(Self::new(Some(memory), len), error)),
        }
    }

    /// Frees the buffer; unlike a drop it reports failures, and gives the buffer back with them.
    ///
    /// # Errors
    /// As [`into_block`](Self::into_block) and [`Block::free`].
    pub fn free(self) -> Result<(), Refused<DeviceBuffer<T>>> {
        let len = self.len;
        let home = self.memory.as_ref().map(Memory::home);
        let (Some(block), Some((stream, id))) = (self.into_block()?, home) else {
            return Ok(());
        };
        block.free().map_err(|failed| {
            Refused::new(
                Self::new(Some(Memory::new(*failed.value, stream, id)), len),
                failed.error,
            )
        })
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
    /// needs [`order_before`](Self::order_before) ahead of it and
    /// [`order_after`](Self::order_after) behind it.
    pub fn as_device_ptr(&self) -> sys::CUdeviceptr {
        self.memory.as_ref().map_or(0, Memory::ptr)
    }

    /// The buffer's home: the stream that it was allocated on. `None` if it has no memory.
    pub fn stream(&self) -> Option<&Stream> {
        self.memory.as_ref().map(Memory::stream)
    }

    /// The device that the memory is on. `None` if the buffer has no memory.
    pub fn device(&self) -> Option<&Device> {
        self.memory.as_ref().map(|memory| memory.context().device())
    }

    /// The block under the buffer. `None` if it has no memory.
    pub fn block(&self) -> Option<&Block> {
        self.memory.as_ref().map(Memory::block)
    }

    // ---- order -----------------------------------------------------------------------------

    /// Lets everything that `stream` is given from now on come after everything done to the buffer so
    /// far. Does not wait.
    ///
    /// # Errors
    /// [`Error::Stream`], [`Error::Capturing`], and driver errors.
    pub fn order_before(&self, stream: &Stream) -> Result<(), Error> {
        match &self.memory {
            Some(memory) => memory.order_before(stream),
            None => Ok(()),
        }
    }

    /// Lets everything done to the buffer from now on, its free included, come after everything that
    /// `stream` was given so far. Does not wait, unless an event cannot be had.
    ///
    /// # Errors
    /// As [`order_before`](Self::order_before). Later operations make up for it then, or are refused until
    /// they can, and the memory is not reused before `stream` is done with it. A stream that is being captured
    /// is the exception: whoever captures work answers for the memory's life until the graph is gone.
    pub fn order_after(&self, stream: &Stream) -> Result<(), Error> {
        match &self.memory {
            Some(memory) => memory.order_after(stream),
            None => Ok(()),
        }
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
    ) -> Result<CopyInFlight<T>, Refused<Option<PinnedBuffer<T>>>> {
        self.as_mut_slice().upload(host, stream)
    }

    /// [`DeviceSlice::download`] of all of it: does not wait.
    ///
    /// # Errors
    /// As there.
    pub fn download(
        &self,
        host: PinnedBuffer<T>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<Option<PinnedBuffer<T>>>> {
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
    alloc: &Allocator,
    len: usize,
    stream: &Stream,
) -> Result<Option<Memory>, Error> {
    let too_large = Error::Invalid(InvalidArgument::TooLarge {
        len,
        element_bytes: size_of::<T>(),
    });
    match bytes_of::<T>(len).ok_or(too_large)? {
        0 => Ok(None),
        bytes => Memory::allocate(alloc, bytes, align_of::<T>(), stream).map(Some),
    }
}

impl<T: DeviceCopy> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("DeviceBuffer", &self.as_slice(), f)
    }
}
