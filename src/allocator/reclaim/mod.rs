//! Reclaim: the steps taken when no free memory fits, the cheapest first.

pub(crate) mod choice;
pub(crate) mod run;
pub(crate) mod step;
pub(crate) mod stitch;
