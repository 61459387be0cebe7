//! When memory is taken from the driver rather than stitched, and in what handles.

use super::{PART, TWO, packed, rows, view_of};
use crate::common::prelude::*;
use cualloc::allocator::{Regime, Scarcity};

/// Growth stops at the soft cap while stitching helps: 16 MiB above the peak of what was live, or
/// one part in a hundred of that, where memory is scarce.
#[test]
fn growth_stops_at_the_soft_cap() {
    packed(|rig| {
        for (pieces, bytes, slack) in [(16, 4 * MIB, 16 * MIB), (256, 8 * MIB, 40 * MIB)] {
            let (allocator, a) = (rig.checked_with(dense()), rig.stream());
            let _kept = rows(&allocator, &a, pieces, bytes);
            let peak = 2 * pieces * bytes;
            let reserved = || allocator.stats().all.reserved.current as usize;
            assert_eq!(reserved(), peak);
            // Larger than any piece; the last piece is at the end of the arena, and helps.
            let request = bytes + 8 * MIB;
            let first = allocator.allocate(request, &a).unwrap();
            assert_eq!(view_of(&allocator, &first), None, "there was room to grow");
            assert_eq!(reserved(), peak + 8 * MIB);
            let mut more = Vec::new();
            while reserved() + request <= peak + slack {
                more.push(allocator.allocate(request, &a).unwrap());
                assert_eq!(view_of(&allocator, more.last().unwrap()), None);
            }
            let next = allocator.allocate(request, &a).unwrap();
            assert!(view_of(&allocator, &next).is_some(), "beyond the soft cap");
            assert!(reserved() <= peak + slack);
        }
    });
}

/// The cap follows the peak of live bytes since the last trim.
#[test]
fn a_trim_lowers_the_soft_cap() {
    packed(|rig| {
        let (allocator, a) = (rig.checked_with(dense()), rig.stream());
        drop(allocator.allocate(512 * MIB, &a).unwrap());
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
        let _kept = rows(&allocator, &a, 16, 4 * MIB);
        let block = allocator.allocate(24 * MIB, &a).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        assert_eq!(allocator.stats().all.reserved.current, (128 * MIB) as u64);
    });
}

/// A request does not fail because memory cannot be reused: above the soft cap memory grows if there is nothing to
/// stitch.
#[test]
fn growth_goes_beyond_the_soft_cap_when_nothing_else_helps() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene();
        // Pieces of less than a page of the driver, and requests that are not worth a view.
        let mut kept = rows(&allocator, &a, 64, MIB / 2);
        let peak = allocator.stats().all.reserved.current;
        while allocator.stats().reclaim.grown_hard == 0 {
            kept.push(allocator.allocate(MIB, &a).unwrap());
            assert!(kept.len() < 200, "{:?}", allocator.stats().reclaim);
        }
        assert!(allocator.stats().all.reserved.current > peak + (16 * MIB) as u64);
    });
}

/// A request is served by few handles; near a limit they are small, so that they can be released one by one.
#[test]
fn handles_are_large_unless_a_limit_is_near() {
    packed(|rig| {
        let created = |limit: Option<usize>, bytes: usize| {
            let allocator = match limit {
                Some(limit) => rig.limited(limit),
                None => rig.allocator(),
            };
            let a = rig.stream();
            let before = rig.calls("cuMemCreate");
            let block = allocator.allocate(bytes, &a).unwrap();
            let made = rig.calls("cuMemCreate") - before;
            drop(block);
            rig.close(&allocator);
            made
        };
        assert_eq!(created(None, GIB), 128);
        assert_eq!(created(Some(6 * GIB), 2 * GIB), 256);
        assert_eq!(created(Some(3 * GIB), 2 * GIB), 1024);
        assert_eq!(created(None, 8 * MIB), 4);
    });
}

/// While memory is plentiful it grows by half a handle, within 32 MiB or 3 % of what is live; the rest is free.
#[test]
fn plentiful_memory_grows_ahead_of_requests() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene();
        let mut blocks = vec![allocator.allocate(3 * GIB - 2 * MIB, &a).unwrap()];
        let growths = |rig: &Rig| rig.calls("cuMemSetAccess");
        let before = growths(rig);
        blocks.extend((0..15).map(|_| allocator.allocate(4 * MIB, &a).unwrap()));
        // Half of a handle of 16 MiB serves two requests.
        assert!(growths(rig) - before <= 8, "{}", growths(rig) - before);
        let packing = allocator.stats().packing;
        assert_eq!(packing.regime, Regime::Plentiful);
        assert!(allocator.stats().all.reserved.current <= packing.soft_cap);
        drop((blocks, allocator));
        let allocator = rig.checked_with(dense());
        let regime = allocator.stats().packing.regime;
        assert_eq!(regime, Regime::Scarce(Scarcity::Profile));
    });
}

