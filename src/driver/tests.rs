//! Tests of the parts that need no driver.

use super::DriverError;
use super::error::NAMED;
use super::sys::CUresult;

/// The bindings in the repository are what the header generates.
#[test]
fn checked_in_bindings_are_fresh() {
    if !cfg!(cualloc_generated_bindings) {
        eprintln!("SKIPPED: this build took the checked-in bindings, as libclang does not load");
        return;
    }
    let fresh = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
    let checked_in = include_str!("bindings.rs");
    assert!(
        fresh.replace("\r\n", "\n") == checked_in.replace("\r\n", "\n"),
        "src/driver/bindings.rs is stale: build once with CUALLOC_BLESS_BINDINGS=1"
    );
}

/// Every code of the header has its name, and only those.
#[test]
fn codes_have_names() {
    let text = include_str!("bindings.rs");
    let declared: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub const "))
        .filter_map(|line| line.split_once(": cudaError_enum"))
        .map(|(name, _)| name)
        .collect();
    assert!(declared.len() > 40, "found {declared:?}");
    let named: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
    assert_eq!(declared, named);
    for (name, code) in NAMED {
        let error = DriverError::new("cuInit", *code);
        assert_eq!(error.name(), *name);
        assert_eq!(
            error.to_string(),
            format!("cuInit failed: {name} ({})", code.0)
        );
    }
    let unknown = DriverError::new("cuInit", CUresult(12345));
    assert_eq!(
        unknown.to_string(),
        "cuInit failed: unrecognized error (12345)"
    );
}

/// S3.15
#[test]
fn codes_are_classified() {
    let numbers = |is: fn(&DriverError) -> bool| -> Vec<u32> {
        (0..1000)
            .filter(|code| is(&DriverError::new("cuInit", CUresult(*code))))
            .collect()
    };
    assert_eq!(
        numbers(DriverError::is_fatal),
        [
            4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999
        ]
    );
    assert_eq!(
        numbers(DriverError::is_usage),
        [
            1, 101, 200, 201, 208, 211, 218, 400, 401, 704, 900, 901, 902, 903, 904, 905, 906, 907,
            908
        ]
    );
    assert_eq!(numbers(DriverError::is_out_of_memory), [2]);
    assert_eq!(numbers(DriverError::is_not_ready), [600]);
    assert_eq!(numbers(DriverError::is_not_supported), [36, 500, 801]);
}

/// D9: a forked child does not wait for a lock that a thread of its parent holds.
#[test]
#[cfg(all(unix, feature = "sim"))]
fn d9_no_lock_is_waited_for_in_a_forked_child() {
    use super::process;
    use crate::locks::{held, lock};
    let simulator = crate::sim::Simulator::new(crate::sim::SimConfig::default()).unwrap();
    let _driver = simulator.driver().unwrap();
    let (hot, cold) = (lock::Lock::new(7), held::Mutex::new(7));
    let locked = (hot.lock(), cold.lock());
    let empty = || *process::hot_lock(&hot) == 0 && *process::lock(&cold) == 0;
    assert!(process::child_output(empty));
    drop(locked);
    assert!(!empty());
}
