//! Values of callers by handle: numbers that are never dereferenced and never reused, so that an invalid one is detected.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use cualloc::held::{Locked, Mutex};

use crate::results::{CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, Failure};

const SHIFT: u32 = 4;

/// The values of one kind.
pub(crate) struct HandleTable<T> {
    /// Begins each handle. No valid address on a 64-bit processor has this prefix, and no handle of another kind does.
    mark: u64,
    /// Why an invalid handle is refused.
    closed: &'static str,
    known: Mutex<Known<T>>,
}

struct Known<T> {
    by_handle: BTreeMap<u64, T>,
    made: u64,
}

/// Fails in a forked child of the process that first called this: a thread that does not exist there may hold a lock.
pub(crate) fn refuse_child() -> Result<(), Failure> {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    let now = std::process::id();
    if *PROCESS.get_or_init(|| now) == now {
        return Ok(());
    }
    let why = "the process is a forked child";
    Err(Failure::Reason(CUALLOC_CONTEXT_LOST, why))
}

impl<T> HandleTable<T> {
    pub(crate) const fn new(prefix: u16, closed: &'static str) -> HandleTable<T> {
        let known = Known {
            by_handle: BTreeMap::new(),
            made: 0,
        };
        HandleTable {
            mark: (prefix as u64) << 48,
            closed,
            known: Mutex::new(known),
        }
    }

    fn known(&self) -> Result<Locked<'_, Known<T>>, Failure> {
        refuse_child()?;
        Ok(self.known.lock())
    }

    pub(crate) fn add(&self, value: T) -> Result<u64, Failure> {
        let mut known = self.known()?;
        known.made += 1;
        let handle = self.mark | known.made << SHIFT;
        known.by_handle.insert(handle, value);
        Ok(handle)
    }

    /// Removes a value, which the caller drops without the lock.
    pub(crate) fn remove(&self, handle: u64) -> Result<T, Failure> {
        let removed = self.known()?.by_handle.remove(&handle);
        removed.ok_or(Failure::Reason(CUALLOC_CLOSED, self.closed))
    }

    /// Runs a closure with a value, under the lock.
    pub(crate) fn with<R>(&self, handle: u64, run: impl FnOnce(&mut T) -> R) -> Result<R, Failure> {
        let mut known = self.known()?;
        let found = known.by_handle.get_mut(&handle);
        found
            .map(run)
            .ok_or(Failure::Reason(CUALLOC_CLOSED, self.closed))
    }
}
