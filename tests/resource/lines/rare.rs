//! Rare orders: captures, retired streams, failures and drops from within.

use std::sync::Arc;

use cualloc::DeviceBuffer;
use cualloc::driver::{Stream, sys};
use cualloc::pool::{DriverPool, DriverPoolConfig, WorkspacePool};
use cualloc::resource::*;
use cualloc::sim::{Mode, Simulator};

use super::*;
use crate::common::*;

/// Runs something while a stream captures; the capture must end well.
fn captured<T>(rig: &Rig, stream: &Stream, act: impl FnOnce() -> T) -> T {
    let _entered = rig.context.enter().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    stream.begin_capture(mode).unwrap();
    let done = act();
    drop(stream.end_capture().unwrap());
    done
}

/// The fill and its waits stay out of a graph.
#[test]
fn a_probe_leaves_captures_alone() {
    packed(|rig| {
        let [home, other] = rig.streams();
        let probe = poisoned(rig.allocator());
        let block = take(&probe, 4096, &home);
        probe.record_stream(&block.id(), &other).unwrap();
        let refused = captured(rig, &home, || probe.deallocate_block(block)).unwrap_err();
        let refused = captured(rig, &other, || probe.deallocate_block(*refused.value)).unwrap_err();
        let block = *refused.value;
        probe.deallocate_block(block).unwrap();
    });
}

/// A free waits for no stream whose wait would draw the block's own into a capture.
#[test]
fn a_free_does_not_join_the_capture_of_a_recorded_stream() {
    packed(|rig| {
        let [home, other] = rig.streams();
        let resource = asynchronous(rig);
        let block = take(&resource, 4096, &home);
        resource.record_stream(&block.id(), &other).unwrap();
        let failure = captured(rig, &other, || {
            let refused = resource.deallocate_block(block).unwrap_err();
            assert!(!home.is_capturing().unwrap());
            refused
        });
        assert_matches!(failure.error, Error::Capturing { .. });
        resource.deallocate_block(*failure.value).unwrap();
        resource.reap().unwrap();
    });
}

/// Reuse waits for work submitted to a retired stream at the free.
fn retired<R: MemoryResource>(rig: &Rig, make: impl Fn(&Allocator) -> R, access: bool) {
    let Some(sim) = rig.sim() else { return };
    let allocator = rig.allocator();
    let resource = make(&allocator);
    let [home, other, next] = rig.streams();
    sim.set_mode(Mode::Manual);
    for foreign in [false, true] {
        let home = if foreign { rig.stream() } else { home.clone() };
        let block = take(&resource, 1 << 20, &home);
        let id = block.id();
        let stamp = |on| rig.stamp(id.ptr(), 1 << 20, 1, on);
        stamp(&home);
        if access {
            resource.finish_use(&id, &home, Access::Write).unwrap();
        }
        allocator.retire(&home).unwrap();
        sim.complete_all();
        if foreign && access {
            resource.prepare_use(&id, &other, Access::Write).unwrap();
            stamp(&other);
            resource.finish_use(&id, &other, Access::Write).unwrap();
        }
        resource.deallocate_block(block).unwrap();
        let again = allocator.allocate(1 << 20, &next).unwrap();
        rig.stamp(again.ptr(), 1 << 20, 2, &next);
        sim.complete_all();
        rig.assert_clean();
        drop(again);
        allocator.trim(0).unwrap();
    }
}

#[test]
fn frees_on_a_retired_stream_are_waited_for() {
    packed(|rig| {
        retired(rig, |a| poisoned(a.clone()), false);
        retired(rig, |a| poisoned(AccessOrdered::new(a.clone())), true);
        retired(rig, |a| AccessOrdered::new(a.clone()), true);
    });
}

/// The default stream of the thread is named by its handle where that means the same stream.
#[test]
fn a_threads_own_stream_is_waited_for_by_an_event() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let home = rig.stream();
        let mine = Stream::per_thread(&rig.context);
        let block = take(&resource, 4096, &home);
        resource.record_stream(&block.id(), &mine).unwrap();
        let before = rig.calls("cuCtxSynchronize");
        resource.deallocate_block(block).unwrap();
        assert_eq!(rig.calls("cuCtxSynchronize"), before);
        resource.reap().unwrap();
    });
}

