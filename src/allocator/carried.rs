//! Tests of what is carried from one structure to another: tickets, uses, rows, generations.

use std::collections::HashSet;
use std::sync::Arc;

use super::size::GRANULE;
use super::{Allocator, Config, Error, Policy, Request};
use crate::Block;
use crate::allocator::cache::grant::Lifetime;
use crate::allocator::cache::stream_cache::PAGE_GRANULES;
use crate::allocator::extent::record::{Records, SPENT, SpaceId, State};
use crate::allocator::extent::uses::Use;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::driver::{Context, Stream};
use crate::sim::{Mode, SimConfig, Simulator};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const PAGE: usize = 64 * KIB;

pub(super) type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Asks for cached memory alone.
pub(super) fn cached(allocator: &Allocator, bytes: usize, stream: &Stream) -> Result<Block, Error> {
    allocator.allocate_with(Request::new(bytes).cached_only(), stream)
}

/// An allocator on a simulator of its own.
pub(super) struct Rig {
    pub allocator: Allocator,
    pub context: Context,
    pub sim: Simulator,
}

impl Rig {
    pub fn new(config: Config) -> Result<Rig, Box<dyn std::error::Error>> {
        let sim = Simulator::new(SimConfig::default())?;
        let driver = sim.driver()?;
        let context = Context::primary(&driver, driver.device(0)?)?;
        let allocator = Allocator::with_config(&context, config)?;
        Ok(Rig {
            allocator,
            context,
            sim,
        })
    }

    pub fn streams<const N: usize>(&self) -> Result<[Stream; N], Box<dyn std::error::Error>> {
        let made: Result<Vec<_>, _> = (0..N).map(|_| Stream::new(&self.context)).collect();
        made?.try_into().map_err(|_| "as many as asked for".into())
    }

    /// Lets a stream write to memory.
    pub fn write(&self, ptr: u64, bytes: usize, stream: &Stream) -> Outcome {
        let entered = self.context.enter()?;
        // SAFETY: the test owns the memory; the stream is alive.
        unsafe { entered.memset_d8(ptr, 1, bytes, stream.raw()) }?;
        Ok(())
    }

    pub fn end(self) -> Outcome {
        self.sim.complete_all();
        self.allocator.check()?;
        self.allocator.close()?;
        assert!(self.sim.reports().is_empty(), "{:?}", self.sim.reports());
        assert_eq!(self.sim.memory_in_use(0), 0);
        Ok(())
    }
}

fn lifetime(block: &Block) -> Lifetime {
    let (id, generation) = block.generation();
    let ptr = block.ptr();
    Lifetime {
        id,
        generation,
        ptr,
    }
}

/// Gives all free records so many generations.
fn age_records(allocator: &Allocator, generation: u32) {
    let mut heap = allocator.engine().lock();
    let free: Vec<u32> = heap.extents.records.iter().map(|(id, _)| id).collect();
    for id in free {
        if heap.extents.records[id].is_free() {
            heap.extents.records[id].generation = generation;
        }
    }
}

/// Gives all pages so many generations; after the next block its stream cache looks at them.
fn age_pages(allocator: &Allocator, generation: u32) {
    let heap = allocator.engine().lock();
    for cache in heap.caches.all() {
        cache.lock().age(generation, 0);
    }
}

/// What stays of a page is its owner's until the owner, and whoever it follows, is done: a block that comes
/// back to a stream cache because the stream has come to follow the others makes the page's ticket a new one.
#[test]
fn a_block_let_go_behind_a_wait_renews_the_ticket_of_its_page() -> Outcome {
    let_go_behind_a_wait(false)
}

/// As above, where another stream that used the block is done with it.
#[test]
fn a_block_let_go_behind_the_last_of_its_users_renews_the_ticket_of_its_page() -> Outcome {
    let_go_behind_a_wait(true)
}

