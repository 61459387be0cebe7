//! Buffers of page-locked host memory.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::driver::{Context, Stream};
use crate::error::{Error, InvalidArgument, Refused};
use crate::sync::capture;
use crate::sync::event::EventPools;

use super::element::{DeviceCopy, bytes_of, check_aligned};
use super::host::HostBlock;

/// A buffer of page-locked host memory, which devices access directly. Use it as a slice.
///
/// Creating one costs far more than an ordinary allocation: keep and reuse it, or take it from a
/// [`PinnedPool`](crate::pool::PinnedPool), to which it returns when dropped. Without a pool its drop frees the memory,
/// which may wait for the device. `Send` and `Sync`.
pub struct PinnedBuffer<T: DeviceCopy> {
    pub(crate) block: HostBlock,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceCopy> PinnedBuffer<T> {
    /// Allocates `len` uninitialised elements, usable with every context. Makes no driver call for 0 bytes.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::Misaligned`] for an element type of unusual
    /// alignment, and driver errors.
    pub fn uninit(context: &Context, len: usize) -> Result<PinnedBuffer<MaybeUninit<T>>, Error> {
        let bytes = bytes_of::<T>(len)?;
        let block = HostBlock::new(context, bytes, EventPools::of(context))?;
        PinnedBuffer::over(block, len)
    }

    /// Allocates `len` elements, all bytes zero. Fails like [`uninit`](Self::uninit).
    pub fn zeroed(context: &Context, len: usize) -> Result<Self, Error> {
        let mut buffer = Self::uninit(context, len)?;
        buffer.fill(MaybeUninit::zeroed());
        // SAFETY: all zero bytes are a value.
        Ok(unsafe { buffer.assume_init() })
    }

    /// Allocates a copy of a slice. Fails like [`uninit`](Self::uninit).
    pub fn from_slice(context: &Context, values: &[T]) -> Result<Self, Error> {
        Ok(Self::uninit(context, values.len())?.write(values)?)
    }

    /// Returns the same memory as uninitialised.
    pub fn into_uninit(self) -> PinnedBuffer<MaybeUninit<T>> {
        // SAFETY: any bytes, initialised or not, are a value of the type.
        unsafe { self.retyped() }
    }

    /// # Safety
    /// The elements are values of `U`, which is as large and aligned as `T`.
    pub(super) unsafe fn retyped<U: DeviceCopy>(self) -> PinnedBuffer<U> {
        PinnedBuffer {
            block: self.block,
            len: self.len,
            elements: PhantomData,
        }
    }

    /// Returns the generation of the pool that the memory belongs to, counted from 1; 0 without a pool.
    pub fn generation(&self) -> u64 {
        self.block.generation
    }

    /// Records that work submitted to the stream so far accesses the memory by foreign calls: the memory is not reused
    /// or freed before that work is complete, and until then [`write`](Self::write) and copies are rejected. The caller
    /// of the foreign calls is responsible for not accessing the memory meanwhile.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors. If the end of the work can be neither marked nor waited for, the memory is
    /// never used again.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), Error> {
        capture::refuse_capture(stream)?;
        let events = self.block.events().clone();
        Ok(self.block.used_by(stream, &events)?)
    }

    fn ptr(&self) -> NonNull<T> {
        match &self.block.memory {
            Some(memory) => memory.ptr().cast(),
            None => NonNull::dangling(),
        }
    }

    /// Returns the address that a device accesses. Only the owner of the buffer may write through it.
    pub(super) fn raw(&self) -> *mut T {
        self.ptr().as_ptr()
    }
}

impl<T: DeviceCopy> PinnedBuffer<MaybeUninit<T>> {
    /// Creates a buffer of the first `len` elements of a block of that size.
    pub(crate) fn over(block: HostBlock, len: usize) -> Result<Self, Error> {
        let buffer = PinnedBuffer {
            block,
            len,
            elements: PhantomData,
        };
        check_aligned::<T>(buffer.ptr().as_ptr() as u64)?;
        Ok(buffer)
    }

    /// Copies values to all of its elements.
    ///
    /// # Errors
    /// [`InvalidArgument::Length`] for another number of values, [`Error::InFlight`] while recorded work may use the
    /// memory, driver errors; they return the buffer.
    pub fn write(mut self, values: &[T]) -> Result<PinnedBuffer<T>, Refused<Self>> {
        let (expected, found) = (self.len, values.len());
        let fits = match expected == found {
            true => self.block.free_to_write(),
            false => Err(InvalidArgument::Length { expected, found }.into()),
        };
        if let Err(error) = fits {
            return Err(Refused::new(self, error));
        }
        // SAFETY: the memory has as many elements as the slice and no other user, and all are initialised afterwards.
        unsafe {
            let to = self.raw().cast::<T>();
            to.copy_from_nonoverlapping(values.as_ptr(), found);
            Ok(self.assume_init())
        }
    }

    /// Declares the elements initialised.
    ///
    /// # Safety
    /// The elements hold valid values.
    pub unsafe fn assume_init(self) -> PinnedBuffer<T> {
        // SAFETY: the caller's contract.
        unsafe { self.retyped() }
    }
}

impl<T: DeviceCopy> From<PinnedBuffer<T>> for PinnedBuffer<MaybeUninit<T>> {
    fn from(buffer: PinnedBuffer<T>) -> Self {
        buffer.into_uninit()
    }
}

impl<T: DeviceCopy> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory has this many elements, all valid values of the type, even if a device has written them; a
        // copy in progress owns the buffer.
        unsafe { std::slice::from_raw_parts(self.ptr().as_ptr(), self.len) }
    }
}

impl<T: DeviceCopy> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr(), self.len) }
    }
}

debug_fields!([T: DeviceCopy] PinnedBuffer<T>, self =>
    type: std::any::type_name::<T>(), ptr: self.ptr(), len: self.len, generation: self.generation()
);
