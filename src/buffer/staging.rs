//! Host memory for copies that are waited for.
//!
//! A wait can fail without a word on whether the copy is over. The memory that a caller lends for the
//! length of a call must then be out of the device's reach all the same; so the device copies to and
//! from memory of ours, which can be left to it for ever.

use std::mem::MaybeUninit;

use crate::error::Error;
use crate::sync::order::Ended;

/// The most bytes that are copied at a time, so that a large copy needs no second memory of its size.
pub(crate) const CHUNK: usize = 4 << 20;

/// Host memory of ours that a device copies to or from.
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

    /// Its first byte.
    pub(crate) fn ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// What an operation used, after it; leaked if the end was not seen.
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