fn let_go_behind_a_wait(another: bool) -> Outcome {
    let config = Config::new().limit(Some(16 << 20)).views(false);
    let rig = Rig::new(config.policy(Policy::Packed))?;
    let allocator = &rig.allocator;
    let [a, b, c, idle] = rig.streams()?;
    let small = allocator.allocate(PAGE, &a)?;
    let at = small.ptr();
    let others: Result<Vec<Block>, _> = (1..2 * MIB / PAGE)
        .map(|_| allocator.allocate(PAGE, &c))
        .collect();
    let others = others?;
    let large = allocator.allocate(12 * MIB, &b)?;
    let little = allocator.allocate(MIB, &a)?;
    small.record_stream(&b)?;
    if another {
        small.record_stream(&idle)?;
    }
    rig.sim.set_mode(Mode::Manual);
    rig.write(at, PAGE, &b)?;
    rig.write(large.ptr(), 12 * MIB, &b)?;
    drop((small, little));
    // All that the owner freed so far is complete.
    rig.sim.complete_stream(a.id()?, usize::MAX);
    allocator.trim(u64::MAX)?;
    drop(large);
    let behind = allocator.allocate(12 * MIB, &a)?;
    assert_eq!(allocator.stats().stream_waits, 1);
    allocator.trim(u64::MAX)?;
    allocator.check()?;
    let heap = allocator.engine().lock();
    assert!(heap.caches.held_back.is_empty(), "its stream follows");
    drop(heap);
    let got = cached(allocator, PAGE, &c);
    let none = matches!(got, Err(Error::NotCached));
    assert!(none, "{got:?}: {at:#x} is in use");
    rig.sim.complete_all();
    drop((others, behind));
    rig.end()
}

/// What a stream used in the stream caches of others is among what its last marker closes: its slot is free as
/// soon as that is complete.
#[test]
fn a_last_marker_closes_the_batches_in_other_caches() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a, b] = rig.streams()?;
    // Its stream cache can note a use alone from here on.
    drop(rig.allocator.allocate(512, &b)?);
    let block = rig.allocator.allocate(512, &a)?;
    block.record_stream(&b)?;
    drop(block);
    rig.allocator.retire(&b)?;
    for _ in 0..2 {
        drop(rig.allocator.allocate(MIB, &a)?);
    }
    assert_eq!(rig.allocator.stats().streams, 1);
    rig.end()
}

/// What a claim took is put back part by part: whose it is, whose it was, when it was freed, and what was
/// counted for it.
#[test]
fn d1_a_claim_is_put_back_as_it_was() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b, c] = rig.streams()?;
    let allocator = &rig.allocator;
    let row = [&a, &a, &b, &c, &b, &a];
    let row: Result<Vec<Block>, _> = row.iter().map(|s| allocator.allocate(2 * MIB, s)).collect();
    let mut row: Vec<Option<Block>> = row?.into_iter().map(Some).collect();
    rig.sim.set_mode(Mode::Manual);
    for (stream, at) in [(&a, 1), (&a, 2), (&c, 3), (&b, 4)] {
        let block = row[at].as_ref().ok_or("taken")?;
        rig.write(block.ptr(), 2 * MIB, stream)?;
        block.record_stream(stream)?;
    }
    let first = row[1].as_ref().ok_or("taken")?.ptr();
    [3, 1, 4, 2].into_iter().for_each(|at| row[at] = None);
    let picture = || {
        let heap = allocator.engine().lock();
        let mut pieces: Vec<_> = heap
            .extents
            .large
            .pieces()
            .map(|piece| {
                let cold = heap.extents.records.cold(piece.id);
                let uses = cold.uses.as_slice().to_vec();
                (piece.addr, piece.granules, uses, cold.owner, cold.freed)
            })
            .collect();
        pieces.sort_unstable_by_key(|piece| piece.0);
        (pieces, heap.stats.all, heap.mixed_peak)
    };
    let before = picture();
    assert_eq!(before.0.len(), 4);
    {
        let mut heap = allocator.engine().lock();
        let piece = heap
            .extents
            .piece_around(SpaceId::Large, first)
            .ok_or("no piece")?;
        let mib = (MIB as u64 / GRANULE) as u32;
        let claimed = heap.claim(SpaceId::Large, piece, mib, 6 * mib);
        let (id, shards) = claimed.ok_or("not claimed")?;
        assert_eq!(shards.len(), 4);
        heap.restore(SpaceId::Large, id, shards);
    }
    assert_eq!(picture(), before);
    rig.sim.complete_all();
    drop(row);
    rig.end()
}

/// Memory that became one piece is in use as long as any part of it.
#[test]
fn merged_pieces_wait_for_the_newest_use() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Classic))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    let [left, right] = [
        allocator.allocate(8 * MIB, &a)?,
        allocator.allocate(8 * MIB, &a)?,
    ];
    drop(left);
    allocator.synchronize()?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(right.ptr(), 8 * MIB, &a)?;
    drop(right);
    let trimmed = allocator.trim(0)?;
    assert_eq!((trimmed.released, trimmed.pending), (0, 20 << 20));
    rig.end()
}

