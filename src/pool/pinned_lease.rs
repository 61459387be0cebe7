//! Page-locked memory on lease, and the copies to and from it.

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::buffer::DeviceCopy;
use crate::driver::{DriverError, Entered, Stream, process, sys};

use super::pinned_buffers::{Access, Buffer, Flight, Inner};
use crate::error::{Error, InvalidArgument};
use crate::sync::capture;

/// Page-locked memory for `len` elements of `T`, returned to its [`PinnedPool`](super::PinnedPool) on drop.
/// `Send` and `Sync`.
///
/// The memory is not initialised at first. What safe code sees are the elements from the start that the
/// host or a completed copy has written; the rest is [`MaybeUninit`]. While a device may write to the
/// memory the host sees nothing of it, and while a device may read it the host cannot write.
pub struct PinnedLease<T: DeviceCopy> {
    buffer: Option<Buffer>,
    pool: Arc<Inner>,
    len: usize,
    /// Elements from the start that hold values.
    initialised: usize,
    element: PhantomData<T>,
}

impl PinnedLease<u8> {
    pub(super) fn new(buffer: Buffer, pool: Arc<Inner>) -> Self {
        PinnedLease {
            len: buffer.memory.bytes(),
            buffer: Some(buffer),
            pool,
            initialised: 0,
            element: PhantomData,
        }
    }

    /// The same memory for `len` elements of another type.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`] for more than the capacity,
    /// [`InvalidArgument::Setting`] for a type of unusual alignment, [`Error::InFlight`]. The lease is
    /// returned then.
    pub fn typed<U: DeviceCopy>(mut self, len: usize) -> Result<PinnedLease<U>, Error> {
        self.land_finished(true)?;
        let Some(bytes) = len.checked_mul(size_of::<U>()) else {
            return Err(Error::Invalid(InvalidArgument::TooLarge {
                len,
                element_bytes: size_of::<U>(),
            }));
        };
        if bytes > self.capacity() {
            return Err(Error::Invalid(InvalidArgument::TooSmall {
                needed: bytes,
                usable: self.capacity(),
            }));
        }
        if !self.as_ptr().cast::<U>().is_aligned() {
            return Err(Error::Invalid(InvalidArgument::Setting {
                what: "alignment",
                value: align_of::<U>() as u64,
            }));
        }
        Ok(PinnedLease {
            buffer: self.buffer.take(),
            pool: Arc::clone(&self.pool),
            len,
            initialised: 0,
            element: PhantomData,
        })
    }
}

