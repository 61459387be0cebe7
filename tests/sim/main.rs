//! The simulator itself: what it answers, what it is harsh about, and what it reports.

mod capture;
#[path = "../common/mod.rs"]
mod common;
mod edges;
mod faults;
mod graphs;
#[cfg(unix)]
mod library;
mod modes;
mod pools;
mod races;
mod random;
mod sharing;
mod support;
mod threads;
mod vmm;
