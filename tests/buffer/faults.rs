//! Every driver call of a program of buffer operations, failed in turn.

use super::Rig;
use super::rig::streams;
use crate::common::prelude::*;
use cualloc::PinnedBuffer;
use cualloc::resource::Access;
use cualloc::sim::Leaks;

/// Two streams, all kinds of operations; stops at the first error.
fn program(rig: &Rig, alloc: &Allocator) -> Result<(), Box<dyn std::error::Error>> {
    let context = &rig.contexts[0];
    let (home, other) = (alloc.create_stream()?, alloc.create_stream()?);
    let values: Vec<u32> = (0..2000).collect();
    let mut a = DeviceBuffer::from_slice(alloc, &values, &home)?;
    let mut b = DeviceBuffer::filled(alloc, 2000, 5u32, &other)?;
    a.slice_mut(..10)?.fill(6, &other)?;
    b.slice_mut(10..)?.copy_from(&a.slice(10..)?, &home)?;
    let host = PinnedBuffer::from_slice(context, &[8u32; 4])?;
    let up = b.slice_mut(..4)?.upload(host, &home)?;
    let down = a.download(PinnedBuffer::uninit(context, 2000)?, &other)?;
    a.free()?;
    let host = down.wait()?;
    assert_eq!((&host[..10], &host[10..]), (&[6; 10][..], &values[10..]));
    drop(up);
    let back = b.to_vec()?;
    assert_eq!((&back[..4], &back[4..10]), (&[8; 4][..], &[5; 6][..]));
    assert_eq!(back[10..], values[10..]);
    b.free()?;
    Ok(())
}

fn fail_each(rig: &Rig, sim: &Simulator, alloc: &Allocator, mode: Mode, in_a_row: u64) {
    let (mut nth, mut failures) = (1, 0);
    loop {
        sim.set_mode(mode);
        sim.fail(
            FailPlan::any(CUresult::CUDA_ERROR_NOT_PERMITTED)
                .nth(nth)
                .times(in_a_row),
        );
        let result = program(rig, alloc);
        let left = sim.clear_failures();
        failures += usize::from(result.is_err());
        if let Err(error) = &result {
            let mut source: Option<&dyn std::error::Error> = Some(error.as_ref());
            let mut last = String::new();
            while let Some(error) = source {
                last = error.to_string();
                source = error.source();
            }
            assert!(last.contains("NOT_PERMITTED"), "call {nth}: {last}");
        }
        sim.complete_all();
        sim.set_mode(Mode::Instant);
        assert_eq!(sim.take_reports(), [], "call {nth}");
        alloc.check().unwrap();
        let live = alloc.stats().all.allocations.current;
        assert!(
            live == 0 || in_a_row > 2,
            "call {nth}: {live} blocks leaked"
        );
        if left == 1 && result.is_ok() {
            break;
        }
        nth += 1;
        assert!(nth < 100_000, "each attempt makes more calls");
    }
    assert!(
        nth > 50 && failures > 20,
        "{nth} calls, {failures} failures"
    );
}

#[test]
fn every_call_may_fail() {
    let test = |rig: &Rig, sim: &Simulator, alloc: &Allocator| {
        for mode in [Mode::Instant, Mode::Manual] {
            for in_a_row in [1, 2, 5] {
                fail_each(rig, sim, alloc, mode, in_a_row);
            }
        }
    };
    // Page-locked memory whose free fails is leaked, and keeps the context of streams and events whose destruction
    // failed. No device memory is.
    Rig::each_simulated_with(test, |leaks| {
        let expected = Leaks {
            host: leaks.host,
            streams: leaks.streams,
            events: leaks.events,
            ..Leaks::default()
        };
        assert_eq!(leaks, expected);
    });
}

