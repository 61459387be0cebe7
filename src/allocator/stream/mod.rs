//! Streams as the allocator knows them: tickets, markers, and the known order between streams.
//!
//! Each free gets the open ticket of its stream. A marker is an event that covers all tickets up to its bound:
//!
//! ```text
//!  stream 1    free a   free b    [marker, bound 7]   free c   free d
//!  ticket        7        7        closes ticket 7      8        8
//!
//!  stream 2    cuStreamWaitEvent(marker): stream 2 follows stream 1 up to 7 and may use a and b
//!  host        cuEventQuery(marker) is complete: every stream may use a and b; c and d are pending
//! ```
//!
//! A ticket is closed under the lock, the event is recorded without it, and the marker is published under it. Frees in
//! between have the next ticket, so a marker never covers a free that came after its event.
//!
//! Tickets of a slot only rise, even when a later stream reuses the slot. Knowledge about an old ticket therefore
//! cannot be mistaken for knowledge about a new one.

#![forbid(unsafe_code)]

mod batch;
mod complete;
mod events;
pub(crate) mod finder;
pub(crate) mod inactive;
pub(crate) mod poll;
pub(crate) mod slot;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::driver::{Context, Event, Stream};

use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::uses::Use;
use crate::allocator::stream::poll::{Outcome, Poll};
use crate::allocator::stream::slot::{
    AfterFree, BACKOFF, Batch, EAGER_BATCHES, Holder, Marker, Slot, StreamKey, is_per_thread,
};
use crate::error::{Error, StreamMisuse};

/// With more streams, idle streams of the caller are forgotten, and work for each stream is divided among calls.
pub(crate) const MANY_STREAMS: usize = 64;

/// All streams of an allocator. A large request accesses the fields before `full`, on one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Streams {
    pub slots: Vec<Slot>,
    in_use: usize,
    /// Number of slots in use that are inactive.
    inactive: usize,
    /// Number of large requests made while there were several streams.
    requests: u64,
    /// Value of `requests` at which idle streams are searched next.
    next_search: u64,
    /// The slot that was found last.
    latest: u32,
    /// Whether an inactive stream has become active, and the spaces have not been updated yet.
    pub reactivated: bool,
    /// Whether raw streams may be destroyed without being retired.
    pub unretired: bool,
    /// Whether batches never wait for a request, because streams may be captured from the start.
    pub eager_markers: bool,
    /// Streams with a full batch whose marker is recorded only when another stream needs it.
    pub full: Vec<u32>,
    /// Freed bytes that the active streams together may leave without a marker, beyond the least size of a full batch.
    pub unmarked_bytes: u64,
    /// Number of markers not yet observed complete.
    pub incomplete: usize,
    /// Streams whose completed ticket has advanced since this was last taken.
    pub advanced: Vec<u32>,
    pub by_key: HashMap<StreamKey, u32, Mixed>,
    vacant: Vec<u32>,
    /// Number of markers published so far.
    orders: u64,
    /// The slot at which [`next_slots`](Self::next_slots) continues.
    next_slot: u32,
    /// Number of new streams since the last search for streams that only the heap references.
    newcomers: usize,
    /// Contexts of streams whose slots were reused. Dropping the last reference to one calls the driver, so it must not
    /// happen under the heap's lock.
    pub former: Vec<Context>,
    /// Events that no marker needs any more, each with its context, on the way to their pool.
    unused_events: Vec<(u64, Arc<Event>)>,
    /// Events that may be recorded again, by context.
    pub events: HashMap<u64, Vec<Arc<Event>>, Mixed>,
    /// Scratch memory for rounds of queries.
    pub poll: Poll,
}

impl Streams {
    pub(crate) fn find(&self, key: StreamKey) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// [`find`](Self::find), usually without a search.
    #[inline]
    pub(crate) fn find_recent(&mut self, key: StreamKey) -> Option<u32> {
        match self.slots.get(self.latest as usize) {
            Some(slot) if slot.is_called(key) => Some(self.latest),
            _ => self.find_other(key),
        }
    }

    #[inline(never)]
    fn find_other(&mut self, key: StreamKey) -> Option<u32> {
        self.latest = self.find(key)?;
        Some(self.latest)
    }

    /// Whether more than one stream may hold or request memory.
    #[inline]
    pub(crate) fn several(&self) -> bool {
        self.active() > 1
    }

    /// Number of streams that are not inactive.
    fn active(&self) -> usize {
        self.in_use - self.inactive
    }

    pub(crate) fn len(&self) -> usize {
        self.in_use
    }

