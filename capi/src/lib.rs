//! The cualloc allocator as a C library.
//!
//! C programs include `cualloc.h`, which is generated from this crate and documents each function. The other files
//! implement the functions; nothing here is meant for use from Rust.
#![allow(non_camel_case_types)]
#![deny(missing_docs)]

mod barrier;
mod blocks;
mod calls;
mod checkpoints;
mod device;
mod dlpack;
mod entry;
mod handle_table;
mod handles;
mod life;
mod memory;
mod message;
mod options;
mod pool_table;
mod pools;
mod ranges;
mod record;
mod results;
mod segment_hooks;
mod share;
mod shared;
mod sources;
mod stats;
mod suspend;
mod tags;
mod torch;
mod torch_pools;
mod torch_text;
mod visit;

use std::ffi::c_char;

#[cfg(all(test, feature = "sim"))]
mod tests;

#[cfg(all(test, feature = "sim"))]
mod checkpoint_tests;
#[cfg(all(test, feature = "sim"))]
mod dlpack_tests;
#[cfg(all(test, feature = "sim"))]
mod pool_tests;
#[cfg(all(test, feature = "sim", target_os = "linux"))]
mod share_tests;
#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;

#[cfg(all(test, feature = "sim"))]
mod capture_tests;

pub use blocks::*;
pub use checkpoints::*;
pub use dlpack::*;
pub use life::*;
pub use memory::*;
pub use pools::*;
pub use ranges::*;
pub use record::*;
pub use results::*;
pub use segment_hooks::*;
pub use share::*;
pub use shared::*;
pub use sources::*;
pub use stats::{cualloc_counter_t, cualloc_pool_stats_t, cualloc_stats_t};
pub use suspend::*;
pub use torch::*;
pub use torch_pools::*;
pub use visit::*;

/// The version of the interface: a number that grows with every addition. Functions are removed, or types changed, only
/// together with a new run-time name of the library.
pub const CUALLOC_ABI_VERSION: u32 = 12;

/// An allocator. A handle: a number that is never dereferenced and never reused, so that an invalid one is detected.
pub struct cualloc_t(());

/// Options for a new allocator. A handle, like cualloc_t.
pub struct cualloc_options_t(());

/// A graph pool. A handle, like cualloc_t.
pub struct cualloc_pool_t(());

/// The blocks of a graph pool at some time. A handle, like cualloc_t.
pub struct cualloc_checkpoint_t(());

/// A growable range. A handle, like cualloc_t.
pub struct cualloc_range_t(());

/// A block of another process. A handle, like cualloc_t.
pub struct cualloc_import_t(());

/// An owner of memory. A handle, like cualloc_t.
pub struct cualloc_owner_t(());

/// Returns the version of this library's interface: CUALLOC_ABI_VERSION of the header it was built with. A program
/// compiled with a larger number may use functions that are missing here.
///
/// May be called from any thread at any time.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_abi_version() -> u32 {
    CUALLOC_ABI_VERSION
}

/// Returns why the calling thread's last failed call failed: a zero-terminated UTF-8 text of at most 4095 bytes. Empty
/// before the first failure; never null; successful calls do not change it. The text is overwritten by the thread's
/// next failing call and is invalid once the thread has ended. It is meant for people: programs should test the code.
///
/// May be called from any thread at any time. Each thread has its own text.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_last_error() -> *const c_char {
    message::last()
}

/// Returns the code of the calling thread's last failed call; CUALLOC_OK before the first failure. Successful calls do
/// not change it. Useful after functions that do not return a code.
///
/// May be called from any thread at any time. Each thread has its own code.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_last_code() -> i32 {
    message::last_code()
}
