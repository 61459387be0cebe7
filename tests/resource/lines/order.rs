//! Reads, writes and frees of several streams, and the events behind them.

use cualloc::driver::{Context, Stream};
use cualloc::resource::*;
use cualloc::sim::{Mode, Report};

use super::*;
use crate::common::*;
use crate::held;

/// S5.21: the first use on another stream waits for the allocation, and for no later work.
#[test]
fn s5_21_allocation_is_the_first_write() {
    packed(|rig| {
        if rig.sim().is_none() {
            return;
        }
        let resource = asynchronous(rig);
        let [a, b] = rig.streams();
        let hold = rig.hold(&a);
        let block = take(&resource, 4096, &a);
        let id = block.id();
        resource.prepare_use(&id, &b, Access::Read).unwrap();
        rig.stamp(block.ptr(), 4096, 1, &b);
        assert!(!b.is_complete().unwrap(), "b follows the allocation on a");
        hold.release();
        rig.settle(&b);
        let later = rig.hold(&a);
        resource.prepare_use(&id, &b, Access::Read).unwrap();
        rig.stamp(block.ptr(), 4096, 2, &b);
        rig.settle(&b);
        resource.finish_use(&id, &b, Access::Write).unwrap();
        later.release();
        resource.deallocate_block(block).unwrap();
        resource.reap().unwrap();
    });
}

/// S5.22, S5.23: reads wait for the last write, writes for all reads; same stream: nothing.
#[test]
fn s5_22_s5_23_waits_follow_the_accesses() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [a, b, c] = rig.streams();
        let block = take(&resource, 4096, &a);
        let id = block.id();
        let waits = || rig.calls("cuStreamWaitEvent");
        let prepare = |stream: &Stream, access| {
            let before = waits();
            resource.prepare_use(&id, stream, access).unwrap();
            waits() - before
        };
        assert_eq!(prepare(&a, Access::Write), 0, "same stream");
        resource.finish_use(&id, &a, Access::Write).unwrap();
        assert_eq!(prepare(&b, Access::Read), 1, "the write");
        resource.finish_use(&id, &b, Access::Read).unwrap();
        assert_eq!(prepare(&c, Access::Read), 1, "the write, not the read");
        resource.finish_use(&id, &c, Access::Read).unwrap();
        assert_eq!(
            prepare(&a, Access::Write),
            2,
            "both reads; the write was its own"
        );
        resource.finish_use(&id, &a, Access::Write).unwrap();
        assert_eq!(prepare(&b, Access::Write), 1, "the reads are cleared");
        resource.finish_use(&id, &b, Access::Write).unwrap();
        // Recording a use is finishing a read.
        resource.record_use(&id, &c).unwrap();
        assert_eq!(prepare(&b, Access::Write), 1);
        assert_eq!(prepare(&a, Access::ReadWrite), 2);
        resource.deallocate_block(block).unwrap();
        resource.reap().unwrap();
    });
}

/// S5.23: a write that did not wait for a read does not make it forgotten.
#[test]
fn s5_23_unprepared_write_keeps_other_uses() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [a, b, c] = rig.streams();
        let block = take(&resource, 4096, &a);
        let id = block.id();
        resource.finish_use(&id, &b, Access::Read).unwrap();
        resource.finish_use(&id, &c, Access::Write).unwrap();
        let before = rig.calls("cuStreamWaitEvent");
        resource.deallocate_block(block).unwrap();
        assert_eq!(rig.calls("cuStreamWaitEvent") - before, 2, "b and c");
        resource.reap().unwrap();
    });
}

/// S5.24, S5.60: a failed deallocation leaves everything as it was and returns the block.
#[test]
fn s5_24_s5_60_failed_deallocation_returns_the_block() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let budget = Budget::new(asynchronous(rig), Some(1 << 30));
        let resource = Logging::new(Sanitizer::new(budget), ());
        let [a, b] = rig.streams();
        let mut block = take(&resource, 4096, &a);
        let id = block.id();
        resource.prepare_use(&id, &b, Access::Write).unwrap();
        resource.finish_use(&id, &b, Access::Write).unwrap();
        for call in ["cuStreamWaitEvent", "cuEventRecord"] {
            sim.fail(refusal(call));
            let failure = resource.deallocate_block(block).unwrap_err();
            assert!(failure.error.driver_error().is_some());
            block = *failure.value;
            assert_eq!(block.id(), id);
            assert_eq!(resource.state(&id), BlockState::Live);
            assert_eq!(held(&resource), (4096, 0));
            assert_eq!(outstanding(resource.get_ref().get_ref()), 4096);
            assert_eq!(resource.get_ref().live().len(), 1);
            assert_eq!(resource.usage().unwrap().requested.current, 4096);
            resource.record_use(&id, &b).unwrap();
        }
        resource.deallocate_block(block).unwrap();
        assert_eq!(held(&resource), (0, 4096));
        resource.reap().unwrap();
        assert_eq!(outstanding(resource.get_ref().get_ref()), 0);
    });
}

