//! Moments in the work of streams, for other streams to wait for.

use std::sync::Arc;

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, Stream};
use crate::error::Error;

use super::capture;
use super::event::{EventPools, Pooled};
use super::order::wait_for_context;

/// A moment in the work of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    /// The driver's id of the stream.
    pub stream: u64,
    end: End,
}

#[derive(Debug, Clone)]
enum End {
    Event(Arc<Pooled>),
    /// The end of all work that the stream has when it is waited for.
    Unmarked(KeptStream),
}

impl Point {
    /// A moment that an event marks.
    pub(crate) fn marked(stream: u64, event: Pooled) -> Point {
        let end = End::Event(Arc::new(event));
        Point { stream, end }
    }

    /// The end of all work that a stream has when it is waited for.
    pub(crate) fn unmarked(stream: &Stream) -> Point {
        Point {
            stream: stream.own_id(),
            end: End::Unmarked(KeptStream::new(stream)),
        }
    }

    /// Makes later work of a stream with this id wait for the moment. Does nothing on its own stream.
    pub(crate) fn hold_back(
        &self,
        stream: &Stream,
        id: u64,
        events: &EventPools,
    ) -> Result<(), Error> {
        match &self.end {
            _ if self.stream == id => Ok(()),
            End::Event(event) => Ok(event.hold_back(stream)?),
            End::Unmarked(kept) => kept.with(|user| match user {
                Some(user) if user.own_id() == self.stream => {
                    // A wait for captured work would draw the stream into the capture.
                    capture::refuse_capture(user)?;
                    Ok(events.record(user)?.hold_back(stream)?)
                }
                // It was retired, or the handle means another stream on this thread.
                _ => wait_unless_capturing(kept.stream().context()),
            }),
        }
    }
}

/// Waits on the host for all work of a context. Refuses while something captures there, since the wait would
/// invalidate the capture.
pub(crate) fn wait_unless_capturing(context: &Context) -> Result<(), Error> {
    match capture::capture_in(context)? {
        Some(stream) => Err(Error::Capturing { stream }),
        None => Ok(wait_for_context(context)?),
    }
}

/// Adds all work of a stream, unless the stream is in the list.
pub(crate) fn add_user(users: &mut Vec<Point>, stream: &Stream) {
    let id = stream.own_id();
    if users.iter().all(|known| known.stream != id) {
        users.push(Point::unmarked(stream));
    }
}
