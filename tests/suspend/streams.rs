//! Blocks of one stream, while the memory of others serves on.

use super::support::*;
use cualloc::allocator::{SegmentChange, SegmentHook};

/// Blocks of two streams, apart from each other in handles of their own, and one of each in one handle.
struct Two {
    allocator: Allocator,
    own: Stream,
    other: Stream,
    blocks: Vec<Block>,
    others: Vec<Block>,
}

fn two(rig: &Rig) -> Two {
    let allocator = rig.allocator();
    let [own, other] = rig.streams();
    let make = |bytes, stream: &Stream| {
        let block = allocator.allocate(bytes, stream).unwrap();
        rig.stamp(block.ptr(), bytes, 8, stream);
        block
    };
    let mut blocks = vec![make(7 * MIB, &own), make(6 * MIB, &own)];
    let mut others = vec![make(6 * MIB, &other)];
    blocks.push(make(5 * MIB, &own));
    others.push(make(5 * MIB, &other));
    own.synchronize().unwrap();
    other.synchronize().unwrap();
    Two {
        allocator,
        own,
        other,
        blocks,
        others,
    }
}

impl Two {
    fn assert_intact(&self, rig: &Rig) {
        self.allocator.check().unwrap();
        for (blocks, stream) in [(&self.blocks, &self.own), (&self.others, &self.other)] {
            for block in blocks {
                assert_eq!(rig.mismatches(block.ptr(), block.requested(), 8, stream), 0);
            }
        }
    }

    fn close(self, rig: &Rig) {
        drop((self.blocks, self.others, self.own, self.other));
        rig.close(&self.allocator);
    }
}

#[test]
fn whole_handles_of_a_stream_go_and_all_others_stay() {
    packed(|rig| {
        let two = two(rig);
        let (allocator, before) = (&two.allocator, reserved(&two.allocator));
        let select = Select::Stream(&two.own);
        for _ in 0..3 {
            let done = try_suspend(allocator, select, Contents::Pinned).unwrap();
            assert!(done.bytes >= 12 * MIB as u64 && done.left > 0, "{done:?}");
            assert!(done.kept <= done.bytes);
            assert_held(rig, before - done.bytes);
            allocator.check().unwrap();
            let again = try_suspend(allocator, select, Contents::Drop).unwrap_err();
            assert!(matches!(again, Error::Suspended), "{again:?}");
            let all = try_suspend(allocator, Select::Allocator, Contents::Drop).unwrap_err();
            assert!(matches!(all, Error::Suspended), "{all:?}");
            let guard = allocator.guard(two.blocks[0].ptr(), 512).unwrap_err();
            assert!(matches!(guard, Error::Suspended), "{guard:?}");
            // Both streams get other memory.
            for stream in [&two.own, &two.other] {
                for bytes in [512, MIB, 7 * MIB] {
                    let more = allocator.allocate(bytes, stream).unwrap();
                    rig.stamp(more.ptr(), bytes, 1, stream);
                }
            }
            allocator.empty_cache().unwrap();
            allocator.check().unwrap();
            let back = allocator.resume(select).unwrap();
            assert_eq!((back.bytes, back.kept), (done.bytes, done.kept));
            two.assert_intact(rig);
        }
        two.close(rig);
    });
}

#[test]
fn what_was_freed_meanwhile_is_free_afterwards() {
    packed(|rig| {
        let mut two = two(rig);
        let select = Select::Stream(&two.own);
        let done = try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
        two.blocks.drain(1..).for_each(drop);
        let more = two.allocator.allocate(6 * MIB, &two.own).unwrap();
        rig.stamp(more.ptr(), 6 * MIB, 1, &two.own);
        two.allocator.check().unwrap();
        assert_eq!(two.allocator.resume(select).unwrap().bytes, done.bytes);
        drop(more);
        two.assert_intact(rig);
        two.allocator.empty_cache().unwrap();
        assert!(
            reserved(&two.allocator) <= 24 * MIB as u64,
            "freed memory goes"
        );
        two.close(rig);
    });
}

#[test]
fn the_limit_is_of_memory_that_is_there() {
    packed(|rig| {
        let two = two(rig);
        let select = Select::Stream(&two.own);
        let limit = reserved(&two.allocator);
        two.allocator.set_limit(Some(limit));
        let done = try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
        let bytes = done.bytes as usize / MIB * MIB;
        let more = two.allocator.allocate(bytes, &two.other).unwrap();
        rig.stamp(more.ptr(), bytes, 1, &two.other);
        match two.allocator.resume(select) {
            Err(Error::OutOfMemory(_)) => {}
            other => panic!("{other:?}"),
        }
        two.other.synchronize().unwrap();
        drop(more);
        two.allocator.synchronize().unwrap();
        two.allocator.resume(select).unwrap();
        two.assert_intact(rig);
        two.close(rig);
    });
}