    pub(crate) fn add(
        &mut self,
        key: StreamKey,
        raw: usize,
        context: Context,
        holder: Holder,
    ) -> u32 {
        self.in_use += 1;
        let at = self.vacant.pop();
        let (open, completed) = at.map_or((1, 0), |at| {
            let old = &self.slots[at as usize];
            (old.open, old.open - 1)
        });
        let distrusted = self.distrust_of(context.id());
        let slot = Slot {
            key,
            raw,
            context,
            holder,
            former: None,
            unretired: self.unretired,
            in_use: true,
            named: true,
            other_device: false,
            leaving: 0,
            distrusted,
            live: 0,
            calls: 0,
            open,
            completed,
            row: Arc::default(),
            markers: VecDeque::new(),
            open_uses: 0,
            open_bytes: 0,
            backoff: 0,
            stride: 1,
            eager_batches: EAGER_BATCHES,
            listed: false,
            inactive: false,
            last_call: self.requests,
        };
        let at = match at {
            Some(at) => {
                let old = std::mem::replace(&mut self.slots[at as usize], slot);
                self.former.push(old.context);
                at
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        };
        self.by_key.insert(key, at);
        self.list_deferred_batches();
        at
    }

    /// Assigns the key by which later calls name a stream.
    pub(crate) fn rename(&mut self, stream: u32, key: StreamKey) {
        let former = std::mem::replace(&mut self[stream].key, key);
        self.by_key.remove(&former);
        self.by_key.insert(key, stream);
    }

    /// Forgets a stream's key, because a new stream may appear under the same handle.
    pub(crate) fn forget_key(&mut self, stream: u32) {
        let slot = &mut self[stream];
        slot.named = false;
        let key = slot.key;
        if self.by_key.get(&key) == Some(&stream) {
            self.by_key.remove(&key);
        }
    }

    pub(crate) fn recycle(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        if !slot.in_use || !slot.drained() {
            return false;
        }
        slot.in_use = false;
        self.inactive -= usize::from(std::mem::take(&mut slot.inactive));
        self.incomplete -= slot.markers.len();
        slot.markers.clear();
        slot.row = Arc::default();
        self.unlist(stream);
        self.forget_key(stream);
        self.vacant.push(stream);
        self.in_use -= 1;
        true
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0u32..).zip(&self.slots).filter(|(_, s)| s.in_use)
    }

