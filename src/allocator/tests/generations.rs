//! Tests of generations: no two allocations share an id and generation, even when the numbers are used up.

use std::collections::HashSet;

use super::{KIB, MIB, Outcome, Rig, scattered, viewing};
use crate::Block;
use crate::allocator::cache::grant::Lifetime;
use crate::allocator::cache::stream_cache::PAGE_GRANULES;
use crate::allocator::extent::record::{Records, SPENT, SpaceId, State};
use crate::allocator::size::GRANULE;
use crate::allocator::{Allocator, Config, Policy, Request};

fn lifetime(block: &Block) -> Lifetime {
    let (id, generation) = block.generation();
    let ptr = block.ptr();
    Lifetime {
        id,
        generation,
        ptr,
    }
}

/// Sets the generation of all free records.
fn age_records(allocator: &Allocator, generation: u32) {
    let mut heap = allocator.engine().lock();
    let free: Vec<u32> = heap.extents.records.iter().map(|(id, _)| id).collect();
    for id in free {
        if heap.extents.records[id].is_free() {
            heap.extents.records[id].generation = generation;
        }
    }
}

/// Sets the generation of all pages; after the next block its stream cache searches for worn pages.
fn age_pages(allocator: &Allocator, generation: u32) {
    let heap = allocator.engine().lock();
    for cache in heap.caches.all() {
        cache.lock().age(generation, 0);
    }
}

/// A record of a large block never gets a generation twice, inside a large-block cache or outside.
#[test]
fn generations_of_large_blocks_do_not_come_again() -> Outcome {
    for policy in [Policy::Packed, Policy::Classic] {
        for lengths in [[300 * KIB; 2], [300 * KIB, 200 * KIB]] {
            let rig = Rig::new(Config::new().policy(policy))?;
            let [a] = rig.streams()?;
            let allocator = &rig.allocator;
            drop(allocator.allocate(300 * KIB, &a)?);
            // A snapshot empties the large-block caches.
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

/// A block in a view, and the extents beside one that moves to another record, are found as before.
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
    // In the first, in the middle ones, in the last, and across several of them.
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

/// The parts of a block in a view are aliased to the block's new record.
#[test]
fn another_record_is_what_parts_are_aliased_by() -> Outcome {
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
    let aliased = heap.alias(SpaceId::Large, 0, &parts).ok_or("not free")?;
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

/// A page whose generations are used up comes back with another number; its live blocks stay valid until they are
/// freed, and no memory is lost.
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

/// An id with a page's former number finds nothing, even if address and generation are those of a live block.
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
