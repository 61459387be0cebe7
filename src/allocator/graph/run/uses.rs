//! Uses of graph pool blocks by streams, inside captures and outside, and their frees.

use crate::allocator::graph::pooled;
use crate::allocator::graph::run::fast_path;
use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::streams;
use crate::locks::lines::keep_lines;
use crate::locks::lock::pause;
use crate::sync::event::Pooled;

use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::arena::{NO_STREAM, Pending};
use crate::allocator::graph::capture::{Capture, CaptureStatus, UsePoint};
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::user::User;
use crate::allocator::stream::slot::AfterFree;
use crate::error::Error;

/// The last uses of a block by its users: nodes of captures, and events behind work outside captures.
#[derive(Default)]
struct LastUses {
    captured: Few<UsePoint>,
    ends: Vec<(u64, Pooled)>,
    /// A user's stream may have been destroyed, so it was not queried.
    unqueried: bool,
    /// Leases of graphs that may touch the block, one per capturing user; `None` where the driver does not report the
    /// end of the graph.
    in_graphs: Vec<Option<Lease>>,
}

/// Frees a live block of a pool by its id and generation. The pool and the users are passed as they were looked up.
#[inline(never)]
pub(crate) fn free(
    engine: &Engine,
    life: (u32, u32),
    ptr: u64,
    (pool, users): (u64, Few<User>),
) -> Result<(), Error> {
    let gone = || Error::NotLive { ptr };
    // Declared first: the users are dropped before the log lines that they hold back are written.
    let _lines = keep_lines();
    let users = users;
    let (mut uses, mut all_covered) = (LastUses::default(), Ok(()));
    let mut asked = None;
    if let [user] = &*users
        && user.since.is_some()
        && !engine.unretired
    {
        let info = streams::capture_of(engine, user)?;
        if let Some(info) = &info
            && fast_path::free(engine, (life, ptr), (pool, user), info)?
        {
            return Ok(());
        }
        asked = Some(info);
    }
    // Every user is queried even if one fails, because the graphs of all of them need leases.
    for user in &users {
        let covered = last_use(engine, pool, user, asked.take(), &mut uses);
        all_covered = all_covered.and(covered);
    }
    let mut heap = engine.open()?;
    if !uses.in_graphs.is_empty()
        && pooled::is_live(&heap, life)
        && let Some(live) = heap.graphs.live_mut(ptr)
    {
        // Also if the free has to wait for the end of the capture, and the capture has already ended by then.
        for lease in uses.in_graphs {
            match lease {
                Some(lease) if !live.touched.contains(&lease) => live.touched.push(lease),
                Some(_) => {}
                None => live.captured = true,
            }
        }
    }
    all_covered?;
    let live = heap
        .graphs
        .live(ptr)
        .filter(|_| pooled::is_live(&heap, life));
    let live = live.ok_or_else(gone)?;
    let same = |(known, asked): (&User, &User)| known.is_copy_of(asked);
    if live.users.len() != users.len() || !live.users.iter().zip(&users).all(same) {
        // A stream was recorded or retired meanwhile.
        let used = (live.owner, live.users.clone());
        drop(heap);
        drop(users);
        return free(engine, life, ptr, used);
    }
    let mut pending = live.pending.clone();
    for (stream, event) in uses.ends {
        pending.push(heap.graphs.add_event(stream, event));
    }
    if uses.unqueried {
        pending.push(heap.graphs.add_unqueried());
    }
    let Some(tag) = heap.graphs.tag(pool, uses.captured, pending) else {
        return Err(Error::Capturing { stream: 0 });
    };
    let freed = pooled::remove(&mut heap, pool, ptr, tag);
    let rest = engine.rest_of_free(&heap, AfterFree::default());
    let has_leaving = heap.graphs.has_leaving();
    drop(heap);
    drop((freed, users));
    if has_leaving {
        pools::release_unused(engine);
    }
    engine.finish_free(rest);
    Ok(())
}

/// Determines the last use of a pool block by one of its users.
///
/// # Errors
/// [`Error::Capturing`] while that is impossible: the stream used the block before its present capture, so that no
/// event can be recorded behind the use, or another thread builds the graph, which therefore cannot be queried.
fn last_use(
    engine: &Engine,
    pool: u64,
    user: &User,
    asked: Option<Option<CaptureStatus>>,
    uses: &mut LastUses,
) -> Result<(), Error> {
    if asked.is_none()
        && streams::must_not_be_used(engine, user)
        && !engine.lock().graphs.serves_capture_of(user, pool)
    {
        uses.unqueried = true;
        // The stream is not queried, but the capture that it is known to be in may touch the block.
        if engine.lock().graphs.captures_on(user.raw) {
            uses.in_graphs.push(None);
        }
        return Ok(());
    }
    let info = match asked {
        Some(info) => info,
        None => streams::capture_of(engine, user)?,
    };
    let Some(info) = info else {
        let event = streams::end_of(engine, user)?;
        engine.open()?.graphs.note_capture(user, None);
        uses.ends.push((user.key.number(), event));
        return Ok(());
    };
    let later = Error::Capturing { stream: user.raw };
    let lacks_lease = {
        let mut heap = engine.open()?;
        if !heap.graphs.is_named_here(user, info.id) {
            if heap.graphs.lacks_lease(info.id, pool)
                && let Some(pool) = heap.graphs.pools.get_mut(&pool)
            {
                // The graph uses the pool, but nothing will report its destruction.
                pool.unreported = true;
            }
            uses.in_graphs.push(heap.graphs.lease_of(info.id, pool));
            return Err(later);
        }
        heap.graphs.lacks_lease(info.id, pool)
    };
    if lacks_lease {
        streams::lease(engine, &info, pool)?;
    }
    if user.since != Some(info.id) {
        let lease = engine.open()?.graphs.lease_of(info.id, pool);
        uses.in_graphs.push(lease);
        return Err(later);
    }
    let reached = |capture: &Capture, stream| UsePoint {
        capture: info.id,
        number: capture.number,
        seen: capture.order.last_nodes(stream),
    };
    uses.captured
        .push(streams::advance(engine, user, &info, reached)?);
    Ok(())
}

