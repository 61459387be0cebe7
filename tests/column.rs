//! Columns and tables: what they are made of, whom they belong to, and when their memory goes.
#![cfg(feature = "sim")]

mod common;
mod exchange;

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::thread;

use common::*;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::column::*;
use cualloc::driver::{Context, Stream};
use cualloc::resource::{LaunchRecorder, RecordMode};
use cualloc::sim::SimConfig;
use exchange::*;

fn floats(allocator: &Allocator, rows: usize, stream: &Stream) -> Column {
    let values: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    Column::from_slice(allocator, &values, stream).unwrap()
}

/// An import of foreign memory, with a count of its releases.
fn foreign(
    other: &Other,
    seen: &Seen,
    versioned: bool,
    stream: &Stream,
    producer: Producer,
) -> (
    Result<Column, ImportError<DlpackTensor>>,
    &'static AtomicU64,
) {
    let counter = counter();
    // SAFETY: the other side makes valid structures, which are taken over once.
    let tensor = unsafe {
        if versioned {
            DlpackTensor::from_raw_versioned(other.make_versioned(seen, count, with(counter)))
        } else {
            DlpackTensor::from_raw(other.make(seen, count, with(counter)))
        }
    };
    let column = Column::from_dlpack(tensor.unwrap(), stream, producer);
    (column, counter)
}

fn legacy(raw: RawDlpack) -> *mut DLManagedTensor {
    match raw {
        RawDlpack::Legacy(raw) => raw,
        RawDlpack::Versioned(_) => panic!("a versioned tensor"),
    }
}

fn versioned(raw: RawDlpack) -> *mut DLManagedTensorVersioned {
    match raw {
        RawDlpack::Versioned(raw) => raw,
        RawDlpack::Legacy(_) => panic!("a legacy tensor"),
    }
}

fn live(allocator: &Allocator) -> u64 {
    allocator.stats().all.allocated.current
}

/// S5.45, S5.9: every kind of column gives pointer, bytes, stream, block and whether it is external.
#[test]
fn s5_45_s5_9_columns_say_what_they_are() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let owned = floats(&allocator, 300, &a);
        assert_ne!(owned.ptr(), 0);
        assert_eq!(owned.byte_len(), 1200);
        assert_eq!(owned.stream().id().unwrap(), a.id().unwrap());
        assert!(!owned.is_external());
        assert_eq!(owned.source(), ColumnSource::Owned);
        assert!(allocator.owns(owned.ptr()));

        // The identity is the block's, and of no other block at the same address.
        let id = owned.block().unwrap();
        let ptr = owned.ptr();
        let block = owned.into_block().unwrap();
        assert_eq!(block.generation(), (id.key.id, id.key.generation as u32));
        drop(block);
        let next = floats(&allocator, 300, &a);
        assert_eq!(next.ptr(), ptr);
        assert_ne!(next.block().unwrap().key, id.key);
        let elsewhere = rig.allocator();
        let there = floats(&elsewhere, 1, &a).block().unwrap();
        assert_ne!(there.key.source, id.key.source);
        assert_eq!(id.key.source, allocator.id());

        let Some(other) = other() else { return };
        let plain = Plain::new(&rig.context, 400);
        let seen = Seen::floats(plain.ptr, 100);
        let (imported, count) = foreign(other, &seen, false, &b, Producer::Ordered);
        let imported = imported.unwrap();
        assert_eq!((imported.ptr(), imported.byte_len()), (plain.ptr, 400));
        assert_eq!(imported.stream().id().unwrap(), b.id().unwrap());
        assert_eq!((imported.is_external(), imported.block()), (true, None));
        assert_eq!(imported.source(), ColumnSource::Dlpack);
        drop(imported);
        assert_eq!(released(count), 1);
        drop((next, plain));
        elsewhere.close().unwrap();
        rig.close(&allocator);
    });
}

