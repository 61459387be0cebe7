//! Work on blocks, and the uses reported to the allocator.

use cualloc::Error;

use super::{Done, Handle, Lane, Machine, text};
use crate::checker::ranges::Position;

impl Machine<'_> {
    /// Makes what a stream is given next follow a position.
    pub(super) fn order(&mut self, stream: usize, at: Position) -> Done {
        if self.checker.tracker().is_ordered(stream, at) {
            return Ok(());
        }
        let Some(to) = self
            .lanes
            .iter()
            .find(|l| l.number == stream)
            .map(Lane::raw)
        else {
            return Ok(());
        };
        self.summary.waits += 1;
        match self.lanes.iter().find(|l| l.number == at.0).map(Lane::raw) {
            // SAFETY: live streams of the context.
            Some(from) => self.own(|entered| unsafe {
                let event = entered.create_event()?;
                entered.record(&event, from)?;
                entered.stream_wait(to, &event)
            }),
            None => {
                let event = self
                    .finals
                    .remove(&at.0)
                    .ok_or("no last event of a stream")?;
                // SAFETY: as above.
                let waited = self.own(|entered| unsafe { entered.stream_wait(to, &event) });
                self.finals.insert(at.0, event);
                waited
            }
        }
    }

    /// Submits work on a block to a stream, after what it has to follow.
    fn touch(&mut self, at: usize, lane: usize, write: bool) -> Done {
        let (number, raw) = (self.lanes[lane].number, self.lanes[lane].raw());
        let held = &self.blocks[at];
        let (ptr, bytes) = (held.ptr, held.requested);
        let mut after = vec![held.writer];
        if write {
            after.extend(held.readers.iter().copied());
        }
        for position in after {
            self.order(number, position)?;
        }
        let sink = self.sink.as_mut_ptr();
        // SAFETY: the block is live, the stream is, and everything that uses the bytes is ordered;
        // the sink outlives the work, which is done before the machine is dropped.
        self.own(|entered| unsafe {
            if write {
                entered.memset_d8(ptr, 7, bytes as usize, raw)
            } else {
                let bytes = bytes.min(64);
                entered.copy_device_to_host(sink.cast(), ptr, bytes as usize, raw)
            }
        })?;
        let position = self.position(number);
        let held = &mut self.blocks[at];
        if write {
            held.writer = position;
            held.readers.clear();
        } else {
            held.readers.retain(|r| r.0 != number);
            held.readers.push(position);
        }
        Ok(())
    }

    pub fn use_block(&mut self, pick: u32, on: u32, write: bool) -> Done {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let held = &self.blocks[at];
        let open: Vec<usize> = [held.owner]
            .into_iter()
            .chain(held.recorded.iter().filter(|r| r.1.is_none()).map(|r| r.0))
            .filter_map(|number| self.lanes.iter().position(|l| l.number == number))
            .collect();
        if open.is_empty() {
            return Ok(());
        }
        self.touch(at, open[on as usize % open.len()], write)
    }

    /// Whether the block's entry points can name the stream as the allocator knows it.
    fn nameable(&self, at: usize, lane: usize) -> bool {
        let ids = self.setup.stream_ids;
        match (&self.lanes[lane].handle, &self.blocks[at].block) {
            (Handle::Owned(_), Some(_)) => true,
            (Handle::Owned(_), None) => ids && self.lanes[lane].kept,
            (_, Some(_)) => ids,
            (_, None) => true,
        }
    }

    fn record(&mut self, at: usize, lane: usize, now: bool, offset: u64) -> Result<(), Error> {
        let (held, lane) = (&self.blocks[at], &self.lanes[lane]);
        match (&held.block, &lane.handle) {
            (Some(block), Handle::Owned(stream)) if now => block.record_use(stream),
            (Some(block), Handle::Owned(stream)) => block.record_stream(stream),
            // SAFETY: live streams, retired before they are destroyed.
            (_, _) if now => unsafe { self.alloc.record_use_raw(held.ptr + offset, lane.raw()) },
            // SAFETY: as above.
            (_, _) => unsafe { self.alloc.record_stream_raw(held.ptr + offset, lane.raw()) },
        }
    }

    pub fn record_stream(&mut self, pick: u32, stream: u32, inside: bool) -> Done {
        let (Some(at), lane) = (self.block(pick), self.lane(stream)) else {
            return Ok(());
        };
        if !self.nameable(at, lane) {
            return Ok(());
        }
        let offset = if inside { self.blocks[at].size - 1 } else { 0 };
        let result = self.record(at, lane, false, offset);
        let known = self.tolerate(result)?.is_some();
        let number = self.lanes[lane].number;
        if known && number != self.blocks[at].owner {
            self.blocks[at].recorded.retain(|r| r.0 != number);
            self.blocks[at].recorded.push((number, None));
        }
        Ok(())
    }

    pub(super) fn record_use(&mut self, pick: u32, stream: u32, write: bool) -> Done {
        let (Some(at), lane) = (self.block(pick), self.lane(stream)) else {
            return Ok(());
        };
        if !self.nameable(at, lane) {
            return Ok(());
        }
        self.touch(at, lane, write)?;
        let result = self.record(at, lane, true, 0);
        if self.tolerate(result)?.is_none() {
            // The work is submitted, so it must be recorded.
            self.mend();
            self.record(at, lane, true, 0).map_err(text)?;
        }
        let number = self.lanes[lane].number;
        let position = self.position(number);
        let owner = self.blocks[at].owner;
        let recorded = &mut self.blocks[at].recorded;
        if number != owner && !recorded.contains(&(number, None)) {
            recorded.retain(|r| r.0 != number);
            recorded.push((number, Some(position)));
        }
        Ok(())
    }
}
