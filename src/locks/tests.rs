//! Calls of the driver under a lock are reported.

use std::sync::Condvar;
use std::time::Duration;

use super::held::{Mutex, RwLock};
use super::lock::Lock;
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

#[test]
fn a_mutex_is_a_lock_too() {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let (awaited, plain, shared) = (Mutex::new(1), Mutex::new(1), RwLock::new(1));
    let waited = awaited.lock().wait_timeout(&Condvar::new(), Duration::ZERO);
    let held = (waited, plain.lock(), plain.try_lock(), shared.read());
    let _ = driver.device_count();
    drop(held);
    let _ = driver.device_count();
    let call = "cuDeviceGetCount";
    assert_eq!(sim.take_reports(), [Report::UnderLock { call, locks: 3 }]);
}

#[test]
#[should_panic = "a wait under another lock"]
fn nothing_is_waited_for_under_another_lock() {
    let (held, awaited) = (Mutex::new(1), Mutex::new(1));
    let _held = held.lock();
    let _ = awaited.lock().wait_timeout(&Condvar::new(), Duration::ZERO);
}
