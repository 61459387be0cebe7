//! Driver calls that fail: a commit changes nothing then, and no memory is lost or used twice.

use super::support::*;

/// The calls of a commit that takes memory of every kind.
const CALLS: [&str; 5] = [
    "cuMemUnmap",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemGetInfo_v2",
];

/// A commit from leaving granules of another range, idle handles and new ones, in two runs of two stripes.
fn commit_with(rig: &Rig, sim: &Simulator, plan: FailPlan) -> bool {
    eprintln!("{plan:?}");
    let (allocator, [stream]) = rig.scene();
    let layers = options().stripes(2, 16 * GRANULE);
    let range = allocator.reserve_range(8 * GRANULE, layers).unwrap();
    let other = allocator.reserve_range(8 * GRANULE, layers).unwrap();
    range.commit(granules(2, 3), &stream).unwrap();
    rig.stamp(range.base() + 2 * GRANULE, GRANULE as usize, 4, &stream);
    let block = allocator.allocate(2 * MIB, &stream).unwrap();
    other.commit(granules(0, 2), &stream).unwrap();
    other.decommit(granules(0, 1), &stream).unwrap();
    drop(block);
    stream.synchronize().unwrap();
    sim.fail(plan);
    let done = range.commit(granules(1, 5), &stream);
    sim.clear_failures();
    allocator.check().unwrap();
    let committed = range.stats().unwrap().committed;
    match &done {
        Ok(()) => assert_eq!(committed, 8 * GRANULE),
        Err(_) => assert_eq!(
            (committed, range.committed_map().unwrap()),
            (2 * GRANULE, vec![0b100])
        ),
    }
    range.commit(granules(0, 6), &stream).unwrap();
    let ptr = range.base() + 2 * GRANULE;
    assert_eq!(rig.mismatches(ptr, GRANULE as usize, 4, &stream), 0);
    for stripe in [0, 16] {
        rig.stamp(
            range.base() + stripe * GRANULE,
            6 * GRANULE as usize,
            9,
            &stream,
        );
        rig.stamp(
            other.base() + (stripe + 1) * GRANULE,
            GRANULE as usize,
            9,
            &stream,
        );
    }
    let block = allocator.allocate(9 * MIB, &stream).unwrap();
    rig.stamp(block.ptr(), 9 * MIB, 9, &stream);
    stream.synchronize().unwrap();
    allocator.check().unwrap();
    done.is_err()
}

#[test]
fn a_failed_commit_changes_nothing() {
    only_simulated(Policy::Packed, |rig, sim| {
        let mut failed = 0;
        for call in CALLS {
            for code in [
                CUresult::CUDA_ERROR_OUT_OF_MEMORY,
                CUresult::CUDA_ERROR_NOT_PERMITTED,
            ] {
                for (nth, executed) in (1..=6).flat_map(|nth| [(nth, false), (nth, true)]) {
                    let plan = FailPlan::call(call, code).unwrap().nth(nth);
                    // Memory that the driver created and reported as refused would be lost.
                    let plan = match executed && call != "cuMemCreate" {
                        true => plan.executed(),
                        false => plan,
                    };
                    failed += u64::from(commit_with(rig, sim, plan));
                    assert_eq!(sim.reports(), [], "{call} {code:?} {nth} {executed}");
                }
            }
        }
        assert!(failed > 20, "{failed}");
    });
}

#[test]
fn a_mapping_that_could_not_be_removed_is_removed_later() {
    only_simulated(Policy::Packed, |rig, sim| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(8 * GRANULE, options()).unwrap();
        let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
        sim.fail(FailPlan::call("cuMemSetAccess", code).unwrap());
        sim.fail(FailPlan::call("cuMemUnmap", code).unwrap().times(2));
        range.commit(granules(0, 2), &stream).unwrap_err();
        sim.clear_failures();
        allocator.check().unwrap();
        rig.assert_held(2 * GRANULE);
        assert_eq!(allocator.stats().ranges, 2 * GRANULE);
        range.commit(granules(1, 3), &stream).unwrap();
        rig.assert_held(3 * GRANULE);
        allocator.trim(0).unwrap();
        rig.assert_held(2 * GRANULE);
        range.commit(granules(0, 3), &stream).unwrap();
        assert_eq!(states(&range), (3, 0));
    });
}

#[test]
fn a_lost_context_loses_the_range() {
    only_simulated(Policy::Packed, |rig, sim| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let range = allocator.reserve_range(8 * GRANULE, options()).unwrap();
        range.commit(granules(0, 2), &stream).unwrap();
        let code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        sim.fail(FailPlan::call("cuMemMap", code).unwrap());
        assert_matches!(
            range.commit(granules(2, 4), &stream),
            Err(Error::ContextLost(_))
        );
        assert_matches!(
            range.commit(granules(2, 4), &stream),
            Err(Error::ContextLost(_))
        );
        assert_matches!(range.stats(), Err(Error::ContextLost(_)));
        drop((range, allocator));
        sim.take_reports();
    });
}
