//! A whole allocator: what is kept, what is lost, and what happens meanwhile.

use super::support::*;
use cualloc::allocator::{Segment, SegmentChange, SegmentHook};
use cualloc::error::Cause;
use std::collections::HashSet;

/// The arguments of a hook's call.
type Told = (SegmentChange, Vec<Segment>);

#[test]
fn kept_contents_are_restored_at_their_address() {
    packed(|rig| {
        for contents in [Contents::Pinned, Contents::Host] {
            let world = World::new(rig, Config::new());
            let addresses = world.addresses();
            for _ in 0..3 {
                let before = reserved(&world.allocator);
                let done = suspend(&world.allocator, contents);
                assert!(is_suspended(&world.allocator));
                rig.assert_held(0);
                assert_eq!(done.bytes, before);
                let live = world.allocator.stats().all.allocated.current;
                assert_eq!(done.kept, live, "live bytes alone");
                world.allocator.check().unwrap();
                let back = resume(&world.allocator);
                assert!(back.bytes <= before && back.kept == live);
                rig.assert_held(reserved(&world.allocator));
                world.allocator.check().unwrap();
                assert_eq!(world.addresses(), addresses);
                world.assert_intact(rig);
                world.stamp(rig);
            }
        }
    });
}

/// Number of parts of host memory that were page-locked.
fn locked_parts(rig: &Rig) -> u64 {
    rig.calls("cuMemHostRegister_v2") + rig.calls("cuMemHostAlloc")
}

/// The parts are locked by several threads where the machine has several processors.
#[test]
fn contents_of_several_parts_are_kept_in_host_memory_that_serves_until_trim() {
    packed(|rig| {
        const BYTES: usize = 200 * MIB;
        let parts = BYTES.div_ceil(64 * MIB) as u64;
        for bound in [None, Some(64 << 20)] {
            let mut config = Config::new();
            config.host_cache = bound;
            let (allocator, [stream]) = rig.scene_with(config);
            let block = allocator.allocate(BYTES, &stream).unwrap();
            rig.stamp(block.ptr(), BYTES, 7, &stream);
            stream.synchronize().unwrap();
            let locked = |release: &dyn Fn()| {
                release();
                let before = locked_parts(rig);
                assert_eq!(suspend(&allocator, Contents::Pinned).kept, BYTES as u64);
                resume(&allocator);
                locked_parts(rig) - before
            };
            if rig.sim().is_some() {
                assert_eq!(locked(&|| ()), parts);
                let again = if bound.is_some() { parts - 1 } else { 0 };
                assert_eq!(locked(&|| drop(allocator.trim_device(0).unwrap())), again);
                assert_eq!(locked(&|| drop(allocator.trim(0).unwrap())), parts);
            } else {
                locked(&|| ());
            }
            assert_eq!(rig.mismatches(block.ptr(), BYTES, 7, &stream), 0);
        }
    });
}

#[test]
fn dropped_contents_need_no_host_memory_and_the_memory_can_be_written() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let copies = rig.calls("cuMemcpyDtoHAsync_v2");
        let done = suspend(&world.allocator, Contents::Drop);
        assert_eq!(done.kept, 0);
        resume(&world.allocator);
        assert_eq!(rig.calls("cuMemcpyDtoHAsync_v2"), copies);
        assert_eq!(locked_parts(rig), 0);
        world.stamp(rig);
        world.assert_intact(rig);
    });
}

/// N12: another allocator has the memory between.
#[test]
fn another_owner_has_the_memory_in_between() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let addresses = world.addresses();
        for round in 0..50 {
            suspend(&world.allocator, Contents::Pinned);
            let other = rig.allocator_with(Config::new().headroom(0));
            // More than what this one left.
            let all = other.allocate(8 * GIB - 4 * MIB, &world.stream).unwrap();
            rig.stamp(all.ptr(), 4 * MIB, round, &world.stream);
            drop(all);
            rig.settle(&world.stream);
            rig.close(&other);
            resume(&world.allocator);
            assert_eq!(world.addresses(), addresses);
            world.assert_intact(rig);
        }
        assert!(locked_parts(rig) <= 2, "page-locked memory serves again");
    });
}

