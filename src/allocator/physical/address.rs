//! Address space of a device, shared by its allocators.
//!
//! Address space is reserved from the driver in long ranges, about twice the device's memory, and leased to arenas
//! piece by piece. A lease is placed far from others, so that it can grow in place; leases that a closed allocator
//! returns are leased again. After the last lease has ended, all address space is returned to the driver. If the driver
//! refuses a long reservation, shorter ones are tried.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::driver::{Context, Device, Driver, DriverError, Entered};
use crate::locks::held::{Locked, Mutex};

use crate::allocator::size::PHYSICAL_GRANULE;

/// Length of a reservation, as a multiple of the device's memory.
const MEMORY_TIMES: u64 = 2;

/// Bytes of the first lease of an arena.
pub(crate) const FIRST_LEASE: u64 = 8 << 20;

/// Lengths to try after the driver refused a reservation, longest first.
const SHORTER: [u64; 2] = [8 << 30, SHORTEST];

/// An allocator that cannot reserve even this much would fail with most of the memory free.
const SHORTEST: u64 = 512 << 20;

/// Address space of a device; see the module documentation.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// Keeps the driver's function table alive, because the table's address is the key by which this space is found.
    driver: Driver,
    device: Device,
    /// Bytes of a usual reservation.
    usual: u64,
    /// Not locked during driver calls: a reservation is not listed while it is being made or returned.
    inner: Mutex<Inner>,
}

/// Leased address space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    pub base: u64,
    pub bytes: u64,
    /// Whether it extends the lease before it.
    pub grown: bool,
}

#[derive(Debug, Default)]
struct Inner {
    /// Reservations: base to bytes.
    reservations: BTreeMap<u64, u64>,
    /// Free ranges by their base; none crosses the border of a reservation.
    free: BTreeMap<u64, u64>,
    leased: u64,
}

