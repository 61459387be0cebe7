//! A typed buffer that goes back to its pool.

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::sync::Arc;

use crate::buffer::{DeviceBuffer, DeviceCopy, DeviceSliceMut};
use crate::driver::{Stream, process};

use super::error::PoolError;
use super::places::Place;
use super::surplus::Surplus;

/// Device memory for elements, out of a [`TypedPool`](super::TypedPool) or
/// [`ThresholdPool`](super::ThresholdPool), to which its drop returns it, in the order of its stream,
/// without waiting. It can be read as a [`DeviceBuffer`], and written through `as_mut_slice`.
///
/// `Send` and `Sync`.
pub struct PooledBuffer<T: DeviceCopy> {
    buffer: ManuallyDrop<DeviceBuffer<T>>,
    pool: ManuallyDrop<Pool>,
}

/// Whose a buffer is.
pub(super) enum Pool {
    /// Without elements it is nobody's.
    None,
    Threshold(Arc<Surplus>),
    Typed(Place),
}

impl<T: DeviceCopy> PooledBuffer<T> {
    #[inline(always)]
    pub(super) fn new(buffer: DeviceBuffer<T>, pool: Pool) -> Self {
        PooledBuffer {
            buffer: ManuallyDrop::new(buffer),
            pool: ManuallyDrop::new(pool),
        }
    }

    #[inline(always)]
    fn into_parts(self) -> (DeviceBuffer<T>, Pool) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and the fields are used no more.
        unsafe {
            let buffer = ManuallyDrop::take(&mut this.buffer);
            (buffer, ManuallyDrop::take(&mut this.pool))
        }
    }

    /// All elements, to write to.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, T> {
        self.buffer.as_mut_slice()
    }

    /// Says that another stream uses the buffer: it is reused only when everything which that stream
    /// was given until the return has completed. For work that `unsafe` code launches; the buffer's own
    /// operations see to themselves.
    ///
    /// # Errors
    /// A stream that is capturing; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        match self.buffer.block() {
            Some(block) => Ok(block.record_stream(stream)?),
            None => Ok(()),
        }
    }

    /// Says that another stream used the buffer and will not again: reuse waits only for what that
    /// stream was given so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), PoolError> {
        match self.buffer.block() {
            Some(block) => Ok(block.record_use(stream)?),
            None => Ok(()),
        }
    }

    /// Returns the buffer to its pool; unlike a drop it reports failures, and gives the buffer back
    /// with them.
    ///
    /// # Errors
    /// As [`DeviceBuffer::free`].
    pub fn free(self) -> Result<(), Box<PooledFreeError<T>>> {
        if process::is_forked_child() {
            return Err(Box::new(PooledFreeError {
                buffer: self,
                error: crate::allocator::Error::ForkedChild.into(),
            }));
        }
        let (buffer, mut pool) = self.into_parts();
        let left = match &pool {
            Pool::Typed(place) => Some(place.leave()),
            _ => None,
        };
        let failed = match buffer.free() {
            Err(failed) => failed,
            Ok(()) => {
                match (pool, left) {
                    (Pool::Typed(place), Some(left)) => place.end(left),
                    (Pool::Threshold(surplus), _) => surplus.release(false),
                    _ => {}
                }
                return Ok(());
            }
        };
        if let (Pool::Typed(place), Some(left)) = (&mut pool, left) {
            place.stay(left, failed.buffer.as_device_ptr());
        }
        Err(Box::new(PooledFreeError {
            buffer: Self::new(failed.buffer, pool),
            error: failed.error.into(),
        }))
    }

    pub(super) fn place(&self) -> Option<&Place> {
        match &*self.pool {
            Pool::Typed(place) => Some(place),
            _ => None,
        }
    }
}

impl<T: DeviceCopy> PooledBuffer<MaybeUninit<T>> {
    /// Declares that everything is initialised.
    ///
    /// # Safety
    /// Work that writes values to all elements was given to the buffer's stream, or that stream waits
    /// for it.
    pub unsafe fn assume_init(self) -> PooledBuffer<T> {
        let (buffer, pool) = self.into_parts();
        // SAFETY: the caller's contract.
        PooledBuffer::new(unsafe { buffer.assume_init() }, pool)
    }

    pub(super) fn zeroed(self, stream: &Stream) -> Result<PooledBuffer<T>, PoolError> {
        // SAFETY: zeroed in the order of the stream before anything else can be done to it.
        let mut buffer = unsafe { self.assume_init() };
        buffer.as_mut_slice().set_zero(stream)?;
        Ok(buffer)
    }
}

impl<T: DeviceCopy> Deref for PooledBuffer<T> {
    type Target = DeviceBuffer<T>;

    fn deref(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }
}

impl<T: DeviceCopy> Drop for PooledBuffer<T> {
    #[inline]
    fn drop(&mut self) {
        if let Pool::Typed(place) = &*self.pool {
            // SAFETY: this is the drop, which ends here if both are gone.
            if unsafe { place.give_back_at_once(&mut self.buffer) } {
                return;
            }
        }
        self.drop_slowly();
    }
}

impl<T: DeviceCopy> PooledBuffer<T> {
    /// The fields must not be used after this.
    #[inline(never)]
    fn drop_slowly(&mut self) {
        // SAFETY: only the drop calls this, and it does nothing else then.
        let (buffer, pool) = unsafe {
            let buffer = ManuallyDrop::take(&mut self.buffer);
            (buffer, ManuallyDrop::take(&mut self.pool))
        };
        match pool {
            Pool::Typed(place) => place.give_back(buffer),
            Pool::Threshold(surplus) => {
                drop(buffer);
                surplus.release(false);
            }
            Pool::None => drop(buffer),
        }
    }
}

impl<T: DeviceCopy> fmt::Debug for PooledBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.buffer, f)
    }
}

/// A buffer that could not be returned, and why.
#[derive(thiserror::Error)]
#[error("the buffer at {:#x} could not be returned", buffer.as_device_ptr())]
pub struct PooledFreeError<T: DeviceCopy> {
    /// The buffer, still allocated.
    pub buffer: PooledBuffer<T>,
    /// The reason.
    #[source]
    pub error: PoolError,
}

impl<T: DeviceCopy> fmt::Debug for PooledFreeError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledFreeError")
            .field("buffer", &self.buffer)
            .field("error", &self.error)
            .finish()
    }
}
