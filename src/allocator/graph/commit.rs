//! The driver calls of graph pools: over plans, never with the heap's lock.

use crate::driver::{Context, DriverError, Entered, sys};

use crate::allocator::extent::record::{NIL, SpaceId};
use crate::allocator::graph::arena::Arena;
use crate::allocator::graph::lease::{self, Lease, Leases};
use crate::allocator::graph::plan::Plan;
use crate::allocator::physical::commit::{self, Maker};
use crate::allocator::physical::{Fresh, GrowthFailure, Release};
use crate::allocator::report::GrowthReason;

/// A plan that was not carried out, and what could not be undone.
pub(crate) struct NotMade {
    pub failure: GrowthFailure,
    /// Bytes that are still mapped where the view was to begin.
    pub lost: u64,
}

/// Makes what was planned, or nothing. The new handles.
pub(crate) fn make(maker: &Maker<'_>, plan: &Plan) -> Result<Vec<u64>, NotMade> {
    let fresh = plan.fresh.as_ref().map(fresh_at);
    let handles = match &fresh {
        Some(fresh) => commit::map(maker, fresh).map_err(not_made)?,
        None => Vec::new(),
    };
    let Err((error, lost)) = show(maker, plan, &handles) else {
        return Ok(handles);
    };
    let failure = match &fresh {
        Some(fresh) => commit::unmake(maker, fresh, &handles, error),
        None => GrowthFailure {
            error,
            mapped: Vec::new(),
            orphaned_handles: Vec::new(),
        },
    };
    Err(NotMade { failure, lost })
}

/// Moves a claimed handle from its home to where it is planned in a pool. Also returns whether it left its home.
pub(crate) fn move_in(
    maker: &Maker<'_>,
    planned: &(u64, Vec<u64>),
    (from, handle): (&Release, u64),
) -> (bool, Result<Vec<u64>, NotMade>) {
    let (left, made) = commit::remap(maker, &fresh_at(planned), (from, handle));
    (left, made.map_err(not_made))
}

fn not_made(failure: GrowthFailure) -> NotMade {
    NotMade { failure, lost: 0 }
}

/// New handles of a pool, by their home and their sizes.
fn fresh_at((addr, sizes): &(u64, Vec<u64>)) -> Fresh {
    Fresh {
        space: SpaceId::Large,
        id: NIL,
        shards: Vec::new(),
        addr: *addr,
        sizes: sizes.clone(),
        stretches: vec![(*addr, sizes.iter().sum())],
        reason: GrowthReason::Short,
    }
}

/// Maps the view of a plan. With the error comes how much of it could not be unmapped again.
fn show(maker: &Maker<'_>, plan: &Plan, fresh: &[u64]) -> Result<(), (DriverError, u64)> {
    let Some((base, _)) = &plan.view else {
        return Ok(());
    };
    let entered = maker.context.enter().map_err(|error| (error, 0))?;
    let mut fresh = fresh.iter();
    let (mut mapped, mut at) = (Vec::new(), *base);
    let shown = (|| {
        for (bytes, known) in &plan.shown {
            let Some(handle) = known.as_ref().or_else(|| fresh.next()) else {
                break;
            };
            // SAFETY: the range is reserved for this view alone and holds no mapping there; the handle is alive and
            // of this size.
            unsafe { entered.mem_map(at, *bytes as usize, *handle) }?;
            mapped.push(*bytes);
            at += bytes;
        }
        // SAFETY: mapped just now by whole handles.
        unsafe { entered.set_access(*base, (at - base) as usize, maker.access) }
    })();
    shown.map_err(|error| {
        while let Some(bytes) = mapped.last() {
            at -= bytes;
            // SAFETY: mapped just now as one handle; nobody was told the address.
            if unsafe { entered.mem_unmap(at, *bytes as usize) }.is_err() {
                return (error, at + bytes - base);
            }
            mapped.pop();
        }
        (error, 0)
    })
}

/// Has a graph, all executables made of it and their launches keep a lease of a pool, which does not count it yet.
///
/// # Safety
/// `graph` must be live, and nobody uses it meanwhile.
pub(crate) unsafe fn retain(
    context: &Context,
    graph: sys::CUgraph,
    pool: &Leases,
) -> Result<Lease, DriverError> {
    let lease = Lease::new(pool);
    let entered = context.enter()?;
    let held = lease.clone().into_driver();
    // SAFETY: the caller vouches for the graph; the reference is good for the function, which calls nothing.
    let retained = unsafe { entered.on_graph_destroyed(graph, lease::ended, held) };
    if retained.is_err() {
        // SAFETY: the driver never calls it after an error.
        unsafe { lease::ended(held) };
    }
    retained.map(|()| lease)
}

/// Gives everything in an arena back to the driver, which nobody uses. What could not be given back stays in it; the
/// first error.
pub(crate) fn dissolve(context: &Context, arena: &mut Arena) -> Result<(), DriverError> {
    let entered = context.enter()?;
    let mut first = Ok(());
    let views = arena.views.iter().map(|(base, view)| (*base, view.bytes()));
    let seconds: Vec<(u64, u64)> = views.chain(std::mem::take(&mut arena.lost)).collect();
    arena.views.clear();
    for (base, bytes) in seconds {
        if let Err(error) = unmap(&entered, base, bytes) {
            arena.lost.insert(base, bytes);
            first = first.and(Err(error));
        }
    }
    for (home, handle, mapped) in arena.take_handles() {
        let given = (|| {
            if mapped {
                unmap(&entered, home, handle.bytes).map_err(|error| (true, error))?;
            }
            // SAFETY: the handle is the pool's, and mapped nowhere that the pool knows of any more.
            unsafe { entered.mem_release(handle.handle) }.map_err(|error| (false, error))
        })();
        if let Err((mapped, error)) = given {
            arena.stuck.push((mapped.then_some(home), handle));
            first = first.and(Err(error));
        }
    }
    first
}

fn unmap(entered: &Entered<'_>, at: u64, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: whole mappings of a pool that nobody uses: no graph, no block, no work.
    unsafe { entered.mem_unmap(at, bytes as usize) }
}
