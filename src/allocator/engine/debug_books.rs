//! What debug modes know of blocks.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::allocator::config::DebugModes;
use crate::allocator::stream::slot::StreamKey;
use crate::block::Tag;
use crate::driver::{Stream, StreamKind};
use crate::error::{Finding, Misuse};
use crate::event::names;

/// Most findings that are kept.
pub(crate) const MOST_FINDINGS: usize = 1000;

/// The debug modes of an allocator, and what they know.
#[derive(Debug)]
pub(crate) struct Debug {
    pub(crate) modes: DebugModes,
    books: Mutex<Books>,
    /// Fills and copies of blocks that nobody uses any more.
    pub(crate) stream: OnceLock<Stream>,
}

#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) live: BTreeMap<u64, Watched>,
    /// Freed blocks that are held back, the oldest first.
    pub(crate) freed: VecDeque<(u64, Watched)>,
    pub(crate) freed_bytes: u64,
    pub(crate) findings: Vec<Finding>,
}

/// A block of the program.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    pub(crate) requested: u64,
    /// Bytes of the block.
    pub(crate) bytes: u64,
    pub(crate) tag: Tag,
    pub(crate) context: u32,
    pub(crate) handle: usize,
    /// The streams that use it: its own first.
    pub(crate) users: Vec<(StreamKey, Stream)>,
    /// A stream that uses it cannot be waited for by its handle.
    pub(crate) everything: bool,
    /// What is behind the requested bytes was filled.
    pub(crate) guarded: bool,
}

impl Debug {
    /// None if everything is off.
    pub(crate) fn of(modes: DebugModes) -> Option<Debug> {
        modes.is_any().then(|| Debug {
            modes,
            books: Mutex::default(),
            stream: OnceLock::new(),
        })
    }

    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing is usable behind the bytes that were asked for.
    pub(crate) fn guards(&self) -> bool {
        self.modes.guard
    }

    /// Whether a freed block that begins at an address is held back.
    pub(crate) fn holds(&self, ptr: u64) -> bool {
        self.books().freed.iter().any(|(held, _)| *held == ptr)
    }

    /// A block has a label.
    pub(crate) fn name(&self, ptr: u64, tag: Tag) {
        if let Some(watched) = self.books().live.get_mut(&ptr) {
            watched.tag = tag;
        }
    }

    /// A stream's handle may not be used any more.
    pub(crate) fn retired(&self, key: StreamKey) {
        for watched in self.books().live.values_mut() {
            let before = watched.users.len();
            // Streams of this crate are kept with the block.
            watched
                .users
                .retain(|(user, stream)| *user != key || stream.kind() == StreamKind::Owned);
            watched.everything |= watched.users.len() < before;
        }
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.books().findings.clone()
    }

    pub(crate) fn found(&self, finding: Finding) {
        say(&finding);
        let mut books = self.books();
        if books.findings.len() < MOST_FINDINGS {
            books.findings.push(finding);
        }
    }
}

/// Tells the program's logger, or stderr where it has none: whoever asks for a debug mode wants to hear of it.
pub(crate) fn say(what: &dyn std::fmt::Display) {
    if log::log_enabled!(log::Level::Error) {
        log::error!("{what}");
    } else {
        // Where nobody listens there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "cualloc: {what}");
    }
}

impl Watched {
    pub(crate) fn finding(&self, misuse: Misuse, address: u64, offset: u64) -> Finding {
        Finding {
            misuse,
            address,
            requested: self.requested,
            offset,
            tag: self.tag.as_str(),
            context: names::name_of(self.context),
            stream: self.handle,
        }
    }
}
