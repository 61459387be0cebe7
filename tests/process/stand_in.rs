//! A simulated driver stands in for one that is not there, or has no device, and for no other.

use std::path::Path;

use crate::common::{Fake, chain, itself, library};
use cualloc::driver::{Driver, LoadError};

const CASE: &str = "CUALLOC_TEST_CASE";

/// The output of a separate process about the driver that it loads.
fn seen_with(library: &Path) -> String {
    let output = itself("stand_in::child_entry")
        .env("CUALLOC_DRIVER", library)
        .env(CASE, "stand-in")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[test]
fn child_entry() {
    if std::env::var(CASE).as_deref() != Ok("stand-in") {
        return;
    }
    match Driver::load_or_simulate() {
        Ok(driver) if driver.library().is_some() => println!("SEEN the library"),
        Ok(driver) => {
            assert!(!matches!(
                Driver::load(),
                Err(LoadError::SymbolMissing { .. })
            ));
            // Both are of one simulator: what one takes the other lacks.
            let again = Driver::load_or_simulate().unwrap();
            let contexts = [&driver, &again].map(|driver| {
                assert_eq!(driver.device_count().unwrap(), 1);
                driver.context(0).unwrap()
            });
            let free = || contexts[1].enter().unwrap().mem_info().unwrap().free;
            let before = free();
            let taken = contexts[0].enter().unwrap().mem_alloc(64 << 20).unwrap();
            assert_eq!(before - free(), 64 << 20);
            // SAFETY: allocated above, and not used.
            unsafe { contexts[0].enter().unwrap().mem_free(taken) }.unwrap();
            println!("SEEN a simulator");
        }
        Err(error) => println!("SEEN {}", chain(&error).replace('\n', ": ")),
    }
}

#[test]
fn a_simulator_stands_in_for_a_driver_that_is_not_there() {
    let seen = seen_with(Path::new("/nowhere/libcuda-of-a-test.so"));
    assert!(seen.contains("SEEN a simulator"), "{seen}");
}

#[test]
fn a_simulator_stands_in_for_a_driver_without_devices_and_for_none_that_fails() {
    for (define, expected) in [
        ("INIT=100", "SEEN a simulator"),
        ("INIT=0", "SEEN the library"),
        ("INIT=999", "CUDA_ERROR_UNKNOWN"),
    ] {
        let Some((_folder, path)) = library(Fake::defining(&[define])) else {
            return;
        };
        let seen = seen_with(&path);
        assert!(seen.contains(expected), "{define}: {seen}");
    }
}
