//! Leases: how long a graph, the executable graphs instantiated from it, and their launches may use a pool's addresses.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::clock::Wakeup;

/// The number of held leases of a pool, so that they need not be visited.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases(Arc<Holding>);

#[derive(Debug, Default)]
struct Holding {
    count: AtomicU64,
    /// Woken when a lease ends.
    ended: Arc<Wakeup>,
}

impl Leases {
    /// Creates the counter of a pool whose leases wake the waiters of `ended`.
    pub(crate) fn new(ended: &Arc<Wakeup>) -> Leases {
        Leases(Arc::new(Holding {
            count: AtomicU64::new(0),
            ended: Arc::clone(ended),
        }))
    }

    /// Returns the number of held leases.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Acquire)
    }
}

/// A lease that the pool does not count yet.
const NEW: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

/// A lease of a pool's addresses. It is held until the driver reports that the graph and all executable graphs
/// instantiated from it were destroyed and none of them runs. The driver reports that on its own thread, with some
/// delay.
#[derive(Debug, Clone)]
pub(crate) struct Lease(Arc<LeaseState>);

impl PartialEq for Lease {
    fn eq(&self, other: &Lease) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Lease {}

#[derive(Debug)]
struct LeaseState {
    state: AtomicU8,
    pool: Leases,
}

impl Lease {
    /// Creates a lease of a pool, which is not [counted](Self::hold) yet.
    pub(crate) fn new(pool: &Leases) -> Lease {
        Lease(Arc::new(LeaseState {
            state: AtomicU8::new(NEW),
            pool: pool.clone(),
        }))
    }

    /// Counts the lease for its pool, unless it has already ended.
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

    pub(crate) fn end(&self) {
        let pool = &self.0.pool.0;
        if self.0.state.swap(OVER, Ordering::AcqRel) == COUNTED {
            pool.count.fetch_sub(1, Ordering::Release);
        }
        pool.ended.wake();
    }

    /// Creates a reference for the driver, which passes it to [`ended`].
    pub(crate) fn into_driver(self) -> *mut c_void {
        Arc::into_raw(self.0).cast_mut().cast()
    }
}

/// Ends a lease. Makes no driver calls.
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
    fn the_drivers_report_ends_and_frees_a_lease() {
        let wakeup = Arc::<Wakeup>::default();
        let leases = Leases::new(&wakeup);
        let lease = Lease::new(&leases);
        lease.hold();
        let driver = lease.clone().into_driver();
        assert!(!lease.is_over() && leases.count() == 1);
        // SAFETY: the reference was created above, and is not used again.
        unsafe { ended(driver) };
        assert!(lease.is_over() && wakeup.count() == 1);
        assert_eq!((Arc::strong_count(&lease.0), leases.count()), (1, 0));
    }

    /// The driver's thread may report the end before the pool counts the lease.
    #[test]
    fn a_lease_counts_from_its_hold_to_its_end_in_either_order() {
        let leases = Leases::default();
        let [early, kept] = [(); 2].map(|()| Lease::new(&leases));
        assert_eq!(leases.count(), 0, "a lease counts only once it is held");
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
