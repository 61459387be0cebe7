//! Order between streams: who waits for whom when memory changes hands.

use crate::driver::{Context, Stream, StreamKind, sys};
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

use crate::error::{Error, StreamMisuse};

/// What the consumer of an export says about itself.
///
/// The consumer's work must come after what the producer gave to the column's stream before the
/// export, and the memory must not be reused before the consumer's work is done, though the consumer
/// may release the export while that work is still queued. Each variant sees to both.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Consumer {
    /// The consumer works on this stream alone. The stream waits for the column's; once everything is
    /// released, the memory is reused only when the stream is done with what it was given until then.
    /// Nothing ever waits on the host.
    ///
    /// A borrowed stream must outlive the export or be retired
    /// ([`Allocator::retire`](crate::Allocator::retire)) before it is destroyed.
    Tracked(Stream),
    /// The consumer starts on this stream, which waits for the column's. The stream may be gone when
    /// the export is released, and others may be in use by then, so the last release waits on the host
    /// for all work of the column's context, and of the stream's.
    Untracked(Stream),
    /// The consumer sees to the order by itself when it starts. The last release waits as in
    /// [`Untracked`](Self::Untracked). Our own memory that comes back
    /// ([`Column::from_dlpack`](super::Column::from_dlpack)) is ordered behind its home then, so that
    /// this says nothing which safe code could break.
    Unordered,
}

impl Consumer {
    /// What the `stream` argument of Python's `__dlpack__` says: none and 1 are the legacy default stream of
    /// `context`, 2 the calling thread's own in it, -1 asks for no order, anything else is a handle, which is
    /// used in this export only.
    ///
    /// # Errors
    /// [`StreamMisuse::NotAStream`] for 0 and other negative numbers; driver errors.
    ///
    /// # Safety
    /// A handle must be a live stream of a context of the device until the export has been made.
    pub unsafe fn from_protocol(context: &Context, stream: Option<i64>) -> Result<Consumer, Error> {
        let raw = match stream {
            Some(-1) => return Ok(Consumer::Unordered),
            Some(value @ ..=0) => return Err(Error::Stream(StreamMisuse::NotAStream { value })),
            None => 1,
            Some(value) => value as usize,
        };
        let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: the caller vouches for the handle.
        let stream = unsafe { Stream::from_raw(context, raw) }?;
        Ok(match stream.kind() {
            StreamKind::Borrowed => Consumer::Untracked(stream),
            // These are never destroyed.
            _ => Consumer::Tracked(stream),
        })
    }
}

/// What is known about the producer of an import.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Producer {
    /// The producer was told the importing stream and let it wait: so asks the exchange protocol, and
    /// so does the event of an Arrow array. When the column is dropped while its streams still work,
    /// the drop waits for them on the host before it releases the memory.
    Ordered,
    /// The producer works on this stream: the importing stream waits for it. When the column is
    /// dropped, this stream waits for the column's streams, and nothing waits on the host. A borrowed
    /// stream must outlive the column.
    Stream(Stream),
}

/// Lets everything that `later` is given from now on come after everything that `earlier` was given
/// so far.
pub(super) fn order(earlier: &Stream, later: &Stream, events: &EventPools) -> Result<(), Error> {
    if earlier.id()? == later.id()? {
        return Ok(());
    }
    capture::refuse_capture(earlier)?;
    capture::refuse_capture(later)?;
    Ok(order::order(earlier, later, events)?)
}

/// Waits on the host until everything that the stream was given is over, done or failed.
pub(super) fn wait_until_over(stream: &Stream) -> Result<(), Error> {
    capture::refuse_capture(stream)?;
    if stream.synchronize().is_err() {
        order::wait_until_idle(stream.context())?;
    }
    Ok(())
}
