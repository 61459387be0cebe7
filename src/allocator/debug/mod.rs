//! State of the debug modes: the blocks that they watch, and their findings.

pub(crate) mod run;

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::allocator::config::DebugModes;
use crate::block::Tag;
use crate::driver::Stream;
use crate::error::{Error, Finding, Misuse, RareLog};
use crate::event::names;
use crate::locks::held::{Locked, Mutex};
use crate::locks::lines::{KeptLines, keep_lines};
use crate::locks::lock::pause;

/// Maximum number of findings kept.
pub(crate) const MAX_FINDINGS: usize = 1000;

/// Where a freed block goes.
pub(crate) enum Freed {
    /// To the heap.
    Now,
    /// To the quarantine, and later to the heap.
    Later,
}

/// The debug modes of an allocator, and the blocks that they watch.
#[derive(Debug)]
pub(crate) struct Debug {
    pub(crate) modes: DebugModes,
    table: Mutex<Table>,
    /// Number of threads that fill or read memory for a debug mode now.
    touching: AtomicUsize,
    /// Counts freed blocks that could not be checked.
    pub(crate) unchecked: RareLog,
    /// Stream for filling and reading blocks that no stream of the program uses.
    pub(crate) stream: OnceLock<Stream>,
}

/// The live blocks, the freed blocks that have not returned to the heap, and the findings.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Live blocks, by address.
    pub(crate) live: BTreeMap<u64, Watched>,
    /// Blocks that the program has freed but the heap still counts as live: being checked, or in quarantine.
    held: BTreeMap<u64, Watched>,
    /// The addresses of the held blocks in quarantine, the oldest first.
    quarantine: VecDeque<u64>,
    quarantined_bytes: u64,
    /// Addresses of blocks that [`Debug::check_guards`] reads now, once for each read.
    read: Vec<u64>,
    lives: u64,
    pub(crate) findings: Vec<Finding>,
}

/// A block of the program. It names no stream: the heap knows which streams use a block, and a handle copied out of the
/// heap is valid only while its [`Suspect`](crate::allocator::stream::slot::Suspect) is held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watched {
    /// Distinguishes successive blocks at the same address.
    pub(crate) life: u64,
    pub(crate) requested: u64,
    /// Bytes of the block, its guard included.
    pub(crate) bytes: u64,
    pub(crate) tag: Tag,
    pub(crate) context: u32,
    /// Handle of the stream that the block was allocated on, for reports only.
    pub(crate) handle: usize,
    /// Whether the bytes past the requested ones were filled.
    pub(crate) guarded: bool,
    /// Whether all bytes were filled after the free.
    pub(crate) filled: bool,
    /// Whether a fill or read on the debug stream failed, or the wait for it did: the work may still be queued.
    pub(crate) queued: bool,
}

/// A fill or read of memory in progress.
pub(crate) struct Touch<'a>(&'a AtomicUsize, KeptLines);

impl Drop for Touch<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Debug {
    /// Returns `None` if every mode is off.
    pub(crate) fn of(modes: DebugModes) -> Option<Debug> {
        modes.is_any().then(|| Debug {
            modes,
            table: Mutex::default(),
            touching: AtomicUsize::new(0),
            unchecked: RareLog::default(),
            stream: OnceLock::new(),
        })
    }

    pub(crate) fn table(&self) -> Locked<'_, Table> {
        self.table.lock()
    }

    /// Begins a fill or read. The caller checks afterwards, under the heap's lock, whether the memory may be touched.
    pub(crate) fn begin_touch(&self) -> Touch<'_> {
        self.touching.fetch_add(1, Ordering::AcqRel);
        Touch(&self.touching, keep_lines())
    }

    /// Waits for the fills and reads in progress. The caller has prevented new ones under the heap's lock.
    pub(crate) fn await_touches(&self) {
        let mut round = 0;
        while self.touching.load(Ordering::Acquire) > 0 {
            pause(round);
            round += 1;
        }
    }

    /// Records that the guards of live blocks are lost with the contents of the memory.
    pub(crate) fn mark_guards_lost(&self) {
        for watched in self.table().live.values_mut() {
            watched.guarded = false;
        }
    }

    /// Whether only the requested bytes of a block are usable.
    pub(crate) fn guards(&self) -> bool {
        self.modes.guard
    }

    pub(crate) fn name(&self, ptr: u64, tag: Tag) {
        if let Some(watched) = self.table().live.get_mut(&ptr) {
            watched.tag = tag;
        }
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.table().findings.clone()
    }

    /// Reports and keeps a finding.
    pub(crate) fn found(&self, finding: Finding) {
        print(&finding);
        let mut table = self.table();
        if table.findings.len() < MAX_FINDINGS {
            table.findings.push(finding);
        }
    }

    /// Counts a freed block that returns to the heap without the check that a mode promises.
    pub(crate) fn count_unchecked(&self, why: &dyn std::fmt::Display) {
        if (self.modes.guard || self.modes.quarantine > 0)
            && let Some(count) = self.unchecked.due()
        {
            log::warn!("cannot check a freed block (occurrence {count}): {why}");
        }
    }
}

