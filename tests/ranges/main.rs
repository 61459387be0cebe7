//! Growable ranges: memory that is committed and decommitted at addresses that stay.
//!
//! The simulator reports every use of an address without memory; each test ends with the assertion that there was no
//! report.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
// Other programs use more of it.
mod basic;
#[allow(dead_code)]
#[path = "../judge/checker/mod.rs"]
mod checker;
mod failing;
mod random;
mod reuse;
mod support;
mod suspended;
mod threads;
