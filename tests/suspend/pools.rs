//! Graph pools, by themselves and by their tags: graphs find everything where it was.

use super::support::*;
use cualloc::Tag;
use cualloc::allocator::{Segment, SegmentChange, SegmentHook};
use cualloc::error::{Cause, GraphPoolError};

/// A graph that writes a word over its input, through memory of its own, into its output; and the output.
fn program(rig: &Rig, allocator: &Allocator, pool: &GraphPool, stream: &Stream) -> (Graph, Block) {
    capture_output(pool, stream, || {
        let inner = allocator.allocate(6 * MIB, stream).unwrap();
        rig.stamp(inner.ptr(), 6 * MIB, 77, stream);
        let out = allocator.allocate(2 * MIB, stream).unwrap();
        // SAFETY: both blocks are live, and the copy is captured.
        unsafe { stream.memcpy(out.ptr(), inner.ptr(), 2 * MIB) }.unwrap();
        out
    })
}

/// A block of a pool, from outside of captures.
fn block_in(pool: &GraphPool, allocator: &Allocator, bytes: usize, stream: &Stream) -> Block {
    let _scope = pool.enter(Scope::Thread).unwrap();
    allocator.allocate(bytes, stream).unwrap()
}

fn launch(exec: &mut GraphExec, stream: &Stream) {
    // SAFETY: the simulator says what is wrong with the memory.
    unsafe { exec.launch(stream) }.unwrap();
    stream.synchronize().unwrap();
}

/// N13 as far as it goes here: launches after waking give what launches before gave.
#[test]
fn graphs_run_after_waking_as_before() {
    pooled(|rig, allocator, pool, [stream]| {
        let (graph, output) = program(rig, &allocator, &pool, &stream);
        let mut exec = graph.instantiate().unwrap();
        launch(&mut exec, &stream);
        let (physical, eager) = (pool.footprint().unwrap().physical, reserved(&allocator));
        for contents in [Contents::Pinned, Contents::Host, Contents::Drop] {
            let done = try_suspend(&allocator, Select::Pool(&pool), contents).unwrap();
            assert_eq!(done.bytes, physical);
            rig.assert_held(eager);
            let kept = contents != Contents::Drop;
            assert_eq!(done.kept, u64::from(kept) * (2 << 20), "live bytes alone");
            assert_matches!(pool.launching(), Err(Error::Suspended));
            assert_eq!(pool.footprint().unwrap().physical, 0);
            allocator.resume(Select::Pool(&pool)).unwrap();
            pool.launching().unwrap();
            assert_eq!(pool.footprint().unwrap().physical, physical);
            if kept {
                assert_eq!(rig.mismatches(output.ptr(), 2 * MIB, 77, &stream), 0);
            }
            rig.stamp(output.ptr(), 2 * MIB, 1, &stream);
            launch(&mut exec, &stream);
            assert_eq!(rig.mismatches(output.ptr(), 2 * MIB, 77, &stream), 0);
        }
    });
}

#[test]
fn other_memory_serves_while_a_pool_is_suspended() {
    pooled(|rig, allocator, pool, [stream]| {
        let _scope = pool.enter(Scope::Stream(&stream)).unwrap();
        let inside = allocator.allocate(4 * MIB, &stream).unwrap();
        let freed = allocator.allocate(4 * MIB, &stream).unwrap();
        rig.stamp(inside.ptr(), 4 * MIB, 5, &stream);
        try_suspend(&allocator, Select::Pool(&pool), Contents::Pinned).unwrap();
        let other = rig.stream();
        let eager = allocator.allocate(4 * MIB, &other).unwrap();
        rig.stamp(eager.ptr(), 4 * MIB, 6, &other);
        assert_matches!(allocator.allocate(4 * MIB, &stream), Err(Error::Suspended));
        let refused = try_suspend(&allocator, Select::Pool(&pool), Contents::Drop);
        assert_matches!(refused, Err(Error::Suspended));
        // Neither a free nor a trim touches what is away.
        drop(freed);
        allocator.trim(0).unwrap();
        allocator.check().unwrap();
        allocator.resume(Select::Pool(&pool)).unwrap();
        assert_eq!(rig.mismatches(inside.ptr(), 4 * MIB, 5, &stream), 0);
        assert_eq!(rig.mismatches(eager.ptr(), 4 * MIB, 6, &other), 0);
        let again = allocator.allocate(4 * MIB, &stream).unwrap();
        rig.stamp(again.ptr(), 4 * MIB, 7, &stream);
    });
}

