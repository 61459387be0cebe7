//! The caches of small and large blocks in front of the heap.

pub(crate) mod deferred;
pub(crate) mod front;
pub(crate) mod grant;
pub(crate) mod habits;

use std::collections::HashMap;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};

use crate::allocator::cache::front::{
    Amounts, Front, Held, Inner, KeepAlive, Node, PageTable, QUANTITIES, Run,
};
use crate::allocator::cache::habits::Habits;
use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::record::Recorded;
use crate::allocator::extent::uses::Uses;
use crate::allocator::stream::slot::StreamKey;

/// Small blocks that were freed while other streams may still use them.
#[derive(Debug)]
pub(crate) struct HeldBack {
    pub front: &'static Front,
    /// Slot of the stream whose front it is.
    pub owner: u32,
    pub uses: Uses,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// What the books know of all fronts together.
#[derive(Debug)]
pub(crate) struct Fronts {
    /// The allocator, for the fronts that keep it alive.
    pub owner: Weak<dyn KeepAlive>,
    /// The allocator's number.
    pub id: u64,
    /// Which front has which page.
    pub table: Arc<PageTable>,
    /// Packed: page address to its record in the small arena.
    pub page_ids: HashMap<u64, u32, Mixed>,
    /// Threads that can run at once.
    pub threads: usize,
    /// By rank.
    pub(crate) all: Vec<&'static Front>,
    /// By the slot of their stream.
    by_stream: Vec<Vec<&'static Front>>,
    /// What the fronts may count to together.
    pub(crate) limit: u64,
    /// Most requested bytes and most blocks among those that are not small, since the fronts' own peaks
    /// were last reset.
    pub(crate) high: [u64; 2],
    /// Requested bytes of small blocks as of the last look.
    pub requested: u64,
    pub(crate) sharings: u64,
    pub held_back: Vec<HeldBack>,
    pub habits: Habits,
    /// Large requests until shelves keep to the order of the books again: threads met at their lock.
    pub crowd: u32,
    /// Blocks on shelves, held by somebody or not, for those who do not hold the lock of the books, under
    /// which it changes.
    pub(crate) on_shelves: Arc<AtomicU32>,
    /// On whose shelf a block lies, by its record.
    pub shelved: HashMap<u32, &'static Front, Mixed>,
    /// The block on a shelf that must leave it when anything else happens in the books.
    pub loose: Option<u32>,
    /// Streams whose markers are due for what came off the shelves.
    pub due: Vec<(u32, StreamKey)>,
    /// Uses of live small blocks that their fronts cannot note themselves, by address.
    pub recorded: HashMap<u64, Vec<Recorded>>,
    /// Small requests that did not find room in their front at once.
    pub misses: u64,
    /// Of fronts that are gone: everything ever added.
    pub(crate) gone: [u64; QUANTITIES],
    /// and everything that was handed out from their shelves again.
    pub(crate) reused: Amounts,
    pub(crate) pending_peak: u64,
}

impl Fronts {
    pub(crate) fn new((owner, id): (Weak<dyn KeepAlive>, u64), table: Arc<PageTable>) -> Self {
        Fronts {
            owner,
            id,
            table,
            page_ids: HashMap::default(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            all: Vec::new(),
            by_stream: Vec::new(),
            limit: 0,
            high: [0; 2],
            requested: 0,
            sharings: 0,
            held_back: Vec::new(),
            habits: Habits::default(),
            crowd: 0,
            on_shelves: Arc::default(),
            shelved: HashMap::default(),
            loose: None,
            due: Vec::new(),
            recorded: HashMap::default(),
            misses: 0,
            gone: [0; QUANTITIES],
            reused: Amounts::default(),
            pending_peak: 0,
        }
    }

    /// Every front, by rank.
    pub(crate) fn all(&self) -> &[&'static Front] {
        &self.all
    }

    /// The fronts of a stream: where its small blocks come from.
    #[inline]
    pub(crate) fn of(&self, stream: u32) -> &[&'static Front] {
        let own = self.by_stream.get(stream as usize);
        own.map_or(&[], Vec::as_slice)
    }

    /// Adds a front to those of a stream.
    pub(crate) fn add(&mut self, stream: u32, front: &'static Front) {
        let known = self.by_stream.len().max(stream as usize + 1);
        self.by_stream.resize_with(known, Vec::new);
        self.by_stream[stream as usize].push(front);
        let at = self.all.partition_point(|f| f.rank < front.rank);
        self.all.insert(at, front);
    }

    /// Takes the fronts of a stream out, with all that they ever counted.
    pub(crate) fn remove(&mut self, stream: u32) -> Vec<&'static Front> {
        let own = self.by_stream.get_mut(stream as usize);
        let fronts = own.map(std::mem::take).unwrap_or_default();
        for front in &fronts {
            let inner = front.lock();
            self.limit -= inner.accounts.allocated.limit();
            for (gone, total) in self.gone.iter_mut().zip(inner.accounts.totals()) {
                *gone += total;
            }
            self.reused += inner.shelf.reused();
            self.pending_peak += inner.pending_peak;
        }
        self.all
            .retain(|front| !fronts.iter().any(|gone| std::ptr::eq(*gone, *front)));
        fronts
    }

