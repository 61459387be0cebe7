//! Streams that are retired while their memory is in use, and the destruction of their contexts.

use std::sync::mpsc;

use crate::common::prelude::*;
use cualloc::error::StreamMisuse;
use cualloc::exchange::dlpack::DLManagedTensor;
use cualloc::exchange::{DType, Peer, Tensor};
use cualloc::pool::WorkspacePool;

pub(super) const BLOCK: usize = 12 * MIB;

/// Room for a block, or for a page or a segment of small ones.
fn room_for(bytes: usize) -> usize {
    if bytes > MIB { BLOCK } else { 2 * MIB }
}

/// Another stream writes to the only memory of that size; the simulator reports any use that is not complete.
pub(super) fn use_elsewhere(rig: &Rig, allocator: &Allocator, bytes: usize, stream: &Stream) {
    let next = allocator.allocate(bytes, stream).unwrap();
    rig.stamp(next.ptr(), bytes, 2, stream);
    rig.assert_clean();
    let Some(sim) = rig.maybe_sim() else { return };
    sim.complete_all();
    rig.assert_clean();
    sim.set_mode(Mode::Instant);
}

/// Does something with memory of a size on a stream, once per policy and size, and lets another stream write to
/// the same memory. What `act` returns is kept until then.
fn before_the_next_user<R>(act: impl Fn(&Rig, &Simulator, &Allocator, &Stream, usize) -> R) {
    for bytes in [KIB, BLOCK] {
        each_with_interludes(|rig, sim| {
            let (allocator, [home, other]) = rig.scene_limit(room_for(bytes));
            let _kept = act(rig, sim, &allocator, &home, bytes);
            use_elsewhere(rig, &allocator, bytes, &other);
        });
    }
}

/// Work that the stream of a buffer gets after the last marker, before the retirement ends, precedes the memory's next
/// user.
#[test]
fn d3_work_between_the_last_marker_and_the_end_counts() {
    before_the_next_user(|_, sim, allocator, home, bytes| {
        let mut buffer = DeviceBuffer::<u8>::zeroed(allocator, bytes, home).unwrap();
        sim.set_mode(Mode::Manual);
        let on = home.clone();
        interlude::after("cuEventRecord", move || {
            // The marker is complete, and what comes now is not.
            on.synchronize().unwrap();
            buffer.fill(1, &on).unwrap();
            drop(buffer);
        });
        allocator.retire(home).unwrap();
        assert!(!interlude::is_due(), "no marker was recorded");
    });
}

/// The free of a buffer checks whether its stream is retired; the stream may be retired between the check and the free.
#[test]
fn d3_a_free_that_began_before_the_end_counts() {
    each_with_interludes(|rig, sim| {
        let config = Config::new().limit(Some(BLOCK as u64));
        // A free asks the driver then, after its look.
        let (allocator, [home, other]) = rig.scene_with(config.capture_checks(true));
        let mut buffer = DeviceBuffer::<u8>::zeroed(&*allocator, BLOCK, &home).unwrap();
        sim.set_mode(Mode::Manual);
        let (marks, marked) = mpsc::channel();
        let (looks, looked) = mpsc::channel();
        let retiring = {
            let (allocator, on) = (allocator.clone(), home.clone());
            std::thread::spawn(move || {
                let settled = on.clone();
                interlude::after("cuEventRecord", move || {
                    settled.synchronize().unwrap();
                    marks.send(()).unwrap();
                    looked.recv().unwrap();
                });
                allocator.retire(&on).unwrap();
            })
        };
        marked.recv().unwrap();
        buffer.fill(1, &home).unwrap();
        interlude::after("cuStreamIsCapturing", move || {
            looks.send(()).unwrap();
            retiring.join().unwrap();
        });
        drop(buffer);
        assert!(!interlude::is_due(), "no query was made");
        use_elsewhere(rig, &allocator, BLOCK, &other);
    });
}

/// Retires the stream directly after the allocation, before the memory is used.
fn retire_before_use(allocator: &Allocator, stream: &Stream) {
    let (allocator, stream) = (allocator.clone(), stream.clone());
    interlude::after("cuThreadExchangeStreamCaptureMode", move || {
        if allocator.stats().all.allocated.current == 0 {
            return retire_before_use(&allocator, &stream);
        }
        allocator.retire(&stream).unwrap();
        stream.synchronize().unwrap();
    });
}

