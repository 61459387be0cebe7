//! Views that are cut short and continued otherwise, by work that never comes to rest.

use cualloc::driver::Stream;
use cualloc::{Allocator, Block, Config, Policy};

use super::{Kept, PART, packed, view_of};
use crate::common::*;

/// The first six of the parts that are free in the end.
const FRONT: usize = 25 * MIB;
const ALL: usize = 40 * MIB;
/// Less than all, and more than the stream cache.
const NEED: usize = 32 * MIB;

fn unmapped(rig: &Rig) -> u64 {
    rig.calls("cuMemUnmap")
}

/// An allocator on its last level with 16 scattered parts of memory, all free, and an idle view over the
/// first ten.
fn churning(rig: &Rig, streams: [&Stream; 2]) -> (Allocator, Kept, u64) {
    churning_after(rig, streams, 0, true)
}

/// [`churning`] after so many frees of the stream; at a limit, or without one at the soft cap.
fn churning_after(
    rig: &Rig,
    streams: [&Stream; 2],
    frees: usize,
    limited: bool,
) -> (Allocator, Kept, u64) {
    let pieces = 16;
    let limit = limited.then_some((2 * pieces * PART + 2 * MIB) as u64);
    let allocator = rig.allocator_with(Config::new().limit(limit).budget(1));
    drop(allocator.allocate(100, streams[1]).unwrap());
    for at in 0..frees {
        drop(allocator.allocate((1 + at % 3) * MIB, streams[0]).unwrap());
    }
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for word in 0..pieces as u32 {
        let block = allocator.allocate(PART, streams[0]).unwrap();
        rig.stamp(block.ptr(), PART, 1000 + word, streams[0]);
        kept.push(block);
        freed.push(allocator.allocate(PART, streams[0]).unwrap());
    }
    let stream = streams[0].clone();
    if !limited {
        // No free part touches the end of the memory.
        lengthen(rig, &allocator, 2 * MIB, &stream, &mut kept);
    }
    stream.synchronize().unwrap();
    drop(freed);
    if !limited {
        let packing = allocator.stats().packing;
        let room = packing.soft_cap - allocator.stats().all.reserved.current;
        lengthen(rig, &allocator, room as usize, &stream, &mut kept);
    }
    let mut base = 0;
    for parts in [12, 16, 20, 24, 32, 40] {
        // Longer and longer: each extends the view, and is above the budget.
        let block = allocator.allocate(parts * MIB, streams[0]).unwrap();
        base = view_of(&allocator, &block).unwrap();
        assert_eq!(block.ptr(), base + MIB as u64);
        stream.synchronize().unwrap();
    }
    assert_eq!(allocator.stats().packing.level, 5);
    allocator.check().unwrap();
    (
        allocator,
        Kept {
            blocks: kept,
            stream,
        },
        base,
    )
}

/// A live block of new memory, for [`Kept`].
fn lengthen(
    rig: &Rig,
    allocator: &Allocator,
    bytes: usize,
    stream: &Stream,
    kept: &mut Vec<Block>,
) {
    let reserved = allocator.stats().all.reserved.current;
    let block = allocator.allocate(bytes, stream).unwrap();
    let grown = allocator.stats().all.reserved.current - reserved;
    assert_eq!(grown, bytes as u64);
    rig.stamp(block.ptr(), bytes, 1000 + kept.len() as u32, stream);
    kept.push(block);
}

/// All free parts as blocks, the lowest first.
fn fill(allocator: &Allocator, stream: &Stream) -> Vec<Block> {
    let mut parts: Vec<Block> = (0..16)
        .map(|_| allocator.allocate(PART, stream).unwrap())
        .collect();
    parts.sort_by_key(Block::ptr);
    parts
}

/// A view is cut and continued after so many frees of its stream, at a limit or without one.
fn continued(frees: usize, limited: bool) {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, kept, base) = churning_after(rig, [&a, &b], frees, limited);
        let mut parts = fill(&allocator, &a);
        // The view's tail is in use at home.
        drop(parts.split_off(10));
        drop(parts.drain(..6));
        a.synchronize().unwrap();
        let before = (rig.calls("cuMemMap"), unmapped(rig));
        let block = allocator.allocate(NEED, &a).unwrap();
        assert_eq!(block.ptr(), base + MIB as u64);
        assert_eq!(allocator.stats().reclaim.shortened, 1);
        let calls = (rig.calls("cuMemMap") - before.0, unmapped(rig) - before.1);
        assert_eq!(calls, (((NEED - FRONT) / MIB).div_ceil(2) as u64, 1));
        allocator.check().unwrap();
        rig.stamp(block.ptr(), NEED, 7, &a);
        assert_eq!(rig.mismatches(block.ptr(), NEED, 7, &a), 0);
        kept.assert_intact(rig);
        drop((block, parts, kept));
        rig.close(&allocator);
    });
}

/// The open front of the view is kept, and continued with other handles; what it had behind goes.
#[test]
fn a_view_is_continued_where_its_open_run_ends() {
    continued(0, true);
}

/// Nobody else asks for what the stream freed, so it asks itself.
#[test]
fn a_view_of_a_stream_that_nobody_asks_is_cut() {
    continued(600, true);
}

