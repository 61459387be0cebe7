//! Which memory a commit takes, and where decommitted memory goes.

use super::support::*;

#[test]
fn idle_handles_of_the_size_come_first() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        // Handles of the smallest size.
        let blocks: Vec<_> = (0..4)
            .map(|_| allocator.allocate(2 * MIB, &stream).unwrap())
            .collect();
        let held = allocator.stats().all.reserved.current;
        drop(blocks);
        stream.synchronize().unwrap();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        let created = rig.calls("cuMemCreate");
        range.commit(granules(0, held / GRANULE), &stream).unwrap();
        assert_eq!(rig.calls("cuMemCreate"), created);
        assert_eq!(allocator.stats().all.reserved.current, 0);
        assert_eq!(allocator.stats().ranges, held);
        allocator.check().unwrap();
        range
            .commit(granules(0, held / GRANULE + 3), &stream)
            .unwrap();
        assert_eq!(rig.calls("cuMemCreate"), created + 3);
    });
}

#[test]
fn the_same_granule_is_committed_again_without_a_call() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        let hold = rig.hold(&stream);
        stamp(rig, &range, granules(0, 4), 3, &stream);
        range.decommit(granules(1, 3), &stream).unwrap();
        let calls = rig.memory_calls();
        range.commit(granules(0, 4), &stream).unwrap();
        assert_eq!((rig.memory_calls(), states(&range)), (calls, (4, 0)));
        hold.release();
        rig.settle(&stream);
        assert_stamped(rig, &range, granules(0, 4), 3, &stream);
    });
}

/// A decommit covers every recorded use, also where the granules of several records overlap or touch.
#[test]
fn a_decommit_covers_all_recorded_uses() {
    packed(|rig| {
        let (allocator, [stream, one, two]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        let held = [&one, &two].map(|user| rig.busy(user));
        stamp(rig, &range, granules(0, 3), 1, &one);
        stamp(rig, &range, granules(3, 4), 2, &two);
        for (used, user) in [((0, 2), &one), ((2, 4), &two), ((1, 3), &one)] {
            range.record(granules(used.0, used.1), user).unwrap();
            allocator.check().unwrap();
        }
        range.decommit(granules(0, 4), &stream).unwrap();
        allocator.check().unwrap();
        // The simulator reports a write that is not ordered behind the earlier ones.
        range.commit(granules(0, 4), &stream).unwrap();
        stamp(rig, &range, granules(0, 4), 3, &stream);
        drop(held);
        rig.settle(&stream);
    });
}

#[test]
fn another_stream_waits_for_the_granule_on_the_device() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        let hold = rig.hold(&stream);
        stamp(rig, &range, granules(0, 4), 3, &stream);
        range.decommit(granules(1, 3), &stream).unwrap();
        let (calls, waits) = (rig.memory_calls(), allocator.stats().stream_waits);
        range.commit(granules(1, 3), &other).unwrap();
        assert_eq!(allocator.stats().stream_waits, waits + 1);
        assert_eq!((rig.memory_calls(), states(&range)), (calls, (4, 0)));
        stamp(rig, &range, granules(1, 3), 5, &other);
        hold.release();
        rig.settle(&stream);
        rig.settle(&other);
        assert_stamped(rig, &range, granules(1, 3), 5, &other);
        assert_stamped(rig, &range, granules(0, 1), 3, &other);
        // The earlier use is still one of the granule's when another stream decommits it.
        range.decommit(granules(0, 4), &other).unwrap();
    });
}

#[test]
fn a_granule_that_was_committed_again_keeps_its_earlier_uses() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 1), &stream).unwrap();
        let hold = rig.hold(&stream);
        stamp(rig, &range, granules(0, 1), 3, &stream);
        range.decommit(granules(0, 1), &stream).unwrap();
        range.commit(granules(0, 1), &stream).unwrap();
        // The stream that takes the memory away has never used it.
        range.decommit(granules(0, 1), &other).unwrap();
        rig.settle(&other);
        assert_eq!(allocator.trim(0).unwrap().released, 0);
        assert_eq!(states(&range), (0, 1));
        hold.release();
        rig.settle(&stream);
        assert_eq!(allocator.trim(0).unwrap().released, GRANULE);
    });
}

#[test]
fn without_waits_a_granule_in_use_cannot_be_committed() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene_with(Config::new().waits(Waits::Never));
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 1), &stream).unwrap();
        let hold = rig.hold(&stream);
        stamp(rig, &range, granules(0, 1), 3, &stream);
        range.decommit(granules(0, 1), &stream).unwrap();
        let error = range.commit(granules(0, 1), &other).unwrap_err();
        assert_eq!(out_of_memory(error).requested, GRANULE);
        hold.release();
        rig.settle(&stream);
        range.commit(granules(0, 1), &other).unwrap();
    });
}