#[test]
fn tags_select_what_is_suspended_and_kept() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let tags = ["weights", "cache", "cache"];
        let pools = tags.map(|tag| allocator.graph_pool_for(tag).unwrap());
        let blocks = pools.each_ref().map(|pool| {
            let block = block_in(pool, &allocator, 4 * MIB, &stream);
            rig.stamp(block.ptr(), 4 * MIB, 9, &stream);
            block
        });
        let keep = || Keep::from(Contents::Drop).tag("weights", Contents::Pinned);
        let cache = Select::Tag(Tag::new("cache"));
        let done = try_suspend(&allocator, cache, keep()).unwrap();
        assert_eq!((done.bytes, done.kept), (8 * MIB as u64, 0));
        // The rest.
        let done = try_suspend(&allocator, Select::Allocator, keep()).unwrap();
        assert_eq!((done.bytes, done.kept), (4 * MIB as u64, 4 * MIB as u64));
        rig.assert_held(0);
        let weights = Select::Tag(Tag::new("weights"));
        allocator.resume(weights).unwrap();
        assert_eq!(rig.mismatches(blocks[0].ptr(), 4 * MIB, 9, &stream), 0);
        assert!(!allocator.is_suspended(weights).unwrap());
        assert!(allocator.is_suspended(cache).unwrap());
        allocator.resume(Select::Allocator).unwrap();
        assert!(!is_suspended(&allocator));
        rig.stamp(blocks[2].ptr(), 4 * MIB, 3, &stream);
        let unknown = Select::Tag(Tag::new("catch"));
        assert_matches!(
            try_suspend(&allocator, unknown, Contents::Drop),
            Err(Error::GraphPool(GraphPoolError::UnknownTag {
                tag: "catch"
            }))
        );
        rig.settle(&stream);
    });
}

#[test]
fn a_tag_set_later_selects_what_graphs_already_use() {
    pooled(|rig, allocator, pool, [stream]| {
        let (graph, output) = program(rig, &allocator, &pool, &stream);
        let mut exec = graph.instantiate().unwrap();
        launch(&mut exec, &stream);
        let (early, late) = (
            Select::Tag(Tag::new("early")),
            Select::Tag(Tag::new("late")),
        );
        pool.set_tag("early").unwrap();
        pool.set_tag("late").unwrap();
        assert_matches!(
            try_suspend(&allocator, early, Contents::Drop),
            Err(Error::GraphPool(GraphPoolError::UnknownTag {
                tag: "early"
            }))
        );
        let physical = pool.footprint().unwrap().physical;
        let done = try_suspend(&allocator, late, Contents::Drop).unwrap();
        assert_eq!(done.bytes, physical);
        // A suspended pool is resumed by the tag that suspended it.
        assert_matches!(pool.set_tag("early"), Err(Error::Suspended));
        allocator.resume(late).unwrap();
        launch(&mut exec, &stream);
        assert_eq!(rig.mismatches(output.ptr(), 2 * MIB, 77, &stream), 0);
    });
}

#[test]
fn a_pool_is_not_suspended_in_a_capture_and_not_without_room() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene_limit(16 * MIB);
        let pool = allocator.graph_pool().unwrap();
        let scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        let _block = allocator.allocate(12 * MIB, &stream).unwrap();
        let refused = try_suspend(&allocator, Select::Pool(&pool), Contents::Drop);
        assert_matches!(refused, Err(Error::Capturing { .. }));
        let _graph = under_way.end().unwrap();
        scope.leave().unwrap();
        try_suspend(&allocator, Select::Pool(&pool), Contents::Drop).unwrap();
        // The limit is of memory that is there.
        let other = allocator.allocate(12 * MIB, &stream).unwrap();
        let why = out_of_memory(allocator.resume(Select::Pool(&pool)).unwrap_err());
        let figures = (why.requested, why.missing(), why.live());
        assert_eq!(figures, (12 << 20, 8 << 20, 12 << 20));
        assert_eq!(why.cause(), Cause::Limit, "{}", why.report());
        drop(other);
        stream.synchronize().unwrap();
        // Unused memory makes room.
        allocator.resume(Select::Pool(&pool)).unwrap();
    });
}

#[test]
fn pools_that_are_dropped_while_they_are_suspended_hold_nothing() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let pool = allocator.graph_pool().unwrap();
        let (graph, output) = program(rig, &allocator, &pool, &stream);
        try_suspend(&allocator, Select::Pool(&pool), Contents::Pinned).unwrap();
        drop((graph, output, pool));
        rig.settle(&stream);
        rig.close(&allocator);
        let leaks = rig.sim().map(|sim| sim.leaks());
        assert!(leaks.is_none_or(|leaks| leaks.reservations == 0 && leaks.host == 0));
    });
}

/// Only `resume` restores suspended memory of a pool, even if its last block was dropped meanwhile.
#[test]
fn a_trim_leaves_an_empty_pool_alone_that_is_suspended() {
    pooled(|rig, allocator, pool, [stream]| {
        let _scope = pool.enter(Scope::Stream(&stream)).unwrap();
        let block = allocator.allocate(4 * MIB, &stream).unwrap();
        let physical = pool.footprint().unwrap().physical;
        try_suspend(&allocator, Select::Pool(&pool), Contents::Drop).unwrap();
        drop(block);
        stream.synchronize().unwrap();
        allocator.trim(0).unwrap();
        allocator.check().unwrap();
        assert!(allocator.is_suspended(Select::Pool(&pool)).unwrap());
        let resumed = allocator.resume(Select::Pool(&pool)).unwrap();
        assert_eq!(resumed.bytes, physical);
        assert_eq!(pool.footprint().unwrap().physical, physical);
        let block = allocator.allocate(4 * MIB, &stream).unwrap();
        rig.stamp(block.ptr(), 4 * MIB, 9, &stream);
        assert_eq!(rig.mismatches(block.ptr(), 4 * MIB, 9, &stream), 0);
    });
}