/// Writes to the program's logger, or to stderr if there is none: a program that enables a debug mode wants its
/// findings.
pub(crate) fn print(what: &dyn std::fmt::Display) {
    if log::log_enabled!(log::Level::Error) {
        log::error!("{what}");
    } else {
        // If stderr is unusable, no channel for reports is left.
        let _ = writeln!(std::io::stderr(), "cualloc: {what}");
    }
}

impl Table {
    pub(crate) fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    /// Claims a live block for a free; of two threads that free it, only one succeeds. `None` for a block that is not
    /// watched.
    pub(crate) fn begin_free(&mut self, ptr: u64) -> Result<Option<Watched>, Error> {
        if self.held.contains_key(&ptr) {
            return Err(Error::NotLive { ptr });
        }
        let watched = self.live.remove(&ptr);
        self.held.extend(watched.map(|watched| (ptr, watched)));
        Ok(watched)
    }

    /// Makes the block live again after a failed free.
    pub(crate) fn undo_free(&mut self, ptr: u64) {
        let watched = self.held.remove(&ptr);
        self.live.extend(watched.map(|watched| (ptr, watched)));
    }

    /// Forgets the block, which now returns to the heap.
    pub(crate) fn end_free(&mut self, ptr: u64) {
        self.held.remove(&ptr);
    }

    /// Puts a block whose free has begun into quarantine: at the end, or with `before` at the front.
    pub(crate) fn quarantine(&mut self, ptr: u64, before: bool) {
        let Some(watched) = self.held.get(&ptr) else {
            return;
        };
        self.quarantined_bytes += watched.bytes;
        match before {
            true => self.quarantine.push_front(ptr),
            false => self.quarantine.push_back(ptr),
        }
    }

    /// Puts back a block that the heap could not free.
    pub(crate) fn return_held(&mut self, ptr: u64, watched: Watched) {
        self.held.insert(ptr, watched);
        self.quarantine(ptr, false);
    }

    pub(crate) fn quarantined(&self) -> usize {
        self.quarantine.len()
    }

    /// Removes the oldest block that is not being read from the quarantine, if the quarantine exceeds `keep` bytes. The
    /// block stays held.
    pub(crate) fn take_from_quarantine(&mut self, keep: u64) -> Option<(u64, Watched)> {
        if self.quarantined_bytes <= keep {
            return None;
        }
        let read = &self.read;
        let at = self.quarantine.iter().position(|ptr| !read.contains(ptr))?;
        let ptr = self.quarantine.remove(at)?;
        let watched = *self.held.get(&ptr)?;
        self.quarantined_bytes -= watched.bytes;
        Some((ptr, watched))
    }

    pub(crate) fn get_mut(&mut self, ptr: u64) -> Option<&mut Watched> {
        let Table { live, held, .. } = self;
        live.get_mut(&ptr).or_else(|| held.get_mut(&ptr))
    }

    /// Protects a live block from its free while it is read: a concurrent free puts it into quarantine. False if the
    /// block has already been freed.
    pub(crate) fn begin_read(&mut self, ptr: u64, life: u64) -> bool {
        let live = self.live.get(&ptr).is_some_and(|live| live.life == life);
        if live {
            self.read.push(ptr);
        }
        live
    }

    /// Ends a read. Returns whether the block was freed meanwhile.
    pub(crate) fn end_read(&mut self, ptr: u64) -> bool {
        if let Some(at) = self.read.iter().position(|read| *read == ptr) {
            self.read.swap_remove(at);
        }
        self.held.contains_key(&ptr)
    }

    pub(crate) fn is_read(&self, ptr: u64) -> bool {
        self.read.contains(&ptr)
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
