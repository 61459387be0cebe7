//! Pages of small blocks: their stream, and their next user.

use crate::common::prelude::*;
use cualloc::allocator::BlockState;

/// Bytes of a page, and of a block that fills one.
const PAGE: usize = 64 * KIB;
/// Pages in the memory that one growth adds.
const STEP: usize = 2 * MIB / PAGE;

fn pages(allocator: &Allocator, stream: &Stream, count: usize) -> Vec<Block> {
    let block = |_| allocator.allocate(PAGE, stream).unwrap();
    (0..count).map(block).collect()
}

fn reserved(allocator: &Allocator) -> usize {
    allocator.stats().all.reserved.current as usize
}

/// Blocks that another stream used wait in batches until those are full. Before memory is added, that stream is queried
/// for them, full or not.
#[test]
fn held_back_blocks_are_used_before_growth() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        // More than half of what one growth adds, and less than a full batch.
        for _ in 0..4 {
            let block = |_| allocator.allocate(PAGE / 2, &a).unwrap();
            let blocks: Vec<Block> = (0..STEP + STEP / 4).map(block).collect();
            for block in &blocks {
                block.record_stream(&b).unwrap();
            }
            drop(blocks);
            assert_eq!(reserved(&allocator), STEP * PAGE);
        }
        // Memory that the other stream still uses is held back.
        let kept: Vec<Block> = allocator.allocate_blocks(STEP, PAGE / 2, &a);
        let hold = rig.hold(&b);
        for block in &kept {
            block.record_stream(&b).unwrap();
        }
        drop(kept);
        let _others = pages(&allocator, &a, STEP);
        assert_eq!(reserved(&allocator), 2 * STEP * PAGE);
        hold.release();
        rig.settle(&b);
    });
}

/// R61: pages that a stream cache did not need since the last shortage of pages serve other streams before memory is
/// added.
#[test]
fn r61_idle_pages_serve_other_streams() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        drop(pages(&allocator, &a, 12));
        assert_eq!(reserved(&allocator), STEP * PAGE);
        // The other stream takes the rest, and finds the front of the first just as it was.
        let mut kept = pages(&allocator, &b, STEP - 12);
        assert_eq!(reserved(&allocator), STEP * PAGE);
        kept.extend(pages(&allocator, &b, 1));
        assert_eq!(
            reserved(&allocator),
            2 * STEP * PAGE,
            "they were in use lately"
        );
        // The next time that it lacks one, all of them were idle.
        kept.extend(pages(&allocator, &b, 2 * STEP - kept.len()));
        assert_eq!(reserved(&allocator), 2 * STEP * PAGE);
    });
}

/// A stream cache with varying need keeps the pages that it needs, also while others lack some.
#[test]
fn pages_in_use_stay_with_their_cache() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        let taken = |blocks: &[Block]| -> Vec<u64> { blocks.iter().map(Block::ptr).collect() };
        let first = pages(&allocator, &a, 12);
        let mut places = taken(&first);
        drop(first);
        places.sort_unstable();
        let mut kept = Vec::new();
        for round in 1..=4 {
            // Each time the other stream lacks a page once.
            kept.extend(pages(&allocator, &b, round * STEP - 12 + 1 - kept.len()));
            let again = pages(&allocator, &a, 12);
            let mut found = taken(&again);
            found.sort_unstable();
            assert_eq!(found, places, "round {round}");
        }
    });
}

/// R61: a stream cache that allocates nothing also returns the runs that it kept unmerged.
#[test]
fn r61_an_idle_cache_gives_up_all_its_pages() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        let small: Vec<_> = allocator.allocate_blocks(128, 512, &a);
        drop(small);
        let kept = allocator.stats().cache_bytes;
        assert!(kept > 0, "nothing is kept as it was");
        let mut blocks = pages(&allocator, &b, STEP);
        blocks.extend(pages(&allocator, &b, STEP - 1));
        assert_eq!(reserved(&allocator), 2 * STEP * PAGE);
        // The one page of the first stream is the last there is.
        blocks.extend(pages(&allocator, &b, 1));
        assert_eq!(reserved(&allocator), 2 * STEP * PAGE);
    });
}

/// Blocks that another stream used merge into one free run once that stream is idle.
#[test]
fn returned_blocks_merge() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        let blocks: Vec<_> = allocator.allocate_blocks(PAGE / 512, 512, &a);
        let page = blocks.iter().map(Block::ptr).min();
        for block in &blocks {
            block.record_stream(&b).unwrap();
        }
        let busy = rig.busy(&b);
        drop(blocks);
        let pending = allocator.stats().all.active.current;
        assert_eq!(pending as usize, PAGE);
        drop(busy);
        rig.settle(&b);
        allocator.trim(0).unwrap();
        allocator.check().unwrap();
        assert_eq!(allocator.stats().all.active.current, 0);
        let block = allocator.allocate(PAGE, &a).unwrap();
        assert_eq!(Some(block.ptr()), page);
    });
}

/// Blocks whose uses by other streams are complete are free, even while their stream cache has not merged them.
#[test]
fn returned_blocks_are_shown_free() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(512, &b).unwrap());
        // As many as a stream cache returns to the heap in one step.
        let blocks: Vec<_> = allocator.allocate_blocks(512, 512, &a);
        for block in &blocks {
            block.record_stream(&b).unwrap();
        }
        let busy = rig.busy(&b);
        drop(blocks);
        let pending = || {
            let (stats, segments) = allocator.stats_and_snapshot();
            let blocks = segments.into_iter().flat_map(|segment| segment.blocks);
            let pending = blocks.filter(|block| block.state == BlockState::Pending);
            let shown: u64 = pending.map(|block| block.size).sum();
            assert_eq!(shown, stats.all.active.current);
            allocator.check().unwrap();
            shown
        };
        assert_eq!(pending(), 512 * 512);
        drop(busy);
        rig.settle(&b);
        // Large requests ask what is done by now, and leave the stream caches' runs to them.
        for _ in 0..32 {
            drop(allocator.allocate(MIB, &a).unwrap());
        }
        assert_eq!(pending(), 0);
    });
}
