//! Blocks with wishes about their place, guards, and where blocks lie physically.

use cualloc::allocator::{PhysicalSegment, RangeGuard, Request};
use cualloc::{Block, Error, Policy};

use super::{Done, Handle, Machine, text};
use crate::program::Want;

/// A guard and what it keeps.
pub(super) struct Kept {
    guard: RangeGuard,
    /// The block's first byte and its bytes.
    block: (u64, u64),
}

/// A part of a block, from some of 256 parts on and with some of the rest.
fn part_of((ptr, size): (u64, u64), (from, part): (u8, u8)) -> (u64, u64) {
    let from = ptr + size * u64::from(from) / 256;
    let bytes = (ptr + size - from) * (1 + u64::from(part)) / 256;
    (from, bytes.max(1))
}

impl Machine<'_> {
    fn obtain_placed(
        &self,
        at: usize,
        request: Request,
    ) -> Option<Result<(u64, Option<Block>), Error>> {
        match &self.lanes[at].handle {
            Handle::Owned(stream) => {
                let block = self.alloc.allocate_with(request, stream);
                Some(block.map(|block| (block.ptr(), Some(block))))
            }
            Handle::Raw(handle) | Handle::Special(handle) if self.setup.stream_ids => {
                // SAFETY: a live stream of the context, retired before it is destroyed.
                let ptr = unsafe { self.alloc.allocate_raw_with(request, *handle) };
                Some(ptr.map(|ptr| (ptr, None)))
            }
            _ => None,
        }
    }

    pub(super) fn place(&mut self, want: Want, single: bool, views: bool) -> Done {
        let bytes = want.bytes;
        let (at, align) = (self.lane(want.stream), 1usize << want.align);
        let request = Request::new(bytes).align(align).views(views);
        let request = if single {
            request.single_handle()
        } else {
            request
        };
        let (ptr, block) = match self.obtain_placed(at, request) {
            None => return Ok(()),
            Some(Ok(got)) => got,
            // Neither is stitched of what lies scattered.
            Some(Err(error)) => {
                return self.refused(error, bytes as u64, align as u64, views && !single);
            }
        };
        self.handed_out(at, (ptr, block), bytes, align)?;
        let held = self.blocks.last().ok_or("no block was handed out")?;
        let (size, view) = (held.size, held.view);
        if view && (!views || single) {
            return Err(format!("{ptr:#x} lies in a view"));
        }
        let segments = self.alloc.segments_of(ptr, size).map_err(text)?;
        if single && segments.len() != 1 {
            return Err(format!("{ptr:#x} lies in {} handles", segments.len()));
        }
        Ok(())
    }

    /// Asks for cached memory alone.
    pub(super) fn take_cached(&mut self, stream: u32, bytes: usize) -> Done {
        let at = self.lane(stream);
        let Handle::Owned(stream) = &self.lanes[at].handle else {
            return Ok(());
        };
        let held = self.sim.memory_in_use(0);
        let taken = match self
            .alloc
            .allocate_with(Request::new(bytes).cached_only(), stream)
        {
            Err(Error::NotCached) => Ok(None),
            taken => taken.map(Some),
        };
        if self.sim.memory_in_use(0) > held {
            return Err("cached memory was taken from the driver".into());
        }
        self.lanes[at].kept = true;
        match self.tolerate(taken)?.flatten() {
            None => Ok(()),
            Some(block) => self.handed_out(at, (block.ptr(), Some(block)), bytes, 1),
        }
    }

    pub(super) fn guard(&mut self, pick: u32, part: (u8, u8)) -> Done {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let (ptr, size) = (self.blocks[at].ptr, self.blocks[at].size);
        let (from, bytes) = part_of((ptr, size), part);
        let guard = self.alloc.guard(from, bytes).map_err(text)?;
        self.judge_segments(from, bytes, guard.segments())?;
        self.checker.tracker().guarded(ptr, size);
        let block = (ptr, size);
        self.guards.push(Kept { guard, block });
        Ok(())
    }

    pub(super) fn unguard(&mut self, pick: u32) -> Done {
        if self.guards.is_empty() {
            return Ok(());
        }
        let at = pick as usize % self.guards.len();
        let kept = self.guards.swap_remove(at);
        let (ptr, size) = kept.block;
        drop(kept.guard);
        self.checker.tracker().unguarded(ptr, size);
        Ok(())
    }

    pub(super) fn segments(&mut self, pick: u32, part: (u8, u8)) -> Done {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let (from, bytes) = part_of((self.blocks[at].ptr, self.blocks[at].size), part);
        let segments = self.alloc.segments_of(from, bytes).map_err(text)?;
        self.judge_segments(from, bytes, &segments)
    }

    /// Segments lie side by side, cover their range, and name the memory that is mapped there.
    fn judge_segments(&self, from: u64, bytes: u64, segments: &[PhysicalSegment]) -> Done {
        let mut at = from;
        for segment in segments {
            let named = segment.handle.is_some() == (self.setup.policy == Policy::Packed);
            let inside = segment.offset + segment.bytes <= segment.handle_bytes;
            let tracker = self.checker.tracker();
            let here = tracker.is_at(segment.address, segment.handle, segment.offset);
            if segment.address != at || segment.bytes == 0 || !named || !inside || !here {
                return Err(format!("{segment:?} of {from:#x} and {bytes} bytes"));
            }
            at += segment.bytes;
        }
        if at != from + bytes {
            return Err(format!("segments of {from:#x} end at {at:#x}"));
        }
        Ok(())
    }

    /// Bytes of blocks that are guarded and not live any more.
    pub(super) fn guarded_bytes(&self) -> u64 {
        let mut blocks: Vec<_> = self.guards.iter().map(|kept| kept.block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        let live = |ptr: u64| self.any_held(|held| held.ptr == ptr);
        let freed = blocks.iter().filter(|(ptr, _)| !live(*ptr));
        freed.map(|(_, size)| size).sum()
    }
}
