//! The mutexes of the library, and a count of the locks that the calling thread holds.
//!
//! No function that may wait is called under a lock: neither the driver, whose calls may wait for work or for another
//! thread in the driver, nor code of the program, such as hooks and loggers, which may call the library again. The
//! simulator reports each call made under a lock, and tests install a logger that does the same for log lines.
//! `tests/layers.py` checks that `src` has no other locks than those of this folder. Only debug builds count, so that
//! the hot path of release builds does not pay for it.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, LockResult, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard};
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

    /// Returns the number of locks that the calling thread holds.
    pub(crate) fn locks() -> u32 {
        LOCKS.get()
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod count {
    /// Does nothing in release builds.
    #[derive(Debug)]
    pub(crate) struct Counted(());

    impl Counted {
        #[inline(always)]
        pub(crate) fn new() -> Counted {
            Counted(())
        }
    }

    /// Always 0, since nothing is counted in release builds.
    #[inline(always)]
    pub(crate) fn locks() -> u32 {
        0
    }
}

/// A mutex that counts as held by its thread while it is locked.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks it, even after a panic of a thread that held it.
    #[inline]
    pub fn lock(&self) -> Locked<'_, T> {
        Held::of(self.0.lock())
    }

    /// Returns the value, unless another thread holds the lock or panicked while holding it.
    pub(crate) fn try_lock(&self) -> Option<Locked<'_, T>> {
        self.0.try_lock().ok().map(|guard| Held::of(Ok(guard)))
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Like [`Mutex`], for several readers or one writer.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> RwLock<T> {
        RwLock(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    pub(crate) fn read(&self) -> Held<RwLockReadGuard<'_, T>> {
        Held::of(self.0.read())
    }

    pub(crate) fn write(&self) -> Held<RwLockWriteGuard<'_, T>> {
        Held::of(self.0.write())
    }
}

/// The guard of a lock, counted as long as it lives.
#[derive(Debug)]
pub struct Held<G> {
    guard: G,
    _counted: Counted,
}

/// The guard of a [`Mutex`].
pub type Locked<'a, T> = Held<MutexGuard<'a, T>>;

impl<G> Held<G> {
    /// A panic under a lock leaves no partial change, so a poisoned lock can still be used.
    #[inline]
    fn of(guard: LockResult<G>) -> Held<G> {
        Held {
            guard: guard.unwrap_or_else(PoisonError::into_inner),
            _counted: Counted::new(),
        }
    }
}

impl<T> Locked<'_, T> {
    /// Releases the lock until the condition is notified.
    pub(crate) fn wait(self, condition: &Condvar) -> Self {
        debug_assert!(locks() <= 1, "a wait under another lock");
        Held {
            guard: condition
                .wait(self.guard)
                .unwrap_or_else(PoisonError::into_inner),
            _counted: self._counted,
        }
    }

    /// Like [`wait`](Self::wait), with a timeout.
    pub(crate) fn wait_timeout(self, condition: &Condvar, left: Duration) -> Self {
        debug_assert!(locks() <= 1, "a wait under another lock");
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

pub(crate) use count::{Counted, locks};
