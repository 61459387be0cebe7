//! Suspended memory: handles that were released to the driver while their addresses stay reserved.
//!
//! A [`Suspension`] is the suspended part of one arena: its handles, their mappings, and the contents kept on the host.
//! The data here belongs to the heap and is under its lock; the driver calls are in [`commit`], and take a suspension
//! out of the heap while they run.

pub(crate) mod commit;
pub(crate) mod contents;
pub(crate) mod discard;
pub(crate) mod host;
pub(crate) mod run;
pub(crate) mod target;

use std::collections::BTreeMap;

use crate::allocator::suspend::contents::Contents;
use crate::allocator::suspend::host::HostCopy;
use crate::block::Tag;

/// The memory that a suspension belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// Everything outside of graph pools.
    Arenas,
    /// A graph pool.
    Pool(u64),
    /// A growable range.
    Range(u64),
}

impl Target {
    /// Returns the graph pool, if it is one.
    pub(crate) fn pool(self) -> Option<u64> {
        match self {
            Target::Pool(id) => Some(id),
            Target::Arenas | Target::Range(_) => None,
        }
    }
}

/// A handle that is suspended, or about to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SuspendedHandle {
    pub home: u64,
    pub bytes: u64,
    /// `None` once it was released.
    pub handle: Option<u64>,
    /// Addresses to map it at: at home, then in views.
    pub places: Vec<u64>,
    /// Number of these that are mapped now, from the first on.
    pub mapped: usize,
}

/// A suspension; see the module documentation.
#[derive(Debug)]
pub(crate) struct Suspension {
    pub handles: Vec<SuspendedHandle>,
    /// Borders of address reservations, which no call that sets access or copies may cross.
    pub bounds: Vec<u64>,
    /// Home ranges of the live blocks whose contents are kept, sorted: address and bytes.
    pub kept: Vec<(u64, u64)>,
    pub contents: Contents,
    /// The kept contents.
    pub copy: HostCopy,
    /// Whether a handle was released, so that its contents exist only in the copy.
    pub lost: bool,
    /// Whether the end of a copy, to the host or back, was not observed.
    pub unseen: bool,
    /// Whether the memory must not be used because some of it is missing.
    pub away: bool,
}

impl Suspension {
    pub(crate) fn bytes(&self) -> u64 {
        self.handles.iter().map(|handle| handle.bytes).sum()
    }

    /// Returns the bytes of missing handles.
    pub(crate) fn missing(&self) -> u64 {
        let away = self.handles.iter().filter(|handle| handle.handle.is_none());
        away.map(|handle| handle.bytes).sum()
    }

    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the home ranges of the handles, joined where they are adjacent.
    pub(crate) fn homes(&self) -> Vec<(u64, u64)> {
        let handles = self.handles.iter();
        let mut homes: Vec<(u64, u64)> = handles.map(|h| (h.home, h.bytes)).collect();
        homes.sort_unstable();
        join(&mut homes, |_| false);
        homes
    }

    /// Returns all ranges at which the handles are mapped, joined where they are adjacent.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        let handles = self.handles.iter();
        let places = handles.flat_map(|handle| handle.places.iter().map(|at| (*at, handle.bytes)));
        let mut places: Vec<(u64, u64)> = places.collect();
        places.sort_unstable();
        join(&mut places, |at| self.bounds.binary_search(&at).is_ok());
        places
    }
}

/// Joins adjacent ranges, except across the borders given by `ends`.
pub(crate) fn join(ranges: &mut Vec<(u64, u64)>, ends: impl Fn(u64) -> bool) {
    ranges.dedup_by(|next, last| {
        let one = last.0 + last.1 == next.0 && !ends(next.0);
        if one {
            last.1 += next.1;
        }
        one
    });
}

