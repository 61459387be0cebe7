//! Requests to graph pools: the choice of the pool, and its memory.
//!
//! A capturing stream is queried only in calls that name it or that free memory it used, and only by queries that a
//! capture allows: whether it captures, in which capture, and behind which nodes. No event is recorded on it, and no
//! wait is made for it.

use crate::allocator::engine::device;
use crate::allocator::engine::segments;
use crate::allocator::graph::pooled;
use crate::allocator::graph::pooled::PoolRequest;
use crate::allocator::graph::run::fast_path;
use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::refuse_released;
use crate::allocator::graph::run::streams;
use crate::allocator::inspect::shortage::out_of_memory_in_pool;
use crate::driver::{DriverError, process, sys};

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::graph::Requester;
use crate::allocator::graph::arena::Fit;
use crate::allocator::graph::capture::{Capture, CaptureStatus, Route};
use crate::allocator::graph::commit;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::plan::PlanFailure;
use crate::allocator::graph::scope::{Answer, ScopeQuery, as_predicate, is_in_predicate};
use crate::allocator::graph::user::User;
use crate::allocator::heap::request::Checked;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::error::{Error, GraphPoolError};
use crate::locks::thread_id::ThreadId;

/// Allocates from the pool that a request belongs to, if there are scopes and it belongs to one.
#[inline(never)]
pub(crate) fn allocate(
    engine: &Engine,
    named: &Named<'_>,
    request: &Checked,
    cached_only: bool,
) -> Result<Option<Grant>, Error> {
    engine.usable()?;
    if !engine.is_scoped() {
        return Ok(None);
    }
    refuse_in_predicate()?;
    let info = streams::capture_of_named(engine, named.key, named.raw, named.kept())?;
    if let Some(info) = &info
        && let Some(grant) = fast_path::allocate(engine, named, info, request)?
    {
        return Ok(Some(grant));
    }
    let user = named.user(info.as_ref().map(|info| info.id));
    let Some((scope, pool, version)) = resolve(engine, &user, info.as_ref())? else {
        return Ok(None);
    };
    if request.single {
        // Requests in pools do not consider where handles end.
        return Err(Error::NotSupported {
            what: "blocks of a graph pool in a single handle",
        });
    }
    if let Some(stream) = named.stream
        && stream.context().device() != &engine.device
    {
        return Err(Error::WrongDevice {
            expected: engine.device.ordinal(),
            found: stream.context().device().ordinal(),
        });
    }
    let lacks_lease = {
        let heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        heap.graphs.ensure_present(pool)?;
        let mut capture = info.iter();
        capture.any(|info| heap.graphs.lacks_lease(info.id, pool))
    };
    engine.free_deferred();
    let requester = match &info {
        None => Requester::Eager {
            stream: user.key.number(),
        },
        Some(info) if engine.driver().is_joined(info.id) => {
            // The graph's other nodes may use any memory of the pool, and the allocator cannot see which.
            return Err(Error::NotSupported {
                what: "graph pool memory in a capture into a graph that has nodes",
            });
        }
        Some(info) => {
            if lacks_lease {
                streams::lease(engine, info, pool)?;
            }
            let place = |capture: &Capture, stream| (capture.number, stream);
            let (number, stream) = streams::advance(engine, &user, info, place)?;
            Requester::Captured {
                capture: info.id,
                number,
                stream,
            }
        }
    };
    let awaits = {
        let mut heap = engine.open()?;
        if let Requester::Captured { capture, .. } = requester
            && !heap.graphs.serve(capture, scope, pool)
        {
            return Err(Error::Capturing { stream: user.raw });
        }
        if let Requester::Captured {
            capture, stream, ..
        } = requester
        {
            let user = user.trace();
            let thread = ThreadId::current();
            let route = Route {
                version,
                pool,
                user,
                thread,
            };
            heap.graphs.set_route((capture, stream), route);
        }
        heap.graphs.has_events()
    };
    if awaits {
        pools::poll_events(engine, pool, false)?;
    }
    let request = PoolRequest {
        pool,
        requester,
        fit: Fit {
            views: request.views && engine.views.are_allowed(),
            ..request.fit()
        },
        requested: request.requested,
    };
    let stream = (user.key, user.raw);
    let made = obtain(engine, &request, user, cached_only);
    if process::is_recording()
        && let Err(Error::OutOfMemory(refused)) = &made
    {
        {
            let heap = engine.lock();
            heap.recorder.record_refusal(&heap.streams, refused, stream)
        };
    }
    made.map(Some)
}