    /// Lets the fronts of a stream work without a look at the books, or stops them.
    pub(crate) fn set_fast(&self, stream: u32, fast: bool) {
        for front in self.of(stream) {
            front.lock().set_fast(fast);
        }
    }

    /// The ticket that a stream's fronts give what is freed from now on.
    pub(crate) fn set_ticket(&self, stream: u32, ticket: u64) {
        for front in self.of(stream) {
            front.lock().runs.set_ticket(ticket);
        }
    }

    /// Pages in the fronts of a stream.
    pub(crate) fn pages_of(&self, stream: u32) -> usize {
        let pages = |front: &&'static Front| front.lock().runs.page_count();
        self.of(stream).iter().map(pages).sum()
    }

    /// Everything that a stream's fronts know to be in use: live blocks, uses recorded on it, and
    /// pages.
    pub(crate) fn uses_of(&self, stream: u32) -> u64 {
        let (mut blocks, mut recorded) = (0, 0);
        for front in self.of(stream) {
            let inner = front.lock();
            blocks += inner.runs.page_count() as u64;
            blocks += inner.accounts.blocks.current() + u64::from(inner.waiting);
            recorded += inner.recorded;
        }
        blocks + u64::try_from(recorded).unwrap_or(0)
    }

    /// So many uses that were recorded on a stream are over.
    pub(crate) fn uncount_recorded(&self, stream: u32, count: i64) {
        if let Some(front) = self.of(stream).first() {
            front.lock().recorded -= count;
        }
    }

    /// Uses of a stream on live small blocks, as far as the books keep them.
    pub(crate) fn small_uses(&self, stream: u32) -> u64 {
        let uses = self.recorded.values().flatten();
        uses.filter(|r| r.stream == stream).count() as u64
    }

    /// The live small block around an address, with its front and the slot of its stream.
    pub(crate) fn small_around(&self, ptr: u64) -> Option<(&'static Front, Run, u32)> {
        let (front, page) = self.table.find(ptr)?;
        let inner = front.lock();
        if inner.allocator != self.id {
            return None;
        }
        let run = inner.runs.around(page, ptr)?;
        run.live?;
        Some((front, run, inner.slot))
    }

    /// The streams for which blocks of a front are held back.
    pub(crate) fn held_back_for(&self, front: &'static Front) -> Vec<u32> {
        let held = self.held_back.iter();
        let own = held.filter(|held| std::ptr::eq(held.front, front));
        own.flat_map(|held| held.uses.as_slice())
            .map(|u| u.stream)
            .collect()
    }

    pub(crate) fn lock_fronts(&self) -> Vec<Locked<'static>> {
        self.all.iter().map(|front| front.lock()).collect()
    }

    /// Live small blocks in fronts.
    pub(crate) fn small_totals(&mut self) -> SmallTotals {
        let totals = totals(&self.lock_fronts());
        self.requested = totals[1];
        totals
    }

    /// Free bytes in the pages of each stream that has any, by its slot.
    pub(crate) fn free_in_fronts(&self) -> Vec<(u32, u64)> {
        let free = self.all.iter().map(|front| {
            let inner = front.lock();
            (inner.slot, inner.free_bytes() + inner.pending_bytes())
        });
        free.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// What the books count for blocks on shelves that nobody holds.
    pub(crate) fn held_on_shelves(&self) -> Amounts {
        let mut held = Amounts::default();
        for front in self.all() {
            held += front.lock().shelf.held();
        }
        held
    }
}

pub(crate) type Locked<'a> = Held<'a, Inner>;

/// Live small blocks: bytes, bytes as asked for, and their number.
pub(crate) type SmallTotals = [u64; QUANTITIES];

pub(crate) fn totals(locked: &[Locked<'_>]) -> SmallTotals {
    let mut totals = [0; QUANTITIES];
    for inner in locked {
        for (total, own) in totals.iter_mut().zip(inner.accounts.current()) {
            *total += own;
        }
    }
    totals
}
