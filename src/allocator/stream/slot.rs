//! The state of one stream: its key, its holder, its tickets and markers.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Event, Stream, sys};
use crate::locks::lines::{KeptLines, keep_lines};
use crate::locks::lock::pause;

/// An event recorded on a stream after everything that was freed under tickets up to the bound.
#[derive(Debug, Clone)]
pub(crate) struct Marker {
    pub bound: u64,
    pub event: Arc<Event>,
    /// Number of the publication, over all streams.
    pub order: u64,
    /// The tickets of other streams that the stream was known to be ordered behind when the event was recorded.
    pub row: Arc<[u64]>,
    /// Whether it was recorded by a retirement of the stream. The next such marker replaces it, so that repeated failed
    /// retirements leave one marker.
    pub of_retirement: bool,
    /// Whether a query reported the marker as invalid and no replacement can be recorded: no stream waits for it, but
    /// it is queried again.
    pub doubtful: bool,
}

/// A closed batch of frees that needs its marker.
#[derive(Debug)]
pub(crate) struct Batch {
    pub stream: u32,
    pub bound: u64,
    /// The stream's order when the batch was closed: taken before the event is recorded, so that a wait queued in
    /// between is not credited to the marker.
    pub(crate) row: Arc<[u64]>,
    /// Number of uses under its ticket.
    pub(crate) uses: u32,
    pub(crate) bytes: u64,
}

/// Identity of a stream across calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StreamKey {
    /// The driver's id: never reused while the program runs.
    Id(u64),
    /// The handle, where the driver has no ids.
    Handle(usize),
}

impl StreamKey {
    /// Returns the number that represents the stream in reports.
    pub(crate) fn number(self) -> u64 {
        match self {
            StreamKey::Id(id) => id,
            StreamKey::Handle(handle) => handle as u64,
        }
    }
}

/// Permissions of the allocator on a stream's handle.
#[derive(Debug, Clone)]
pub(crate) enum Holder {
    /// The allocator keeps the stream alive, so a marker may be recorded at any time.
    Kept(Stream),
    /// A stream of the caller: its handle is used only inside calls that name the stream or free its blocks. Code that
    /// uses the handle without the heap's lock holds a copy of the token meanwhile.
    Foreign(Arc<()>),
    /// A stream of the caller, who promised that its handle lives until it is retired: a marker may be recorded at any
    /// time. Calls that do not name it do not query whether it is idle, because its owner may begin to capture it. The
    /// token is as for a foreign stream.
    Adopted(Arc<()>),
    /// The handle is not used any more: the last marker is recorded.
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

    /// Whether the stream belongs to the caller, adopted or not.
    pub(crate) fn is_callers(&self) -> bool {
        matches!(self, Holder::Foreign(_) | Holder::Adopted(_))
    }

    /// Whether a call in progress uses a stream of the caller. Copies of the token are made only under the heap's lock.
    pub(crate) fn is_touched(&self) -> bool {
        matches!(self, Holder::Foreign(token) | Holder::Adopted(token) if Arc::strong_count(token) > 1)
    }

    /// Waits until no call uses a stream of the caller any more. No copies of this holder's token are made now.
    pub(crate) fn await_calls(self) {
        let (Holder::Foreign(mut token) | Holder::Adopted(mut token)) = self else {
            return;
        };
        let mut round = 0;
        // `get_mut` succeeds only after every holder of the token has dropped it, and synchronises with them.
        while Arc::get_mut(&mut token).is_none() {
            pause(round);
            round += 1;
        }
    }
}