#[test]
fn ordinary_requests_use_decommitted_memory_when_its_work_is_complete() {
    packed(|rig| {
        let (allocator, [stream, other, third]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        range.record(granules(0, 2), &third).unwrap();
        let hold = rig.hold(&third);
        stamp(rig, &range, granules(0, 2), 3, &third);
        range.decommit(granules(0, 4), &stream).unwrap();
        rig.settle(&stream);
        let created = rig.calls("cuMemCreate");
        // Half of it is complete.
        let block = allocator.allocate(4 * MIB, &other).unwrap();
        assert_eq!(
            (rig.calls("cuMemCreate"), states(&range)),
            (created, (0, 2))
        );
        rig.stamp(block.ptr(), 4 * MIB, 8, &other);
        let second = allocator.allocate(4 * MIB, &other).unwrap();
        assert!(rig.calls("cuMemCreate") > created);
        hold.release();
        rig.settle(&third);
        rig.settle(&other);
        allocator.check().unwrap();
        drop((block, second));
    });
}

#[test]
fn other_ranges_use_decommitted_memory() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene_limit(12 * MIB);
        let two = [0, 1].map(|_| allocator.reserve_range(64 * GRANULE, options()).unwrap());
        let striped = options().stripes(2, 64 * GRANULE);
        let third = allocator.reserve_range(64 * GRANULE, striped).unwrap();
        two[0].commit(granules(0, 6), &stream).unwrap();
        stamp(rig, &two[0], granules(0, 6), 3, &stream);
        two[0].decommit(granules(2, 6), &stream).unwrap();
        rig.settle(&stream);
        let created = rig.calls("cuMemCreate");
        two[1].commit(granules(0, 2), &other).unwrap();
        third.commit(granules(9, 10), &other).unwrap();
        assert_eq!(rig.calls("cuMemCreate"), created);
        assert_eq!((states(&two[0]), states(&two[1])), ((2, 0), (2, 0)));
        let error = third.commit(granules(0, 1), &other).unwrap_err();
        assert_eq!(out_of_memory(error).missing(), 2 * GRANULE);
        assert_eq!(states(&third), (2, 0));
        allocator.check().unwrap();
    });
}

/// Handles of another size are released, where a wait is not possible, too.
#[test]
fn a_commit_in_a_capture_makes_room_of_decommitted_memory() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene_limit(12 * MIB);
        let reserve = |options| allocator.reserve_range(64 * GRANULE, options).unwrap();
        let (small, wide) = (reserve(options()), reserve(options().granule(2 * GRANULE)));
        small.commit(granules(0, 6), &stream).unwrap();
        small.decommit(granules(0, 6), &stream).unwrap();
        rig.settle(&stream);
        let under_way = Capturing::begin(&other, MODE);
        wide.commit(granules(0, 4), &other).unwrap();
        drop(under_way.end().unwrap());
        assert_eq!((states(&small), states(&wide)), ((0, 2), (4, 0)));
        allocator.check().unwrap();
    });
}

#[test]
fn a_commit_at_the_limit_waits_for_work() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene_limit(8 * MIB);
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        let block = allocator.allocate(6 * MIB, &stream).unwrap();
        let busy = rig.busy(&stream);
        rig.stamp(block.ptr(), 6 * MIB, 1, &stream);
        drop(block);
        range.commit(granules(0, 4), &other).unwrap();
        assert_eq!(states(&range), (4, 0));
        drop(busy);
        allocator.check().unwrap();
    });
}

#[test]
fn small_requests_and_graph_pools_get_the_memory_at_the_limit() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene_limit(8 * MIB);
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        let pool = allocator.graph_pool().unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        range.decommit(granules(0, 4), &stream).unwrap();
        rig.settle(&stream);
        let small = allocator.allocate(4096, &stream).unwrap();
        assert_eq!(states(&range), (0, 3));
        let graph = capture(&pool, &stream, || {
            drop(allocator.allocate(6 * MIB, &stream).unwrap());
        });
        assert_eq!(states(&range), (0, 0));
        drop((small, graph));
        allocator.check().unwrap();
    });
}

#[test]
fn memory_under_pressure_reaches_the_request_that_asked() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene_limit(16 * MIB);
        let range = Arc::new(allocator.reserve_range(64 * GRANULE, options()).unwrap());
        range.commit(granules(0, 6), &stream).unwrap();
        let (cache, on) = (Arc::clone(&range), stream.clone());
        let asked = Arc::new(AtomicU64::new(0));
        let sum = Arc::clone(&asked);
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new(
            "cache",
            move |missing| {
                sum.fetch_add(missing, Ordering::Relaxed);
                let keep = cache.stats().map_or(0, |stats| stats.committed / 2);
                cache
                    .decommit(keep..cache.bytes(), &on)
                    .map_or(0, |()| keep)
            },
        ));
        let block = allocator.allocate(8 * MIB, &other).unwrap();
        assert_eq!(
            (states(&range).0, asked.load(Ordering::Relaxed)),
            (3, 4 * MIB as u64)
        );
        let second = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        second.commit(granules(0, 1), &other).unwrap();
        second.commit(granules(0, 2), &other).unwrap();
        assert!(states(&range).0 < 3);
        allocator.remove_relief_hook("cache");
        allocator.check().unwrap();
        drop((block, second));
    });
}

#[test]
fn trim_and_decay_release_decommitted_memory() {
    packed(|rig| {
        let decay = std::time::Duration::from_secs(1);
        let (allocator, [stream]) = rig.scene_with(Config::new().decay(Some(decay)));
        let clock = cualloc::resource::Clock::manual();
        allocator.set_clock(clock.clone());
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 6), &stream).unwrap();
        range.decommit(granules(0, 4), &stream).unwrap();
        rig.settle(&stream);
        assert_eq!(allocator.trim(3 * GRANULE).unwrap().released, GRANULE);
        assert_eq!(states(&range), (2, 3));
        for expected in [0, 3 * GRANULE, 0] {
            clock.advance(decay);
            assert_eq!(allocator.decay().unwrap(), expected);
        }
        let hold = rig.busy(&stream);
        stamp(rig, &range, granules(4, 6), 3, &stream);
        range.decommit(granules(4, 6), &stream).unwrap();
        let trimmed = allocator.trim(0).unwrap();
        assert!(on_cuda() || (trimmed.released, trimmed.pending) == (0, 2 * GRANULE));
        assert_eq!(allocator.empty_cache().unwrap().pending, 0);
        assert_eq!(states(&range), (0, 0));
        drop(hold);
    });
}
