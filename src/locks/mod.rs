//! Locks, and the count of those that a thread holds.

pub mod held;
pub(crate) mod lines;
pub(crate) mod lock;
pub(crate) mod prefetch;
#[cfg(all(test, feature = "sim", debug_assertions, not(loom)))]
mod tests;
pub mod thread_id;