/// A pool that cannot be used any more need not be resumed.
#[test]
fn an_unusable_pool_is_not_restored() {
    packed(|rig| {
        for all in [false, true] {
            let (allocator, [stream]) = rig.scene();
            let pool = allocator.graph_pool().unwrap();
            let (graph, output) = program(rig, &allocator, &pool, &stream);
            let select = match all {
                true => Select::Allocator,
                false => Select::Pool(&pool),
            };
            try_suspend(&allocator, select, Contents::Pinned).unwrap();
            drop((graph, output));
            wait_until("the graph is gone", || {
                pool.footprint().unwrap().leases == 0
            });
            drop(pool);
            if all {
                // With the rest nothing comes back either.
                assert_eq!(resume(&allocator).bytes, 0);
            }
            assert!(!is_suspended(&allocator));
            allocator.trim(0).unwrap();
            let host = rig.maybe_sim().map(|sim| sim.leaks().host);
            assert!(host.is_none_or(|bytes| bytes == 0));
            rig.assert_held(0);
        }
    });
}

/// Any call that checks drops the suspended memory of a released pool; the figures show that nothing is mapped.
#[test]
fn figures_of_a_pool_released_while_suspended_agree() {
    pooled(|rig, allocator, pool, [stream]| {
        drop(block_in(&pool, &allocator, MIB, &stream));
        // Its memory waits for a stream that was not queried.
        drop(pool);
        suspend(&allocator, Contents::Drop);
        let unused = Select::Tag(Tag::new("unused"));
        drop(allocator.resume(unused).unwrap_err());
        allocator.check().unwrap();
        resume(&allocator);
        rig.assert_held(0);
    });
}

#[test]
fn a_pool_of_another_allocator_is_refused() {
    packed(|rig| {
        let allocators = [rig.allocator(), rig.allocator()];
        let pools = allocators.each_ref().map(|a| a.graph_pool().unwrap());
        let foreign = Select::Pool(&pools[1]);
        let errors = [
            try_suspend(&allocators[0], foreign, Contents::Drop).map(drop),
            allocators[0].resume(foreign).map(drop),
            allocators[0].is_suspended(foreign).map(drop),
        ];
        for error in errors {
            assert_matches!(error, Err(Error::GraphPool(GraphPoolError::ForeignPool)));
        }
        drop(pools);
        allocators.iter().for_each(|a| rig.close(a));
    });
}

#[test]
fn a_pool_counts_until_it_is_suspended() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene_limit(16 * MIB);
        let pool = allocator.graph_pool().unwrap();
        let _block = block_in(&pool, &allocator, 12 * MIB, &stream);
        let (inside, other) = (allocator.clone(), rig.stream());
        let beside = allocator.graph_pool().unwrap();
        let hook = SegmentHook::new("test", move |_, _| {
            // The bytes that pools hold are counted again.
            drop(block_in(&beside, &inside, MIB, &other));
            let more = inside.allocate(12 * MIB, &other);
            assert_matches!(more, Err(Error::OutOfMemory(_)));
        });
        allocator.add_segment_hook(hook);
        try_suspend(&allocator, Select::Pool(&pool), Contents::Drop).unwrap();
        allocator.remove_segment_hook("test");
        let more = allocator.allocate(12 * MIB, &stream).unwrap();
        let ooms = allocator.stats().ooms;
        assert!(allocator.resume(Select::Pool(&pool)).is_err());
        assert_eq!(allocator.stats().ooms, ooms, "no request was made");
        drop(more);
        stream.synchronize().unwrap();
        allocator.resume(Select::Pool(&pool)).unwrap();
    });
}

#[test]
fn memory_that_a_pool_gave_back_keeps_no_number() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let heard = Arc::<Mutex<Vec<Segment>>>::default();
        let told = heard.clone();
        let hook = SegmentHook::new("test", move |change, segments| {
            if change == SegmentChange::Birth {
                told.lock().unwrap().extend_from_slice(segments);
            }
        });
        allocator.add_segment_hook(hook);
        let pool = allocator.graph_pool().unwrap();
        let mut seen: Vec<Segment> = Vec::new();
        for _ in 0..2 {
            let block = block_in(&pool, &allocator, 4 * MIB, &stream);
            try_suspend(&allocator, Select::Pool(&pool), Contents::Drop).unwrap();
            allocator.resume(Select::Pool(&pool)).unwrap();
            let now = std::mem::take(&mut *heard.lock().unwrap());
            let known = |segment: &Segment| seen.iter().any(|old| old.id == segment.id);
            assert!(
                !now.is_empty() && !now.iter().any(known),
                "{now:?} {seen:?}"
            );
            let at = |segment: &Segment| seen.iter().any(|old| old.address == segment.address);
            assert!(
                seen.is_empty() || now.iter().any(at),
                "at the same addresses"
            );
            seen = now;
            drop(block);
            rig.settle(&stream);
            allocator.empty_cache().unwrap();
        }
    });
}