/// One stream. A large request and its free access the fields before `calls`, on one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub key: StreamKey,
    /// Number of live blocks that were allocated or recorded on the stream, except for those that stream caches count.
    pub live: u64,
    /// Ticket of the next free.
    pub open: u64,
    /// Tickets up to this one are complete as observed by the host.
    pub completed: u64,
    /// Bytes freed under the open ticket.
    pub open_bytes: u64,
    /// Number of large requests, of all streams, at the last call for the stream.
    pub(crate) last_call: u64,
    /// Number of uses under the open ticket, usually frees.
    pub open_uses: u32,
    pub in_use: bool,
    /// Whether calls that name the stream find it here. It ends when its last marker is about to be recorded: later
    /// work counts as that of another stream.
    pub named: bool,
    /// Whether the stream is inactive: the heap has no pending memory of it, and calls do not name it. The others
    /// behave as if it did not exist. Its stream caches stay in use.
    pub(crate) inactive: bool,
    /// Whether the stream was registered on another device than the allocator's.
    pub(crate) other_device: bool,
    /// Number of calls in progress that name the stream.
    pub calls: u32,
    pub holder: Holder,
    /// Number of allocations before markers are queried again.
    pub backoff: u32,
    pub markers: VecDeque<Marker>,
    /// For each other stream, the newest ticket that this stream is known to be ordered behind.
    pub row: Arc<[u64]>,
    pub raw: usize,
    pub context: Context,
    /// Token of a stream that was the caller's before the allocator kept it: earlier users may still use the handle.
    pub former: Option<Holder>,
    /// Whether the caller may destroy the stream without retiring it.
    pub unretired: bool,
    /// Number of retirements in progress.
    pub leaving: u32,
    /// Why the stream's context is distrusted, if it is: a driver call on one of its objects returned this
    /// `CUDA_ERROR_INVALID_HANDLE`. The allocator's own context is never distrusted.
    pub distrusted: Option<DriverError>,
    /// Number of markers found complete by the last query.
    pub stride: u32,
    /// Number of batches that still get their marker as soon as they are full. Afterwards the batches of a stream that
    /// the allocator keeps alive get one when another stream requests memory, and none if the stream is idle by then.
    pub(crate) eager_batches: u32,
    /// Whether the stream is listed in `full`.
    pub(crate) listed: bool,
}

const _: () = assert!(std::mem::offset_of!(Slot, calls) == 64);

impl Slot {
    /// Whether no marker may be recorded on a stream that is still in use: its context is distrusted, and no retirement
    /// in progress guarantees that its handle is valid.
    pub(crate) fn is_unusable(&self) -> bool {
        self.distrusted.is_some() && self.leaving == 0
    }

    /// Whether the stream's owner may have destroyed it by now, unless the current call names it.
    #[inline]
    pub(crate) fn may_be_destroyed(&self) -> bool {
        self.unretired && self.raw > 2 && matches!(self.holder, Holder::Foreign(_))
    }

    /// Whether everything freed on the stream is complete or covered by a marker.
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

    /// Whether only a wait for the whole context can show that memory freed on the stream is complete: it has no
    /// marker, and only the stream's owner may record one.
    pub(crate) fn lacks_markers(&self) -> bool {
        self.needs_context_wait() && (!self.holder.is_lasting() || is_per_thread(self.raw))
    }

    /// Whether frees on a stream that may have been destroyed still need a marker.
    pub(crate) fn was_left(&self) -> bool {
        let bound = self
            .newest()
            .map_or(self.completed, |m| m.bound.max(self.completed));
        self.may_be_destroyed() && (self.is_full() || bound + 1 < self.open)
    }

    /// Returns the newest marker that may be waited for.
    pub(crate) fn newest(&self) -> Option<&Marker> {
        self.markers.iter().rfind(|marker| !marker.doubtful)
    }

