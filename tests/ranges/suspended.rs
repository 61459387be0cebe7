//! Ranges whose memory is suspended.

use super::support::*;
use cualloc::Tag;
use cualloc::allocator::{SegmentChange, SegmentHook};

fn suspend(allocator: &Allocator, select: Select<'_>, keep: impl Into<Keep>) -> Result<u64, Error> {
    // SAFETY: the simulator reports where a test breaks its promise.
    unsafe { allocator.suspend(select, keep) }.map(|done| done.bytes)
}

#[test]
fn committed_memory_keeps_its_addresses_and_its_contents() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let tagged = options().stripes(2, 32 * GRANULE).tag("cache");
        let range = allocator.reserve_range(16 * GRANULE, tagged).unwrap();
        let plain = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        range.commit(granules(2, 5), &stream).unwrap();
        plain.commit(granules(0, 2), &stream).unwrap();
        for (stripe, word) in [(0, 4), (1, 5)] {
            let at = range.base() + (stripe * 32 + 2) * GRANULE;
            rig.stamp(at, 3 * GRANULE as usize, word, &stream);
        }
        stamp(rig, &plain, granules(0, 2), 6, &stream);
        range.decommit(granules(4, 5), &stream).unwrap();
        let keep = Keep::from(Contents::Drop).tag("cache", Contents::Host);
        assert_eq!(
            suspend(&allocator, Select::Tag(Tag::new("cache")), keep).unwrap(),
            6 * GRANULE
        );
        rig.assert_held(2 * GRANULE);
        assert_eq!(allocator.stats().ranges, 2 * GRANULE);
        assert_matches!(range.commit(granules(0, 1), &stream), Err(Error::Suspended));
        assert_matches!(
            range.decommit(granules(2, 3), &stream),
            Err(Error::Suspended)
        );
        assert!(allocator.is_suspended(Select::Range(&range)).unwrap());
        assert!(!allocator.is_suspended(Select::Range(&plain)).unwrap());
        plain.commit(granules(2, 3), &stream).unwrap();
        allocator.check().unwrap();
        let resumed = allocator.resume(Select::Range(&range)).unwrap();
        // What was decommitted does not return.
        assert_eq!((resumed.bytes, states(&range)), (4 * GRANULE, (4, 0)));
        rig.assert_held(7 * GRANULE);
        for (stripe, word) in [(0, 4), (1, 5)] {
            let at = range.base() + (stripe * 32 + 2) * GRANULE;
            assert_eq!(rig.mismatches(at, 2 * GRANULE as usize, word, &stream), 0);
        }
        assert_stamped(rig, &plain, granules(0, 2), 6, &stream);
        allocator.check().unwrap();
    });
}

#[test]
fn a_range_is_suspended_with_its_allocator_and_reports_its_segments() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        allocator.add_segment_hook(SegmentHook::new("seen", move |change, segments| {
            let found = segments
                .iter()
                .map(|segment| (change, segment.address, segment.bytes));
            sink.lock().unwrap().extend(found);
        }));
        range.commit(granules(1, 3), &stream).unwrap();
        assert_eq!(
            seen.lock().unwrap().len(),
            2,
            "commits report their segments"
        );
        range.commit(granules(4, 5), &stream).unwrap();
        range.decommit(granules(4, 5), &stream).unwrap();
        stream.synchronize().unwrap();
        allocator.trim(0).unwrap();
        let fourth = |change| (change, range.base() + 4 * GRANULE, GRANULE);
        let ends = [SegmentChange::Birth, SegmentChange::Death].map(fourth);
        assert_eq!(std::mem::take(&mut *seen.lock().unwrap())[2..], ends);
        let block = allocator.allocate(3 * MIB, &stream).unwrap();
        stamp(rig, &range, granules(1, 3), 6, &stream);
        suspend(&allocator, Select::Allocator, Contents::Pinned).unwrap();
        rig.assert_held(0);
        allocator.resume(Select::Allocator).unwrap();
        assert_stamped(rig, &range, granules(1, 3), 6, &stream);
        let seen = seen.lock().unwrap();
        for index in [1, 2] {
            let of = |change| (change, range.base() + index * GRANULE, GRANULE);
            assert!(seen.contains(&of(SegmentChange::Death)));
            assert!(seen.contains(&of(SegmentChange::Birth)));
        }
        drop(block);
    });
}

#[test]
fn a_suspended_range_can_end() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        range.commit(granules(1, 3), &stream).unwrap();
        suspend(&allocator, Select::Range(&range), Contents::Host).unwrap();
        range.close(&stream).unwrap();
        assert!(!allocator.is_suspended(Select::Allocator).unwrap());
        assert_eq!(allocator.stats().ranges, 0);
        allocator.check().unwrap();
    });
}

#[test]
fn a_resume_without_room_names_what_is_missing() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene_limit(8 * MIB);
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        range.commit(granules(0, 3), &stream).unwrap();
        suspend(&allocator, Select::Range(&range), Contents::Drop).unwrap();
        let block = allocator.allocate(4 * MIB, &stream).unwrap();
        let error = allocator.resume(Select::Range(&range)).unwrap_err();
        assert_eq!(out_of_memory(error).requested, 3 * GRANULE);
        drop(block);
        stream.synchronize().unwrap();
        allocator.resume(Select::Range(&range)).unwrap();
        assert_eq!(states(&range), (3, 0));
    });
}

#[test]
fn another_device_gets_access() {
    only_on(Policy::Packed, SimConfig::with_devices(2, 8 << 30), |rig| {
        let (allocator, [stream]) = rig.scene();
        if rig.driver.device_count().unwrap() < 2 {
            return;
        }
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        range.commit(granules(0, 1), &stream).unwrap();
        allocator.add_peer(1).unwrap();
        range.commit(granules(1, 2), &stream).unwrap();
        let (entered, peer) = (rig.context.enter().unwrap(), rig.driver.device(1).unwrap());
        for index in 0..2 {
            assert!(
                entered
                    .has_access(range.base() + index * GRANULE, &peer)
                    .unwrap()
            );
        }
        drop(entered);
    });
}