/// Another thread's stream cannot be filled on: its work is waited for, and so is the fill.
#[test]
fn a_probe_frees_blocks_of_another_threads_stream() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let allocator = rig.allocator();
        let probe = poisoned(allocator.clone());
        let mine = Stream::per_thread(&rig.context);
        sim.set_mode(Mode::Manual);
        let block = take(&probe, 1 << 20, &mine);
        {
            let _entered = rig.context.enter().unwrap();
            rig.stamp(block.ptr(), 1 << 20, 1, &mine);
        }
        let freed = std::thread::scope(|scope| {
            let free = || probe.deallocate_block(block);
            scope.spawn(free).join().unwrap()
        });
        freed.unwrap();
        let again = allocator.allocate(1 << 20, &mine).unwrap();
        rig.stamp(again.ptr(), 1 << 20, 2, &mine);
        sim.complete_all();
        rig.assert_clean();
    });
}

/// The captured values of a hook or listener are dropped without a lock.
#[test]
fn hooks_may_own_the_memory_they_free() {
    packed(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        for replaced in [false, true] {
            let pool = WorkspacePool::new(&allocator);
            allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("mine", move |_| {
                pool.trim(0).map_or(0, |trimmed| trimmed.released)
            }));
            if replaced {
                assert!(
                    allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("mine", |_| 0))
                );
            }
            assert!(allocator.remove_relief_hook("mine"));
        }
        let budget = Arc::new(Budget::new(allocator.clone(), Some(MIB as u64)));
        let guard = Relief::new(Arc::clone(&budget));
        let held = DeviceBuffer::<u8>::uninit(&budget, MIB, &stream).unwrap();
        guard.add_relief_hook(ReliefHook::new("reserve", move |_| held.byte_len() as u64));
        assert!(guard.remove_relief_hook("reserve"));
        assert_eq!(outstanding(&budget), 0);
    });
}

/// A use that was given counts until the free where its end could not be marked.
fn finished_in_vain(
    (rig, sim): (&Rig, &Simulator),
    resource: &impl MemoryResource,
    call: &str,
) -> bool {
    sim.set_mode(Mode::Manual);
    let [home, other] = rig.streams();
    let block = take(&resource, MIB, &home);
    let id = block.id();
    let entered = rig.context.enter().unwrap();
    let allocated = entered.create_event().unwrap();
    allocated.record(&home).unwrap();
    other.wait(&allocated).unwrap();
    rig.stamp(id.ptr(), MIB, 1, &other);
    sim.fail(refusal(call));
    let finished = resource.finish_use(&id, &other, Access::Write);
    sim.clear_failures();
    resource.deallocate_block(block).unwrap();
    let again = take(&resource, MIB, &home);
    rig.stamp(again.ptr(), MIB, 2, &home);
    sim.complete_all();
    rig.assert_clean();
    resource.deallocate_block(again).unwrap();
    sim.complete_all();
    sim.set_mode(Mode::Instant);
    finished.is_ok()
}

#[test]
fn a_use_counts_until_the_free_where_its_end_cannot_be_marked() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let allocator = rig.allocator();
        let native = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
        let probes = (poisoned(allocator.clone()), poisoned(native.clone()));
        for call in ["cuStreamIsCapturing", "cuEventRecord"] {
            let told = [
                finished_in_vain((rig, sim), &allocator, call),
                finished_in_vain((rig, sim), &native, call),
                finished_in_vain((rig, sim), &probes.0, call),
                finished_in_vain((rig, sim), &probes.1, call),
            ];
            assert_eq!(told, [false; 4], "{call}");
        }
    });
}

/// On the thread of the use, the handle still means that stream: no wait for the whole context is made, which would
/// invalidate captures there.
#[test]
fn a_stream_that_could_not_be_queried_is_waited_for_by_an_event() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [home, other] = rig.streams();
        let mine = Stream::per_thread(&rig.context);
        let block = take(&resource, 4096, &home);
        let id = block.id();
        if !fail(rig, "cuStreamIsCapturing") {
            return;
        }
        resource.finish_use(&id, &mine, Access::Write).unwrap_err();
        let freed = captured(rig, &other, || resource.deallocate_block(block));
        freed.unwrap();
        rig.assert_clean();
        resource.reap().unwrap();
    });
}