/// S5.51: all element types go to the device and back, and are what DLPack calls them.
#[test]
fn s5_51_element_types() {
    fn both<T: Element + PartialEq + std::fmt::Debug>(
        allocator: &Allocator,
        stream: &Stream,
        values: &[T],
        dlpack: (u8, u8),
    ) {
        let column = Column::from_slice(allocator, values, stream).unwrap();
        assert_eq!(column.element_type(), T::TYPE);
        assert_eq!(column.byte_len(), values.len() * T::TYPE.bytes());
        assert_eq!(column.to_vec::<T>().unwrap(), values);
        let dtype = T::TYPE.dlpack();
        assert_eq!(
            (dtype.code, dtype.bits, dtype.lanes),
            (dlpack.0, dlpack.1, 1)
        );
        assert_eq!(ElementType::from_dlpack(dtype), Ok(T::TYPE));
        assert_eq!(usize::from(dtype.bits), T::TYPE.bytes() * 8);
    }
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        both(&allocator, &stream, &[i32::MIN, -1, 7], (0, 32));
        both(&allocator, &stream, &[i64::MIN, -1, 7], (0, 64));
        both(&allocator, &stream, &[u32::MAX, 0, 7], (1, 32));
        both(&allocator, &stream, &[u64::MAX, 0, 7], (1, 64));
        both(&allocator, &stream, &[-0.5f32, 1e30], (2, 32));
        both(&allocator, &stream, &[-0.5f64, 1e300], (2, 64));
        both(&allocator, &stream, &[true, false, true], (6, 8));

        // Any byte but 0 is true.
        let bytes = Column::zeroed(&allocator, ElementType::Bool, 512, &stream).unwrap();
        rig.stamp(bytes.ptr(), 256, 0x0002_0300, &stream);
        assert_eq!(
            bytes.to_vec::<bool>().unwrap()[..4],
            [false, true, true, false]
        );
        assert!(matches!(
            bytes.to_vec::<i32>(),
            Err(ColumnError::WrongType {
                expected: ElementType::I32,
                actual: ElementType::Bool
            })
        ));
        drop(bytes);
        rig.close(&allocator);
    });
}

/// S5.10: no rows, no memory, no driver call; it can be exchanged all the same.
#[test]
fn s5_10_empty_columns() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let calls = rig.driver.calls().total();
        let empty = Column::zeroed(&allocator, ElementType::F32, 0, &stream).unwrap();
        let tensor = empty.to_dlpack(&Consumer::Tracked(stream.clone())).unwrap();
        let back = Column::from_dlpack(tensor, &stream, Producer::Ordered).unwrap();
        assert_eq!((back.rows(), back.ptr(), back.block()), (0, 0, None));
        assert_eq!(back.to_vec::<f32>().unwrap(), []);
        assert_eq!(rig.driver.calls().total(), calls);
        assert!(!back.is_external());
        drop((back, empty));
        let huge = Column::uninit(&allocator, ElementType::F64, usize::MAX / 4, &stream);
        assert!(matches!(huge, Err(ColumnError::TooLarge { .. })));
        assert_eq!(rig.driver.calls().total(), calls);
    });
}

/// S5.46: what comes back through an export is still ours, and lives as long as the export.
#[test]
fn s5_46_exports_keep_identity_and_memory() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        for form in 0..2 {
            let column = floats(&allocator, 1000, &a);
            let id = column.block();
            let before = live(&allocator);
            let consumer = Consumer::Tracked(b.clone());
            let tensor = match form {
                0 => column.to_dlpack(&consumer),
                _ => column.to_dlpack_versioned(&consumer),
            };
            let back = Column::from_dlpack(tensor.unwrap(), &b, Producer::Ordered).unwrap();
            assert_eq!((back.is_external(), back.block()), (false, id));
            assert_eq!(back.source(), ColumnSource::Dlpack);
            assert_eq!(back.ptr(), column.ptr());
            // The column first: the export keeps the memory.
            let column = column.into_block().expect_err("an export is out");
            drop(column);
            assert_eq!(live(&allocator), before);
            assert_eq!(back.to_vec::<f32>().unwrap()[999], 999.0);
            // Through a second round it stays what it is.
            let again = back
                .to_dlpack_versioned(&Consumer::Tracked(a.clone()))
                .unwrap();
            drop(back);
            let again = Column::from_dlpack(again, &a, Producer::Ordered).unwrap();
            assert_eq!((again.is_external(), again.block()), (false, id));
            assert_eq!(live(&allocator), before);
            drop(again);
            assert_eq!(live(&allocator), 0);
            allocator.check().unwrap();
        }
        rig.close(&allocator);
    });
}

