//! Resources: one suite over all of them, page-locked memory too, and what each kind promises beyond it.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
mod guards;
mod host;
mod lines;
mod managers;
mod parts;
mod pools;
mod suite;
