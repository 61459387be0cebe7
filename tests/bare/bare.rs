//! The library without the simulator: it builds, and reports what is missing if there is no driver.
//!
//! The package depends on the library without features, and so does nothing else in its build. The tests of the
//! library itself always have the simulator.

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
#[path = "../process/loader.rs"]
mod loader;
#[path = "../process/no_driver.rs"]
mod no_driver;
