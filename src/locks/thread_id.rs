//! The identity of the calling thread.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// A thread of the process. Ids are never reused.
///
/// It has no destructor, unlike the standard library's, which panics when it is used after the thread's local variables
/// have been destroyed. Destructors of `pthread` keys run that late, and may call the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(u64);

thread_local! {
    /// 0 until the thread first requests its number.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}

impl ThreadId {
    /// Returns the id of the calling thread.
    #[inline]
    pub fn current() -> ThreadId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NUMBER.with(|number| {
            if number.get() == 0 {
                number.set(NEXT.fetch_add(1, Ordering::Relaxed));
            }
            ThreadId(number.get())
        })
    }

    /// Threads are numbered from 1 in the order of their first request.
    #[inline]
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

/// The first number of impersonated threads.
#[cfg(feature = "sim")]
const IMPERSONATED: u64 = 1 << 30;

/// Runs `run` as another thread: [`ThreadId::current`] depends only on `thread`, whichever thread runs it.
#[cfg(feature = "sim")]
pub(crate) fn as_thread<T>(thread: u32, run: impl FnOnce() -> T) -> T {
    struct Restore(u64);
    impl Drop for Restore {
        fn drop(&mut self) {
            NUMBER.set(self.0);
        }
    }
    let _restore = Restore(NUMBER.replace(IMPERSONATED + u64::from(thread)));
    run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_one_identity() {
        let own = ThreadId::current();
        let others = [(); 3].map(|()| std::thread::spawn(ThreadId::current).join().unwrap());
        for (at, other) in others.iter().enumerate() {
            assert_ne!(own, *other);
            assert!(!others[..at].contains(other));
        }
        assert_eq!(own, ThreadId::current());
    }

    #[cfg(feature = "sim")]
    #[test]
    fn an_impersonated_thread_is_another_one_until_the_call_ends() {
        let own = ThreadId::current();
        let one = as_thread(1, ThreadId::current);
        assert_ne!(one, own);
        assert_ne!(one, as_thread(2, ThreadId::current));
        let elsewhere = std::thread::spawn(|| as_thread(1, ThreadId::current));
        assert_eq!(one, elsewhere.join().unwrap());
        let panicked = std::panic::catch_unwind(|| as_thread(1, || panic!("expected")));
        assert!(panicked.is_err());
        assert_eq!(own, ThreadId::current());
    }
}
