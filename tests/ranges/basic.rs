//! Reserving, committing, decommitting, and the figures about it.

use super::support::*;
use cualloc::error::InvalidArgument;

#[test]
fn a_range_reserves_addresses_only() {
    packed(|rig| {
        let (allocator, []) = rig.scene();
        let range = allocator.reserve_range(3 << 30, options()).unwrap();
        rig.assert_held(0);
        let stats = range.stats().unwrap();
        assert_eq!(
            (stats.reserved, stats.committed, stats.leaving),
            (3 << 30, 0, 0)
        );
        assert_eq!((stats.granule, range.bytes()), (GRANULE, 3 << 30));
        assert_eq!(range.committed_map().unwrap(), vec![0; 24]);
        assert_eq!(allocator.stats().ranges, 0);
    });
}

#[test]
fn overlapping_granules_are_committed_and_inner_ones_decommitted() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator
            .reserve_range(100 * GRANULE - 5, options())
            .unwrap();
        assert_eq!(range.bytes(), 100 * GRANULE);
        range.commit(GRANULE - 1..3 * GRANULE + 1, &stream).unwrap();
        assert_eq!(range.committed_map().unwrap(), [0b1111, 0]);
        rig.assert_held(4 * GRANULE);
        stamp(rig, &range, granules(0, 4), 7, &stream);
        // Idempotent, and what is there stays.
        range.commit(granules(2, 5), &stream).unwrap();
        assert_eq!(states(&range), (5, 0));
        assert_stamped(rig, &range, granules(0, 4), 7, &stream);
        range.decommit(1..3 * GRANULE - 1, &stream).unwrap();
        assert_eq!(range.committed_map().unwrap(), [0b11101, 0]);
        assert_eq!(states(&range), (4, 1));
        range.decommit(0..0, &stream).unwrap();
        range.commit(7..7, &stream).unwrap();
        assert_eq!(allocator.stats().ranges, 5 * GRANULE);
        assert_eq!(allocator.stats().ranges_leaving, GRANULE);
        allocator.check().unwrap();
        range.close(&stream).unwrap();
    });
}

#[test]
fn stripes_are_committed_together() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let layers = options().granule(2 * GRANULE).stripes(3, 16 * GRANULE);
        let range = allocator.reserve_range(8 * GRANULE, layers).unwrap();
        range.commit(0..1, &stream).unwrap();
        range.commit(4 * GRANULE..5 * GRANULE, &stream).unwrap();
        assert_eq!(range.committed_map().unwrap(), [0b101]);
        let stats = range.stats().unwrap();
        assert_eq!(stats.reserved, 24 * GRANULE);
        assert_eq!(
            (stats.committed, stats.granule),
            (12 * GRANULE, 2 * GRANULE)
        );
        for layer in 0..3 {
            let at = range.base() + layer * 16 * GRANULE;
            rig.stamp(at, 2 * GRANULE as usize, 1, &stream);
            rig.stamp(at + 4 * GRANULE, 2 * GRANULE as usize, 1, &stream);
        }
        range.decommit(0..range.bytes(), &stream).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(allocator.trim(0).unwrap().released, 12 * GRANULE);
        allocator.check().unwrap();
        rig.assert_held(0);
    });
}

#[test]
fn arguments_are_checked() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let reserve = |bytes, options| allocator.reserve_range(bytes, options).map(drop);
        for granule in [1 << 20, 3 << 20, 128 << 20] {
            let refused = reserve(GRANULE, options().granule(granule));
            let setting = InvalidArgument::Setting {
                what: "granule",
                value: granule,
            };
            assert_matches!(refused, Err(Error::Invalid(found)) if found == setting);
        }
        assert_matches!(
            reserve(0, options()),
            Err(Error::Invalid(InvalidArgument::Size { .. }))
        );
        for (count, stride) in [(2, GRANULE), (2, 4 * GRANULE + 1), (1 << 40, 4 * GRANULE)] {
            let refused = reserve(4 * GRANULE, options().stripes(count, stride));
            assert_matches!(
                refused,
                Err(Error::Invalid(InvalidArgument::Setting { .. }))
            );
        }
        let range = allocator.reserve_range(4 * GRANULE, options()).unwrap();
        let beyond = 0..4 * GRANULE + 1;
        let outside =
            |done| assert_matches!(done, Err(Error::Invalid(InvalidArgument::Range { .. })));
        outside(range.commit(beyond.clone(), &stream));
        outside(range.decommit(beyond.clone(), &stream));
        outside(range.record(beyond, &stream));
        #[allow(clippy::reversed_empty_ranges)]
        outside(range.commit(2..1, &stream));
    });
}

#[test]
fn addresses_that_the_driver_refuses_are_named() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (allocator, []) = rig.scene();
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        sim.fail(
            FailPlan::call("cuMemAddressReserve", code)
                .unwrap()
                .times(10),
        );
        let error = allocator.reserve_range(1 << 44, options()).unwrap_err();
        sim.clear_failures();
        assert_eq!(out_of_memory(error).requested, 1 << 44);
    });
}

#[test]
fn the_classic_policy_has_no_ranges() {
    only(Policy::Classic, |rig| {
        let (allocator, []) = rig.scene();
        let refused = allocator.reserve_range(GRANULE, options());
        assert_matches!(refused, Err(Error::NotSupported { .. }));
    });
}

