//! DLPack tensors, with a consumer and a producer in C: what goes out, what may come in, and in whose
//! order.

use std::ffi::c_void;
use std::thread;

use crate::common::*;
use crate::foreign::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Policy};
use cualloc::driver::Stream;
use cualloc::error::{ImportFault, StreamMisuse};
use cualloc::exchange::dlpack::*;
use cualloc::exchange::*;
use cualloc::sim::SimConfig;

pub(super) fn floats(allocator: &Allocator, rows: usize, stream: &Stream) -> Tensor {
    let values: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    column(allocator, &values, stream).unwrap()
}

pub(super) fn live(allocator: &Allocator) -> u64 {
    allocator.stats().all.allocated.current
}

/// S5.49: a consumer in C finds one compact dimension on the CUDA device, and its deleter frees
/// everything once, from any thread, and bears null.
#[test]
fn s5_49_dlpack_export_through_c() {
    let Some(other) = other() else { return };
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let consumer = Peer::on(&b);
        for rows in [1, 1000, 300_000] {
            let column = floats(&allocator, rows, &a);
            let expected = Seen {
                major: 0,
                ..Seen::floats(column.ptr(), rows as i64)
            };
            let old = column
                .to_dlpack::<DLManagedTensor>(&consumer)
                .unwrap()
                .into_raw();
            assert_eq!(other.see(old), expected);
            let new = column
                .to_dlpack::<DLManagedTensorVersioned>(&consumer)
                .unwrap()
                .into_raw();
            let expected = Seen {
                major: DLPackVersion::CURRENT.major,
                minor: DLPackVersion::CURRENT.minor,
                ..expected
            };
            assert_eq!(other.see_versioned(new), expected);
            other.delete(old.cast(), "delete_null_like");
            other.delete(new.cast(), "delete_null_like_versioned");
            let held = live(&allocator);
            assert!(held >= rows as u64 * 4);
            drop(column);
            let (old, new) = (old as usize, new as usize);
            thread::scope(|scope| {
                scope.spawn(|| other.delete(old as *mut c_void, "delete_legacy"));
            });
            assert_eq!(live(&allocator), held);
            thread::scope(|scope| {
                scope.spawn(|| other.delete(new as *mut c_void, "delete_versioned"));
            });
            assert_eq!(live(&allocator), 0);
            allocator.check().unwrap();
        }
        rig.close(&allocator);
    });
}

/// S5.49: deleters run concurrently on many threads, each once, and after the allocator's handle was dropped.
#[test]
fn s5_49_deleters_from_many_threads() {
    let Some(other) = other() else { return };
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let consumer = Peer::on(&stream);
        let tensors: Vec<(usize, bool)> = (0..64)
            .map(|index| {
                let column = floats(&allocator, 1 + index * 37, &stream);
                let tensor: *mut c_void = match index % 2 {
                    0 => column
                        .to_dlpack::<DLManagedTensor>(&consumer)
                        .unwrap()
                        .into_raw()
                        .cast(),
                    _ => {
                        let tensor = column.to_dlpack::<DLManagedTensorVersioned>(&consumer);
                        tensor.unwrap().into_raw().cast()
                    }
                };
                (tensor as usize, index % 2 == 0)
            })
            .collect();
        assert_eq!(allocator.stats().all.allocated.total_freed, 0);
        drop(allocator);
        thread::scope(|scope| {
            for part in tensors.chunks(8) {
                scope.spawn(move || {
                    for (tensor, old) in part {
                        let name = if *old {
                            "delete_legacy"
                        } else {
                            "delete_versioned"
                        };
                        other.delete(*tensor as *mut c_void, name);
                    }
                });
            }
        });
        drop((stream, consumer));
        if let Some(held) = rig.driver_held() {
            assert_eq!(held, 0, "the last deleter closes the allocator");
        }
    });
}

