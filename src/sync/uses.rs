//! The uses of one block: its last write, the reads since, and the streams that use it until it is freed.

use crate::block::Access;
use crate::driver::Stream;

use super::event::Pooled;
use super::point::{Point, add_user};

/// The uses that must be waited for before a block is accessed or freed.
#[derive(Debug)]
pub(crate) struct Uses {
    /// The last write, and the reads since, with the tick at which each was recorded.
    recorded: Vec<(Access, Point, u64)>,
    /// Streams that use the block until it is freed.
    lasting: Vec<Point>,
    /// Streams that wait for all uses up to a tick.
    ordered: Vec<(u64, u64)>,
    clock: u64,
    /// A deallocation is in progress or complete.
    pub(crate) closed: bool,
}

impl Uses {
    /// The allocation is the first write.
    pub(crate) fn new(stream: u64, ready: Pooled) -> Uses {
        Uses {
            recorded: vec![(Access::Write, Point::marked(stream, ready), 0)],
            lasting: Vec::new(),
            ordered: Vec::new(),
            clock: 0,
            closed: false,
        }
    }

    /// Whether the block was used since its allocation.
    pub(crate) fn is_any(&self) -> bool {
        self.clock > 0 || !self.lasting.is_empty()
    }

    /// Returns what an access has to wait for, and the tick to pass to [`ordered`](Self::ordered) after the wait.
    pub(crate) fn before(&self, access: Access) -> (Vec<Point>, u64) {
        let uses = self.recorded.iter();
        let uses = uses.filter(|(known, ..)| known.writes() || access.writes());
        (
            uses.map(|(_, point, _)| point.clone()).collect(),
            self.clock,
        )
    }

    /// Returns what a deallocation has to wait for.
    pub(crate) fn all(&self) -> Vec<Point> {
        let (mut points, _) = self.before(Access::Write);
        points.extend(self.lasting.iter().cloned());
        points
    }

    pub(crate) fn until_freed(&mut self, stream: &Stream) {
        add_user(&mut self.lasting, stream);
    }

    /// Records that a stream waits for all uses up to a tick.
    pub(crate) fn ordered(&mut self, stream: u64, tick: u64) {
        match self.ordered.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, known)) => *known = tick.max(*known),
            None => self.ordered.push((stream, tick)),
        }
    }

    /// Returns the tick at which the recording of a use begins.
    pub(crate) fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Adds a use; without an event, all work of the stream before the next wait counts.
    pub(crate) fn done(
        &mut self,
        stream: &Stream,
        access: Access,
        begin: u64,
        event: Option<Pooled>,
    ) {
        self.clock += 1;
        let id = stream.own_id();
        let point = match event {
            Some(event) => Point::marked(id, event),
            None => Point::unmarked(stream),
        };
        // Its event was recorded on the same stream, before the recording of the new use began.
        let follows = |point: &Point, end: u64| point.stream == id && end < begin;
        if access.writes() {
            let waited = self.ordered.iter().find(|(stream, _)| *stream == id);
            let waited = waited.map_or(0, |(_, tick)| *tick);
            self.ordered.clear();
            // Uses that this write did not wait for are kept, since the memory must outlive them.
            (self.recorded).retain(|(_, point, end)| *end > waited && !follows(point, *end));
            for (known, ..) in &mut self.recorded {
                *known = Access::Read;
            }
        } else {
            // One read per stream, except for reads recorded at the same time.
            (self.recorded).retain(|(known, point, end)| known.writes() || !follows(point, *end));
        }
        self.recorded.push((access, point, self.clock));
    }
}
