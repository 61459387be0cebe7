//! Refused calls: they return a typed error and change nothing.

use super::support::*;

fn is_suspended_error<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert_matches!(result, Err(Error::Suspended));
}

#[test]
fn no_request_gets_suspended_memory() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let (allocator, stream) = (&world.allocator, &world.stream);
        // Memory in caches as well.
        for bytes in [512, 4096, 100_000, 3 * MIB] {
            drop(allocator.allocate(bytes, stream).unwrap());
        }
        suspend(allocator, Contents::Pinned);
        let other = rig.stream();
        for bytes in [512, 4096, 100_000, 3 * MIB, 40 * MIB] {
            is_suspended_error(allocator.allocate(bytes, stream));
            is_suspended_error(allocator.allocate(bytes, &other));
            is_suspended_error(allocator.raw_allocate(bytes, stream.raw()));
        }
        is_suspended_error(allocator.trim(0));
        is_suspended_error(allocator.empty_cache());
        let ptr = world.blocks[0].ptr();
        is_suspended_error(allocator.guard(ptr, 512));
        is_suspended_error(allocator.segments_of(ptr, 512));
        is_suspended_error(try_suspend(allocator, Select::Allocator, Contents::Drop));
        allocator.synchronize().unwrap();
        rig.assert_held(0);
        resume(allocator);
        let refused = allocator.resume(Select::Allocator);
        assert_matches!(refused, Err(Error::NotSuspended));
        drop(allocator.allocate(512, &other).unwrap());
        assert!(allocator.guard(ptr, 512).is_ok());
        world.assert_intact(rig);
    });
}

#[test]
fn guarded_memory_is_not_suspended() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let small = world
            .blocks
            .iter()
            .find(|b| b.requested() < 64 * KIB)
            .unwrap();
        for block in [&world.blocks[0], small] {
            let calls = rig.memory_calls();
            let guard = world.allocator.guard(block.ptr(), 512).unwrap();
            let refused = try_suspend(&world.allocator, Select::Allocator, Contents::Pinned);
            assert_matches!(refused, Err(Error::Guarded { guards: 1, .. }));
            assert_eq!(rig.memory_calls(), calls, "nothing is done");
            drop(guard);
            world.assert_intact(rig);
        }
        suspend(&world.allocator, Contents::Pinned);
        resume(&world.allocator);
        world.assert_intact(rig);
    });
}

#[test]
fn nothing_is_suspended_while_a_stream_captures() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let under_way = Capturing::begin(&world.stream, MODE);
        let refused = try_suspend(&world.allocator, Select::Allocator, Contents::Pinned);
        assert_matches!(refused, Err(Error::Capturing { .. }));
        drop(under_way.end().unwrap());
        world.assert_intact(rig);
        drop(world.allocator.allocate(512, &world.stream).unwrap());
        suspend(&world.allocator, Contents::Pinned);
        resume(&world.allocator);
        world.assert_intact(rig);
    });
}

#[test]
fn work_under_way_is_waited_for() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let other = rig.stream();
        let held = rig.busy(&other);
        rig.stamp(world.blocks[0].ptr(), 5 * MIB, 1000, &other);
        suspend(&world.allocator, Contents::Pinned);
        drop(held);
        resume(&world.allocator);
        world.assert_intact(rig);
    });
}

#[test]
fn segments_of_the_classic_policy_cannot_be_suspended() {
    only(Policy::Classic, |rig| {
        let allocator = rig.checked();
        let refused = try_suspend(&allocator, Select::Allocator, Contents::Drop);
        assert_matches!(refused, Err(Error::NotSupported { .. }));
        let refused = allocator.resume(Select::Allocator);
        assert_matches!(refused, Err(Error::NotSuspended));
    });
}

#[test]
fn a_refused_trim_frees_page_locked_memory() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        suspend(&world.allocator, Contents::Pinned);
        resume(&world.allocator);
        let pinned = || rig.sim().map_or(0, |sim| sim.leaks().host);
        assert!(pinned() > 0 || rig.sim().is_none());
        suspend(&world.allocator, Contents::Drop);
        is_suspended_error(world.allocator.trim(0));
        assert_eq!(pinned(), 0);
        resume(&world.allocator);
        world.stamp(rig);
    });
}
