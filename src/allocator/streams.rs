//! Streams as the allocator knows them: tickets, markers, and who follows whom.
//!
//! Tickets of a slot only rise, also when a later stream takes the slot over, so that nothing that
//! is known about an old ticket can be mistaken for knowledge about a new one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::driver::{Context, Event, Stream};

use super::fronts::EngineFront;
use super::mix::Mixed;
use super::uses::Use;

/// An event recorded on a stream after everything freed under tickets up to the bound.
#[derive(Debug, Clone)]
pub(crate) struct Marker {
    pub bound: u64,
    pub event: Arc<Event>,
    /// Order of publication over all streams.
    pub order: u64,
    /// What the stream was known to follow when the event was recorded.
    pub row: Box<[u64]>,
}

/// A closed batch of frees, waiting for its marker.
#[derive(Debug)]
pub(crate) struct Batch {
    pub stream: u32,
    pub bound: u64,
    /// What the stream followed when the batch was closed: taken before the event is recorded, so
    /// that a wait queued in between is not credited to the marker.
    row: Box<[u64]>,
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
    /// The caller's: touched only inside calls that name the stream or free its blocks.
    Foreign,
    /// No calls any more: the last marker is recorded.
    Retired,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Slot {
    pub key: StreamKey,
    pub raw: usize,
    pub context: Context,
    pub holder: Holder,
    pub in_use: bool,
    /// Live blocks allocated on the stream or recorded on it, as far as fronts do not count them.
    pub live: u64,
    /// Calls under way that name the stream.
    pub calls: u32,
    /// Where its small blocks come from, and the pages that are there.
    pub fronts: Vec<&'static EngineFront>,
    pub pages: u32,
    /// The ticket of the next free.
    pub open: u64,
    /// Tickets up to here are complete as observed by the host.
    pub completed: u64,
    /// Per other stream: the newest ticket that this stream is known to follow.
    pub row: Vec<u64>,
    pub markers: VecDeque<Marker>,
    /// Uses (frees, mostly) and bytes under the open ticket.
    pub open_uses: u32,
    pub open_bytes: u64,
    /// Allocations to let pass before markers are asked again.
    pub backoff: u32,
    /// The last call that named the stream found it capturing.
    pub capturing: bool,
    /// How many markers were found complete when they were last asked.
    pub stride: u32,
}

/// One stream's markers on the way to finding out how many of them are complete. Markers of a stream
/// complete in order, so not every one has to be asked.
#[derive(Debug)]
pub(crate) struct Probe {
    pub stream: u32,
    markers: Vec<(u64, Arc<Event>)>,
    /// So many are complete,
    done: usize,
    /// and this one (an index) is not, or does not exist.
    late: usize,
    /// How many to go ahead.
    stride: usize,
    /// The stream has more markers than are looked at.
    more: bool,
}

impl Probe {
    pub(crate) fn new(stream: u32, slot: &Slot) -> Self {
        let stride = slot.stride.max(1) as usize;
        let markers: Vec<_> = slot
            .markers
            .iter()
            .take(4 * stride)
            .map(|m| (m.bound, Arc::clone(&m.event)))
            .collect();
        Probe {
            stream,
            done: 0,
            late: markers.len(),
            stride,
            more: markers.len() < slot.markers.len(),
            markers,
        }
    }

    /// The event to ask next; `None` once it is known how many markers are complete.
    ///
    /// As far ahead as went well the last time, farther while that goes well, then by halves.
    pub(crate) fn next(&self) -> Option<&Event> {
        Some(&self.markers.get(self.at()?)?.1)
    }

    fn at(&self) -> Option<usize> {
        let left = self.late - self.done;
        if left == 0 {
            return None;
        }
        let ahead = if self.late == self.markers.len() {
            self.stride.min(left)
        } else {
            left.div_ceil(2).min(self.stride)
        };
        Some(self.done + ahead - 1)
    }

    /// What the event that was asked said.
    pub(crate) fn answer(&mut self, complete: bool) {
        let Some(at) = self.at() else {
            return;
        };
        if complete {
            self.stride = 2 * (at + 1 - self.done);
            self.done = at + 1;
        } else {
            self.late = at;
        }
    }

    /// Whether all that were looked at are complete, and there are more.
    pub(crate) fn goes_on(&self) -> bool {
        self.more && self.done == self.markers.len()
    }

    /// The bound of the newest marker known to be complete, how many are, and whether one is not.
    pub(crate) fn outcome(&self) -> (Option<u64>, usize, bool) {
        let newest = self.done.checked_sub(1).map(|at| self.markers[at].0);
        (newest, self.done, self.late < self.markers.len())
    }
}

impl Slot {
    /// Everything freed on the stream is covered by a marker or complete.
    pub(crate) fn covered(&self) -> bool {
        let bound = self
            .markers
            .back()
            .map_or(self.completed, |m| m.bound.max(self.completed));
        bound + 1 >= self.open && self.open_uses == 0
    }

    /// Whether it is what a stream of this name is known by.
    #[inline]
    fn is_called(&self, key: StreamKey) -> bool {
        self.in_use && self.key == key && !matches!(self.holder, Holder::Retired)
    }

    fn drained(&self) -> bool {
        matches!(self.holder, Holder::Retired) && self.live == 0 && self.completed + 1 >= self.open
    }
}

/// All streams of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    slots: Vec<Slot>,
    by_key: HashMap<StreamKey, u32, Mixed>,
    vacant: Vec<u32>,
    in_use: usize,
    orders: u64,
    /// Streams of which more is complete than when this was last taken.
    advanced: Vec<u32>,
    /// The slot that was last found.
    latest: u32,
}

