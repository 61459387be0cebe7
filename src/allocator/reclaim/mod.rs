//! What is done when nothing fits: one step after another, from what costs least.

pub(crate) mod choice;
mod fit;
pub(crate) mod run;
pub(crate) mod stitch;
