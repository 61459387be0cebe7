//! Errors in words, and as the driver's.

use crate::common::assert_matches;
use std::error::Error as _;

use cualloc::driver::DriverError;
use cualloc::driver::sys::CUresult;
use cualloc::error::{ConfigError, OutOfMemory};
use cualloc::{Error, Refused};

#[test]
fn an_error_names_its_cause_once() {
    let cause = DriverError::new("cuMemCreate", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let what = "handles";
    let mut oom = OutOfMemory::default();
    oom.driver = Some(cause);
    for error in [
        Error::Driver(cause),
        Error::ContextLost(cause),
        Error::Unseen(cause),
        Error::DeviceRefused { what, cause },
        Error::OutOfMemory(Box::new(oom)),
    ] {
        let text = error.to_string();
        assert_eq!(text.matches(&cause.to_string()).count(), 1, "{text}");
        assert!(error.source().is_none(), "{text}: printed already");
        assert_eq!(error.driver_error(), Some(cause));
        let refused = Refused::new((), error);
        assert_eq!(refused.to_string(), text);
        assert!(refused.source().is_none(), "{text}: printed already");
    }
    let config = ConfigError::UnknownKey("sise".into());
    let text = Error::from(config).to_string();
    assert!(text.contains("`sise`"), "{text}");
}

#[test]
fn one_is_singular_and_addresses_are_hexadecimal() {
    let (what, bytes) = ("block", 512);
    let live = |count| Error::InUse { what, count, bytes }.to_string();
    assert_eq!(live(1), "still in use: 1 block of 512 B");
    assert_eq!(live(2), "still in use: 2 blocks of 512 B");
    let guarded = |guards| {
        Error::Guarded {
            guards,
            bytes: 3 << 20,
        }
        .to_string()
    };
    assert_eq!(guarded(1), "1 guard keeps 3.00 MiB of freed blocks");
    assert_eq!(guarded(2), "2 guards keep 3.00 MiB of freed blocks");
    let freed = Error::NotLive { ptr: 0x1200 }.to_string();
    assert!(
        freed.contains("0x1200") && freed.contains("freed before"),
        "{freed}"
    );
}

#[test]
fn a_fatal_error_is_a_lost_context() {
    let of = |code| Error::from(DriverError::new("cuEventQuery", code));
    let lost = of(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_matches!(lost, Error::ContextLost(_));
    assert_eq!(lost.code(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let other = of(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_matches!(other, Error::Driver(_));
    assert!(other.is_out_of_memory() && !lost.is_out_of_memory());
}