/// N14: a resume restores all the memory.
#[test]
fn a_resume_without_memory_changes_nothing_and_may_be_tried_again() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let world = World::new(rig, Config::new());
        suspend(&world.allocator, Contents::Host);
        let free = rig.context.mem_info().unwrap().free;
        sim.take_memory(0, free - 4 * MIB as u64);
        for _ in 0..3 {
            let before = sim.memory_in_use(0);
            match world.allocator.resume(Select::Allocator) {
                Err(Error::OutOfMemory(why)) => {
                    assert!(why.requested > 40 * MIB as u64);
                    // Suspended memory is not on the device.
                    assert_eq!(why.cause(), Cause::Others, "{}", why.report());
                    assert_eq!(why.others(), Some(free - 4 * MIB as u64));
                    assert_eq!(why.missing(), why.requested - 4 * MIB as u64);
                }
                other => panic!("{other:?}"),
            }
            assert!(is_suspended(&world.allocator));
            rig.assert_held(before);
            let refused = world.allocator.allocate(512, &world.stream);
            assert_matches!(refused, Err(Error::Suspended));
        }
        sim.take_memory(0, 0);
        resume(&world.allocator);
        world.assert_intact(rig);
    });
}

#[test]
fn blocks_are_freed_while_they_are_suspended() {
    packed(|rig| {
        let mut world = World::new(rig, Config::new());
        suspend(&world.allocator, Contents::Pinned);
        // Large ones, small ones, and the one in the view.
        let gone: Vec<Block> = world.blocks.drain(5..).collect();
        drop(gone);
        world.allocator.check().unwrap();
        rig.assert_held(0);
        let back = resume(&world.allocator);
        assert!(
            back.bytes < 30 * MIB as u64,
            "{back:?}: only where blocks are"
        );
        rig.assert_held(reserved(&world.allocator));
        world.allocator.check().unwrap();
        world.assert_intact(rig);
        // Released memory can be allocated again.
        for block in world.allocator.allocate_blocks(4, 5 * MIB, &world.stream) {
            rig.stamp(block.ptr(), 5 * MIB, 7, &world.stream);
        }
        world.assert_intact(rig);
    });
}

#[test]
fn an_allocator_that_is_dropped_while_it_is_suspended_holds_nothing() {
    packed(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let blocks = [5 * MIB, 700].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
        suspend(&allocator, Contents::Pinned);
        drop(allocator);
        drop(blocks);
        assert!(rig.all_given_back());
        let leaks = rig.sim().map(|sim| sim.leaks());
        assert!(leaks.is_none_or(|leaks| leaks.reservations == 0 && leaks.host == 0));
        let world = World::new(rig, Config::new());
        suspend(&world.allocator, Contents::Drop);
    });
}

/// I8: all devices that had access have it again, in homes and views.
#[test]
fn hooks_receive_each_segment_without_locks() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let heard = Arc::<Mutex<Vec<Told>>>::default();
        let (told, inside, stream) = (heard.clone(), world.allocator.clone(), rig.stream());
        let allocates = AtomicBool::new(false);
        let hook = SegmentHook::new("test", move |change, segments| {
            if allocates.swap(true, Ordering::Relaxed) {
                // Its own allocation has grown the memory.
                return;
            }
            told.lock().unwrap().push((change, segments.to_vec()));
            // It may call the allocator.
            let made = inside.allocate(3 * MIB, &stream);
            assert_eq!(made.is_ok(), change == SegmentChange::Birth);
            let again = inside.resume(Select::Allocator);
            assert!(again.is_err());
            inside.check().unwrap();
            allocates.store(false, Ordering::Relaxed);
        });
        assert!(!world.allocator.add_segment_hook(hook));
        for _ in 0..2 {
            suspend(&world.allocator, Contents::Drop);
            resume(&world.allocator);
        }
        assert!(world.allocator.remove_segment_hook("test"));
        assert!(!world.allocator.remove_segment_hook("test"));
        suspend(&world.allocator, Contents::Drop);
        resume(&world.allocator);
        let heard = std::mem::take(&mut *heard.lock().unwrap());
        let [first_death, first_birth, second_death, second_birth] = &heard[..] else {
            panic!("{heard:?}")
        };
        assert_eq!(first_death.0, SegmentChange::Death);
        assert_eq!(first_birth.0, SegmentChange::Birth);
        let ids = |segments: &[Segment]| segments.iter().map(|s| s.id).collect::<HashSet<u64>>();
        assert!(ids(&first_death.1).is_disjoint(&ids(&first_birth.1)));
        assert!(
            ids(&second_death.1).is_superset(&ids(&first_birth.1)),
            "an id stays until its segment dies"
        );
        assert!(ids(&second_birth.1).is_disjoint(&ids(&second_death.1)));
        let bytes: u64 = first_birth.1.iter().map(|segment| segment.bytes).sum();
        let homes: HashSet<u64> = first_death
            .1
            .iter()
            .map(|segment| segment.address)
            .collect();
        assert!(bytes > 0 && first_birth.1.iter().all(|s| homes.contains(&s.address)));
    });
}

