//! Blocks of one stream, while the memory of others serves on.

use super::support::*;

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
        let (allocator, before) = (&two.allocator, held(rig));
        let select = Select::Stream(&two.own);
        for _ in 0..3 {
            let done = try_suspend(allocator, select, Contents::Pinned).unwrap();
            assert!(done.bytes >= 12 * MIB as u64 && done.left > 0, "{done:?}");
            assert!(done.kept <= done.bytes);
            assert_eq!(held(rig), before - done.bytes);
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
        assert!(held(rig) <= 24 * MIB as u64, "freed memory goes");
        two.close(rig);
    });
}

#[test]
fn the_limit_is_of_memory_that_is_there() {
    packed(|rig| {
        let two = two(rig);
        let select = Select::Stream(&two.own);
        let limit = held(rig);
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
