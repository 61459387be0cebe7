//! A stream as an allocator knows it: its key, who keeps it alive, its tickets and markers.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Event, Stream, sys};
use crate::locks::lines::{KeptLines, keep_lines};
use crate::locks::lock::pause;

/// An event recorded on a stream after everything freed under tickets up to the bound.
#[derive(Debug, Clone)]
pub(crate) struct Marker {
    pub bound: u64,
    pub event: Arc<Event>,
    /// Order of publication over all streams.
    pub order: u64,
    /// What the stream was known to follow when the event was recorded.
    pub row: Arc<[u64]>,
    /// Recorded while the stream was being retired. The next such marker takes its place, so that retirements
    /// which fail again and again leave one marker.
    pub of_retirement: bool,
    /// A question was answered as if it stood for nothing, and there will be no other one: nobody waits for
    /// it, but it is asked again.
    pub doubtful: bool,
}

/// A closed batch of frees, waiting for its marker.
#[derive(Debug)]
pub(crate) struct Batch {
    pub stream: u32,
    pub bound: u64,
    /// What the stream followed when the batch was closed: taken before the event is recorded, so
    /// that a wait queued in between is not credited to the marker.
    pub(crate) row: Arc<[u64]>,
    /// What was under its ticket.
    pub(crate) uses: u32,
    pub(crate) bytes: u64,
}

/// How a stream is known across calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StreamKey {
    /// The driver's id: never reused while the program runs.
    Id(u64),
    /// The handle, where the driver has no ids.
    Handle(usize),
}

impl StreamKey {
    /// The number that stands for the stream in reports.
    pub(crate) fn number(self) -> u64 {
        match self {
            StreamKey::Id(id) => id,
            StreamKey::Handle(handle) => handle as u64,
        }
    }
}

/// What the allocator may do with a stream's handle.
#[derive(Debug, Clone)]
pub(crate) enum Holder {
    /// We keep the stream alive, so a marker may be recorded at any time.
    Kept(Stream),
    /// The caller's: touched only inside calls that name the stream or free its blocks. Who touches it
    /// beside the heap's lock holds a copy of the token meanwhile.
    Foreign(Arc<()>),
    /// The caller's, who promised that its handle lives until it is retired: it may be marked at any time. It is
    /// not asked whether it is idle by calls that do not name it, since its owner may begin to capture it. The token
    /// is that of a foreign one.
    Adopted(Arc<()>),
    /// No calls any more: the last marker is recorded.
    Retired,
}

impl Holder {
    pub(crate) fn foreign() -> Holder {
        Holder::Foreign(Arc::new(()))
    }

