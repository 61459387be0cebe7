//! Order between streams, events, waits, and what the driver says about captures; locks, and what is
//! counted of those that a thread holds.

pub(crate) mod capture;
pub(crate) mod event;
pub(crate) mod held;
pub(crate) mod lock;
pub(crate) mod order;
#[cfg(all(test, feature = "sim", debug_assertions, not(loom)))]
mod tests;