/// A column is filled after the last marker of its stream.
#[test]
fn d3_columns_of_a_retired_stream_come_before_the_next_user() {
    for (of_resource, into_block) in [(false, true), (false, false), (true, false)] {
        before_the_next_user(|_, sim, allocator, home, bytes| {
            // Known, and without anything else to ask.
            drop(allocator.allocate(bytes, home).unwrap());
            sim.set_mode(Mode::Manual);
            retire_before_use(allocator, home);
            let column = if of_resource {
                let resource = Arc::new(allocator.clone());
                Tensor::zeroed(&resource, DType::F32, &[bytes / 4], home)
            } else {
                Tensor::zeroed(allocator, DType::F32, &[bytes / 4], home)
            };
            let column = column.unwrap();
            assert!(!interlude::is_due(), "{bytes}: not retired");
            if into_block {
                drop(column.into_buffer::<f32>().unwrap().into_block().unwrap());
            }
        });
    }
}

/// What comes back through an export is used by its new home until its drop, which is reported to its owner
/// immediately, and again if that was retired since.
#[test]
fn d3_a_column_that_came_back_counts_on_a_retired_stream() {
    before_the_next_user(|rig, sim, allocator, home, bytes| {
        let theirs = rig.stream();
        let column = Tensor::zeroed(allocator, DType::F32, &[bytes / 4], home).unwrap();
        let tensor = column
            .to_dlpack::<DLManagedTensor>(&Peer::on(home))
            .unwrap();
        let back = Tensor::from_dlpack(tensor, &theirs, ordered()).unwrap();
        drop(column);
        sim.set_mode(Mode::Manual);
        allocator.retire(&theirs).unwrap();
        theirs.synchronize().unwrap();
        rig.stamp(back.ptr(), bytes, 1, &theirs);
        drop(back);
        theirs
    });
}

/// A retirement that fails leaves the stream as it was: known by its name, and served without a wait.
#[test]
fn d3_a_retirement_that_fails_changes_nothing() {
    each_simulated(|rig, sim| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        let both = || [KIB, BLOCK].map(|bytes| allocator.allocate(bytes, &a).unwrap());
        let places = |blocks: [cualloc::Block; 2]| blocks.map(|block| block.ptr());
        let blocks = both();
        sim.fail(FailPlan::call("cuEventRecord", CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap());
        assert_matches!(allocator.retire(&a), Err(Error::Driver(_)));
        let before = places(blocks);
        let calls = rig.calls("cuStreamWaitEvent");
        assert_eq!(places(both()), before);
        assert_eq!(rig.calls("cuStreamWaitEvent"), calls);
        assert_eq!(allocator.stats().streams, 2);
        allocator.retire(&a).unwrap();
        let refused = allocator.retire(&a);
        assert_matches!(refused, Err(Error::Stream(StreamMisuse::Unknown { .. })));
    });
}

/// A retirement fails after its stream was named again: both slots belong to the stream, and the next retirement ends
/// both.
#[test]
fn d3_a_failed_retirement_beside_new_memory_is_completed_later() {
    each_with_interludes(|rig, sim| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        let block = allocator.allocate(BLOCK, &a).unwrap();
        sim.fail(FailPlan::call("cuEventRecord", CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap());
        let (keep, kept) = mpsc::channel();
        let (other, on) = (allocator.clone(), a.clone());
        interlude::after("cuEventRecord", move || {
            keep.send(other.allocate(BLOCK, &on).unwrap()).unwrap();
        });
        assert_matches!(allocator.retire(&a), Err(Error::Driver(_)));
        assert_eq!(allocator.stats().streams, 3);
        drop((block, kept.recv().unwrap()));
        allocator.retire(&a).unwrap();
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().streams, 1);
        assert_eq!(a.holders(), 1, "the allocator drops it");
    });
}

