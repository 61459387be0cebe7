//! One suite over all resources, pools, adaptors, stacks and stacks of stacks; and one like it over
//! page-locked memory.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;

mod host;
mod parts;
mod pools;
mod suite;
