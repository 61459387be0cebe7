//! The cualloc allocator as a C library.
//!
//! C programs include `cualloc.h`, which says what each function does: it is written from this crate. The crate's
//! other files hold what stands behind the functions; nothing of it is for use from Rust.
#![allow(non_camel_case_types)]
#![deny(missing_docs)]

mod barrier;
mod blocks;
mod calls;
mod device;
mod entry;
mod handles;
mod life;
mod memory;
mod message;
mod options;
mod pool_table;
mod pools;
mod record;
mod results;
mod shared;
mod stats;
mod suspend;
mod tags;
mod torch;
mod torch_pools;

use std::ffi::c_char;

#[cfg(all(test, feature = "sim"))]
mod tests;

#[cfg(all(test, feature = "sim"))]
mod pool_tests;
#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;

#[cfg(all(test, feature = "sim"))]
mod capture_tests;

pub use blocks::*;
pub use life::*;
pub use memory::*;
pub use pools::*;
pub use record::*;
pub use results::*;
pub use shared::*;
pub use stats::{cualloc_counter_t, cualloc_pool_stats_t, cualloc_stats_t};
pub use suspend::*;
pub use torch::*;
pub use torch_pools::*;

/// Which interface this is: a number that grows with every addition. Nothing is taken away and no type changes
/// without a new run-time name of the library.
pub const CUALLOC_ABI_VERSION: u32 = 6;

/// An allocator. A handle: a number that is never dereferenced and never used again, so that a wrong one is found
/// out.
pub struct cualloc_t(());

/// Options for a new allocator. A handle, as cualloc_t is.
pub struct cualloc_options_t(());

/// A graph pool. A handle, as cualloc_t is.
pub struct cualloc_pool_t(());

/// The interface that this library has: CUALLOC_ABI_VERSION of the header it was built with. A program that was
/// compiled with a larger number may miss functions here.
///
/// Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_abi_version() -> u32 {
    CUALLOC_ABI_VERSION
}

/// Why the calling thread's last failed call failed: UTF-8, ended by a zero, at most 4095 bytes. Empty if none
/// failed yet; a call that succeeds does not change it. Never null. The text is overwritten by the thread's next
/// call that fails, and is gone when the thread ends. For people: programs go by the code.
///
/// Any thread, any time; each has its own text.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_last_error() -> *const c_char {
    message::last()
}

/// The code of the calling thread's last failed call; CUALLOC_OK if none failed yet. A call that succeeds does not
/// change it. For those functions that do not return a code.
///
/// Any thread, any time; each has its own.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_last_code() -> i32 {
    message::last_code()
}