#[test]
fn a_hook_that_panics_does_no_harm() {
    packed(|rig| {
        let world = World::new(rig, Config::new());
        let told: Arc<Mutex<Vec<(usize, SegmentChange)>>> = Arc::default();
        let listen = |place: usize| {
            let told = Arc::clone(&told);
            SegmentHook::new(format!("listens {place}"), move |now, _| {
                told.lock().unwrap().push((place, now));
            })
        };
        world.allocator.add_segment_hook(listen(0));
        for change in [SegmentChange::Death, SegmentChange::Birth] {
            let hook = SegmentHook::new("test", move |now, _| assert_ne!(now, change));
            world.allocator.add_segment_hook(hook);
            world.allocator.add_segment_hook(listen(1));
            suspend(&world.allocator, Contents::Pinned);
            assert!(is_suspended(&world.allocator));
            resume(&world.allocator);
            assert!(!is_suspended(&world.allocator));
            world.assert_intact(rig);
            drop(world.allocator.allocate(512, &world.stream).unwrap());
            let heard = std::mem::take(&mut *told.lock().unwrap());
            let each = |change| [(0, change), (1, change)];
            assert_eq!(
                heard,
                [each(SegmentChange::Death), each(SegmentChange::Birth)].concat()
            );
        }
        for name in ["test", "listens 0", "listens 1"] {
            world.allocator.remove_segment_hook(name);
        }
        suspend(&world.allocator, Contents::Pinned);
        resume(&world.allocator);
        world.assert_intact(rig);
    });
}

#[test]
fn debug_modes_neither_touch_nor_miss_suspended_memory() {
    alone(debug_modes_beside_suspension);
}

fn debug_modes_beside_suspension() {
    for contents in [Contents::Drop, Contents::Host] {
        packed(|rig| {
            let config: Config = "debug=guard+quarantine:64M+poison+leaks".parse().unwrap();
            let allocator = rig.allocator_with(config);
            let stream = rig.stream();
            let sizes = [7 * MIB - 20, 9 * MIB - 30, 900, 8 * MIB, 6 * MIB];
            let blocks = sizes.map(|bytes| allocator.allocate(bytes, &stream).unwrap());
            let [first, second, small, third, freed] = blocks;
            rig.settle(&stream);
            drop(freed);
            let done = try_suspend(&allocator, Select::Allocator, contents).unwrap();
            assert!(done.bytes >= 16 * MIB as u64, "{done:?}");
            drop((second, small));
            allocator.check().unwrap();
            allocator.resume(Select::Allocator).unwrap();
            allocator.check().unwrap();
            assert_eq!(allocator.findings(), []);
            // The guard past a block is kept with its contents, and not checked if they are lost.
            let end = first.ptr() + first.requested() as u64;
            // SAFETY: the guard is behind it.
            unsafe { stream.memset(end, 7, 1) }.unwrap();
            drop((first, third));
            let found = allocator.findings();
            assert_eq!(
                found.len(),
                usize::from(contents == Contents::Host),
                "{found:?}"
            );
            rig.close(&allocator);
            assert_eq!(allocator.findings().len(), found.len());
        });
    }
}