/// The suspensions of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    pub map: BTreeMap<Target, Suspension>,
    /// Whether driver calls for suspensions are in progress.
    pub working: bool,
    /// Homes and bytes of the handles that these calls work on.
    pub under_way: Vec<(u64, u64)>,
    /// Bytes that a resume in progress will take from the driver.
    pub coming: u64,
    /// The tags of pools and ranges.
    pub tags: BTreeMap<Target, Tag>,
    /// Numbers of segments by their homes, as far as they were reported.
    ids: BTreeMap<u64, u64>,
    count: u64,
}

impl Suspensions {
    /// Removes the suspensions of memory that cannot be used any more.
    pub(crate) fn take_unused(
        &mut self,
        is_unused: impl Fn(Target) -> bool,
    ) -> BTreeMap<Target, Suspension> {
        let all = std::mem::take(&mut self.map).into_iter();
        let (unused, used) = all.partition(|(target, _)| is_unused(*target));
        self.map = used;
        unused
    }

    /// Returns the number of the segment at an address, which is stable until the segment is unmapped.
    pub(crate) fn id_of(&mut self, home: u64) -> u64 {
        let count = &mut self.count;
        *self.ids.entry(home).or_insert_with(|| {
            *count += 1;
            *count
        })
    }

    /// Forgets the number of a segment that was unmapped.
    pub(crate) fn forget_segment(&mut self, home: u64) {
        self.ids.remove(&home);
    }

    /// Returns the tag of a target, if it has one.
    pub(crate) fn tag_of(&self, target: Target) -> Option<Tag> {
        self.tags.get(&target).copied()
    }

    /// Whether a handle at this home is suspended, and not being resumed.
    pub(crate) fn is_suspended_handle(&self, home: u64) -> bool {
        let handles = self.map.values().flat_map(|away| &away.handles);
        let mut homes = handles.map(|handle| handle.home);
        homes.any(|away| away == home)
    }

    /// Whether a handle at this home is suspended, or is being suspended or resumed.
    pub(crate) fn covers(&self, address: u64) -> bool {
        self.overlaps(address, 1)
    }

    /// Whether all of a block outside graph pools is present, and none of it is about to be suspended, unless all
    /// memory outside graph pools is.
    pub(crate) fn is_present(&self, address: u64, bytes: u64) -> bool {
        !self.working && !self.overlaps(address, bytes)
    }

    fn overlaps(&self, address: u64, bytes: u64) -> bool {
        let handles = self.map.values().flat_map(|away| &away.handles);
        let away = handles.map(|handle| (handle.home, handle.bytes));
        let mut homes = away.chain(self.under_way.iter().copied());
        homes.any(|(home, size)| home < address + bytes && address < home + size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_given_in_as_few_calls_as_reservations_allow() {
        let suspended = |home, places: &[u64]| SuspendedHandle {
            home,
            bytes: 4,
            handle: Some(1),
            places: places.to_vec(),
            mapped: places.len(),
        };
        let suspension = Suspension {
            handles: vec![
                suspended(0, &[0, 100]),
                suspended(8, &[8]),
                suspended(4, &[4, 104]),
            ],
            bounds: vec![0, 8, 100],
            kept: Vec::new(),
            contents: Contents::Drop,
            copy: HostCopy::None,
            lost: false,
            unseen: false,
            away: true,
        };
        assert_eq!(suspension.ranges(), [(0, 8), (8, 4), (100, 8)]);
    }

    #[test]
    fn a_recreated_segment_has_another_number() {
        let mut known = Suspensions::default();
        let first = known.id_of(7);
        assert_eq!(known.id_of(7), first);
        known.forget_segment(7);
        assert_ne!(known.id_of(7), first);
    }
    #[test]
    fn memory_is_absent_if_any_byte_of_it_is() {
        let known = Suspensions {
            under_way: vec![(16, 8)],
            ..Suspensions::default()
        };
        let present = |address, bytes| known.is_present(address, bytes);
        assert!(present(8, 8) && present(24, 8));
        assert!(!present(9, 8) && !present(16, 1) && !present(23, 8) && !present(8, 100));
        assert!([15, 16, 23, 24].map(|at| known.covers(at)) == [false, true, true, false]);
    }
}
