//! The largest holders of memory. Live blocks are grouped by the tag of their pool or the label of their request, else
//! by the context that a recording captured at their allocation, else by size and stream.

use std::collections::HashMap;

use crate::allocator::extent::origin::Names;
use crate::allocator::extent::record::{Hot, SpaceId, State as Extent};
use crate::allocator::heap::Heap;
use crate::allocator::range::State;
use crate::allocator::suspend::Target;
use crate::block::Tag;
use crate::error::{HeldBy, Holder};
use crate::event::names;

/// Number of holders that an out-of-memory error names.
const HOLDERS_NAMED: usize = 5;

/// The property that the blocks of a group share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Group {
    Tag(Tag),
    Label(u16),
    Context(u16),
    /// Blocks from 2 to the power of the first number up to twice that size, by stream.
    Size(u32, u64),
}

impl Group {
    fn of(names: Names, bytes: u64, stream: impl FnOnce() -> u64) -> Group {
        match names {
            Names {
                label: 0,
                context: 0,
            } => Group::Size(bytes.checked_ilog2().unwrap_or(0), stream()),
            Names { label: 0, context } => Group::Context(context),
            Names { label, .. } => Group::Label(label),
        }
    }

    fn name(self) -> HeldBy {
        let named = |number: u16| names::name_of(number.into()).unwrap_or_default();
        match self {
            Group::Tag(tag) => HeldBy::Tag(tag.as_str().to_owned()),
            Group::Label(label) => HeldBy::Tag(named(label)),
            Group::Context(context) => HeldBy::Context(named(context)),
            Group::Size(log, stream) => HeldBy::Size {
                least: 1 << log,
                below: 2 << log,
                stream,
            },
        }
    }
}

/// Bytes and blocks of each group.
#[derive(Default)]
struct Sums(HashMap<Group, (u64, u64)>);

impl Sums {
    fn add(&mut self, group: Group, bytes: u64) {
        let (sum, blocks) = self.0.entry(group).or_default();
        *sum += bytes;
        *blocks += 1;
    }
}

/// Returns the groups of live blocks that hold the most memory, largest first.
pub(crate) fn holders(heap: &Heap) -> Vec<Holder> {
    let mut sums = Sums::default();
    add_small(heap, &mut sums);
    add_large(heap, &mut sums);
    add_pooled(heap, &mut sums);
    add_ranges(heap, &mut sums);
    let groups = sums.0.into_iter();
    let mut holders: Vec<Holder> = groups
        .map(|(group, sum)| Holder::new(group.name(), sum))
        .collect();
    // Sorted by name where bytes are equal, so that equal states give equal reports.
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.by.cmp(&b.by)));
    holders.truncate(HOLDERS_NAMED);
    holders
}

fn add_small(heap: &Heap, sums: &mut Sums) {
    for cache in &heap.caches.all {
        let inner = cache.lock();
        let stream = heap.streams[inner.slot].key.number();
        for (bytes, names) in inner.runs.live_blocks() {
            sums.add(Group::of(names, bytes, || stream), bytes);
        }
    }
}

fn add_large(heap: &Heap, sums: &mut Sums) {
    // Other extents in use are pages, and the addresses of views.
    let has_blocks = |space| match space {
        SpaceId::Large => true,
        SpaceId::Small => !heap.rules.caches(),
        SpaceId::Views => false,
    };
    for (id, hot) in heap.extents.records.iter() {
        if hot.state != Extent::Used || !has_blocks(hot.space) {
            continue;
        }
        let names = match heap.caches.large_cache_of(&heap.extents.records, id) {
            None => heap.extents.records.cold(id).origin.names(hot.generation),
            Some(cache) => match cache.lock().large_cache.find(id) {
                Some(block) if block.is_live() => block.origin.names(block.generation),
                _ => continue,
            },
        };
        let stream = || heap.streams[hot.stream].key.number();
        sums.add(Group::of(names, hot.bytes(), stream), hot.bytes());
    }
}

fn add_pooled(heap: &Heap, sums: &mut Sums) {
    for (id, pool) in heap.graphs.pools.iter().filter(|(_, pool)| !pool.away) {
        for live in pool.arena.live.values() {
            let stream = || live.users.first().map_or(0, |user| user.key.number());
            let group = match heap.suspended.tags.get(&Target::Pool(*id)) {
                Some(tag) => Group::Tag(*tag),
                None => Group::of(live.names, live.bytes(), stream),
            };
            sums.add(group, live.bytes());
        }
    }
}

/// Adds the committed memory of ranges: a range without a tag counts as one with the tag `range`.
fn add_ranges(heap: &Heap, sums: &mut Sums) {
    for (id, range) in heap.ranges.map.iter().filter(|(_, range)| !range.away) {
        let tag = heap.suspended.tags.get(&Target::Range(*id));
        let bytes = range.bytes(State::Committed);
        if bytes > 0 {
            sums.add(Group::Tag(tag.copied().unwrap_or(Tag::new("range"))), bytes);
        }
    }
}

/// Stores a label, by its number among names, on a live block.
pub(crate) fn set_label(heap: &mut Heap, id: u32, label: u16) {
    let Hot {
        addr, generation, ..
    } = heap.extents.records[id];
    if let Some(live) = heap.graphs.live_mut(addr) {
        live.names.label = label;
    } else if let Some(cache) = heap.caches.large_cache_of(&heap.extents.records, id) {
        if let Some(names) = cache.lock().large_cache.names_mut(id) {
            names.label = label;
        }
    } else {
        let origin = &mut heap.extents.records.cold_mut(id).origin;
        origin.names_mut(generation).label = label;
    }
}
