//! How many of the library's locks the calling thread holds: the allocator's own, and those of the standard
//! library that are taken through [`locked`] and its like.
//!
//! Nothing that may wait is called under one of them, and every call of the driver may wait: for work, or
//! for another thread in the driver. The simulator looks at this count in every call. Only debug builds
//! count, so that the hot path of the others does not pay for it.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, LockResult, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[cfg(all(debug_assertions, not(loom)))]
mod count {
    use std::cell::Cell;

    thread_local!(static LOCKS: Cell<u32> = const { Cell::new(0) });

    /// Counts as a held lock while it lives.
    #[derive(Debug)]
    pub(crate) struct Counted(());

    impl Counted {
        #[inline(always)]
        pub(crate) fn new() -> Counted {
            LOCKS.set(LOCKS.get() + 1);
            Counted(())
        }
    }

    impl Drop for Counted {
        #[inline(always)]
        fn drop(&mut self) {
            LOCKS.set(LOCKS.get() - 1);
        }
    }

    /// Locks that the calling thread holds.
    #[cfg(feature = "sim")]
    pub(crate) fn locks() -> u32 {
        LOCKS.get()
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod count {
    /// Nothing.
    #[derive(Debug)]
    pub(crate) struct Counted(());

    impl Counted {
        #[inline(always)]
        pub(crate) fn new() -> Counted {
            Counted(())
        }
    }

    /// 0: nobody counts.
    #[cfg(feature = "sim")]
    pub(crate) fn locks() -> u32 {
        0
    }
}

/// The guard of a lock, counted as long as it lives.
#[derive(Debug)]
pub(crate) struct Held<G> {
    guard: G,
    _counted: Counted,
}

/// The guard of a mutex.
pub(crate) type Locked<'a, T> = Held<MutexGuard<'a, T>>;

impl<G> Held<G> {
    /// What was behind a lock is right also after a panic under it: nothing is left half done there.
    #[inline]
    pub(crate) fn of(guard: LockResult<G>) -> Held<G> {
        Held {
            guard: guard.unwrap_or_else(PoisonError::into_inner),
            _counted: Counted::new(),
        }
    }
}

impl<T> Locked<'_, T> {
    /// Gives the lock away until the condition is notified.
    pub(crate) fn wait(self, condition: &Condvar) -> Self {
        Held {
            guard: condition
                .wait(self.guard)
                .unwrap_or_else(PoisonError::into_inner),
            _counted: self._counted,
        }
    }

    /// As [`wait`](Self::wait), for so long.
    pub(crate) fn wait_timeout(self, condition: &Condvar, left: Duration) -> Self {
        let waited = condition.wait_timeout(self.guard, left);
        Held {
            guard: waited.unwrap_or_else(PoisonError::into_inner).0,
            _counted: self._counted,
        }
    }
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

/// Locks a mutex.
#[inline]
pub(crate) fn locked<T: ?Sized>(mutex: &Mutex<T>) -> Locked<'_, T> {
    Held::of(mutex.lock())
}

pub(crate) use count::Counted;
#[cfg(feature = "sim")]
pub(crate) use count::locks;