/// S5.47: foreign memory is external and has no block, also when it went through us.
#[test]
fn s5_47_foreign_memory_is_external() {
    let Some(other) = other() else { return };
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        for version in [false, true] {
            let seen = Seen::floats(plain.ptr, 1024);
            let (column, count) = foreign(other, &seen, version, &a, Producer::Ordered);
            let column = column.unwrap();
            assert_eq!((column.is_external(), column.block()), (true, None));
            // Strict recorders refuse it before anything is queued, permissive ones pass over it.
            let waits = rig.calls("cuStreamWaitEvent");
            let mut strict = LaunchRecorder::new(&allocator, &b, RecordMode::Strict);
            strict.read(&column).unwrap();
            assert!(strict.preflight().is_err());
            assert_eq!(rig.calls("cuStreamWaitEvent"), waits);
            drop(strict);
            let mut permissive = LaunchRecorder::new(&allocator, &b, RecordMode::Permissive);
            permissive.read(&column).unwrap().write(&column).unwrap();
            permissive.preflight().unwrap();
            permissive.commit().unwrap();
            // Neither can it be taken for a block.
            let column = column.into_block().expect_err("not our block");
            let tensor = column
                .to_dlpack_versioned(&Consumer::Tracked(b.clone()))
                .unwrap();
            drop(column);
            let through = Column::from_dlpack(tensor, &b, Producer::Ordered).unwrap();
            assert_eq!((through.is_external(), through.block()), (true, None));
            assert_eq!(released(count), 0);
            drop(through);
            assert_eq!(released(count), 1);
        }
    });
}

/// S5.48: arity, types and capacities are checked; the row count lives on the device, and the host's
/// copy is set once.
#[test]
fn s5_48_tables() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let schema = Schema::new([("key", ElementType::U32), ("value", ElementType::F64)]);
        let column = |element, rows| Column::zeroed(&allocator, element, rows, &stream).unwrap();
        let count = || column(ElementType::U64, 1);
        let make = |columns, row_count| Table::new(schema.clone(), columns, 64, row_count);

        let one = vec![column(ElementType::U32, 64)];
        assert!(matches!(
            make(one, count()),
            Err(ColumnError::Arity {
                columns: 1,
                fields: 2
            })
        ));
        let wrong = vec![column(ElementType::U32, 64), column(ElementType::F32, 64)];
        assert!(matches!(
            make(wrong, count()),
            Err(ColumnError::FieldType {
                index: 1,
                expected: ElementType::F64,
                ..
            })
        ));
        let short = vec![column(ElementType::U32, 63), column(ElementType::F64, 64)];
        assert!(matches!(
            make(short, count()),
            Err(ColumnError::ColumnRows {
                index: 0,
                rows: 63,
                capacity: 64
            })
        ));
        let both = || vec![column(ElementType::U32, 64), column(ElementType::F64, 64)];
        let wrong = make(both(), column(ElementType::U32, 1));
        assert!(matches!(wrong, Err(ColumnError::WrongType { .. })));
        let wrong = make(both(), column(ElementType::U64, 2));
        assert!(matches!(wrong, Err(ColumnError::WrongLength { .. })));

        let mut table = make(both(), count()).unwrap();
        assert_eq!((table.capacity(), table.cached_rows()), (64, None));
        assert_eq!(
            table.column("value").unwrap().element_type(),
            ElementType::F64
        );
        // The device counts.
        let ptr = table.row_count_mut_ptr();
        assert_eq!(ptr, table.row_count_ptr());
        rig.stamp(ptr, 4, 17, &stream);
        assert_eq!(table.rows().unwrap(), 17);
        assert_eq!(table.cached_rows(), Some(17));
        // Known: no driver call.
        let calls = rig.driver.calls().total();
        assert_eq!(table.rows().unwrap(), 17);
        assert_eq!(rig.driver.calls().total(), calls);
        assert!(matches!(
            table.set_cached_rows(17),
            Err(ColumnError::RowsAlreadySet { rows: 17 })
        ));
        // A device that may count again makes the host forget; too many rows are found out.
        let ptr = table.row_count_mut_ptr();
        assert_eq!(table.cached_rows(), None);
        rig.stamp(ptr, 4, 65, &stream);
        assert!(matches!(
            table.rows(),
            Err(ColumnError::OverCapacity {
                rows: 65,
                capacity: 64
            })
        ));
        // All bits set is a count, and too large; it is not taken for "unset".
        rig.stamp(ptr, 8, u32::MAX, &stream);
        assert!(matches!(
            table.rows(),
            Err(ColumnError::OverCapacity { rows: u64::MAX, .. })
        ));
        assert!(matches!(
            table.set_cached_rows(u64::MAX),
            Err(ColumnError::OverCapacity { .. })
        ));
        assert!(matches!(
            table.set_cached_rows(65),
            Err(ColumnError::OverCapacity { .. })
        ));
        assert_eq!(table.cached_rows(), None);
        table.set_cached_rows(64).unwrap();
        assert_eq!(table.rows().unwrap(), 64);
        drop(table);
        rig.close(&allocator);
    });
}

