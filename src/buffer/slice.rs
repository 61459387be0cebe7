//! Views of parts of buffers, and all operations on device memory.

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Bound, RangeBounds};

use crate::driver::{DriverError, Entered, Stream, sys};

use super::element::{DeviceCopy, FillValue, Pattern, Pod, check_aligned};
use super::flight::CopyInFlight;
use super::order::{Memory, started, submit, submit_and_wait};
use super::pinned::PinnedBuffer;
use super::staging::{CHUNK, Staging, keep};
use crate::error::{Error, InvalidArgument, Refused};
use crate::sync::order::Ended;

/// A part of a [`DeviceBuffer`](super::DeviceBuffer), for reading: the counterpart of `&[T]`. `Copy`, `Send` and
/// `Sync`; on the host it is an address and a length.
pub struct DeviceSlice<'a, T: DeviceCopy> {
    /// None if the buffer has no memory, and then the length in bytes is 0.
    memory: Option<&'a Memory>,
    ptr: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

/// A part of a [`DeviceBuffer`](super::DeviceBuffer), for writing: the counterpart of `&mut [T]`. `Send` and `Sync`.
pub struct DeviceSliceMut<'a, T: DeviceCopy> {
    /// The same part for reading; this type adds that the borrow is exclusive.
    part: DeviceSlice<'a, T>,
    exclusive: PhantomData<&'a mut [T]>,
}

impl<T: DeviceCopy> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: DeviceCopy> Copy for DeviceSlice<'_, T> {}

