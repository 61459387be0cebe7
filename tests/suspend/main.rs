//! Memory that goes back to the driver and comes again at its addresses.
//!
//! The simulator reports every use of an address without memory or access; each test ends with the claim that there
//! was no report.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
mod failures;
mod peers;
mod pools;
mod random;
mod refused;
mod support;
mod threads;
mod whole;