fn refuse(sim: &Simulator, name: &str, nth: u64, times: u64) {
    let plan = FailPlan::call(name, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
    sim.fail(plan.nth(nth).times(times));
}

#[test]
fn order_is_kept_by_other_means() {
    Rig::each_simulated(|rig, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = streams(alloc);
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        // The home stream cannot be made to wait, so the host does.
        refuse(sim, "cuStreamWaitEvent", 2, 1);
        buffer.fill(1, &other).unwrap();
        assert_eq!(sim.clear_failures(), 0);
        buffer.fill(2, &home).unwrap();
        sim.complete_all();
        assert_eq!(sim.take_reports(), []);

        // Nor the host: an error, and the memory is not used again before its time.
        refuse(sim, "cuStreamWaitEvent", 2, 1);
        refuse(sim, "cuStreamSynchronize", 1, 1);
        let error = buffer.fill(3, &other).unwrap_err();
        assert_matches!(error, Error::Driver(_));
        assert_eq!(sim.clear_failures(), 0);
        drop(buffer);
        let next = DeviceBuffer::filled(alloc, 4096, 4u8, &home).unwrap();
        assert_eq!(next.to_vec().unwrap(), [4; 4096]);
        drop(next);
        alloc.trim(0).unwrap();
        sim.complete_all();
        assert_eq!(sim.take_reports(), []);

        // A blocking copy waits by all means.
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        let mut target = [1; 4096];
        refuse(sim, "cuEventSynchronize", 1, 1);
        refuse(sim, "cuStreamSynchronize", 1, 1);
        buffer.copy_to_slice(&mut target).unwrap();
        assert_eq!((sim.clear_failures(), target), (0, [0; 4096]));
        // So does a copy in flight; if all of them fail, its memory is leaked.
        let host = PinnedBuffer::from_slice(&rig.contexts[0], &[5u8; 4096]).unwrap();
        refuse(sim, "cuEventRecord", 1, 1);
        let copy = buffer.upload(host, &home).unwrap();
        assert!(copy.is_complete().unwrap());
        let host = copy.wait().unwrap();
        let copy = buffer.upload(host, &home).unwrap();
        refuse(sim, "cuEventSynchronize", 1, 2);
        refuse(sim, "cuStreamSynchronize", 1, 1);
        let host = copy.wait().unwrap();
        assert_eq!(sim.clear_failures(), 0);
        drop(host);
        drop(buffer);
        sim.complete_all();
        sim.set_mode(Mode::Instant);
    });
}

/// A buffer of sevens on the first of two streams, whose work is complete; later work completes on request.
fn settled(sim: &Simulator, alloc: &Allocator) -> (Stream, Stream, DeviceBuffer<u8>) {
    let [home, other] = [(); 2].map(|()| alloc.create_stream().unwrap());
    let buffer = DeviceBuffer::filled(alloc, 4096, 7u8, &home).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [7; 4096]);
    sim.set_mode(Mode::Manual);
    (home, other, buffer)
}

/// D8: if neither the buffer's home nor the host can wait for an operation, the next operation orders it, or is
/// refused.
#[test]
fn d8_an_operation_that_could_not_be_ordered_is_ordered_later() {
    Rig::each_simulated(|_, sim, alloc| {
        let third = alloc.create_stream().unwrap();
        for last in ["free", "drop", "drop in need"] {
            let (_home, other, mut buffer) = settled(sim, alloc);
            // The first wait lets the operation come after its home.
            refuse(sim, "cuStreamWaitEvent", 2, u64::MAX);
            refuse(sim, "cuStreamSynchronize", 1, u64::MAX);
            let error = buffer.fill(3, &other).unwrap_err();
            assert_matches!(error, Error::Driver(_));
            for _ in 0..2 {
                let error = buffer.fill(4, &third).unwrap_err();
                assert_matches!(error, Error::Driver(_));
                buffer = *buffer.free().unwrap_err().value;
            }
            if last == "drop in need" {
                // The use is reported to the allocator as far as possible.
                refuse(sim, "cuStreamIsCapturing", 1, u64::MAX);
                drop(buffer);
                sim.clear_failures();
                assert_eq!(alloc.stats().all.allocations.current, 1);
                alloc.trim(0).unwrap();
                assert_eq!(alloc.stats().all.allocations.current, 0);
            } else {
                sim.clear_failures();
                buffer.fill(4, &third).unwrap();
                match last {
                    "free" => buffer.free().unwrap(),
                    _ => drop(buffer),
                }
            }
            sim.complete_all();
            assert_eq!(sim.take_reports(), [], "{last}");
            sim.set_mode(Mode::Instant);
        }
        alloc.trim(0).unwrap();
        assert_eq!(alloc.stats().all.allocations.current, 0);
    });
}

