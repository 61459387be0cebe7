//! Page-locked host memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::driver::{Context, HostAllocation, HostMemory};

use super::element::{DeviceCopy, bytes_of};
use crate::error::{Error, InvalidArgument};

/// A buffer of page-locked host memory: devices copy to and from it without the host's help. Use it
/// as a slice.
///
/// Making one costs far more than an ordinary allocation: keep and reuse it. Its drop frees the
/// memory, which may wait for the device. `Send` and `Sync`.
pub struct PinnedBuffer<T: DeviceCopy> {
    /// None if there are no bytes.
    memory: Option<HostAllocation>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: DeviceCopy> PinnedBuffer<T> {
    /// A buffer of `len` elements, all bytes zero, usable with every context. No driver call for no
    /// bytes.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::Misaligned`] for an element type of unusual
    /// alignment, and driver errors.
    pub fn zeroed(context: &Context, len: usize) -> Result<Self, Error> {
        let buffer = Self::allocate(context, len)?;
        // SAFETY: the memory has so many elements, and is ours alone.
        unsafe { buffer.ptr().as_ptr().write_bytes(0, len) };
        Ok(buffer)
    }

    /// A buffer with a copy of a slice.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(context: &Context, values: &[T]) -> Result<Self, Error> {
        let buffer = Self::allocate(context, values.len())?;
        // SAFETY: the memory has as many elements as the slice, and is ours alone.
        unsafe {
            buffer
                .ptr()
                .as_ptr()
                .copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
        Ok(buffer)
    }

    /// Its elements are not initialised yet.
    fn allocate(context: &Context, len: usize) -> Result<Self, Error> {
        let bytes = bytes_of::<T>(len).ok_or(Error::Invalid(InvalidArgument::TooLarge {
            len,
            element_bytes: size_of::<T>(),
        }))?;
        let memory = if bytes == 0 {
            None
        } else {
            let how = HostMemory {
                portable: true,
                ..HostMemory::default()
            };
            Some(context.enter()?.host_allocation(bytes, how)?)
        };
        let buffer = PinnedBuffer {
            memory,
            len,
            elements: PhantomData,
        };
        if !buffer.ptr().is_aligned() {
            return Err(Error::Invalid(InvalidArgument::Misaligned {
                ptr: buffer.ptr().as_ptr() as u64,
                alignment: align_of::<T>(),
            }));
        }
        Ok(buffer)
    }

    fn ptr(&self) -> NonNull<T> {
        match &self.memory {
            Some(memory) => memory.ptr().cast(),
            None => NonNull::dangling(),
        }
    }

    /// Where a device writes. Writing through it is for whoever owns the buffer.
    pub(super) fn raw(&self) -> *mut T {
        self.ptr().as_ptr()
    }
}

impl<T: DeviceCopy> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements, all initialised by the constructors; whatever a device wrote
        // there since is a value of the type, and a copy under way owns the buffer.
        unsafe { std::slice::from_raw_parts(self.ptr().as_ptr(), self.len) }
    }
}

impl<T: DeviceCopy> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr(), self.len) }
    }
}

impl<T: DeviceCopy> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("type", &std::any::type_name::<T>())
            .field("ptr", &self.ptr())
            .field("len", &self.len)
            .finish()
    }
}
