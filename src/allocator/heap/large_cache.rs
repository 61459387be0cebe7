//! Large blocks that stay in hand on the shelf of a front: how they go there and come back.

use std::sync::atomic::Ordering;

use crate::allocator::cache::front::{Front, Shelved};
use crate::allocator::extent::invariant::{CheckError, holds, same};
use crate::allocator::extent::record::State as Extent;
use crate::allocator::heap::Heap;

impl Heap {
    /// A block was handed out by the books: puts it on the shelf of its front if that may be of use. Not
    /// one for which a request had wishes: another one would get a place elsewhere. Whether it is there.
    #[inline]
    pub(crate) fn shelve(&mut self, id: u32, front: &'static Front, plain: bool) -> bool {
        let granules = self.extents.records[id].granules;
        let again = self.fronts.habits.allocated(id, granules);
        plain && (again || self.fronts.crowd > 0) && self.put_on_shelf(id, front)
    }

    #[inline(never)]
    pub(crate) fn put_on_shelf(&mut self, id: u32, front: &'static Front) -> bool {
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
        let small = self.extents.records[block.id].space
            != crate::allocator::extent::record::SpaceId::Large;
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
        for at in 0..self.fronts.of(stream).len() {
            self.settle_shelf(self.fronts.of(stream)[at]);
        }
    }

    /// A large request that the shelf of its front could not serve: what nobody holds there goes back,
    /// so that the request finds what it would find without shelves.
    pub(crate) fn pass_by_shelf(&mut self, front: &'static Front, contended: bool) {
        if !self.rules.caches() {
            return;
        }
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

/// Large requests in the books after which nobody waits for them any more, if nobody did meanwhile.
pub(crate) const CROWD: u32 = 256;
