//! Copies that the device is still busy with.

use std::fmt;
use std::mem::ManuallyDrop;

use crate::driver::{DriverError, Entered, Stream, process};
use crate::sync::event::Pooled;
use crate::sync::order::{wait, wait_for};

use super::element::DeviceCopy;
use super::order::{Failed, Memory, submit};
use super::pinned::PinnedBuffer;
use crate::error::{Error, Refused};

/// A copy between a device and a [`PinnedBuffer`], which it owns until the copy is complete.
///
/// Dropping it waits for the copy. Leaking it (`std::mem::forget`) leaks the host memory, so that
/// the device never writes to memory of somebody else. `Send` and `Sync`.
#[must_use = "dropping a copy in flight waits for it"]
pub struct CopyInFlight<T: DeviceCopy> {
    host: ManuallyDrop<PinnedBuffer<T>>,
    /// The copy's end and its stream; none if it is known to be complete.
    end: Option<(Pooled, Stream)>,
}

impl<T: DeviceCopy> CopyInFlight<T> {
    /// Starts a copy. `memory` is none if there is nothing to copy.
    ///
    /// # Safety
    /// `operation` copies between the memory and the host memory at the address it is given, within
    /// both.
    pub(super) unsafe fn start(
        host: PinnedBuffer<T>,
        memory: Option<&Memory>,
        stream: &Stream,
        operation: impl FnOnce(&Entered<'_>, *mut T) -> Result<(), DriverError>,
    ) -> Result<Self, Refused<Option<PinnedBuffer<T>>>> {
        let Some(memory) = memory else {
            return Ok(Self::complete(host));
        };
        let refused = |host, error| Err(Refused::new(Some(host), error));
        if let Err(error) = memory.same_device(stream) {
            return refused(host, error);
        }
        let raw = host.raw();
        let submitted = submit(stream, &[memory], |entered| operation(entered, raw));
        let error = match submitted {
            Ok(()) => match memory.events().record(stream) {
                Ok(event) => {
                    return Ok(CopyInFlight {
                        host: ManuallyDrop::new(host),
                        end: Some((event, stream.clone())),
                    });
                }
                Err(error) => Error::from(error),
            },
            Err(Failed::Before(error)) => return refused(host, error),
            Err(Failed::Submitted(error)) => {
                return match wait(stream, memory.events()) {
                    Ok(()) => refused(host, error),
                    Err(_) => {
                        leak(host);
                        Err(Refused::new(None, error))
                    }
                };
            }
        };
        // It was submitted, but its end cannot be marked: this is as good.
        match wait(stream, memory.events()) {
            Ok(()) => Ok(Self::complete(host)),
            Err(_) => {
                leak(host);
                Err(Refused::new(None, error))
            }
        }
    }

    fn complete(host: PinnedBuffer<T>) -> Self {
        CopyInFlight {
            host: ManuallyDrop::new(host),
            end: None,
        }
    }

    /// Whether the copy is complete. Does not wait.
    ///
    /// # Errors
    /// Driver errors, among them those of the work itself.
    pub fn is_complete(&self) -> Result<bool, Error> {
        match &self.end {
            None => Ok(true),
            Some((event, _)) => Ok(event.is_complete()?),
        }
    }

    /// Blocks until the copy is complete, and gives the host memory back.
    ///
    /// # Errors
    /// Driver errors, among them those of the work itself. If the end of the copy could not be waited
    /// for by any means, the host memory is leaked.
    pub fn wait(self) -> Result<PinnedBuffer<T>, Error> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped and neither field is used again.
        let (host, end) = unsafe {
            (
                ManuallyDrop::take(&mut this.host),
                std::ptr::read(&this.end),
            )
        };
        match wait_for_end(end) {
            Ok(()) => Ok(host),
            Err(error) => {
                leak(host);
                Err(error.into())
            }
        }
    }
}

fn wait_for_end(end: Option<(Pooled, Stream)>) -> Result<(), DriverError> {
    let Some((event, stream)) = end else {
        return Ok(());
    };
    wait_for(&event, &stream)
}

fn leak<T: DeviceCopy>(host: PinnedBuffer<T>) {
    // A logger has locks, and in a forked child a thread that is not there may hold them.
    if !process::is_forked_child() {
        log::warn!("{host:?} is leaked: the end of a copy could not be waited for");
    }
    std::mem::forget(host);
}

impl<T: DeviceCopy> Drop for CopyInFlight<T> {
    fn drop(&mut self) {
        // SAFETY: this is the drop, so the field is used no more.
        let host = unsafe { ManuallyDrop::take(&mut self.host) };
        match wait_for_end(self.end.take()) {
            Ok(()) => drop(host),
            Err(_) => leak(host),
        }
    }
}

impl<T: DeviceCopy> fmt::Debug for CopyInFlight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyInFlight")
            .field("host", &*self.host)
            .field("known_complete", &self.end.is_none())
            .finish()
    }
}
