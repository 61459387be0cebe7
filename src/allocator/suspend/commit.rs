//! The driver calls of suspensions, made without the heap's lock.
//!
//! Each handle stores how many of its mappings exist and whether it was released, so that after any failed call
//! [`recreate`] continues from there, and so does the next attempt if that fails too.

use crate::allocator::physical::commit::PhysicalConfig;
use crate::allocator::suspend::host::{HostCopy, Placement};
use crate::allocator::suspend::{SuspendedHandle, Suspension};
use crate::driver::{DriverError, Entered, HostAllocation, Stream};
use crate::error::Error;
use crate::sync::order::wait_for_context;

/// Copies the kept contents to the host. After an error nothing has changed, but a copy may still be running, which is
/// recorded.
pub(crate) fn save_contents(
    entered: &Entered<'_>,
    stream: &Stream,
    suspension: &mut Suspension,
    spare: &mut Vec<HostAllocation>,
) -> Result<(), Error> {
    let bytes = suspension.kept_bytes();
    let mut copy = HostCopy::default();
    let mut placement = Placement::new(&suspension.kept);
    // Parts are copied while other threads lock further ones.
    let filled = copy.fill(entered, suspension.contents, bytes, spare, |host, room| {
        let mut pieces = placement.place(host, room).into_iter();
        pieces.try_for_each(|(from, to, bytes)| {
            // SAFETY: the memory is mapped and no work writes there, and the host memory is kept until the copy is
            // complete.
            unsafe { entered.copy_device_to_host(to.cast(), from, bytes as usize, stream.raw()) }
        })
    });
    suspension.copy = copy;
    let copied = match filled {
        Err(Error::Driver(error)) => Err(error),
        filled => filled.map(Ok)?,
    };
    let saved = wait_for_copies(entered, stream, copied);
    suspension.unseen = matches!(saved, Err(FailedCopy { seen: false, .. }));
    if let Err(FailedCopy { seen: true, .. }) = saved {
        spare.append(&mut std::mem::take(&mut suspension.copy).into_spare());
    }
    saved.map_err(|failed| failed.error.into())
}

/// A failed copy, and whether its end was observed.
struct FailedCopy {
    error: DriverError,
    seen: bool,
}

/// Waits for copies, in a second way if the first fails, because its error may concern earlier work. No wait that would
/// invalidate a capture is made.
fn wait_for_copies(
    entered: &Entered<'_>,
    stream: &Stream,
    copied: Result<(), DriverError>,
) -> Result<(), FailedCopy> {
    let waited = stream.synchronize();
    let seen = waited.is_ok()
        || stream.synchronize().is_ok()
        || wait_for_context(entered.context()).is_ok();
    copied
        .and(waited)
        .map_err(|error| FailedCopy { error, seen })
}

/// Unmaps and releases the handles. Nothing uses the memory, and kept contents were saved. A handle whose release
/// failed is removed, because the driver may have released it.
pub(crate) fn give_back(
    entered: &Entered<'_>,
    suspensions: &mut [Suspension],
) -> Result<(), DriverError> {
    for handle in suspensions.iter_mut().flat_map(|s| &mut s.handles) {
        unmap(entered, handle, 0, false)?;
    }
    for suspension in suspensions {
        for suspended in &mut suspension.handles {
            if let Some(handle) = suspended.handle.take() {
                suspension.lost = true;
                // SAFETY: the handle belongs to the allocator and is mapped nowhere any more.
                unsafe { entered.mem_release(handle) }?;
            }
        }
    }
    Ok(())
}

/// Unmaps mappings of a handle, the last first, until `left` remain. The first one may already be unmapped if a call
/// for it `failed`.
fn unmap(
    entered: &Entered<'_>,
    suspended: &mut SuspendedHandle,
    left: usize,
    failed: bool,
) -> Result<(), DriverError> {
    while suspended.mapped > left {
        let (at, bytes) = (
            suspended.places[suspended.mapped - 1],
            suspended.bytes as usize,
        );
        // SAFETY: this is a whole mapping of the allocator that nothing uses, as the caller of a suspension guarantees,
        // and all work was waited for.
        unsafe {
            match failed {
                true => entered.mem_unmap_if_mapped(at, bytes),
                false => entered.mem_unmap(at, bytes),
            }
        }?;
        suspended.mapped -= 1;
    }
    Ok(())
}