/// S5.50: everything that a tensor cannot be is refused with a reason, before any driver call, and the
/// tensor is given back, to be released once.
#[test]
fn s5_50_dlpack_import_checks() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 4096);
    let good = Seen::floats(plain.ptr, 16);
    let place = |device_type, device_id| Seen {
        device_type,
        device_id,
        ..good
    };
    let shape = |ndim, rows, stride| Seen {
        ndim,
        rows,
        stride,
        ..good
    };
    let element = |code: u8, bits: u8, lanes: u16| {
        let seen = Seen {
            code: code.into(),
            bits: bits.into(),
            lanes: lanes.into(),
            ..good
        };
        (seen, ImportFault::DType { code, bits, lanes })
    };
    let at = |data, byte_offset| Seen {
        data,
        byte_offset,
        ..good
    };
    let device = |actual| ImportFault::Device {
        expected: 0,
        actual,
    };
    let misaligned = ImportFault::Alignment {
        address: plain.ptr + 2,
        alignment: 4,
    };
    let wraps = ImportFault::Overflow {
        address: u64::MAX - 7,
        bytes: 16,
    };
    let (huge, far) = (i64::MAX / 4 + 1, u64::MAX - 3);
    let far_stride = i64::MAX / 16;
    let end = Seen {
        data: u64::MAX - 7,
        rows: 4,
        ..good
    };
    let cases = [
        (place(1, 0), ImportFault::DeviceType { device_type: 1 }),
        (place(13, 0), ImportFault::DeviceType { device_type: 13 }),
        (place(2, 1), device(1)),
        (place(2, -1), device(-1)),
        (shape(33, 16, 1), ImportFault::Dimensions { ndim: 33 }),
        (
            shape(i32::MAX, 16, 1),
            ImportFault::Dimensions { ndim: i32::MAX },
        ),
        (shape(-1, 16, 1), ImportFault::Dimensions { ndim: -1 }),
        (shape(1, -1, 1), ImportFault::Length { length: -1 }),
        (
            shape(1, i64::MAX, 1),
            ImportFault::Length { length: i64::MAX },
        ),
        (shape(1, huge, 1), ImportFault::Length { length: huge }),
        (
            shape(1, 16, far_stride),
            ImportFault::Stride { stride: far_stride },
        ),
        (
            shape(1, 16, -far_stride),
            ImportFault::Stride {
                stride: -far_stride,
            },
        ),
        element(2, 32, 2),
        element(2, 32, 0),
        element(2, 8, 1),
        element(5, 32, 1),
        element(6, 32, 1),
        (at(plain.ptr, 2), ImportFault::Offset { offset: 2 }),
        (at(plain.ptr, far), ImportFault::Offset { offset: far }),
        (at(plain.ptr + 2, 0), misaligned),
        (end, wraps),
        (at(0, 0), ImportFault::NoData { elements: 16 }),
    ];
    let calls = rig.driver.calls().total();
    for (seen, expected) in cases {
        for version in [false, true] {
            let (column, count) = foreign_tensor(other, &seen, version, &stream, ordered());
            let refused = column.expect_err("refused");
            assert_matches!(&refused, Error::Import(why) if *why == expected, "{seen:?}: {refused:?}");
            assert_eq!(released(count), 1);
        }
    }
    // A layout that is not known: released, and nothing else of it read.
    let unknown = Seen {
        major: 2,
        minor: 7,
        ndim: 9,
        ..good
    };
    let (column, count) = foreign_tensor(other, &unknown, true, &stream, ordered());
    assert_matches!(
        column.expect_err("refused"),
        Error::Import(ImportFault::Version { major: 2, minor: 7 })
    );
    assert_eq!(released(count), 1);
    // SAFETY: null is allowed.
    let null = unsafe { Dlpack::<DLManagedTensor>::from_raw(std::ptr::null_mut()) };
    assert_matches!(null, Err(Error::Import(ImportFault::Null)));
    // SAFETY: null is allowed.
    let null = unsafe { Dlpack::<DLManagedTensorVersioned>::from_raw(std::ptr::null_mut()) };
    assert_matches!(null, Err(Error::Import(ImportFault::Null)));
    assert_eq!(
        rig.driver.calls().total(),
        calls,
        "refused before any driver call"
    );

    // And what is allowed: no strides, an aligned offset, no rows without memory, a newer minor version.
    let allowed = [
        Seen { stride: 0, ..good },
        Seen {
            byte_offset: 64,
            ..good
        },
        Seen {
            data: 0,
            rows: 0,
            ..good
        },
        Seen { minor: 9, ..good },
    ];
    for seen in allowed {
        for version in [false, true] {
            let (column, count) = foreign_tensor(other, &seen, version, &stream, ordered());
            let column = column.unwrap();
            assert_eq!(column.shape(), [seen.rows as usize]);
            let start = if seen.data == 0 {
                0
            } else {
                plain.ptr + seen.byte_offset
            };
            assert_eq!(column.ptr(), start);
            drop(column);
            assert_eq!(released(count), 1);
        }
    }
    drop(plain);
    rig.assert_clean();
}