#[test]
fn a_range_keeps_its_allocator_open() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 2), &stream).unwrap();
        let refused = allocator.close();
        assert_matches!(
            refused,
            Err(Error::InUse { what: "range", count: 1, bytes }) if bytes == 2 * GRANULE
        );
        range.commit(granules(0, 3), &stream).unwrap();
        drop(range);
        assert_eq!(allocator.stats().ranges_leaving, 3 * GRANULE);
    });
}

#[test]
fn a_range_that_ends_frees_its_addresses_after_its_last_work() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (allocator, [stream, other]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 4), &stream).unwrap();
        range.record(granules(1, 2), &other).unwrap();
        let hold = rig.hold(&other);
        stamp(rig, &range, granules(1, 2), 3, &other);
        drop(range);
        rig.settle(&stream);
        allocator.trim(0).unwrap();
        rig.assert_held(GRANULE);
        hold.release();
        rig.settle(&other);
        allocator.trim(0).unwrap();
        rig.assert_held(0);
        assert_eq!(sim.leaks().mappings, 0);
    });
}

#[test]
fn memory_of_ranges_counts_towards_the_limit_and_is_reported() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene_limit(20 * MIB);
        let tagged = options().tag("cache");
        let range = allocator.reserve_range(64 * GRANULE, tagged).unwrap();
        range.commit(granules(0, 6), &stream).unwrap();
        let error = range.commit(granules(0, 12), &stream).unwrap_err();
        let report = out_of_memory(error);
        assert_eq!(
            (report.requested, report.missing()),
            (6 * GRANULE, 2 * GRANULE)
        );
        assert_eq!(report.ranges, 6 * GRANULE);
        let cache = &report.holders[0];
        assert_eq!(cache.bytes, 6 * GRANULE);
        assert_eq!(cache.by, cualloc::error::HeldBy::Tag("cache".to_owned()));
        assert!(report.report().contains("ranges"), "{}", report.report());
        assert_eq!(states(&range), (6, 0));
        let error = allocator.allocate(9 * MIB, &stream).map(drop).unwrap_err();
        assert_eq!(out_of_memory(error).ranges, 6 * GRANULE);
        let block = allocator.allocate(7 * MIB, &stream).unwrap();
        drop(block);
        range.commit(granules(0, 10), &stream).unwrap();
        allocator.check().unwrap();
    });
}

#[test]
fn a_capturing_stream_commits_complete_memory_and_decommits_none() {
    packed(|rig| {
        let (allocator, [stream, other]) = rig.scene();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 3), &other).unwrap();
        let hold = rig.hold(&other);
        stamp(rig, &range, granules(0, 3), 3, &other);
        range.decommit(granules(2, 3), &other).unwrap();
        let capturing = Capturing::begin(&stream, MODE);
        range.commit(granules(0, 2), &stream).unwrap();
        range.commit(granules(4, 6), &stream).unwrap();
        assert_matches!(
            range.commit(granules(1, 3), &stream),
            Err(Error::OutOfMemory(_))
        );
        let refused = range.decommit(granules(4, 6), &stream);
        assert_matches!(refused, Err(Error::Capturing { .. }));
        stamp(rig, &range, granules(4, 6), 9, &stream);
        let graph = capturing.end().unwrap();
        hold.release();
        rig.settle(&other);
        let mut exec = graph.instantiate().unwrap();
        // SAFETY: the simulator reports what is wrong with the memory.
        unsafe { exec.launch(&stream) }.unwrap();
        assert_stamped(rig, &range, granules(4, 6), 9, &stream);
        assert_eq!(states(&range), (4, 1));
    });
}

#[test]
fn raw_streams_serve_too() {
    packed(|rig| {
        let (allocator, []) = rig.scene();
        let (stream, other) = (RawStream::new(rig), RawStream::new(rig));
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        // SAFETY: the streams are alive until they are retired.
        unsafe {
            range.commit_raw(granules(0, 2), stream.raw()).unwrap();
            range.record_raw(granules(0, 1), other.raw()).unwrap();
            range.decommit_raw(granules(0, 2), stream.raw()).unwrap();
            range.close_raw(stream.raw()).unwrap();
        }
        drop(range);
        stream.retire(&allocator);
        other.retire(&allocator);
    });
}

#[test]
fn the_debug_mode_unmaps_inside_the_decommit() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let modes = DebugModes::new().quarantine(1 << 20);
        let allocator = rig.allocator_with(Config::new().debug(modes));
        let stream = rig.stream();
        let range = allocator.reserve_range(64 * GRANULE, options()).unwrap();
        range.commit(granules(0, 2), &stream).unwrap();
        stamp(rig, &range, granules(0, 2), 3, &stream);
        range.decommit(granules(0, 1), &stream).unwrap();
        assert_eq!(states(&range), (1, 0));
        rig.assert_held(GRANULE);
        stamp(rig, &range, granules(0, 1), 3, &stream);
        assert!(stream.synchronize().is_err(), "the use is a fault");
        drop((range, allocator));
        assert!(!sim.take_reports().is_empty());
    });
}