/// A request that fails does not raise the soft cap for the requests after it.
#[test]
fn a_failed_request_does_not_raise_the_soft_cap() {
    let device = SimConfig::with_devices(1, 4 << 30);
    only_simulated_on(Policy::Packed, device, |rig, _| {
        let (allocator, [a, b]) = rig.scene();
        let _live = [&a, &b].map(|stream| allocator.allocate(GIB, stream).unwrap());
        let error = allocator.allocate(3 * GIB, &a).unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
        // The refusal is over after 512 large requests, and one that needs growth sees it. Lengths that do not recur
        // are no stream cache's.
        for at in 0..600 {
            drop(allocator.allocate(MIB + at * 512, &a).unwrap());
        }
        let _more = allocator.allocate(64 * MIB, &a).unwrap();
        let packing = allocator.stats().packing;
        assert_eq!(packing.regime, Regime::Plentiful);
        assert!(packing.soft_cap < (3 * GIB) as u64, "{}", packing.soft_cap);
    });
}

/// On a full device a stitch that lacks one handle takes it from what the other arena has idle, and
/// no call waits for the device.
#[test]
fn a_stitch_takes_memory_that_the_other_arena_released() {
    let full = SimConfig::with_devices(1, 22 << 20);
    only_simulated_on(Policy::Packed, full, |rig, _| {
        let (allocator, [a]) = rig.scene_with(Config::new().headroom(0));
        let _kept = rows(&allocator, &a, 2, PART);
        drop(allocator.allocate(KIB, &a).unwrap());
        assert_eq!(
            allocator.stats().all.reserved.current,
            (22 * MIB) as u64,
            "all of the device"
        );
        a.synchronize().unwrap();
        let block = allocator.allocate(TWO + 2 * MIB, &a).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        let reclaim = allocator.stats().reclaim;
        assert_eq!((reclaim.stitched, reclaim.released), (1, 1));
        assert_eq!(reclaim.synchronised, 0);
    });
}

/// Adjacent blocks of these sizes in KiB, some of which are freed at the end.
fn row(allocator: &Allocator, stream: &Stream, sizes: &[usize], freed: &[usize]) -> Vec<Block> {
    let allocate = |kib: &usize| allocator.allocate(kib * KIB, stream).unwrap();
    let mut blocks: Vec<Block> = sizes.iter().map(allocate).collect();
    stream.synchronize().unwrap();
    freed.iter().rev().for_each(|at| drop(blocks.remove(*at)));
    blocks
}

/// At the limit the last handle that a stitch lacks is made before it, so that an open tail, the longest
/// that there is, and an open front are parts of the block as well.
#[test]
fn a_stitch_lies_between_open_ends_at_the_limit() {
    packed(|rig| {
        let a = rig.stream();
        let limit = 22 * MIB;
        let allocator = rig.checked_limit(limit);
        // Free are: half a MiB and three whole handles, a tail of 1.5 MiB, a whole handle and half of
        // the next.
        let sizes = [1536, 6656, 2560, 1536, 2048, 3072, 3072];
        let kept = row(&allocator, &a, &sizes, &[1, 3, 5]);
        for (word, block) in (1..).zip(&kept) {
            rig.stamp(block.ptr(), block.requested(), word, &a);
        }
        assert_eq!(
            allocator.stats().all.reserved.current,
            (limit - 2 * MIB) as u64
        );
        let bytes = 12 * MIB + MIB / 2;
        let block = allocator.allocate(bytes, &a).unwrap();
        assert!(view_of(&allocator, &block).is_some());
        rig.stamp(block.ptr(), bytes, 9, &a);
        let stats = allocator.stats();
        assert_eq!(stats.all.reserved.current, limit as u64);
        assert_eq!((stats.reclaim.stitched, stats.reclaim.released), (1, 0));
        for (word, kept) in (1..).zip(&kept) {
            assert_eq!(rig.mismatches(kept.ptr(), kept.requested(), word, &a), 0);
        }
        assert_eq!(rig.mismatches(block.ptr(), bytes, 9, &a), 0);
    });
}

