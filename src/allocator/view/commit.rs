//! The driver calls of views: over plans of the heap, never with its lock.

use crate::driver::{Context, DriverError};

use crate::allocator::physical::commit::{self, Maker};
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Mapping, Stitch, Unmapped};

/// Maps what a stitch planned, behind what the view has. Returns the handles of new memory.
pub(crate) fn map(maker: &Maker<'_>, stitch: &Stitch) -> Result<Vec<u64>, Unmapped> {
    let fresh = match &stitch.fresh {
        None => Vec::new(),
        Some(fresh) => commit::map(maker, fresh).map_err(Unmapped::NotMade)?,
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
        // SAFETY: the range is this view's, holds no mapping there, and no one else extends the
        // view; the handle is alive and of this size.
        let done = unsafe { entered.mem_map(addr, bytes as usize, handle) };
        mapped += 1;
        if let Err(error) = done {
            return Err(undo(maker, stitch, mapped, fresh, error));
        }
        addr += bytes;
    }
    // SAFETY: mapped just now by whole handles.
    match unsafe { entered.set_access(start, (addr - start) as usize, maker.access) } {
        Ok(()) => Ok(fresh),
        Err(error) => Err(undo(maker, stitch, mapped, fresh, error)),
    }
}

/// Undoes the first mappings of a stitch, newest first, and the memory that was made for it. The newest may not exist.
/// Where one cannot be undone, new memory is held from now on, as far as the view keeps mappings of it.
fn undo(
    maker: &Maker<'_>,
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
        // SAFETY: mapped by this stitch as one handle; no block was ever handed out there.
        if unsafe { entered.mem_unmap_if_mapped(end, *bytes as usize) }.is_err() {
            return Unmapped::Stuck(error, left + 1, fresh);
        }
    }
    drop(entered);
    match &stitch.fresh {
        Some(new) if !fresh.is_empty() => {
            Unmapped::NotMade(commit::unmake(maker, new, &fresh, error))
        }
        _ => Unmapped::Undone(error),
    }
}

/// Unmaps mappings of a view that the heap took out for it, which lie back to back; `again` where some of them may be
/// unmapped already.
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
        // SAFETY: the view's own mappings, whole; no block lies in them, no other call takes them away, and every use
        // through the view's addresses was seen complete by the host.
        all => unsafe { entered.mem_unmap(at, all as usize) },
    }
}
