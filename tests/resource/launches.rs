//! The launch recorder: uses of a launch, ordered before it and noted behind it.

use crate::common::*;
use crate::managers::{allocate, managed};
use crate::{packed, refusal, take};
use cualloc::driver::Stream;
use cualloc::error::StreamMisuse;
use cualloc::resource::*;
use cualloc::{Allocator, DeviceBuffer, Error};

type Order = AccessOrdered<Allocator>;

fn pair(rig: &Rig) -> (Order, Stream, Stream, RawBlock, RawBlock) {
    let resource = AccessOrdered::new(rig.allocator());
    let [a, b] = rig.streams();
    let one = take(&resource, 4096, &a);
    let two = take(&resource, 4096, &a);
    (resource, a, b, one, two)
}

fn finish(resource: &Order, blocks: [RawBlock; 2]) {
    for block in blocks {
        resource.deallocate_block(block).unwrap();
    }
    resource.reap().unwrap();
}

/// S5.37, S5.39, S5.41: record, preflight, launch, commit; each block once.
#[test]
fn s5_37_s5_39_s5_41_recorder_orders_a_launch() {
    packed(|rig| {
        let (resource, a, b, one, two) = pair(rig);
        let mut recorder = Launch::strict(&resource, &b);
        recorder.read(&one).unwrap().write(&one.id()).unwrap();
        recorder.read_write(&two).unwrap().read(&two).unwrap();
        let recorded: Vec<_> = recorder.blocks().collect();
        assert_eq!(recorded.len(), 2);
        assert!(
            recorded
                .iter()
                .all(|(_, access)| *access == Access::ReadWrite)
        );
        let (waits, records) = ("cuStreamWaitEvent", "cuEventRecord");
        let (before, marks) = (rig.calls(waits), rig.calls(records));
        recorder.preflight().unwrap();
        assert_eq!(
            rig.calls(waits) - before,
            2,
            "all waits are queued before the launch"
        );
        assert_eq!(rig.calls(records), marks, "and no use yet");
        let hold = rig.busy(&b);
        rig.stamp(one.ptr(), 4096, 1, &b);
        recorder.commit().unwrap();
        assert_eq!(rig.calls(records) - marks, 2);
        resource.prepare_use(&one.id(), &a, Access::Write).unwrap();
        rig.stamp(one.ptr(), 4096, 2, &a);
        hold.release();
        assert_eq!(rig.mismatches(one.ptr(), 4096, 2, &a), 0);
        finish(&resource, [one, two]);
    });
}

