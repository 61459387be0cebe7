//! The uses of one block: its last write, the reads since, and the streams that use it until it is freed.

use std::sync::Arc;

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::wait_for_context;

use super::block::Access;

/// A moment in the work of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    /// The driver's id of the stream.
    pub stream: u64,
    how: How,
}

#[derive(Debug, Clone)]
enum How {
    Event(Arc<Pooled>),
    /// Everything the stream was given until it is waited for.
    Late(KeptStream),
}

impl Point {
    /// Lets later work of a stream, which has the id, start only after this moment. Does nothing on its own stream.
    pub(crate) fn hold_back(
        &self,
        stream: &Stream,
        id: u64,
        events: &EventPools,
    ) -> Result<(), Error> {
        match &self.how {
            _ if self.stream == id => Ok(()),
            How::Event(event) => Ok(event.hold_back(stream)?),
            How::Late(late) => late.with(|user| match user {
                Some(user) if user.own_id() == self.stream => {
                    // A wait for what is captured would draw the stream into the capture.
                    capture::refuse_capture(user)?;
                    Ok(events.record(user)?.hold_back(stream)?)
                }
                // It was retired, or the handle means another stream on this thread.
                _ => wait_for(late.stream().context()),
            }),
        }
    }
}

/// Waits on the host for all work of a context. Refuses while something captures there, which the wait would spoil.
pub(crate) fn wait_for(context: &Context) -> Result<(), Error> {
    match capture::capture_in(context)? {
        Some(stream) => Err(Error::Capturing { stream }),
        None => Ok(wait_for_context(context)?),
    }
}

/// Adds everything that a stream is given until it is waited for, unless the stream is in the list.
pub(crate) fn add_user(users: &mut Vec<Point>, stream: &Stream) {
    let id = stream.own_id();
    if users.iter().all(|known| known.stream != id) {
        users.push(Point {
            stream: id,
            how: How::Late(KeptStream::new(stream)),
        });
    }
}

/// What must be waited for before a block is accessed or freed.
#[derive(Debug)]
pub(crate) struct Uses {
    /// The last write, and the reads since, with the tick at which each was recorded.
    recorded: Vec<(Access, Point, u64)>,
    /// Streams that use the block until it is freed, by work that is not recorded.
    lasting: Vec<Point>,
    /// Streams that were made to wait for all uses up to a tick.
    ordered: Vec<(u64, u64)>,
    clock: u64,
    /// A deallocation is under way, or done.
    pub(crate) closed: bool,
}

impl Uses {
    /// The allocation is the first write.
    pub(crate) fn new(stream: u64, ready: Pooled) -> Uses {
        let how = How::Event(Arc::new(ready));
        Uses {
            recorded: vec![(Access::Write, Point { stream, how }, 0)],
            lasting: Vec::new(),
            ordered: Vec::new(),
            clock: 0,
            closed: false,
        }
    }

    /// Whether there were uses since the allocation.
    pub(crate) fn is_any(&self) -> bool {
        self.clock > 0 || !self.lasting.is_empty()
    }

    /// What an access has to wait for, and the tick to pass to [`ordered`](Self::ordered) after the wait.
    pub(crate) fn before(&self, access: Access) -> (Vec<Point>, u64) {
        let uses = self.recorded.iter();
        let uses = uses.filter(|(known, ..)| known.writes() || access.writes());
        (
            uses.map(|(_, point, _)| point.clone()).collect(),
            self.clock,
        )
    }

    /// What a free has to wait for.
    pub(crate) fn all(&self) -> Vec<Point> {
        let (mut points, _) = self.before(Access::Write);
        points.extend(self.lasting.iter().cloned());
        points
    }

    /// A stream uses the block until it is freed.
    pub(crate) fn until_freed(&mut self, stream: &Stream) {
        add_user(&mut self.lasting, stream);
    }

    /// A stream was made to wait for all uses up to a tick.
    pub(crate) fn ordered(&mut self, stream: u64, tick: u64) {
        match self.ordered.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, known)) => *known = tick.max(*known),
            None => self.ordered.push((stream, tick)),
        }
    }

    /// The tick at which a use begins to be recorded.
    pub(crate) fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A use was recorded; without an event, everything the stream is given until the next wait counts.
    pub(crate) fn done(
        &mut self,
        stream: &Stream,
        access: Access,
        begin: u64,
        event: Option<Pooled>,
    ) {
        self.clock += 1;
        let id = stream.own_id();
        let how = match event {
            Some(event) => How::Event(Arc::new(event)),
            None => How::Late(KeptStream::new(stream)),
        };
        // Its event was recorded before that of the new use was begun, on the same stream.
        let follows = |point: &Point, end: u64| point.stream == id && end < begin;
        if access.writes() {
            let waited = self.ordered.iter().find(|(stream, _)| *stream == id);
            let waited = waited.map_or(0, |(_, tick)| *tick);
            self.ordered.clear();
            // Uses that this write did not wait for are kept: the memory must outlive them.
            (self.recorded).retain(|(_, point, end)| *end > waited && !follows(point, *end));
            for (known, ..) in &mut self.recorded {
                *known = Access::Read;
            }
        } else {
            // One read per stream, except for reads recorded at the same time.
            (self.recorded).retain(|(known, point, end)| known.writes() || !follows(point, *end));
        }
        let point = Point { stream: id, how };
        self.recorded.push((access, point, self.clock));
    }
}
