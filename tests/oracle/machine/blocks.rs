//! Blocks: taken, refused, given back, and what must not be.

use cualloc::allocator::Request;
use cualloc::driver::Stream;
use cualloc::error::InvalidArgument;
use cualloc::{Block, Error, Policy};

use super::{Done, Handle, Held, Machine, text};
use crate::checker::ranges::Position;
use crate::checker::table::Checker;
use crate::program::{Bad, Want};

impl Machine<'_> {
    fn obtain(
        &mut self,
        at: usize,
        bytes: usize,
        align: usize,
        raw: bool,
    ) -> Result<(u64, Option<Block>), Error> {
        let lane = &self.lanes[at];
        match &lane.handle {
            Handle::Owned(stream) => {
                let block = if align > 1 {
                    self.alloc
                        .allocate_with(Request::new(bytes).align(align), stream)?
                } else {
                    self.alloc.allocate(bytes, stream)?
                };
                Ok(if raw {
                    (block.into_raw(), None)
                } else {
                    (block.ptr(), Some(block))
                })
            }
            // Without ids each borrowed handle would be a stream of its own.
            Handle::Raw(handle) | Handle::Special(handle) if raw || !self.setup.stream_ids => {
                // SAFETY: a live stream of the context, retired before it is destroyed.
                Ok((unsafe { self.alloc.allocate_raw(bytes, *handle) }?, None))
            }
            Handle::Raw(handle) | Handle::Special(handle) => {
                // SAFETY: as above; the result is dropped immediately.
                let stream = unsafe { Stream::from_raw(&self.context, *handle) }?;
                let block = self
                    .alloc
                    .allocate_with(Request::new(bytes).align(align), &stream)?;
                Ok((block.ptr(), Some(block)))
            }
        }
    }

    pub fn allocate(&mut self, want: Want) -> Done {
        let Want { bytes, raw, .. } = want;
        let (at, align) = (self.lane(want.stream), 1usize << want.align);
        let owned = matches!(self.lanes[at].handle, Handle::Owned(_));
        // The entry points by handle alone know no alignment.
        let align = if owned || (!raw && self.setup.stream_ids) {
            align
        } else {
            1
        };
        let (ptr, block) = match self.obtain(at, bytes, align, raw) {
            Ok(got) => got,
            Err(error) => return self.refused(error, bytes as u64, align as u64, true),
        };
        self.handed_out(at, (ptr, block), bytes, align)
    }

    /// Judges a block that was handed out, and takes it in.
    pub(super) fn handed_out(
        &mut self,
        at: usize,
        (ptr, block): (u64, Option<Block>),
        bytes: usize,
        align: usize,
    ) -> Done {
        self.lanes[at].kept |= matches!(self.lanes[at].handle, Handle::Owned(_));
        let told = block.as_ref().map(Block::size);
        // Who asks by an address takes a large block out of the large-block cache of its stream cache: not for
        // each of them.
        let size = match told {
            Some(size) if !self.summary.allocations.is_multiple_of(8) => size,
            _ => self
                .alloc
                .usable_size(ptr)
                .ok_or("a block without a size")?,
        };
        if ptr % 512 != 0 || !ptr.is_multiple_of(align as u64) {
            return Err(format!("{ptr:#x} is not aligned to {align}"));
        }
        if size < bytes as u64 || told.is_some_and(|told| told != size) {
            return Err(format!("{size} usable bytes for {bytes}"));
        }
        self.late(Some((ptr, ptr + size)));
        let owner = self.lanes[at].number;
        let mut tracker = self.checker.tracker();
        tracker.handed_out(ptr, size, owner);
        tracker.take_violation().map_or(Ok(()), Err)?;
        let (view, writer) = (tracker.in_view(ptr), tracker.position(owner));
        drop(tracker);
        self.in_views += u64::from(view);
        self.summary.in_views += u64::from(view);
        self.blocks.push(Held {
            ptr,
            size,
            requested: bytes as u64,
            owner,
            view,
            block,
            recorded: Vec::new(),
            writer,
            readers: Vec::new(),
        });
        self.figures.live += 1;
        self.figures.allocated += size;
        self.figures.requested += bytes as u64;
        self.figures.peak = self.figures.peak.max(self.figures.requested);
        self.summary.allocations += 1;
        Ok(())
    }

    /// Whether a refused allocation was right to be.
    pub(super) fn refused(&mut self, error: Error, bytes: u64, align: u64, stitched: bool) -> Done {
        if self.armed && matches!(error, Error::OutOfMemory(_) | Error::Driver(_)) {
            return Ok(());
        }
        let Error::OutOfMemory(oom) = &error else {
            return Err(text(error));
        };
        self.summary.out_of_memory += 1;
        let span = bytes.next_multiple_of(512) + align.saturating_sub(512);
        let needed = match self.setup.policy {
            Policy::Classic => {
                cualloc::allocator::size::classic_segment_size(span as usize).unwrap_or(u64::MAX)
            }
            _ => span.next_multiple_of(2 << 20),
        };
        let reserved = self.alloc.stats().all.reserved.current;
        // What small blocks need is made by giving other memory back, which a view in use prevents;
        // larger ones may be stitched of it.
        let small = self.setup.policy == Policy::Packed && span <= 64 << 10;
        let idle = self.checker.tracker().idle_bytes(small || !stitched);
        let idle = idle.saturating_sub(self.other.cached() + self.lost);
        if small && oom.largest_free >= span {
            return Err(format!("{oom} although an extent is large enough"));
        }
        let device = self
            .setup
            .memory
            .saturating_sub(self.taken + self.sim.memory_in_use(0))
            .saturating_sub(oom.headroom)
            + idle;
        let below = self
            .limit
            .map_or(u64::MAX, |limit| (limit + idle).saturating_sub(reserved));
        if needed <= device.min(below) {
            return Err(format!(
                "{oom} although {needed} bytes could be had: {device} of the device, {below} of \
                 the limit, of which {idle} by giving idle memory back"
            ));
        }
        Ok(())
    }

    pub fn absurd(&mut self, stream: u32, bytes: usize, alignment: usize) -> Done {
        let Handle::Owned(stream) = &self.lanes[self.lane(stream)].handle else {
            return Ok(());
        };
        let stream = stream.clone();
        for result in self.unchanged(|m| {
            m.alloc
                .allocate_with(Request::new(bytes).align(alignment), &stream)
        })? {
            match result {
                Err(
                    Error::Invalid(InvalidArgument::Size { .. })
                    | Error::Invalid(InvalidArgument::Alignment { .. }),
                ) => {}
                other => return Err(format!("{bytes} bytes at {alignment}: {other:?}")),
            }
        }
        Ok(())
    }

    pub(super) fn reserve(&mut self, stream: u32, bytes: usize) -> Done {
        let at = self.lane(stream);
        let Handle::Owned(stream) = &self.lanes[at].handle else {
            return Ok(());
        };
        let stream = stream.clone();
        // Its own block would be freed later if a fault hit the free.
        self.mend();
        match self.alloc.reserve(bytes, &stream) {
            Ok(()) => {
                self.late(None);
                self.lanes[at].kept = true;
                self.figures.peak = self.figures.peak.max(self.figures.requested + bytes as u64);
                Ok(())
            }
            Err(error) => self.refused(error, bytes as u64, 1, true),
        }
    }

    pub fn free(&mut self, pick: u32, drop_it: bool) -> Done {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let mut held = self.blocks.swap_remove(at);
        // The free itself may submit a marker, which is no use of the block.
        let uses = uses_of(&self.checker, &held);
        match held.block.take() {
            Some(block) if drop_it => {
                drop(block);
                if self.armed && self.alloc.usable_size(held.ptr).is_some() {
                    // The program is done with it, whenever the allocator is.
                    self.checker.tracker().freed_after(held.ptr, &uses);
                    self.deferred.push(held);
                    return Ok(());
                }
            }
            Some(block) => {
                if let Err(refused) = block.free() {
                    let (block, error) = (*refused.value, refused.error);
                    self.blocks.push(Held {
                        block: Some(block),
                        ..held
                    });
                    return self.tolerate(Err::<(), _>(error)).map(drop);
                }
            }
            None => {
                // SAFETY: allocated here, held by its address alone; its streams live or are
                // retired.
                if let Err(error) = unsafe { self.alloc.free_raw(held.ptr) } {
                    self.blocks.push(held);
                    return self.tolerate(Err::<(), _>(error)).map(drop);
                }
            }
        }
        self.checker.tracker().freed_after(held.ptr, &uses);
        self.settle(&held);
        Ok(())
    }

    /// Blocks that were dropped while a fault kept them from being freed are freed by later calls.
    /// `taken` is the range that was handed out since.
    pub(super) fn late(&mut self, taken: Option<(u64, u64)>) {
        for held in self.spares.spent() {
            self.settle(&held);
        }
        let mut at = 0;
        while at < self.deferred.len() {
            let held = &self.deferred[at];
            let again = taken.is_some_and(|(s, e)| s < held.ptr + held.size && held.ptr < e);
            if again || self.alloc.usable_size(held.ptr).is_none() {
                let held = self.deferred.swap_remove(at);
                self.settle(&held);
            } else {
                at += 1;
            }
        }
    }

    fn settle(&mut self, held: &Held) {
        self.in_views -= u64::from(held.view);
        self.figures.live -= 1;
        self.figures.allocated -= held.size;
        self.figures.requested -= held.requested;
        self.freed.push(held.ptr);
    }

    /// Takes a block, uses it and returns it, a number of times.
    pub fn again(&mut self, stream: u32, bytes: usize, times: u64) -> Done {
        for _ in 0..=times {
            let before = self.blocks.len();
            self.allocate(Want::of(stream, bytes))?;
            let Some(last) = self.blocks.len().checked_sub(1).filter(|at| *at == before) else {
                return Ok(());
            };
            self.use_block(last as u32, 0, true)?;
            self.free(last as u32, true)?;
        }
        Ok(())
    }

    pub fn free_bad(&mut self, pick: u32, kind: Bad) -> Done {
        let live = |ptr: u64| self.any_held(|held| held.ptr == ptr);
        let ptr = match kind {
            Bad::Foreign => 0x1000 + u64::from(pick % 65_536) * 8,
            Bad::Interior => match self.block(pick) {
                Some(at) => self.blocks[at].ptr + 1 + u64::from(pick) % (self.blocks[at].size - 1),
                None => return Ok(()),
            },
            Bad::Double => match self.freed.last() {
                Some(ptr) if !live(*ptr) => *ptr,
                _ => return Ok(()),
            },
        };
        // SAFETY: no block starts there; the call has to refuse.
        for result in self.unchanged(|m| unsafe { m.alloc.free_raw(ptr) })? {
            match (kind, &result) {
                (Bad::Foreign, Err(Error::NotOurs { .. }))
                | (Bad::Interior, Err(Error::InteriorPointer { .. }))
                // The memory may have been given back, or be inside a newer block.
                | (Bad::Double, Err(Error::NotLive { .. } | Error::NotOurs { .. } | Error::InteriorPointer { .. })) => {}
                // Asking which stream it is comes first where the free has to.
                _ => return Err(format!("free of {ptr:#x} ({kind:?}): {result:?}")),
            }
        }
        Ok(())
    }
}

/// The positions until which streams may use a block that is freed now.
pub(super) fn uses_of(checker: &Checker, held: &Held) -> Vec<Position> {
    let tracker = checker.tracker();
    let recorded = held.recorded.iter();
    let recorded =
        recorded.map(|(stream, until)| until.unwrap_or_else(|| tracker.position(*stream)));
    std::iter::once(tracker.position(held.owner))
        .chain(recorded)
        .collect()
}