/// The scope and the pool of a request, tagged with the version of the scopes whose filters were called.
fn resolve(
    engine: &Engine,
    user: &User,
    info: Option<&CaptureStatus>,
) -> Result<Option<(u64, u64, u64)>, Error> {
    let asked = ScopeQuery {
        user,
        capture: info.map(|info| info.id),
        thread: ThreadId::current(),
    };
    let mut filtered = None;
    loop {
        let (answer, version) = {
            let mut heap = engine.open()?;
            heap.graphs.note_capture(user, asked.capture);
            let scopes = &mut heap.graphs.scopes;
            let answer = scopes.resolve(&asked, filtered.is_some());
            (answer, filtered.unwrap_or(scopes.version))
        };
        match answer {
            Answer::Pool { scope, pool } => return Ok(Some((scope, pool, version))),
            Answer::NoPool => return Ok(None),
            Answer::Filters(filters) => {
                let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(user.raw);
                let mut filters = filters.into_iter();
                let fits = as_predicate(|| filters.find(|(_, _, filter)| filter(raw)));
                if let Some((scope, pool, _)) = fits {
                    return Ok(Some((scope, pool, version)));
                }
                filtered = Some(version);
            }
        }
    }
}

/// Whether requests of a stream that was recently found capturing go to a pool.
pub(crate) fn is_served(engine: &Engine, named: &Named<'_>) -> Result<bool, Error> {
    refuse_in_predicate()?;
    let info = streams::capture_of_named(engine, named.key, named.raw, named.kept())?;
    let user = named.user(info.as_ref().map(|info| info.id));
    Ok(info.is_none() || resolve(engine, &user, info.as_ref())?.is_some())
}

