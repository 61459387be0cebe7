//! Default streams by their special handles: null and 1 for the legacy one, 2 for the calling thread's own.
//!
//! A handle of this kind names no stream by itself: the driver takes the one of the context that is current.
//! Here it always means the stream of the allocator's context, so that a block's order does not depend on
//! what happens to be current where it is allocated, recorded or freed.

use std::sync::OnceLock;

/// What an allocator knows about the default streams of its context.
#[derive(Debug)]
pub(crate) struct Defaults {
    /// Another current context is an error.
    pub checked: bool,
    /// Id of the legacy stream, once it was asked: it lives as long as its context.
    pub legacy: OnceLock<u64>,
}

impl Defaults {
    pub(crate) fn new(checked: bool) -> Self {
        Defaults {
            checked,
            legacy: OnceLock::new(),
        }
    }
}
