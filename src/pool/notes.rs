//! What a typed pool notes about its buffers: hints and names, no books. Whether memory is free only
//! the allocator says.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::Arc;

use super::places::Cache;
use super::typed::TypedStats;
use crate::allocator::Mixed;
use crate::driver::{Stream, StreamKind, sys};

/// Returned addresses that are remembered for each stream and size.
const REMEMBERED: usize = 32;
/// Stream and size pairs of which addresses are remembered.
const PAIRS: usize = 256;
/// Remembered addresses to try for one request.
pub(super) const TRIES: usize = 4;
/// Sizes, by their last bits, whose addresses are found without a search.
const RECENT: usize = 64;

/// What a request looks for.
#[derive(Clone, Copy)]
pub(super) struct Sought {
    pub stream: u64,
    pub bytes: usize,
    /// The rounded length.
    pub capacity: usize,
    pub element: TypeId,
}

/// Where buffers of one size that a stream returned were, the latest first.
struct Returned {
    stream: u64,
    bytes: usize,
    /// A ring.
    addresses: [sys::CUdeviceptr; REMEMBERED],
    /// Where the next one goes.
    next: usize,
    count: usize,
}

impl Returned {
    #[inline]
    fn is_of(&self, stream: u64, bytes: usize) -> bool {
        self.stream == stream && self.bytes == bytes
    }

    /// The address that was returned `back` returns ago.
    #[inline]
    fn ago(&self, back: usize) -> sys::CUdeviceptr {
        self.addresses[(self.next + REMEMBERED - 1 - back) % REMEMBERED]
    }

    #[inline]
    fn push(&mut self, address: sys::CUdeviceptr) {
        self.addresses[self.next % REMEMBERED] = address;
        self.next = (self.next + 1) % REMEMBERED;
        self.count = (self.count + 1).min(REMEMBERED);
    }

    #[inline]
    fn pop(&mut self) {
        self.next = (self.next + REMEMBERED - 1) % REMEMBERED;
        self.count -= 1;
    }

    fn remove(&mut self, address: sys::CUdeviceptr) {
        let Some(at) = (0..self.count).find(|back| self.ago(*back) == address) else {
            return;
        };
        for back in (0..at).rev() {
            let slot = (self.next + REMEMBERED - 2 - back) % REMEMBERED;
            self.addresses[slot] = self.ago(back);
        }
        self.pop();
    }
}

/// A live buffer as others may name it.
struct Live {
    sought: Sought,
    /// 0 where it cannot be named.
    address: sys::CUdeviceptr,
    /// Its stream is the one of [`Notes::home`].
    lent: bool,
}

/// The stream of most buffers: one clone for all of them.
struct Home {
    stream: Stream,
    id: u64,
    users: usize,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Notes {
    returned: Vec<Returned>,
    /// By stream and bytes, and those met last by bytes alone.
    places: HashMap<(u64, usize), usize, Mixed>,
    recent: Recent,
    /// Live buffers, and vacant places between them.
    live: Vec<Live>,
    vacant: Vec<u32>,
    home: Option<Home>,
    /// Holds the cache while buffers are live, or may be at any time.
    keep: Option<Arc<Cache>>,
    closed: bool,
    pub stats: TypedStats,
}

struct Recent([usize; RECENT]);

impl Default for Recent {
    fn default() -> Self {
        Recent([0; RECENT])
    }
}

/// What goes when notes are closed: to be dropped without a lock.
#[derive(Default)]
pub(super) struct Gone {
    _stream: Option<Stream>,
    _cache: Option<Arc<Cache>>,
}

impl Notes {
    // ---- hints -----------------------------------------------------------------------------

    /// Where the addresses of a stream and size are.
    #[inline]
    fn place(&mut self, stream: u64, bytes: usize) -> Option<usize> {
        let recent = self.recent.0[bytes / 256 % RECENT];
        let known = self.returned.get(recent);
        if known.is_some_and(|known| known.is_of(stream, bytes)) {
            return Some(recent);
        }
        self.search(stream, bytes)
    }

