//! The order of operations on several streams, under completion orders that the test chooses.

use super::Rig;
use super::rig::streams;
use crate::common::prelude::*;
use crate::common::rng::Rng;
use cualloc::driver::Entered;
use cualloc::error::StreamMisuse;
use cualloc::resource::Access;
use cualloc::sim::Report;
use cualloc::{CopyInFlight, PinnedBuffer};

impl Rng {
    fn range(&mut self, len: usize) -> (usize, usize) {
        let start = self.index(len);
        (start, start + 1 + self.index(len - start))
    }
}

/// A buffer with what it should hold.
struct Known {
    buffer: DeviceBuffer<u32>,
    expected: Vec<u32>,
}

fn complete_some(sim: &Simulator, random: &mut Rng, rounds: usize) {
    for _ in 0..rounds {
        let ready = sim.ready_streams();
        if ready.is_empty() {
            return;
        }
        let count = 1 + random.index(3);
        sim.complete_stream(ready[random.index(ready.len())], count);
    }
}

fn program(rig: &Rig, sim: &Simulator, alloc: &Allocator, random: &mut Rng, steps: usize) {
    let context = &rig.contexts[0];
    let mut streams: Vec<Stream> = (0..4).map(|_| alloc.create_stream().unwrap()).collect();
    let mut known: Vec<Known> = Vec::new();
    let mut downloads: Vec<(CopyInFlight<u32>, Vec<u32>)> = Vec::new();
    let mut uploads = Vec::new();
    for step in 0..steps {
        let stream = streams[random.index(streams.len())].clone();
        let value = step as u32;
        let choice = if known.is_empty() {
            0
        } else {
            random.index(14)
        };
        let pick = random.index(known.len().max(1));
        match choice {
            0 | 1 if known.len() < 12 => {
                let bits = 4 + random.index(14);
                let len = 1 + random.index(1 << bits);
                let (buffer, expected) = match random.index(3) {
                    0 => (
                        DeviceBuffer::zeroed(alloc, len, &stream).unwrap(),
                        vec![0; len],
                    ),
                    1 => (
                        DeviceBuffer::filled(alloc, len, value, &stream).unwrap(),
                        vec![value; len],
                    ),
                    _ => {
                        let values: Vec<u32> = (0..len as u32).map(|i| i ^ value).collect();
                        (
                            DeviceBuffer::from_slice(alloc, &values, &stream).unwrap(),
                            values,
                        )
                    }
                };
                known.push(Known { buffer, expected });
            }
            2..=4 => {
                let Known { buffer, expected } = &mut known[pick];
                let (start, end) = random.range(expected.len());
                let mut part = buffer.slice_mut(start..end).unwrap();
                part.fill(value, &stream).unwrap();
                expected[start..end].fill(value);
            }
            5 | 6 if known.len() >= 2 => {
                let mut target = known.swap_remove(pick);
                let source = &known[random.index(known.len())];
                let len = 1 + random.index(source.expected.len().min(target.expected.len()));
                let from = random.index(source.expected.len() - len + 1);
                let to = random.index(target.expected.len() - len + 1);
                target
                    .buffer
                    .slice_mut(to..to + len)
                    .unwrap()
                    .copy_from(&source.buffer.slice(from..from + len).unwrap(), &stream)
                    .unwrap();
                target.expected[to..to + len].copy_from_slice(&source.expected[from..from + len]);
                known.push(target);
            }
            7 => {
                let Known { buffer, expected } = &mut known[pick];
                let (start, end) = random.range(expected.len());
                let values: Vec<u32> = (start..end)
                    .map(|i| (i as u32).wrapping_mul(value))
                    .collect();
                let host = PinnedBuffer::from_slice(context, &values).unwrap();
                let mut part = buffer.slice_mut(start..end).unwrap();
                uploads.push(part.upload(host, &stream).unwrap());
                expected[start..end].copy_from_slice(&values);
            }
            8 | 9 => {
                let Known { buffer, expected } = &known[pick];
                let (start, end) = random.range(expected.len());
                let host = PinnedBuffer::uninit(context, end - start).unwrap();
                let part = buffer.slice(start..end).unwrap();
                downloads.push((
                    part.download(host, &stream).unwrap(),
                    expected[start..end].to_vec(),
                ));
            }
            10 | 11 => {
                known.swap_remove(pick).buffer.free().unwrap();
            }
            12 => {
                let Known { buffer, expected } = &known[pick];
                assert_eq!(&buffer.to_vec().unwrap(), expected, "step {step}");
            }
            13 if random.index(8) == 0 => {
                alloc.trim(0).unwrap();
            }
            13 if random.index(8) == 0 => {
                // Buffers that are at home there go on using the stream.
                match alloc.retire(&stream) {
                    Ok(()) | Err(cualloc::Error::Stream(StreamMisuse::Unknown { .. })) => {}
                    Err(error) => panic!("{error:?}"),
                }
                if random.index(2) == 0 {
                    let at = random.index(streams.len());
                    streams[at] = alloc.create_stream().unwrap();
                }
            }
            _ => {}
        }
        complete_some(sim, random, random_rounds(step));
        sim.advance_row();
        if downloads.len() > 6 {
            let (copy, expected) = downloads.swap_remove(random.index(downloads.len()));
            assert_eq!(copy.wait().unwrap()[..], expected, "step {step}");
        }
        if uploads.len() > 4 {
            drop(uploads.swap_remove(random.index(uploads.len())));
        }
        assert_eq!(sim.take_reports(), [], "step {step}");
    }
    for (copy, expected) in downloads {
        assert_eq!(copy.wait().unwrap()[..], expected);
    }
    for Known { buffer, expected } in known {
        assert_eq!(buffer.to_vec().unwrap(), expected);
    }
}

