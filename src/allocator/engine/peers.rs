//! Access of other devices to an allocator's memory.

use std::collections::HashSet;

use crate::allocator::engine::{Engine, ensure_can_access};
use crate::allocator::graph::Pool;
use crate::allocator::heap::Heap;
use crate::allocator::range::State;
use crate::allocator::size::GRANULE;
use crate::driver::sys;
use crate::error::Error;
use crate::locks::lock::pause;

/// Number of retries, about a second in all, of a grant for a mapping that another thread changes.
const ROUNDS: u32 = 10_000;

/// Grants a device access to all memory of the allocator, present and future.
pub(crate) fn add(engine: &Engine, ordinal: usize) -> Result<(), Error> {
    let peer = engine.driver().device(ordinal)?;
    if peer == engine.device {
        return Ok(());
    }
    drop(engine.open()?);
    if !engine.rules.maps() {
        return Err(Error::NotSupported {
            what: "peer access without virtual memory management",
        });
    }
    ensure_can_access(&peer, &engine.device)?;
    let Some(addition) = engine.access.begin_adding(&peer) else {
        return Ok(());
    };
    let ranges = mappings(&*engine.open()?);
    let entered = engine.context.enter().map_err(|e| engine.error(e))?;
    for (at, bytes) in ranges {
        let mut round = 0;
        let grant = || {
            // SAFETY: the range is a whole mapping of the allocator. If another thread has unmapped it, or has not
            // mapped it yet, the call fails and changes nothing.
            unsafe { entered.set_access(at, bytes as usize, std::slice::from_ref(&peer)) }
        };
        while let Err(error) = grant() {
            if !mappings(&engine.lock()).contains(&(at, bytes)) {
                break;
            }
            // Another thread is about to release the memory, to suspend it or to resume it.
            let between = error.code() == sys::CUresult::CUDA_ERROR_INVALID_VALUE;
            if !between || round == ROUNDS {
                return Err(engine.error(error));
            }
            pause(round);
            round += 1;
        }
    }
    addition.finish();
    Ok(())
}

/// Returns the mappings, at home and in views, of the allocator and of its graph pools, as far as they are in use:
/// address and bytes.
fn mappings(heap: &Heap) -> Vec<(u64, u64)> {
    let records = heap.physical.quarantined.iter();
    let unusable: HashSet<u64> = records.map(|id| heap.extents.records[*id].addr).collect();
    let present =
        |home: &u64| !heap.suspended.is_suspended_handle(*home) && !unusable.contains(home);
    let homes = heap.physical.holdings.iter();
    let mut found: Vec<(u64, u64)> = homes.map(|(home, held)| (*home, held.bytes)).collect();
    found.retain(|(home, _)| present(home));
    for (base, view) in heap.views.map.iter().filter(|(_, view)| !view.dead) {
        let mut at = *base;
        for mapping in &view.mappings {
            let bytes = u64::from(mapping.granules) * GRANULE;
            found.extend(present(&mapping.home).then_some((at, bytes)));
            at += bytes;
        }
    }
    for range in heap.ranges.map.values().filter(|range| !range.away) {
        let mapped = range
            .granules()
            .filter(|(_, granule)| granule.state != State::Stuck);
        let cells = mapped.flat_map(|(_, granule)| &granule.cells);
        found.extend(cells.map(|cell| (cell.address, range.layout.granule)));
    }
    let own = |pool: &&Pool| !pool.away && pool.source.is_none();
    for pool in heap.graphs.pools.values().filter(own) {
        let handles = pool.arena.handles.iter();
        found.extend(handles.map(|(home, handle)| (*home, handle.bytes)));
        let views = pool.arena.views.iter();
        found.extend(views.flat_map(|(base, view)| view.mappings(*base)));
    }
    found
}
