//! What a typed pool notes about its buffers: hints and names, no books. Whether memory is free only
//! the allocator says.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::Arc;

use crate::allocator::Mixed;
use crate::driver::{Stream, StreamKind, sys};

/// Stream and size pairs of which returns are remembered.
const PAIRS: usize = 256;
/// Remembered addresses to try for one request.
pub(super) const TRIES: usize = 4;
/// Sizes, by their last bits, that are found without a search.
const RECENT: usize = 64;
/// No note.
const NIL: u32 = u32::MAX;

/// What a [`TypedPool`](super::TypedPool) counted since the start or the last reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TypedStats {
    /// Requests served from memory at hand.
    pub hits: u64,
    /// Requests that were not.
    pub misses: u64,
    /// Buffers that came back.
    pub returns: u64,
}

impl TypedStats {
    pub(super) fn add(&mut self, other: TypedStats) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.returns += other.returns;
    }
}

/// What a request looks for.
#[derive(Clone, Copy)]
pub(super) struct Sought {
    pub stream: u64,
    pub bytes: usize,
    /// The rounded length.
    pub capacity: usize,
    pub element: TypeId,
}

/// A live buffer as others may name it; then, where its memory was.
struct Note {
    address: sys::CUdeviceptr,
    sought: Sought,
    /// Its size's place.
    size: u32,
    /// The one that was returned before, or the next vacant one.
    next: u32,
    live: bool,
    /// Its stream is the one of [`Notes::home`].
    lent: bool,
}

/// Buffers of one size that a stream returned.
struct Size {
    stream: u64,
    bytes: usize,
    /// The last one.
    latest: u32,
}

impl Size {
    #[inline(always)]
    fn is_of(&self, stream: u64, bytes: usize) -> bool {
        self.stream == stream && self.bytes == bytes
    }
}

/// The stream of most buffers: one clone for all of them.
struct Home {
    stream: Stream,
    users: usize,
}

struct Recent([u32; RECENT]);

impl Default for Recent {
    fn default() -> Self {
        Recent([NIL; RECENT])
    }
}

/// See the module's text. As many notes are kept as there were buffers at once.
pub(super) struct Notes {
    notes: Vec<Note>,
    /// The first of those that stand for nothing.
    vacant: u32,
    sizes: Vec<Size>,
    /// Of a size by stream and bytes, and of those met last by bytes alone.
    places: HashMap<(u64, usize), u32, Mixed>,
    recent: Recent,
    /// Of the size that was asked for last.
    asked: u32,
    home: Option<Home>,
    /// Buffers that are not gone.
    users: usize,
    /// Keeps whose notes they are until that is closed and the last buffer gone.
    keep: Option<Owner>,
    closed: bool,
    pub stats: TypedStats,
}

impl Default for Notes {
    fn default() -> Self {
        Notes {
            notes: Vec::new(),
            vacant: NIL,
            sizes: Vec::new(),
            places: HashMap::default(),
            recent: Recent::default(),
            asked: NIL,
            home: None,
            users: 0,
            keep: None,
            closed: false,
            stats: TypedStats::default(),
        }
    }
}

/// A buffer that is not live any more, and not gone yet.
#[must_use]
pub(super) struct Left {
    lent: bool,
}

/// Whoever has notes: to be kept, no more.
pub(super) type Owner = Arc<dyn Send + Sync>;

/// What goes when notes are closed: to be dropped without a lock.
#[derive(Default)]
pub(super) struct Gone {
    _stream: Option<Stream>,
    _owner: Option<Owner>,
}

impl Notes {
    // ---- sizes -----------------------------------------------------------------------------

    /// The place of a size that is known.
    #[inline(always)]
    fn place(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        let recent = self.recent.0[bytes / 256 % RECENT];
        let known = self.sizes.get(recent as usize);
        if known.is_some_and(|size| size.is_of(stream, bytes)) {
            return Some(recent);
        }
        self.search(stream, bytes)
    }

    #[cold]
    #[inline(never)]
    fn search(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        let at = *self.places.get(&(stream, bytes))?;
        self.recent.0[bytes / 256 % RECENT] = at;
        Some(at)
    }

    #[inline(never)]
    fn place_or_new(&mut self, stream: u64, bytes: usize) -> u32 {
        if let Some(at) = self.place(stream, bytes) {
            return at;
        }
        if self.sizes.len() >= PAIRS {
            self.forget_all();
        }
        let at = self.sizes.len() as u32;
        self.places.insert((stream, bytes), at);
        self.sizes.push(Size {
            stream,
            bytes,
            latest: NIL,
        });
        at
    }

    /// Notes of live buffers find a new place for their size when they need it.
    fn forget_all(&mut self) {
        for size in std::mem::take(&mut self.sizes) {
            let mut at = size.latest;
            while let Some(note) = self.notes.get_mut(at as usize) {
                let next = std::mem::replace(&mut note.next, self.vacant);
                self.vacant = std::mem::replace(&mut at, next);
            }
        }
        self.places.clear();
    }

    // ---- hints -----------------------------------------------------------------------------