/// S5.38: strict says which kind it refuses, permissive passes over it.
#[test]
fn s5_38_strict_refuses_what_permissive_passes_over() {
    packed(|rig| {
        let (resource, _a, b, one, two) = pair(rig);
        // SAFETY: named only, and the block lives longer.
        let foreign =
            unsafe { DeviceBuffer::<u8>::from_raw_parts(two.ptr(), 4096, &b, ()).unwrap() };
        {
            let waits = rig.calls("cuStreamWaitEvent");
            let mut strict = Launch::strict(&resource, &b);
            strict.read(&one).unwrap().write(&foreign).unwrap();
            match strict.preflight() {
                Err(Error::Rejected {
                    index,
                    external: found,
                }) => {
                    assert_eq!((index, found), (1, true));
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(rig.calls("cuStreamWaitEvent"), waits, "nothing was queued");
            let mut lenient = Launch::permissive(&resource, &b);
            lenient.read(&one).unwrap().write(&foreign).unwrap();
            lenient.preflight().unwrap();
            lenient.commit().unwrap();
        }
        // A resource that does not track.
        let direct = CudaMemory::new(&rig.context);
        let block = take(&direct, 64, &b);
        let mut strict = Launch::strict(&direct, &b);
        strict.read(&block).unwrap();
        assert_matches!(
            strict.preflight(),
            Err(Error::Rejected {
                index: 0,
                external: false
            })
        );
        let mut lenient = Launch::permissive(&direct, &b);
        lenient.read(&block).unwrap();
        lenient.preflight().unwrap();
        lenient.commit().unwrap();
        direct.deallocate_block(block).unwrap();
        finish(&resource, [one, two]);
    });
}

/// S5.40, S5.42: steps out of order are errors; an abandoned recorder only warns.
#[test]
fn s5_40_s5_42_steps_out_of_order_are_misuse() {
    packed(|rig| {
        let (resource, _a, b, one, two) = pair(rig);
        let misuse = |result: Result<(), Error>| {
            assert_matches!(result, Err(Error::Stream(StreamMisuse::LaunchOrder { .. })));
        };
        let empty = Launch::strict(&resource, &b);
        empty.commit().unwrap();
        let mut recorder = Launch::strict(&resource, &b);
        recorder.read(&one).unwrap();
        misuse(recorder.commit());
        let mut recorder = Launch::strict(&resource, &b);
        recorder.read(&one).unwrap();
        recorder.preflight().unwrap();
        misuse(recorder.read(&two).map(|_| ()));
        misuse(recorder.preflight());
        drop(recorder);
        finish(&resource, [one, two]);
    });
}

/// S5.43, S5.73: a preflight that fails in the middle may be tried again; no wait is missing.
#[test]
fn s5_43_s5_73_failed_preflight_may_be_tried_again() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (resource, a, b, one, two) = pair(rig);
        for block in [&one, &two] {
            rig.stamp(block.ptr(), 4096, 1, &a);
            resource.finish_use(&block.id(), &a, Access::Write).unwrap();
        }
        let mut recorder = Launch::strict(&resource, &b);
        recorder.write(&one).unwrap().write(&two).unwrap();
        sim.fail(refusal("cuStreamWaitEvent").nth(2));
        let records = rig.calls("cuEventRecord");
        assert!(recorder.preflight().is_err());
        assert_eq!(rig.calls("cuEventRecord"), records, "no use is recorded");
        let before = rig.calls("cuStreamWaitEvent");
        recorder.preflight().unwrap();
        assert_eq!(
            rig.calls("cuStreamWaitEvent") - before,
            2,
            "all of them again"
        );
        rig.stamp(two.ptr(), 4096, 2, &b);
        recorder.commit().unwrap();
        // Stale blocks are found before any wait.
        let stale = one.id();
        finish(&resource, [one, two]);
        let mut recorder = Launch::permissive(&resource, &b);
        recorder.read(&stale).unwrap();
        assert_matches!(recorder.preflight(), Err(Error::UseAfterFree { .. }));
    });
}

/// S5.44: one slice, without a recorder.
#[test]
fn s5_44_single_slice_helpers() {
    packed(|rig| {
        let (manager, stack, stream) = managed(rig, 1 << 20);
        let other = rig.stream();
        let slice = allocate::<u32>(&manager, 1024, &stream).unwrap();
        let waits = rig.calls("cuStreamWaitEvent");
        slice.prepare_use(&other, Access::Write).unwrap();
        assert_eq!(rig.calls("cuStreamWaitEvent") - waits, 1);
        rig.stamp(slice.as_device_ptr(), 4096, 5, &other);
        slice.finish_use(&other, Access::Write).unwrap();
        drop(slice);
        assert_eq!(
            rig.calls("cuStreamWaitEvent") - waits,
            2,
            "its stream follows"
        );
        let empty = allocate::<u32>(&manager, 0, &stream).unwrap();
        empty.prepare_use(&other, Access::Read).unwrap();
        stack.reap().unwrap();
    });
}

/// S5.74: a commit that fails half-way leaves every block used on the launch's stream.
#[test]
fn s5_74_failed_commit_marks_every_block() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        // Each of them alone must hold the next user back, whichever is asked for first.
        for second in [false, true] {
            let (resource, a, b, one, two) = pair(rig);
            let mut recorder = Launch::strict(&resource, &b);
            recorder.write(&one).unwrap().write(&two).unwrap();
            recorder.preflight().unwrap();
            let hold = rig.busy(&b);
            rig.stamp(one.ptr(), 4096, 1, &b);
            rig.stamp(two.ptr(), 4096, 1, &b);
            sim.fail(refusal("cuEventRecord"));
            assert!(recorder.commit().is_err());
            let block = if second { &two } else { &one };
            let id = block.id();
            resource.prepare_use(&id, &a, Access::Write).unwrap();
            rig.stamp(id.ptr(), 4096, 2, &a);
            assert!(!a.is_complete().unwrap());
            hold.release();
            // The race detector of the simulator has the last word.
            assert_eq!(rig.mismatches(id.ptr(), 4096, 2, &a), 0);
            finish(&resource, [one, two]);
        }
    });
}
