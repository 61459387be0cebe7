//! The other side of an exchange, and who waits for whom.

use crate::driver::{Context, Stream, StreamKind, sys};
use crate::error::{Error, StreamMisuse};
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

/// The other side of an exchange: which stream waits for which, and what the release waits for.
///
/// The consumer's work must come after what the producer did to the memory, and the memory must not be reused
/// before that work is done, though the consumer may release it while the work is still queued. Each kind of
/// peer sees to both:
///
/// | | an export | an import |
/// |---|---|---|
/// | [`on`](Self::on) a stream | the stream waits for the tensor's; the memory is reused when the stream is done with what it was given until the release | the importing stream waits for it; when the tensor is dropped, it waits for the tensor's streams |
/// | [`starting_on`](Self::starting_on) a stream | the stream waits for the tensor's; the last release waits on the host for all work of the two contexts | the importing stream waits for it; the drop waits for the tensor's streams on the host |
/// | [`ordered`](Self::ordered) | nothing is queued; the last release waits on the host for all work of the context | nothing is queued; the drop waits as above |
///
/// `Send` and `Sync`.
#[derive(Debug, Clone)]
pub struct Peer(pub(super) Kind);

#[derive(Debug, Clone)]
pub(super) enum Kind {
    On(Stream),
    StartingOn(Stream),
    Ordered,
}

impl Peer {
    /// The other side works on this stream alone, and nothing waits on the host. A borrowed stream must outlive
    /// what is exchanged or be retired ([`Allocator::retire`](crate::Allocator::retire), of any allocator) before it is
    /// destroyed: page-locked and imported memory then waits on the host for all work of the stream's context.
    pub fn on(stream: &Stream) -> Peer {
        Peer(Kind::On(stream.clone()))
    }

    /// The other side starts on this stream, which may be gone when the memory is released, and others may be
    /// in use by then.
    pub fn starting_on(stream: &Stream) -> Peer {
        Peer(Kind::StartingOn(stream.clone()))
    }

    /// The other side sees to the order when it starts. Our own memory that comes back is ordered behind its
    /// home all the same.
    ///
    /// # Safety
    /// Of an export: the consumer lets its work wait for what the tensor's stream was given before. Of an
    /// import: the producer let the importing stream wait for its work, or that is over.
    pub unsafe fn ordered() -> Peer {
        Peer(Kind::Ordered)
    }

    /// The consumer that gives this `stream` argument to Python's `__dlpack__`: none and 1 are the legacy
    /// default stream of `context`, 2 the calling thread's own in it, -1 asks for no order, anything else is a
    /// handle, which is used in this exchange only.
    ///
    /// # Errors
    /// [`StreamMisuse::NotAStream`] for 0 and other negative numbers; driver errors.
    ///
    /// # Safety
    /// A handle is a live stream of a context of the device until the exchange has been made. For -1 the
    /// contract of [`ordered`](Self::ordered).
    pub unsafe fn from_protocol(context: &Context, stream: Option<i64>) -> Result<Peer, Error> {
        let raw = match stream {
            // SAFETY: the caller's contract.
            Some(-1) => return Ok(unsafe { Peer::ordered() }),
            Some(value @ ..=0) => return Err(Error::Stream(StreamMisuse::NotAStream { value })),
            None => 1,
            Some(value) => value as usize,
        };
        let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: the caller vouches for the handle.
        let stream = unsafe { Stream::from_raw(context, raw) }?;
        Ok(Peer(match stream.kind() {
            StreamKind::Borrowed => Kind::StartingOn(stream),
            // These are never destroyed.
            _ => Kind::On(stream),
        }))
    }
}

/// Lets everything that `later` is given from now on come after everything that `earlier` was given so far.
pub(super) fn order(earlier: &Stream, later: &Stream) -> Result<(), Error> {
    if earlier.id()? == later.id()? {
        return Ok(());
    }
    capture::refuse_capture(earlier)?;
    capture::refuse_capture(later)?;
    Ok(order::order(earlier, later, &EventPools::default())?)
}

/// Waits on the host until everything that the stream with this id was given is over, done or failed.
pub(super) fn wait_until_over(stream: &Stream, id: u64) -> Result<(), Error> {
    if stream.kind() == StreamKind::PerThreadDefault && stream.id()? != id {
        // Here the handle means another thread's stream than the one that was meant.
        return Ok(order::wait_until_idle(stream.context())?);
    }
    capture::refuse_capture(stream)?;
    if stream.synchronize().is_err() {
        order::wait_until_idle(stream.context())?;
    }
    Ok(())
}
