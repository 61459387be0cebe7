//! The memory of one graph pool: its free memory with its uses, its live blocks, and its views.
//!
//! Bytes are identified by their home addresses, as everywhere in the allocator; a view is a second mapping of handles.
//! No mapping is removed while a graph may use the pool, so that every address in a graph stays valid.

mod free;

use std::collections::hash_map::ValuesMut;
use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::origin::Names;
use crate::allocator::graph::addresses::Addresses;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::order::LastNodes;
use crate::allocator::graph::user::User;
use crate::allocator::size::GRANULE;

/// The number for a retired stream, which no stream has.
pub(crate) const NO_STREAM: u64 = u64::MAX;

/// A use outside captures that was not observed complete: the numbers of its stream and of its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Pending {
    pub stream: u64,
    pub event: u64,
}

/// The last use of memory by a stream of a capture before the memory was freed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub capture: u64,
    pub seen: LastNodes,
}

/// The uses of free memory that may still access it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    pub pending: Vec<Pending>,
    pub marks: Few<Mark>,
    /// Whether a graph with a lease may use the memory in its launches: captures may reuse it, because launches are
    /// ordered; other requests may not.
    pub captured: bool,
    /// Like [`captured`](Self::captured), for the graphs with these leases only.
    pub touched: Vec<Lease>,
}

impl Tag {
    /// Whether no work outside captures and no capture in progress may use the memory.
    pub(crate) fn is_unused(&self) -> bool {
        self.pending.is_empty() && self.marks.is_empty()
    }
}

/// A range of bytes by its home address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part {
    pub home: u64,
    pub granules: u32,
}

impl Part {
    pub(crate) fn end(&self) -> u64 {
        self.home + u64::from(self.granules) * GRANULE
    }
}

/// The place for a request: its address, and its bytes at home.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub addr: u64,
    pub parts: Few<Part>,
    /// Uses that were still pending when the bytes were taken.
    pub open: Vec<Pending>,
}

/// Size and alignment of a request in granules, and whether it may lie in a view.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fit {
    pub granules: u32,
    pub align: u32,
    pub views: bool,
}

impl Fit {
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.granules) * GRANULE
    }

    /// Returns the first valid address for the request from `addr` on.
    pub(crate) fn aligned(self, addr: u64) -> u64 {
        match self.align {
            // Avoids the division.
            1 => addr.next_multiple_of(GRANULE),
            align => addr.next_multiple_of(u64::from(align) * GRANULE),
        }
    }
}

#[derive(Debug)]
struct Piece {
    granules: u32,
    tag: Tag,
}

#[derive(Debug, Clone)]
pub(crate) struct Live {
    /// Its record in the heap.
    pub id: u32,
    pub generation: u32,
    /// Its pool.
    pub owner: u64,
    pub granules: u32,
    pub requested: u64,
    pub parts: Few<Part>,
    /// The stream that it was allocated on, and those that were recorded on it.
    pub users: Few<User>,
    /// Recorded uses that end with an event.
    pub pending: Vec<Pending>,
    /// Whether a capture allocated it, or uses it.
    pub captured: bool,
    /// Leases of the graphs in whose captures its free was deferred.
    pub touched: Vec<Lease>,
    /// Value of the pools' counter when it got its place.
    pub born: u64,
    /// Origin of the block.
    pub names: Names,
}

/// What remains to be done for a freed block: its record is removed, and its users are dropped.
#[derive(Debug)]
pub(crate) struct FreedBlock {
    pub id: u32,
    pub bytes: u64,
    pub requested: u64,
    /// Users, to be dropped without the lock.
    pub users: Few<User>,
}

impl Live {
    /// Returns a copy for lists whose streams are never queried.
    pub(crate) fn listed(&self) -> Live {
        Live {
            users: self.users.iter().map(User::listed).collect(),
            ..self.clone()
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }
}

/// Live blocks by address, unordered.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    blocks: HashMap<u64, Live, Mixed>,
    /// Bytes of all blocks, stored because a capture with many live blocks reads the sum at each of its requests.
    bytes: u64,
}

