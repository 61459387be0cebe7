//! What the driver reports about free memory, and address space for the arenas.

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::physical::address::FIRST_LEASE;
use crate::allocator::plan::growth;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::driver::DriverError;
use crate::error::{Error, OutOfMemory};

/// Queries the free memory of the device, which bounds growth from then on.
pub(crate) fn query_device(engine: &Engine) {
    let info = engine
        .context
        .enter()
        .and_then(|entered| entered.mem_info());
    let mut heap = engine.lock();
    let held = heap.present();
    heap.physical
        .note_free(info.ok().map(|info| info.free), held);
}

/// Returns the free memory of the device beyond the headroom after a refusal; 0 if the driver does not report it,
/// or the refusal had another reason.
pub(crate) fn driver_free(engine: &Engine, error: DriverError) -> u64 {
    if !error.is_out_of_memory() {
        return 0;
    }
    let info = engine
        .context
        .enter()
        .and_then(|entered| entered.mem_info());
    let headroom = engine.lock().physical.headroom;
    info.map_or(0, |info| info.free.saturating_sub(headroom))
}

/// Leases address space for an arena: as much as it already has, while that is less than the device's memory, and
/// after its last range if that is free.
pub(crate) fn reserve_span(engine: &Engine, space: SpaceId, at_least: u64) -> Result<(), Error> {
    let at_least = at_least.next_multiple_of(PHYSICAL_GRANULE);
    let (end, held) = engine.lock().extents.addresses_of(space);
    let usual = held
        .clamp(FIRST_LEASE, engine.total_memory.max(FIRST_LEASE))
        .max(at_least)
        .next_multiple_of(PHYSICAL_GRANULE);
    let leased = engine
        .addresses
        .lease_for(&engine.context, end, [usual, at_least]);
    let lease = leased.map_err(|e| engine.error(e))?;
    growth::add_addresses(&mut engine.lock(), space, lease);
    Ok(())
}

/// Adds the driver's figures to an out-of-memory error. It cannot fail itself.
pub(crate) fn out_of_memory(
    engine: &Engine,
    mut oom: OutOfMemory,
    refusal: Option<DriverError>,
) -> Error {
    oom.device = engine.device.ordinal();
    oom.views = engine.views.are_allowed();
    oom.driver = refusal;
    if let Ok(info) = engine
        .context
        .enter()
        .and_then(|entered| entered.mem_info())
    {
        oom.driver_free = Some(info.free);
        oom.driver_total = Some(info.total);
    }
    Error::OutOfMemory(Box::new(oom))
}