/// D8: what another thread gave its own default stream, and could not be ordered, is waited for with the context: on the
/// thread that drops the buffer the handle means another stream. Where that wait is refused the memory is kept until a
/// later call.
#[test]
fn d8_work_of_another_threads_own_stream_outlasts_a_dropped_buffer() {
    Rig::each_simulated(|rig, sim, alloc| {
        for refused_at_the_drop in [false, true] {
            let (home, _, mut buffer) = settled(sim, alloc);
            let at = buffer.as_device_ptr();
            refuse(sim, "cuStreamWaitEvent", 2, u64::MAX);
            refuse(sim, "cuStreamSynchronize", 1, u64::MAX);
            sim.as_thread(1, || {
                let own = Stream::per_thread(&rig.contexts[0]);
                let error = buffer.fill(3, &own).unwrap_err();
                assert_matches!(error, Error::Driver(_));
            });
            sim.clear_failures();
            assert!(!sim.pending().is_empty());
            if refused_at_the_drop {
                refuse(sim, "cuCtxSynchronize", 1, u64::MAX);
                drop(buffer);
                sim.clear_failures();
                assert_eq!(alloc.stats().all.allocations.current, 1);
                assert!(!sim.pending().is_empty());
                alloc.trim(0).unwrap();
            } else {
                drop(buffer);
            }
            let mut pending = sim.pending().into_iter();
            // A marker touches no memory.
            let work = pending.find(|op| !op.ranges.is_empty());
            assert_eq!(work, None, "refused: {refused_at_the_drop}");
            assert_eq!(alloc.stats().all.allocations.current, 0);
            let next = DeviceBuffer::filled(alloc, 4096, 4u8, &home).unwrap();
            if !refused_at_the_drop {
                assert_eq!(next.as_device_ptr(), at);
            }
            assert_eq!(next.to_vec().unwrap(), [4; 4096]);
            assert_eq!(sim.take_reports(), []);
            drop(next);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
        }
    });
}

/// If the driver refuses every wait, a blocking copy fails; the device does not access the caller's memory
/// nevertheless, and the buffer's memory is not reused during the copy.
#[test]
fn refused_waits_leave_the_callers_memory_alone() {
    Rig::each_simulated(|rig, sim, alloc| {
        let (home, other, mut buffer) = settled(sim, alloc);
        let refuse_all = || {
            for call in [
                "cuEventSynchronize",
                "cuStreamSynchronize",
                "cuCtxSynchronize",
            ] {
                refuse(sim, call, 1, u64::MAX);
            }
        };
        let go_on = || {
            sim.clear_failures();
            sim.complete_all();
            assert_eq!(sim.take_reports(), []);
        };
        let unseen = |error: &Error| {
            assert_matches!(error, Error::Unseen(_));
            assert_eq!(
                error.driver_error().unwrap().code(),
                CUresult::CUDA_ERROR_NOT_PERMITTED
            );
        };
        let mut target = [1u8; 4096];
        refuse_all();
        unseen(&buffer.copy_to_slice(&mut target).unwrap_err());
        unseen(&buffer.to_vec().unwrap_err());
        go_on();
        assert_eq!(
            target, [1; 4096],
            "the device wrote to memory that was lent for the call"
        );
        let mut source = [3u8; 4096];
        refuse_all();
        unseen(&buffer.copy_from_slice(&source).unwrap_err());
        source.fill(4);
        go_on();
        assert_eq!(
            buffer.to_vec().unwrap(),
            [3; 4096],
            "the values are those of the call"
        );
        // Memory that is freed during the copy serves no other request until the copy is complete.
        refuse_all();
        unseen(&buffer.copy_to_slice(&mut target).unwrap_err());
        sim.clear_failures();
        drop(buffer);
        let mut next = DeviceBuffer::<u8>::zeroed(alloc, 4096, &other).unwrap();
        next.fill(9, &other).unwrap();
        go_on();
        assert_eq!(next.to_vec().unwrap(), [9; 4096]);
        assert_eq!(target, [1; 4096]);
        drop(next);
        // A tensor copies in the same way.
        let stream = &home;
        let mut column = column(alloc, &[5i32; 8], stream).unwrap();
        refuse_all();
        assert!(set(&mut column, &[6i32; 8]).is_err());
        assert!(values::<i32>(&column).is_err());
        go_on();
        assert_eq!(column.as_slice::<i32>().unwrap().to_vec().unwrap(), [6; 8]);
        sim.set_mode(Mode::Instant);
        let _ = rig;
    });
}