impl Streams {
    pub(crate) fn find(&self, key: StreamKey) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// [`find`](Self::find), mostly without a search.
    #[inline]
    pub(crate) fn find_again(&mut self, key: StreamKey) -> Option<u32> {
        let slot = self.slots.get(self.latest as usize);
        if !slot.is_some_and(|slot| slot.is_called(key)) {
            self.latest = self.find(key)?;
        }
        Some(self.latest)
    }

    /// More than one stream may hold or ask for memory.
    pub(crate) fn several(&self) -> bool {
        self.in_use > 1
    }

    /// Whether a marker was not seen complete yet.
    pub(crate) fn in_flight(&self) -> bool {
        self.several() && self.iter().any(|(_, slot)| !slot.markers.is_empty())
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
        let slot = Slot {
            key,
            raw,
            context,
            holder,
            in_use: true,
            live: 0,
            calls: 0,
            fronts: Vec::new(),
            pages: 0,
            open,
            completed,
            row: Vec::new(),
            markers: VecDeque::new(),
            open_uses: 0,
            open_bytes: 0,
            backoff: 0,
            capturing: false,
            stride: 1,
        };
        let at = match at {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        };
        self.by_key.insert(key, at);
        at
    }

    /// The stream's handle is gone: a new stream may appear under the same handle.
    pub(crate) fn forget_key(&mut self, stream: u32) {
        let key = self[stream].key;
        if self.by_key.get(&key) == Some(&stream) {
            self.by_key.remove(&key);
        }
    }

    /// Gives the slot back if nothing refers to the stream any more.
    pub(crate) fn recycle(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        if !slot.in_use || !slot.drained() {
            return false;
        }
        slot.in_use = false;
        slot.markers.clear();
        slot.row = Vec::new();
        self.forget_key(stream);
        self.vacant.push(stream);
        self.in_use -= 1;
        true
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0u32..).zip(&self.slots).filter(|(_, s)| s.in_use)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Slot)> {
        (0u32..).zip(&mut self.slots).filter(|(_, s)| s.in_use)
    }

    /// Streams of which more is complete than when this was last asked, ascending.
    pub(crate) fn take_advanced(&mut self) -> Vec<u32> {
        let mut advanced = std::mem::take(&mut self.advanced);
        advanced.sort_unstable();
        advanced
    }

    /// Complete as observed by the host.
    pub(crate) fn complete(&self, u: &Use) -> bool {
        u.ticket <= self.slots[u.stream as usize].completed
    }

    /// Usable by a stream without a wait.
    pub(crate) fn ready(&self, stream: u32, u: &Use) -> bool {
        u.stream == stream
            || self.complete(u)
            || self[stream]
                .row
                .get(u.stream as usize)
                .is_some_and(|known| u.ticket <= *known)
    }

    /// The oldest marker that covers a use.
    pub(crate) fn marker(&self, u: &Use) -> Option<&Marker> {
        let markers = &self.slots[u.stream as usize].markers;
        markers.get(markers.partition_point(|m| m.bound < u.ticket))
    }

    /// Closes the open batch of a stream: frees from now on get a later ticket, so a marker that is
    /// recorded after this covers everything up to the bound.
    pub(crate) fn close_batch(&mut self, stream: u32) -> Batch {
        let slot = &mut self.slots[stream as usize];
        let bound = slot.open;
        slot.open += 1;
        // Before any event is recorded for the batch.
        for front in &slot.fronts {
            front.lock().heap.set_ticket(slot.open);
        }
        slot.open_uses = 0;
        slot.open_bytes = 0;
        Batch {
            stream,
            bound,
            row: slot.row.clone().into_boxed_slice(),
        }
    }

    /// A marker was recorded after the batch had been closed. Gives the event back if nobody needs
    /// it any more.
    #[must_use = "an event must not be destroyed under the lock"]
    pub(crate) fn publish(&mut self, batch: Batch, event: Event) -> Option<Event> {
        self.orders += 1;
        let slot = &mut self.slots[batch.stream as usize];
        if batch.bound <= slot.completed {
            return Some(event);
        }
        let marker = Marker {
            bound: batch.bound,
            event: Arc::new(event),
            order: self.orders,
            row: batch.row,
        };
        let at = slot.markers.partition_point(|m| m.bound < marker.bound);
        slot.markers.insert(at, marker);
        None
    }

    /// The host saw a marker complete: so are all tickets up to its bound, and all that the stream
    /// followed when it was recorded. Returns the events that are no longer needed.
    pub(crate) fn completed(
        &mut self,
        stream: u32,
        bound: u64,
        row: &[u64],
    ) -> Vec<(u32, Arc<Event>)> {
        let mut events = Vec::new();
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
                events.extend(slot.markers.pop_front().map(|m| (other as u32, m.event)));
            }
            slot.backoff = 0;
        }
        events
    }

    /// A wait of one stream for a marker of another was queued.
    pub(crate) fn ordered(&mut self, stream: u32, other: u32, bound: u64, row: &[u64]) {
        let mine = &mut self.slots[stream as usize].row;
        let own = (other as usize, bound);
        for (at, ticket) in row.iter().copied().enumerate().chain([own]) {
            if at == stream as usize {
                continue;
            }
            if at >= mine.len() {
                mine.resize(at + 1, 0);
            }
            mine[at] = mine[at].max(ticket);
        }
    }
}

impl std::ops::Index<u32> for Streams {
    type Output = Slot;
    fn index(&self, stream: u32) -> &Slot {
        &self.slots[stream as usize]
    }
}

impl std::ops::IndexMut<u32> for Streams {
    fn index_mut(&mut self, stream: u32) -> &mut Slot {
        &mut self.slots[stream as usize]
    }
}
