//! The carving core by itself: blocks cut from segments that the caller provides.

use std::collections::HashMap;

use crate::allocator::extent::index::Entry;
use crate::allocator::extent::lookup::Lookup;
use crate::allocator::extent::record::{MIXED, NIL, Recorded, Records, SpaceId, State as Extent};
use crate::allocator::extent::space::Space;
use crate::allocator::extent::uses::{Use, Uses};
use crate::allocator::report::{BlockInfo, BlockState, SegmentInfo};
use crate::allocator::size::{CLASSIC_SMALL_LIMIT, GRANULE, classic_granules, round_size};
use crate::error::{Error, InvalidArgument};

/// A block returned by a [`Carver`]: its address and actual size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Carved {
    /// First byte.
    pub address: u64,
    /// Bytes of the block, at least the requested size.
    pub size: u64,
}

/// Carves blocks from segments that the caller provides, by the rules of the classic policy. It is the code that
/// [`Allocator`](crate::allocator::Allocator) uses under [`Policy::Classic`](crate::allocator::Policy), without a
/// driver. It serves memory from other sources, and experiments with the rules.
///
/// Streams are numbers of the caller's choice. A block is found only by the stream that its memory belongs to. A block
/// that other streams may still access after its return ([`record`](Self::record)) stays out of circulation until
/// [`complete`](Self::complete).
///
/// A carver is `Send` and `Sync`; changes require `&mut self`. It never accesses the memory; the addresses only have to
/// be multiples of 512.
///
/// ```
/// use cualloc::allocator::{Carver, size::classic_segment_size};
/// let (stream, mut carver) = (7, Carver::new());
/// assert_eq!(carver.find(stream, 1000)?, None);
/// let bytes = classic_segment_size(1000).unwrap_or(0);
/// let first = carver.insert(0x10_0000, bytes, stream, 1000)?;
/// assert_eq!((first.address, first.size), (0x10_0000, 1024));
/// let second = carver.find(stream, 1)?.ok_or("room is left")?;
/// assert_eq!(second.address, first.address + 1024);
/// carver.give_back(first.address)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Carver {
    records: Records,
    lookup: Lookup,
    small: Space,
    large: Space,
    /// Names of the streams; a stream's slot is its index here.
    streams: Vec<u64>,
    slots: HashMap<u64, u32>,
    /// The figures that every call updates; the others are computed on request.
    counted: CarverStats,
}

/// Statistics of a [`Carver`], in bytes unless a field says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CarverStats {
    /// Number of requests that [`find`](Carver::find) served.
    pub hits: u64,
    /// Number of requests that it did not serve.
    pub misses: u64,
    /// Bytes in segments.
    pub reserved: u64,
    /// Bytes in live blocks, after rounding.
    pub allocated: u64,
    /// Peak of `allocated`.
    pub peak: u64,
    /// Bytes outside live blocks: free, or pending on streams.
    pub cached: u64,
    /// Number of blocks, live or not.
    pub blocks: u64,
    /// Number of free blocks that can be found.
    pub free_blocks: u64,
}

impl Default for Carver {
    fn default() -> Self {
        Self::new()
    }
}

/// A request in granules, with its pool.
struct Request {
    space: SpaceId,
    granules: u32,
}

impl Request {
    fn new(bytes: usize) -> Result<Self, Error> {
        let invalid = InvalidArgument::Size {
            bytes: bytes as u64,
        };
        let rounded = round_size(bytes).ok_or(invalid)?;
        Ok(Request {
            space: if rounded <= CLASSIC_SMALL_LIMIT {
                SpaceId::Small
            } else {
                SpaceId::Large
            },
            granules: u32::try_from(rounded / GRANULE).map_err(|_| invalid)?,
        })
    }
}

impl Carver {
    /// Creates a carver without memory.
    pub fn new() -> Self {
        Carver {
            records: Records::default(),
            lookup: Lookup::default(),
            small: Space::new(SpaceId::Small, true),
            large: Space::new(SpaceId::Large, true),
            streams: Vec::new(),
            slots: HashMap::new(),
            counted: CarverStats::default(),
        }
    }

    /// Returns the statistics. The call visits every block.
    pub fn stats(&self) -> CarverStats {
        let mut stats = self.counted;
        for segment in self.snapshot() {
            stats.reserved += segment.size;
            stats.blocks += segment.blocks.len() as u64;
            let free = segment
                .blocks
                .iter()
                .filter(|b| b.state == BlockState::Free);
            stats.free_blocks += free.count() as u64;
        }
        stats.cached = stats.reserved - stats.allocated;
        stats
    }