impl<'a, T: DeviceCopy> DeviceSlice<'a, T> {
    pub(crate) fn new(memory: Option<&'a Memory>, ptr: sys::CUdeviceptr, len: usize) -> Self {
        DeviceSlice {
            memory,
            ptr,
            len,
            elements: PhantomData,
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

    /// Returns the size in bytes.
    pub fn byte_len(&self) -> usize {
        // This cannot overflow: the buffer was created with at least this many elements.
        self.len * size_of::<T>()
    }

    /// Returns the address of the first element; 0 if the buffer has no memory. See
    /// [`DeviceBuffer::as_device_ptr`](super::DeviceBuffer::as_device_ptr) on how to use it.
    pub fn as_device_ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Returns a part of it. Fails with [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'a, T>, Error> {
        let (start, end) = resolve(range, self.len)?;
        let offset = (start * size_of::<T>()) as u64;
        Ok(DeviceSlice::new(
            self.memory,
            self.ptr + offset,
            end - start,
        ))
    }

    /// Splits it into the elements before `middle`, and the rest. Fails with [`Error::OutOfBounds`].
    pub fn split_at(&self, middle: usize) -> Result<(Self, Self), Error> {
        Ok((self.slice(..middle)?, self.slice(middle..)?))
    }

    /// Returns the same memory as bytes.
    pub fn as_bytes(&self) -> DeviceSlice<'a, u8>
    where
        T: Pod,
    {
        DeviceSlice::new(self.memory, self.ptr, self.byte_len())
    }

    /// Returns the same memory as elements of another type.
    ///
    /// # Errors
    /// [`InvalidArgument::Remainder`] if the size is not a multiple of the element size,
    /// [`InvalidArgument::Misaligned`].
    pub fn cast<U: Pod>(&self) -> Result<DeviceSlice<'a, U>, Error>
    where
        T: Pod,
    {
        let (bytes, element_bytes) = (self.byte_len(), size_of::<U>());
        let len = match bytes.checked_rem(element_bytes) {
            Some(0) => bytes / element_bytes,
            None if bytes == 0 => 0,
            _ => {
                return Err(InvalidArgument::Remainder {
                    bytes,
                    element_bytes,
                }
                .into());
            }
        };
        check_aligned::<U>(self.ptr)?;
        Ok(DeviceSlice::new(self.memory, self.ptr, len))
    }

    fn work(&self) -> Option<&'a Memory> {
        self.memory.filter(|_| self.byte_len() > 0)
    }

    fn matches(&self, source_len: usize) -> Result<(), Error> {
        same_length(self.len, source_len)
    }

    /// Copies to the host, and waits until it is done. Runs on the buffer's stream.
    ///
    /// # Errors
    /// [`InvalidArgument::Length`], [`Error::Stream`], [`Error::Capturing`], and
    /// driver errors.
    pub fn copy_to_slice(&self, target: &mut [T]) -> Result<(), Error> {
        same_length(target.len(), self.len)?;
        let (Some(memory), bytes) = (self.work(), self.byte_len()) else {
            return Ok(());
        };
        let mut staging = Staging::new(bytes.min(CHUNK))?;
        for start in (0..bytes).step_by(CHUNK) {
            let part = CHUNK.min(bytes - start);
            let ended = self.copy_out(memory, start, part, staging.ptr());
            staging = keep(staging, ended)?;
            // SAFETY: the slice has this many bytes, and the device has just written the values to the staging memory.
            unsafe {
                let to = target.as_mut_ptr().cast::<u8>().add(start);
                to.copy_from_nonoverlapping(staging.ptr(), part);
            }
        }
        Ok(())
    }

    /// Copies to a new vector, and waits until it is done. Runs on the buffer's stream.
    ///
    /// # Errors
    /// [`Error::HostMemory`], otherwise as for [`copy_to_slice`](Self::copy_to_slice).
    pub fn to_vec(&self) -> Result<Vec<T>, Error> {
        let mut values: Vec<T> = Vec::new();
        values
            .try_reserve_exact(self.len)
            .map_err(|_| Error::HostMemory {
                bytes: self.byte_len(),
            })?;
        if let Some(memory) = self.work() {
            let ended = self.copy_out(memory, 0, self.byte_len(), values.as_mut_ptr().cast());
            values = keep(values, ended)?;
        }
        // SAFETY: all elements were just copied (or have no bytes), and any bytes from the device are valid values.
        unsafe { values.set_len(self.len) };
        Ok(values)
    }

    /// Copies bytes to staging memory, and waits.
    fn copy_out(&self, memory: &Memory, start: usize, bytes: usize, target: *mut u8) -> Ended {
        let (from, stream) = (self.ptr + start as u64, memory.stream());
        submit_and_wait(stream, memory, |entered| {
            // SAFETY: the bytes lie in the memory, which stays allocated until work on its home is done; the target is
            // large enough, and is kept until the copy is over.
            unsafe { entered.copy_device_to_host(target.cast(), from, bytes, stream.raw()) }
        })
    }

    /// Starts a copy to page-locked host memory on `stream`, ordered after all earlier operations on the buffer and
    /// before all later ones. The result owns the host memory until the copy is complete.
    ///
    /// Borrowed host memory cannot be passed, since the borrow may end before the copy does:
    ///
    /// ```compile_fail,E0308
    /// # use cualloc::*;
    /// # use cualloc::driver::Stream;
    /// fn bad(b: &DeviceBuffer<u32>, host: &mut [u32], stream: &Stream) {
    ///     let _ = b.as_slice().download(host, stream);
    /// }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument::Length`], [`Error::WrongDevice`], [`Error::Stream`], [`Error::Capturing`], [`Error::Stale`]
    /// for memory of an earlier generation of its pool, [`Error::InFlight`] while recorded work may use it, and driver
    /// errors; they return the host memory.
    pub fn download(
        &self,
        host: impl Into<PinnedBuffer<MaybeUninit<T>>>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<MaybeUninit<T>>>> {
        let host = host.into();
        if let Err(error) = same_length(host.len(), self.len) {
            return Err(Refused::new(host, error));
        }
        let (from, bytes) = (self.ptr, self.byte_len());
        // SAFETY: the part lies in the memory, and the host memory has the same length: all of it is written.
        unsafe {
            CopyInFlight::start(host, self.work(), stream, |entered, to| {
                entered.copy_device_to_host(to.cast(), from, bytes, stream.raw())
            })
        }
    }

    /// Starts a copy to host memory on `stream`, ordered like [`download`](Self::download).
    ///
    /// # Errors
    /// As for [`download`](Self::download); the device then no longer accesses `target`, since a copy that may have
    /// started is waited for. [`Error::Unseen`] if that wait fails.
    ///
    /// # Safety
    /// Until the copy is complete, and after [`Error::Unseen`], `target` stays allocated, and is neither read nor
    /// written. In a [capture](crate::buffer#captures) this holds for each launch of the graph.
    pub unsafe fn copy_to_slice_async(
        &self,
        target: &mut [T],
        stream: &Stream,
    ) -> Result<(), Error> {
        same_length(target.len(), self.len)?;
        let Some(memory) = self.work() else {
            return Ok(());
        };
        memory.same_device(stream)?;
        let (from, bytes) = (self.ptr, self.byte_len());
        let operation = |entered: &Entered<'_>| {
            // SAFETY: the part lies in the memory; the caller is responsible for the target.
            unsafe {
                entered.copy_device_to_host(target.as_mut_ptr().cast(), from, bytes, stream.raw())
            }
        };
        started(stream, memory, submit(stream, &[memory], true, operation))
    }
}

impl<'a, T: DeviceCopy> DeviceSliceMut<'a, T> {
    /// # Safety
    /// The part is not used otherwise while the result lives.
    pub(crate) unsafe fn new(part: DeviceSlice<'a, T>) -> Self {
        DeviceSliceMut {
            part,
            exclusive: PhantomData,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.part.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.part.is_empty()
    }

    /// Returns the size in bytes.
    pub fn byte_len(&self) -> usize {
        self.part.byte_len()
    }

    /// Returns the address of the first element, like [`DeviceSlice::as_device_ptr`].
    pub fn as_device_ptr(&self) -> sys::CUdeviceptr {
        self.part.as_device_ptr()
    }

    /// Returns the same part, for reading.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        self.part
    }

