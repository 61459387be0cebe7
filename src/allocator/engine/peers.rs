//! Access of other devices to an allocator's memory.

use crate::allocator::engine::{Engine, ensure_can_access};
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::error::Error;

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
        // SAFETY: the range is a whole mapping, or was one: then the call fails.
        let granted =
            unsafe { entered.set_access(at, bytes as usize, std::slice::from_ref(&peer)) };
        if let Err(error) = granted
            && (error.is_fatal() || mappings(&engine.lock()).contains(&(at, bytes)))
        {
            return Err(engine.error(error));
        }
    }
    addition.finish();
    Ok(())
}

/// Returns all mappings, at home and in views, of the allocator and of its graph pools: address and bytes.
fn mappings(heap: &Heap) -> Vec<(u64, u64)> {
    let present = |home: &u64| !heap.suspended.covers(*home);
    let homes = heap.physical.holdings.iter();
    let mut found: Vec<(u64, u64)> = homes.map(|(home, held)| (*home, held.bytes)).collect();
    found.retain(|(home, _)| present(home));
    for (base, view) in &heap.views.map {
        let mut at = *base;
        for mapping in &view.mappings {
            let bytes = u64::from(mapping.granules) * GRANULE;
            found.extend(present(&mapping.home).then_some((at, bytes)));
            at += bytes;
        }
    }
    for pool in heap.graphs.pools.values().filter(|pool| !pool.away) {
        found.extend(pool.arena.at_home());
        let views = pool.arena.views.iter();
        found.extend(views.flat_map(|(base, view)| view.mappings(*base)));
    }
    found
}