    /// Addresses of the buffers returned last, the newest first, and how many they are.
    pub fn hints(&mut self, sought: &Sought) -> ([sys::CUdeviceptr; TRIES], usize) {
        let mut hints = [0; TRIES];
        let Some(place) = self.place(sought.stream, sought.bytes) else {
            return (hints, 0);
        };
        let (mut at, mut count) = (self.sizes[place as usize].latest, 0);
        while count < TRIES
            && let Some(note) = self.notes.get(at as usize)
        {
            hints[count] = note.address;
            at = note.next;
            count += 1;
        }
        (hints, count)
    }

    /// Memory at one of the [`hints`](Self::hints) is not as it was returned any more.
    pub fn forget(&mut self, sought: &Sought, address: sys::CUdeviceptr) {
        let Some(place) = self.place(sought.stream, sought.bytes) else {
            return;
        };
        let (mut at, mut before) = (self.sizes[place as usize].latest, NIL);
        for _ in 0..TRIES {
            let Some(note) = self.notes.get_mut(at as usize) else {
                return;
            };
            if note.address == address {
                let next = std::mem::replace(&mut note.next, self.vacant);
                self.vacant = at;
                match self.notes.get_mut(before as usize) {
                    Some(before) => before.next = next,
                    None => self.sizes[place as usize].latest = next,
                }
                return;
            }
            (before, at) = (at, note.next);
        }
    }

    /// Notes where memory of a stream was that nobody names.
    pub fn remember(&mut self, sought: &Sought, address: sys::CUdeviceptr) {
        let at = self.occupy(sought, address);
        self.users += 1;
        let left = self.leave(at);
        debug_assert!(!left.lent);
        self.users -= 1;
    }

    // ---- live buffers ----------------------------------------------------------------------

    /// Where a request of a known size is to get memory: at the address of the latest return; 0, where
    /// there is none, is anywhere. `None` if more is to be done than to take it.
    #[inline(always)]
    pub fn latest(&mut self, sought: &Sought) -> Option<sys::CUdeviceptr> {
        self.keep.as_ref()?;
        let place = self.place(sought.stream, sought.bytes)?;
        self.asked = place;
        let latest = self.sizes.get(place as usize)?.latest;
        let note = self.notes.get(latest as usize);
        Some(note.map_or(0, |note| note.address))
    }

    /// The request that [`latest`](Self::latest) was asked for got it: a hit. Its note, and whether its
    /// stream is lent to it.
    #[inline(always)]
    pub fn taken(
        &mut self,
        sought: &Sought,
        address: sys::CUdeviceptr,
        stream: &Stream,
    ) -> (u32, bool) {
        self.stats.hits += 1;
        self.users += 1;
        let mut lent = false;
        if let Some(home) = &mut self.home
            && home.stream.is_clone_of(stream)
        {
            home.users += 1;
            lent = true;
        }
        if let Some(size) = self.sizes.get_mut(self.asked as usize)
            && let Some(note) = self.notes.get_mut(size.latest as usize)
        {
            let at = std::mem::replace(&mut size.latest, note.next);
            note.sought.capacity = sought.capacity;
            note.sought.element = sought.element;
            note.live = true;
            note.lent = lent;
            return (at, lent);
        }
        (self.occupy_lent(sought, address, lent), lent)
    }

    #[inline(never)]
    fn occupy_lent(&mut self, sought: &Sought, address: sys::CUdeviceptr, lent: bool) -> u32 {
        let at = self.occupy(sought, address);
        self.notes[at as usize].lent = lent;
        at
    }

    fn occupy(&mut self, sought: &Sought, address: sys::CUdeviceptr) -> u32 {
        let new = Note {
            address,
            sought: *sought,
            size: self.place_or_new(sought.stream, sought.bytes),
            next: NIL,
            live: true,
            lent: false,
        };
        let at = self.vacant;
        if let Some(note) = self.notes.get_mut(at as usize) {
            self.vacant = note.next;
            *note = new;
            return at;
        }
        self.notes.push(new);
        (self.notes.len() - 1) as u32
    }

    /// Enters a buffer that was obtained otherwise.
    pub fn enter(
        &mut self,
        sought: &Sought,
        address: u64,
        owner: &Arc<impl Send + Sync + 'static>,
    ) -> u32 {
        if self.keep.is_none() {
            let owner: Owner = owner.clone();
            self.keep = Some(owner);
        }
        self.users += 1;
        self.occupy(sought, address)
    }

    /// A buffer is to be returned on another stream than its own.
    pub fn move_to(&mut self, at: u32, stream: u64) {
        if let Some(note) = self.notes.get_mut(at as usize) {
            note.sought.stream = stream;
        }
    }

    /// Before a buffer is freed: from then on its address may be somebody else's. Who takes the hint
    /// before the memory is free does not get it, and loses no more than the hint.
    #[inline(always)]
    pub fn leave(&mut self, at: u32) -> Left {
        let Some(note) = self.notes.get_mut(at as usize) else {
            return Left { lent: false };
        };
        let left = Left { lent: note.lent };
        let (stream, bytes) = (note.sought.stream, note.sought.bytes);
        self.stats.returns += 1;
        note.live = false;
        note.lent = false;
        match self.sizes.get_mut(note.size as usize) {
            Some(size) if size.is_of(stream, bytes) => {
                note.next = std::mem::replace(&mut size.latest, at);
            }
            _ => self.leave_elsewhere(at),
        }
        left
    }

