//! Host memory for copies that are waited for.
//!
//! A wait can fail without telling whether the copy is over. Even then the device must not access memory that the
//! caller lends for the length of a call. So the device copies to and from staging memory of this crate, which can be
//! leaked.

use std::mem::MaybeUninit;

use crate::error::Error;
use crate::sync::order::Ended;

/// The most bytes copied at a time, so that a large copy does not need a second memory of its size.
pub(crate) const CHUNK: usize = 4 << 20;

/// Host memory of this crate that a device copies to or from.
pub(crate) struct Staging(Vec<MaybeUninit<u8>>);

impl Staging {
    /// Memory for `bytes`.
    ///
    /// # Errors
    /// [`Error::HostMemory`].
    pub(crate) fn new(bytes: usize) -> Result<Staging, Error> {
        let mut memory = Vec::new();
        memory
            .try_reserve_exact(bytes)
            .map_err(|_| Error::HostMemory { bytes })?;
        Ok(Staging(memory))
    }

    pub(crate) fn ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// Returns the memory that an operation used; leaks it if the end of the operation was not observed.
pub(crate) fn keep<T>(memory: T, ended: Ended) -> Result<T, Error> {
    match ended {
        Ended::Over(result) => result.map(|()| memory),
        Ended::Unseen(error) => {
            log::error!("leaking host memory: cannot determine whether a copy completed: {error}");
            std::mem::forget(memory);
            Err(Error::Unseen(error))
        }
    }
}