    /// Whether the open batch is large enough for a marker.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.open_uses >= BATCH_FREES || self.open_bytes >= BATCH_BYTES
    }

    /// Whether a call with this key finds its stream here.
    #[inline]
    pub(crate) fn is_called(&self, key: StreamKey) -> bool {
        self.in_use && self.named && self.key == key
    }

    /// Whether a call that does not name the stream may use its handle.
    fn may_be_queried(&self) -> bool {
        let retired = matches!(self.holder, Holder::Retired);
        !retired && self.distrusted.is_none() && !self.may_be_destroyed()
    }

    /// Returns the handle if it suffices to query whether the stream is capturing; otherwise 0.
    pub(crate) fn handle_to_query(&self) -> usize {
        // A query of a default stream needs its context.
        let ask = self.raw > 2 && self.may_be_queried();
        if ask { self.raw } else { 0 }
    }

    /// Returns the handle if it identifies this stream until the stream is retired; otherwise 0.
    pub(crate) fn lasting_handle(&self) -> usize {
        if self.holder.is_lasting() {
            self.handle_to_query()
        } else {
            0
        }
    }

    /// Returns the stream, if a free may query whether it is capturing.
    pub(crate) fn suspect(&self) -> Option<Suspect> {
        // The per-thread handle would query the calling thread's stream.
        let ask = !is_per_thread(self.raw) && self.may_be_queried();
        ask.then(|| Suspect {
            key: self.key,
            raw: self.raw,
            context: self.context.clone(),
            _holder: self.holder.clone(),
            _lines: keep_lines(),
        })
    }

    /// Whether the stream has nothing left that others would have to wait for.
    pub(crate) fn has_no_work(&self) -> bool {
        let quiet = self.calls == 0 && self.leaving == 0 && self.markers.is_empty();
        quiet && self.open_uses == 0 && self.completed + 1 >= self.open
    }

    pub(crate) fn drained(&self) -> bool {
        matches!(self.holder, Holder::Retired) && self.live == 0 && self.completed + 1 >= self.open
    }
}

/// A stream whose handle is valid while this value is held: a stream that the allocator keeps stays alive with it, and
/// the retirement of a caller's stream waits for it.
pub(crate) struct Suspect {
    pub(crate) key: StreamKey,
    pub(crate) raw: usize,
    /// A default stream is queried in its own context.
    pub(crate) context: Context,
    pub(crate) _holder: Holder,
    _lines: KeptLines,
}

/// Number of frees after which a batch is full while several streams are active.
pub(crate) const BATCH_FREES: u32 = 32;

/// Least number of freed bytes after which a batch is full.
pub(crate) const BATCH_BYTES: u64 = 1 << 20;

/// Number of batches that get their marker as soon as they are full, for a new stream and for one with a backlog: where
/// work completes late, the time of a marker matters.
pub(crate) const EAGER_BATCHES: u32 = 512;

/// Number of large allocations before a marker that was not complete is queried again.
pub(crate) const BACKOFF: u32 = 8;

/// A wait that must be queued before an allocated block may be used.
#[derive(Debug)]
pub(crate) struct PendingWait {
    pub stream: u32,
    pub bound: u64,
    pub event: Arc<Event>,
    pub row: Arc<[u64]>,
}

/// The steps of a free that remain outside the lock.
#[derive(Debug, Default)]
pub(crate) struct AfterFree {
    /// Streams with a full batch: usually none or one.
    pub(crate) full: Option<(u32, StreamKey)>,
    pub(crate) more: Vec<(u32, StreamKey)>,
}

impl AfterFree {
    /// Adds a stream to be marked.
    pub(crate) fn mark(&mut self, stream: u32, key: StreamKey) {
        match self.full {
            None => self.full = Some((stream, key)),
            Some(_) => self.more.push((stream, key)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.full.is_none()
    }

    /// Keeps the wanted streams.
    pub(crate) fn retain(&mut self, wanted: impl Fn(u32) -> bool) {
        self.more.extend(self.full.take());
        self.more.retain(|(stream, _)| wanted(*stream));
        self.full = self.more.pop();
    }

    /// Returns the streams to be marked.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (u32, StreamKey)> + '_ {
        self.full.iter().chain(&self.more).copied()
    }
}

/// Whether a handle is the null, legacy or per-thread handle.
#[inline]
pub(crate) fn is_special(raw: sys::CUstream) -> bool {
    (raw as usize) <= 2
}

/// Represents null and 1 among lasting handles. No stream has it as a handle or number.
pub(crate) const LEGACY: usize = usize::MAX;

/// Returns a handle in the form in which lasting handles are compared: null and 1 mean the same stream.
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
