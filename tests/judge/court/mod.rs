//! What judges a program: the table that its calls pass, and the law by which they are judged.
//!
//! Other test programs take it as it is, and tell it of their blocks.

pub mod law;
pub mod ranges;
pub mod table;