fn random_rounds(step: usize) -> usize {
    // Phases in which work piles up, and such in which it drains.
    if step % 64 < 40 { 1 } else { 4 }
}

#[test]
fn operations_on_many_streams_are_ordered() {
    Rig::each_simulated(|rig, sim, alloc| {
        for seed in 1..=6u64 {
            sim.set_mode(if seed % 3 == 0 {
                Mode::Lag(7)
            } else {
                Mode::Manual
            });
            let mut random = Rng::new(seed);
            program(rig, sim, alloc, &mut random, 600);
            sim.set_mode(Mode::Instant);
        }
        assert_eq!(alloc.stats().all.allocations.current, 0);
    });
}

/// Fills a buffer's memory as a kernel of the user would.
fn foreign_fill(entered: &Entered<'_>, ptr: sys::CUdeviceptr, stream: &Stream) {
    // SAFETY: the simulator bears what goes wrong here.
    unsafe { entered.memset_d8(ptr, 1, 4096, stream.raw()) }.unwrap();
}

#[test]
fn foreign_work_without_order_is_a_race() {
    Rig::each_simulated(|rig, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = streams(alloc);
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        let entered = rig.contexts[0].enter().unwrap();
        let races = || {
            sim.complete_all();
            let reports = sim.take_reports();
            let race = |report: &Report| matches!(report, Report::Race { .. });
            assert!(reports.iter().all(race), "{reports:?}");
            !reports.is_empty()
        };

        buffer.prepare_use(&other, Access::ReadWrite).unwrap();
        foreign_fill(&entered, buffer.as_device_ptr(), &other);
        buffer.finish_use(&other, Access::ReadWrite).unwrap();
        buffer.fill(2, &home).unwrap();
        assert!(!races());

        // Without the first, with the zeros; without the second, with what comes later.
        foreign_fill(&entered, buffer.as_device_ptr(), &other);
        buffer.finish_use(&other, Access::ReadWrite).unwrap();
        assert!(races());
        buffer.prepare_use(&other, Access::ReadWrite).unwrap();
        foreign_fill(&entered, buffer.as_device_ptr(), &other);
        buffer.fill(3, &home).unwrap();
        assert!(races());
        // Without the second, the next owner of the memory meets the work too.
        buffer.prepare_use(&other, Access::ReadWrite).unwrap();
        foreign_fill(&entered, buffer.as_device_ptr(), &other);
        let ptr = buffer.as_device_ptr();
        drop(buffer);
        let next = DeviceBuffer::<u8>::zeroed(alloc, 4096, &home).unwrap();
        assert_eq!(next.as_device_ptr(), ptr);
        assert!(races());
        // Only this test knows of that work, so no other code waits for it.
        other.synchronize().unwrap();
        drop(next);
        sim.set_mode(Mode::Instant);
    });
}

#[test]
fn a_free_comes_after_work_on_other_streams() {
    Rig::each_simulated(|_, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let streams: Vec<Stream> = (0..3).map(|_| alloc.create_stream().unwrap()).collect();
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 1 << 20, &streams[0]).unwrap();
        let ptr = buffer.as_device_ptr();
        buffer.fill(1, &streams[1]).unwrap();
        buffer.fill(2, &streams[2]).unwrap();
        buffer.free().unwrap();
        // On the home stream the memory is reused immediately, because that stream waits for the others.
        let next = DeviceBuffer::filled(alloc, 1 << 20, 3u8, &streams[0]).unwrap();
        assert_eq!(next.as_device_ptr(), ptr);
        let home = streams[0].id().unwrap();
        sim.complete_stream(home, usize::MAX);
        let held = sim.pending().iter().filter(|op| op.stream == home).count();
        assert!(held > 0, "the home stream waits for the others");
        assert_eq!(next.to_vec().unwrap(), vec![3; 1 << 20]);
        drop(next);
        // A trim does not take it away under them either: that is reported.
        alloc.trim(0).unwrap();
        sim.complete_all();
        sim.set_mode(Mode::Instant);
    });
}

