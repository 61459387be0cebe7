//! Without a driver: the whole interface is there, and says what is missing. Also the test of a
//! build without the simulator.

use crate::common::{assert_matches, chain, itself};
use cualloc::Error;
use cualloc::allocator::{Allocator, Carver, Config, Policy, size};
use cualloc::driver::{Driver, LoadError};

const CASE: &str = "CUALLOC_TEST_CASE";
const MISSING: &str = "/nowhere/libcuda-of-a-test.so";

/// S1.23, R72: whatever would allocate is a typed error with its causes, in a process where a panic
/// would be the end.
#[test]
fn s1_23_r72_allocating_calls_report_a_missing_driver() {
    let output = itself("no_driver::without_driver")
        .env("CUALLOC_DRIVER", MISSING)
        .env(CASE, "1")
        .env_remove("CUALLOC_CONFIG")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("DONE"), "{text}\n{errors}");
}

#[test]
fn without_driver() {
    if std::env::var_os(CASE).is_none() {
        return;
    }
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        std::process::abort();
    }));
    assert_matches!(Driver::load(), Err(LoadError::NotFound { .. }));
    for ordinal in [0, 1, usize::MAX] {
        let error = Allocator::new(ordinal).unwrap_err();
        assert_matches!(&error, Error::DriverUnavailable(LoadError::NotFound { .. }));
        let causes = chain(&error);
        assert!(causes.lines().count() >= 3, "{causes}");
        assert!(causes.contains(MISSING), "{causes}");
        assert!(error.driver_error().is_none() && !error.is_out_of_memory());
    }
    // Calls that need no driver work.
    assert_eq!(size::classic_segment_size(1), Some(2 << 20));
    let config: Config = "policy=packed,limit=1G".parse().unwrap();
    assert_eq!(config.policy, Policy::Packed);
    let mut carver = Carver::new();
    assert!(carver.insert(1 << 30, 2 << 20, 1, 100).is_ok());
    println!("DONE");
}