    #[cold]
    fn search(&mut self, stream: u64, bytes: usize) -> Option<usize> {
        let at = *self.places.get(&(stream, bytes))?;
        self.recent.0[bytes / 256 % RECENT] = at;
        Some(at)
    }

    /// The addresses returned last, the newest first, and how many they are.
    pub fn hints(&mut self, sought: &Sought) -> ([sys::CUdeviceptr; TRIES], usize) {
        let mut hints = [0; TRIES];
        let Some(at) = self.place(sought.stream, sought.bytes) else {
            return (hints, 0);
        };
        let known = &self.returned[at];
        let count = known.count.min(TRIES);
        for (back, hint) in hints[..count].iter_mut().enumerate() {
            *hint = known.ago(back);
        }
        (hints, count)
    }

    #[inline]
    pub fn remember(&mut self, stream: u64, bytes: usize, address: sys::CUdeviceptr) {
        match self.place(stream, bytes) {
            Some(at) => self.returned[at].push(address),
            None => self.remember_first(stream, bytes, address),
        }
    }

    #[cold]
    fn remember_first(&mut self, stream: u64, bytes: usize, address: sys::CUdeviceptr) {
        if self.returned.len() >= PAIRS {
            self.returned.clear();
            self.places.clear();
        }
        self.places.insert((stream, bytes), self.returned.len());
        let mut first = Returned {
            stream,
            bytes,
            addresses: [0; REMEMBERED],
            next: 0,
            count: 0,
        };
        first.push(address);
        self.returned.push(first);
    }

    /// Memory at an address is not what was returned there any more.
    pub fn forget(&mut self, stream: u64, bytes: usize, address: sys::CUdeviceptr) {
        if let Some(at) = self.place(stream, bytes) {
            self.returned[at].remove(address);
        }
    }

    // ---- live buffers ----------------------------------------------------------------------

    /// What a request for memory of the latest return is to get: that address, or 0 if there was
    /// none. `None` if there is more to do first than to take it.
    #[inline]
    pub fn latest(&mut self, sought: &Sought) -> Option<(sys::CUdeviceptr, usize)> {
        self.keep.as_ref()?;
        let Some(at) = self.place(sought.stream, sought.bytes) else {
            return Some((0, usize::MAX));
        };
        let known = &self.returned[at];
        if known.count == 0 {
            return Some((0, usize::MAX));
        }
        Some((known.ago(0), at))
    }

    /// The request got it: a hit. Its place, and whether its stream is lent to it.
    #[inline]
    pub fn taken(
        &mut self,
        sought: &Sought,
        latest: usize,
        address: sys::CUdeviceptr,
    ) -> (u32, bool) {
        if let Some(known) = self.returned.get_mut(latest) {
            known.pop();
        }
        self.stats.hits += 1;
        let mut lent = false;
        if let Some(home) = &mut self.home
            && home.id == sought.stream
        {
            home.users += 1;
            lent = true;
        }
        let live = Live {
            sought: *sought,
            address,
            lent,
        };
        (self.occupy(live), lent)
    }

    /// Enters a buffer that was obtained otherwise.
    pub fn enter(&mut self, sought: &Sought, address: u64, cache: &Arc<Cache>) -> u32 {
        if self.keep.is_none() {
            self.keep = Some(Arc::clone(cache));
        }
        self.occupy(Live {
            sought: *sought,
            address,
            lent: false,
        })
    }