    /// Takes the smallest free block of at least `bytes` in the request's pool and stream, the lowest address among
    /// equals, and splits it if the remainder is worth keeping. Returns `None` if no block fits: add a segment with
    /// [`insert`](Self::insert). Zero bytes count as one.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`].
    pub fn find(&mut self, stream: u64, bytes: usize) -> Result<Option<Carved>, Error> {
        let request = Request::new(bytes)?;
        let slot = self.slot(stream);
        let (space, _) = self.parts(request.space);
        let Some(entry) = space
            .index(slot)
            .and_then(|own| own.best_fit(request.granules))
        else {
            self.counted.misses += 1;
            return Ok(None);
        };
        self.counted.hits += 1;
        Ok(Some(self.take(&request, slot, entry.id, bytes)))
    }

    /// Adds a segment of `size` bytes at `base` and takes a block of `bytes` from it. The segment belongs to the
    /// request's pool; the remainder belongs to `stream`. Adjacent segments are never joined.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`], [`InvalidArgument::Range`],
    /// [`InvalidArgument::TooSmall`], [`Error::Overlap`].
    pub fn insert(
        &mut self,
        base: u64,
        size: u64,
        stream: u64,
        bytes: usize,
    ) -> Result<Carved, Error> {
        let request = Request::new(bytes)?;
        let invalid = InvalidArgument::Range {
            ptr: base,
            bytes: size,
        };
        let end = base.checked_add(size).ok_or(invalid)?;
        let granules = u32::try_from(size / GRANULE).map_err(|_| invalid)?;
        if size == 0 || !base.is_multiple_of(GRANULE) || !size.is_multiple_of(GRANULE) {
            return Err(invalid.into());
        }
        if granules < request.granules {
            return Err(Error::Invalid(InvalidArgument::TooSmall {
                usable: size as usize,
                needed: request.granules as usize * GRANULE as usize,
            }));
        }
        let overlapped = [&self.small, &self.large].into_iter().find_map(|space| {
            let (start, region) = space.regions().range(..end).next_back()?;
            (start + region.bytes > base).then_some((*start, region.bytes))
        });
        if let Some(old) = overlapped {
            let new = (base, size);
            return Err(Error::Overlap { new, old });
        }
        let slot = self.slot(stream);
        let (space, records) = self.parts(request.space);
        let id = space.add_region(records, base, granules, Uses::one(slot, 0));
        records.cold_mut(id).owner = slot;
        Ok(self.take(&request, slot, id, bytes))
    }

    /// Records that another stream uses the live block at `address`.
    ///
    /// # Errors
    /// [`Error::NotLive`].
    pub fn record(&mut self, address: u64, stream: u64) -> Result<(), Error> {
        let id = self.live(address)?;
        let slot = self.slot(stream);
        if self.records[id].stream != slot {
            let until_the_free = Recorded {
                stream: slot,
                ticket: None,
            };
            self.records.record(id, until_the_free);
        }
        Ok(())
    }

    /// Frees the live block at `address` and returns its address and size. Without recorded streams it merges with free
    /// neighbours of its stream and can be found again; otherwise it stays pending until [`complete`](Self::complete).
    ///
    /// # Errors
    /// [`Error::NotLive`].
    pub fn give_back(&mut self, address: u64) -> Result<Carved, Error> {
        let id = self.live(address)?;
        self.lookup.remove(address);
        let size = self.records[id].bytes();
        self.counted.allocated -= size;
        let owner = self.records[id].stream;
        let recorded = self.records.cold_mut(id).take_recorded();
        let others = recorded.iter().map(|r| r.stream);
        let uses = std::iter::once(owner).chain(others);
        let uses = Uses::collect(uses.map(|stream| Use { stream, ticket: 0 }).collect());
        let pool = self.records[id].space;
        let (space, records) = self.parts(pool);
        space.release(records, id, uses);
        Ok(Carved { address, size })
    }