/// Records a use of a block of a pool on another stream.
pub(crate) fn record(
    engine: &Engine,
    (start, life): (u64, (u32, u32)),
    named: &Named<'_>,
    now: bool,
) -> Result<(), Error> {
    let gone = || Error::NotLive { ptr: start };
    let captured = streams::capture_of_named(engine, named.key, named.raw, named.kept())?;
    let user = named.user(captured.as_ref().map(|info| info.id));
    let known = {
        let mut heap = engine.open()?;
        heap.graphs.note_capture(&user, user.since);
        let live = heap
            .graphs
            .live(start)
            .filter(|_| pooled::is_live(&heap, life));
        let live = live.ok_or_else(gone)?;
        let (pool, users) = (live.owner, &live.users);
        let known = users.iter().any(|known| known.is(&user));
        (pool, known, heap.graphs.number())
    };
    let (pool, known, begun) = known;
    if let Some(info) = &captured {
        streams::lease(engine, info, pool)?;
    }
    let end = match (now && !known, &captured) {
        (true, None) => Some(streams::end_of(engine, &user)?),
        _ => None,
    };
    let mut heap = engine.open()?;
    if !pooled::is_live(&heap, life) {
        return Err(gone());
    }
    if let Some(info) = &captured {
        heap.graphs.capture(info.id).place_of(&user);
    }
    let ended = end.map(|event| heap.graphs.add_event(user.key.number(), event));
    let mut earlier = Vec::new();
    if let Some(live) = heap.graphs.live_mut(start) {
        let known = live.users.iter().any(|known| known.is(&user));
        live.captured |= captured.is_some();
        match ended {
            Some(ended) if known => earlier.push(ended),
            Some(ended) => {
                // The later event of a stream covers the earlier one. Events that others added since this call
                // began may have been recorded after its own.
                let before = |used: &mut Pending| used.stream == ended.stream && used.event < begun;
                earlier.extend(live.pending.extract_if(.., before));
                live.pending.push(ended);
            }
            None if known => {}
            None => live.users.push(user),
        }
    }
    let spent = heap.graphs.take_unneeded(&earlier);
    drop(heap);
    drop(spent);
    Ok(())
}

/// Whether a stream has used memory of a pool, or is known to be in a capture that does.
pub(crate) fn pools_use_stream(engine: &Engine, named: &Named<'_>) -> bool {
    engine.lock().graphs.uses_stream(&named.user(None))
}

/// Records that a stream that uses no pool was retired, because checkpoints may list it.
pub(crate) fn note_retirement(engine: &Engine, named: &Named<'_>) {
    let graphs = &mut engine.lock().graphs;
    graphs.note_retirement(&named.user(None), None);
}

/// Ends a stream's uses of pools: the stream receives no more work, and its handle is not used any more.
pub(crate) fn leave(engine: &Engine, named: &Named<'_>) -> Result<(), Error> {
    if !pools_use_stream(engine, named) {
        note_retirement(engine, named);
        return Ok(());
    }
    let user = named.user(None);
    if streams::capture_of(engine, &user)?.is_some() {
        return Err(Error::Capturing { stream: user.raw });
    }
    let mut event = streams::end_of(engine, &user)?;
    let elsewhere = event.context().filter(|c| c.id() != engine.context.id());
    let elsewhere = elsewhere.cloned();
    if let Some(context) = &elsewhere {
        event = streams::event_in_own_context(engine, &event, context)?;
    }
    let mut heap = engine.open()?;
    let end = heap.graphs.add_event(NO_STREAM, event);
    heap.graphs
        .note_retirement(&user, elsewhere.is_some().then_some(end));
    let (mut gone, pools) = (Vec::new(), heap.graphs.pools.values_mut());
    for live in pools.flat_map(|pool| pool.arena.live.values_mut()) {
        let before = live.users.len();
        live.users.retain(|known| {
            let goes = known.is(&user);
            gone.extend(goes.then(|| known.clone()));
            !goes
        });
        if live.users.len() < before {
            live.pending.push(end);
        }
    }
    let unneeded = heap.graphs.completed(&[]);
    drop(heap);
    drop(unneeded);
    // Frees in progress may still use the handle. Blocks of a capture have copies of one user.
    gone.sort_unstable_by_key(User::identity);
    gone.dedup_by(|other, left| other.is_copy_of(left));
    for left in gone {
        let mut round = 0;
        while !left.is_alone() {
            pause(round);
            round += 1;
        }
    }
    Ok(())
}
