//! The books' side of the shelves: which large blocks lie on them, and how they come back.
//!
//! The books do not see what a front does with the blocks on its shelf. Whoever wants to know more
//! of a large block than its place takes it off first, and whoever needs memory that is not ready
//! takes everything off that nobody holds.

use std::sync::atomic::Ordering;

use super::engine::{Engine, Guard};
use super::front::Front;
use super::front::{Shelved, cache};
use super::grant::Grant;
use super::invariant::{CheckError, holds, same};
use super::records::State as Extent;
use super::size::GRANULE;
use super::slot::Holder;
use super::state::State;

/// Large requests in the books after which nobody waits for them any more, if nobody did meanwhile.
const CROWD: u32 = 256;

impl Engine {
    /// Allocates a large block from the shelf of the front that the thread used last for the stream.
    #[inline(never)]
    pub(crate) fn allocate_shelved(&self, key: u64, bytes: usize) -> Option<Grant> {
        let granules = u32::try_from((bytes as u64).div_ceil(GRANULE)).ok()?;
        let front = cache::find(key)?;
        let mut inner = front.lock();
        if !inner.serves(self.owner(key)) {
            return None;
        }
        let block = inner.shelf.take(granules, bytes as u64)?;
        drop(inner);
        let (life, size) = ((block.id, block.generation), (granules, bytes as u64));
        let mut grant = Grant::large(front, block.ptr, life, size);
        grant.set_shelved(true);
        Some(grant)
    }

    /// Records the markers that are due for what came off the shelves, in a call that names a stream. Of
    /// other streams only on those that we keep alive: since a block was freed to a shelf its stream may have
    /// been destroyed, and its handle be another's by now. Its next marker covers that free, too.
    pub(crate) fn mark_due<'a>(&'a self, mut state: Guard<'a>, named: u32) -> Guard<'a> {
        if state.fronts.due.is_empty() {
            return state;
        }
        let mut due = std::mem::take(&mut state.fronts.due);
        due.retain(|(stream, _)| {
            *stream == named || matches!(state.streams[*stream].holder, Holder::Kept(_))
        });
        drop(state);
        self.mark_all(due);
        self.lock()
    }
}

impl State {
    /// A block was handed out by the books: puts it on the shelf of its front if that may be of use. Not
    /// one for which a request had wishes: another one would get a place elsewhere. Whether it is there.
    #[inline]
    pub(crate) fn shelve(&mut self, id: u32, front: &'static Front, plain: bool) -> bool {
        let granules = self.extents.records[id].granules;
        let again = self.fronts.habits.allocated(id, granules);
        plain && (again || self.fronts.crowd > 0) && self.put_on_shelf(id, front)
    }

    #[inline(never)]
    fn put_on_shelf(&mut self, id: u32, front: &'static Front) -> bool {
        let (hot, cold) = (self.extents.records[id], self.extents.records.cold(id));
        if !cold.home().is_empty() {
            return false;
        }
        let requested = cold.requested;
        if self.fronts.crowd == 0 {
            // Somebody else's may have come since this request took the last one off: the books were
            // let go for a call of the driver, or of a hook.
            self.unshelve_loose();
        }
        let block = Shelved {
            id,
            generation: hot.generation,
            ptr: hot.addr,
            granules: hot.granules,
            counted: requested,
            requested,
            reuses: 0,
        };
        let gone = {
            let mut inner = front.lock();
            if !inner.is_fast() || inner.slot != hot.stream {
                return false;
            }
            inner.shelf.add(block)
        };
        if self.fronts.crowd == 0 {
            self.fronts.loose = Some(id);
        }
        self.extents.records[id].shelved = true;
        self.fronts.shelved.insert(id, front);
        self.fronts.on_shelves.fetch_add(1, Ordering::Relaxed);
        if let Some(gone) = gone {
            self.off_shelf(gone);
        }
        true
    }

    /// Makes the books right about a block that was taken off its shelf.
    pub(crate) fn off_shelf(&mut self, block: Shelved) {
        self.fronts.shelved.remove(&block.id);
        self.fronts.on_shelves.fetch_sub(1, Ordering::Relaxed);
        self.fronts.habits.was_shelved(block.granules, block.reuses);
        let hot = &mut self.extents.records[block.id];
        hot.shelved = false;
        hot.generation = block.generation;
        if !block.is_live() {
            let after = self.free(block.id);
            self.fronts.due.extend(after.streams());
            return;
        }
        let less = block.counted - block.requested;
        let cold = self.extents.records.cold_mut(block.id);
        cold.requested = block.requested;
        let small = self.extents.records[block.id].space != super::records::SpaceId::Large;
        self.stats.on_pool(small, |pool| pool.requested.sub(less));
    }

    /// Takes a block off its shelf, if it lies on one: it is freed if nobody holds it.
    pub(crate) fn unshelve(&mut self, id: u32) {
        let Some(front) = self.shelf_of(id) else {
            return;
        };
        let block = front.lock().shelf.remove(id);
        if let Some(block) = block {
            self.off_shelf(block);
        }
    }

