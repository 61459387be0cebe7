//! The checker of a program: the function table that its calls pass, and the tracker that judges them.
//!
//! Other test programs use it as well, and report their blocks to it.

pub mod ranges;
pub mod table;
pub mod tracker;
