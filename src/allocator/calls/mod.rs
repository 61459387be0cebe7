//! The calls of an allocator that involve several features: allocation, frees, uses by other streams, and closing.

pub(crate) mod allocate;
pub(crate) mod cached;
pub(crate) mod close;
pub(crate) mod free;
pub(crate) mod orphans;
pub(crate) mod record;
pub(crate) mod retire;
