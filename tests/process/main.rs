//! What a process has once: its driver, its first capture, its forks and its end. Most of these tests run
//! themselves again as a process of their own.
//!
//! `no_driver` and `loader` are also the tests of a library without the simulator.

#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "sim")]
mod exit;
#[cfg(feature = "sim")]
mod first_capture;
#[cfg(target_os = "linux")]
mod loader;
mod no_driver;
#[cfg(all(feature = "sim", target_os = "linux"))]
mod nvtx;
#[cfg(feature = "sim")]
mod safety;
#[cfg(all(feature = "sim", target_os = "linux"))]
mod stand_in;
