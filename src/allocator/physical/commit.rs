//! The driver calls of physical memory: they execute plans of the heap, never with its lock.

use crate::driver::{Context, DriverError, Entered, MemoryProperties};

use crate::allocator::physical::access::Mapper;
use crate::allocator::physical::{Fresh, GivenBack, GrowthFailure, Release};

impl GrowthFailure {
    /// Creates a failure that left nothing behind.
    fn new(error: DriverError) -> Self {
        GrowthFailure {
            error,
            mapped: Vec::new(),
        }
    }

    /// Replaces the error by that of a lost context, which takes precedence.
    fn prefer_loss(&mut self, error: DriverError) {
        if error.is_fatal() {
            self.error = error;
        }
    }
}

/// The properties of an allocator's physical memory, and its devices. Kept until what it maps is published.
pub(crate) struct PhysicalConfig<'a> {
    pub context: &'a Context,
    pub properties: &'a MemoryProperties,
    pub access: Mapper<'a>,
}

/// A handle that was created for new memory, and the address for its mapping.
struct NewHandle {
    addr: u64,
    bytes: u64,
    handle: u64,
}

/// Creates, maps and opens contiguous handles of new memory; undoes everything if a call fails.
pub(crate) fn map(maker: &PhysicalConfig<'_>, fresh: &Fresh) -> Result<Vec<u64>, GrowthFailure> {
    map_with(maker, fresh, |entered, bytes| {
        entered.mem_create(bytes as usize, maker.properties)
    })
}

/// [`map`] for one existing handle, which is unmapped at its home first. Also returns whether that succeeded: then the
/// handle is released if a later call fails.
pub(crate) fn remap(
    maker: &PhysicalConfig<'_>,
    fresh: &Fresh,
    (from, handle): (&Release, u64),
) -> (bool, Result<Vec<u64>, GrowthFailure>) {
    let mut unmapped = false;
    let made = map_with(maker, fresh, |entered, _| {
        // SAFETY: this is one whole mapping of the allocator, claimed for this call, and the host observed the
        // completion of every use of it.
        unsafe { entered.mem_unmap(from.addr, from.bytes as usize) }?;
        unmapped = true;
        Ok(handle)
    });
    (unmapped, made)
}

/// Maps contiguous handles that a closure makes; undoes everything, and releases the handles, if a call fails.
pub(crate) fn map_with(
    maker: &PhysicalConfig<'_>,
    fresh: &Fresh,
    mut make: impl FnMut(&Entered<'_>, u64) -> Result<u64, DriverError>,
) -> Result<Vec<u64>, GrowthFailure> {
    let entered = maker.context.enter().map_err(GrowthFailure::new)?;
    let mut made: Vec<NewHandle> = Vec::with_capacity(fresh.sizes.len());
    let result = (|| {
        let mut addr = fresh.addr;
        for bytes in &fresh.sizes {
            let handle = make(&entered, *bytes)?;
            made.push(NewHandle {
                addr,
                bytes: *bytes,
                handle,
            });
            // SAFETY: the range is reserved by this allocator, holds no mapping, and is claimed for these handles
            // alone; the handle was created with this size.
            unsafe { entered.mem_map(addr, *bytes as usize, handle) }?;
            addr += bytes;
        }
        for (start, bytes) in &fresh.stretches {
            // SAFETY: the range was mapped above, by whole handles.
            unsafe { entered.set_access(*start, *bytes as usize, maker.access.devices()) }?;
        }
        Ok(())
    })();
    match result {
        Ok(()) => Ok(made.into_iter().map(|made| made.handle).collect()),
        Err(error) => Err(undo(&entered, error, made)),
    }
}

/// Unmaps and releases handles that [`map`] created.
pub(crate) fn release_mapped(
    maker: &PhysicalConfig<'_>,
    fresh: &Fresh,
    handles: &[u64],
    error: DriverError,
) -> GrowthFailure {
    let mut addr = fresh.addr;
    let made = fresh.sizes.iter().zip(handles).map(|(bytes, handle)| {
        let (bytes, handle) = (*bytes, *handle);
        addr += bytes;
        NewHandle {
            addr: addr - bytes,
            bytes,
            handle,
        }
    });
    let made: Vec<NewHandle> = made.collect();
    match maker.context.enter() {
        Ok(entered) => undo(&entered, error, made),
        Err(_) => GrowthFailure {
            mapped: made.iter().map(|m| (m.addr, m.bytes, m.handle)).collect(),
            ..GrowthFailure::new(error)
        },
    }
}

/// Undoes the calls of a failed growth, newest first.
fn undo(entered: &Entered<'_>, error: DriverError, made: Vec<NewHandle>) -> GrowthFailure {
    let mut failure = GrowthFailure::new(error);
    for NewHandle {
        addr,
        bytes,
        handle,
    } in made.into_iter().rev()
    {
        // SAFETY: only this growth may have mapped something there, one handle, and no block was allocated there.
        if let Err(error) = unsafe { entered.mem_unmap_if_mapped(addr, bytes as usize) } {
            failure.mapped.push((addr, bytes, handle));
            failure.prefer_loss(error);
            continue;
        }
        // SAFETY: the handle was created by this growth and is mapped nowhere.
        if let Err(error) = unsafe { entered.mem_release(handle) } {
            failure.prefer_loss(error);
        }
    }
    failure
}

pub(crate) fn allocate(context: &Context, bytes: u64) -> Result<u64, DriverError> {
    context.enter()?.mem_alloc(bytes as usize)
}

pub(crate) fn free(entered: &Entered<'_>, release: &Release) -> Result<(), DriverError> {
    // SAFETY: the segment belongs to the allocator, is wholly free and claimed for this release, and the host observed
    // the completion of every use of it.
    unsafe { entered.mem_free(release.addr) }
}

/// Unmaps and releases a handle; `again` if an earlier attempt to unmap it failed.
pub(crate) fn give_back(
    entered: &Entered<'_>,
    (release, handle): (&Release, u64),
    again: bool,
) -> GivenBack {
    let (addr, bytes) = (release.addr, release.bytes as usize);
    // SAFETY: this is one whole mapping of the allocator, claimed for this release, and the host observed the
    // completion of every use of it.
    let unmapped = unsafe {
        match again {
            true => entered.mem_unmap_if_mapped(addr, bytes),
            false => entered.mem_unmap(addr, bytes),
        }
    };
    if unmapped.is_err() {
        return (unmapped, Ok(()));
    }
    // SAFETY: the handle belongs to the allocator and is mapped nowhere any more.
    (unmapped, unsafe { entered.mem_release(handle) })
}
