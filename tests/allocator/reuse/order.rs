//! Memory that another stream may still use, and when it becomes available.

use super::waits;
use crate::common::prelude::*;

/// S1.40, S1.46: memory that another stream may still use is not handed out. R29: a use recorded through a pointer into
/// a block is a use of the block.
#[test]
fn s1_40_s1_46_r29_recorded_block_is_not_reused_while_the_stream_runs() {
    each(|rig| {
        for (bytes, inside) in [
            (4 * KIB, 0),
            (4 * KIB, 1234),
            (4 * MIB, 0),
            (12 * MIB, 7 * MIB as u64 + 3),
        ] {
            let (allocator, [a, b]) = rig.scene();
            let block = allocator.allocate(bytes, &a).unwrap();
            let ptr = block.ptr();
            rig.stamp(ptr, bytes, 1, &a);
            a.synchronize().unwrap();
            let hold = rig.hold(&b);
            match inside {
                0 => block.record_stream(&b).unwrap(),
                _ => allocator.raw_record_stream(ptr + inside, b.raw()).unwrap(),
            }
            rig.stamp(ptr, bytes, 2, &b);
            drop(block);
            let other = allocator.allocate(bytes, &a).unwrap();
            rig.stamp(other.ptr(), bytes, 3, &a);
            if other.ptr() == ptr {
                assert!(!a.is_complete().unwrap(), "the same address without a wait");
            }
            hold.release();
            assert_eq!(rig.mismatches(other.ptr(), bytes, 3, &a), 0);
        }
    });
}

/// R5: uses on a side stream do not accumulate until memory runs out.
#[test]
fn r5_side_stream_uses_never_run_out() {
    each(|rig| {
        const BLOCK: usize = 160 * MIB;
        let (allocator, [main, side]) = rig.scene_limit(GIB);
        rig.set_mode(Mode::Lag(9));
        for round in 0..100 {
            let block = allocator.allocate(BLOCK, &main).unwrap();
            rig.stamp(block.ptr(), BLOCK, round, &main);
            let event = rig.context.enter().unwrap().create_event().unwrap();
            event.record(&main).unwrap();
            side.wait(&event).unwrap();
            rig.stamp(block.ptr(), BLOCK, round + 1, &side);
            block.record_stream(&side).unwrap();
            drop(block);
            rig.advance_row();
        }
        assert_eq!(allocator.stats().ooms, 0);
    });
}

/// R6: a request that one freed block satisfies waits for the uses of that block only.
#[test]
fn r6_waits_for_one_block_not_for_all() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a]) = rig.scene_limit(3 * BLOCK);
        let users: [Stream; 3] = rig.streams();
        let blocks = users
            .each_ref()
            .map(|_| allocator.allocate(BLOCK, &a).unwrap());
        let mut holds = Vec::new();
        for (user, block) in users.iter().zip(&blocks) {
            holds.push(rig.hold(user));
            rig.stamp(block.ptr(), BLOCK, 7, user);
            block.record_stream(user).unwrap();
        }
        drop(blocks);
        let block = allocator.allocate(BLOCK, &a).unwrap();
        rig.stamp(block.ptr(), BLOCK, 8, &a);
        assert!(!a.is_complete().unwrap(), "the block needs a wait");
        holds.remove(0).release();
        rig.settle(&users[0]);
        rig.settle(&a);
        assert!(!users[1].is_complete().unwrap() && !users[2].is_complete().unwrap());
        assert_eq!(allocator.stats().reclaim.host_waits, 0);
        drop(holds);
    });
}

/// R6: of two blocks that satisfy a request the one whose work was submitted first is waited for, wherever it lies.
#[test]
fn r6_waits_for_the_oldest_work() {
    only_simulated(Policy::Packed, |rig, sim| {
        const BLOCK: usize = 12 * MIB;
        for order in [[0, 1], [1, 0]] {
            let (allocator, [low, high, own]) = rig.scene_limit(3 * BLOCK);
            sim.set_mode(Mode::Manual);
            let [first, _wall, last] =
                [&low, &own, &high].map(|user| allocator.allocate(BLOCK, user).unwrap());
            let mut blocks = [(Some(first), &low), (Some(last), &high)];
            let places = blocks
                .each_ref()
                .map(|(block, _)| block.as_ref().map(Block::ptr));
            for at in order {
                let (block, user) = &mut blocks[at];
                rig.stamp(places[at].unwrap(), BLOCK, 1, user);
                *block = None;
                allocator.raw_mark(user.raw()).unwrap();
            }
            let next = allocator.allocate(BLOCK, &own).unwrap();
            assert_eq!(Some(next.ptr()), places[order[0]]);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
        }
    });
}

/// R21: memory that a request merged out of pending pieces keeps every piece's uses.
#[test]
fn r21_merged_memory_keeps_the_uses_of_its_parts() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a, b, c]) = rig.scene_limit(2 * BLOCK);
        let x = allocator.allocate(BLOCK, &a).unwrap();
        let y = allocator.allocate(BLOCK, &b).unwrap();
        let hold = rig.busy(&a);
        rig.stamp(x.ptr(), BLOCK, 1, &a);
        drop((x, y));
        // Packed: only both together hold this. Classic segments do not merge.
        let big = if rig.packed() { 2 * BLOCK } else { BLOCK };
        let merged = allocator.allocate(big, &b).unwrap();
        drop(merged);
        let mine: Vec<_> = allocator.allocate_blocks(2, BLOCK, &c);
        for block in &mine {
            rig.stamp(block.ptr(), BLOCK, 3, &c);
        }
        hold.release();
        a.synchronize().unwrap();
        for block in &mine {
            assert_eq!(rig.mismatches(block.ptr(), BLOCK, 3, &c), 0);
        }
    });
}

