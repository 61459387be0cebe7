//! Order between streams: pooled events, waits, and what the driver's answers say about captures.
//!
//! The callers decide on the consequences of an answer; this module only classifies it, in one place.

pub(crate) mod capture;
pub(crate) mod event;
pub(crate) mod order;
pub(crate) mod point;
pub(crate) mod uses;
