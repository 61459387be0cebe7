//! Views: second, contiguous mappings of physical handles.
//!
//! Each handle is mapped once at its home. If free handles are scattered, a stitch maps them again in a view, where
//! they serve a request without new memory:
//!
//! ```text
//!  home    +-----------+-----------+-----------+-----------+-----------+
//!          | handle A  | handle B  | handle C  | handle D  | handle E  |
//!          | free      | used      | free      | used      | free      |
//!          +-----------+-----------+-----------+-----------+-----------+
//!                |                       |                       |
//!                +-----------+  +--------+  +--------------------+
//!                            v  v           v
//!  view                    +-----------+-----------+-----------+
//!                          | A         | C         | E         |    one block in A, C and E
//!                          +-----------+-----------+-----------+
//! ```
//!
//! While the block lives, its bytes at home are aliased and cannot be allocated there. When it is freed, each part at
//! home becomes a free piece with the block's uses. A mapping is removed, and a handle released, only when the host has
//! observed the completion of every use through every mapping of that handle. Views are kept, because a program that
//! repeats itself needs the same layout again.

pub(crate) mod blocks;
pub(crate) mod commit;
pub(crate) mod layout;
pub(crate) mod mapping;
pub(crate) mod sources;

use std::collections::BTreeMap;

use crate::allocator::extent::want::Want;
use crate::allocator::physical::Physical;
use crate::allocator::report::{PhysicalSegment, SelfTest};
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{
    EXTENSIONS, Layout, Mapping, Openings, Site, View, ViewRun, push_part,
};

/// Bounds of the number of mappings in views: a minimum, and a number per handle held.
const VIEW_MAPS_MIN: usize = 32_768;
const VIEW_MAPS_PER_HANDLE: usize = 32;

/// The views of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Views {
    /// Views by their base address.
    pub map: BTreeMap<u64, View>,
    /// Number of blocks allocated in views so far: the clock that orders their uses.
    pub clock: u64,
    /// Number of mappings in views that calls in progress make or remove; they are counted at their handles.
    pub segs_under_way: usize,
    /// Bytes of blocks in views.
    pub aliased_bytes: u64,
    /// Result of the self-test of the device.
    pub self_test: SelfTest,
}

impl Views {
    /// Prevents the removal of a view, or allows it again.
    pub(crate) fn hold_view(&mut self, base: u64, on: bool) {
        if let Some(view) = self.map.get_mut(&base) {
            view.calls = if on { view.calls + 1 } else { view.calls - 1 };
        }
    }

    /// Returns the home ranges of a block: in the suffix of the view, then in the added handles.
    pub(crate) fn homes(
        &self,
        want: &Want,
        layout: &Layout,
        site: &Site,
    ) -> Option<Vec<(u64, u32)>> {
        let mut parts: Vec<(u64, u32)> = Vec::new();
        let mut left = want.granules;
        if layout.back > 0 {
            let granules = ((layout.back / GRANULE) as u32).min(left);
            parts.extend(self.map.get(&site.base)?.home_parts(site.offset, granules));
            left -= granules;
        }
        let mut skip = layout.skip;
        for (home, bytes) in &layout.adds {
            let granules = (((bytes - skip) / GRANULE) as u32).min(left);
            if granules > 0 {
                push_part(&mut parts, (home + skip, granules));
            }
            left -= granules;
            skip = 0;
        }
        Some(parts)
    }

    /// Returns the views with the longest open suffix, the lowest among equals: the part of it that a request needs,
    /// and the view's base.
    pub(crate) fn best_suffixes(&self, need: u64, open: &Openings) -> Vec<(u64, u64)> {
        let views = self.map.iter();
        let room = views.filter(|(_, view)| !view.dead && !view.busy && view.granules < view.room);
        let mut best: Vec<(u64, u64)> = Vec::with_capacity(EXTENSIONS + 1);
        for (base, view) in room {
            let suffix = view.open_suffix(&open.borders).min(need);
            let last = best.last().filter(|_| best.len() == EXTENSIONS);
            if last.is_none_or(|(least, _)| suffix > *least) {
                // Equal ones stay in the order of their addresses.
                let at = best.partition_point(|(more, _)| *more >= suffix);
                best.insert(at, (suffix, *base));
                best.truncate(EXTENSIONS);
            }
        }
        best
    }

    /// Returns the smallest run over all views that fits a request, given the open memory at home.
    pub(crate) fn find(&self, want: &Want, open: &Openings) -> Option<ViewRun> {
        let mut best: Option<ViewRun> = None;
        let views = self.map.iter();
        for (base, view) in views.filter(|(_, v)| !v.dead && v.granules >= want.granules) {
            let found = view.tightest(*base, &open.borders, want);
            // The lowest among equals.
            if let Some((offset, granules)) = found
                && best.is_none_or(|b| granules < b.granules)
            {
                best = Some(ViewRun {
                    base: *base,
                    offset,
                    granules,
                });
            }
        }
        best
    }

    /// Adds handles that were mapped into a view after its present ones.
    pub(crate) fn extend_view(&mut self, base: u64, mappings: Vec<Mapping>) {
        if let Some(view) = self.map.get_mut(&base) {
            view.extend(mappings);
        }
    }

    /// Returns the number of mappings in views above the bound for a number of handles held.
    pub(crate) fn excess_maps(&self, handles: usize) -> usize {
        let bound = VIEW_MAPS_MIN.max(VIEW_MAPS_PER_HANDLE * handles);
        self.view_maps().saturating_sub(bound)
    }

    /// Returns the number of mappings in views.
    pub(crate) fn view_maps(&self) -> usize {
        self.map.values().map(|v| v.mappings.len()).sum()
    }

    /// Returns the physical segments of a range inside one view.
    pub(crate) fn segments(&self, physical: &Physical, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let Some((base, view)) = self.view_around(ptr) else {
            return Vec::new();
        };
        let (mut segments, mut at) = (Vec::new(), base);
        for mapping in &view.mappings {
            let bytes = u64::from(mapping.granules) * GRANULE;
            let (from, to) = (ptr.max(at), end.min(at + bytes));
            if from < to {
                segments.push(PhysicalSegment {
                    address: from,
                    bytes: to - from,
                    handle: physical.handle_at(mapping.home),
                    offset: from - at,
                    handle_bytes: bytes,
                });
            }
            at += bytes;
        }
        segments
    }

    pub(crate) fn view_around(&self, addr: u64) -> Option<(u64, &View)> {
        let (base, view) = self.map.range(..=addr).next_back()?;
        (addr < base + u64::from(view.granules) * GRANULE).then_some((*base, view))
    }
}
