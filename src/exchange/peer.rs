//! The other side of an exchange, and the waits between both sides.

use crate::driver::{Context, Stream, StreamKind, sys};
use crate::error::{Error, StreamMisuse};
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

/// The other side of an exchange: determines which stream waits for which, and what the release waits for.
///
/// The consumer's work must come after the producer's, and the memory must not be reused before that work is complete,
/// although the consumer may release the memory while the work is still queued. Each kind of peer ensures both:
///
/// | peer | an export | an import |
/// |---|---|---|
/// | [`on`](Self::on) a stream | the stream waits for the tensor's streams; the memory is reused after all work submitted to it before the release | the stream waits for the tensor; the drop waits for the tensor's streams |
/// | [`starting_on`](Self::starting_on) a stream | the stream waits for the tensor's streams; the last release waits on the host for all work of the two contexts | the stream waits for the tensor; the drop waits on the host for the tensor's streams |
/// | [`ordered`](Self::ordered) | nothing is queued; the last release waits on the host for all work of the context | nothing is queued; the drop waits on the host for the tensor's streams |
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
    /// The other side works on this stream only, and nothing waits on the host. A borrowed stream must outlive the
    /// exchanged memory or be retired ([`Allocator::retire`](crate::Allocator::retire), of any allocator) before it is
    /// destroyed: page-locked and imported memory then waits on the host for all work of the stream's context.
    pub fn on(stream: &Stream) -> Peer {
        Peer(Kind::On(stream.clone()))
    }

    /// The other side starts on this stream. When the memory is released, the stream may no longer exist, and other
    /// streams may use the memory.
    pub fn starting_on(stream: &Stream) -> Peer {
        Peer(Kind::StartingOn(stream.clone()))
    }

    /// The other side establishes the order at the start. Our own memory that comes back is still ordered after its
    /// home.
    ///
    /// # Safety
    /// For an export: the consumer makes its work wait for the work submitted to the tensor's stream before. For an
    /// import: the producer made the importing stream wait for its work, or that work is complete.
    pub unsafe fn ordered() -> Peer {
        Peer(Kind::Ordered)
    }

    /// Creates the peer for a consumer that passes this `stream` argument to Python's `__dlpack__`: none and 1 mean the
    /// legacy default stream of `context`, 2 the calling thread's own in it, -1 requests no order, and any other value
    /// is a handle, which is used in this exchange only.
    ///
    /// # Errors
    /// [`StreamMisuse::NotAStream`] for 0 and other negative numbers; driver errors.
    ///
    /// # Safety
    /// A handle is a live stream of a context of the device until the exchange has been made. For -1 the contract of
    /// [`ordered`](Self::ordered) applies.
    pub unsafe fn from_protocol(context: &Context, stream: Option<i64>) -> Result<Peer, Error> {
        let raw = match stream {
            // SAFETY: the caller's contract.
            Some(-1) => return Ok(unsafe { Peer::ordered() }),
            Some(value @ ..=0) => return Err(Error::Stream(StreamMisuse::NotAStream { value })),
            None => 1,
            Some(value) => value as usize,
        };
        let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: the caller is responsible for the handle.
        let stream = unsafe { Stream::from_raw(context, raw) }?;
        Ok(Peer(match stream.kind() {
            StreamKind::Borrowed => Kind::StartingOn(stream),
            // These streams are never destroyed.
            _ => Kind::On(stream),
        }))
    }
}

/// Orders everything submitted to `later` from now on after everything submitted to `earlier` so far.
pub(super) fn order(earlier: &Stream, later: &Stream) -> Result<(), Error> {
    if earlier.id()? == later.id()? {
        return Ok(());
    }
    capture::refuse_capture(earlier)?;
    capture::refuse_capture(later)?;
    Ok(order::order(earlier, later, &EventPools::default())?)
}

/// Waits on the host until all work submitted to the stream with this id has ended, successfully or not.
pub(super) fn wait_until_over(stream: &Stream, id: u64) -> Result<(), Error> {
    if stream.kind() == StreamKind::PerThreadDefault && stream.id()? != id {
        // On this thread the handle means a stream of another thread than the intended one.
        return Ok(order::wait_until_idle(stream.context())?);
    }
    capture::refuse_capture(stream)?;
    if stream.synchronize().is_err() {
        order::wait_until_idle(stream.context())?;
    }
    Ok(())
}