    #[inline]
    fn occupy(&mut self, live: Live) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            if let Some(place) = self.live.get_mut(slot as usize) {
                *place = live;
            }
            return slot;
        }
        self.live.push(live);
        (self.live.len() - 1) as u32
    }

    /// A buffer is to be returned on another stream than its own.
    pub fn move_to(&mut self, slot: u32, stream: u64) {
        if let Some(live) = self.live.get_mut(slot as usize) {
            live.sought.stream = stream;
        }
    }

    /// Just before a buffer is freed: from then on its address may be somebody else's. Who takes the
    /// hint before the memory is free does not get it, and loses no more than the hint.
    #[inline]
    pub fn leave(&mut self, slot: u32) {
        let Some(live) = self.live.get_mut(slot as usize) else {
            return;
        };
        let (sought, address) = (live.sought, std::mem::take(&mut live.address));
        self.stats.returns += 1;
        self.remember(sought.stream, sought.bytes, address);
    }

    /// After a [`leave`](Self::leave) the buffer could not be freed.
    pub fn stay(&mut self, slot: u32, address: sys::CUdeviceptr) {
        let Some(live) = self.live.get_mut(slot as usize) else {
            return;
        };
        live.address = address;
        let sought = live.sought;
        self.stats.returns = self.stats.returns.saturating_sub(1);
        self.forget(sought.stream, sought.bytes, address);
    }

    /// A buffer is gone.
    #[inline]
    pub fn end(&mut self, slot: u32) -> Gone {
        if let (Some(live), Some(home)) = (self.live.get(slot as usize), &mut self.home)
            && live.lent
        {
            home.users -= 1;
        }
        self.vacant.push(slot);
        if self.closed {
            return self.close();
        }
        Gone::default()
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn named(&self, capacity: usize, element: TypeId) -> impl Iterator<Item = u64> {
        let live = self.live.iter().filter(move |live| {
            let sought = &live.sought;
            live.address != 0 && sought.capacity == capacity && sought.element == element
        });
        live.map(|live| live.address)
    }

    // ---- streams and the end ---------------------------------------------------------------

    /// Whether this stream could be lent from now on: it may be kept, is not lent yet, and nobody uses
    /// the one that is.
    pub fn may_lend(&self, stream: &Stream, id: u64) -> bool {
        matches!(
            stream.kind(),
            StreamKind::Owned | StreamKind::LegacyDefault
        ) && self
            .home
            .as_ref()
            .is_none_or(|home| home.users == 0 && home.id != id)
    }

    /// Lends this stream from now on. Returns the one before.
    pub fn lend(&mut self, stream: &Stream, id: u64) -> Option<Stream> {
        let before = self.home.replace(Home {
            stream: stream.clone(),
            id,
            users: 0,
        });
        before.map(|home| home.stream)
    }

    /// The stream that is lent, if nobody uses it and only this and the allocator hold it still.
    pub fn idle_stream(&mut self) -> Option<Stream> {
        let home = self.home.as_ref()?;
        if home.users > 0 || home.stream.holders() > 2 {
            return None;
        }
        self.home.take().map(|home| home.stream)
    }

    /// Nobody can take buffers any more: the last one that comes back ends everything.
    pub fn close(&mut self) -> Gone {
        self.closed = true;
        if self.live.len() > self.vacant.len() {
            return Gone::default();
        }
        Gone {
            _stream: self.home.take().map(|home| home.stream),
            _cache: self.keep.take(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_remembers_the_latest_and_forgets_any() {
        let mut notes = Notes::default();
        let sought = |bytes| Sought {
            stream: 7,
            bytes,
            capacity: bytes,
            element: TypeId::of::<u8>(),
        };
        for address in 1..=40 {
            notes.remember(7, 512, address);
        }
        notes.remember(7, 512 + 64 * 256, 99);
        assert_eq!(notes.hints(&sought(512)), ([40, 39, 38, 37], 4));
        for gone in [39, 41, 8, 40, 9] {
            notes.forget(7, 512, gone);
        }
        assert_eq!(notes.hints(&sought(512)), ([38, 37, 36, 35], 4));
        for address in (12..=38).rev() {
            notes.forget(7, 512, address);
        }
        // Of 40 the first eight were too many.
        assert_eq!(notes.hints(&sought(512)), ([11, 10, 0, 0], 2));
        assert_eq!(notes.hints(&sought(512 + 64 * 256)).1, 1);
        assert_eq!(notes.hints(&sought(256)).1, 0);
    }
}
