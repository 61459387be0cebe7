//! The memory of one graph pool: its free parts and who may have them, its live blocks, and its views.
//!
//! Bytes are told apart by their home addresses, as everywhere in the allocator; a view is a second layout of
//! handles. Nothing that was mapped is unmapped before the whole arena is, so that every address which a graph may
//! hold stays good.

mod free;

use std::collections::hash_map::ValuesMut;
use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::origin::Names;
use crate::allocator::graph::addresses::Addresses;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::order::Seen;
use crate::allocator::graph::user::User;
use crate::allocator::size::GRANULE;

/// The number of a stream that was retired: no stream has it.
pub(crate) const NO_STREAM: u64 = u64::MAX;

/// A use outside of captures that was not seen complete: the number of its stream, and of its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Pending {
    pub stream: u64,
    pub event: u64,
}

/// What a stream of a capture did with memory before that was freed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub capture: u64,
    pub seen: Seen,
}

/// Until when free memory may still be touched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    pub pending: Vec<Pending>,
    pub marks: Few<Mark>,
    /// A graph that has a lease may use it in its launches: captures may have it by the promise, others may not.
    pub captured: bool,
    /// As [`captured`](Self::captured), of the graphs with these leases alone.
    pub touched: Vec<Lease>,
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

/// Where a request fits: its address, and the bytes behind it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub addr: u64,
    pub parts: Few<Part>,
    /// What the bytes still waited for when they were taken.
    pub open: Vec<Pending>,
}

