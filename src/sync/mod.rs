//! Order between streams: pooled events, waits, and what the driver's answers say about captures.
//!
//! Rooms decide what follows from an answer; here it is only found out, once for all of them.

pub(crate) mod capture;
pub(crate) mod event;
pub(crate) mod order;