/// Near the limit what is too small for a stitch leaves handles whole for others, and lies where the memory is in
/// pieces already; with room left, and of a lone stream, it lies at the best fit.
#[test]
fn small_requests_spare_whole_handles_near_the_limit() {
    packed(|rig| {
        for (limit, alone, align) in [
            (14 * MIB, false, 1),
            (GIB, false, 1),
            (14 * MIB, true, 1),
            (14 * MIB, true, 1024),
        ] {
            let (allocator, [a, b]) = rig.scene_limit(limit);
            let other = if alone { &a } else { &b };
            let _other = allocator.allocate(100, other).unwrap();
            // Free are: one whole handle, and 1.5 MiB on both sides of a border.
            let sizes = [2048, 2048, 2560, 3072, 2560];
            let kept = row(&allocator, &a, &sizes, &[1, 3]);
            let request = Request::new(MIB).align(align);
            let block = allocator.allocate_with(request, &a).unwrap();
            let spared = limit < GIB && !alone;
            let at = if spared { 6 * MIB + MIB / 2 } else { 2 * MIB };
            assert_eq!(block.ptr() - kept[0].ptr(), at as u64);
        }
    });
}

/// The same if the tail is pending on another stream: the stitch is ordered behind that stream's work, and the host
/// does not wait.
#[test]
fn r61_a_stitch_at_the_limit_is_ordered_behind_waits() {
    packed(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(24 * MIB);
        let _other = allocator.allocate(100, &b).unwrap();
        // The tail is the fourth.
        let streams = [&a, &a, &a, &b, &a, &a, &a];
        let mut blocks: Vec<Block> = [1536, 6656, 2560, 1536, 2048, 3072, 3072]
            .into_iter()
            .zip(streams)
            .map(|(kib, stream)| allocator.allocate(kib * KIB, stream).unwrap())
            .collect();
        a.synchronize().unwrap();
        b.synchronize().unwrap();
        drop((blocks.remove(5), blocks.remove(1)));
        allocator.synchronize().unwrap();
        let hold = rig.hold(&b);
        let tail = blocks.remove(2);
        rig.stamp(tail.ptr(), tail.requested(), 3, &b);
        drop(tail);
        let before = allocator.stats();
        let block = allocator.allocate(12 * MIB + MIB / 2, &a).unwrap();
        let after = allocator.stats();
        assert!(view_of(&allocator, &block).is_some());
        assert_eq!(after.reclaim.host_waits, before.reclaim.host_waits);
        assert_eq!(after.stream_waits, before.stream_waits + 1);
        hold.release();
    });
}

/// The driver refuses the new memory of a stitch; releases then make room for it.
#[test]
fn a_refused_stitch_is_tried_again_after_a_release() {
    const PIECES: usize = 8;
    // Over five of the free parts, the first of them whole; the last three have this much of it.
    const VIEW: usize = 21 * MIB;
    const FRONT: usize = 9 * MIB;
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (allocator, [a]) = rig.scene_with(Config::new().headroom(0));
        let _kept = rows(&allocator, &a, PIECES, PART);
        allocator.trim(u64::MAX).unwrap();
        drop(allocator.allocate(VIEW, &a).unwrap());
        let cache = allocator.allocate(FRONT, &a).unwrap();
        assert!(view_of(&allocator, &cache).is_some());
        let mut parts: Vec<Block> = (0..PIECES - 2)
            .map(|_| allocator.allocate(PART, &a).unwrap())
            .collect();
        parts.sort_by_key(Block::ptr);
        drop(parts.drain(..3));
        // One handle more of small blocks than is needed.
        let mut small: Vec<Block> = allocator.allocate_blocks(33, 64 * KIB, &a);
        drop(small.drain(1..));
        allocator.trim(u64::MAX).unwrap();
        allocator.synchronize().unwrap();
        let held = allocator.stats().all.reserved.current;
        sim.take_memory(0, (8 * GIB - 3 * MIB) as u64 - held);
        let block = allocator.allocate(VIEW - FRONT + 4 * MIB, &a).unwrap();
        assert_eq!(view_of(&allocator, &block), view_of(&allocator, &cache));
        assert_eq!(
            allocator.stats().all.reserved.current,
            held + (2 * MIB) as u64
        );
        allocator.check().unwrap();
        sim.take_memory(0, 0);
    });
}
