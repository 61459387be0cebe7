//! Physical segments of blocks, and the guards that keep blocks in place.

use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::heap::guarded::Guarding;
use crate::allocator::report::PhysicalSegment;
use crate::allocator::size::GRANULE;
use crate::error::{Error, InvalidArgument};

impl Heap {
    /// Returns the live block around a range, and the physical segments of the range.
    pub(crate) fn segments(
        &mut self,
        ptr: u64,
        bytes: u64,
    ) -> Result<(Guarding, Vec<PhysicalSegment>), Error> {
        let small = self.caches.small_around(ptr).map(|(_, run, _)| run);
        let (block, last, in_view) = match small {
            Some(run) => {
                let last = run.ptr + u64::from(run.granules) * GRANULE;
                (Guarding::Small(run.ptr), last, false)
            }
            None => {
                let Some(id) = self.large_around(ptr) else {
                    return Err(self.physical.not_live(ptr));
                };
                if self.extents.records[id].state == Extent::Pooled {
                    return Err(Error::NotSupported {
                        what: "guards on memory of graph pools",
                    });
                }
                let in_view = !self.extents.records.cold(id).home().is_empty();
                (
                    Guarding::Record(id),
                    self.extents.records[id].end(),
                    in_view,
                )
            }
        };
        let end = ptr.checked_add(bytes).filter(|end| *end <= last);
        let Some(end) = end.filter(|_| bytes > 0) else {
            return Err(Error::Invalid(InvalidArgument::Range { ptr, bytes }));
        };
        let segments = match in_view {
            true => self.view_segments(ptr, end),
            false => self.physical.home_segments(ptr, end),
        };
        Ok((block, segments))
    }

    fn view_segments(&self, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let Some((base, view)) = self.views.view_around(ptr) else {
            return Vec::new();
        };
        let (mut segments, mut at) = (Vec::new(), base);
        for mapping in &view.mappings {
            let bytes = u64::from(mapping.granules) * GRANULE;
            let (from, to) = (ptr.max(at), end.min(at + bytes));
            if from < to {
                segments.push(PhysicalSegment {
                    address: from,
                    bytes: to - from,
                    handle: self.physical.handle_at(mapping.home),
                    offset: from - at,
                    handle_bytes: bytes,
                });
            }
            at += bytes;
        }
        segments
    }

    /// Guards a block. False if its stream cache has freed it meanwhile.
    pub(crate) fn guard(&mut self, block: Guarding) -> bool {
        let ptr = match block {
            Guarding::Record(id) => {
                self.guards.blocks.entry(id).or_default().guards += 1;
                return true;
            }
            Guarding::Small(ptr) => ptr,
        };
        // From here on its free enters the heap.
        let noted = self
            .caches
            .small_around(ptr)
            .is_some_and(|(cache, run, _)| self.note_in_heap(cache, &run, None));
        if noted {
            self.guards.small.entry(ptr).or_default().guards += 1;
        }
        noted
    }

    /// Like [`unguard`](Self::unguard), for a small block.
    pub(crate) fn unguard_small(&mut self, ptr: u64) {
        let Some(guarded) = self.guards.small.get_mut(&ptr) else {
            return;
        };
        guarded.guards -= 1;
        if guarded.guards > 0 {
            return;
        }
        let freed = self.guards.small.remove(&ptr).and_then(|g| g.freed);
        if let Some(held) = freed {
            self.guards.bytes -= held.bytes;
            self.caches.held_back.push(held);
            self.return_held_back();
        }
    }

    /// Keeps a block that is being freed if its memory is guarded; otherwise returns its uses.
    pub(crate) fn unless_guarded(&mut self, id: u32, uses: Uses) -> Option<Uses> {
        let Some(guarded) = self.guards.blocks.get_mut(&id) else {
            return Some(uses);
        };
        let hot = &mut self.extents.records[id];
        hot.state = Extent::Busy;
        let bytes = hot.bytes();
        self.guards.bytes += bytes;
        let space = self.extents.records[id].space;
        if matches!(uses, Uses::Many(_)) {
            // When the guard ends and the block becomes free, it counts again as memory that other streams use.
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        // Keeps the slot of the block's stream.
        let owner = self.extents.records.cold(id).owner;
        self.streams[owner].calls += 1;
        guarded.freed = Some(uses);
        None
    }

    /// Drops a guard. The last one also completes the free of a block that was freed meanwhile.
    pub(crate) fn unguard(&mut self, id: u32) {
        let Some(guarded) = self.guards.blocks.get_mut(&id) else {
            return;
        };
        guarded.guards -= 1;
        if guarded.guards > 0 {
            return;
        }
        let freed = self.guards.blocks.remove(&id).and_then(|g| g.freed);
        let Some(uses) = freed else { return };
        let bytes = self.extents.records[id].bytes();
        self.guards.bytes -= bytes;
        let (space, owner) = (
            self.extents.records[id].space,
            self.extents.records.cold(id).owner,
        );
        self.streams[owner].calls -= 1;
        let shared = matches!(uses, Uses::Many(_));
        if shared {
            self.mixed_added(space, bytes);
        }
        if !self.extents.records.cold(id).home().is_empty() {
            for piece in self.view_block_freed(id, &uses) {
                self.complete_piece(SpaceId::Large, piece);
            }
            return;
        }
        let (at, records) = self.extents.parts(space);
        let piece = at.release(records, id, uses);
        self.complete_piece(space, piece);
    }
}