/// The part of a piece that a block does not take is what it was.
#[test]
fn the_rest_of_a_piece_stays_its_streams() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    drop(allocator.allocate(512, &b)?);
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(4 * MIB, &a)?;
    rig.write(block.ptr(), 4 * MIB, &a)?;
    drop(block);
    let half = allocator.allocate(2 * MIB, &a)?;
    assert!(matches!(cached(allocator, MIB, &b), Err(Error::NotCached)));
    assert!(cached(allocator, MIB, &a).is_ok());
    drop(half);
    rig.end()
}

/// What a stream cache noted on a block is among its uses when the heap takes it over for another one.
#[test]
fn what_a_cache_noted_goes_into_the_heap() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a, b, c] = rig.streams()?;
    let allocator = &rig.allocator;
    for stream in [&b, &c] {
        drop(allocator.allocate(512, stream)?);
    }
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(512, &a)?;
    rig.write(block.ptr(), 512, &b)?;
    block.record_stream(&b)?;
    block.record_stream(&c)?;
    drop(block);
    let uses = |heap: &crate::allocator::heap::Heap| {
        let held = heap
            .caches
            .held_back
            .iter()
            .map(|held| held.uses.as_slice().len());
        held.collect::<Vec<_>>()
    };
    assert_eq!(uses(&allocator.engine().lock()), [2]);
    rig.end()
}

/// A block that was freed under a guard has the uses of that free when the guard goes.
#[test]
fn a_guarded_block_keeps_its_uses() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(2 * MIB, &a)?;
    let guard = allocator.guard(block.ptr(), 2 << 20)?;
    rig.write(block.ptr(), 2 * MIB, &b)?;
    block.record_stream(&b)?;
    drop(block);
    drop(guard);
    assert!(matches!(cached(allocator, MIB, &a), Err(Error::NotCached)));
    assert_eq!(allocator.trim(0)?.pending, 2 << 20);
    rig.end()
}

const PART: usize = 5 * MIB;

/// Live parts on `a`, and between them free ones, which their streams still use if so asked.
fn scattered(
    rig: &Rig,
    a: &Stream,
    between: &[&Stream],
    used: bool,
) -> Result<Vec<Block>, Box<dyn std::error::Error>> {
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for stream in between {
        kept.push(rig.allocator.allocate(PART, a)?);
        freed.push((rig.allocator.allocate(PART, stream)?, *stream));
    }
    if used {
        rig.sim.set_mode(Mode::Manual);
        for (block, stream) in &freed {
            rig.write(block.ptr(), PART, stream)?;
        }
    }
    drop(freed);
    Ok(kept)
}

fn viewing(parts: usize) -> Config {
    let limit = 2 * parts * PART;
    Config::new()
        .policy(Policy::Packed)
        .self_test(false)
        .limit(Some(limit as u64))
}

/// A block in a view waits for whoever uses any of its parts.
#[test]
fn a_block_over_parts_of_several_streams_waits_for_each() -> Outcome {
    let rig = Rig::new(viewing(2))?;
    let [a, b, c] = rig.streams()?;
    let kept = scattered(&rig, &a, &[&b, &c], true)?;
    let block = rig.allocator.allocate(9 * MIB, &a)?;
    assert_eq!(rig.allocator.stats().reclaim.stitched, 1);
    assert_eq!(rig.allocator.stats().stream_waits, 2);
    rig.write(block.ptr(), 9 * MIB, &a)?;
    drop((kept, block));
    rig.end()
}

/// The mappings of a view go when all are done that used blocks in it, not the last of them alone.
#[test]
fn a_view_stays_until_all_that_used_it_are_done() -> Outcome {
    let rig = Rig::new(viewing(4))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    let kept = scattered(&rig, &a, &[&a; 4], false)?;
    drop(allocator.allocate(17 * MIB, &a)?);
    allocator.synchronize()?;
    let [one, other] = [
        allocator.allocate(9 * MIB, &a)?,
        allocator.allocate(8 * MIB, &a)?,
    ];
    {
        let heap = allocator.engine().lock();
        let view = |block: &Block| heap.views.view_around(block.ptr()).map(|(base, _)| base);
        assert!(view(&one).is_some() && view(&one) == view(&other));
    }
    one.record_stream(&b)?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(one.ptr(), 9 * MIB, &b)?;
    drop(one);
    drop(other);
    rig.sim.complete_stream(a.id()?, usize::MAX);
    allocator.trim(0)?;
    assert_eq!(allocator.engine().lock().views.map.len(), 1);
    drop(kept);
    rig.end()
}

