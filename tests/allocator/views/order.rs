//! One memory at two addresses, used by several streams.

use super::{PART, TWO, aliased, home, packed, scattered, view_of};
use crate::common::prelude::*;

/// The address of an unused view of [`TWO`] bytes.
fn idle_view(allocator: &Allocator, stream: &Stream) -> u64 {
    let block = allocator.allocate(TWO, stream).unwrap();
    assert!(view_of(allocator, &block).is_some());
    let at = block.ptr();
    drop(block);
    at
}

/// Uses a block on its stream, behind work that keeps the stream busy, and frees it.
fn use_and_free<'a>(rig: &'a Rig, block: Block, stream: &Stream) -> Hold<'a> {
    let hold = rig.hold(stream);
    rig.stamp(block.ptr(), block.requested(), 77, stream);
    drop(block);
    hold
}

/// A request waits for memory that another stream used last at its home address if it takes the memory through a view.
#[test]
fn a_run_in_a_view_waits_for_uses_at_home() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let at = idle_view(&allocator, &a);
        a.synchronize().unwrap();
        let theirs = allocator.allocate(PART, &b).unwrap();
        let hold = use_and_free(rig, theirs, &b);
        let before = rig.calls("cuStreamWaitEvent");
        let block = allocator.allocate(TWO, &a).unwrap();
        assert_eq!(block.ptr(), at);
        assert_eq!(rig.calls("cuStreamWaitEvent"), before + 1);
        rig.stamp(at, TWO, 7, &a);
        assert!(!a.is_complete().unwrap(), "memory in use was handed out");
        hold.release();
        assert_eq!(rig.mismatches(at, TWO, 7, &a), 0);
    });
}

/// Uses of a block in a view apply to its bytes at home.
#[test]
fn uses_of_a_block_in_a_view_apply_at_home() {
    packed(|rig| {
        let [a, b, c] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &a).unwrap();
        block.record_stream(&b).unwrap();
        a.synchronize().unwrap();
        let hold = use_and_free(rig, block, &b);
        for stream in [&a, &c] {
            let part = allocator.allocate(PART - MIB, stream).unwrap();
            assert_eq!(view_of(&allocator, &part), None);
            rig.stamp(part.ptr(), PART - MIB, 5, stream);
            assert!(
                !stream.is_complete().unwrap(),
                "the other stream still runs"
            );
            if std::ptr::eq(stream, &c) {
                hold.release();
                assert_eq!(rig.mismatches(part.ptr(), PART - MIB, 5, stream), 0);
                break;
            }
        }
    });
}

/// Scattered memory of which parts need a wait is stitched behind that wait.
#[test]
fn a_stitch_waits_for_pending_memory() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        a.synchronize().unwrap();
        let theirs = allocator.allocate(PART, &b).unwrap();
        let hold = use_and_free(rig, theirs, &b);
        let block = allocator.allocate(TWO, &a).unwrap();
        assert_eq!(allocator.stats().reclaim.stitched, 1);
        rig.stamp(block.ptr(), TWO, 7, &a);
        assert!(!a.is_complete().unwrap(), "memory in use was handed out");
        hold.release();
        assert_eq!(rig.mismatches(block.ptr(), TWO, 7, &a), 0);
    });
}

/// Memory that needs no wait is taken first.
#[test]
fn a_stitch_prefers_complete_memory() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 4, &a);
        a.synchronize().unwrap();
        let theirs = allocator.allocate(PART, &b).unwrap();
        let hold = use_and_free(rig, theirs, &b);
        let before = rig.calls("cuStreamWaitEvent");
        let block = allocator.allocate(TWO, &a).unwrap();
        assert_eq!(allocator.stats().reclaim.stitched, 1);
        assert_eq!(rig.calls("cuStreamWaitEvent"), before);
        rig.stamp(block.ptr(), TWO, 7, &a);
        rig.settle(&a);
        hold.release();
    });
}