    /// Returns the same part, with a shorter lifetime.
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_, T> {
        // SAFETY: `self` is borrowed exclusively for the lifetime of the result.
        unsafe { DeviceSliceMut::new(self.part) }
    }

    /// Returns a part of it. Fails with [`Error::OutOfBounds`].
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<DeviceSliceMut<'_, T>, Error> {
        let part = self.part.slice(range)?;
        // SAFETY: `self` is borrowed exclusively for the lifetime of the result.
        Ok(unsafe { DeviceSliceMut::new(part) })
    }

    /// Splits it into the elements before `middle`, and the rest. Fails with [`Error::OutOfBounds`].
    pub fn split_at_mut(self, middle: usize) -> Result<(Self, Self), Error> {
        let (head, tail) = self.part.split_at(middle)?;
        // SAFETY: the two parts do not overlap, and `self` is consumed.
        Ok(unsafe { (DeviceSliceMut::new(head), DeviceSliceMut::new(tail)) })
    }

    /// Returns the same memory as bytes; writing any bytes leaves valid elements.
    pub fn as_bytes_mut(&mut self) -> DeviceSliceMut<'_, u8>
    where
        T: Pod,
    {
        // SAFETY: `self` is borrowed exclusively for the lifetime of the result.
        unsafe { DeviceSliceMut::new(self.part.as_bytes()) }
    }

    /// Returns the same memory as elements of another type. Fails like [`DeviceSlice::cast`].
    pub fn cast_mut<U: Pod>(&mut self) -> Result<DeviceSliceMut<'_, U>, Error>
    where
        T: Pod,
    {
        let part = self.part.cast()?;
        // SAFETY: `self` is borrowed exclusively for the lifetime of the result.
        Ok(unsafe { DeviceSliceMut::new(part) })
    }

