//! The uses of one block: its last write and the reads since.

use std::sync::Arc;

use crate::driver::kept_stream::KeptStream;
use crate::driver::{NO_ID, Stream};
use crate::locks::thread_id::ThreadId;
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::wait_for_context;

use super::block::Access;
use crate::error::Error;

/// A moment in the work of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    stream: u64,
    /// Ticks of the block's clock before and after the moment: two moments of one stream are known
    /// to be in order if the first ended before the second began.
    begin: u64,
    end: u64,
    how: How,
}

#[derive(Debug, Clone)]
enum How {
    Event(Arc<Pooled>),
    /// No event could be recorded: everything the stream was given until it is asked for.
    Late(Late),
}

/// A stream by its handle, which on another thread may mean another one.
#[derive(Debug, Clone)]
struct Late {
    stream: KeptStream,
    thread: ThreadId,
}

impl Late {
    fn new(stream: &Stream) -> Late {
        Late {
            stream: KeptStream::new(stream),
            thread: ThreadId::current(),
        }
    }

    /// Whether the handle means the stream with this id here. One that could not be named is known by
    /// the thread.
    fn is_here(&self, id: u64) -> bool {
        if id == NO_ID {
            return self.thread == ThreadId::current();
        }
        self.stream.stream().own_id() == id
    }
}

impl Point {
    /// Everything that a stream has been given when it is asked for.
    pub(crate) fn late(stream: &Stream, id: u64) -> Point {
        Point {
            stream: id,
            begin: 0,
            end: 0,
            how: How::Late(Late::new(stream)),
        }
    }

    /// The driver's id of the stream.
    pub(crate) fn stream(&self) -> u64 {
        self.stream
    }

    /// Lets later work of a stream start only after this moment. Nothing to do on its own stream.
    pub(crate) fn hold_back(
        &self,
        stream: &Stream,
        id: u64,
        events: &EventPools,
    ) -> Result<(), Error> {
        if self.stream == id {
            return Ok(());
        }
        match &self.how {
            How::Event(event) => Ok(event.hold_back(stream)?),
            How::Late(late) => late.stream.with(|user| match user {
                Some(user) if late.is_here(self.stream) => {
                    // A wait for what is captured would draw the stream into the capture.
                    capture::refuse_capture(user)?;
                    Ok(events.record(user)?.hold_back(stream)?)
                }
                // It was retired, or the handle means another stream on this thread.
                _ => Ok(wait_for_context(late.stream.stream().context())?),
            }),
        }
    }
}

/// What is to be waited for before, or was done with, a block.
#[derive(Debug)]
pub(crate) struct Uses {
    last_write: Point,
    reads: Vec<Point>,
    /// Streams that use the block until it is freed, by work that nobody tells of.
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
            last_write: Point {
                stream,
                begin: 0,
                end: 0,
                how,
            },
            reads: Vec::new(),
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

    /// What an access has to wait for, and the tick that stands for having done so.
    pub(crate) fn before(&self, access: Access) -> (Vec<Point>, u64) {
        let mut points = vec![self.last_write.clone()];
        if access.writes() {
            points.extend(self.reads.iter().cloned());
        }
        (points, self.clock)
    }

    /// Everything that freeing has to wait for.
    pub(crate) fn all(&self) -> Vec<Point> {
        let (mut points, _) = self.before(Access::Write);
        points.extend(self.lasting.iter().cloned());
        points
    }

    /// A stream uses the block until it is freed.
    pub(crate) fn until_freed(&mut self, stream: &Stream, id: u64) {
        if self.lasting.iter().any(|known| known.stream == id) {
            return;
        }
        self.lasting.push(Point::late(stream, id));
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

    /// A use was recorded; without an event, everything the stream was given counts.
    pub(crate) fn done(
        &mut self,
        stream: &Stream,
        id: u64,
        access: Access,
        begin: u64,
        event: Option<Pooled>,
    ) {
        self.clock += 1;
        let point = Point {
            stream: id,
            begin,
            end: self.clock,
            how: match event {
                Some(event) => How::Event(Arc::new(event)),
                None => How::Late(Late::new(stream)),
            },
        };
        let follows = |old: &Point| id != NO_ID && old.stream == id && old.end < point.begin;
        if !access.writes() {
            // One read per stream, but for reads recorded at the same time.
            self.reads.retain(|old| !follows(old));
            self.reads.push(point);
            return;
        }
        let waited = self.ordered.iter().find(|(stream, _)| *stream == id);
        let waited = waited.map_or(0, |(_, tick)| *tick);
        self.ordered.clear();
        // Uses that this write did not wait for are not forgotten: the memory must outlive them.
        let covered = |old: &Point| follows(old) || (old.end <= waited && old.begin <= waited);
        self.reads.retain(|old| !covered(old));
        let before = std::mem::replace(&mut self.last_write, point.clone());
        let unwaited = before.end > waited && !follows(&before);
        if unwaited {
            self.reads.push(before);
        }
    }
}
