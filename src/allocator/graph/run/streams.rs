//! Queries of streams that use graph pools: their captures, the nodes that they are behind, and events behind their
//! work.

use crate::allocator::engine::Engine;
use crate::allocator::engine::contexts;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::Graphs;
use crate::allocator::graph::addresses::Addresses;
use crate::allocator::graph::arena::Arena;
use crate::allocator::graph::capture::{Capture, CaptureStatus};
use crate::allocator::graph::commit;
use crate::allocator::graph::order::Edge;
use crate::allocator::graph::user::User;
use crate::allocator::heap::Heap;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::stream::slot::{StreamKey, is_per_thread, is_special};
use crate::driver::{Context, Dependency, Stream, sys};
use crate::error::{Error, GraphPoolError, StreamMisuse};
use crate::sync::capture::is_of_capture;
use crate::sync::event::Pooled;

/// Minimum step, in bytes, in which addresses are leased for a pool.
const FIRST_LEASE: u64 = 1 << 30;

/// Refuses the per-thread default stream of another thread: on this thread its handle means another stream.
fn refuse_other_threads(engine: &Engine, key: StreamKey, raw: usize) -> Result<(), Error> {
    let own = || key == StreamKey::Id(engine.context.per_thread_id());
    match is_per_thread(raw) && !own() {
        true => Err(Error::Stream(StreamMisuse::WrongThread)),
        false => Ok(()),
    }
}

/// Returns the capture that a stream is in.
pub(crate) fn capture_of(engine: &Engine, user: &User) -> Result<Option<CaptureStatus>, Error> {
    let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
    capture_of_named(engine, user.key, raw, user.stream.as_ref())
}

/// [`capture_of`] for a stream as a call names it.
pub(crate) fn capture_of_named(
    engine: &Engine,
    key: StreamKey,
    raw: sys::CUstream,
    stream: Option<&Stream>,
) -> Result<Option<CaptureStatus>, Error> {
    refuse_other_threads(engine, key, raw as usize)?;
    let context = stream.map_or(&engine.context, Stream::context);
    let current = match is_special(raw) {
        true => Some(context.make_current().map_err(|e| engine.error(e))?),
        false => None,
    };
    // For a stream that may be capturing, the capture itself is queried directly, without asking first whether
    // there is one.
    let at_once = engine.driver().may_be_capturing(raw);
    // SAFETY: the caller that named the stream guarantees that it is alive, and special handles are valid while a
    // context is current.
    let asked = unsafe {
        let captures = match at_once {
            true => Ok(true),
            false => engine.driver().is_capturing(raw),
        };
        match captures {
            Ok(true) => engine.driver().read_capture(raw, edge),
            answer => answer.map(|_| None),
        }
    };
    drop(current);
    let present =
        asked.map(|asked| asked.map(|(id, graph, edges)| CaptureStatus { id, graph, edges }));
    present.map_err(|error| match is_of_capture(error.code()) {
        true => Error::Capturing {
            stream: raw as usize,
        },
        false => engine.error_at(stream.map(Stream::context), raw, error),
    })
}

/// Makes the graph of a capture keep the pool's memory, before the capture receives or uses any.
pub(crate) fn lease(engine: &Engine, info: &CaptureStatus, pool: u64) -> Result<(), Error> {
    if !engine.open()?.graphs.lacks_lease(info.id, pool) {
        return Ok(());
    }
    // Memory that earlier captures freed is available to this one as soon as they are known to have ended.
    contexts::review_captures(engine);
    let leases = engine.lock().graphs.leases_of(pool)?;
    // SAFETY: the graph belongs to the capture of the stream that this thread names.
    let lease = match unsafe { commit::retain(&engine.context, info.graph, &leases) } {
        Ok(lease) => Some(lease),
        Err(error) if error.code() == sys::CUresult::CUDA_ERROR_NOT_FOUND => None,
        Err(error) => return Err(engine.error(error)),
    };
    engine.open()?.graphs.leased(info.id, pool, lease);
    Ok(())
}

pub(crate) fn lease_addresses(
    engine: &Engine,
    pool: u64,
    bytes: u64,
    of: impl Fn(&mut Arena) -> &mut Addresses,
) -> Result<(), Error> {
    let (end, held) = {
        let mut heap = engine.lock();
        let Some(known) = heap.graphs.pools.get_mut(&pool) else {
            return Err(Error::GraphPool(GraphPoolError::Released));
        };
        let addresses = of(&mut known.arena);
        (addresses.end(), addresses.held())
    };
    let least = bytes.next_multiple_of(PHYSICAL_GRANULE);
    let usual = held.clamp(FIRST_LEASE, engine.total_memory.max(FIRST_LEASE));
    let lengths = [usual.max(least).next_multiple_of(PHYSICAL_GRANULE), least];
    let leased = engine.addresses.lease_for(&engine.context, end, lengths);
    let lease = leased.map_err(|e| engine.error(e))?;
    let open = engine.open();
    let mut heap = match open {
        Ok(heap) => heap,
        Err(error) => {
            engine.addresses.give_back(lease.base, lease.bytes);
            return Err(error);
        }
    };
    match heap.graphs.pools.get_mut(&pool) {
        Some(pool) => of(&mut pool.arena).add(lease.base, lease.bytes, lease.grown),
        None => {
            drop(heap);
            engine.addresses.give_back(lease.base, lease.bytes);
        }
    }
    Ok(())
}