    /// Copies from the host, and waits until it is done. Runs on the buffer's stream. Fails like
    /// [`DeviceSlice::copy_to_slice`].
    pub fn copy_from_slice(&mut self, source: &[T]) -> Result<(), Error> {
        self.part.matches(source.len())?;
        let Some(memory) = self.part.work() else {
            return Ok(());
        };
        let (to, bytes, stream) = (self.part.ptr, self.byte_len(), memory.stream());
        let mut staging = Staging::new(bytes.min(CHUNK))?;
        for start in (0..bytes).step_by(CHUNK) {
            let part = CHUNK.min(bytes - start);
            let from = staging.ptr();
            // SAFETY: the slice has this many bytes, all initialised, and the staging memory has room for them.
            unsafe {
                let source = source.as_ptr().cast::<u8>().add(start);
                from.copy_from_nonoverlapping(source, part);
            }
            let ended = submit_and_wait(stream, memory, |entered| {
                let to = to + start as u64;
                // SAFETY: the bytes lie in the memory, which is allocated until work on its home is
                // done; the staging memory is kept until the copy is over.
                unsafe { entered.copy_host_to_device(to, from.cast(), part, stream.raw()) }
            });
            staging = keep(staging, ended)?;
        }
        Ok(())
    }

    /// Starts a copy from page-locked host memory on `stream`, ordered after all earlier operations on the buffer and
    /// before all later ones. The result owns the host memory until the copy is complete.
    ///
    /// ```compile_fail,E0308
    /// # use cualloc::*;
    /// # use cualloc::driver::Stream;
    /// fn bad(b: &mut DeviceBuffer<u32>, host: &[u32], stream: &Stream) {
    ///     let _ = b.as_mut_slice().upload(host, stream);
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`DeviceSlice::download`].
    pub fn upload(
        &mut self,
        host: PinnedBuffer<T>,
        stream: &Stream,
    ) -> Result<CopyInFlight<T>, Refused<PinnedBuffer<T>>> {
        if let Err(error) = self.part.matches(host.len()) {
            return Err(Refused::new(host, error));
        }
        let (to, bytes) = (self.part.ptr, self.byte_len());
        // SAFETY: the part lies in the memory, and the host memory has the same length and is not written to.
        unsafe {
            CopyInFlight::start(host, self.part.work(), stream, |entered, from| {
                entered.copy_host_to_device(to, from.cast_const().cast(), bytes, stream.raw())
            })
        }
    }

    /// Starts a copy from host memory on `stream`, ordered like [`upload`](Self::upload).
    ///
    /// # Errors
    /// As [`DeviceSlice::copy_to_slice_async`].
    ///
    /// # Safety
    /// Until the copy is complete, and after [`Error::Unseen`], `source` stays allocated and is not written. In a
    /// [capture](crate::buffer#captures) this holds for each launch of the graph.
    pub unsafe fn copy_from_slice_async(
        &mut self,
        source: &[T],
        stream: &Stream,
    ) -> Result<(), Error> {
        self.part.matches(source.len())?;
        let Some(memory) = self.part.work() else {
            return Ok(());
        };
        memory.same_device(stream)?;
        let (to, bytes) = (self.part.ptr, self.byte_len());
        let operation = |entered: &Entered<'_>| {
            // SAFETY: the part lies in the memory; the caller is responsible for the source.
            unsafe { entered.copy_host_to_device(to, source.as_ptr().cast(), bytes, stream.raw()) }
        };
        started(stream, memory, submit(stream, &[memory], true, operation))
    }

    /// Copies another part, of the same or another device, on `stream`, which must belong to one of the devices.
    /// Ordered after all earlier operations on both buffers and before all later ones; returns before it is done. Works
    /// without peer access.
    ///
    /// # Errors
    /// [`InvalidArgument::Length`], [`Error::WrongDevice`], [`Error::Stream`],
    /// [`Error::Capturing`], and driver errors.
    pub fn copy_from(&mut self, source: &DeviceSlice<'_, T>, stream: &Stream) -> Result<(), Error> {
        self.part.matches(source.len)?;
        let (Some(target), Some(origin)) = (self.part.work(), source.work()) else {
            return Ok(());
        };
        let (to, from, bytes) = (self.part.ptr, source.ptr, self.byte_len());
        let (to_context, from_context) = (target.context(), origin.context());
        target
            .same_device(stream)
            .or_else(|error| origin.same_device(stream).map_err(|_| error))?;
        let one = to_context.id() == from_context.id()
            && to_context.device().ordinal() == stream.context().device().ordinal();
        let operation = |entered: &Entered<'_>| -> Result<(), DriverError> {
            if one {
                // SAFETY: both parts lie in their memory, which is allocated until work on its home
                // is done; they do not overlap, since one of them is borrowed exclusively.
                unsafe { entered.copy_device_to_device(to, from, bytes, stream.raw()) }
            } else {
                // SAFETY: as above.
                unsafe {
                    entered.copy_peer(to, to_context, from, from_context, bytes, stream.raw())
                }
            }
        };
        Ok(submit(stream, &[target, origin], true, operation)?)
    }

    /// Sets every element to `value` on `stream`, ordered like [`copy_from`](Self::copy_from); returns before it is
    /// done. Fails like [`copy_from`](Self::copy_from).
    pub fn fill(&mut self, value: T, stream: &Stream) -> Result<(), Error>
    where
        T: FillValue,
    {
        self.fill_with(value.pattern(), stream)
    }

    /// Sets every byte to zero on `stream`, ordered like [`copy_from`](Self::copy_from); returns before it is done.
    /// Fails like [`copy_from`](Self::copy_from).
    pub fn set_zero(&mut self, stream: &Stream) -> Result<(), Error> {
        self.fill_with(Pattern::Byte(0), stream)
    }

    fn fill_with(&mut self, pattern: Pattern, stream: &Stream) -> Result<(), Error> {
        let Some(memory) = self.part.work() else {
            return Ok(());
        };
        memory.same_device(stream)?;
        let (to, bytes, raw) = (self.part.ptr, self.byte_len(), stream.raw());
        let operation = |entered: &Entered<'_>| match pattern {
            // SAFETY: the part lies in the memory, which is allocated until work on its home is
            // done.
            Pattern::Byte(byte) => unsafe { entered.memset_d8(to, byte, bytes, raw) },
            // SAFETY: as above; elements that are words are aligned as words.
            Pattern::Word(word) => unsafe { entered.memset_d32(to, word, bytes / 4, raw) },
        };
        Ok(submit(stream, &[memory], true, operation)?)
    }
}