/// S5.50: a tensor without a deleter is legal and needs no release.
#[test]
fn s5_50_tensor_without_deleter() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 64);
    let mut shape = [16i64];
    let mut tensor = DLManagedTensor {
        dl_tensor: DLTensor {
            data: plain.ptr as *mut c_void,
            device: DLDevice {
                device_type: 2,
                device_id: 0,
            },
            ndim: 1,
            dtype: DType::I32.dlpack(),
            shape: shape.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        },
        manager_ctx: std::ptr::null_mut(),
        deleter: None,
    };
    // SAFETY: the structure outlives the column.
    let taken = unsafe { Dlpack::from_raw(&mut tensor) }.unwrap();
    let column = Tensor::from_dlpack(taken, &stream, ordered()).unwrap();
    assert_eq!(column.shape(), [16]);
    drop(column);
    // A shape is needed.
    tensor.dl_tensor.shape = std::ptr::null_mut();
    // SAFETY: as above.
    let taken = unsafe { Dlpack::from_raw(&mut tensor) }.unwrap();
    let refused = Tensor::from_dlpack(taken, &stream, ordered()).unwrap_err();
    assert_matches!(refused.error, Error::Import(ImportFault::NoShape));
}

/// S5.65: the versioned form says what the legacy one cannot: that writing is forbidden.
#[test]
fn s5_65_read_only_tensors() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 64);
    let seen = Seen {
        flags: DLManagedTensorVersioned::READ_ONLY,
        ..Seen::floats(plain.ptr, 16)
    };
    let (column, count) = foreign_tensor(other, &seen, true, &stream, ordered());
    let mut column = column.unwrap();
    assert!(column.is_read_only());
    assert_matches!(set(&mut column, &[0f32; 16]), Err(Error::ReadOnly));
    let consumer = Peer::on(&stream);
    assert_matches!(
        column.to_dlpack::<DLManagedTensor>(&consumer),
        Err(Error::ReadOnly)
    );
    let raw = column
        .to_dlpack::<DLManagedTensorVersioned>(&consumer)
        .unwrap()
        .into_raw();
    assert_eq!(
        other.see_versioned(raw).flags,
        DLManagedTensorVersioned::READ_ONLY
    );
    drop(column);
    assert_eq!(released(count), 0);
    other.delete(raw.cast(), "delete_versioned");
    assert_eq!(released(count), 1);
}

/// S5.65: the consumer's stream waits for the producer's work, in both forms.
#[test]
fn s5_65_consumer_stream_waits_for_the_producer() {
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        for versioned in [false, true] {
            let column = Tensor::zeroed(&allocator, DType::U32, &[4096], &ours).unwrap();
            ours.synchronize().unwrap();
            let hold = rig.hold(&ours);
            rig.stamp(column.ptr(), 16384, 5, &ours);
            let consumer = Peer::on(&theirs);
            let tensor = lent(&column, versioned, &consumer);
            // Queued, not waited for: the host is here while our stream stands still.
            assert!(!ours.is_complete().unwrap());
            // By its address alone: a column made of it would be ordered all the same.
            rig.stamp(column.ptr(), 64, 6, &theirs);
            assert!(!theirs.is_complete().unwrap());
            hold.release();
            assert_eq!(rig.mismatches(column.ptr(), 64, 6, &theirs), 0);
            assert_eq!(rig.mismatches(column.ptr() + 64, 16384 - 64, 5, &theirs), 0);
            drop(tensor);
        }
        rig.close(&allocator);
    });
}