/// S5.48, S5.50: a table goes out as one tensor per column with the logical rows, and comes in if rows
/// and arity agree; otherwise everything is released.
#[test]
fn s5_48_s5_50_tables_are_exchanged() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let consumer = Consumer::Tracked(stream.clone());
        let schema = Schema::new([("key", ElementType::U32), ("value", ElementType::F64)]);
        let table = Table::with_capacity(&allocator, schema.clone(), 100, &stream).unwrap();
        rig.stamp(table.columns()[0].ptr(), 400, 9, &stream);
        rig.stamp(table.row_count_ptr(), 4, 3, &stream);
        let tensors = table.to_dlpack_versioned(&consumer).unwrap();
        let back = Table::from_dlpack(
            &allocator,
            schema.clone(),
            tensors,
            &stream,
            &Producer::Ordered,
        )
        .unwrap();
        assert_eq!((back.capacity(), back.cached_rows()), (3, Some(3)));
        assert_eq!(back.row_count().to_vec::<u64>().unwrap(), [3]);
        assert_eq!(back.columns()[0].to_vec::<u32>().unwrap(), [9, 9, 9]);
        drop(back);

        let tensors = || table.to_dlpack(&consumer).unwrap();
        let import = |tensors| {
            Table::from_dlpack(
                &allocator,
                schema.clone(),
                tensors,
                &stream,
                &Producer::Ordered,
            )
        };
        let mut few = tensors();
        few.pop();
        assert!(matches!(
            import(few),
            Err(ColumnError::Arity {
                columns: 1,
                fields: 2
            })
        ));
        let mut swapped = tensors();
        swapped.reverse();
        assert!(matches!(
            import(swapped),
            Err(ColumnError::FieldType { index: 0, .. })
        ));
        let mut unequal = tensors();
        let longer = Column::zeroed(&allocator, ElementType::F64, 4, &stream).unwrap();
        unequal[1] = longer.to_dlpack(&consumer).unwrap();
        assert!(matches!(
            import(unequal),
            Err(ColumnError::Invalid(Invalid::UnequalRows {
                expected: 3,
                actual: 4
            }))
        ));
        drop((longer, table));
        // Nothing was kept by any of them.
        assert_eq!(live(&allocator), 0);
        rig.close(&allocator);
    });
}

