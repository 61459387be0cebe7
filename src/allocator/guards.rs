//! Where a block lies physically, and guards that keep it there.

use std::fmt;
use std::sync::Arc;

use crate::driver::sys;

use super::api::Allocator;
use super::caches::HeldBack;
use super::engine::{Engine, Shared};
use super::error::Error;
use super::guarded::Guarding;
use super::records::{SpaceId, State as Extent};
use super::report::PhysicalSegment;
use super::size::GRANULE;
use super::state::State;
use super::uses::Uses;
use super::want::AfterFree;

/// Keeps a part of a block where it is, for somebody who uses its physical memory without the
/// allocator's knowledge: another process after an export, a network card after a registration.
///
/// While a guard lives, the memory of its block is neither reused nor unmapped nor given back, and
/// its address belongs to no other memory. The block itself may be freed: the free then takes effect
/// with the last guard. A guard keeps its allocator open. Dropping it touches no memory and waits for
/// nothing.
///
/// `Send` and `Sync`.
pub struct RangeGuard {
    engine: Shared,
    block: Guarding,
    address: sys::CUdeviceptr,
    bytes: u64,
    segments: Vec<PhysicalSegment>,
}

impl RangeGuard {
    /// First byte of the guarded range.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it lies, by address.
    pub fn segments(&self) -> &[PhysicalSegment] {
        &self.segments
    }
}

impl fmt::Debug for RangeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeGuard")
            .field("ptr", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .field("segments", &self.segments)
            .finish()
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.engine.unguard(self.block);
    }
}

impl Allocator {
    /// Where `bytes` bytes from `ptr` on, all of one live block, lie physically: by address, one
    /// entry for each handle. It may change as soon as the block is freed; [`guard`](Self::guard)
    /// keeps it.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`]; [`Error::InvalidRange`] if the range is empty or
    /// reaches beyond its block; [`Error::Closed`], a lost context.
    pub fn segments_of(
        &self,
        ptr: sys::CUdeviceptr,
        bytes: u64,
    ) -> Result<Vec<PhysicalSegment>, Error> {
        let mut state = self.engine().open()?;
        Ok(state.segments(ptr, bytes)?.1)
    }

    /// [`segments_of`](Self::segments_of), kept as it is while the guard lives.
    ///
    /// # Errors
    /// As [`segments_of`](Self::segments_of).
    pub fn guard(&self, ptr: sys::CUdeviceptr, bytes: u64) -> Result<RangeGuard, Error> {
        let mut state = self.engine().open()?;
        let (block, segments) = state.segments(ptr, bytes)?;
        if !state.guard(block) {
            return Err(Error::NotLive { ptr });
        }
        Ok(RangeGuard {
            engine: Arc::clone(self.shared()),
            block,
            address: ptr,
            bytes,
            segments,
        })
    }
}

impl Engine {
    fn unguard(&self, block: Guarding) {
        // In a child the lock may be held by a thread that does not exist there.
        if self.usable().is_err() {
            return;
        }
        let mut state = self.lock();
        match block {
            Guarding::Record(id) => state.unguard(id),
            Guarding::Small(ptr) => state.unguard_small(ptr),
        }
        self.finish_free(state, &AfterFree::default());
    }
}

impl State {
    /// The live block around a range, and where the range lies.
    fn segments(
        &mut self,
        ptr: u64,
        bytes: u64,
    ) -> Result<(Guarding, Vec<PhysicalSegment>), Error> {
        if let Some((_, run, _)) = self.fronts.small_around(ptr) {
            let last = run.ptr + u64::from(run.granules) * GRANULE;
            let end = ptr.checked_add(bytes).filter(|end| *end <= last);
            let Some(end) = end.filter(|_| bytes > 0) else {
                return Err(Error::InvalidRange { ptr, bytes });
            };
            return Ok((
                Guarding::Small(run.ptr),
                self.physical.home_segments(ptr, end),
            ));
        }
        let Some(id) = self.large_around(ptr) else {
            return Err(self.not_live(ptr));
        };
        let hot = &self.extents.records[id];
        let end = ptr.checked_add(bytes).filter(|end| *end <= hot.end());
        let Some(end) = end.filter(|_| bytes > 0) else {
            return Err(Error::InvalidRange { ptr, bytes });
        };
        let segments = if self.extents.records.cold(id).home().is_empty() {
            self.physical.home_segments(ptr, end)
        } else {
            self.view_segments(ptr, end)
        };
        Ok((Guarding::Record(id), segments))
    }

    fn not_live(&self, ptr: u64) -> Error {
        if self.physical.ours(ptr) {
            Error::NotLive { ptr }
        } else {
            Error::NotOurs { ptr }
        }
    }

    fn view_segments(&self, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let Some((base, view)) = self.views.view_around(ptr) else {
            return Vec::new();
        };
        let (mut segments, mut at) = (Vec::new(), base);
        for seg in &view.segs {
            let bytes = u64::from(seg.granules) * GRANULE;
            let (from, to) = (ptr.max(at), end.min(at + bytes));
            if from < to {
                segments.push(PhysicalSegment {
                    address: from,
                    bytes: to - from,
                    handle: self.physical.holdings.get(&seg.home).and_then(|h| h.handle),
                    offset: from - at,
                    handle_bytes: bytes,
                });
            }
            at += bytes;
        }
        segments
    }

    /// False if the block has been freed in its front meanwhile.
    fn guard(&mut self, block: Guarding) -> bool {
        let ptr = match block {
            Guarding::Record(id) => {
                self.guards.blocks.entry(id).or_default().guards += 1;
                return true;
            }
            Guarding::Small(ptr) => ptr,
        };
        // Its free comes to the books from here on.
        let noted = self
            .fronts
            .small_around(ptr)
            .is_some_and(|(front, run, _)| self.note_in_books(front, &run, None));
        if noted {
            self.guards.small.entry(ptr).or_default().guards += 1;
        }
        noted
    }

    /// A small block was freed: if a guard keeps its memory, that waits. Gives it back if none does.
    pub(crate) fn unless_guarded_small(&mut self, ptr: u64, held: HeldBack) -> Option<HeldBack> {
        let Some(guarded) = self.guards.small.get_mut(&ptr) else {
            return Some(held);
        };
        self.guards.bytes += held.bytes;
        guarded.freed = Some(held);
        None
    }

    /// As [`unguard`](Self::unguard).
    fn unguard_small(&mut self, ptr: u64) {
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
            self.fronts.held_back.push(held);
            self.settle_held_back();
        }
    }

    /// A block is being freed, and is nobody's any more: if a guard keeps its memory, that waits.
    /// Gives the uses back if none does.
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
            // Counted among what other streams use again when it is free.
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        // The slot of its stream stays that stream's.
        let owner = self.extents.records.cold(id).owner;
        self.streams[owner].calls += 1;
        guarded.freed = Some(uses);
        None
    }

    /// A guard is gone; with the last one goes a block that was freed meanwhile.
    fn unguard(&mut self, id: u32) {
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
                self.settle_piece(SpaceId::Large, piece);
            }
            return;
        }
        let (at, records) = self.extents.parts(space);
        let piece = at.release(records, id, uses);
        self.settle_piece(space, piece);
    }
}
