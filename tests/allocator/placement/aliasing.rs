//! Before the first view, a test determines if writes through one address are visible through another.

use super::*;
use cualloc::allocator::SelfTest;

/// A request that only a view, or new memory, can serve.
fn stitch(allocator: &Allocator, stream: &Stream) -> (Vec<Block>, Block) {
    let kept = scatter(allocator, stream, 20);
    let block = allocator.allocate(40 * MIB, stream).unwrap();
    (kept, block)
}

fn tested(allocator: &Allocator) -> SelfTest {
    allocator.stats().packing.self_test
}

/// A device on which writes through one address are not visible through another.
fn broken() -> SimConfig {
    SimConfig {
        broken_aliasing: true,
        ..SimConfig::with_devices(1, 8 << 30)
    }
}

#[test]
fn the_first_view_is_tested_once_for_all_allocators() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let kept = scatter(&allocator, &stream, 20);
        assert_eq!(
            (tested(&allocator), rig.calls("cuLaunchKernel")),
            (SelfTest::NotRun, 0)
        );
        let peak = allocator.stats().all.reserved.peak;
        let block = allocator.allocate(40 * MIB, &stream).unwrap();
        assert_eq!(tested(&allocator), SelfTest::Passed);
        let stats = allocator.stats();
        assert_eq!((stats.packing.views, stats.reclaim.stitched), (1, 1));
        assert_eq!(stats.all.reserved.current, peak);
        let launches = rig.calls("cuLaunchKernel");
        assert!(launches > 0 || rig.maybe_sim().is_none());
        allocator.check().unwrap();
        let second = rig.allocator_with(small_handles());
        assert_eq!(tested(&second), SelfTest::Passed);
        let more = stitch(&second, &stream);
        assert_eq!(rig.calls("cuLaunchKernel"), launches);
        drop((more, kept, block));
        second.close().unwrap();
    });
}

/// No work of the test is on the user's stream, and the test does not wait for work there, as loading kernels might.
#[test]
fn the_test_does_not_wait_for_running_work() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles());
        let _kept = scatter(&allocator, &stream, 20);
        let hold = rig.hold(&stream);
        let _block = allocator.allocate(40 * MIB, &stream).unwrap();
        let packing = allocator.stats().packing;
        assert_eq!((packing.self_test, packing.views), (SelfTest::Passed, 1));
        assert_eq!(rig.calls("cuModuleLoadData"), 0);
        hold.release();
    });
}

/// If the device is kept busy, each wait takes long, so all words that were read are checked together at the end.
#[test]
fn the_test_waits_for_its_work_once() {
    only(Policy::Packed, |rig| {
        let allocator = rig.checked();
        let names = ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"];
        let before = names.map(|name| rig.calls(name));
        assert_eq!(allocator.test_views().unwrap(), SelfTest::Passed);
        let [copies, waits] = names.map(|name| rig.calls(name));
        // Copied and waited for, and the stream once more before its memory goes.
        assert!(
            copies - before[0] <= 1 && waits - before[1] <= 2,
            "{copies} {waits}"
        );
    });
}

#[test]
fn a_device_that_fails_the_test_is_used_without_views() {
    only_simulated_on(Policy::Packed, broken(), |rig, _| {
        let allocator = rig.allocator_with(small_handles());
        let stream = rig.stream();
        let (kept, block) = stitch(&allocator, &stream);
        assert_eq!(tested(&allocator), SelfTest::Failed);
        let stats = allocator.stats();
        assert_eq!((stats.packing.views, stats.reclaim.stitched), (0, 0));
        assert_eq!(stats.all.reserved.current, 122 * MIB as u64);
        rig.stamp(block.ptr(), 40 * MIB, 5, &stream);
        assert_eq!(rig.mismatches(block.ptr(), 40 * MIB, 5, &stream), 0);
        drop((kept, block));
        rig.close(&allocator);
        // It is known from then on.
        let second = rig.allocator_with(small_handles());
        assert_eq!(second.test_views().unwrap(), SelfTest::Failed);
        drop(second);
    });
}

#[test]
fn the_test_can_be_switched_off() {
    only_on(Policy::Packed, broken(), |rig| {
        let (allocator, [stream]) = rig.scene_with(small_handles().self_test(false));
        assert_eq!(allocator.test_views().unwrap(), SelfTest::Off);
        let (_kept, _block) = stitch(&allocator, &stream);
        let packing = allocator.stats().packing;
        assert_eq!((packing.self_test, packing.views), (SelfTest::Off, 1));
        assert_eq!(rig.calls("cuLaunchKernel"), 0);
    });
}

#[test]
fn without_memory_for_the_test_views_are_built_anyway() {
    only(Policy::Packed, |rig| {
        let limit = 82 * MIB as u64;
        let (allocator, [stream]) = rig.scene_with(small_handles().limit(Some(limit)));
        let (_kept, _block) = stitch(&allocator, &stream);
        let stats = allocator.stats();
        assert_eq!(
            (stats.packing.self_test, stats.packing.views),
            (SelfTest::NotRun, 1)
        );
        assert_eq!(stats.all.reserved.peak, limit);
    });
}

/// A copy whose end cannot be observed may write later, when variables of another call are at the same place on the
/// stack.
#[test]
fn r2_the_test_copies_to_memory_that_it_may_leak() {
    only_simulated(Policy::Packed, |rig, sim| {
        sim.record_log(true);
        assert_eq!(rig.checked().test_views().unwrap(), SelfTest::Passed);
        let here = 0_u8;
        let top = (&raw const here).addr();
        // As deep as the test's calls go at most.
        let stack = top - 256 * KIB..top + KIB;
        let log = sim.take_log();
        let copies = log.iter().filter(|e| e.call == "cuMemcpyDtoHAsync_v2");
        let targets = copies.map(|copy| {
            let (_, target) = copy.arguments.split_once("dst_host=0x").unwrap();
            usize::from_str_radix(target.split(',').next().unwrap(), 16).unwrap()
        });
        let targets: Vec<usize> = targets.collect();
        assert!(!targets.is_empty());
        assert!(targets.iter().all(|target| !stack.contains(target)));
    });
}

#[test]
fn the_test_runs_on_request() {
    each(|rig| {
        let allocator = rig.allocator();
        let expected = match rig.packed() {
            true => SelfTest::Passed,
            false => SelfTest::NotRun,
        };
        assert_eq!(allocator.test_views().unwrap(), expected);
        assert_eq!(allocator.stats().all.reserved.current, 0);
        assert_eq!(allocator.test_views().unwrap(), expected);
        rig.close(&allocator);
        let off = rig.allocator_with(Config::new().views(false));
        assert_eq!(off.test_views().unwrap(), SelfTest::NotRun);
        drop(off);
    });
}
