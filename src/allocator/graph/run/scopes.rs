//! Graph pools and their scopes.

use crate::allocator::engine::Engine;
use crate::allocator::engine::contexts;
use crate::allocator::graph::commit;
use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::refuse_released;
use crate::allocator::graph::scope::Kind;
use crate::allocator::graph::source::Source;
use crate::driver::{process, sys};
use crate::error::{Error, GraphPoolError};
use std::sync::atomic::Ordering;

/// Creates a pool, whose segments may come from a source, and returns its number.
pub(crate) fn add_pool(engine: &Engine, source: Option<Source>) -> Result<u64, Error> {
    if !engine.rules.maps() {
        return Err(Error::NotSupported {
            what: "graph pools without virtual memory management",
        });
    }
    Ok(engine.open()?.graphs.add_pool(source))
}

/// Opens a scope and returns its number. From here on requests look up their scope.
pub(crate) fn enter(engine: &Engine, pool: u64, kind: Kind) -> Result<u64, Error> {
    let uncovered = {
        let mut heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        heap.empty_large_caches();
        heap.streams.kept_without_marker()
    };
    // Once a stream captures, only an earlier marker shows when memory that was freed on it before is idle.
    engine.mark_all(uncovered);
    let mut heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    let scope = heap.graphs.scopes.add(pool, kind);
    process::watch();
    engine.scopes.fetch_add(1, Ordering::Relaxed);
    Ok(scope)
}

pub(crate) fn leave(engine: &Engine, scope: u64) -> Result<(), Error> {
    if process::is_forked_child() {
        return Err(Error::ForkedChild);
    }
    contexts::review_captures(engine);
    let left = engine.lock().graphs.leave(scope);
    if left.is_none() {
        return Err(Error::GraphPool(GraphPoolError::NotEntered));
    }
    // A dropped filter may own objects whose drop calls the allocator.
    drop(left);
    engine.scopes.fetch_sub(1, Ordering::Relaxed);
    process::unwatch(1);
    // Includes blocks that were dropped in a capture and whose last use could not be determined then.
    engine.free_deferred();
    pools::release_unused(engine);
    Ok(())
}

/// Declares that no further capture uses a pool.
pub(crate) fn release_pool(engine: &Engine, pool: u64) -> Result<(), Error> {
    {
        let mut heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
            pool.released = true;
        }
        heap.graphs.scopes.version += 1;
        heap.graphs.forget_released();
    }
    let ended = engine.lock().graphs.take_ended_sources();
    drop(ended);
    pools::release_unused(engine);
    Ok(())
}

/// Makes a graph that was not captured keep a pool's memory.
///
/// # Safety
/// `graph` must be live, and no other thread uses it during the call.
pub(crate) unsafe fn retain(engine: &Engine, pool: u64, graph: sys::CUgraph) -> Result<(), Error> {
    let leases = {
        let heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        heap.graphs.leases_of(pool)?
    };
    // SAFETY: the caller's contract.
    let lease = unsafe { commit::retain(&engine.context, graph, &leases) };
    let lease = lease.map_err(|e| engine.error(e))?;
    let mut heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    heap.graphs.add_lease(pool, Some(lease));
    heap.graphs.set_captured(pool, true);
    Ok(())
}