/// Takes a request from the pool's memory, or makes room for it.
fn obtain(
    engine: &Engine,
    request: &PoolRequest,
    user: User,
    cached_only: bool,
) -> Result<Grant, Error> {
    let (mut request, pool) = (*request, request.pool);
    let (mut made_room, mut refusal, mut asked) = (false, None, false);
    loop {
        let mut heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        heap.graphs.ensure_present(pool)?;
        // A view shows handles of the driver, which segments of a source do not have.
        request.fit.views &= heap.graphs.source_of(pool).is_none();
        if let Requester::Captured {
            capture, number, ..
        } = request.requester
            && heap.graphs.same_capture(capture, number).is_none()
        {
            return Err(Error::Capturing { stream: user.raw });
        }
        let taken = heap.graphs.take(pool, request.requester, request.fit);
        if let Some(place) = taken {
            let users = Few::from([user]);
            return Ok(pooled::add(&mut heap, pool, request.sizes(), place, users));
        }
        if cached_only {
            return Err(Error::NotCached);
        }
        if !asked {
            drop(heap);
            device::query_device(engine);
            asked = true;
            continue;
        }
        let plan = pooled::plan(&mut heap, &request);
        drop(heap);
        let plan = match plan {
            Ok(plan) => plan,
            Err(PlanFailure::Homes(bytes)) => {
                if take_segment(engine, &request, bytes, user.raw)? {
                    continue;
                }
                let leased =
                    streams::lease_addresses(engine, pool, bytes, |arena| &mut arena.homes);
                leased.map_err(|error| no_addresses_error(engine, &request, error))?;
                continue;
            }
            Err(PlanFailure::Sites(bytes)) => {
                let leased =
                    streams::lease_addresses(engine, pool, bytes, |arena| &mut arena.sites);
                if leased.is_err() {
                    // New memory at its home addresses may need fewer addresses.
                    request.fit.views = false;
                }
                continue;
            }
            Err(PlanFailure::Memory(bytes)) if made_room => {
                return Err(no_room_error(engine, &request, bytes, refusal));
            }
            Err(PlanFailure::Memory(bytes)) => {
                (made_room, asked) = (true, false);
                pools::make_room(engine, pool, bytes, refusal)?;
                continue;
            }
        };
        let fresh = plan.fresh_bytes();
        let maker = engine.maker();
        let made = commit::make(&maker, &plan);
        if made.is_ok()
            && let Some((home, sizes)) = &plan.fresh
        {
            let handles = segments::handles_from(*home, sizes);
            segments::report(engine, SegmentChange::Birth, Some(pool), handles);
        }
        let mut heap = engine.lock();
        let place = pooled::commit_plan(&mut heap, pool, plan, made.as_deref());
        drop(maker);
        match made {
            Ok(_) => {
                if let Some(place) = place {
                    let users = Few::from([user]);
                    return Ok(pooled::add(&mut heap, pool, request.sizes(), place, users));
                }
            }
            Err(not_made) => {
                drop(heap);
                let cause = not_made.failure.error;
                if !cause.is_out_of_memory() {
                    return Err(engine.error(cause));
                }
                refusal = Some(cause);
                if made_room {
                    return Err(no_room_error(engine, &request, fresh, refusal));
                }
                (made_room, asked) = (true, false);
                pools::make_room(engine, pool, fresh, refusal)?;
            }
        }
    }
}

/// Adds a segment of this many bytes to the pool of a request, if the pool has a source of segments.
fn take_segment(
    engine: &Engine,
    request: &PoolRequest,
    bytes: u64,
    stream: usize,
) -> Result<bool, Error> {
    let Some(source) = engine.open()?.graphs.begin_source_call(request.pool) else {
        return Ok(false);
    };
    let bytes = bytes.next_multiple_of(PHYSICAL_GRANULE);
    let raw = std::ptr::with_exposed_provenance_mut(stream);
    let found = source.0.allocate(bytes, raw);
    let usable = found.filter(|address| *address != 0 && address % GRANULE == 0);
    let segment = usable.map(|address| (address, bytes));
    segments::report(engine, SegmentChange::Birth, Some(request.pool), segment);
    engine.lock().graphs.end_source_call(request.pool, segment);
    match (found, usable) {
        (_, Some(_)) => Ok(true),
        (Some(address), None) => {
            source.0.free(address, bytes);
            Err(GraphPoolError::Misaligned { address }.into())
        }
        (None, None) => Err(no_room_error(engine, request, bytes, None)),
    }
}

/// Returns the error for a pool request for which no addresses could be leased.
fn no_addresses_error(engine: &Engine, request: &PoolRequest, error: Error) -> Error {
    match error {
        Error::Driver(refusal) => {
            let needed = request.fit.bytes().next_multiple_of(PHYSICAL_GRANULE);
            no_room_error(engine, request, needed, Some(refusal))
        }
        error => error,
    }
}

/// Returns the error for a pool request for which the driver provided no memory.
fn no_room_error(
    engine: &Engine,
    request: &PoolRequest,
    needed: u64,
    refusal: Option<DriverError>,
) -> Error {
    let error = out_of_memory_in_pool(&mut engine.lock(), request, needed);
    device::out_of_memory(engine, error, refusal)
}

/// Refuses to look up the pool of a request inside a predicate, because the predicate would be called for its own
/// request without end.
fn refuse_in_predicate() -> Result<(), Error> {
    match is_in_predicate() {
        true => Err(GraphPoolError::InPredicate.into()),
        false => Ok(()),
    }
}