#[test]
fn an_allocator_ends_while_blocks_of_a_stream_are_suspended() {
    packed(|rig| {
        for closed in [false, true] {
            let two = two(rig);
            let select = Select::Stream(&two.own);
            try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
            let live = two.allocator.close().unwrap_err();
            assert!(matches!(live, Error::InUse { .. }), "{live:?}");
            let Two {
                allocator,
                blocks,
                others,
                ..
            } = two;
            if closed {
                drop((blocks, others));
                rig.close(&allocator);
            } else {
                drop(allocator);
                drop((others, blocks));
            }
            assert!(rig.all_given_back());
        }
    });
}

#[test]
fn a_stream_is_not_suspended_while_everything_is() {
    packed(|rig| {
        let two = two(rig);
        let select = Select::Stream(&two.own);
        suspend(&two.allocator, Contents::Pinned);
        let again = try_suspend(&two.allocator, select, Contents::Pinned).unwrap_err();
        assert!(matches!(again, Error::Suspended), "{again:?}");
        resume(&two.allocator);
        assert!(!is_suspended(&two.allocator));
        two.assert_intact(rig);
        two.close(rig);
    });
}

#[test]
fn nobody_guards_what_is_about_to_go() {
    packed(|rig| {
        let two = two(rig);
        let (inside, ptr) = (two.allocator.clone(), two.blocks[0].ptr());
        let hook = SegmentHook::new("test", move |change, _| {
            let guard = inside.guard(ptr, 512);
            match change {
                SegmentChange::Death => {
                    assert!(matches!(guard, Err(Error::Suspended)), "{guard:?}")
                }
                _ => assert!(guard.is_ok(), "{guard:?}"),
            }
        });
        two.allocator.add_segment_hook(hook);
        let select = Select::Stream(&two.own);
        try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
        two.allocator.resume(select).unwrap();
        two.allocator.remove_segment_hook("test");
        two.assert_intact(rig);
        two.close(rig);
    });
}

#[test]
fn an_old_refusal_of_the_driver_keeps_nothing_away() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let mut two = two(rig);
        let (allocator, select) = (&two.allocator, Select::Stream(&two.own));
        let mut gaps = Vec::new();
        for _ in 0..4 {
            two.others
                .push(allocator.allocate(6 * MIB, &two.other).unwrap());
            gaps.push(allocator.allocate(6 * MIB, &two.other).unwrap());
        }
        for block in &two.others {
            rig.stamp(block.ptr(), block.requested(), 8, &two.other);
        }
        two.other.synchronize().unwrap();
        let away = try_suspend(allocator, select, Contents::Pinned).unwrap();
        sim.take_memory(0, rig.context.mem_info().unwrap().free);
        drop(gaps);
        // The driver refuses, and what is scattered serves.
        let retries = allocator.stats().retries;
        let view = allocator.allocate(18 * MIB, &two.other).unwrap();
        assert!(allocator.stats().retries > retries);
        sim.take_memory(0, 0);
        let free = || rig.context.mem_info().unwrap().free;
        let before = free();
        allocator.resume(select).unwrap();
        assert_eq!(before - free(), away.bytes, "what is idle stays");
        drop(view);
        two.assert_intact(rig);
        two.close(rig);
    });
}

#[test]
fn what_is_away_is_not_asked_to_make_room() {
    packed(|rig| {
        let two = two(rig);
        let small: Vec<Block> = (0..256)
            .map(|_| two.allocator.allocate(50_000, &two.other).unwrap())
            .collect();
        let select = Select::Stream(&two.own);
        let limit = reserved(&two.allocator);
        two.allocator.set_limit(Some(limit));
        let done = try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
        drop(small);
        two.other.synchronize().unwrap();
        // Free pages of small blocks are enough for what is missing.
        let bytes = done.bytes as usize + 8 * MIB;
        let more = two.allocator.allocate(bytes, &two.other).unwrap();
        assert!(rig.driver_held().is_none_or(|held| held <= limit));
        two.other.synchronize().unwrap();
        drop(more);
        two.allocator.set_limit(None);
        two.allocator.resume(select).unwrap();
        two.assert_intact(rig);
        two.close(rig);
    });
}

#[test]
fn a_suspension_of_nothing_is_none() {
    packed(|rig| {
        let mut two = two(rig);
        let idle = rig.stream();
        let select = Select::Stream(&idle);
        let done = try_suspend(&two.allocator, select, Contents::Pinned).unwrap();
        assert_eq!((done.bytes, done.handles), (0, 0));
        assert!(!two.allocator.is_suspended(select).unwrap());
        suspend(&two.allocator, Contents::Pinned);
        resume(&two.allocator);
        // Nor does one stand in the way whose blocks were all freed.
        try_suspend(&two.allocator, Select::Stream(&two.own), Contents::Pinned).unwrap();
        two.blocks.clear();
        suspend(&two.allocator, Contents::Pinned);
        assert_held(rig, 0);
        resume(&two.allocator);
        two.assert_intact(rig);
        two.close(rig);
    });
}