/// Queries which nodes a stream is behind in its capture, and applies the result at the stream's place there.
pub(crate) fn advance<T>(
    engine: &Engine,
    user: &User,
    info: &CaptureStatus,
    known: impl FnOnce(&Capture, usize) -> T,
) -> Result<T, Error> {
    let place = |graphs: &mut Graphs| Some(graphs.capture(info.id).place_of(user));
    let done = advance_from(engine, user.raw, info, place, |heap, number, place| {
        let capture = heap.graphs.same_capture(info.id, number);
        capture.map(|capture| known(capture, place))
    });
    done?.flatten().ok_or(Error::Capturing { stream: user.raw })
}

/// Queries which nodes a stream is behind in its capture, if it has a place there, and applies the result under the
/// same lock, with the capture's number and the place.
pub(crate) fn advance_from<T>(
    engine: &Engine,
    raw: usize,
    info: &CaptureStatus,
    place: impl FnOnce(&mut Graphs) -> Option<usize>,
    then: impl FnOnce(&mut Heap, u64, usize) -> T,
) -> Result<Option<T>, Error> {
    let (number, place, mut asked) = {
        let mut heap = engine.open()?;
        let Some(place) = place(&mut heap.graphs) else {
            return Ok(None);
        };
        let Some(capture) = heap.graphs.captures.get_mut(&info.id) else {
            return Ok(None);
        };
        let number = capture.number;
        match capture.order.walk(place, &info.edges) {
            Some(asked) => (number, place, asked),
            None => {
                let done = then(&mut heap, number, place);
                drop(heap);
                return Ok(Some(done));
            }
        }
    };
    loop {
        let (walk, node) = asked;
        let dependencies = {
            let raw = std::ptr::with_exposed_provenance_mut(node);
            // SAFETY: the node belongs to the capture of the stream, and no other thread uses its graph while the
            // stream is in use.
            unsafe { engine.driver().read_node(raw, edge) }
        };
        let mut heap = engine.open()?;
        let Some(capture) = heap.graphs.same_capture(info.id, number) else {
            return Err(Error::Capturing { stream: raw });
        };
        let next = match dependencies {
            Ok(dependencies) => capture.order.learn(walk, node, dependencies),
            Err(error) => {
                capture.order.give_up(&walk);
                return Err(engine.error(error));
            }
        };
        match next {
            Some(next) => asked = next,
            None => {
                let done = then(&mut heap, number, place);
                drop(heap);
                return Ok(Some(done));
            }
        }
    }
}

/// Whether a stream that the current call does not name must not be used: its owner may have destroyed it, or its
/// context is distrusted.
pub(crate) fn must_not_be_used(engine: &Engine, user: &User) -> bool {
    let streams = &engine.lock().streams;
    let known = streams.find(user.key);
    let raw = user.stream.is_none() && user.raw > 2;
    known.is_some_and(|stream| streams[stream].distrusted.is_some())
        || (engine.unretired && raw && !streams.has_lasting(user.raw))
}

/// Returns an event behind all work submitted so far to a stream outside captures.
pub(crate) fn end_of(engine: &Engine, user: &User) -> Result<Pooled, Error> {
    refuse_other_threads(engine, user.key, user.raw)?;
    let recorded = match &user.stream {
        Some(stream) => engine.events.record(stream),
        None => {
            let raw = std::ptr::with_exposed_provenance_mut(user.raw);
            let named = Named {
                key: user.key,
                raw,
                stream: None,
                cache: None,
            };
            let context = engine.context_of(&named)?;
            // SAFETY: the stream lives until it is retired, by the contract for raw streams, and retirement waits
            // for every holder of the user's token.
            let stream = unsafe { Stream::from_raw(&context, raw) };
            stream.and_then(|stream| engine.events.record(&stream))
        }
    };
    recorded.map_err(|error| match is_of_capture(error.code()) {
        true => Error::Capturing { stream: user.raw },
        false => {
            let raw = std::ptr::with_exposed_provenance_mut(user.raw);
            engine.error_at(user.stream.as_ref().map(Stream::context), raw, error)
        }
    })
}

/// Returns an event of the allocator's own context that completes after an event of another context. That context
/// may be destroyed once its streams are retired.
pub(crate) fn event_in_own_context(
    engine: &Engine,
    event: &Pooled,
    context: &Context,
) -> Result<Pooled, Error> {
    let follower = Stream::new(&engine.context).map_err(|e| engine.error(e))?;
    let queued = event.hold_back(&follower);
    let own = queued.and_then(|()| engine.events.record(&follower));
    own.map_err(|e| engine.error_in(context, e))
}

fn edge(dependency: Dependency) -> Edge {
    Edge {
        node: dependency.node.expose_provenance(),
        full: dependency.is_complete(),
    }
}
