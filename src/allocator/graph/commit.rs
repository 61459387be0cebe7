//! The driver calls of graph pools: they execute plans, never with the heap's lock.

use crate::driver::{Context, DriverError, Entered, sys};

use crate::allocator::graph::arena::Arena;
use crate::allocator::graph::lease::{self, Lease, Leases};
use crate::allocator::graph::plan::Plan;
use crate::allocator::physical::commit::{self, PhysicalConfig};
use crate::allocator::physical::{Fresh, GrowthFailure, Release};

/// A failed plan, and what could not be undone.
pub(crate) struct FailedPlan {
    pub failure: GrowthFailure,
    /// Mappings of the view that may still exist: address and bytes.
    pub lost: Vec<(u64, u64)>,
}

/// Executes a plan completely, or undoes it. Returns the new handles.
pub(crate) fn make(maker: &PhysicalConfig<'_>, plan: &Plan) -> Result<Vec<u64>, FailedPlan> {
    let fresh = plan.fresh.as_ref().map(fresh_at);
    let handles = match &fresh {
        Some(fresh) => commit::map(maker, fresh).map_err(not_made)?,
        None => Vec::new(),
    };
    let Err((error, lost)) = show(maker, plan, &handles) else {
        return Ok(handles);
    };
    let failure = match &fresh {
        Some(fresh) => commit::release_mapped(maker, fresh, &handles, error),
        None => GrowthFailure {
            error,
            mapped: Vec::new(),
        },
    };
    Err(FailedPlan { failure, lost })
}

/// Moves a claimed handle from its home to its planned place in a pool. Also returns whether it left its home.
pub(crate) fn move_handle_in(
    maker: &PhysicalConfig<'_>,
    planned: &(u64, Vec<u64>),
    (from, handle): (&Release, u64),
) -> (bool, Result<Vec<u64>, FailedPlan>) {
    let (left, made) = commit::remap(maker, &fresh_at(planned), (from, handle));
    (left, made.map_err(not_made))
}

fn not_made(failure: GrowthFailure) -> FailedPlan {
    FailedPlan {
        failure,
        lost: Vec::new(),
    }
}

/// Describes new handles of a pool, by their home and their sizes.
fn fresh_at((addr, sizes): &(u64, Vec<u64>)) -> Fresh {
    Fresh::at(*addr, sizes.clone())
}

/// Maps the view of a plan. The error includes the mappings that could not be undone.
fn show(
    maker: &PhysicalConfig<'_>,
    plan: &Plan,
    fresh: &[u64],
) -> Result<(), (DriverError, Vec<(u64, u64)>)> {
    let Some((base, _)) = &plan.view else {
        return Ok(());
    };
    let entered = maker.context.enter().map_err(|error| (error, Vec::new()))?;
    let mut fresh = fresh.iter();
    let (mut mapped, mut at) = (Vec::new(), *base);
    let shown = (|| {
        for (bytes, known) in &plan.shown {
            let Some(handle) = known.as_ref().or_else(|| fresh.next()) else {
                break;
            };
            mapped.push((at, *bytes));
            // SAFETY: the range is reserved for this view alone and holds no mapping there; the handle is alive and of
            // this size.
            unsafe { entered.mem_map(at, *bytes as usize, *handle) }?;
            at += bytes;
        }
        // SAFETY: the range was mapped above, by whole handles.
        unsafe { entered.set_access(*base, (at - base) as usize, maker.access.devices()) }
    })();
    shown.map_err(|error| {
        mapped.retain(|(at, bytes)| retry_unmap(&entered, *at, *bytes).is_err());
        (error, mapped)
    })
}

/// Makes a graph, all executable graphs instantiated from it and their launches keep a lease of a pool, which does not
/// count it yet.
///
/// # Safety
/// `graph` must be live, and no other thread uses it during the call.
pub(crate) unsafe fn retain(
    context: &Context,
    graph: sys::CUgraph,
    pool: &Leases,
) -> Result<Lease, DriverError> {
    let lease = Lease::new(pool);
    let entered = context.enter()?;
    let held = lease.clone().into_driver();
    // SAFETY: the caller guarantees that the graph is live. The reference is valid for the function, which makes no
    // driver calls. After an error the driver keeps the reference, because it may still call the function.
    unsafe { entered.on_graph_destroyed(graph, lease::ended, held) }?;
    Ok(lease)
}

/// Releases everything in an unused arena to the driver. Handles that could not be unmapped stay in it; the first error
/// is returned. A failed release is not repeated, because the driver may have released the handle.
pub(crate) fn release_arena(context: &Context, arena: &mut Arena) -> Result<(), DriverError> {
    let entered = context.enter()?;
    let mut first = Ok(());
    let mut failed = |error| first = first.and(Err(error));
    arena.lost.retain(|at, bytes| {
        let unmapped = retry_unmap(&entered, *at, *bytes);
        unmapped.map_err(&mut failed).is_err()
    });
    for (base, view) in std::mem::take(&mut arena.views) {
        if let Err(error) = unmap(&entered, base, view.bytes()) {
            arena.lost.extend(view.mappings(base));
            failed(error);
        }
    }
    for (home, handle, again) in arena.take_handles() {
        let unmapped = match again {
            true => retry_unmap(&entered, home, handle.bytes),
            false => unmap(&entered, home, handle.bytes),
        };
        if let Err(error) = unmapped {
            arena.stuck.push((home, handle));
            failed(error);
            continue;
        }
        // SAFETY: the handle belongs to the pool, and is mapped nowhere that the pool knows of.
        if let Err(error) = unsafe { entered.mem_release(handle.handle) } {
            failed(error);
        }
    }
    first
}

fn unmap(entered: &Entered<'_>, at: u64, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: these are whole mappings of an unused pool: no graph, no block and no work uses them.
    unsafe { entered.mem_unmap(at, bytes as usize) }
}

/// Unmaps a mapping whose state is unknown because a call for it failed.
fn retry_unmap(entered: &Entered<'_>, at: u64, bytes: u64) -> Result<(), DriverError> {
    // SAFETY: as above, one whole mapping at most.
    unsafe { entered.mem_unmap_if_mapped(at, bytes as usize) }
}
