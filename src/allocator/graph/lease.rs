//! Leases: how long a graph, what was made of it, and its launches may use a pool's addresses.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::clock::Wakeup;

/// The leases of a pool that hold: counted, so that nobody looks at each.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases(Arc<Holding>);

#[derive(Debug, Default)]
struct Holding {
    count: AtomicU64,
    /// Woken when one is over.
    ended: Arc<Wakeup>,
}

impl Leases {
    /// Of a pool whose leases wake who waits for `ended`.
    pub(crate) fn new(ended: &Arc<Wakeup>) -> Leases {
        Leases(Arc::new(Holding {
            count: AtomicU64::new(0),
            ended: Arc::clone(ended),
        }))
    }

    /// How many hold.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Acquire)
    }
}

/// A lease that the pool does not count yet.
const NEW: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

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
    state: AtomicU8,
    pool: Leases,
}

impl Lease {
    /// One of a pool, which does not [count](Self::hold) yet.
    pub(crate) fn new(pool: &Leases) -> Lease {
        Lease(Arc::new(Term {
            state: AtomicU8::new(NEW),
            pool: pool.clone(),
        }))
    }

    /// From here on it counts for its pool, if it is not over by now.
    pub(crate) fn hold(&self) {
        let (state, count) = (&self.0.state, &self.0.pool.0.count);
        count.fetch_add(1, Ordering::Relaxed);
        let new = state.compare_exchange(NEW, COUNTED, Ordering::AcqRel, Ordering::Acquire);
        if new.is_err() {
            count.fetch_sub(1, Ordering::Release);
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == OVER
    }

    /// Nobody holds it any more.
    pub(crate) fn end(&self) {
        let pool = &self.0.pool.0;
        if self.0.state.swap(OVER, Ordering::AcqRel) == COUNTED {
            pool.count.fetch_sub(1, Ordering::Release);
        }
        pool.ended.wake();
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
        let leases = Leases::new(&wakeup);
        let lease = Lease::new(&leases);
        lease.hold();
        let driver = lease.clone().into_driver();
        assert!(!lease.is_over() && leases.count() == 1);
        // SAFETY: made just now, and not used again.
        unsafe { ended(driver) };
        assert!(lease.is_over() && wakeup.count() == 1);
        assert_eq!((Arc::strong_count(&lease.0), leases.count()), (1, 0));
    }

    /// The driver may say so on its thread before the pool heard of the lease.
    #[test]
    fn a_lease_counts_from_its_hold_to_its_end_in_whichever_order_they_come() {
        let leases = Leases::default();
        let [early, kept] = [(); 2].map(|()| Lease::new(&leases));
        assert_eq!(leases.count(), 0, "nobody said that it counts");
        kept.hold();
        early.end();
        assert_eq!(leases.count(), 1);
        early.hold();
        assert!(early.is_over() && !kept.is_over());
        assert_eq!(leases.count(), 1, "it was over before");
        kept.end();
        assert_eq!(leases.count(), 0);
    }
}
