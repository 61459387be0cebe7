//! What a heap contains: statistics, reports, snapshots, and the check of its invariants.

#![forbid(unsafe_code)]

pub(crate) mod check;
mod check_caches;
pub(crate) mod figures;
pub(crate) mod holders;
pub(crate) mod recording;
pub(crate) mod shortage;
pub(crate) mod snapshot;
