//! A typed buffer that goes back to its pool.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Stream, process};

use super::part::Part;
use super::table::{Key, Live, Slot};
use crate::error::{Error, Refused};

/// Device memory for elements, out of a [`TypedPool`](super::TypedPool) or
/// [`ThresholdPool`](super::ThresholdPool), to which its drop returns it, in the order of its stream,
/// without waiting. It can be used as the [`DeviceBuffer`] that it dereferences to; one that is put in that
/// buffer's place goes back to where it came from, as this one does.
///
/// `Send` and `Sync`.
pub struct PooledBuffer<T: DeviceCopy> {
    buffer: DeviceBuffer<T>,
    /// `None` for a buffer without elements, which is no pool's. Goes after the buffer.
    home: Option<Home>,
}

/// Where a buffer belongs.
pub(super) struct Home {
    pub part: Arc<Part>,
    /// The entry in the table of a typed pool.
    pub entry: Option<Entry>,
}

/// A live buffer in the table of its pool.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub slot: Slot,
    /// The stream and the bytes with which it is returned.
    pub key: Key,
}

impl Drop for Home {
    /// Just after the buffer was freed.
    fn drop(&mut self) {
        if !process::is_gone() {
            self.part.release(false);
        }
    }
}

impl Home {
    /// Just before the buffer is freed.
    #[inline]
    fn leave(&self) -> Option<Live> {
        let entry = self.entry.as_ref()?;
        Some(self.part.table.leave(entry.slot, &entry.key))
    }

    /// After a [`leave`](Self::leave) the buffer could not be freed.
    fn stay(&mut self, left: Option<Live>) {
        if let (Some(entry), Some(live)) = (&mut self.entry, left) {
            entry.slot = self.part.table.stay(&entry.key, live);
        }
    }
}

impl<T: DeviceCopy> PooledBuffer<T> {
    pub(super) fn new(buffer: DeviceBuffer<T>, home: Home) -> Self {
        PooledBuffer {
            buffer,
            home: Some(home),
        }
    }

    /// A buffer without elements.
    pub(super) fn empty() -> Self {
        PooledBuffer {
            buffer: DeviceBuffer::empty(),
            home: None,
        }
    }

    /// What is left drops as a buffer without elements.
    fn take_parts(&mut self) -> (DeviceBuffer<T>, Option<Home>) {
        let buffer = std::mem::replace(&mut self.buffer, DeviceBuffer::empty());
        (buffer, self.home.take())
    }

    /// Says that another stream uses the buffer: it is reused only when everything which that stream
    /// was given until the return has completed. For work that `unsafe` code launches; the buffer's own
    /// operations see to themselves.
    ///
    /// # Errors
    /// A stream that is capturing; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
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
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
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
    pub fn free(mut self) -> Result<(), Refused<PooledBuffer<T>>> {
        if process::is_forked_child() {
            return Err(Refused::new(self, Error::ForkedChild));
        }
        let (buffer, mut home) = self.take_parts();
        let left = home.as_ref().and_then(Home::leave);
        let Err(failed) = buffer.free() else {
            return Ok(());
        };
        if let Some(home) = &mut home {
            home.stay(left);
        }
        Err(Refused::new(
            PooledBuffer {
                buffer: *failed.value,
                home,
            },
            failed.error,
        ))
    }

    /// The buffer is to be returned on another stream than its own.
    pub(super) fn return_on(&mut self, stream: u64) {
        if let Some(home) = &mut self.home
            && let Some(entry) = &mut home.entry
        {
            entry.key.0 = stream;
        }
    }
}

impl<T: DeviceCopy> PooledBuffer<MaybeUninit<T>> {
    /// Declares that everything is initialised.
    ///
    /// # Safety
    /// Work that writes values to all elements was given to the buffer's stream, or that stream waits
    /// for it.
    pub unsafe fn assume_init(mut self) -> PooledBuffer<T> {
        let (buffer, home) = self.take_parts();
        PooledBuffer {
            // SAFETY: the caller's contract.
            buffer: unsafe { buffer.assume_init() },
            home,
        }
    }

    pub(super) fn zeroed(self, stream: &Stream) -> Result<PooledBuffer<T>, Error> {
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

impl<T: DeviceCopy> DerefMut for PooledBuffer<T> {
    fn deref_mut(&mut self) -> &mut DeviceBuffer<T> {
        &mut self.buffer
    }
}

impl<T: DeviceCopy> Drop for PooledBuffer<T> {
    fn drop(&mut self) {
        // In a forked child a lock may be held by a thread that does not exist there.
        if let Some(home) = self.home.as_ref().filter(|_| !process::is_gone()) {
            home.leave();
        }
    }
}

impl<T: DeviceCopy> fmt::Debug for PooledBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.buffer, f)
    }
}