/// After an error of an asynchronous copy the device does not access the caller's memory any more, or the error says
/// that it might.
#[test]
fn r2_asynchronous_copies_that_fail_are_waited_for() {
    Rig::each_simulated(|_, sim, alloc| {
        let (home, other, mut buffer) = settled(sim, alloc);
        // Neither the home stream nor the host can be made to wait at first.
        let refuse_order = |times| {
            refuse(sim, "cuStreamWaitEvent", 2, 1);
            refuse(sim, "cuStreamSynchronize", 1, times);
        };
        let mut target = vec![1u8; 4096];
        refuse_order(1);
        // SAFETY: kept until the error says that the copy is over.
        let copied = unsafe { buffer.as_slice().copy_to_slice_async(&mut target, &other) };
        assert_matches!(copied, Err(Error::Driver(_)));
        assert!(sim.pending().is_empty());
        assert_eq!(target, [7; 4096]);
        // Its order is made up for by the next call.
        buffer.prepare_use(&home, Access::ReadWrite).unwrap();
        refuse_order(1);
        target.fill(8);
        // SAFETY: as above.
        let copied = unsafe { buffer.as_mut_slice().copy_from_slice_async(&target, &other) };
        assert_matches!(copied, Err(Error::Driver(_)));
        target.fill(9);
        sim.complete_all();
        assert_eq!(buffer.to_vec().unwrap(), [8; 4096]);
        refuse_order(u64::MAX);
        refuse(sim, "cuEventSynchronize", 1, u64::MAX);
        refuse(sim, "cuCtxSynchronize", 1, u64::MAX);
        // SAFETY: kept until all work is complete.
        let copied = unsafe { buffer.as_slice().copy_to_slice_async(&mut target, &other) };
        assert_matches!(copied, Err(Error::Unseen(_)));
        sim.clear_failures();
        sim.complete_all();
        assert_eq!(target, [8; 4096]);
        assert_eq!(sim.take_reports(), []);
        drop(buffer);
        sim.set_mode(Mode::Instant);
    });
}

/// Copies above the size of a piece are whole, and in order.
#[test]
fn large_copies_come_in_pieces() {
    Rig::each_simulated(|_, _, alloc| {
        let stream = alloc.create_stream().unwrap();
        let values: Vec<u32> = (0..2_500_001).collect();
        let mut buffer = DeviceBuffer::from_slice(alloc, &values, &stream).unwrap();
        let mut target = vec![0; values.len()];
        buffer.copy_to_slice(&mut target).unwrap();
        assert_eq!(target, values);
        buffer
            .slice_mut(1..2_200_000)
            .unwrap()
            .copy_from_slice(&values[..2_199_999])
            .unwrap();
        let back = buffer.to_vec().unwrap();
        assert_eq!(back[0], 0);
        assert_eq!(back[1..2_200_000], values[..2_199_999]);
        assert_eq!(back[2_200_000..], values[2_200_000..]);
        let column = column(alloc, &values, &stream).unwrap();
        assert_eq!(column.as_slice::<u32>().unwrap().to_vec().unwrap(), values);
    });
}