/// How much is asked for, in granules, and whether it may lie in a view.
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

    /// The first address from `addr` on that the request may have.
    pub(crate) fn aligned(self, addr: u64) -> u64 {
        match self.align {
            // Without a division.
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

/// A live block.
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
    /// Uses that were recorded as over with an event.
    pub pending: Vec<Pending>,
    /// A capture got it, or uses it.
    pub captured: bool,
    /// Leases of the graphs in whose captures its free was put off.
    pub touched: Vec<Lease>,
    /// How much had been counted when it got its place.
    pub born: u64,
    /// Who asked for it.
    pub names: Names,
}

/// What is left of a block that was freed.
#[derive(Debug)]
pub(crate) struct Gone {
    pub id: u32,
    pub requested: u64,
    /// To be let go without the lock.
    pub users: Few<User>,
}

impl Live {
    /// A copy for lists that nobody asks the driver about.
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

/// Live blocks by their addresses, in no order.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    blocks: HashMap<u64, Live, Mixed>,
    /// Bytes of all blocks: a capture with many live blocks reads the sum at each of its requests.
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

    /// The caller does not change the block's size.
    pub(crate) fn get_mut(&mut self, addr: u64) -> Option<&mut Live> {
        self.blocks.get_mut(&addr)
    }

    /// As [`get_mut`](Self::get_mut), of all.
    pub(crate) fn values_mut(&mut self) -> ValuesMut<'_, u64, Live> {
        self.blocks.values_mut()
    }

    /// Bytes of all blocks.
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

/// Handles that are mapped once more, back to back: home address and bytes of each.
#[derive(Debug)]
pub(crate) struct View {
    pub handles: Vec<(u64, u64)>,
}

impl View {
    pub(crate) fn bytes(&self) -> u64 {
        self.handles.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Its mappings from its base on: address and bytes.
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

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    pub homes: Addresses,
    pub sites: Addresses,
    /// By their homes.
    pub handles: BTreeMap<u64, Handle>,
    /// By their addresses.
    pub views: BTreeMap<u64, View>,
    /// Free memory by its home.
    free: BTreeMap<u64, Piece>,
    /// The free memory that was a block last, by its home, beside all other: mostly somebody asks for as much next.
    hand: Option<(u64, Piece)>,
    /// Free memory that plans under way have set aside, by the address of each one's place. What happens to the
    /// uses of free memory happens to it.
    pub(super) aside: BTreeMap<u64, Vec<(Part, Tag)>>,
    /// Bytes that were mapped at home and in views since there were none.
    pub mapped: u64,
    pub live: Lives,
    /// Handles that could not be unmapped, with their homes.
    pub stuck: Vec<(u64, Handle)>,
    /// Second mappings that could not be unmapped: address to bytes of each.
    pub lost: BTreeMap<u64, u64>,
}

impl Arena {
    /// Bytes that are held from the driver.
    pub(crate) fn held(&self) -> u64 {
        let handles = self.handles.values().map(|handle| handle.bytes);
        let stuck = self.stuck.iter().map(|(_, handle)| handle.bytes);
        handles.chain(stuck).sum()
    }

    /// The bytes behind an address, if all of them are mapped there.
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
    pub(crate) fn release(&mut self, addr: u64, mut tag: Tag) -> Option<Gone> {
        let live = self.live.remove(addr)?;
        tag.captured |= live.captured;
        tag.touched.extend(live.touched.iter().cloned());
        if let Some((last, parts)) = live.parts.split_last() {
            for part in parts {
                self.put(*part, tag.clone());
            }
            self.lay_down();
            let granules = last.granules;
            self.hand = Some((last.home, Piece { granules, tag }));
        }
        Some(Gone {
            id: live.id,
            requested: live.requested,
            users: live.users,
        })
    }

    /// What a capture freed is free for all others.
    pub(crate) fn unmark(&mut self, capture: u64) {
        self.retag(|tag| {
            tag.marks.retain(|mark| mark.capture != capture);
            tag.touched.retain(|lease| !lease.is_over());
        });
    }

    /// Uses outside of captures of all its memory.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Pending> {
        let live = self.live.values().flat_map(|live| &live.pending);
        let tags = self.tags().flat_map(|(_, tag)| &tag.pending);
        tags.chain(live)
    }

    /// Whether anything is held from the driver: memory or addresses.
    pub(crate) fn has_memory(&self) -> bool {
        !(self.homes.spans.is_empty() && self.sites.spans.is_empty() && self.stuck.is_empty())
    }

    /// Takes all handles out, to be given back: home, handle, and whether an unmapping of it failed before.
    pub(crate) fn take_handles(&mut self) -> Vec<(u64, Handle, bool)> {
        self.free.clear();
        self.hand = None;
        let held = std::mem::take(&mut self.handles).into_iter();
        let mut all: Vec<_> = held.map(|(home, handle)| (home, handle, false)).collect();
        let stuck = std::mem::take(&mut self.stuck).into_iter();
        all.extend(stuck.map(|(home, handle)| (home, handle, true)));
        all
    }

    /// All handles are the driver's, and nothing is mapped any more but what failed calls left behind.
    pub(crate) fn forget_memory(&mut self) {
        self.free.clear();
        self.hand = None;
        self.mapped = 0;
        for (home, handle) in std::mem::take(&mut self.handles) {
            self.homes.put(home, handle.bytes);
        }
        for (base, view) in std::mem::take(&mut self.views) {
            self.sites.put(base, view.bytes());
        }
    }

    /// The addresses of an arena that gave all its memory back: base and bytes. None while anything is mapped there.
    pub(crate) fn take_addresses(&mut self) -> Vec<(u64, u64)> {
        if !(self.stuck.is_empty() && self.lost.is_empty() && self.handles.is_empty()) {
            return Vec::new();
        }
        let homes = std::mem::take(&mut self.homes).spans;
        let sites = std::mem::take(&mut self.sites).spans;
        homes.into_iter().chain(sites).collect()
    }

    /// Takes over what another arena could not give back.
    pub(crate) fn absorb(&mut self, left: Arena) {
        self.stuck.extend(left.stuck);
        self.lost.extend(left.lost);
        // These were not even tried.
        self.stuck.extend(left.handles);
        let views = left.views.iter();
        self.lost
            .extend(views.flat_map(|(base, view)| view.mappings(*base)));
        for (own, other) in [(&mut self.homes, left.homes), (&mut self.sites, left.sites)] {
            // What is still mapped there makes them of no use until it is not.
            own.spans.extend(other.spans);
        }
    }
}

#[cfg(test)]
mod tests;