impl Addresses {
    /// Returns the address space of a driver's device.
    pub(crate) fn of(driver: &Driver, device: Device, memory: u64) -> Arc<Self> {
        static ALL: Mutex<Vec<Weak<Addresses>>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|known| known.strong_count() > 0);
        let known = all.iter().filter_map(Weak::upgrade);
        let mut same = known.filter(|a| a.device == device && a.driver.same_table(driver));
        if let Some(addresses) = same.next() {
            return addresses;
        }
        let addresses = Arc::new(Addresses {
            driver: driver.clone(),
            device,
            usual: (memory.max(PHYSICAL_GRANULE) * MEMORY_TIMES).next_multiple_of(PHYSICAL_GRANULE),
            inner: Mutex::default(),
        });
        all.push(Arc::downgrade(&addresses));
        addresses
    }

    fn lock(&self) -> Locked<'_, Inner> {
        self.inner.lock()
    }

    /// Ensures that a new allocator can lease address space: at least [`SHORTEST`] is reserved.
    pub(crate) fn prepare(&self, entered: &Entered<'_>) -> Result<(), DriverError> {
        let least = self.usual.min(SHORTEST);
        let longest = self.lock().longest();
        if longest.is_some_and(|(_, free)| free >= FIRST_LEASE) {
            return Ok(());
        }
        let (base, bytes) = self.reserve(entered, least)?;
        self.lock().reserved(base, bytes);
        Ok(())
    }

    /// Reserves the usual length, or less, but at least `least` bytes, if the driver refuses that. Returns base and
    /// length.
    fn reserve(&self, entered: &Entered<'_>, least: u64) -> Result<(u64, u64), DriverError> {
        let mut shorter = SHORTER.into_iter().chain([least]).filter(|b| *b >= least);
        let mut bytes = self.usual.max(least);
        loop {
            let made = entered.address_reserve(bytes as usize, PHYSICAL_GRANULE as usize, 0);
            match (made, shorter.find(|shorter| *shorter < bytes)) {
                (Err(error), Some(next)) if !error.is_fatal() => bytes = next,
                (made, _) => return made.map(|base| (base, bytes)),
            }
        }
    }

    /// Leases one of several lengths, the first one that is available: after an existing lease, or anywhere.
    pub(crate) fn lease_for(
        &self,
        context: &Context,
        end: Option<u64>,
        lengths: [u64; 2],
    ) -> Result<Lease, DriverError> {
        for bytes in lengths {
            if let Some(base) = end
                && self.extend(base, bytes)
            {
                return Ok(Lease {
                    base,
                    bytes,
                    grown: true,
                });
            }
        }
        let entered = context.enter()?;
        let [usual, least] = lengths;
        let mut bytes = usual;
        let mut leased = self.lease(&entered, bytes);
        if leased.is_err_and(|e| !e.is_fatal()) && least < usual {
            bytes = least;
            leased = self.lease(&entered, bytes);
        }
        leased.map(|base| Lease {
            base,
            bytes,
            grown: false,
        })
    }

    /// Leases `bytes` at `end`, where another lease ends, if they are free.
    fn extend(&self, end: u64, bytes: u64) -> bool {
        let mut inner = self.lock();
        !inner.reservations.contains_key(&end) && inner.cut(end, end, bytes)
    }

    /// Leases `bytes` anywhere, and returns their base.
    pub(crate) fn lease(&self, entered: &Entered<'_>, bytes: u64) -> Result<u64, DriverError> {
        let known = self.lock().lease(bytes);
        if let Some(base) = known {
            return Ok(base);
        }
        let made = self.reserve(entered, bytes);
        let mut inner = self.lock();
        let (base, got) = match made {
            Ok(made) => made,
            // Another thread may have reserved the remaining address space.
            Err(error) => return inner.lease(bytes).ok_or(error),
        };
        inner.reserved(base, got);
        // This cannot fail, because the range was just reserved for it.
        inner.cut(base, base, bytes);
        Ok(base)
    }

    /// Ends a lease.
    pub(crate) fn give_back(&self, base: u64, bytes: u64) {
        self.lock().give(base, bytes);
    }

    /// Whether something is reserved and nothing is leased.
    pub(crate) fn is_idle(&self) -> bool {
        let inner = self.lock();
        inner.leased == 0 && !inner.reservations.is_empty()
    }

    /// Returns everything to the driver if nothing is leased, and returns the first error. A range whose release the
    /// driver refused is not leased again: the driver may have freed it, and another caller may have reserved it.
    pub(crate) fn return_idle(&self, entered: &Entered<'_>) -> Result<(), DriverError> {
        let reservations = self.lock().take_idle();
        let mut first = Ok(());
        for (base, bytes) in reservations {
            // SAFETY: the range was reserved here with this base and size; nothing is leased, so nothing is mapped in
            // it, and its last lessee was done with its addresses.
            first = first.and(unsafe { entered.address_free(base, bytes as usize) });
        }
        first
    }
}

impl Inner {
    fn reserved(&mut self, base: u64, bytes: u64) {
        self.reservations.insert(base, bytes);
        self.free.insert(base, bytes);
    }

    /// Takes out all reservations if nothing is leased: none of their addresses is leased from here on.
    fn take_idle(&mut self) -> BTreeMap<u64, u64> {
        if self.leased > 0 {
            return BTreeMap::new();
        }
        self.free.clear();
        std::mem::take(&mut self.reservations)
    }

    /// Removes `at..at + bytes` from the free range that begins at `start`.
    fn cut(&mut self, start: u64, at: u64, bytes: u64) -> bool {
        let Some(free) = self.free.get(&start).copied() else {
            return false;
        };
        if at + bytes > start + free {
            return false;
        }
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + bytes < start + free {
            self.free.insert(at + bytes, start + free - at - bytes);
        }
        self.leased += bytes;
        true
    }

    /// Returns the longest free range, the last among equals: base and bytes.
    fn longest(&self) -> Option<(u64, u64)> {
        let free = self.free.iter().map(|(base, free)| (*base, *free));
        free.max_by_key(|(base, free)| (*free, *base))
    }

    /// Leases a range in the longest free one: at its start if a reservation begins there, otherwise in its middle, so
    /// that neither this lease nor the one before it has a neighbour.
    fn lease(&mut self, bytes: u64) -> Option<u64> {
        let (start, free) = self.longest().filter(|(_, free)| *free >= bytes)?;
        let at = if self.reservations.contains_key(&start) {
            start
        } else {
            let middle = start + free / 2 / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
            middle.min(start + free - bytes)
        };
        self.cut(start, at, bytes).then_some(at)
    }

