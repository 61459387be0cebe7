//! The driver calls of views: they execute plans of the heap, never with its lock.

use crate::driver::{Context, DriverError};

use crate::allocator::physical::commit::{self, PhysicalConfig};
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Mapping, Stitch, Unmapped};

/// Maps a planned stitch after the present end of the view. Returns the handles of new memory.
pub(crate) fn map(maker: &PhysicalConfig<'_>, stitch: &Stitch) -> Result<Vec<u64>, Unmapped> {
    let fresh = match &stitch.fresh {
        None => Vec::new(),
        Some(fresh) => commit::map(maker, fresh).map_err(Unmapped::FailedPlan)?,
    };
    let entered = match maker.context.enter() {
        Ok(entered) => entered,
        Err(error) => return Err(undo(maker, stitch, 0, fresh, error)),
    };
    let new = stitch.fresh.iter().flat_map(|f| &f.sizes).zip(&fresh);
    let new = new.map(|(bytes, handle)| (*bytes, *handle));
    let held = stitch
        .adds
        .iter()
        .map(|(_, bytes, handle)| (*bytes, *handle));
    let (start, mut addr, mut mapped) = (stitch.site.at, stitch.site.at, 0);
    for (bytes, handle) in held.chain(new) {
        // SAFETY: the range belongs to this view and holds no mapping there, and no other call extends the view; the
        // handle is alive and of this size.
        let done = unsafe { entered.mem_map(addr, bytes as usize, handle) };
        mapped += 1;
        if let Err(error) = done {
            return Err(undo(maker, stitch, mapped, fresh, error));
        }
        addr += bytes;
    }
    // SAFETY: the range was mapped above, by whole handles.
    match unsafe { entered.set_access(start, (addr - start) as usize, maker.access.devices()) } {
        Ok(()) => Ok(fresh),
        Err(error) => Err(undo(maker, stitch, mapped, fresh, error)),
    }
}

/// Unmaps the first mappings of a stitch, newest first, and releases the memory created for it. The newest mapping may
/// not exist. If one cannot be unmapped, new memory is held from now on, as far as the view keeps mappings of it.
fn undo(
    maker: &PhysicalConfig<'_>,
    stitch: &Stitch,
    mapped: usize,
    fresh: Vec<u64>,
    error: DriverError,
) -> Unmapped {
    let new = stitch.fresh.iter().flat_map(|f| &f.sizes);
    let held = stitch.adds.iter().map(|(_, bytes, _)| bytes);
    let sizes: Vec<u64> = held.chain(new).copied().collect();
    let mut end = stitch.site.at + sizes[..mapped].iter().sum::<u64>();
    let Ok(entered) = maker.context.enter() else {
        return Unmapped::Stuck(error, mapped, fresh);
    };
    for (left, bytes) in sizes[..mapped].iter().enumerate().rev() {
        end -= bytes;
        // SAFETY: the range was mapped by this stitch as one handle, and no block was ever allocated there.
        if unsafe { entered.mem_unmap_if_mapped(end, *bytes as usize) }.is_err() {
            return Unmapped::Stuck(error, left + 1, fresh);
        }
    }
    drop(entered);
    match &stitch.fresh {
        Some(new) if !fresh.is_empty() => {
            Unmapped::FailedPlan(commit::release_mapped(maker, new, &fresh, error))
        }
        _ => Unmapped::Undone(error),
    }
}

/// Unmaps contiguous mappings of a view that the heap removed for this; `again` if some of them may already be
/// unmapped.
pub(crate) fn unmap(
    context: &Context,
    mut at: u64,
    mappings: &[Mapping],
    again: bool,
) -> Result<(), DriverError> {
    let entered = context.enter()?;
    let bytes = |mapping: &Mapping| u64::from(mapping.granules) * GRANULE;
    if again {
        for mapping in mappings {
            // SAFETY: as below, one whole mapping.
            unsafe { entered.mem_unmap_if_mapped(at, bytes(mapping) as usize) }?;
            at += bytes(mapping);
        }
        return Ok(());
    }
    match mappings.iter().map(bytes).sum::<u64>() {
        0 => Ok(()),
        // SAFETY: these are whole mappings of the view; no block lies in them, no other call unmaps them, and the host
        // observed the completion of every use through the view's addresses.
        all => unsafe { entered.mem_unmap(at, all as usize) },
    }
}