/// Restores everything: creates handles, maps them, gives all devices access, and copies kept contents back. After an
/// error no more is restored than before.
pub(crate) fn recreate(
    maker: &PhysicalConfig<'_>,
    entered: &Entered<'_>,
    stream: Option<&Stream>,
    suspensions: &mut [Suspension],
) -> Result<(), DriverError> {
    if suspensions.iter().any(|one| one.unseen) {
        // A copy of an earlier attempt may still be running: until its end its memory must not be written or unmapped.
        wait_for_context(entered.context())?;
        suspensions.iter_mut().for_each(|one| one.unseen = false);
    }
    let handles = suspensions.iter().flat_map(|s| &s.handles);
    let before: Vec<(usize, bool)> = handles
        .map(|handle| (handle.mapped, handle.handle.is_some()))
        .collect();
    let made = recreate_handle(maker, entered, stream, suspensions);
    // The target of a copy that may still be running is kept.
    if let Err(FailedCopy { seen: true, .. }) = made {
        let handles = suspensions.iter_mut().flat_map(|s| &mut s.handles);
        for (suspended, (mapped, held)) in handles.zip(before) {
            // What cannot be undone is used by the next attempt.
            if unmap(entered, suspended, mapped, true).is_err() || held {
                continue;
            }
            if let Some(handle) = suspended.handle.take() {
                // The attempt failed for another reason already.
                // SAFETY: the handle was created in this call, and is mapped nowhere any more.
                let _ = unsafe { entered.mem_release(handle) };
            }
        }
    }
    made.map_err(|failed| failed.error)
}

fn recreate_handle(
    maker: &PhysicalConfig<'_>,
    entered: &Entered<'_>,
    stream: Option<&Stream>,
    suspensions: &mut [Suspension],
) -> Result<(), FailedCopy> {
    let seen = |error| FailedCopy { error, seen: true };
    for suspended in suspensions.iter_mut().flat_map(|s| &mut s.handles) {
        if suspended.handle.is_none() {
            let made = entered.mem_create(suspended.bytes as usize, maker.properties);
            suspended.handle = Some(made.map_err(seen)?);
        }
    }
    for suspended in suspensions.iter_mut().flat_map(|s| &mut s.handles) {
        while let (Some(handle), Some(at)) =
            (suspended.handle, suspended.places.get(suspended.mapped))
        {
            // A failed mapping may exist.
            suspended.mapped += 1;
            // SAFETY: the range is reserved for this handle and holds no mapping, and the handle is of this size.
            unsafe { entered.mem_map(*at, suspended.bytes as usize, handle) }.map_err(seen)?;
        }
    }
    for suspension in &mut *suspensions {
        for (at, bytes) in suspension.ranges() {
            // SAFETY: these are whole mappings, all of which exist by now.
            unsafe { entered.set_access(at, bytes as usize, maker.access.devices()) }
                .map_err(seen)?;
        }
    }
    for suspension in suspensions.iter_mut().filter(|s| s.lost) {
        let homes = suspension.homes();
        let pieces = suspension.copy.pieces_in(&suspension.kept, &homes);
        let Some(stream) = stream.filter(|_| !pieces.is_empty()) else {
            continue;
        };
        let copied = pieces.into_iter().try_for_each(|(to, from, bytes)| {
            // SAFETY: the memory is mapped and nothing else uses it; the host memory is kept until the copy is
            // complete.
            unsafe { entered.copy_host_to_device(to, from.cast(), bytes as usize, stream.raw()) }
        });
        let waited = wait_for_copies(entered, stream, copied);
        suspension.unseen = matches!(waited, Err(FailedCopy { seen: false, .. }));
        waited?;
    }
    Ok(())
}
