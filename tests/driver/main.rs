//! The driver behind checked calls: what is declared, and what each call passes on.
#![cfg(unix)]

mod bindings;
#[path = "../common/mod.rs"]
mod common;
mod errors;
#[cfg(target_os = "linux")]
mod handles;
mod values;
#[cfg(target_os = "linux")]
mod wrappers;