fn same_length(target_len: usize, source_len: usize) -> Result<(), Error> {
    if target_len == source_len {
        return Ok(());
    }
    Err(Error::Invalid(InvalidArgument::Length {
        expected: target_len,
        found: source_len,
    }))
}

/// Returns the first index, and the index after the last, of a range of `0..len`.
fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize), Error> {
    // A bound that overflows lies outside of every buffer.
    let start = match range.start_bound() {
        Bound::Unbounded => 0,
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
    };
    let (end, counted) = match range.end_bound() {
        Bound::Unbounded => (len, true),
        Bound::Included(end) => (end.saturating_add(1), *end != usize::MAX),
        Bound::Excluded(end) => (*end, true),
    };
    if start <= end && end <= len && counted {
        Ok((start, end))
    } else {
        Err(Error::OutOfBounds {
            generation: None,
            start,
            end,
            len,
        })
    }
}

impl<T: DeviceCopy> fmt::Debug for DeviceSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("DeviceSlice", self, f)
    }
}

impl<T: DeviceCopy> fmt::Debug for DeviceSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("DeviceSliceMut", &self.part, f)
    }
}

/// Formats a part of memory for debugging.
pub(super) fn describe<T: DeviceCopy>(
    name: &str,
    part: &DeviceSlice<'_, T>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    f.debug_struct(name)
        .field("type", &std::any::type_name::<T>())
        .field(
            "device",
            &part.memory.map(|m| m.context().device().ordinal()),
        )
        .field("ptr", &format_args!("{:#x}", part.ptr))
        .field("len", &part.len)
        .finish()
}