impl Lives {
    #[inline]
    pub(crate) fn insert(&mut self, addr: u64, live: Live) {
        self.bytes += live.bytes();
        let before = self.blocks.insert(addr, live);
        debug_assert!(before.is_none(), "an address has one block");
    }

    pub(crate) fn remove(&mut self, addr: u64) -> Option<Live> {
        let live = self.blocks.remove(&addr)?;
        self.bytes -= live.bytes();
        Some(live)
    }

    /// Returns a block. The caller must not change its size.
    pub(crate) fn get_mut(&mut self, addr: u64) -> Option<&mut Live> {
        self.blocks.get_mut(&addr)
    }

    /// Like [`get_mut`](Self::get_mut), for all blocks.
    pub(crate) fn values_mut(&mut self) -> ValuesMut<'_, u64, Live> {
        self.blocks.values_mut()
    }

    /// Returns the bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Deref for Lives {
    type Target = HashMap<u64, Live, Mixed>;

    fn deref(&self) -> &HashMap<u64, Live, Mixed> {
        &self.blocks
    }
}

/// A second, contiguous mapping of handles: home address and bytes of each.
#[derive(Debug)]
pub(crate) struct View {
    pub handles: Vec<(u64, u64)>,
}

impl View {
    pub(crate) fn bytes(&self) -> u64 {
        self.handles.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Iterates over its mappings from its base on: address and bytes.
    pub(crate) fn mappings(&self, base: u64) -> impl Iterator<Item = (u64, u64)> {
        self.handles.iter().scan(base, |at, (_, bytes)| {
            *at += bytes;
            Some((*at - bytes, *bytes))
        })
    }
}

/// A physical handle at its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub handle: u64,
    pub bytes: u64,
}

/// The arena of a pool; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    pub homes: Addresses,
    pub sites: Addresses,
    /// By home address.
    pub handles: BTreeMap<u64, Handle>,
    /// By address.
    pub views: BTreeMap<u64, View>,
    /// Free memory by home address.
    free: BTreeMap<u64, Piece>,
    /// The most recently freed block, by its home, separate from other free memory: the next request often has its
    /// size.
    recent: Option<(u64, Piece)>,
    /// Free memory that plans in progress have set aside, by the address of each plan's place. Changes to the uses of
    /// free memory apply to it too.
    pub(super) aside: BTreeMap<u64, Vec<(Part, Tag)>>,
    /// Bytes mapped at home and in views since the arena was last empty.
    pub mapped: u64,
    pub live: Lives,
    /// Handles that could not be unmapped, with their homes.
    pub stuck: Vec<(u64, Handle)>,
    /// Second mappings that could not be unmapped: address to bytes.
    pub lost: BTreeMap<u64, u64>,
}

impl Arena {
    /// Returns the bytes held from the driver.
    pub(crate) fn held(&self) -> u64 {
        let handles = self.handles.values().map(|handle| handle.bytes);
        let stuck = self.stuck.iter().map(|(_, handle)| handle.bytes);
        handles.chain(stuck).sum()
    }

    /// Returns the home parts of the bytes at an address, if all of them are mapped there.
    pub(crate) fn parts_at(&self, addr: u64, granules: u32) -> Option<Few<Part>> {
        let bytes = u64::from(granules) * GRANULE;
        let Some((base, view)) = self.views.range(..=addr).next_back() else {
            return self.part_at_home(addr, granules);
        };
        if addr >= base + view.bytes() {
            return self.part_at_home(addr, granules);
        }
        let (mut parts, mut at, end) = (Few::new(), *base, addr + bytes);
        for (home, bytes) in &view.handles {
            let (from, to) = (addr.max(at), end.min(at + bytes));
            if from < to {
                parts.push(Part {
                    home: home + (from - at),
                    granules: ((to - from) / GRANULE) as u32,
                });
            }
            at += bytes;
        }
        (end <= at).then_some(parts)
    }