    /// Returns the streams that the allocator keeps alive and may use.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &Stream> {
        self.iter().filter_map(|(_, slot)| match &slot.holder {
            Holder::Kept(stream) if slot.distrusted.is_none() => Some(stream),
            _ => None,
        })
    }

    /// Takes the holders of all streams of the caller, none of which is used from here on.
    pub(crate) fn take_foreign(&mut self) -> Vec<Holder> {
        let slots = self.iter_mut().map(|(_, slot)| &mut slot.holder);
        let foreign = slots.filter(|holder| holder.is_callers());
        let mut taken: Vec<Holder> = foreign
            .map(|holder| std::mem::replace(holder, Holder::Retired))
            .collect();
        taken.extend(self.iter_mut().filter_map(|(_, slot)| slot.former.take()));
        taken
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Slot)> {
        (0u32..).zip(&mut self.slots).filter(|(_, s)| s.in_use)
    }

    /// Returns the streams whose completed ticket has advanced since the last call, ascending.
    pub(crate) fn take_advanced(&mut self) -> Vec<u32> {
        let mut advanced = std::mem::take(&mut self.advanced);
        advanced.sort_unstable();
        advanced
    }

    /// Reverts [`take_advanced`](Self::take_advanced) if `unfinished`; otherwise keeps only the memory of the list.
    pub(crate) fn put_advanced(&mut self, mut advanced: Vec<u32>, unfinished: bool) {
        if !unfinished {
            advanced.clear();
        }
        advanced.append(&mut self.advanced);
        advanced.sort_unstable();
        advanced.dedup();
        self.advanced = advanced;
    }

    /// Returns the numbers of all slots while there are few, otherwise of the next few in turn.
    pub(crate) fn next_slots(&mut self) -> std::ops::Range<u32> {
        let (all, few) = (self.slots.len() as u32, MANY_STREAMS as u32);
        let goes_on = all > few && self.next_slot < all;
        let first = if goes_on { self.next_slot } else { 0 };
        self.next_slot = all.min(first + few);
        first..self.next_slot
    }

    /// Whether to search for streams that only the heap references: with many streams once an eighth of them is new.
    pub(crate) fn is_prune_due(&mut self) -> bool {
        self.newcomers += 1;
        let due = self.in_use < MANY_STREAMS || self.newcomers > self.in_use / 8;
        if due {
            self.newcomers = 0;
        }
        due
    }

    pub(crate) fn slots(&self) -> std::ops::Range<u32> {
        0..self.slots.len() as u32
    }

    /// Whether a use is complete as observed by the host.
    pub(crate) fn is_complete(&self, u: &Use) -> bool {
        u.ticket <= self.slots[u.stream as usize].completed
    }

    /// Whether a stream may use the memory without a wait.
    pub(crate) fn ready(&self, stream: u32, u: &Use) -> bool {
        u.stream == stream
            || self.is_complete(u)
            || self[stream]
                .row
                .get(u.stream as usize)
                .is_some_and(|known| u.ticket <= *known)
    }

    /// Returns the oldest marker that covers a use, if it may be waited for.
    pub(crate) fn marker(&self, u: &Use) -> Option<&Marker> {
        let markers = &self.slots[u.stream as usize].markers;
        let marker = markers.get(markers.partition_point(|m| m.bound < u.ticket));
        marker.filter(|marker| !marker.doubtful)
    }

    /// Returns the oldest marker of the wanted streams that may be waited for: its stream, its bound and its event.
    pub(crate) fn oldest_marker(
        &self,
        wanted: impl Fn(u32) -> bool,
    ) -> Option<(u32, u64, Arc<Event>)> {
        let slots = self.iter().filter(|(stream, _)| wanted(*stream));
        let markers = slots.filter_map(|(stream, slot)| Some((stream, slot.markers.front()?)));
        let waitable = markers.filter(|(_, marker)| !marker.doubtful);
        let (stream, marker) = waitable.min_by_key(|(_, marker)| marker.order)?;
        Some((stream, marker.bound, Arc::clone(&marker.event)))
    }

    #[inline]
    pub(crate) fn is_covered(&self, u: &Use) -> bool {
        let newest = self.slots[u.stream as usize].newest();
        newest.is_some_and(|marker| marker.bound >= u.ticket)
    }

    /// Publishes a marker that was recorded after its batch had been closed. Returns an event that no marker needs any
    /// more: this one, or that of the marker that it replaces.
    #[must_use = "an event must not be destroyed under the lock"]
    pub(crate) fn publish(&mut self, batch: Batch, event: Arc<Event>) -> Option<Arc<Event>> {
        self.orders += 1;
        let slot = &mut self.slots[batch.stream as usize];
        // The last marker of a retired stream covers the batch.
        let retired = matches!(slot.holder, Holder::Retired);
        if batch.bound <= slot.completed || retired || slot.is_unusable() {
            return Some(event);
        }
        let of_retirement = slot.leaving > 0;
        let earlier = match slot.markers.back() {
            Some(last) if of_retirement && last.of_retirement && last.bound < batch.bound => {
                slot.markers.pop_back()
            }
            _ => None,
        };
        self.incomplete -= usize::from(earlier.is_some());
        let marker = Marker {
            bound: batch.bound,
            event,
            order: self.orders,
            row: batch.row,
            of_retirement,
            doubtful: false,
        };
        let at = slot.markers.partition_point(|m| m.bound < marker.bound);
        slot.markers.insert(at, marker);
        self.incomplete += 1;
        earlier.map(|marker| marker.event)
    }

    /// Records that the host observed a marker complete, and with it all tickets up to its bound, and everything that
    /// the stream was ordered behind when it was recorded. Events that are no longer needed are
    /// [unused](Self::unused_events).
    pub(crate) fn mark_complete(&mut self, stream: u32, bound: u64, row: &[u64]) {
        let own = (stream as usize, bound);
        for (other, ticket) in row.iter().copied().enumerate().chain([own]) {
            let Some(slot) = self.slots.get_mut(other) else {
                continue;
            };
            if ticket <= slot.completed {
                continue;
            }
            slot.completed = ticket;
            if !self.advanced.contains(&(other as u32)) {
                self.advanced.push(other as u32);
            }
            while slot.markers.front().is_some_and(|m| m.bound <= ticket) {
                let marker = slot.markers.pop_front();
                self.incomplete -= 1;
                let spent = marker.map(|m| (m.event.context().id(), m.event));
                self.unused_events.extend(spent);
            }
            slot.backoff = 0;
        }
    }

    pub(crate) fn mark_batch_complete(&mut self, batch: &Batch) {
        self.mark_complete(batch.stream, batch.bound, &batch.row);
    }

    pub(crate) fn has_no_markers(&self) -> bool {
        self.incomplete == 0
    }

    /// Records that a wait of one stream for a marker of another was queued.
    pub(crate) fn record_order(&mut self, stream: u32, other: u32, bound: u64, row: &[u64]) {
        let slot = &mut self.slots[stream as usize];
        if slot.leaving > 0 || matches!(slot.holder, Holder::Retired) {
            // The last marker may have been recorded before the wait, and then does not cover it.
            return;
        }
        let mine = &mut slot.row;
        let mut known = mine.to_vec();
        let own = (other as usize, bound);
        for (at, ticket) in row.iter().copied().enumerate().chain([own]) {
            if at == stream as usize {
                continue;
            }
            if at >= known.len() {
                known.resize(at + 1, 0);
            }
            known[at] = known[at].max(ticket);
        }
        *mine = Arc::from(known);
    }

    /// Returns streams that the allocator keeps alive, with frees that no marker covers yet.
    pub(crate) fn kept_without_marker(&self) -> Vec<(u32, StreamKey)> {
        let slots = self.iter();
        slots
            .filter(|(_, slot)| slot.holder.is_lasting() && !slot.covered())
            .filter(|(_, slot)| !slot.is_unusable())
            .map(|(stream, slot)| (stream, slot.key))
            .collect()
    }

    /// Whether a handle identifies a stream that lives until it is retired.
    pub(crate) fn has_lasting(&self, raw: usize) -> bool {
        self.iter()
            .any(|(_, slot)| slot.raw == raw && slot.named && slot.holder.is_lasting())
    }

    pub(crate) fn unknown_error(&self, raw: usize) -> Error {
        let same = |slot: &Slot| slot.raw == raw && !matches!(slot.holder, Holder::Retired);
        if is_per_thread(raw) && self.iter().any(|(_, slot)| same(slot)) {
            return Error::Stream(StreamMisuse::WrongThread);
        }
        Error::Stream(StreamMisuse::Unknown { stream: raw as u64 })
    }

    /// Returns the streams whose markers are due for a query; `None` if there are none.
    pub(crate) fn due_markers(&mut self, wanted: impl Fn(u32) -> bool) -> Option<Poll> {
        if self.has_no_markers() {
            return None;
        }
        let mut due = std::mem::take(&mut self.poll);
        for (stream, slot) in self.iter_mut() {
            if slot.markers.is_empty() || !wanted(stream) {
                continue;
            }
            if slot.backoff > 0 {
                slot.backoff -= 1;
                continue;
            }
            due.add(stream, slot);
        }
        if due.is_empty() {
            self.poll = due;
            return None;
        }
        Some(due)
    }

    /// Lets the next poll query every stream, even one that was recently not ready.
    pub(crate) fn reset_backoff(&mut self) {
        for (_, slot) in self.iter_mut() {
            slot.backoff = 0;
        }
    }

    pub(crate) fn apply_outcome(&mut self, outcome: Outcome) {
        if let Some(bound) = outcome.newest {
            self.observe(outcome.stream, bound);
        }
        let slot = &mut self[outcome.stream];
        slot.stride = outcome.count.max(1) as u32;
        if outcome.late {
            slot.backoff = BACKOFF;
            self.note_backlog(outcome.stream);
        }
    }

    /// [`mark_complete`](Self::mark_complete) for the marker with this bound, if it still exists.
    pub(crate) fn observe(&mut self, stream: u32, bound: u64) {
        // The completion of another marker may have removed it; the one that follows is not known to be complete.
        let markers = &self[stream].markers;
        let row = markers
            .get(markers.partition_point(|m| m.bound < bound))
            .filter(|m| m.bound == bound)
            .map(|m| Arc::clone(&m.row));
        self.mark_complete(stream, bound, row.as_deref().unwrap_or(&[]));
        self.pool_unused_events();
    }

    /// Returns the use that a free now leaves on a stream.
    #[inline]
    pub(crate) fn use_of_free(&self, stream: u32, precise: Option<u64>) -> Use {
        let slot = &self[stream];
        // A retired stream gets no more work, so its last marker covers everything.
        let now = if matches!(slot.holder, Holder::Retired) {
            slot.open - 1
        } else {
            slot.open
        };
        Use {
            stream,
            ticket: precise.unwrap_or(now).min(now),
        }
    }

    #[inline]
    pub(crate) fn count_free(&mut self, u: &Use, bytes: u64, after: &mut AfterFree) {
        let slot = &self[u.stream];
        if u.ticket < slot.open {
            return;
        }
        let key = slot.key;
        if self.count_use(u.stream, bytes) {
            after.mark(u.stream, key);
        }
    }
}

impl std::ops::Index<u32> for Streams {
    type Output = Slot;
    #[inline]
    fn index(&self, stream: u32) -> &Slot {
        &self.slots[stream as usize]
    }
}

impl std::ops::IndexMut<u32> for Streams {
    #[inline]
    fn index_mut(&mut self, stream: u32) -> &mut Slot {
        &mut self.slots[stream as usize]
    }
}
