//! What debug modes know of blocks.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::sync::{
    Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

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
    table: Mutex<Table>,
    /// Read while the driver fills or reads memory for a debug mode. Who holds it takes no block back, and calls no
    /// code of the program.
    touched: RwLock<()>,
    /// Fills and copies of blocks that nobody uses any more.
    pub(crate) stream: OnceLock<Stream>,
}

/// The live blocks, those that are held back, and what was found.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Live blocks, by address.
    pub(crate) live: BTreeMap<u64, Watched>,
    /// Freed blocks that are held back.
    held: BTreeMap<u64, Watched>,
    /// Their addresses, the oldest first.
    order: VecDeque<u64>,
    held_bytes: u64,
    lives: u64,
    pub(crate) findings: Vec<Finding>,
}

/// A block of the program.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    /// Tells blocks apart that lie at one address one after the other.
    pub(crate) life: u64,
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
            table: Mutex::default(),
            touched: RwLock::default(),
            stream: OnceLock::new(),
        })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory stays what it is as long as this is held.
    pub(crate) fn touching(&self) -> RwLockReadGuard<'_, ()> {
        self.touched.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is filled or read as long as this is held.
    pub(crate) fn untouched(&self) -> RwLockWriteGuard<'_, ()> {
        self.touched.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block is about to be freed: it is nobody's any more, and nobody looks at it.
    pub(crate) fn take_live(&self, ptr: u64) -> Option<Watched> {
        let _untouched = self.untouched();
        self.table().live.remove(&ptr)
    }

    /// What is behind live blocks is lost: those of one stream, or all.
    pub(crate) fn lose_guards(&self, stream: Option<u64>) {
        for watched in self.table().live.values_mut() {
            let key = watched.users.first().map(|(key, _)| key.number());
            // Without its key the block may be any stream's.
            if stream.is_none() || key.is_none() || key == stream {
                watched.guarded = false;
            }
        }
    }

    /// Whether nothing is usable behind the bytes that were asked for.
    pub(crate) fn guards(&self) -> bool {
        self.modes.guard
    }

    /// Whether a freed block that begins at an address is held back.
    pub(crate) fn holds(&self, ptr: u64) -> bool {
        self.table().held.contains_key(&ptr)
    }

    /// A block has a label.
    pub(crate) fn name(&self, ptr: u64, tag: Tag) {
        if let Some(watched) = self.table().live.get_mut(&ptr) {
            watched.tag = tag;
        }
    }

    /// A stream's handle may not be used any more.
    pub(crate) fn retired(&self, key: StreamKey) {
        for watched in self.table().live.values_mut() {
            let before = watched.users.len();
            // Streams of this crate are kept with the block.
            watched
                .users
                .retain(|(user, stream)| *user != key || stream.kind() == StreamKind::Owned);
            watched.everything |= watched.users.len() < before;
        }
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.table().findings.clone()
    }

    pub(crate) fn found(&self, finding: Finding) {
        say(&finding);
        let mut table = self.table();
        if table.findings.len() < MOST_FINDINGS {
            table.findings.push(finding);
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

impl Table {
    pub(crate) fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    /// Holds a freed block back.
    pub(crate) fn hold(&mut self, ptr: u64, watched: Watched) {
        self.held_bytes += watched.bytes;
        self.order.push_back(ptr);
        self.held.insert(ptr, watched);
    }

    /// The oldest of the blocks that are held back, if they are more than so many bytes.
    pub(crate) fn let_go(&mut self, keep: u64) -> Option<(u64, Watched)> {
        if self.held_bytes <= keep {
            return None;
        }
        let ptr = self.order.pop_front()?;
        let watched = self.held.remove(&ptr)?;
        self.held_bytes -= watched.bytes;
        Some((ptr, watched))
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
