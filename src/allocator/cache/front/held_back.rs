//! Freed blocks that other streams still use, on their way out of a front and back.

use super::grain::Node;

/// Frees of blocks that one other stream used, which nothing orders yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Slot of the other stream.
    pub stream: u32,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// Blocks that were held back for other streams, which are done with them.
#[derive(Debug)]
pub(crate) struct Returned {
    pub nodes: Vec<Node>,
    pub bytes: u64,
    /// Else their own stream has come to follow the others.
    pub over: bool,
}