/// S5.65: without an order asked for nothing is queued: the test above could fail. Where our own memory
/// comes back as a column it is ordered all the same.
#[test]
fn s5_65_unordered_export_queues_nothing() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let Some(sim) = rig.sim() else { return };
    let allocator = rig.allocator();
    let [ours, theirs] = rig.streams();
    for returns in [false, true] {
        let column = Tensor::zeroed(&allocator, DType::U32, &[64], &ours).unwrap();
        let waits = rig.calls("cuStreamWaitEvent");
        let hold = rig.hold(&ours);
        rig.stamp(column.ptr(), 256, 5, &ours);
        let tensor = column.to_dlpack::<DLManagedTensor>(&ordered()).unwrap();
        assert_eq!(rig.calls("cuStreamWaitEvent"), waits);
        let seen = returns.then(|| Tensor::from_dlpack(tensor, &theirs, ordered()).unwrap());
        rig.stamp(column.ptr(), 256, 6, &theirs);
        if !returns {
            theirs.synchronize().unwrap();
        }
        hold.release();
        assert_eq!(sim.take_reports().is_empty(), returns, "a race is reported");
        drop((column, seen));
    }
}

/// S5.65, S0.4: memory that a consumer released is not reused while its tracked stream works.
#[test]
fn s5_65_s0_4_released_memory_waits_for_a_tracked_consumer() {
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        let bytes = 4 * MIB;
        let column = Tensor::zeroed(&allocator, DType::U32, &[bytes / 4], &ours).unwrap();
        let ptr = column.ptr();
        let tensor = column
            .to_dlpack::<DLManagedTensor>(&Peer::on(&theirs))
            .unwrap();
        ours.synchronize().unwrap();
        let hold = rig.hold(&theirs);
        rig.stamp(ptr, bytes, 7, &theirs);
        drop(column);
        // The host does not wait: the stream is held.
        drop(tensor);
        let next = Tensor::zeroed(&allocator, DType::U32, &[bytes / 4], &ours).unwrap();
        if next.ptr() == ptr {
            assert!(
                !ours.is_complete().unwrap(),
                "the same address without a wait"
            );
        }
        hold.release();
        assert_eq!(
            next.as_slice::<u32>()
                .unwrap()
                .to_vec()
                .unwrap()
                .iter()
                .max(),
            Some(&0)
        );
        drop(next);
        rig.close(&allocator);
    });
}

/// S5.65, S0.4: where the consumer's streams are not known, the last release waits for the context;
/// earlier ones do not.
#[test]
fn s5_65_s0_4_last_release_waits_for_an_untracked_consumer() {
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        for consumer in [Peer::starting_on(&theirs), ordered()] {
            let column = Tensor::zeroed(&allocator, DType::U32, &[1024], &ours).unwrap();
            let tensor = column
                .to_dlpack::<DLManagedTensorVersioned>(&consumer)
                .unwrap();
            ours.synchronize().unwrap();
            let column = *column.into_buffer::<u32>().expect_err("lent").value;
            let _busy = rig.busy(&theirs);
            rig.stamp(column.ptr(), 4096, 7, &theirs);
            let syncs = rig.calls("cuCtxSynchronize");
            drop(tensor);
            assert_eq!(rig.calls("cuCtxSynchronize"), syncs);
            // Uses may continue after the export was dropped.
            let column = *column.into_buffer::<u32>().expect_err("was lent").value;
            drop(column);
            assert_eq!(rig.calls("cuCtxSynchronize"), syncs + 1);
            assert!(theirs.is_complete().unwrap());
        }
        rig.close(&allocator);
    });
}

/// S5.65: the numbers of the exchange protocol.
#[test]
fn s5_65_stream_numbers_of_the_protocol() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    // SAFETY: the only handle among them is alive.
    let of = |number| unsafe { Peer::from_protocol(&rig.context, number) };
    for number in [0, -2, i64::MIN] {
        assert_matches!(of(Some(number)), Err(Error::Stream(StreamMisuse::NotAStream { value })) if value == number);
    }
    let text = |number| format!("{:?}", of(number).unwrap());
    assert_eq!(text(Some(-1)), format!("{:?}", ordered()));
    for (number, kind) in [
        (None, "LegacyDefault"),
        (Some(1), "LegacyDefault"),
        (Some(2), "PerThreadDefault"),
    ] {
        let text = text(number);
        assert!(text.starts_with("Peer(On("), "{text}");
        assert!(text.contains(kind), "{text}");
    }
    // The owner of a handle may be dropped by the release.
    let text = text(Some(stream.raw() as i64));
    assert!(text.starts_with("Peer(StartingOn("), "{text}");
    assert!(text.contains("Borrowed"), "{text}");
}