    fn part_at_home(&self, home: u64, granules: u32) -> Option<Few<Part>> {
        let end = home + u64::from(granules) * GRANULE;
        let mut at = home;
        while at < end {
            let (base, handle) = self.handles.range(..=at).next_back()?;
            if at >= base + handle.bytes {
                return None;
            }
            at = base + handle.bytes;
        }
        Some(Few::from([Part { home, granules }]))
    }

    /// Frees a live block's memory.
    pub(crate) fn release(&mut self, addr: u64, mut tag: Tag) -> Option<FreedBlock> {
        let live = self.live.remove(addr)?;
        tag.captured |= live.captured;
        tag.touched.extend(live.touched.iter().cloned());
        if let Some((last, parts)) = live.parts.split_last() {
            for part in parts {
                self.put(*part, tag.clone());
            }
            self.merge_recent();
            let granules = last.granules;
            self.recent = Some((last.home, Piece { granules, tag }));
        }
        Some(FreedBlock {
            id: live.id,
            bytes: live.bytes(),
            requested: live.requested,
            users: live.users,
        })
    }

    /// Makes memory that a capture freed available to all other captures.
    pub(crate) fn unmark(&mut self, capture: u64) {
        self.retag(|tag| {
            tag.marks.retain(|mark| mark.capture != capture);
            tag.touched.retain(|lease| !lease.is_over());
        });
    }

    /// Iterates over uses outside captures of all its memory.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Pending> {
        let live = self.live.values().flat_map(|live| &live.pending);
        let tags = self.tags().flat_map(|(_, tag)| &tag.pending);
        tags.chain(live)
    }

    /// Whether anything is held: memory from the driver, or addresses.
    pub(crate) fn has_memory(&self) -> bool {
        !(self.homes.spans.is_empty() && self.sites.spans.is_empty() && self.stuck.is_empty())
    }

    /// Takes out all handles for release: home, handle, and whether an earlier attempt to unmap it failed.
    pub(crate) fn take_handles(&mut self) -> Vec<(u64, Handle, bool)> {
        self.free.clear();
        self.recent = None;
        let held = std::mem::take(&mut self.handles).into_iter();
        let mut all: Vec<_> = held.map(|(home, handle)| (home, handle, false)).collect();
        let stuck = std::mem::take(&mut self.stuck).into_iter();
        all.extend(stuck.map(|(home, handle)| (home, handle, true)));
        all
    }

    /// Records that all handles were released, and that nothing is mapped any more except for what failed calls left
    /// behind.
    pub(crate) fn forget_memory(&mut self) {
        self.free.clear();
        self.recent = None;
        self.mapped = 0;
        for (home, handle) in std::mem::take(&mut self.handles) {
            self.homes.put(home, handle.bytes);
        }
        for (base, view) in std::mem::take(&mut self.views) {
            self.sites.put(base, view.bytes());
        }
    }

    /// Takes the addresses of an arena that has released all its memory: base and bytes. None while anything is mapped
    /// there.
    pub(crate) fn take_addresses(&mut self) -> Vec<(u64, u64)> {
        if !(self.stuck.is_empty() && self.lost.is_empty() && self.handles.is_empty()) {
            return Vec::new();
        }
        let homes = std::mem::take(&mut self.homes).spans;
        let sites = std::mem::take(&mut self.sites).spans;
        homes.into_iter().chain(sites).collect()
    }

    /// Takes over what another arena could not release.
    pub(crate) fn absorb(&mut self, left: Arena) {
        self.stuck.extend(left.stuck);
        self.lost.extend(left.lost);
        // For these, no call was attempted.
        self.stuck.extend(left.handles);
        let views = left.views.iter();
        self.lost
            .extend(views.flat_map(|(base, view)| view.mappings(*base)));
        for (own, other) in [(&mut self.homes, left.homes), (&mut self.sites, left.sites)] {
            // Addresses with remaining mappings stay unusable until they are unmapped.
            own.spans.extend(other.spans);
        }
    }
}

#[cfg(test)]
mod tests;
