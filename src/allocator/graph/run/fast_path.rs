//! Graph pools: the fast path for requests and frees of a capturing stream that use the same pool as its previous ones.
//! The earlier lookup remains valid, and only the nodes that the stream is behind are queried.

use crate::allocator::graph::pooled;
use std::cell::Cell;
use std::sync::atomic::Ordering;

use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::streams;
use crate::driver::Stream;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::arena::{Mark, Tag};
use crate::allocator::graph::capture::CaptureStatus;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Graphs, Requester};
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::AfterFree;
use crate::error::Error;

/// [`allocate`](super::allocate::allocate) for a capturing stream whose previous request went to a pool, from
/// available memory, if nothing has changed since.
pub(crate) fn allocate(
    engine: &Engine,
    named: &Named<'_>,
    info: &CaptureStatus,
    request: &Checked,
) -> Result<Option<Grant>, Error> {
    let device = |stream: &Stream| stream.context().device() == &engine.device;
    if engine.deferred.load(Ordering::Relaxed) || request.single || !named.stream.is_none_or(device)
    {
        return Ok(None);
    }
    let (raw, fit) = (named.raw as usize, request.fit());
    let route = Cell::new(None);
    let place = |graphs: &mut Graphs| {
        let (place, found) = graphs.route(info.id, named.key, raw)?;
        route.set(Some((found.version, found.pool, found.user.user())));
        Some(place)
    };
    let grant = streams::advance_from(engine, raw, info, place, |heap, number, stream| {
        let (version, pool, user) = route.take()?;
        let place = match heap.graphs.is_route_valid(version, pool) {
            true => {
                let requester = Requester::Captured {
                    capture: info.id,
                    number,
                    stream,
                };
                heap.graphs.take(pool, requester, fit)
            }
            false => None,
        };
        let Some(place) = place else {
            // The user is dropped without the lock, because it may hold the last reference to the stream.
            route.set(Some((version, pool, user)));
            return None;
        };
        let user = user.unwrap_or_else(|| {
            let user = named.user(Some(info.id));
            heap.graphs.set_route_user((info.id, stream), &user);
            user
        });
        let sizes = (fit.granules, request.requested);
        Some(pooled::add(heap, pool, sizes, place, Few::from([user])))
    });
    Ok(grant?.flatten())
}

/// Frees a block that was allocated in this capture and that no other stream uses, if nothing else has to be
/// checked: this thread named the stream last, the graph has its lease, and no scope of the capture was closed.
pub(crate) fn free(
    engine: &Engine,
    (life, ptr): ((u32, u32), u64),
    (pool, user): (u64, &User),
    info: &CaptureStatus,
) -> Result<bool, Error> {
    if user.since != Some(info.id) {
        return Ok(false);
    }
    let place = |graphs: &mut Graphs| graphs.place_if_unchanged(info.id, user, pool);
    let freed = streams::advance_from(engine, user.raw, info, place, |heap, _, stream| {
        let live = heap.graphs.pools.get(&pool)?.arena.live.get(&ptr);
        let live = live.filter(|_| pooled::is_live(heap, life))?;
        let same = matches!(&*live.users, [known] if known.is_copy_of(user));
        if !same || !live.pending.is_empty() {
            return None;
        }
        let capture = heap.graphs.captures.get(&info.id)?;
        if !capture.left.is_empty() {
            return None;
        }
        let seen = capture.order.last_nodes(stream);
        let tag = Tag {
            marks: Few::from([Mark {
                capture: info.id,
                seen,
            }]),
            captured: true,
            ..Tag::default()
        };
        let freed = pooled::remove(heap, pool, ptr, tag);
        let rest = engine.rest_of_free(heap, AfterFree::default());
        Some((freed, rest, heap.graphs.has_leaving()))
    });
    let Some((freed, rest, has_leaving)) = freed?.flatten() else {
        return Ok(false);
    };
    drop(freed);
    if has_leaving {
        pools::release_unused(engine);
    }
    engine.finish_free(rest);
    Ok(true)
}
