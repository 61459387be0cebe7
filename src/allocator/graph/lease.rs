//! Leases: how long a graph, what was made of it, and its launches may use a pool's addresses.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::clock::Wakeup;

/// Holds until the driver says that the graph and all executables made of it are gone and none of them runs, which it
/// does on a thread of its own some time after that is so.
#[derive(Debug, Clone)]
pub(crate) struct Lease(Arc<Term>);

impl PartialEq for Lease {
    fn eq(&self, other: &Lease) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Lease {}

#[derive(Debug)]
struct Term {
    over: AtomicBool,
    /// Woken when it is over.
    ended: Arc<Wakeup>,
}

impl Lease {
    pub(crate) fn new(ended: &Arc<Wakeup>) -> Lease {
        Lease(Arc::new(Term {
            over: AtomicBool::new(false),
            ended: Arc::clone(ended),
        }))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }

    /// Nobody holds it any more.
    pub(crate) fn end(&self) {
        self.0.over.store(true, Ordering::Release);
        self.0.ended.wake();
    }

    /// A reference for the driver, which gives it to [`ended`].
    pub(crate) fn into_driver(self) -> *mut c_void {
        Arc::into_raw(self.0).cast_mut().cast()
    }
}

/// Ends a lease. Calls nothing of the driver's.
///
/// # Safety
/// `lease` came from [`Lease::into_driver`], and this is its only use since.
pub(crate) unsafe extern "C" fn ended(lease: *mut c_void) {
    // SAFETY: the caller's contract.
    let lease = Lease(unsafe { Arc::from_raw(lease.cast_const().cast()) });
    lease.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_word_ends_a_lease_and_lets_go_of_it() {
        let wakeup = Arc::<Wakeup>::default();
        let lease = Lease::new(&wakeup);
        let driver = lease.clone().into_driver();
        assert!(!lease.is_over());
        // SAFETY: made just now, and not used again.
        unsafe { ended(driver) };
        assert!(lease.is_over() && wakeup.count() == 1);
        assert_eq!(Arc::strong_count(&lease.0), 1);
    }
}