    /// The size of a buffer is not where it was when it came.
    #[cold]
    #[inline(never)]
    fn leave_elsewhere(&mut self, at: u32) {
        let Sought { stream, bytes, .. } = self.notes[at as usize].sought;
        let place = self.place_or_new(stream, bytes);
        let note = &mut self.notes[at as usize];
        note.size = place;
        note.next = std::mem::replace(&mut self.sizes[place as usize].latest, at);
    }

    /// After a [`leave`](Self::leave) a buffer could not be freed, and has a new note.
    pub fn stay(&mut self, sought: &Sought, address: sys::CUdeviceptr, left: &Left) -> u32 {
        self.stats.returns = self.stats.returns.saturating_sub(1);
        self.forget(sought, address);
        self.occupy_lent(sought, address, left.lent)
    }

    /// What was looked for when a buffer was taken.
    pub fn sought(&self, at: u32) -> Option<Sought> {
        Some(self.notes.get(at as usize)?.sought)
    }

    /// A buffer that left is gone. True if it was the last one: [`close`](Self::close) is to be called
    /// again, by this caller.
    #[inline(always)]
    pub fn end(&mut self, left: Left) -> bool {
        self.users -= 1;
        if left.lent
            && let Some(home) = &mut self.home
        {
            home.users -= 1;
        }
        self.closed && self.users == 0
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn named(&self, capacity: usize, element: TypeId) -> impl Iterator<Item = u64> {
        let live = self.notes.iter().filter(move |note| {
            let sought = &note.sought;
            note.live && sought.capacity == capacity && sought.element == element
        });
        live.map(|note| note.address)
    }

    // ---- streams and the end ---------------------------------------------------------------

    /// Whether this stream could be lent from now on: it may be kept, is not lent yet, and nobody uses
    /// the one that is.
    pub fn may_lend(&self, stream: &Stream) -> bool {
        let kind = stream.kind();
        let home = self.home.as_ref();
        matches!(kind, StreamKind::Owned | StreamKind::LegacyDefault)
            && home.is_none_or(|home| home.users == 0 && !home.stream.is_clone_of(stream))
    }

    /// Lends this stream from now on. Returns the one before.
    pub fn lend(&mut self, stream: &Stream) -> Option<Stream> {
        let before = self.home.replace(Home {
            stream: stream.clone(),
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

    /// Nobody can take buffers any more: the last one that goes ends everything, or this if there is
    /// none.
    pub fn close(&mut self) -> Gone {
        self.closed = true;
        if self.users > 0 {
            return Gone::default();
        }
        Gone {
            _stream: self.home.take().map(|home| home.stream),
            _owner: self.keep.take(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sought(bytes: usize) -> Sought {
        Sought {
            stream: 7,
            bytes,
            capacity: bytes,
            element: TypeId::of::<u8>(),
        }
    }

    #[test]
    fn hints_are_the_latest_returns_and_any_is_forgotten() {
        let mut notes = Notes::default();
        // The second finds the place of the first where it looks first.
        for bytes in [512, 512 + RECENT * 256] {
            for address in 1..=6 {
                notes.remember(&sought(bytes), address);
            }
        }
        assert_eq!(notes.hints(&sought(512)), ([6, 5, 4, 3], 4));
        for gone in [5, 9, 6] {
            notes.forget(&sought(512), gone);
        }
        assert_eq!(notes.hints(&sought(512)), ([4, 3, 2, 1], 4));
        notes.remember(&sought(512), 8);
        assert_eq!(notes.hints(&sought(512)), ([8, 4, 3, 2], 4));
        assert_eq!(notes.notes.len(), 12, "vacant notes are used again");
        let other = sought(512 + RECENT * 256);
        assert_eq!(notes.hints(&other), ([6, 5, 4, 3], 4));
        assert_eq!(notes.hints(&sought(256)).1, 0);
        assert_eq!((notes.stats.returns, notes.users), (13, 0));
    }

    /// Sizes without number do not fill the memory, and a buffer finds its own again.
    #[test]
    fn many_sizes_are_forgotten_together() {
        let mut notes = Notes::default();
        let live = notes.occupy(&sought(64), 1);
        notes.users += 1;
        for bytes in 100..100 + 3 * PAIRS {
            notes.remember(&sought(bytes), bytes as u64);
        }
        assert!(notes.sizes.len() <= PAIRS && notes.notes.len() <= PAIRS + 1);
        assert_eq!(notes.named(64, TypeId::of::<u8>()).next(), Some(1));
        let left = notes.leave(live);
        assert!(!notes.end(left));
        assert_eq!(notes.hints(&sought(64)), ([1, 0, 0, 0], 1));
        assert_eq!(notes.named(64, TypeId::of::<u8>()).next(), None);
    }
}
