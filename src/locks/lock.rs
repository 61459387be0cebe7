//! The lock of the hot path.
//!
//! One read-modify-write takes it and a plain store releases it: the two read-modify-writes of an ordinary mutex cost
//! more than all the work done under this one. A waiting thread spins, then yields, then sleeps for short times; it
//! never parks, so no wake-up can be lost.
//!
//! Under `--cfg loom` the same code runs on loom's primitives, which explore all interleavings.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};

use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

/// The number of spinning rounds before a waiting thread yields. The first round has one pause. In the last round, the
/// pauses take much longer than a read of the lock, but no longer than the lock is usually held.
const SPINS: u32 = 16;
const MOST_PAUSES: u32 = 8;
/// The number of yields before a waiting thread sleeps. A thread that gets here waits for one that is not running.
const YIELDS: u32 = 256;
const NAP: std::time::Duration = std::time::Duration::from_micros(50);

/// A value that one thread at a time may use. The lock and the value's first fields are adjacent, with fields between
/// them that may be read without the lock.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lock<T, B = ()> {
    taken: AtomicBool,
    pub(crate) beside: B,
    value: Cell<T>,
}

// SAFETY: the value is accessed only through a `Held`, and at most one of these exists at a time.
unsafe impl<T: Send, B: Sync> Sync for Lock<T, B> {}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock::with(value, ())
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Lock::new(T::default())
    }
}

impl<T, B> Lock<T, B> {
    pub(crate) fn with(value: T, beside: B) -> Self {
        Lock {
            taken: AtomicBool::new(false),
            beside,
            value: Cell::new(value),
        }
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> Held<'_, T, B> {
        let contended = self.taken.swap(true, Ordering::Acquire);
        if contended {
            self.wait();
        }
        self.held(contended)
    }

    /// Returns the value if the lock is free.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Held<'_, T, B>> {
        if self.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(self.held(false))
    }

    /// The offset of the value from the beginning of the lock.
    #[cfg(not(loom))]
    pub(crate) const fn value_at() -> usize {
        std::mem::offset_of!(Self, value)
    }

    #[inline(always)]
    fn held(&self, contended: bool) -> Held<'_, T, B> {
        Held {
            lock: self,
            contended,
            #[cfg(loom)]
            pointer: Some(self.value.0.get_mut()),
            _counted: super::held::Counted::new(),
            _thread: std::marker::PhantomData,
        }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let mut round: u32 = 0;
        loop {
            pause(round);
            round = round.saturating_add(1);
            if !self.seems_taken() && !self.taken.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }

    /// Only reads, so that the holder keeps the cache line for its writes.
    #[cfg(not(loom))]
    fn seems_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Loom may answer such a read with an old value forever.
    #[cfg(loom)]
    fn seems_taken(&self) -> bool {
        false
    }
}

/// Lets other threads run, longer in later rounds.
#[cfg(not(loom))]
pub(crate) fn pause(round: u32) {
    if round < SPINS {
        for _ in 0..(1 << (round / 2)).min(MOST_PAUSES) {
            std::hint::spin_loop();
        }
    } else if round < SPINS + YIELDS {
        std::thread::yield_now();
    } else {
        std::thread::sleep(NAP);
    }
}

#[cfg(loom)]
pub(crate) fn pause(_round: u32) {
    let _ = (SPINS, MOST_PAUSES, YIELDS, NAP);
    loom::thread::yield_now();
}

/// The value, while this thread holds the lock.
#[derive(Debug)]
pub(crate) struct Held<'a, T, B = ()> {
    lock: &'a Lock<T, B>,
    /// Whether the lock was taken by another thread when it was requested.
    pub(crate) contended: bool,
    #[cfg(loom)]
    pointer: Option<loom::cell::MutPtr<T>>,
    _counted: super::held::Counted,
    /// Like the standard library's guards it stays on its thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl<T, B> Deref for Held<'_, T, B> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        #[cfg(not(loom))]
        // SAFETY: this is the only `Held` of the lock, and the result borrows it.
        unsafe {
            &*self.lock.value.0.get()
        }
        #[cfg(loom)]
        // SAFETY: as above.
        unsafe {
            &*pointer_of(&self.pointer)
        }
    }
}

impl<T, B> DerefMut for Held<'_, T, B> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        #[cfg(not(loom))]
        // SAFETY: as for `deref`, and this `Held` is borrowed exclusively.
        unsafe {
            &mut *self.lock.value.0.get()
        }
        #[cfg(loom)]
        // SAFETY: as above.
        unsafe {
            &mut *pointer_of(&self.pointer)
        }
    }
}

impl<T, B> Drop for Held<'_, T, B> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(loom)]
        // Ends loom's record of the access before the lock is released.
        drop(self.pointer.take());
        // Loom does not order a plain store after another thread's earlier swap.
        #[cfg(loom)]
        self.lock.taken.swap(false, Ordering::Release);
        #[cfg(not(loom))]
        self.lock.taken.store(false, Ordering::Release);
    }
}

#[cfg(not(loom))]
#[derive(Debug)]
struct Cell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> Cell<T> {
    fn new(value: T) -> Self {
        Cell(std::cell::UnsafeCell::new(value))
    }
}

#[cfg(loom)]
#[derive(Debug)]
struct Cell<T>(loom::cell::UnsafeCell<T>);

#[cfg(loom)]
impl<T> Cell<T> {
    fn new(value: T) -> Self {
        Cell(loom::cell::UnsafeCell::new(value))
    }
}

#[cfg(loom)]
fn pointer_of<T>(held: &Option<loom::cell::MutPtr<T>>) -> *mut T {
    held.as_ref()
        .map_or(std::ptr::null_mut(), |held| held.with(|pointer| pointer))
}