/// R22: reusing complete memory adds no wait.
#[test]
fn r22_complete_blocks_are_taken_without_a_wait() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(512, &a).unwrap());
        let block = allocator.allocate(BLOCK, &b).unwrap();
        let ptr = block.ptr();
        rig.stamp(ptr, BLOCK, 1, &b);
        drop(block);
        b.synchronize().unwrap();
        let before = waits(rig);
        let taken = allocator.allocate(BLOCK, &a).unwrap();
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(waits(rig), before);
        assert_eq!(allocator.stats().stream_waits, 0);
        rig.stamp(ptr, BLOCK, 2, &a);
    });
}

/// R28: memory that is complete on one stream is reused although an older use by another stream is not.
#[test]
fn r28_slow_stream_does_not_delay_others() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [slow, quick, c]) = rig.scene_limit(4 * BLOCK);
        let [s1, s2] = [0, 1].map(|_| allocator.allocate(BLOCK, &slow).unwrap());
        let [q1, q2] = [0, 1].map(|_| allocator.allocate(BLOCK, &quick).unwrap());
        let mut expected = [q1.ptr(), q2.ptr()];
        expected.sort_unstable();
        let hold = rig.hold(&slow);
        for block in [&s1, &s2] {
            rig.stamp(block.ptr(), BLOCK, 1, &slow);
        }
        drop((s1, s2));
        for block in [&q1, &q2] {
            rig.stamp(block.ptr(), BLOCK, 2, &quick);
        }
        drop((q1, q2));
        rig.settle(&quick);
        let before = waits(rig);
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &c).unwrap());
        let mut found = blocks.each_ref().map(|b| b.ptr());
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(waits(rig), before);
        assert_eq!(allocator.stats().reclaim.host_waits, 0);
        rig.stamp(found[0], BLOCK, 3, &c);
        rig.settle(&c);
        hold.release();
    });
}

/// R30: a precise use ends where it was recorded, not at the free; and the peak is the same in each round.
#[test]
fn r30_precise_use_ends_at_its_record() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let mut peaks = Vec::new();
        for _ in 0..2 {
            let (allocator, [a, b]) = rig.scene();
            let mut places = Vec::new();
            for round in 0..5 {
                let block = allocator.allocate(BLOCK, &a).unwrap();
                places.push(block.ptr());
                a.synchronize().unwrap();
                rig.stamp(block.ptr(), BLOCK, round, &b);
                block.record_use(&b).unwrap();
                b.synchronize().unwrap();
                // Work of the stream that has nothing to do with the block.
                let hold = rig.hold(&b);
                drop(block);
                let before = waits(rig);
                let again = allocator.allocate(BLOCK, &a).unwrap();
                assert_eq!(again.ptr(), places[0], "round {round}");
                assert_eq!(waits(rig), before);
                rig.stamp(again.ptr(), BLOCK, 9, &a);
                rig.settle(&a);
                hold.release();
                b.synchronize().unwrap();
            }
            peaks.push((allocator.stats().all.reserved.peak, places.len()));
        }
        assert_eq!(peaks[0], peaks[1]);
        assert_eq!(peaks[0].0, BLOCK as u64);
    });
}

/// R37: a writer waits for both of two concurrent readers.
#[test]
fn r37_writer_waits_for_all_readers() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        for first in [0, 1] {
            let (allocator, [a]) = rig.scene_limit(BLOCK);
            let readers: [Stream; 2] = rig.streams();
            let block = allocator.allocate(BLOCK, &a).unwrap();
            let mut holds = readers.each_ref().map(|r| Some(rig.hold(r)));
            for reader in &readers {
                rig.stamp(block.ptr(), 512, 1, reader);
                // Both only "read": order among them is the test's own affair.
                if let Some(sim) = rig.maybe_sim() {
                    sim.take_reports();
                }
                block.record_stream(reader).unwrap();
            }
            drop(block);
            let writer = allocator.allocate(BLOCK, &a).unwrap();
            rig.stamp(writer.ptr(), BLOCK, 2, &a);
            assert!(!a.is_complete().unwrap());
            holds[first].take().unwrap().release();
            if let Some(sim) = rig.maybe_sim() {
                // On a GPU the second host function may hold up the first.
                rig.settle(&readers[first]);
                sim.complete_stream(a.id().unwrap(), usize::MAX);
            }
            assert!(!a.is_complete().unwrap(), "one reader still runs");
            drop(holds);
            assert_eq!(rig.mismatches(writer.ptr(), BLOCK, 2, &a), 0);
            if let Some(sim) = rig.maybe_sim() {
                let writer = format!("stream {} ", a.id().unwrap());
                let mut races = sim.take_reports().into_iter();
                assert!(!races.any(|report| report.to_string().contains(&writer)));
            }
        }
    });
}