/// A wait that is queued after a batch was closed may be behind the event: the marker does not count it.
#[test]
fn a_marker_follows_what_its_stream_followed_when_the_batch_was_closed() -> Outcome {
    let rig = Rig::new(Config::new())?;
    let mut streams = Streams::default();
    let [a, b] = [1, 2].map(|number| {
        let (key, raw) = (StreamKey::Id(number), number as usize);
        streams.add(key, raw, rig.context.clone(), Holder::foreign())
    });
    streams.ordered(a, b, 3, &[]);
    let batch = streams.close_batch(a);
    let bound = batch.bound;
    streams.ordered(a, b, 7, &[]);
    let event = Arc::new(rig.context.enter()?.create_event()?);
    assert!(streams.publish(batch, event).is_none());
    let marker = streams.marker(&Use {
        stream: a,
        ticket: bound,
    });
    let row = marker.map(|marker| marker.row.to_vec());
    assert_eq!(row, Some(vec![0, 3]));
    rig.end()
}

/// No record of a large block has a second life under a generation that it had, in a large-block cache or off it.
#[test]
fn generations_of_large_blocks_do_not_come_again() -> Outcome {
    for policy in [Policy::Packed, Policy::Classic] {
        for lengths in [[300 * KIB; 2], [300 * KIB, 200 * KIB]] {
            let rig = Rig::new(Config::new().policy(policy))?;
            let [a] = rig.streams()?;
            let allocator = &rig.allocator;
            drop(allocator.allocate(300 * KIB, &a)?);
            // Takes everything out of the large-block caches.
            allocator.snapshot();
            age_records(allocator, SPENT - 6);
            let (mut lives, mut ids) = (HashSet::new(), HashSet::new());
            for round in 0..12 {
                let block = allocator.allocate(lengths[round % 2], &a)?;
                let (id, generation) = block.generation();
                assert!(lives.insert((id, generation)), "round {round}");
                assert!(generation < SPENT && generation % 2 == 1);
                ids.insert(id);
                allocator.check()?;
                if round % 3 == 0 {
                    allocator.engine().free_block(&lifetime(&block))?;
                    std::mem::forget(block);
                } else {
                    drop(block);
                }
            }
            assert!(ids.len() > 1, "the first record is not used any more");
            assert!(lives.iter().any(|(_, generation)| *generation == SPENT - 1));
            allocator.check()?;
            rig.end()?;
        }
    }
    Ok(())
}

/// As above, of blocks that stay in a large-block cache while others come and go.
#[test]
fn generations_in_a_large_cache_do_not_come_again() {
    crate::allocator::engine::large_cache::tests::contended(|allocator, [a, b]| {
        drop(allocator.allocate(3 * MIB, a).unwrap());
        allocator.snapshot();
        age_records(allocator, SPENT - 8);
        let mut lives = HashSet::new();
        for round in 0..8 {
            let block = allocator.allocate(3 * MIB, a).unwrap();
            assert!(lives.insert(block.generation()), "round {round}");
            let other = allocator.allocate(MIB, b).unwrap();
            drop((block, other));
            allocator.check().unwrap();
        }
        let last = lives.iter().map(|(_, generation)| *generation).max();
        assert_eq!(last, Some(SPENT - 1));
    });
}

/// A block in a view, and the extents beside one that gets another record, are found as before.
#[test]
fn another_record_is_known_to_all_neighbours() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    let part = 5 * MIB;
    let parts: Result<Vec<Block>, _> = (0..9).map(|_| allocator.allocate(part, &a)).collect();
    let mut parts: Vec<Option<Block>> = parts?.into_iter().map(Some).collect();
    parts.iter_mut().step_by(2).for_each(|part| *part = None);
    allocator.synchronize()?;
    age_records(allocator, SPENT);
    // In the first, the middle ones, the last, and over several of them.
    let sizes = [part, 2 * MIB, 3 * MIB, part, 9 * MIB];
    let blocks: Result<Vec<Block>, _> = sizes.iter().map(|s| allocator.allocate(*s, &a)).collect();
    let blocks = blocks?;
    allocator.check()?;
    for block in &blocks {
        let found = allocator.block_of(block.ptr());
        assert_eq!(found.map(|found| found.address), Some(block.ptr()));
        assert!(block.generation().1 < SPENT);
    }
    drop(blocks);
    allocator.check()?;
    drop(parts);
    allocator.check()?;
    rig.end()
}