/// Also where no limit is near, and it may have its own memory without a question.
#[test]
fn a_view_of_a_stream_that_nobody_asks_is_cut_away_from_a_limit() {
    continued(600, false);
}

/// The whole of the view in two blocks.
fn halves(allocator: &Allocator, base: u64, stream: &Stream) -> (Block, Block) {
    let cache = allocator.allocate(FRONT, stream).unwrap();
    let back = allocator.allocate(ALL - FRONT, stream).unwrap();
    assert_eq!(view_of(allocator, &back), Some(base));
    (cache, back)
}

/// A view is not cut below a block that lies in it.
#[test]
fn a_block_in_the_end_of_a_view_keeps_it() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, kept, base) = churning(rig, [&a, &b]);
        let (cache, back) = halves(&allocator, base, &a);
        rig.stamp(back.ptr(), ALL - FRONT, 3, &a);
        drop(cache);
        a.synchronize().unwrap();
        let before = unmapped(rig);
        let block = allocator.allocate(ALL, &a).unwrap();
        assert_eq!(unmapped(rig), before);
        rig.stamp(block.ptr(), ALL, 7, &a);
        assert_eq!(rig.mismatches(back.ptr(), ALL - FRONT, 3, &a), 0);
        allocator.check().unwrap();
        drop((block, back, kept));
        rig.close(&allocator);
    });
}

/// Nor while a stream may still use its addresses.
#[test]
fn a_view_that_a_stream_uses_is_not_cut() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, kept, base) = churning(rig, [&a, &b]);
        let (cache, back) = halves(&allocator, base, &a);
        back.record_stream(&b).unwrap();
        a.synchronize().unwrap();
        let hold = rig.hold(&b);
        rig.stamp(back.ptr(), ALL - FRONT, 7, &b);
        drop((cache, back));
        a.synchronize().unwrap();
        let before = unmapped(rig);
        // More than the view has, also behind a wait.
        let long = ALL + 4 * MIB;
        let other = allocator.allocate(long, &a).unwrap();
        assert_eq!(unmapped(rig), before);
        rig.stamp(other.ptr(), long, 8, &a);
        hold.release();
        b.synchronize().unwrap();
        assert_eq!(rig.mismatches(other.ptr(), long, 8, &a), 0);
        allocator.check().unwrap();
        drop((other, kept));
        rig.close(&allocator);
    });
}

/// One stream alone never meets markers of others: each stitch of the last level records one, so that views
/// can be cut then, too.
#[test]
fn views_of_a_lone_stream_are_cut() {
    packed(|rig| {
        let a = rig.stream();
        let (allocator, kept, base) = churning(rig, [&a, &a]);
        let before = allocator.stats();
        assert!(before.packing.view_maps > 0);
        let mut parts = fill(&allocator, &a);
        drop(parts.drain(10..));
        // A short view of the last parts says that the stream is done with the long one.
        drop(allocator.allocate(12 * MIB, &a).unwrap());
        a.synchronize().unwrap();
        drop(parts.drain(..6));
        let block = allocator.allocate(NEED, &a).unwrap();
        assert_eq!(block.ptr(), base + MIB as u64);
        let after = allocator.stats();
        assert_eq!(after.reclaim.shortened - before.reclaim.shortened, 1);
        assert!(after.markers > before.markers);
        allocator.check().unwrap();
        rig.stamp(block.ptr(), NEED, 7, &a);
        assert_eq!(rig.mismatches(block.ptr(), NEED, 7, &a), 0);
        kept.assert_intact(rig);
        drop((block, parts, kept));
        rig.close(&allocator);
    });
}

/// A view that another thread's free opens while one is cut serves the request as it is: there is nothing to
/// map.
#[test]
fn a_view_that_opens_beside_a_cut_needs_no_mapping() {
    let Some(rig) = Rig::with_interludes(Policy::Packed) else {
        return;
    };
    let [a, b] = rig.streams();
    let (allocator, kept, base) = churning(&rig, [&a, &b]);
    let mut parts = fill(&allocator, &a);
    drop(parts.drain(8..));
    a.synchronize().unwrap();
    // In a view of its own, with two parts that the first view's tail has.
    let other = allocator.allocate(NEED, &a).unwrap();
    let (at, view) = (other.ptr(), view_of(&allocator, &other));
    assert!(view.is_some_and(|view| view != base));
    drop(parts.drain(..6));
    a.synchronize().unwrap();
    let before = allocator.stats().reclaim;
    let maps = rig.calls("cuMemMap");
    interlude::after("cuMemUnmap", move || drop(other));
    let block = allocator.allocate(NEED, &a).unwrap();
    let after = allocator.stats().reclaim;
    assert_eq!(after.shortened - before.shortened, 1);
    assert_eq!(view_of(&allocator, &block), view);
    assert!(block.ptr().abs_diff(at) < (2 * MIB) as u64);
    assert_eq!(rig.calls("cuMemMap"), maps);
    assert_eq!(
        (after.views - before.views, after.stitched - before.stitched),
        (1, 0)
    );
    allocator.check().unwrap();
    rig.stamp(block.ptr(), NEED, 7, &a);
    assert_eq!(rig.mismatches(block.ptr(), NEED, 7, &a), 0);
    kept.assert_intact(&rig);
    drop((block, parts, kept));
    rig.close(&allocator);
    rig.assert_clean();
}
