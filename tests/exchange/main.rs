//! Tensors and tables, and their exchange with other libraries.
#![cfg(feature = "sim")]

#[cfg(feature = "arrow")]
mod arrow;
#[path = "../common/mod.rs"]
mod common;
mod dlpack;
mod foreign;
mod imports;
mod retired;
mod shapes;
mod tables;