/// Two concurrent owners of one page, each through its own address and on its own stream.
#[test]
fn neighbours_in_a_page_do_not_race() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, kept) = scattered(rig, 2, &a);
        let block = allocator.allocate(TWO, &b).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        a.synchronize().unwrap();
        // The block begins where the first part ends: in the middle of a handle.
        let neighbour = &kept.blocks[0];
        let aliased = home(&allocator);
        let end = neighbour.ptr() + PART as u64;
        assert!(aliased.iter().any(|e| e.address == end) && !end.is_multiple_of(2 << 20));
        let holds = [rig.hold(&a), rig.hold(&b)];
        for word in 0..8 {
            rig.stamp(neighbour.ptr(), PART, 100 + word, &a);
            rig.stamp(block.ptr(), TWO, 200 + word, &b);
        }
        holds.into_iter().rev().for_each(Hold::release);
        assert_eq!(rig.mismatches(block.ptr(), TWO, 207, &b), 0);
        assert_eq!(rig.mismatches(neighbour.ptr(), PART, 107, &a), 0);
        // As the blocks that stay began.
        rig.stamp(neighbour.ptr(), PART, 1000, &a);
    });
}

/// A wait that cannot be queued changes nothing: all memory keeps its pending uses.
#[test]
fn r2_a_failed_wait_leaves_memory_pending() {
    packed(|rig| {
        for view in [true, false] {
            let Some(sim) = rig.sim() else { return };
            let [a, b] = rig.streams();
            let (allocator, _kept) = scattered(rig, 2, &a);
            if view {
                idle_view(&allocator, &a);
            }
            a.synchronize().unwrap();
            let theirs = allocator.allocate(PART, &b).unwrap();
            let hold = use_and_free(rig, theirs, &b);
            let before = allocator.snapshot();
            // Not an error about the marker, which would be replaced.
            let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
            sim.fail(FailPlan::call("cuStreamWaitEvent", code).unwrap());
            assert_matches!(allocator.allocate(TWO, &a), Err(Error::Driver(_)));
            assert_eq!(sim.clear_failures(), 0);
            allocator.check().unwrap();
            assert_eq!(allocator.snapshot(), before);
            assert_eq!(aliased(&allocator), 0);
            // The same request goes through, behind the wait that is still needed.
            let block = allocator.allocate(TWO, &a).unwrap();
            rig.stamp(block.ptr(), TWO, 7, &a);
            assert!(!a.is_complete().unwrap(), "memory in use was handed out");
            hold.release();
            assert_eq!(rig.mismatches(block.ptr(), TWO, 7, &a), 0);
        }
    });
}

/// Held memory does not use the view: only blocks in it do.
#[test]
fn a_view_serves_another_stream_when_its_last_block_is_over() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let (allocator, _kept) = scattered(rig, 2, &a);
        let at = idle_view(&allocator, &a);
        a.synchronize().unwrap();
        let (calls, waits) = (rig.memory_calls(), rig.calls("cuStreamWaitEvent"));
        let block = allocator.allocate(TWO, &b).unwrap();
        assert_eq!(block.ptr(), at);
        assert_eq!(rig.memory_calls(), calls);
        assert_eq!(rig.calls("cuStreamWaitEvent"), waits);
        rig.stamp(at, TWO, 7, &b);
        assert_eq!(rig.mismatches(at, TWO, 7, &b), 0);
    });
}

/// Among runs of equal length the lowest is taken, also if it is pending on the stream itself and the other one is
/// complete.
#[test]
fn the_lowest_of_equal_runs_is_taken() {
    packed(|rig| {
        let (allocator, [a, b]) = rig.scene();
        let _other = allocator.allocate(100, &b).unwrap();
        let mut blocks: Vec<Block> = allocator.allocate_blocks(6, PART, &a);
        blocks.sort_by_key(Block::ptr);
        drop(blocks.remove(4));
        a.synchronize().unwrap();
        let low = blocks.remove(1);
        let at = low.ptr();
        let hold = use_and_free(rig, low, &a);
        let block = allocator.allocate(PART, &a).unwrap();
        assert_eq!(block.ptr(), at);
        hold.release();
    });
}