    /// Whether a marker may be recorded on the stream at any time.
    #[inline]
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(self, Holder::Kept(_) | Holder::Adopted(_))
    }

    /// The caller's, adopted or not.
    pub(crate) fn is_callers(&self) -> bool {
        matches!(self, Holder::Foreign(_) | Holder::Adopted(_))
    }

    /// Whether a call that is under way touches a stream of the caller's. Copies are made under the heap's
    /// lock alone.
    pub(crate) fn is_touched(&self) -> bool {
        matches!(self, Holder::Foreign(token) | Holder::Adopted(token) if Arc::strong_count(token) > 1)
    }

    /// Waits until nobody touches a stream of the caller's any more. No copies are made of this holder now.
    pub(crate) fn let_go(self) {
        let (Holder::Foreign(mut token) | Holder::Adopted(mut token)) = self else {
            return;
        };
        let mut round = 0;
        // Behind what those did who held one.
        while Arc::get_mut(&mut token).is_none() {
            pause(round);
            round += 1;
        }
    }
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Slot {
    pub key: StreamKey,
    pub raw: usize,
    pub context: Context,
    pub holder: Holder,
    /// The token of a stream that was the caller's before it was kept: who touched it then may do so still.
    pub former: Option<Holder>,
    /// The caller does not promise to retire it before it is destroyed.
    pub unretired: bool,
    pub in_use: bool,
    /// Calls that name the stream find it here. Not from the moment on that its last marker is about to be
    /// recorded: what it is given later is another stream's to the heap.
    pub named: bool,
    /// Retirements under way.
    pub leaving: u32,
    /// Why the stream's context is distrusted, if it is: a driver call on something of it was answered with this
    /// `CUDA_ERROR_INVALID_HANDLE`. The allocator's own context is never distrusted.
    pub distrusted: Option<DriverError>,
    /// Live blocks allocated on the stream or recorded on it, as far as stream caches do not count them.
    pub live: u64,
    /// Calls under way that name the stream.
    pub calls: u32,
    /// The ticket of the next free.
    pub open: u64,
    /// Tickets up to here are complete as observed by the host.
    pub completed: u64,
    /// Per other stream: the newest ticket that this stream is known to follow.
    pub row: Arc<[u64]>,
    pub markers: VecDeque<Marker>,
    /// Uses (frees, mostly) and bytes under the open ticket.
    pub open_uses: u32,
    pub open_bytes: u64,
    /// Allocations to let pass before markers are asked again.
    pub backoff: u32,
    /// How many markers were found complete when they were last asked.
    pub stride: u32,
    /// So many batches get their marker as soon as they are full. After that those of a stream that we
    /// keep alive wait until somebody else asks for memory. A stream that is idle then needs none.
    pub(crate) eager_batches: u32,
    /// Among the `full` ones.
    pub(crate) listed: bool,
    /// The heap's memory has no part of the stream that is not complete, and nobody names it: the others do
    /// as if it did not exist. Its stream caches go on.
    pub(crate) resting: bool,
    /// Requests for large memory, of all streams, when the heap was last told of the stream.
    pub(crate) told_at: u64,
}

impl Slot {
    /// Whether no marker may be recorded on the stream although it goes on: its context is distrusted, and no
    /// retirement under way vouches for it.
    pub(crate) fn is_left_alone(&self) -> bool {
        self.distrusted.is_some() && self.leaving == 0
    }

    /// Whether the stream's owner may have destroyed it by now, unless the call under way names it.
    #[inline]
    pub(crate) fn may_be_gone(&self) -> bool {
        self.unretired && self.raw > 2 && matches!(self.holder, Holder::Foreign(_))
    }

    /// Everything freed on the stream is covered by a marker or complete.
    pub(crate) fn covered(&self) -> bool {
        let bound = self
            .newest()
            .map_or(self.completed, |m| m.bound.max(self.completed));
        bound + 1 >= self.open && self.open_uses == 0
    }

    /// Whether a wait for the stream's context would complete something that no marker covers.
    pub(crate) fn needs_context_wait(&self) -> bool {
        !self.covered() && self.distrusted.is_none()
    }

    /// Whether only a wait for the whole context tells when something freed on the stream is complete: it has no
    /// marker, and only the stream's owner may record one.
    pub(crate) fn lacks_markers(&self) -> bool {
        self.needs_context_wait() && (!self.holder.is_lasting() || is_per_thread(self.raw))
    }

    /// Whether frees left something for a marker of a stream that may be gone.
    pub(crate) fn was_left(&self) -> bool {
        let bound = self
            .newest()
            .map_or(self.completed, |m| m.bound.max(self.completed));
        self.may_be_gone() && (self.is_full() || bound + 1 < self.open)
    }

    /// The newest marker that may be waited for.
    pub(crate) fn newest(&self) -> Option<&Marker> {
        self.markers.iter().rfind(|marker| !marker.doubtful)
    }