#[test]
fn a_retired_stream_still_frees_in_order() {
    Rig::each_simulated(|_, sim, alloc| {
        sim.set_mode(Mode::Manual);
        let [home, other] = streams(alloc);
        for bytes in [4096, 8 << 20] {
            let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, bytes, &home).unwrap();
            alloc.retire(&home).unwrap();
            // Completes the retired stream's last marker, but not what comes now.
            home.synchronize().unwrap();
            buffer.fill(1, &home).unwrap();
            drop(buffer);
            let next = DeviceBuffer::filled(alloc, bytes, 2u8, &other).unwrap();
            assert_eq!(next.to_vec().unwrap(), vec![2; bytes]);
            drop(next);
            alloc.trim(0).unwrap();
            sim.complete_all();
            assert_eq!(sim.take_reports(), []);
        }
        sim.set_mode(Mode::Instant);
    });
}

#[test]
fn a_copy_in_flight_owns_its_memory() {
    let owns = |rig: &Rig, sim: &Simulator, alloc: &Allocator| {
        let context = &rig.contexts[0];
        let stream = alloc.create_stream().unwrap();
        let mut buffer = DeviceBuffer::<u32>::zeroed(alloc, 100, &stream).unwrap();
        sim.set_mode(Mode::Manual);
        let host = || PinnedBuffer::from_slice(context, &[7u32; 100]).unwrap();
        let copy = buffer.upload(host(), &stream).unwrap();
        assert!(!copy.is_complete().unwrap());
        sim.complete_all();
        assert!(copy.is_complete().unwrap());
        assert_eq!(copy.wait().unwrap()[..], [7; 100]);

        // A drop waits, and does not leave it to the free of the memory.
        let waits = || rig.driver.calls().get("cuEventSynchronize");
        let before = waits();
        drop(buffer.download(host(), &stream).unwrap());
        assert_eq!(waits(), before + 1);
        assert_eq!(sim.leaks().host, 0);

        // One that is forgotten leaves its memory to the device for ever.
        std::mem::forget(buffer.upload(host(), &stream).unwrap());
        drop(buffer);
        sim.complete_all();
        sim.set_mode(Mode::Instant);
    };
    Rig::each_simulated_with(owns, |leaks| {
        assert_eq!((leaks.host, leaks.bytes), (1, 0));
    });
}

#[test]
fn streams_that_capture_are_refused() {
    Rig::each_simulated(|rig, _, alloc| {
        let [home, other] = streams(alloc);
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 64, &home).unwrap();
        let _entered = rig.contexts[0].enter().unwrap();
        for (captured, used) in [(&other, &other), (&home, &home), (&home, &other)] {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            captured.begin_capture(mode).unwrap();
            let refused = |result: Result<(), Error>| match result {
                Err(Error::Capturing { stream }) => {
                    assert_eq!(stream, captured.raw() as usize);
                }
                other => panic!("{other:?}"),
            };
            let calls = rig.driver.calls();
            refused(buffer.fill(1, used));
            refused(buffer.prepare_use(used, Access::ReadWrite));
            refused(buffer.finish_use(used, Access::ReadWrite));
            if std::ptr::eq(captured, &home) {
                refused(buffer.copy_from_slice(&[0; 64]));
                refused(buffer.to_vec().map(drop));
                let error = buffer.free().unwrap_err();
                let named = captured.raw() as usize;
                assert_matches!(error.error, Error::Capturing { stream } if stream == named);
                buffer = *error.value;
            }
            assert_eq!(rig.driver.calls().since(&calls).get("cuMemsetD8Async"), 0);
            assert_eq!(rig.driver.calls().since(&calls).get("cuEventRecord"), 0);
            let host = PinnedBuffer::uninit(&rig.contexts[0], 64).unwrap();
            let error = buffer.download(host, used).unwrap_err();
            refused(Err(error.error));
            assert_eq!(error.value.len(), 64);
            drop(captured.end_capture().unwrap());
            buffer.fill(1, used).unwrap();
        }
        assert_eq!(buffer.to_vec().unwrap(), [1; 64]);
    });
}

/// The events that put the operations of other streams in order are used again.
#[test]
fn order_costs_no_new_events() {
    Rig::each(|rig, alloc, home| {
        let other = alloc.create_stream().unwrap();
        let mut buffer = DeviceBuffer::<u8>::zeroed(alloc, 4096, home).unwrap();
        buffer.fill(1, &other).unwrap();
        let calls = rig.driver.calls();
        for value in 2..10 {
            buffer.fill(value, &other).unwrap();
        }
        let calls = rig.driver.calls().since(&calls);
        assert_eq!(calls.get("cuEventRecord"), 16);
        assert_eq!(calls.get("cuEventCreate"), 0);
        assert_eq!(buffer.to_vec().unwrap(), [9; 4096]);
    });
}
