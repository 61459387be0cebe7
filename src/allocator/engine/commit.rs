//! Memory from the driver and back: transactions of several calls, made without the lock.

use crate::driver::{DriverError, Entered};

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::Heap;
use crate::allocator::heap::memory::GivenBack;
use crate::allocator::physical::GrowthFailure;
use crate::allocator::physical::plan::Release;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::error::{Error, OutOfMemory};

/// Address space that an arena leases first; then as much again as it has, while that is less than
/// the device's memory.
const FIRST_LEASE: u64 = 8 << 20;

impl GrowthFailure {
    /// A lost context outranks what the growth failed for.
    fn also(&mut self, error: DriverError) {
        if error.is_fatal() {
            self.error = error;
        }
    }
}

impl Engine {
    /// Creates, maps and opens handles behind each other from an address on; undoes everything if a
    /// call fails.
    pub(crate) fn map(&self, at: u64, sizes: &[u64]) -> Result<Vec<u64>, GrowthFailure> {
        let stretches = self.lock().physical.stretches(at, sizes.iter().sum());
        let entered = self.context.enter().map_err(GrowthFailure::clean)?;
        // Handles made so far: (address, bytes, handle, mapped).
        let mut made: Vec<(u64, u64, u64, bool)> = Vec::with_capacity(sizes.len());
        let result = (|| {
            let mut addr = at;
            for bytes in sizes {
                let handle = entered.mem_create(*bytes as usize, &self.properties)?;
                made.push((addr, *bytes, handle, false));
                // SAFETY: the range is reserved by this allocator, holds no mapping, and is claimed
                // for these handles alone; the handle was made with this size.
                unsafe { entered.mem_map(addr, *bytes as usize, handle) }?;
                if let Some(last) = made.last_mut() {
                    last.3 = true;
                }
                addr += bytes;
            }
            for (start, bytes) in &stretches {
                // SAFETY: the range was mapped just now, by whole handles.
                unsafe { entered.set_access(*start, *bytes as usize, &self.access) }?;
            }
            Ok(())
        })();
        match result {
            Ok(()) => Ok(made.into_iter().map(|(_, _, handle, _)| handle).collect()),
            Err(error) => Err(undo(&entered, error, made)),
        }
    }

    /// Takes back handles that [`map`](Self::map) made.
    pub(crate) fn unmake(
        &self,
        at: u64,
        sizes: &[u64],
        handles: &[u64],
        error: DriverError,
    ) -> GrowthFailure {
        let (mut addr, mut made) = (at, Vec::with_capacity(sizes.len()));
        for (bytes, handle) in sizes.iter().zip(handles) {
            made.push((addr, *bytes, *handle, true));
            addr += bytes;
        }
        match self.context.enter() {
            Ok(entered) => undo(&entered, error, made),
            Err(_) => GrowthFailure {
                error,
                mapped: made
                    .into_iter()
                    .map(|(addr, bytes, handle, _)| (addr, bytes, handle))
                    .collect(),
                orphaned_handles: Vec::new(),
            },
        }
    }

    /// Leases address space for an arena: as much as it has already, behind its last if that is free.
    pub(crate) fn reserve_span(&self, space: SpaceId, at_least: u64) -> Result<(), Error> {
        let at_least = at_least.next_multiple_of(PHYSICAL_GRANULE);
        let (end, held) = self.lock().extents.addresses_of(space);
        let usual = held
            .clamp(FIRST_LEASE, self.total_memory.max(FIRST_LEASE))
            .max(at_least)
            .next_multiple_of(PHYSICAL_GRANULE);
        for bytes in [usual, at_least] {
            if let Some(end) = end
                && self.addresses.extend(end, bytes)
            {
                self.lock().add_addresses(space, end, bytes, true);
                return Ok(());
            }
        }
        let entered = self.context.enter().map_err(|e| self.error(e))?;
        let mut bytes = usual;
        let mut leased = self.addresses.lease(&entered, bytes);
        if leased.is_err_and(|e| !e.is_fatal()) && at_least < usual {
            bytes = at_least;
            leased = self.addresses.lease(&entered, bytes);
        }
        let base = leased.map_err(|e| self.error(e))?;
        self.lock().add_addresses(space, base, bytes, false);
        Ok(())
    }

