//! What is done when nothing fits: one step after another, from what costs least.

pub(crate) mod choice;
pub(crate) mod cut;
pub(crate) mod map;
pub(crate) mod repay;
pub(crate) mod run;
pub(crate) mod stage;
pub(crate) mod steps;