    /// Whether the open batch is worth a marker.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.open_uses >= BATCH_FREES || self.open_bytes >= BATCH_BYTES
    }

    /// Whether it is what a stream of this name is known by.
    #[inline]
    pub(crate) fn is_called(&self, key: StreamKey) -> bool {
        self.in_use && self.named && self.key == key
    }

    /// Whether a call that does not name the stream may use its handle.
    fn may_be_asked(&self) -> bool {
        let retired = matches!(self.holder, Holder::Retired);
        !retired && self.distrusted.is_none() && !self.may_be_gone()
    }

    /// The handle, if nothing more is needed to ask the stream whether it captures; else 0.
    pub(crate) fn handle_to_ask(&self) -> usize {
        // A default stream is asked in its context.
        let ask = self.raw > 2 && self.may_be_asked();
        if ask { self.raw } else { 0 }
    }

    /// The handle, if it is this stream's and no other's until the stream is retired; else 0.
    pub(crate) fn lasting_handle(&self) -> usize {
        if self.holder.is_lasting() {
            self.handle_to_ask()
        } else {
            0
        }
    }

    /// The stream, if a free may ask it whether it is capturing.
    pub(crate) fn suspect(&self) -> Option<Suspect> {
        // The per-thread handle would ask about the calling thread's stream.
        let ask = !is_per_thread(self.raw) && self.may_be_asked();
        ask.then(|| Suspect {
            key: self.key,
            raw: self.raw,
            context: self.context.clone(),
            _holder: self.holder.clone(),
            _lines: keep_lines(),
        })
    }

    /// Whether nothing is left for the others to wait for.
    pub(crate) fn has_nothing_left(&self) -> bool {
        let quiet = self.calls == 0 && self.leaving == 0 && self.markers.is_empty();
        quiet && self.open_uses == 0 && self.completed + 1 >= self.open
    }

    pub(crate) fn drained(&self) -> bool {
        matches!(self.holder, Holder::Retired) && self.live == 0 && self.completed + 1 >= self.open
    }
}

/// A stream whose handle is good as long as this is held: one that the allocator keeps stays alive with it, and the
/// retirement of one that the caller owns waits for it.
pub(crate) struct Suspect {
    pub(crate) key: StreamKey,
    pub(crate) raw: usize,
    /// A default stream is asked in its own context.
    pub(crate) context: Context,
    pub(crate) _holder: Holder,
    _lines: KeptLines,
}

/// Frees after which a batch is full while several streams are active.
pub(crate) const BATCH_FREES: u32 = 32;

/// Freed bytes after which it is full.
pub(crate) const BATCH_BYTES: u64 = 1 << 20;

/// Batches of a stream that get their marker as soon as they are full, at first and when it works
/// behind: where work is late it matters when its marker was recorded.
pub(crate) const EAGER_BATCHES: u32 = 512;

/// Large allocations to let pass before a marker that was not ready is asked again.
pub(crate) const BACKOFF: u32 = 8;

/// A wait that has to be queued before a taken block may be used.
#[derive(Debug)]
pub(crate) struct PendingWait {
    pub stream: u32,
    pub bound: u64,
    pub event: Arc<Event>,
    pub row: Arc<[u64]>,
}

/// What a free left to do outside the lock.
#[derive(Debug, Default)]
pub(crate) struct AfterFree {
    /// Streams whose batch is full: mostly none or one.
    pub(crate) full: Option<(u32, StreamKey)>,
    pub(crate) more: Vec<(u32, StreamKey)>,
}

impl AfterFree {
    /// A stream is to be marked.
    pub(crate) fn mark(&mut self, stream: u32, key: StreamKey) {
        match self.full {
            None => self.full = Some((stream, key)),
            Some(_) => self.more.push((stream, key)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.full.is_none()
    }

    /// Keeps the streams of which that is true.
    pub(crate) fn retain(&mut self, wanted: impl Fn(u32) -> bool) {
        self.more.extend(self.full.take());
        self.more.retain(|(stream, _)| wanted(*stream));
        self.full = self.more.pop();
    }

    /// The streams to be marked.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (u32, StreamKey)> + '_ {
        self.full.iter().chain(&self.more).copied()
    }
}

/// The null, legacy and per-thread handles.
#[inline]
pub(crate) fn is_special(raw: sys::CUstream) -> bool {
    (raw as usize) <= 2
}

/// What stands for null and 1 among handles that last. No stream has it for a handle or a number.
pub(crate) const LEGACY: usize = usize::MAX;

/// A handle as those that last are compared: null and 1 mean the same stream.
#[inline(always)]
pub(crate) fn to_compare(raw: sys::CUstream) -> usize {
    match raw as usize {
        0 | 1 => LEGACY,
        raw => raw,
    }
}

/// Whether the handle means a different stream on each thread.
pub(crate) fn is_per_thread(raw: usize) -> bool {
    raw == 2
}