/// R2: work is there, whatever the driver says to a question about its stream.
#[test]
fn r2_a_use_counts_although_its_stream_cannot_be_queried() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        sim.set_mode(Mode::Manual);
        let resource = asynchronous(rig);
        let [a, own] = rig.streams();
        let of_thread = Stream::per_thread(&rig.context);
        for (call, b) in [
            ("cuStreamIsCapturing", &own),
            ("cuStreamIsCapturing", &of_thread),
        ] {
            let block = take(&resource, 4096, &a);
            let id = block.id();
            resource.prepare_use(&id, b, Access::Write).unwrap();
            rig.stamp(id.ptr(), 4096, 1, b);
            fail(rig, call);
            let error = resource.finish_use(&id, b, Access::Write).unwrap_err();
            assert_eq!(error.driver_error().map(|e| e.code()), Some(REFUSAL));
            resource.deallocate_block(block).unwrap();
            let next = take(&resource, 4096, &a);
            assert_eq!(next.ptr(), id.ptr());
            rig.stamp(id.ptr(), 4096, 2, &a);
            sim.complete_all();
            assert_eq!(sim.reports(), []);
            resource.deallocate_block(next).unwrap();
        }
        sim.set_mode(Mode::Instant);
        resource.reap().unwrap();
    });
}

/// S5.53, S5.58: events come from a pool, and all go in the end; 10^5 cycles leave nothing on the heap.
#[test]
fn s5_53_s5_58_steady_state_creates_no_event() {
    packed(|rig| {
        let created = || rig.calls("cuEventCreate");
        let resource = asynchronous(rig);
        let [a, b] = rig.streams();
        let cycle = || {
            let block = take(&resource, 4096, &a);
            let id = block.id();
            resource.prepare_use(&id, &b, Access::Write).unwrap();
            resource.finish_use(&id, &b, Access::Write).unwrap();
            resource.deallocate_block(block).unwrap();
        };
        (0..2000).for_each(|_| cycle());
        let warm = created();
        assert!(warm < 50, "{warm} events for 2000 cycles");
        resource.reap().unwrap();
        let heap = HEAP.with(Cell::get);
        (0..100_000).for_each(|_| cycle());
        assert_eq!(created(), warm);
        resource.reap().unwrap();
        let grown = HEAP.with(Cell::get) - heap;
        assert!(
            grown < 64 << 10,
            "{grown} bytes of the heap for 10^5 cycles"
        );
        drop(resource);
        if let Some(sim) = rig.sim() {
            assert_eq!(sim.leaks().events, 0, "created and destroyed");
        }
    });
}

/// S5.59: a million reads on one stream are one read.
#[test]
fn s5_59_reads_of_a_stream_collapse() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [a, b, c] = rig.streams();
        let block = take(&resource, 4096, &a);
        let id = block.id();
        let rounds = if cfg!(debug_assertions) {
            20_000
        } else {
            1_000_000
        };
        for _ in 0..rounds {
            resource.record_use(&id, &b).unwrap();
        }
        let before = rig.calls("cuStreamWaitEvent");
        resource.prepare_use(&id, &c, Access::Write).unwrap();
        assert_eq!(
            rig.calls("cuStreamWaitEvent") - before,
            2,
            "the allocation and one read"
        );
        resource.deallocate_block(block).unwrap();
        resource.reap().unwrap();
    });
}

/// S5.72: a destroyed stream's pending bytes leave by its last marker.
#[test]
fn s5_72_destroyed_stream_is_known_by_its_marker() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let resource = asynchronous(rig);
        let raw = RawStream::new(rig);
        let stream = raw.borrowed();
        let block = take(&resource, 4096, &stream);
        sim.set_mode(Mode::Manual);
        rig.stamp(block.ptr(), 4096, 1, &stream);
        let id = block.id();
        resource.deallocate_block(block).unwrap();
        resource.get_ref().retire(&stream).unwrap();
        raw.destroy();
        assert_eq!(resource.usage().unwrap().pending, 4096, "not assumed done");
        assert_eq!(resource.state(&id), BlockState::Pending);
        // No wait is possible: the bytes stay. Releasing them without a wait would be wrong.
        sim.deny_host_waits(true);
        assert!(resource.reap().is_err(), "it was not waited for");
        sim.deny_host_waits(false);
        assert_eq!(resource.usage().unwrap().pending, 4096, "assumed done");
        assert_eq!(resource.state(&id), BlockState::Quarantined);
        let call = "cuEventSynchronize";
        assert_eq!(sim.take_reports(), [Report::DeniedWait { call }]);
        // Now it can be waited for, and the bytes leave: they are not lost either.
        assert_eq!(resource.reap().unwrap(), 4096);
        assert_eq!(resource.usage().unwrap().pending, 0);
        assert_eq!(resource.state(&id), BlockState::Free);
        sim.set_mode(Mode::Instant);
        assert_eq!(sim.reports(), []);
    });
}

/// R33: an event is recorded on streams of its own context only.
#[test]
fn r33_events_are_pooled_per_context() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let raw = sim.create_context(0).unwrap();
        // SAFETY: just created, destroyed at the end.
        let second = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let resource = asynchronous(rig);
        let (a, other) = (rig.stream(), Stream::new(&second).unwrap());
        for _ in 0..50 {
            let block = take(&resource, 4096, &a);
            let id = block.id();
            for stream in [&other, &a, &other] {
                resource.prepare_use(&id, stream, Access::Write).unwrap();
                resource.finish_use(&id, stream, Access::Write).unwrap();
            }
            resource.deallocate_block(block).unwrap();
            resource.reap().unwrap();
        }
        assert!(rig.calls("cuEventCreate") < 20);
    });
}