impl<T: DeviceCopy> PinnedLease<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes there are.
    pub fn capacity(&self) -> usize {
        self.buffer.as_ref().map_or(0, |b| b.memory.bytes())
    }

    /// The generation of the pool that the memory belongs to.
    pub fn generation(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.generation)
    }

    /// The first element's address, for driver calls. What such calls do has to be told by
    /// [`record_use`](Self::record_use).
    pub fn as_ptr(&self) -> *const T {
        let memory = self.buffer.as_ref().map(|b| b.memory.ptr());
        memory.unwrap_or(NonNull::dangling()).as_ptr().cast()
    }

    fn as_mut_ptr(&mut self) -> *mut T {
        self.as_ptr().cast_mut()
    }

    /// Takes note of copies that are over; an error if one is not that excludes what is to be done.
    fn land_finished(&mut self, write: bool) -> Result<(), Error> {
        let Some(buffer) = &mut self.buffer else {
            return Ok(());
        };
        if buffer.lost {
            return Err(Error::InFlight);
        }
        if buffer.flights.is_empty() {
            return Ok(());
        }
        let bytes = self.pool.land(buffer)?;
        if size_of::<T>() > 0 {
            self.initialised = self.initialised.max(bytes / size_of::<T>());
        }
        let excludes = |flight: &Flight| write || flight.access == Access::Write;
        if buffer.flights.iter().any(excludes) {
            return Err(Error::InFlight);
        }
        Ok(())
    }

    /// The elements that hold values.
    ///
    /// # Errors
    /// [`Error::InFlight`] while a device may write; driver errors.
    pub fn initialised(&mut self) -> Result<&[T], Error> {
        self.land_finished(false)?;
        // SAFETY: so many elements hold values, and no device writes to them while this is borrowed:
        // starting a copy takes the lease exclusively.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.initialised) })
    }

    /// The elements that hold values, to change them.
    ///
    /// # Errors
    /// [`Error::InFlight`] while a device may read or write; driver errors.
    pub fn initialised_mut(&mut self) -> Result<&mut [T], Error> {
        self.land_finished(true)?;
        let len = self.initialised;
        // SAFETY: as above, and borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), len) })
    }

    /// All elements, to write to. [`assume_init`](Self::assume_init) says what was written.
    ///
    /// # Errors
    /// As [`initialised_mut`](Self::initialised_mut).
    pub fn uninit_mut(&mut self) -> Result<&mut [MaybeUninit<T>], Error> {
        self.land_finished(true)?;
        // What is written here may be no value.
        self.initialised = 0;
        let len = self.len;
        // SAFETY: so many elements fit, no device uses them, and they are borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), len) })
    }

    /// Declares that the first `len` elements hold values.
    ///
    /// # Errors
    /// [`InvalidArgument::TooSmall`] if there are not so many.
    ///
    /// # Safety
    /// They do.
    pub unsafe fn assume_init(&mut self, len: usize) -> Result<(), Error> {
        self.fits(len)?;
        self.initialised = len;
        Ok(())
    }

    /// Copies values to the start; elements behind them keep theirs.
    ///
    /// # Errors
    /// [`InvalidArgument::TooSmall`] for more than there is room for, else as
    /// [`initialised_mut`](Self::initialised_mut).
    pub fn write(&mut self, values: &[T]) -> Result<(), Error> {
        self.fits(values.len())?;
        self.land_finished(true)?;
        // SAFETY: so many elements fit, and no device uses them.
        unsafe {
            self.as_mut_ptr()
                .copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
        self.initialised = self.initialised.max(values.len());
        Ok(())
    }

    fn fits(&self, len: usize) -> Result<(), Error> {
        if len <= self.len {
            return Ok(());
        }
        Err(Error::Invalid(InvalidArgument::TooSmall {
            needed: len.saturating_mul(size_of::<T>()),
            usable: self.len * size_of::<T>(),
        }))
    }

    /// Refuses a lease of an earlier generation: what its copies would refer to is gone.
    fn current(&self) -> Result<(), Error> {
        let (have, current) = (
            self.generation(),
            self.pool.change(|state| state.generation),
        );
        if have == current {
            return Ok(());
        }
        Err(Error::Stale { have, current })
    }

    /// Queues a copy of the elements that hold values to device memory. Does not wait; the memory is not
    /// written to or reused before the copy is over.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::InFlight`] while a device may write; a stream that is
    /// capturing; driver errors.
    ///
    /// # Safety
    /// `to` is device memory of that many bytes, alive until the copy is over, and work that uses it is
    /// in order with the stream.
    pub unsafe fn upload(&mut self, to: sys::CUdeviceptr, stream: &Stream) -> Result<(), Error> {
        self.current()?;
        self.land_finished(false)?;
        let (from, bytes) = (self.as_ptr(), self.initialised * size_of::<T>());
        self.submit(stream, Access::Read, bytes, |entered| {
            // SAFETY: the source is that long and stays until the copy is over; the caller vouches for
            // the target, and the stream is alive by the contract under which it was made.
            unsafe { entered.copy_host_to_device(to, from.cast(), bytes, stream.raw()) }
        })
    }

    /// Queues a copy of `len` elements from device memory to the start. Does not wait; the elements hold
    /// values when the copy is over.
    ///
    /// # Errors
    /// [`InvalidArgument::TooSmall`], [`Error::Stale`], [`Error::InFlight`]; a stream that is
    /// capturing; driver errors.
    ///
    /// # Safety
    /// `from` is device memory of that many elements, initialised and alive until the copy is over, and
    /// work that writes to it is in order with the stream.
    pub unsafe fn download(
        &mut self,
        from: sys::CUdeviceptr,
        len: usize,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.fits(len)?;
        self.current()?;
        self.land_finished(true)?;
        let (to, bytes) = (self.as_mut_ptr(), len * size_of::<T>());
        self.submit(stream, Access::Write, bytes, |entered| {
            // SAFETY: as above, the other way round.
            unsafe { entered.copy_device_to_host(to.cast(), from, bytes, stream.raw()) }
        })
    }

    fn submit(
        &mut self,
        stream: &Stream,
        access: Access,
        bytes: usize,
        copy: impl FnOnce(&Entered<'_>) -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        capture::refuse_capture(stream)?;
        let entered = stream.context().enter()?;
        // An error may be that of earlier work, so it does not say that nothing was queued.
        let copied = copy(&entered);
        drop(entered);
        let written = if copied.is_ok() { bytes } else { 0 };
        let marked = self.flight(stream, access, written);
        copied.map_err(Error::from).and(marked)
    }

    fn flight(&mut self, stream: &Stream, access: Access, bytes: usize) -> Result<(), Error> {
        let marked = self.pool.mark(stream);
        let Some(buffer) = &mut self.buffer else {
            return Ok(());
        };
        match marked {
            Ok(end) => buffer.flights.push(Flight { end, access, bytes }),
            Err(error) => {
                if stream.synchronize().is_err() {
                    buffer.lost = true;
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Says that work which the stream was given so far reads from or writes to the memory, by foreign
    /// calls.
    ///
    /// # Errors
    /// A stream that is capturing; driver errors. Where the end of the work can be neither marked nor
    /// waited for, the memory is never used again.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), Error> {
        capture::refuse_capture(stream)?;
        self.flight(stream, Access::Write, 0)
    }

    /// Whether no copy is in flight. Does not wait.
    ///
    /// # Errors
    /// Driver errors.
    pub fn is_complete(&mut self) -> Result<bool, Error> {
        match self.land_finished(true) {
            Ok(()) => Ok(true),
            Err(Error::InFlight) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Blocks until no copy is in flight.
    ///
    /// # Errors
    /// Driver errors, among them those of the work itself.
    pub fn wait(&mut self) -> Result<(), Error> {
        if let Some(buffer) = &self.buffer {
            for flight in &buffer.flights {
                flight.end.context().enter()?.wait(&flight.end)?;
            }
        }
        self.land_finished(true)
    }
}

impl<T: DeviceCopy> Drop for PinnedLease<T> {
    fn drop(&mut self) {
        if let Some(mut buffer) = self.buffer.take() {
            if process::is_forked_child() {
                return std::mem::forget(buffer);
            }
            // An error leaves it to be looked at later, or for ever.
            if !buffer.flights.is_empty() && !buffer.lost {
                let _ = self.pool.land(&mut buffer);
            }
            let gone = self.pool.change(|state| state.returned(buffer));
            // Freed without the lock.
            drop(gone);
        }
    }
}

impl<T: DeviceCopy> fmt::Debug for PinnedLease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedLease")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("initialised", &self.initialised)
            .field("generation", &self.generation())
            .finish()
    }
}