/// S5.49: a consumer in C finds one compact dimension on the CUDA device, and its deleter frees
/// everything once, from any thread, and bears null.
#[test]
fn s5_49_dlpack_export_through_c() {
    let Some(other) = other() else { return };
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let consumer = Consumer::Tracked(b.clone());
        for rows in [1, 1000, 300_000] {
            let column = floats(&allocator, rows, &a);
            let expected = Seen {
                major: 0,
                ..Seen::floats(column.ptr(), rows as i64)
            };
            let old = legacy(column.to_dlpack(&consumer).unwrap().into_raw());
            assert_eq!(other.see(old), expected);
            let new = versioned(column.to_dlpack_versioned(&consumer).unwrap().into_raw());
            let expected = Seen {
                major: 1,
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

/// S5.49: deleters run from many threads at once, each once, and after the allocator's handle is gone.
#[test]
fn s5_49_deleters_from_many_threads() {
    let Some(other) = other() else { return };
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let consumer = Consumer::Tracked(stream.clone());
        let tensors: Vec<(usize, bool)> = (0..64)
            .map(|index| {
                let column = floats(&allocator, 1 + index * 37, &stream);
                let tensor = match index % 2 {
                    0 => column.to_dlpack(&consumer),
                    _ => column.to_dlpack_versioned(&consumer),
                };
                (
                    tensor.unwrap().into_raw().address() as usize,
                    index % 2 == 0,
                )
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

/// S5.50: everything that a column cannot be is refused with a reason, before any driver call, and the
/// tensor is given back, to be released once.
#[test]
fn s5_50_dlpack_import_checks() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 4096);
    let good = Seen::floats(plain.ptr, 16);
    let cases = [
        (
            Seen {
                device_type: 1,
                ..good
            },
            Invalid::DeviceType { device_type: 1 },
        ),
        (
            Seen {
                device_type: 13,
                ..good
            },
            Invalid::DeviceType { device_type: 13 },
        ),
        (
            Seen {
                device_id: 1,
                ..good
            },
            Invalid::Device {
                expected: 0,
                actual: 1,
            },
        ),
        (
            Seen {
                device_id: -1,
                ..good
            },
            Invalid::Device {
                expected: 0,
                actual: -1,
            },
        ),
        (Seen { ndim: 0, ..good }, Invalid::Dimensions { ndim: 0 }),
        (Seen { ndim: 2, ..good }, Invalid::Dimensions { ndim: 2 }),
        (Seen { ndim: -1, ..good }, Invalid::Dimensions { ndim: -1 }),
        (Seen { rows: -1, ..good }, Invalid::Rows { rows: -1 }),
        (
            Seen {
                rows: i64::MAX,
                ..good
            },
            Invalid::Rows { rows: i64::MAX },
        ),
        (
            Seen {
                rows: i64::MAX / 4 + 1,
                ..good
            },
            Invalid::Rows {
                rows: i64::MAX / 4 + 1,
            },
        ),
        (Seen { stride: 2, ..good }, Invalid::Stride { stride: 2 }),
        (Seen { stride: -1, ..good }, Invalid::Stride { stride: -1 }),
        (
            Seen { lanes: 2, ..good },
            Invalid::ElementType {
                code: 2,
                bits: 32,
                lanes: 2,
            },
        ),
        (
            Seen { lanes: 0, ..good },
            Invalid::ElementType {
                code: 2,
                bits: 32,
                lanes: 0,
            },
        ),
        (
            Seen { bits: 16, ..good },
            Invalid::ElementType {
                code: 2,
                bits: 16,
                lanes: 1,
            },
        ),
        (
            Seen { code: 5, ..good },
            Invalid::ElementType {
                code: 5,
                bits: 32,
                lanes: 1,
            },
        ),
        (
            Seen { code: 6, ..good },
            Invalid::ElementType {
                code: 6,
                bits: 32,
                lanes: 1,
            },
        ),
        (
            Seen {
                byte_offset: 2,
                ..good
            },
            Invalid::Offset { offset: 2 },
        ),
        (
            Seen {
                byte_offset: u64::MAX - 3,
                ..good
            },
            Invalid::Offset {
                offset: u64::MAX - 3,
            },
        ),
        (
            Seen {
                data: plain.ptr + 2,
                ..good
            },
            Invalid::Alignment {
                address: plain.ptr + 2,
                alignment: 4,
            },
        ),
        (
            Seen {
                data: u64::MAX - 7,
                rows: 4,
                ..good
            },
            Invalid::Overflow {
                address: u64::MAX - 7,
                bytes: 16,
            },
        ),
        (Seen { data: 0, ..good }, Invalid::NoData { rows: 16 }),
    ];
    let calls = rig.driver.calls().total();
    for (seen, expected) in cases {
        for version in [false, true] {
            let (column, count) = foreign(other, &seen, version, &stream, Producer::Ordered);
            let refused = column.expect_err("refused");
            assert!(
                matches!(&refused.error, ColumnError::Invalid(why) if *why == expected),
                "{seen:?}: {:?}",
                refused.error
            );
            assert_eq!(released(count), 0, "the tensor is given back");
            drop(refused);
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
    let (column, count) = foreign(other, &unknown, true, &stream, Producer::Ordered);
    let refused = column.expect_err("refused");
    assert!(matches!(
        refused.error,
        ColumnError::Invalid(Invalid::Version { major: 2, minor: 7 })
    ));
    drop(refused);
    assert_eq!(released(count), 1);
    // SAFETY: null is allowed.
    let null = unsafe { DlpackTensor::from_raw(std::ptr::null_mut()) };
    assert!(matches!(null, Err(Invalid::Null)));
    // SAFETY: null is allowed.
    let null = unsafe { DlpackTensor::from_raw_versioned(std::ptr::null_mut()) };
    assert!(matches!(null, Err(Invalid::Null)));
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
            let (column, count) = foreign(other, &seen, version, &stream, Producer::Ordered);
            let column = column.unwrap();
            assert_eq!(column.rows(), seen.rows as usize);
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
            dtype: ElementType::I32.dlpack(),
            shape: shape.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        },
        manager_ctx: std::ptr::null_mut(),
        deleter: None,
    };
    // SAFETY: the structure outlives the column.
    let taken = unsafe { DlpackTensor::from_raw(&mut tensor) }.unwrap();
    let column = Column::from_dlpack(taken, &stream, Producer::Ordered).unwrap();
    assert_eq!(column.rows(), 16);
    drop(column);
    // A shape is needed.
    tensor.dl_tensor.shape = std::ptr::null_mut();
    // SAFETY: as above.
    let taken = unsafe { DlpackTensor::from_raw(&mut tensor) }.unwrap();
    let refused = Column::from_dlpack(taken, &stream, Producer::Ordered).unwrap_err();
    assert!(matches!(
        refused.error,
        ColumnError::Invalid(Invalid::NoShape)
    ));
}

/// S5.65: the versioned form says what the legacy one cannot: that writing is forbidden.
#[test]
fn s5_65_read_only_tensors() {
    let Some(other) = other() else { return };
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let stream = rig.stream();
    let plain = Plain::new(&rig.context, 64);
    let seen = Seen {
        flags: DLPACK_FLAG_READ_ONLY,
        ..Seen::floats(plain.ptr, 16)
    };
    let (column, count) = foreign(other, &seen, true, &stream, Producer::Ordered);
    let mut column = column.unwrap();
    assert!(column.is_read_only());
    assert!(matches!(
        column.copy_from_slice(&[0f32; 16]),
        Err(ColumnError::ReadOnly)
    ));
    let consumer = Consumer::Tracked(stream.clone());
    assert!(matches!(
        column.to_dlpack(&consumer),
        Err(ColumnError::ReadOnly)
    ));
    let raw = versioned(column.to_dlpack_versioned(&consumer).unwrap().into_raw());
    assert_eq!(other.see_versioned(raw).flags, DLPACK_FLAG_READ_ONLY);
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
        for form in 0..2 {
            let column = Column::zeroed(&allocator, ElementType::U32, 4096, &ours).unwrap();
            ours.synchronize().unwrap();
            let hold = rig.hold(&ours);
            rig.stamp(column.ptr(), 16384, 5, &ours);
            let consumer = Consumer::Tracked(theirs.clone());
            let tensor = match form {
                0 => column.to_dlpack(&consumer),
                _ => column.to_dlpack_versioned(&consumer),
            };
            // Queued, not waited for: the host is here while our stream stands still.
            assert!(!ours.is_complete().unwrap());
            let seen = Column::from_dlpack(tensor.unwrap(), &theirs, Producer::Ordered).unwrap();
            rig.stamp(seen.ptr(), 64, 6, &theirs);
            assert!(!theirs.is_complete().unwrap());
            hold.release();
            assert_eq!(rig.mismatches(seen.ptr(), 64, 6, &theirs), 0);
            assert_eq!(rig.mismatches(seen.ptr() + 64, 16384 - 64, 5, &theirs), 0);
        }
        rig.close(&allocator);
    });
}

/// S5.65: without an order asked for nothing is queued: the test above could fail.
#[test]
fn s5_65_unordered_export_queues_nothing() {
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let Some(sim) = rig.sim() else { return };
    let allocator = rig.allocator();
    let [ours, theirs] = rig.streams();
    let column = Column::zeroed(&allocator, ElementType::U32, 64, &ours).unwrap();
    let waits = rig.calls("cuStreamWaitEvent");
    let hold = rig.hold(&ours);
    rig.stamp(column.ptr(), 256, 5, &ours);
    let tensor = column.to_dlpack(&Consumer::Unordered).unwrap();
    assert_eq!(rig.calls("cuStreamWaitEvent"), waits);
    let seen = Column::from_dlpack(tensor, &theirs, Producer::Ordered).unwrap();
    rig.stamp(seen.ptr(), 256, 6, &theirs);
    theirs.synchronize().unwrap();
    hold.release();
    assert!(!sim.take_reports().is_empty(), "a race is reported");
}

/// S5.65, S0.4: memory that a consumer released is not reused while its tracked stream works.
#[test]
fn s5_65_s0_4_released_memory_waits_for_a_tracked_consumer() {
    each(|rig| {
        let allocator = rig.allocator();
        let [ours, theirs] = rig.streams();
        let bytes = 4 * MIB;
        let column = Column::zeroed(&allocator, ElementType::U32, bytes / 4, &ours).unwrap();
        let ptr = column.ptr();
        let tensor = column
            .to_dlpack(&Consumer::Tracked(theirs.clone()))
            .unwrap();
        ours.synchronize().unwrap();
        let hold = rig.hold(&theirs);
        rig.stamp(ptr, bytes, 7, &theirs);
        drop(column);
        // The host does not wait: the stream is held.
        drop(tensor);
        let next = Column::zeroed(&allocator, ElementType::U32, bytes / 4, &ours).unwrap();
        if next.ptr() == ptr {
            assert!(
                !ours.is_complete().unwrap(),
                "the same address without a wait"
            );
        }
        hold.release();
        assert_eq!(next.to_vec::<u32>().unwrap().iter().max(), Some(&0));
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
        for consumer in [Consumer::Untracked(theirs.clone()), Consumer::Unordered] {
            let column = Column::zeroed(&allocator, ElementType::U32, 1024, &ours).unwrap();
            let tensor = column.to_dlpack_versioned(&consumer).unwrap();
            ours.synchronize().unwrap();
            let column = column.into_block().expect_err("lent");
            let _busy = rig.busy(&theirs);
            rig.stamp(column.ptr(), 4096, 7, &theirs);
            let syncs = rig.calls("cuCtxSynchronize");
            drop(tensor);
            assert_eq!(rig.calls("cuCtxSynchronize"), syncs);
            // Also with the export gone its uses may go on.
            let column = column.into_block().expect_err("was lent");
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
    let of = |number| unsafe { Consumer::from_protocol(&rig.context, number) };
    for number in [0, -2, i64::MIN] {
        assert!(
            matches!(of(Some(number)), Err(ColumnError::InvalidStream { value }) if value == number)
        );
    }
    assert!(matches!(of(Some(-1)), Ok(Consumer::Unordered)));
    let legacy = Stream::legacy_default(&rig.context).unwrap();
    for number in [None, Some(1)] {
        let Ok(Consumer::Tracked(stream)) = of(number) else {
            panic!("{number:?}")
        };
        assert_eq!(stream.id().unwrap(), legacy.id().unwrap());
    }
    let own = Stream::per_thread_default(&rig.context).unwrap();
    let Ok(Consumer::Tracked(found)) = of(Some(2)) else {
        panic!()
    };
    assert_eq!(found.id().unwrap(), own.id().unwrap());
    let Ok(Consumer::Untracked(found)) = of(Some(stream.raw() as i64)) else {
        panic!()
    };
    assert_eq!(found.id().unwrap(), stream.id().unwrap());
}

/// When foreign memory was released, and what was pending then.
struct Watch {
    context: Context,
    streams: Vec<Stream>,
    complete: AtomicU64,
    releases: AtomicU64,
}

extern "C" fn watched(with: *mut c_void) {
    use std::sync::atomic::Ordering::SeqCst;
    // SAFETY: leaked by the tests below.
    let watch = unsafe { &*with.cast::<Watch>() };
    let complete = watch.streams.iter().filter(|s| s.is_complete().unwrap());
    watch.complete.store(complete.count() as u64, SeqCst);
    watch.releases.fetch_add(1, SeqCst);
    let _ = &watch.context;
}

fn watch(rig: &Rig, streams: &[&Stream]) -> &'static Watch {
    Box::leak(Box::new(Watch {
        context: rig.context.clone(),
        streams: streams.iter().map(|s| (*s).clone()).collect(),
        complete: AtomicU64::new(0),
        releases: AtomicU64::new(0),
    }))
}

fn watched_import(
    other: &Other,
    watch: &'static Watch,
    ptr: u64,
    stream: &Stream,
    producer: Producer,
) -> Column {
    let with = (watch as *const Watch).cast_mut().cast();
    // SAFETY: made by the other side, taken over once.
    let tensor = unsafe {
        DlpackTensor::from_raw_versioned(other.make_versioned(
            &Seen::floats(ptr, 1024),
            watched,
            with,
        ))
    };
    Column::from_dlpack(tensor.unwrap(), stream, producer).unwrap()
}

/// S5.65, S0.4: foreign memory goes back to its producer only when every stream that used it is done.
#[test]
fn s5_65_s0_4_import_is_released_after_its_uses() {
    let Some(other) = other() else { return };
    each(|rig| {
        let [home, second] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        let watch = watch(rig, &[&home, &second]);
        let column = watched_import(other, watch, plain.ptr, &home, Producer::Ordered);
        column.record_stream(&second).unwrap();
        column.record_stream(&second).unwrap();
        let (a, b) = (rig.busy(&home), rig.busy(&second));
        rig.stamp(plain.ptr, 2048, 1, &home);
        rig.stamp(plain.ptr + 2048, 2048, 2, &second);
        drop(column);
        assert_eq!(released(&watch.releases), 1);
        assert_eq!(
            released(&watch.complete),
            2,
            "both streams were done by then"
        );
        drop((a, b));
    });
}

/// S5.65: with the producer's stream known, it is waited for at import, waits at release, and the host
/// waits for nothing.
#[test]
fn s5_65_import_is_ordered_with_the_producer_stream() {
    let Some(other) = other() else { return };
    each(|rig| {
        let [home, theirs] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        rig.stamp(plain.ptr, 4096, 0, &theirs);
        theirs.synchronize().unwrap();
        let watch = watch(rig, &[&home]);
        let hold = rig.hold(&theirs);
        rig.stamp(plain.ptr, 4096, 1, &theirs);
        let producer = Producer::Stream(theirs.clone());
        let column = watched_import(other, watch, plain.ptr, &home, producer);
        // Behind the producer's work ...
        rig.stamp(plain.ptr, 2048, 2, &home);
        assert!(!home.is_complete().unwrap());
        drop(column);
        assert_eq!(released(&watch.releases), 1);
        assert_eq!(released(&watch.complete), 0, "nothing was waited for");
        // ... and before what it does next.
        rig.stamp(plain.ptr, 1024, 3, &theirs);
        hold.release();
        assert_eq!(rig.mismatches(plain.ptr, 1024, 3, &theirs), 0);
        assert_eq!(rig.mismatches(plain.ptr + 1024, 1024, 2, &theirs), 0);
        assert_eq!(rig.mismatches(plain.ptr + 2048, 2048, 1, &theirs), 0);
    });
}

/// R53: growth costs the same however many devices there are; only those that were asked for are given
/// access.
#[test]
fn r53_access_is_granted_on_demand() {
    if on_cuda() {
        eprintln!("SKIPPED on cuda: needs the simulator");
        return;
    }
    let growth = |devices: usize, peers: &[usize]| {
        let rig = Rig::new(Policy::Packed, SimConfig::with_devices(devices, 4 << 30));
        let sim = rig.sim().unwrap();
        let config = Config::new().peers(peers.iter().copied());
        let allocator = rig.allocator_with(config);
        let stream = rig.stream();
        let before = (rig.driver.calls(), sim.counters().nanos);
        let column = Column::zeroed(&allocator, ElementType::U32, 64 << 20, &stream).unwrap();
        let nanos = sim.counters().nanos - before.1;
        let calls = rig.driver.calls().since(&before.0);
        let calls: Vec<(String, u64)> = calls.iter().map(|(n, c)| (n.to_string(), c)).collect();
        stream.synchronize().unwrap();

        // Every device tries to write.
        let reached: Vec<usize> = (0..devices)
            .filter(|ordinal| {
                let device = rig.driver.device(*ordinal).unwrap();
                let context = Context::primary(&rig.driver, device).unwrap();
                let there = Stream::new(&context).unwrap();
                let entered = context.enter().unwrap();
                // SAFETY: the memory is allocated; the simulator reports a refused access.
                let _ = unsafe { entered.memset_d8(column.ptr(), 1, 64, there.raw()) };
                let _ = there.synchronize();
                sim.take_reports().is_empty()
            })
            .collect();
        (calls, nanos, reached)
    };
    let alone = growth(1, &[]);
    assert_eq!(alone.2, [0]);
    assert_eq!(growth(8, &[]), alone);
    // Asked for: as many calls, and access for these alone.
    let granted = growth(8, &[5, 1]);
    assert_eq!(granted.0, alone.0);
    assert_eq!(granted.2, [0, 1, 5]);
}
