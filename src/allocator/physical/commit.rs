//! The driver calls of physical memory: over plans of the heap, never with its lock.

use crate::driver::{Context, Device, DriverError, Entered, MemoryProperties};

use crate::allocator::physical::{Fresh, GivenBack, GrowthFailure, Release};

impl GrowthFailure {
    /// A growth that failed and left nothing behind.
    fn new(error: DriverError) -> Self {
        GrowthFailure {
            error,
            mapped: Vec::new(),
        }
    }

    /// A lost context outranks what the growth failed for.
    fn also(&mut self, error: DriverError) {
        if error.is_fatal() {
            self.error = error;
        }
    }
}

/// What the memory of an allocator is made like, and where.
pub(crate) struct Maker<'a> {
    pub context: &'a Context,
    pub properties: &'a MemoryProperties,
    /// Devices that may access the memory: its own first.
    pub access: &'a [Device],
}

/// A handle that was made for new memory, and where it was to be mapped.
struct Made {
    addr: u64,
    bytes: u64,
    handle: u64,
}

/// Creates, maps and opens the handles of new memory behind each other; undoes everything if a call fails.
pub(crate) fn map(maker: &Maker<'_>, fresh: &Fresh) -> Result<Vec<u64>, GrowthFailure> {
    map_with(maker, fresh, |entered, bytes| {
        entered.mem_create(bytes as usize, maker.properties)
    })
}

/// [`map`] of one handle that exists, and is unmapped at its home first. Also returns whether it was: the handle is
/// released if a later call fails.
pub(crate) fn remap(
    maker: &Maker<'_>,
    fresh: &Fresh,
    (from, handle): (&Release, u64),
) -> (bool, Result<Vec<u64>, GrowthFailure>) {
    let mut unmapped = false;
    let made = map_with(maker, fresh, |entered, _| {
        // SAFETY: one whole mapping of the allocator, claimed for this, and every use of it was seen complete by the
        // host.
        unsafe { entered.mem_unmap(from.addr, from.bytes as usize) }?;
        unmapped = true;
        Ok(handle)
    });
    (unmapped, made)
}

fn map_with(
    maker: &Maker<'_>,
    fresh: &Fresh,
    mut make: impl FnMut(&Entered<'_>, u64) -> Result<u64, DriverError>,
) -> Result<Vec<u64>, GrowthFailure> {
    let entered = maker.context.enter().map_err(GrowthFailure::new)?;
    let mut made: Vec<Made> = Vec::with_capacity(fresh.sizes.len());
    let result = (|| {
        let mut addr = fresh.addr;
        for bytes in &fresh.sizes {
            let handle = make(&entered, *bytes)?;
            made.push(Made {
                addr,
                bytes: *bytes,
                handle,
            });
            // SAFETY: the range is reserved by this allocator, holds no mapping, and is claimed
            // for these handles alone; the handle was made with this size.
            unsafe { entered.mem_map(addr, *bytes as usize, handle) }?;
            addr += bytes;
        }
        for (start, bytes) in &fresh.stretches {
            // SAFETY: the range was mapped just now, by whole handles.
            unsafe { entered.set_access(*start, *bytes as usize, maker.access) }?;
        }
        Ok(())
    })();
    match result {
        Ok(()) => Ok(made.into_iter().map(|made| made.handle).collect()),
        Err(error) => Err(undo(&entered, error, made)),
    }
}

/// Takes back handles that [`map`] made.
pub(crate) fn unmake(
    maker: &Maker<'_>,
    fresh: &Fresh,
    handles: &[u64],
    error: DriverError,
) -> GrowthFailure {
    let mut addr = fresh.addr;
    let made = fresh.sizes.iter().zip(handles).map(|(bytes, handle)| {
        let (bytes, handle) = (*bytes, *handle);
        addr += bytes;
        Made {
            addr: addr - bytes,
            bytes,
            handle,
        }
    });
    let made: Vec<Made> = made.collect();
    match maker.context.enter() {
        Ok(entered) => undo(&entered, error, made),
        Err(_) => GrowthFailure {
            mapped: made.iter().map(|m| (m.addr, m.bytes, m.handle)).collect(),
            ..GrowthFailure::new(error)
        },
    }
}

/// Takes back the calls of a failed growth, newest first.
fn undo(entered: &Entered<'_>, error: DriverError, made: Vec<Made>) -> GrowthFailure {
    let mut failure = GrowthFailure::new(error);
    for Made {
        addr,
        bytes,
        handle,
    } in made.into_iter().rev()
    {
        // SAFETY: at most this growth mapped anything there, one handle, and no block was handed out there.
        if let Err(error) = unsafe { entered.mem_unmap_if_mapped(addr, bytes as usize) } {
            failure.mapped.push((addr, bytes, handle));
            failure.also(error);
            continue;
        }
        // SAFETY: made by this growth and mapped nowhere.
        if let Err(error) = unsafe { entered.mem_release(handle) } {
            failure.also(error);
        }
    }
    failure
}

/// Makes a segment.
pub(crate) fn allocate(context: &Context, bytes: u64) -> Result<u64, DriverError> {
    context.enter()?.mem_alloc(bytes as usize)
}

/// Frees a segment.
pub(crate) fn free(entered: &Entered<'_>, release: &Release) -> Result<(), DriverError> {
    // SAFETY: the segment is the allocator's, wholly free, and claimed for this release, and every
    // use of it was seen complete by the host.
    unsafe { entered.mem_free(release.addr) }
}

/// Unmaps and releases a handle; `again` after an unmapping of it that failed.
pub(crate) fn give_back(
    entered: &Entered<'_>,
    (release, handle): (&Release, u64),
    again: bool,
) -> GivenBack {
    let (addr, bytes) = (release.addr, release.bytes as usize);
    // SAFETY: one whole mapping of the allocator, claimed for this release, and every use
    // of it was seen complete by the host.
    let unmapped = unsafe {
        match again {
            true => entered.mem_unmap_if_mapped(addr, bytes),
            false => entered.mem_unmap(addr, bytes),
        }
    };
    if unmapped.is_err() {
        return (unmapped, Ok(()));
    }
    // SAFETY: the handle is the allocator's and mapped nowhere any more.
    (unmapped, unsafe { entered.mem_release(handle) })
}
