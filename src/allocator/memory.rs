//! Memory from the driver and back: transactions of several calls, made without the lock.

use crate::driver::{DriverError, Entered};

use super::engine::Engine;
use super::error::{Error, OutOfMemory, PendingBytes, PinnedSegment};
use super::growth::{Growth, Release};
use super::handles::Stray;
use super::records::{COMPLETE, SpaceId, State as Extent};
use super::size::{GRANULE, PHYSICAL_GRANULE};
use super::state::State;
use super::uses::Uses;
use super::want::Want;

/// Address space that an arena leases first; then as much again as it has, while that is less than
/// the device's memory.
const FIRST_LEASE: u64 = 8 << 20;

/// How many pinned segments an out-of-memory error names.
const PINNED_NAMED: usize = 3;

/// A growth that failed, with what could not be undone.
#[derive(Debug)]
pub(crate) struct GrowthFailure {
    pub error: DriverError,
    /// Handles that are still mapped: (address, bytes, handle).
    mapped: Vec<(u64, u64, u64)>,
    /// Handles that are mapped nowhere and could not be released.
    strays: Vec<(u64, u64)>,
}

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
                strays: Vec::new(),
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

    /// Gives claimed memory back to the driver. What fails stays in the books, or goes back to the
    /// free memory if it is still mapped; the first error is returned after all was tried.
    pub(crate) fn release(&self, plan: Vec<Release>) -> Result<u64, Error> {
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                let mut state = self.lock();
                for release in plan {
                    state.restore(release.space, release.id, release.shards);
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
            match self
                .lock()
                .given_back(release, done, State::give_home_again)
            {
                (bytes, None) => released += bytes,
                (_, failed) => first = first.or(failed),
            }
            if first.is_some_and(|e| e.is_fatal()) {
                // Nothing more can be done in this context; what is left stays as it is.
                break;
            }
        }
        for release in plan {
            let mut state = self.lock();
            state.restore(release.space, release.id, release.shards);
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    /// Frees a plain segment. It leaves the books first: as soon as the driver has it, another thread
    /// may be given its address again.
    fn release_segment(&self, entered: &Entered<'_>, release: Release) -> Result<u64, DriverError> {
        let bytes = release.bytes;
        {
            let mut state = self.lock();
            state.gone(&release);
            state.unhold(bytes, release.space);
            state.physical.planned += bytes;
        }
        let (freed, _) = give_back(entered, &release);
        let mut state = self.lock();
        state.physical.planned -= bytes;
        if let Err(error) = freed {
            state.readmit(release);
            return Err(error);
        }
        Ok(bytes)
    }

    /// Tries again to release what an earlier failure left behind.
    pub(crate) fn retry_strays(&self) -> Result<u64, Error> {
        let (strays, quarantined) = self.lock().claim_leftovers();
        if strays.is_empty() && quarantined.is_empty() {
            return Ok(0);
        }
        let entered = self.context.enter();
        let mut first: Option<DriverError> = entered.as_ref().err().copied();
        let mut released = 0;
        for stray in strays {
            // SAFETY: the handle was made by this allocator, is mapped nowhere, and its release
            // failed before, so it is still ours.
            let freed = entered
                .as_ref()
                .map_err(|e| *e)
                .and_then(|e| unsafe { e.mem_release(stray.handle) });
            self.lock().stray_tried(&stray, freed.is_ok());
            match freed {
                Ok(()) => released += stray.bytes,
                Err(error) => first = first.or(Some(error)),
            }
        }
        for release in quarantined {
            let done = match &entered {
                Ok(entered) => give_back(entered, &release),
                Err(error) => (Err(*error), Ok(())),
            };
            match self.lock().given_back(release, done, |state, release| {
                state.extents.quarantine(release);
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

    /// The error that says everything about a failed request. Cannot fail itself.
    pub(crate) fn out_of_memory(
        &self,
        mut state: super::engine::Guard<'_>,
        want: &Want,
        refusal: Option<DriverError>,
    ) -> Error {
        let mut oom = state.picture(want.requested);
        drop(state);
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
            strays: Vec::new(),
        }
    }
}

/// How the two calls went that give a handle back: the unmapping, and the release. The second counts
/// only if the first is good.
type GivenBack = (Result<(), DriverError>, Result<(), DriverError>);

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
        strays: Vec::new(),
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
            failure.strays.push((handle, bytes));
            failure.also(error);
        }
    }
    failure
}

impl State {
    /// Enters address space that was leased for an arena; `grown`: it lengthens the lease before it.
    fn add_addresses(&mut self, space: SpaceId, base: u64, bytes: u64, grown: bool) {
        match self.physical.spans.range_mut(..base).next_back() {
            Some((_, span)) if grown => *span += bytes,
            _ => {
                self.physical.spans.insert(base, bytes);
            }
        }
        let (at, records) = self.extents.parts(space);
        let granules = (bytes / GRANULE) as u32;
        if space == SpaceId::Views {
            // No view may lie in two reservations.
            at.add_range(records, base, granules, grown);
        } else {
            at.add_hole(records, base, granules);
        }
    }

    /// A growth failed: the books as before, and what could not be undone set apart.
    pub(crate) fn growth_failed(&mut self, growth: Growth, failure: GrowthFailure) {
        let space = growth.space;
        self.not_grown(growth);
        self.set_apart(space, failure);
    }

    /// Enters what could not be undone into the books. The homes of it are holes.
    pub(crate) fn set_apart(&mut self, space: SpaceId, failure: GrowthFailure) {
        for (handle, bytes) in failure.strays {
            self.count_held(bytes, space);
            self.physical.strays.push(Stray {
                handle,
                bytes,
                space,
                busy: false,
            });
        }
        for (addr, bytes, handle) in failure.mapped {
            // The range is a hole again; take it out of circulation with its handle.
            let hole = self.extents.space(space).and_then(|s| {
                s.holes()
                    .range(..=addr)
                    .next_back()
                    .map(|(base, id)| (*base, *id))
            });
            let Some((base, hole)) = hole else { continue };
            let skip = ((addr - base) / GRANULE) as u32;
            if let Some((id, _)) = self.claim(space, hole, skip, (bytes / GRANULE) as u32) {
                self.extents.records[id].state = Extent::Quarantined;
                self.hold(addr, bytes, Some(handle), space);
            }
        }
    }

    fn count_held(&mut self, bytes: u64, space: SpaceId) {
        self.stats.on_pool(space == SpaceId::Small, |pool| {
            pool.reserved.add(bytes);
            pool.segments.add(1);
        });
    }

    /// Books what became of a mapped handle that was to be given back. One that is still mapped goes
    /// where `still_mapped` puts it; one that is unmapped and could not be released is a stray.
    /// Returns the bytes that are the driver's again, and what failed.
    fn given_back(
        &mut self,
        release: Release,
        (unmapped, freed): GivenBack,
        still_mapped: impl FnOnce(&mut State, Release),
    ) -> (u64, Option<DriverError>) {
        if let Err(error) = unmapped {
            still_mapped(self, release);
            return (0, Some(error));
        }
        self.gone(&release);
        match (freed, release.handle) {
            (Err(error), Some(handle)) => {
                self.physical.strays.push(Stray {
                    handle,
                    bytes: release.bytes,
                    space: release.space,
                    busy: false,
                });
                (0, Some(error))
            }
            _ => {
                self.unhold(release.bytes, release.space);
                (release.bytes, None)
            }
        }
    }

    /// A handle that could not be unmapped is free memory again.
    fn give_home_again(&mut self, release: Release) {
        self.restore(release.space, release.id, release.shards);
    }

    /// Takes a segment into the books again that the driver would not free.
    fn readmit(&mut self, release: Release) {
        let Ok(granules) = u32::try_from(release.bytes / GRANULE) else {
            return;
        };
        self.hold(release.addr, release.bytes, None, release.space);
        let (space, records) = self.extents.parts(release.space);
        let id = space.add_region(records, release.addr, granules, Uses::None);
        let busy = space.claim(records, id, 0, granules, Extent::Busy, &mut Vec::new());
        if let Some(id) = busy {
            self.restore(release.space, id, release.shards);
        }
    }

    /// Whether an earlier failure left memory behind that nobody can use.
    pub(crate) fn has_leftovers(&self) -> bool {
        let quarantined = |(_, hot): (u32, &super::records::Hot)| hot.state == Extent::Quarantined;
        !self.physical.strays.is_empty() || self.extents.records.iter().any(quarantined)
    }

    /// What an earlier failure left behind, claimed so that nobody else tries at the same time.
    fn claim_leftovers(&mut self) -> (Vec<Stray>, Vec<Release>) {
        let quarantined = self.quarantined();
        for release in &quarantined {
            self.extents.records[release.id].state = Extent::Busy;
        }
        let idle = self.physical.strays.iter_mut().filter(|stray| !stray.busy);
        let claim = |stray: &mut Stray| {
            stray.busy = true;
            *stray
        };
        (idle.map(claim).collect(), quarantined)
    }

    /// A stray was released, or stays one.
    fn stray_tried(&mut self, stray: &Stray, released: bool) {
        let same = |other: &Stray| other.busy && other.handle == stray.handle;
        let Some(at) = self.physical.strays.iter().position(same) else {
            return;
        };
        if released {
            self.physical.strays.remove(at);
            self.unhold(stray.bytes, stray.space);
        } else {
            self.physical.strays[at].busy = false;
        }
    }

    /// Quarantined ranges as releases.
    fn quarantined(&self) -> Vec<Release> {
        let ranges = self
            .extents
            .records
            .iter()
            .filter(|(_, hot)| hot.state == Extent::Quarantined);
        ranges
            .filter_map(|(id, hot)| {
                let holding = self.physical.holdings.get(&hot.addr)?;
                Some(Release {
                    space: holding.space,
                    id,
                    shards: Vec::new(),
                    addr: hot.addr,
                    bytes: holding.bytes,
                    handle: holding.handle,
                })
            })
            .collect()
    }

    /// What an out-of-memory error reports of the books.
    pub(crate) fn picture(&mut self, requested: u64) -> OutOfMemory {
        let (_, allocated) = self.live_totals();
        OutOfMemory {
            requested,
            limit: self.physical.limit,
            reserved: self.stats.all.reserved.current,
            allocated,
            cached: self.stats.all.reserved.current.saturating_sub(allocated),
            largest_free: self
                .extents
                .spaces()
                .map(|s| s.largest_piece())
                .max()
                .unwrap_or(0),
            largest_run: self.extents.largest_run(),
            in_views: self.views.lent_bytes,
            guarded: self.guards.bytes(),
            pending: self.pending_bytes(),
            pinned: self.pinned(),
            ..OutOfMemory::default()
        }
    }

    /// Free bytes that wait for each stream, most first.
    pub(crate) fn pending_bytes(&self) -> Vec<PendingBytes> {
        let mut by_stream: Vec<PendingBytes> = Vec::new();
        let mut slots: Vec<u32> = Vec::new();
        for entry in self.extents.spaces().flat_map(|s| s.pieces()) {
            if self.extents.records[entry.id].stream == COMPLETE {
                continue;
            }
            let bytes = u64::from(entry.granules) * GRANULE;
            for u in self.extents.records.cold(entry.id).uses.as_slice() {
                if self.streams.complete(u) {
                    continue;
                }
                let at = slots
                    .iter()
                    .position(|s| *s == u.stream)
                    .unwrap_or_else(|| {
                        slots.push(u.stream);
                        let stream_id = self.streams[u.stream].key.number();
                        by_stream.push(PendingBytes {
                            stream_id,
                            bytes: 0,
                            unmarked: 0,
                        });
                        by_stream.len() - 1
                    });
                by_stream[at].bytes += bytes;
                if self.streams.marker(u).is_none() {
                    by_stream[at].unmarked += bytes;
                }
            }
        }
        by_stream.sort_by_key(|p| std::cmp::Reverse(p.bytes));
        by_stream
    }

    /// Where few live bytes hold the most memory.
    fn pinned(&self) -> Vec<PinnedSegment> {
        let mut live: std::collections::BTreeMap<u64, PinnedSegment> =
            std::collections::BTreeMap::new();
        for (_, hot) in self.extents.records.iter() {
            if hot.state != Extent::Used {
                continue;
            }
            let (mut addr, end) = (hot.addr, hot.end());
            while addr < end {
                let Some((base, holding)) = self.physical.holdings.range(..=addr).next_back()
                else {
                    break;
                };
                let top = base + holding.bytes;
                if top <= addr {
                    break;
                }
                let entry = live.entry(*base).or_insert(PinnedSegment {
                    address: *base,
                    bytes: holding.bytes,
                    live: 0,
                    block: hot.addr,
                });
                entry.live += end.min(top) - addr;
                entry.block = entry.block.min(hot.addr);
                addr = top;
            }
        }
        let mut pinned: Vec<PinnedSegment> =
            live.into_values().filter(|p| p.live < p.bytes).collect();
        pinned.sort_by_key(|p| std::cmp::Reverse(p.bytes - p.live));
        pinned.truncate(PINNED_NAMED);
        pinned
    }
}
