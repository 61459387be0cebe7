//! How many of the allocator's locks the calling thread holds.
//!
//! Nothing that may wait is called under one of them, and every call of the driver may wait: for work, or
//! for another thread in the driver. The simulator looks at this count in every call. Only debug builds
//! count, so that the hot path of the others does not pay for it.

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

pub(crate) use count::Counted;
#[cfg(feature = "sim")]
pub(crate) use count::locks;

#[cfg(all(test, feature = "sim", debug_assertions, not(loom)))]
mod tests {
    use crate::allocator::front::Lock;
    use crate::sim::{Report, SimConfig, Simulator};

    #[test]
    fn calls_of_the_driver_under_a_lock_are_reported() {
        let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
        let driver = sim.driver().unwrap();
        let lock = Lock::new(1);
        let held = lock.lock();
        assert_eq!(driver.device_count().unwrap(), 1);
        drop(held);
        assert!(driver.device_count().is_ok(), "free again");
        let call = "cuDeviceGetCount";
        assert_eq!(sim.take_reports(), [Report::UnderLock { call, locks: 1 }]);
    }
}