    fn give(&mut self, mut base: u64, mut bytes: u64) {
        self.leased -= bytes;
        let before = self.free.range(..base).next_back();
        if let Some((start, free)) = before.map(|(s, f)| (*s, *f))
            && start + free == base
            && !self.reservations.contains_key(&base)
        {
            self.free.remove(&start);
            (base, bytes) = (start, free + bytes);
        }
        let end = base + bytes;
        if !self.reservations.contains_key(&end)
            && let Some(free) = self.free.remove(&end)
        {
            bytes += free;
        }
        self.free.insert(base, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn with_reservations(bases: &[u64]) -> Inner {
        let mut inner = Inner::default();
        for base in bases {
            inner.reservations.insert(*base, 64 * GIB);
            inner.free.insert(*base, 64 * GIB);
        }
        inner
    }

    #[test]
    fn leases_lie_apart_and_returned_ones_merge() {
        let mut inner = with_reservations(&[64 * GIB]);
        let bases: Vec<u64> = (0..4).filter_map(|_| inner.lease(GIB)).collect();
        assert_eq!(bases.len(), 4);
        for (at, base) in bases.iter().enumerate() {
            assert!(
                inner.cut(base + GIB, base + GIB, 6 * GIB),
                "lease {at} grows in place"
            );
        }
        assert_eq!(inner.leased, 28 * GIB);
        assert_eq!(inner.lease(60 * GIB), None);
        for base in bases {
            inner.give(base, 7 * GIB);
        }
        assert_eq!(inner.leased, 0);
        assert_eq!(inner.free, BTreeMap::from([(64 * GIB, 64 * GIB)]));
    }

    #[test]
    fn ranges_of_two_reservations_never_become_one() {
        let mut inner = with_reservations(&[64 * GIB, 128 * GIB]);
        assert_eq!(inner.lease(65 * GIB), None);
        let both = [inner.lease(64 * GIB), inner.lease(64 * GIB)];
        assert_eq!(both, [Some(128 * GIB), Some(64 * GIB)]);
        assert!(!inner.cut(192 * GIB, 192 * GIB, GIB));
        inner.give(64 * GIB, 64 * GIB);
        inner.give(128 * GIB, 64 * GIB);
        assert_eq!(inner.free.len(), 2);
    }

    #[cfg(all(feature = "sim", debug_assertions, not(loom)))]
    #[test]
    fn the_driver_is_not_called_under_the_lock() {
        use crate::sim::{FailPlan, SimConfig, Simulator};
        let sim = Simulator::new(SimConfig::with_devices(1, GIB)).unwrap();
        let driver = sim.driver().unwrap();
        let device = driver.device(0).unwrap();
        let context = crate::driver::Context::primary(&device).unwrap();
        let entered = context.enter().unwrap();
        let addresses = Addresses::of(&driver, device, GIB);
        let lend = || {
            let base = addresses.lease(&entered, PHYSICAL_GRANULE).unwrap();
            addresses.give_back(base, PHYSICAL_GRANULE);
            base
        };
        lend();
        addresses.return_idle(&entered).unwrap();
        assert_eq!(sim.reports(), []);
        assert_eq!(sim.leaks().reservations, 0);
        // Whether or not a failed call took effect, the call is not repeated, and its range is not leased again.
        let code = crate::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        for executed in [false, true] {
            let fail = |name| {
                let plan = FailPlan::call(name, code).unwrap();
                sim.fail(if executed { plan.executed() } else { plan });
            };
            let leaked = sim.leaks().reservations;
            fail("cuMemAddressReserve");
            let base = lend();
            fail("cuMemAddressFree");
            assert!(addresses.return_idle(&entered).is_err());
            assert!(!addresses.is_idle(), "it is not kept");
            assert!(lend() != base || executed);
            addresses.return_idle(&entered).unwrap();
            assert!(!addresses.is_idle());
            assert_eq!(sim.reports(), []);
            assert_eq!(sim.leaks().reservations, leaked + 1);
        }
    }
}