    /// The front on whose shelf a block lies.
    pub(crate) fn shelf_of(&self, id: u32) -> Option<&'static Front> {
        if !self.extents.records[id].shelved {
            return None;
        }
        self.fronts.shelved.get(&id).copied()
    }

    /// Frees a block that lies on a shelf, with a generation only that life of it, and leaves it there.
    /// Whether it was live; `None` if the books have to free it.
    pub(crate) fn free_on_shelf(&self, id: u32, generation: Option<u32>) -> Option<bool> {
        let mut inner = self.shelf_of(id)?.lock();
        if !inner.is_fast() {
            return None;
        }
        inner.shelf.put(id, generation)
    }

    /// Whether a block on a shelf is in this life.
    pub(crate) fn is_live_on_shelf(&self, id: u32, generation: u32) -> bool {
        let front = self.shelf_of(id);
        front.is_some_and(|front| {
            let inner = front.lock();
            let block = inner.shelf.find(id);
            block.is_some_and(|block| block.is_live() && block.generation == generation)
        })
    }

    /// The live large block around an address, off its shelf.
    pub(crate) fn large_around(&mut self, ptr: u64) -> Option<u32> {
        let id = self.extents.lookup.at_or_below(ptr)?;
        if ptr >= self.extents.records[id].end() {
            return None;
        }
        self.unshelve(id);
        (self.extents.lookup.exact(self.extents.records[id].addr) == Some(id)).then_some(id)
    }

    /// Frees what nobody holds on the shelves of one stream.
    pub(crate) fn settle_shelves_of(&mut self, stream: u32) {
        for at in 0..self.streams[stream].fronts.len() {
            self.settle_shelf(self.streams[stream].fronts[at]);
        }
    }

    /// A large request that the shelf of its front could not serve: what nobody holds there goes back,
    /// so that the request finds what it would find without shelves.
    pub(crate) fn pass_by_shelf(&mut self, front: &'static Front, contended: bool) {
        self.unshelve_loose();
        if self.fronts.crowd > 0 {
            self.settle_shelf(front);
        }
        if contended {
            self.fronts.crowd = CROWD;
        } else if self.fronts.crowd > 0 {
            self.fronts.crowd -= 1;
            if self.fronts.crowd == 0 {
                self.clear_shelves();
            }
        }
    }

    /// Takes the block off its shelf that was there on the condition that nothing else happens.
    #[inline]
    pub(crate) fn unshelve_loose(&mut self) {
        if let Some(id) = self.fronts.loose.take() {
            self.unshelve(id);
        }
    }

    /// Frees what nobody holds on any shelf; true if there was anything.
    pub(crate) fn settle_shelves(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.fronts.all().len() {
            any |= self.settle_shelf(self.fronts.all()[at]);
        }
        any
    }

    /// Frees what nobody holds on one shelf; true if there was anything.
    pub(crate) fn settle_shelf(&mut self, front: &'static Front) -> bool {
        let mut any = false;
        loop {
            let block = front.lock().shelf.remove_idle();
            let Some(block) = block else {
                return any;
            };
            any = true;
            self.off_shelf(block);
        }
    }

    /// Takes everything off all shelves: from here on the books are right about every block.
    pub(crate) fn clear_shelves(&mut self) {
        for at in 0..self.fronts.all().len() {
            let front = self.fronts.all()[at];
            loop {
                let block = front.lock().shelf.remove_any();
                let Some(block) = block else {
                    break;
                };
                self.off_shelf(block);
            }
        }
    }

    /// Every block on a shelf is known to the books, and none else.
    pub(crate) fn check_shelves(&self) -> Result<(), CheckError> {
        let mut known = 0;
        for front in self.fronts.all() {
            let inner = front.lock();
            inner.shelf.check()?;
            for block in inner.shelf.blocks() {
                known += 1;
                let loose = self.fronts.loose == Some(block.id);
                holds(
                    "without a crowd there is one block on a shelf at most",
                    loose || self.fronts.crowd > 0,
                )?;
                let (hot, cold) = (
                    &self.extents.records[block.id],
                    self.extents.records.cold(block.id),
                );
                let here = self.fronts.shelved.get(&block.id);
                let here = here.is_some_and(|known| std::ptr::eq(*known, *front));
                holds("a block on a shelf is known there", hot.shelved && here)?;
                holds(
                    "a block on a shelf is in use for the books",
                    hot.state == Extent::Used && hot.stream == inner.slot,
                )?;
                holds(
                    "nobody else uses a block on a shelf",
                    cold.recorded().is_empty(),
                )?;
                same("address of a block on a shelf", block.ptr, hot.addr)?;
                same(
                    "length of a block on a shelf",
                    u64::from(block.granules),
                    u64::from(hot.granules),
                )?;
                same("bytes asked for on a shelf", block.counted, cold.requested)?;
                holds(
                    "a block on a shelf asks for no more than is counted",
                    block.requested <= block.counted,
                )?;
            }
        }
        let marked = self
            .extents
            .records
            .iter()
            .filter(|(_, hot)| hot.shelved)
            .count() as u64;
        let on_shelves = self.fronts.on_shelves.load(Ordering::Relaxed);
        same(
            "blocks on shelves, as told to all",
            known,
            u64::from(on_shelves),
        )?;
        same("blocks on shelves", known, marked)
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
pub(super) mod tests {
    use crate::allocator::{Allocator, Config};
    use crate::driver::{Context, Stream};
    use crate::sim::{SimConfig, Simulator};
    use crate::{Block, Policy};

    const MIB: usize = 1 << 20;

    /// An allocator at whose books threads met a moment ago, and two streams.
    pub(crate) fn crowded(test: impl FnOnce(&Allocator, [&Stream; 2])) {
        let simulator = Simulator::new(SimConfig::default()).unwrap();
        let driver = simulator.driver().unwrap();
        let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
        let config = Config::new().policy(Policy::Packed);
        let allocator = Allocator::with_config(&context, config).unwrap();
        let streams = [0, 1].map(|_| Stream::new(&context).unwrap());
        // Both are known from here on.
        for stream in &streams {
            drop(allocator.allocate(1, stream).unwrap());
        }
        allocator.engine().lock().fronts.crowd = u32::MAX;
        test(&allocator, streams.each_ref());
        allocator.check().unwrap();
        allocator.close().unwrap();
    }

    /// Blocks side by side, of which the second one lies on a shelf.
    fn row(allocator: &Allocator, stream: &Stream) -> [Block; 3] {
        drop(allocator.allocate(64 * MIB, stream).unwrap());
        // Whichever stream comes: nothing has to wait.
        allocator.synchronize().unwrap();
        let [left, middle, right] =
            [2, 3, 2].map(|mib| allocator.allocate(mib * MIB, stream).unwrap());
        let at = middle.ptr();
        drop(middle);
        let middle = allocator.allocate(3 * MIB, stream).unwrap();
        assert_eq!(middle.ptr(), at);
        [left, middle, right]
    }

    fn on_shelves(allocator: &Allocator) -> u64 {
        allocator.engine().lock().fronts.held_on_shelves().blocks
    }

    #[test]
    fn blocks_stay_beside_other_work_until_the_crowd_is_gone() {
        crowded(|allocator, [a, b]| {
            let [left, middle, right] = row(allocator, a);
            let at = middle.ptr();
            let other = allocator.allocate(MIB, b).unwrap();
            drop((middle, right, other));
            assert_eq!(on_shelves(allocator), 3);
            let middle = allocator.allocate(3 * MIB, a).unwrap();
            assert_eq!(middle.ptr(), at);
            drop(middle);
            allocator.engine().lock().fronts.crowd = 1;
            let whole = allocator.allocate(5 * MIB, b).unwrap();
            assert_eq!(on_shelves(allocator), 0);
            drop((left, whole));
        });
    }

    #[test]
    fn memory_on_shelves_comes_before_more_memory() {
        crowded(|allocator, [a, b]| {
            let [left, middle, right] = row(allocator, a);
            // No free piece is long enough, and what is live is far from a peak.
            let rest = [2, 1, 2, 52].map(|mib| Some(allocator.allocate(mib * MIB, a).unwrap()));
            let [hole, wall, gap, rest] = rest;
            drop((hole, gap, middle));
            allocator.synchronize().unwrap();
            // Takes everything off the shelves.
            allocator.snapshot();
            let middle = allocator.allocate(3 * MIB, a).unwrap();
            let reserved = allocator.stats().all.reserved.current;
            drop(middle);
            assert!(on_shelves(allocator) > 0);
            let other = allocator.allocate(3 * MIB, b).unwrap();
            assert_eq!(allocator.stats().all.reserved.current, reserved);
            assert_eq!(on_shelves(allocator), 0);
            drop((left, right, wall, rest, other));
        });
    }

    #[test]
    fn s1_19_what_lies_on_a_shelf_is_no_part_of_a_peak() {
        crowded(|allocator, [a, b]| {
            let [left, middle, right] = row(allocator, a);
            let other = allocator.allocate(MIB, b).unwrap();
            drop(other);
            allocator.reset_peaks();
            let peak = allocator.stats().all.allocated.peak;
            drop(middle);
            assert_eq!(on_shelves(allocator), 1);
            let other = allocator.allocate(3 * MIB, b).unwrap();
            assert_eq!(allocator.stats().all.allocated.peak, peak);
            assert_eq!(allocator.stats().large.allocated.peak, peak);
            let more = allocator.allocate(MIB, b).unwrap();
            assert_eq!(allocator.stats().all.allocated.peak, peak + MIB as u64);
            drop((left, right, other, more));
        });
    }
}