    /// Gives claimed memory back to the driver. What fails stays in the heap, or goes back to the
    /// free memory if it is still mapped; the first error is returned after all was tried.
    pub(crate) fn release(&self, plan: Vec<Release>) -> Result<u64, Error> {
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                let mut heap = self.lock();
                for release in plan {
                    heap.restore(release.space, release.id, release.shards);
                }
                return Err(self.error(error));
            }
        };
        let mut first: Option<DriverError> = None;
        let mut released = 0;
        let mut plan = plan.into_iter();
        for release in plan.by_ref() {
            if release.handle.is_none() {
                match self.release_segment(&entered, release) {
                    Ok(bytes) => released += bytes,
                    Err(error) => first = first.or(Some(error)),
                }
                if first.is_some_and(|e| e.is_fatal()) {
                    break;
                }
                continue;
            }
            let done = give_back(&entered, &release);
            match self.lock().given_back(release, done, Heap::give_home_again) {
                (bytes, None) => released += bytes,
                (_, failed) => first = first.or(failed),
            }
            if first.is_some_and(|e| e.is_fatal()) {
                // Nothing more can be done in this context; what is left stays as it is.
                break;
            }
        }
        for release in plan {
            let mut heap = self.lock();
            heap.restore(release.space, release.id, release.shards);
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    /// Frees a plain segment. It leaves the heap first: as soon as the driver has it, another thread
    /// may be given its address again.
    fn release_segment(&self, entered: &Entered<'_>, release: Release) -> Result<u64, DriverError> {
        let bytes = release.bytes;
        {
            let mut heap = self.lock();
            heap.gone(&release);
            heap.unhold(bytes, release.space);
            heap.physical.planned += bytes;
        }
        let (freed, _) = give_back(entered, &release);
        let mut heap = self.lock();
        heap.physical.planned -= bytes;
        if let Err(error) = freed {
            heap.readmit(release);
            return Err(error);
        }
        Ok(bytes)
    }

    /// Tries again to release what an earlier failure left behind.
    pub(crate) fn retry_orphaned_handles(&self) -> Result<u64, Error> {
        let (orphaned_handles, quarantined) = self.lock().claim_leftovers();
        if orphaned_handles.is_empty() && quarantined.is_empty() {
            return Ok(0);
        }
        let entered = self.context.enter();
        let mut first: Option<DriverError> = entered.as_ref().err().copied();
        let mut released = 0;
        for orphan in orphaned_handles {
            // SAFETY: the handle was made by this allocator, is mapped nowhere, and its release
            // failed before, so it is still ours.
            let freed = entered
                .as_ref()
                .map_err(|e| *e)
                .and_then(|e| unsafe { e.mem_release(orphan.handle) });
            self.lock().orphan_tried(&orphan, freed.is_ok());
            match freed {
                Ok(()) => released += orphan.bytes,
                Err(error) => first = first.or(Some(error)),
            }
        }
        for release in quarantined {
            let done = match &entered {
                Ok(entered) => give_back(entered, &release),
                Err(error) => (Err(*error), Ok(())),
            };
            match self.lock().given_back(release, done, |heap, release| {
                heap.quarantine(release.id);
            }) {
                (bytes, None) => released += bytes,
                (_, failed) => first = first.or(failed),
            }
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    /// Adds to the heap's picture what only the driver knows. Cannot fail itself.
    pub(crate) fn out_of_memory(
        &self,
        mut oom: OutOfMemory,
        refusal: Option<DriverError>,
    ) -> Error {
        oom.device = self.device.ordinal();
        oom.driver = refusal;
        if let Ok(info) = self.context.enter().and_then(|entered| entered.mem_info()) {
            oom.driver_free = Some(info.free);
            oom.driver_total = Some(info.total);
        }
        Error::OutOfMemory(Box::new(oom))
    }
}

impl GrowthFailure {
    fn clean(error: DriverError) -> Self {
        GrowthFailure {
            error,
            mapped: Vec::new(),
            orphaned_handles: Vec::new(),
        }
    }
}

/// Unmaps and releases a handle, or frees a segment.
fn give_back(entered: &Entered<'_>, release: &Release) -> GivenBack {
    match release.handle {
        // SAFETY: the segment is the allocator's, wholly free, and claimed for this release, and every
        // use of it was seen complete by the host.
        None => (unsafe { entered.mem_free(release.addr) }, Ok(())),
        Some(handle) => {
            // SAFETY: one whole mapping of the allocator, claimed for this release, and every use
            // of it was seen complete by the host.
            let unmapped = unsafe { entered.mem_unmap(release.addr, release.bytes as usize) };
            if unmapped.is_err() {
                return (unmapped, Ok(()));
            }
            // SAFETY: the handle is the allocator's and mapped nowhere any more.
            (unmapped, unsafe { entered.mem_release(handle) })
        }
    }
}

/// Takes back the calls of a failed growth, newest first.
fn undo(
    entered: &Entered<'_>,
    error: DriverError,
    made: Vec<(u64, u64, u64, bool)>,
) -> GrowthFailure {
    let mut failure = GrowthFailure {
        error,
        mapped: Vec::new(),
        orphaned_handles: Vec::new(),
    };
    for (addr, bytes, handle, mapped) in made.into_iter().rev() {
        // SAFETY: mapped by this growth as one handle, and nobody was ever told the address.
        if mapped && let Err(error) = unsafe { entered.mem_unmap(addr, bytes as usize) } {
            failure.mapped.push((addr, bytes, handle));
            failure.also(error);
            continue;
        }
        // SAFETY: made by this growth and mapped nowhere.
        if let Err(error) = unsafe { entered.mem_release(handle) } {
            failure.orphaned_handles.push((handle, bytes));
            failure.also(error);
        }
    }
    failure
}