    /// Records that everything submitted to a stream so far is complete: returned blocks with that stream recorded no
    /// longer wait for it.
    pub fn complete(&mut self, stream: u64) {
        let slot = self.slot(stream);
        for id in [SpaceId::Small, SpaceId::Large] {
            let (space, records) = self.parts(id);
            let mut waiting: Vec<_> = space
                .index(MIXED)
                .map(|index| index.iter().collect())
                .unwrap_or_default();
            waiting.sort_unstable_by_key(|e: &Entry| e.addr);
            for entry in waiting {
                let cold = records.cold(entry.id);
                let owner = cold.owner;
                let rest = cold.uses.without(|u| u.stream == slot && u.stream != owner);
                if let Some(uses) = rest {
                    space.retag(records, entry.id, uses);
                }
            }
        }
    }

    /// Removes the segments in which no block is live or pending, and returns them as (base, bytes), by address.
    pub fn remove_idle(&mut self) -> Vec<(u64, u64)> {
        let mut idle = Vec::new();
        for id in [SpaceId::Small, SpaceId::Large] {
            let (space, records) = self.parts(id);
            let regions: Vec<_> = space
                .regions()
                .iter()
                .map(|(base, region)| (*base, region.bytes, region.first))
                .collect();
            for (base, bytes, first) in regions {
                if records[first].stream != MIXED && space.remove_region(records, first) {
                    idle.push((base, bytes));
                }
            }
        }
        for (base, bytes) in &idle {
            self.lookup.forget(*base, *bytes);
        }
        idle.sort_unstable();
        idle
    }

    /// Returns all segments with their blocks, by address.
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        let mut segments = Vec::new();
        for space in [&self.small, &self.large] {
            for (base, region) in space.regions() {
                let (mut blocks, mut at) = (Vec::new(), region.first);
                while at != NIL {
                    blocks.push(self.info(at));
                    at = self.records[at].next;
                }
                segments.push(SegmentInfo {
                    address: *base,
                    size: region.bytes,
                    small: space.id == SpaceId::Small,
                    mapped: false,
                    view: false,
                    blocks,
                });
            }
        }
        segments.sort_by_key(|s| s.address);
        segments
    }

    fn info(&self, id: u32) -> BlockInfo {
        let (hot, cold) = (&self.records[id], self.records.cold(id));
        let name = |slot: u32| self.streams[slot as usize];
        let live = hot.state == Extent::Used;
        let pending: Vec<u64> = if live {
            cold.recorded().iter().map(|r| name(r.stream)).collect()
        } else {
            let others = cold
                .uses
                .as_slice()
                .iter()
                .filter(|u| u.stream != cold.owner);
            others.map(|u| name(u.stream)).collect()
        };
        BlockInfo {
            device: None,
            address: hot.addr,
            size: hot.bytes(),
            requested: cold.requested,
            state: match live {
                true => BlockState::Live,
                false if pending.is_empty() => BlockState::Free,
                false => BlockState::Pending,
            },
            stream: Some(name(cold.owner)),
            pending,
            small: hot.space == SpaceId::Small,
            is_split: hot.prev != NIL || hot.next != NIL,
            pool: None,
        }
    }

    fn parts(&mut self, space: SpaceId) -> (&mut Space, &mut Records) {
        let space = match space {
            SpaceId::Small => &mut self.small,
            _ => &mut self.large,
        };
        (space, &mut self.records)
    }

    fn slot(&mut self, stream: u64) -> u32 {
        *self.slots.entry(stream).or_insert_with(|| {
            self.streams.push(stream);
            self.streams.len() as u32 - 1
        })
    }

    fn live(&self, address: u64) -> Result<u32, Error> {
        let id = self.lookup.exact(address);
        id.ok_or(Error::NotLive { ptr: address })
    }

    fn take(&mut self, request: &Request, slot: u32, id: u32, bytes: usize) -> Carved {
        let small = request.space == SpaceId::Small;
        let available = u64::from(self.records[id].granules);
        let granules = classic_granules(small, available, request.granules);
        let (space, records) = self.parts(request.space);
        space.carve(records, id, granules);
        (records[id].state, records[id].stream) = (Extent::Used, slot);
        let cold = records.cold_mut(id);
        (cold.requested, cold.owner) = (bytes as u64, slot);
        let hot = self.records[id];
        self.lookup.insert(hot.addr, id);
        let counted = &mut self.counted;
        counted.allocated += hot.bytes();
        counted.peak = counted.peak.max(counted.allocated);
        Carved {
            address: hot.addr,
            size: hot.bytes(),
        }
    }
}
