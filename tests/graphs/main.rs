//! Graph pools on a driver that runs what was captured: memory that keeps its address.
//!
//! The simulator launches graphs in any order that their edges allow, and reports every race and every use of memory
//! that is not there; each test ends with the claim that there was no report.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
// Other programs use more of it.
mod again;
#[allow(dead_code)]
#[path = "../judge/court/mod.rs"]
mod court;
mod families;
mod idle;
mod judged;
mod kept;
mod leases;
mod postponed;
mod random;
mod refused;
mod reuse;
mod scopes;
mod support;
mod uses;
