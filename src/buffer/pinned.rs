//! Page-locked host memory, and the work that may still use it.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, DriverError, HostAllocation, HostMemory, Stream, process};
use crate::error::{Error, InvalidArgument, Refused};
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::{wait, wait_for};

use super::element::{DeviceCopy, bytes_of, check_aligned};
use super::pinned_pool::Inner;

/// Page-locked memory. Dropping it returns it to its pool; without a pool it is freed after the work that uses it.
pub(crate) struct HostBlock {
    /// None if there are no bytes.
    memory: Option<HostAllocation>,
    /// The work not known to be complete.
    uses: Vec<Use>,
    /// Why the end of a use is unknown and cannot be waited for: the memory is never used again.
    lost: Option<DriverError>,
    events: EventPools,
    /// The pool that it returns to.
    pub home: Option<Arc<Inner>>,
    /// The generation of the pool that created it; 0 without a pool.
    pub generation: u64,
}

struct Use {
    end: Pooled,
    stream: KeptStream,
}

impl HostBlock {
    /// Allocates uninitialised memory for all contexts.
    pub fn new(context: &Context, bytes: usize, events: EventPools) -> Result<Self, Error> {
        let how = HostMemory {
            portable: true,
            ..HostMemory::default()
        };
        let memory = match bytes {
            0 => None,
            bytes => Some(context.enter()?.host_allocation(bytes, how)?),
        };
        Ok(HostBlock {
            memory,
            uses: Vec::new(),
            lost: None,
            events,
            home: None,
            generation: 0,
        })
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, HostAllocation::bytes)
    }

    /// Returns the context that it was allocated in; none if there are no bytes.
    pub fn context(&self) -> Option<&Context> {
        self.memory.as_ref().map(HostAllocation::context)
    }

    /// Returns the events for ordering its uses.
    pub fn events(&self) -> &EventPools {
        &self.events
    }

    /// Whether work that is not known to be complete may use it.
    pub fn is_busy(&self) -> bool {
        self.is_lost() || !self.uses.is_empty()
    }

    /// Whether the end of its last use can never be determined.
    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    fn seen(&self) -> Result<(), Error> {
        match self.lost {
            None => Ok(()),
            Some(error) if error.is_fatal() => Err(error.into()),
            Some(error) => Err(Error::Unseen(error)),
        }
    }

    /// Removes completed work; returns whether all is complete. Does not wait.
    pub fn look(&mut self) -> Result<bool, Error> {
        self.seen()?;
        let mut failure = None;
        self.uses.retain(|work| match work.end.is_complete() {
            Ok(over) => !over,
            Err(error) => {
                failure = Some(error);
                true
            }
        });
        match failure {
            None => Ok(self.uses.is_empty()),
            Some(error) => {
                // After the loss of a context it is unknown what the device does. Any other failure concerns only this
                // query, which can be repeated.
                self.lost = Some(error).filter(DriverError::is_fatal);
                Err(error.into())
            }
        }
    }

    /// Whether all work is complete; removes none.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.seen()?;
        for work in &self.uses {
            if !work.end.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for all work, on the host.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.seen()?;
        for work in &self.uses {
            wait_for(&work.end, &work.stream)?;
        }
        self.uses.clear();
        Ok(())
    }

    /// Records that all work submitted to `stream` so far may use the memory. If its end cannot be marked, the host
    /// waits for it; if that fails, too, the memory is lost.
    ///
    /// # Errors
    /// Those of recording the marker.
    pub fn used_by(&mut self, stream: &Stream, events: &EventPools) -> Result<(), DriverError> {
        let marked = events.record(stream).map(|end| Use {
            end,
            stream: KeptStream::new(stream),
        });
        match marked {
            Ok(work) => self.uses.push(work),
            Err(error) => {
                self.lost = wait(stream, events).is_err().then_some(error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Marks the memory as lost: the end of work that uses it cannot be determined.
    pub fn lose(&mut self, error: DriverError) {
        self.lost = Some(error);
    }

    /// Removes all uses, whose end was observed elsewhere.
    pub fn used_no_more(&mut self) {
        self.uses.clear();
    }

    /// Iterates over the streams whose work may use it, each with the end of that work.
    pub fn uses(&self) -> impl Iterator<Item = (&Pooled, &Stream)> {
        self.uses
            .iter()
            .map(|work| (&work.end, work.stream.stream()))
    }

    /// Rejects memory of an earlier generation of its pool, and memory that other work may use.
    pub fn ready(&mut self) -> Result<(), Error> {
        let have = self.generation;
        match self.home.as_ref().map(|pool| pool.generation()) {
            Some(current) if current != have => Err(Error::Stale { have, current }),
            _ => self.free_to_write(),
        }
    }

    fn free_to_write(&mut self) -> Result<(), Error> {
        match self.look()? {
            true => Ok(()),
            false => Err(Error::InFlight),
        }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(pool) = self.home.take() {
            return pool.take_back(HostBlock {
                memory: self.memory.take(),
                uses: std::mem::take(&mut self.uses),
                lost: self.lost,
                events: self.events.clone(),
                home: None,
                generation: self.generation,
            });
        }
        let Some(memory) = &self.memory else { return };
        if !self.is_busy() || memory.context().driver().drops_nothing() {
            return;
        }
        if let Err(error) = self.wait() {
            // A logger has locks, which in a forked child a thread that does not exist there may hold.
            if !process::is_forked_child() {
                log::warn!("leaking page-locked memory: {error}");
            }
            std::mem::forget(self.memory.take());
        }
    }
}

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

    /// Allocates `len` elements, all bytes zero.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit).
    pub fn zeroed(context: &Context, len: usize) -> Result<Self, Error> {
        let mut buffer = Self::uninit(context, len)?;
        buffer.fill(MaybeUninit::zeroed());
        // SAFETY: all zero bytes are a value.
        Ok(unsafe { buffer.assume_init() })
    }

    /// Allocates a copy of a slice.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit).
    pub fn from_slice(context: &Context, values: &[T]) -> Result<Self, Error> {
        Ok(Self::uninit(context, values.len())?.write(values)?)
    }

    /// Returns the same memory as uninitialised.
    pub fn into_uninit(self) -> PinnedBuffer<MaybeUninit<T>> {
        // SAFETY: anything is a value of the type.
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
        let events = self.block.events.clone();
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