/// The parts of a block in a view are aliased to the record that the block gets.
#[test]
fn another_record_is_what_parts_are_lent_to() -> Outcome {
    let rig = Rig::new(viewing(2))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    let kept = scattered(&rig, &a, &[&a; 2], false)?;
    let block = allocator.allocate(9 * MIB, &a)?;
    let mut life = lifetime(&block);
    drop(block);
    let mut heap = allocator.engine().lock();
    let mib = (MIB as u64 / GRANULE) as u32;
    let (base, view) = heap.views.view_around(life.ptr).ok_or("not in a view")?;
    let offset = ((life.ptr - base) / GRANULE) as u32;
    let parts = view.home_parts(offset, 9 * mib);
    let aliased = heap.lend(SpaceId::Large, 0, &parts).ok_or("not free")?;
    let parts = aliased.parts.into_iter().map(|(id, _)| id).collect();
    let id = heap.view_block(base, offset, 9 * mib, parts);
    heap.extents.records[id].generation = SPENT;
    life.id = heap.born(id, 0, 9 << 20);
    life.generation = heap.extents.records[life.id].generation;
    drop(heap);
    assert_ne!(life.id, id);
    allocator.check()?;
    allocator.engine().free_block(&life)?;
    drop(kept);
    rig.end()
}

#[test]
fn a_spent_record_is_not_vacant() {
    let mut records = Records::default();
    let make = |records: &mut Records| records.make(SpaceId::Large, State::Free, 0, 1);
    let id = make(&mut records);
    records[id].generation = SPENT - 1;
    records.retire(id);
    assert_eq!(records[id].generation, SPENT);
    let other = make(&mut records);
    assert_ne!(other, id);
    records.retire(other);
    assert_eq!((make(&mut records), records.len()), (other, 1));
}

/// A page whose generations are used up comes back with another number; what lives in it is itself until it
/// is freed, and nothing is lost.
#[test]
fn generations_of_small_blocks_do_not_come_again() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    for keeps in [false, true] {
        let kept = keeps.then(|| allocator.allocate(512, &a)).transpose()?;
        let identity = kept.as_ref().map(Block::generation);
        let mut lives = HashSet::new();
        for round in 0..40 {
            if round % 8 == 4 {
                age_pages(allocator, u32::MAX - 2);
            }
            let align = if round % 5 == 4 { 1024 } else { 1 };
            let block =
                allocator.allocate_with(Request::new(512 + 512 * (round % 3)).align(align), &a)?;
            assert!(
                lives.insert((block.generation(), block.ptr())),
                "round {round}"
            );
            assert!(identity != Some(block.generation()));
            assert_eq!(kept.as_ref().map(Block::generation), identity);
            allocator.check()?;
            if round % 2 == 0 {
                assert!(allocator.engine().is_live(&lifetime(&block)));
                allocator.engine().free_block(&lifetime(&block))?;
                std::mem::forget(block);
            } else {
                drop(block);
            }
        }
        let pages: HashSet<u32> = lives
            .iter()
            .map(|((id, _), _)| id >> PAGE_GRANULES.ilog2())
            .collect();
        assert!(pages.len() > 4, "{} pages", pages.len());
        assert_eq!(allocator.stats().all.reserved.current as usize, 2 * MIB);
        drop(kept);
        allocator.check()?;
    }
    rig.end()
}

/// An identity of a page's former number finds nothing, though address and generation are those of a live
/// block.
#[test]
fn a_stale_identity_does_not_find_a_block_of_the_pages_next_number() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    let engine = allocator.engine();
    let first = allocator.allocate(512, &a)?;
    let stale = lifetime(&first);
    drop(first);
    age_pages(allocator, u32::MAX - 1);
    drop(allocator.allocate(512, &a)?);
    let second = allocator.allocate(512, &a)?;
    let now = lifetime(&second);
    assert_eq!((now.ptr, now.generation), (stale.ptr, stale.generation));
    assert_ne!(now.id, stale.id);
    assert_eq!(now.id % PAGE_GRANULES, stale.id % PAGE_GRANULES);
    assert!(!engine.is_live(&stale) && engine.is_live(&now));
    assert!(!engine.free_at_once(&stale));
    assert!(engine.free_block(&stale).is_err());
    assert!(engine.is_live(&now));
    assert!(engine.free_at_once(&now));
    std::mem::forget(second);
    rig.end()
}