/// A query of a stream fails after another thread has retired the stream: it must leave no uncovered frees, because no
/// marker could cover them and `close` would wait forever.
#[test]
fn d9_a_failed_query_during_a_retirement_does_not_block_the_end() {
    each_with_interludes(|rig, sim| {
        let (allocator, [a, b]) = rig.scene();
        let _kept = allocator.allocate(KIB, &a).unwrap();
        drop(allocator.allocate(KIB, &b).unwrap());
        let (other, on) = (allocator.clone(), a.clone());
        interlude::after("cuStreamQuery", move || other.retire(&on).unwrap());
        // Not enough for an immediate marker.
        drop(allocator.allocate(300 * KIB, &a).unwrap());
        sim.fail(FailPlan::call("cuStreamQuery", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
        allocator.trim(0).unwrap();
        assert!(!interlude::is_due(), "no stream was asked");
        assert_eq!(sim.clear_failures(), 0);
    });
}

/// A failed synchronisation does not change tickets: frees on a retired stream are covered by its last marker.
#[test]
fn d7_a_synchronisation_that_fails_changes_nothing() {
    each_simulated(|rig, sim| {
        let (allocator, [s, t]) = rig.scene();
        drop(allocator.allocate(100 * KIB, &t).unwrap());
        let block = allocator.allocate(8 * MIB, &s).unwrap();
        allocator.retire(&s).unwrap();
        let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        sim.fail(FailPlan::call("cuCtxSynchronize", code).unwrap());
        assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
        drop(block);
        let trimmed = allocator.trim(u64::MAX).unwrap();
        assert_eq!(trimmed.pending, 0);
        let next = allocator.allocate_with(Request::new(8 * MIB).cached_only(), &t);
        assert!(next.is_ok(), "nothing is left to wait for");
        drop(next);
        assert_eq!(allocator.stats().streams, 1, "the retired one is over");
    });
}

/// The same for streams in use: a batch is as full after the failure as before.
#[test]
fn d7_a_synchronisation_that_fails_takes_no_batch_away() {
    let frees_until_marked = |fails: bool| {
        let rig = Rig::with_interludes(Policy::Packed)?;
        let sim = rig.sim()?;
        let allocator = rig.allocator();
        let other = rig.stream();
        drop(allocator.allocate(KIB, &other).unwrap());
        let foreign = RawStream::new(&rig);
        let stream = foreign.borrowed();
        let mut blocks: Vec<_> = allocator.allocate_blocks(64, 2 * MIB / 64 * 3, &stream);
        let markers = allocator.stats().markers;
        drop(blocks.split_off(60));
        if fails {
            let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            sim.fail(FailPlan::call("cuCtxSynchronize", code).unwrap());
            assert!(allocator.synchronize().is_err());
        }
        let mut frees = 0;
        while allocator.stats().markers == markers {
            drop(blocks.pop().unwrap());
            frees += 1;
        }
        drop(blocks);
        allocator.retire(&stream).unwrap();
        drop(stream);
        foreign.destroy();
        rig.close(&allocator);
        Some(frees)
    };
    assert_eq!(frees_until_marked(true), frees_until_marked(false));
}

/// A stream that destroys itself with its last user is kept alive, whichever way it was named first.
#[test]
fn d12_a_stream_that_was_named_by_its_handle_is_kept_alive() {
    each_simulated(|rig, sim| {
        for (bytes, again) in [(KIB, false), (4 * MIB, false), (KIB, true), (4 * MIB, true)] {
            let allocator = rig.allocator();
            let other = rig.stream();
            drop(allocator.allocate(70_000, &other).unwrap());
            let streams = sim.leaks().streams;
            let stream = rig.stream();
            let ptr = allocator.raw_allocate(bytes, stream.raw()).unwrap();
            let block = again.then(|| allocator.allocate(bytes, &stream).unwrap());
            drop(stream);
            assert_eq!(sim.leaks().streams, streams + 1);
            drop(block);
            allocator.raw_free(ptr).unwrap();
            rig.assert_clean();
            rig.close(&allocator);
            drop(allocator);
            assert_eq!(sim.leaks().streams, streams);
        }
    });
}

/// The legacy stream is kept as long as the context, even if it was only named by its handles: a marker may be recorded
/// there at any time, also for a batch that is not full and in calls that do not name the stream.
#[test]
fn d12_the_legacy_stream_is_kept_under_either_handle() {
    only(Policy::Packed, |rig| {
        for handle in [0, 1] {
            let (allocator, [other]) = rig.scene();
            drop(allocator.allocate(KIB, &other).unwrap());
            let handle = std::ptr::without_provenance_mut(handle);
            let ptr = allocator.raw_allocate(MIB / 2, handle).unwrap();
            allocator.raw_free(ptr).unwrap();
            assert_eq!(allocator.stats().markers, 0);
            allocator.trim(0).unwrap();
            assert_eq!(allocator.trim(0).unwrap().pending, 0);
        }
    });
}

/// An idle slab of a stream that was retired is not leased again: its free would count for the last marker.
#[test]
fn s5_idle_workspaces_of_a_retired_stream_are_not_leased() {
    for between in [false, true] {
        each_simulated(|rig, sim| {
            let (allocator, [home, other]) = rig.scene_limit(16 * MIB);
            let pool = WorkspacePool::new(&allocator);
            let lease = pool.lease(&home, 16 * MIB).unwrap();
            if between {
                allocator.retire(&home).unwrap();
                drop(lease);
            } else {
                drop(lease);
                allocator.retire(&home).unwrap();
            }
            sim.set_mode(Mode::Manual);
            let lease = pool.lease(&home, 16 * MIB).unwrap();
            rig.stamp(lease.as_device_ptr(), 16 * MIB, 1, &home);
            drop(lease);
            cualloc::resource::MemoryResource::trim(&pool, 0).unwrap();
            use_elsewhere(rig, &allocator, 16 * MIB, &other);
        });
    }
}
