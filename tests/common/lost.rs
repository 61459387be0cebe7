//! Objects that cannot be destroyed after a fault.

use cualloc::sim::Leaks;

/// Counts the object that a fault of a call may leave behind: one that exists although the call reported an error, or
/// one whose destruction was refused, since a destruction that failed is not repeated. Plain memory whose free failed
/// is lost only if the question fails, too, whether it is still there.
pub fn count(lost: &mut Leaks, call: &str, executed: bool) {
    let kind = match (call, executed) {
        ("cuMemCreate" | "cuMemRetainAllocationHandle", true)
        | ("cuMemImportFromShareableHandle", true)
        | ("cuMemRelease", false) => &mut lost.handles,
        ("cuMemAddressReserve", true) | ("cuMemAddressFree", false) => &mut lost.reservations,
        ("cuMemAlloc_v2", true) | ("cuPointerGetAttributes", _) => &mut lost.allocations,
        ("cuMemAllocAsync" | "cuMemAllocFromPoolAsync", true) | ("cuMemFreeAsync", false) => {
            &mut lost.pool_allocations
        }
        ("cuMemPoolCreate" | "cuMemPoolImportFromShareableHandle", true)
        | ("cuMemPoolDestroy", false) => &mut lost.pools,
        ("cuStreamCreate" | "cuStreamCreateWithPriority", true) | ("cuStreamDestroy_v2", false) => {
            &mut lost.streams
        }
        ("cuEventCreate", true) | ("cuEventDestroy_v2", false) => &mut lost.events,
        ("cuMemHostAlloc", true) | ("cuMemFreeHost" | "cuMemHostUnregister", false) => {
            &mut lost.host
        }
        ("cuUserObjectCreate", true)
        | ("cuGraphRetainUserObject" | "cuUserObjectRelease", false) => &mut lost.user_objects,
        _ => return,
    };
    *kind += 1;
}

/// The objects that exist and were not counted.
pub fn unexplained(mut found: Leaks, lost: &Leaks) -> Leaks {
    if lost.handles + lost.allocations + lost.pool_allocations + lost.pools > 0 {
        found.bytes = 0;
    }
    for (found, lost) in [
        (&mut found.handles, lost.handles),
        (&mut found.reservations, lost.reservations),
        (&mut found.allocations, lost.allocations),
        (&mut found.pool_allocations, lost.pool_allocations),
        (&mut found.pools, lost.pools),
        (&mut found.streams, lost.streams),
        (&mut found.events, lost.events),
        (&mut found.host, lost.host),
        (&mut found.user_objects, lost.user_objects),
    ] {
        *found = found.saturating_sub(lost);
    }
    found
}
