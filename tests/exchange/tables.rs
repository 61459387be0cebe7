//! Columns and tables: what they are made of, whom they belong to, and when their memory goes.

use super::dlpack::{floats, live};
use crate::common::*;
use crate::foreign::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::{Context, Stream};
use cualloc::error::{ImportFault, InvalidArgument};
use cualloc::exchange::dlpack::*;
use cualloc::exchange::*;
use cualloc::resource::{AccessOrdered, BlockState, Budget, CudaMemory, Launch, MemoryResource};
use cualloc::sim::SimConfig;
use std::sync::Arc;

/// S5.45, S5.9: every kind of column gives pointer, bytes, stream, block and whether it is external.
#[test]
fn s5_45_s5_9_columns_describe_themselves() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let owned = floats(&allocator, 300, &a);
        assert_ne!(owned.ptr(), 0);
        assert_eq!(owned.byte_len(), 1200);
        assert_eq!(owned.stream().id().unwrap(), a.id().unwrap());
        assert!(!owned.is_external() && !owned.is_read_only());
        assert!(allocator.owns(owned.ptr()));

        // The identity is the block's, and of no other block at the same address.
        let id = owned.id().unwrap();
        let ptr = owned.ptr();
        let buffer = owned.into_buffer::<f32>().unwrap();
        assert_eq!(buffer.id(), Some(id));
        drop(buffer);
        let next = floats(&allocator, 300, &a);
        assert_eq!(next.ptr(), ptr);
        assert_ne!(next.id().unwrap(), id);
        let elsewhere = rig.allocator();
        let there = floats(&elsewhere, 1, &a).id().unwrap();
        assert_ne!(there.source(), id.source());
        assert_eq!(id.source(), allocator.id());

        let Some(other) = other() else { return };
        let plain = Plain::new(&rig.context, 400);
        let seen = Seen::floats(plain.ptr, 100);
        let (imported, count) = foreign_tensor(other, &seen, false, &b, ordered());
        let imported = imported.unwrap();
        assert_eq!((imported.ptr(), imported.byte_len()), (plain.ptr, 400));
        assert_eq!(imported.stream().id().unwrap(), b.id().unwrap());
        assert_eq!((imported.is_external(), imported.id()), (true, None));
        drop(imported);
        assert_eq!(released(count), 1);
        drop((next, plain));
        elsewhere.close().unwrap();
        rig.close(&allocator);
    });
}

/// S5.51: all element types that Rust has go to the device and back, and all are what DLPack calls them.
#[test]
fn s5_51_element_types() {
    fn both<T: Element + PartialEq + std::fmt::Debug>(
        allocator: &Allocator,
        stream: &Stream,
        given: &[T],
    ) {
        let column = column(allocator, given, stream).unwrap();
        assert_eq!(column.dtype(), T::DTYPE);
        assert_eq!(column.byte_len(), size_of_val(given));
        assert_eq!(values::<T>(&column).unwrap(), given);
        assert_eq!(column.into_buffer::<T>().unwrap().to_vec().unwrap(), given);
    }
    let named = [
        (DType::Bool, "bool", 6, 8),
        (DType::I8, "i8", 0, 8),
        (DType::I16, "i16", 0, 16),
        (DType::I32, "i32", 0, 32),
        (DType::I64, "i64", 0, 64),
        (DType::U8, "u8", 1, 8),
        (DType::U16, "u16", 1, 16),
        (DType::U32, "u32", 1, 32),
        (DType::U64, "u64", 1, 64),
        (DType::F16, "f16", 2, 16),
        (DType::BF16, "bf16", 4, 16),
        (DType::F32, "f32", 2, 32),
        (DType::F64, "f64", 2, 64),
        (DType::F8E4M3, "f8e4m3", 10, 8),
        (DType::F8E5M2, "f8e5m2", 12, 8),
    ];
    assert_eq!(named.map(|(dtype, ..)| dtype), DType::ALL);
    for (dtype, name, code, bits) in named {
        let written = dtype.dlpack();
        assert_eq!((written.code, written.bits, written.lanes), (code, bits, 1));
        assert_eq!(DType::from_dlpack(written), Ok(dtype));
        assert_eq!((usize::from(bits), dtype.name()), (dtype.bytes() * 8, name));
    }
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        both(&allocator, &stream, &[i8::MIN, -1, 7]);
        both(&allocator, &stream, &[i16::MIN, -1, 7]);
        both(&allocator, &stream, &[i32::MIN, -1, 7]);
        both(&allocator, &stream, &[i64::MIN, -1, 7]);
        both(&allocator, &stream, &[u8::MAX, 0, 7]);
        both(&allocator, &stream, &[u16::MAX, 0, 7]);
        both(&allocator, &stream, &[u32::MAX, 0, 7]);
        both(&allocator, &stream, &[u64::MAX, 0, 7]);
        both(&allocator, &stream, &[-0.5f32, 1e30]);
        both(&allocator, &stream, &[-0.5f64, 1e300]);

        // What Rust does not have, and truth values, are unsigned numbers of as many bytes.
        for (dtype, wide) in [
            (DType::Bool, false),
            (DType::F8E4M3, false),
            (DType::F8E5M2, false),
            (DType::F16, true),
            (DType::BF16, true),
        ] {
            let mut tensor = Tensor::zeroed(&allocator, dtype, &[4], &stream).unwrap();
            if wide {
                set(&mut tensor, &[0x3c00u16, 0, 1, 2]).unwrap();
                assert_eq!(values::<u16>(&tensor).unwrap(), [0x3c00, 0, 1, 2]);
            } else {
                set(&mut tensor, &[1u8, 0, 1, 2]).unwrap();
                assert_eq!(values::<u8>(&tensor).unwrap(), [1, 0, 1, 2]);
            }
            assert_matches!(values::<i32>(&tensor), Err(Error::Invalid(InvalidArgument::DType {
                    expected: DType::I32,
                    found
                })) if found == dtype);
            let out = lent(&tensor, true, &Peer::on(&stream));
            drop((tensor, out));
        }
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
        let empty = Tensor::zeroed(&allocator, DType::F32, &[0], &stream).unwrap();
        let tensor = empty
            .to_dlpack::<DLManagedTensor>(&Peer::on(&stream))
            .unwrap();
        let back = Tensor::from_dlpack(tensor, &stream, ordered()).unwrap();
        assert_eq!((back.shape(), back.ptr(), back.id()), (&[0][..], 0, None));
        assert_eq!(values::<f32>(&back).unwrap(), [0f32; 0]);
        assert_eq!(rig.driver.calls().total(), calls);
        assert!(!back.is_external());
        drop((back, empty));
        let huge = Tensor::uninit(&allocator, DType::F64, &[usize::MAX / 4], &stream);
        assert_matches!(huge, Err(Error::Invalid(InvalidArgument::TooLarge { .. })));
        assert_eq!(rig.driver.calls().total(), calls);
    });
}

/// S5.46: what comes back through an export is still ours, and lives as long as the export.
#[test]
fn s5_46_exports_keep_identity_and_memory() {
    each(|rig| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        for versioned in [false, true] {
            let column = floats(&allocator, 1000, &a);
            let id = column.id();
            let before = live(&allocator);
            let consumer = Peer::on(&b);
            let back = returned(&column, versioned, &consumer, &b);
            assert_eq!((back.is_external(), back.id()), (false, id));
            assert_eq!(back.ptr(), column.ptr());
            // The column first: the export keeps the memory.
            let column = *column
                .into_buffer::<f32>()
                .expect_err("an export is out")
                .value;
            drop(column);
            assert_eq!(live(&allocator), before);
            assert_eq!(
                back.as_slice::<f32>().unwrap().to_vec().unwrap()[999],
                999.0
            );
            // Through a second round it stays what it is.
            let again = back
                .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&a))
                .unwrap();
            drop(back);
            let again = Tensor::from_dlpack(again, &a, ordered()).unwrap();
            assert_eq!((again.is_external(), again.id()), (false, id));
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
            let (column, count) = foreign_tensor(other, &seen, version, &a, ordered());
            let column = column.unwrap();
            assert_eq!((column.is_external(), column.id()), (true, None));
            // Strict recorders refuse it before anything is queued, permissive ones pass over it.
            let waits = rig.calls("cuStreamWaitEvent");
            let mut strict = Launch::strict(&allocator, &b);
            strict.read(&column).unwrap();
            assert!(strict.preflight().is_err());
            assert_eq!(rig.calls("cuStreamWaitEvent"), waits);
            drop(strict);
            let mut permissive = Launch::permissive(&allocator, &b);
            permissive.read(&column).unwrap().write(&column).unwrap();
            permissive.preflight().unwrap();
            permissive.commit().unwrap();
            // Neither can it be taken for a block.
            let column = *column
                .into_buffer::<f32>()
                .expect_err("not our block")
                .value;
            let tensor = column
                .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&b))
                .unwrap();
            drop(column);
            let through = Tensor::from_dlpack(tensor, &b, ordered()).unwrap();
            assert_eq!((through.is_external(), through.id()), (true, None));
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
        let schema = Schema::new([("key", DType::U32), ("value", DType::F64)]);
        let column = |dtype, rows| Tensor::zeroed(&allocator, dtype, &[rows], &stream).unwrap();
        let count = || column(DType::U64, 1);
        let make = |columns, row_count| Table::new(schema.clone(), columns, row_count);

        let one = vec![column(DType::U32, 64)];
        assert_matches!(
            make(one, count()),
            Err(Error::Invalid(InvalidArgument::Arity {
                columns: 1,
                fields: 2
            }))
        );
        let wrong = vec![column(DType::U32, 64), column(DType::F32, 64)];
        assert_matches!(
            make(wrong, count()),
            Err(Error::Invalid(InvalidArgument::FieldType {
                index: 1,
                expected: DType::F64,
                ..
            }))
        );
        let short = vec![column(DType::U32, 63), column(DType::F64, 64)];
        assert_matches!(
            make(short, count()),
            Err(Error::Invalid(InvalidArgument::ColumnRows {
                index: 1,
                rows: 64,
                capacity: 63
            }))
        );
        let both = || vec![column(DType::U32, 64), column(DType::F64, 64)];
        let wrong = make(both(), column(DType::U32, 1));
        assert_matches!(wrong, Err(Error::Invalid(InvalidArgument::DType { .. })));
        let wrong = make(both(), column(DType::U64, 2));
        assert_matches!(wrong, Err(Error::Invalid(InvalidArgument::Length { .. })));

        let flat = Tensor::zeroed(&allocator, DType::F64, &[8, 8], &stream).unwrap();
        assert_matches!(
            make(vec![column(DType::U32, 64), flat], count()),
            Err(Error::Invalid(InvalidArgument::Dimensions {
                found: 2,
                most: 1
            }))
        );

        let mut table = make(both(), count()).unwrap();
        assert_eq!((table.capacity(), table.cached_rows()), (64, None));
        assert_eq!(table.column("value").unwrap().dtype(), DType::F64);
        assert!(!table.is_empty() && table.column("none").is_none());
        assert_eq!(make(both(), count()).unwrap().into_columns().len(), 2);
        // The device counts.
        let ptr = table.row_count_mut().ptr();
        assert_eq!(ptr, table.row_count().ptr());
        rig.stamp(ptr, 4, 17, &stream);
        assert_eq!(table.rows().unwrap(), 17);
        assert_eq!(table.cached_rows(), Some(17));
        // Known: no driver call.
        let calls = rig.driver.calls().total();
        assert_eq!(table.rows().unwrap(), 17);
        assert_eq!(rig.driver.calls().total(), calls);
        assert_matches!(
            table.set_cached_rows(17),
            Err(Error::Invalid(InvalidArgument::RowsAlreadySet { rows: 17 }))
        );
        // A device that may count again makes the host forget; too many rows are found out.
        let ptr = table.row_count_mut().ptr();
        assert_eq!(table.cached_rows(), None);
        rig.stamp(ptr, 4, 65, &stream);
        assert_matches!(
            table.rows(),
            Err(Error::Invalid(InvalidArgument::Rows {
                rows: 65,
                capacity: 64
            }))
        );
        // All bits set is a count, and too large; it is not taken for "unset".
        rig.stamp(ptr, 8, u32::MAX, &stream);
        assert_matches!(
            table.rows(),
            Err(Error::Invalid(InvalidArgument::Rows { rows: u64::MAX, .. }))
        );
        assert_matches!(
            table.set_cached_rows(u64::MAX),
            Err(Error::Invalid(InvalidArgument::Rows { .. }))
        );
        assert_matches!(
            table.set_cached_rows(65),
            Err(Error::Invalid(InvalidArgument::Rows { .. }))
        );
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
        let consumer = Peer::on(&stream);
        let schema = Schema::new([("key", DType::U32), ("value", DType::F64)]);
        let table = Table::with_capacity(&allocator, schema.clone(), 100, &stream).unwrap();
        rig.stamp(table.columns()[0].ptr(), 400, 9, &stream);
        rig.stamp(table.row_count().ptr(), 4, 3, &stream);
        let tensors = table
            .to_dlpack::<DLManagedTensorVersioned>(&consumer)
            .unwrap();
        let back =
            Table::from_dlpack(&allocator, schema.clone(), tensors, &stream, &ordered()).unwrap();
        assert_eq!((back.capacity(), back.cached_rows()), (3, Some(3)));
        assert_eq!(
            back.row_count()
                .as_slice::<u64>()
                .unwrap()
                .to_vec()
                .unwrap(),
            [3]
        );
        assert_eq!(
            back.columns()[0]
                .as_slice::<u32>()
                .unwrap()
                .to_vec()
                .unwrap(),
            [9, 9, 9]
        );
        drop(back);

        let tensors = || table.to_dlpack::<DLManagedTensor>(&consumer).unwrap();
        let import =
            |tensors| Table::from_dlpack(&allocator, schema.clone(), tensors, &stream, &ordered());
        let mut few = tensors();
        few.pop();
        assert_matches!(
            import(few),
            Err(Error::Invalid(InvalidArgument::Arity {
                columns: 1,
                fields: 2
            }))
        );
        let mut swapped = tensors();
        swapped.reverse();
        assert_matches!(
            import(swapped),
            Err(Error::Invalid(InvalidArgument::FieldType { index: 0, .. }))
        );
        let mut unequal = tensors();
        let longer = Tensor::zeroed(&allocator, DType::F64, &[4], &stream).unwrap();
        unequal[1] = longer.to_dlpack(&consumer).unwrap();
        assert_matches!(
            import(unequal),
            Err(Error::Import(ImportFault::UnequalRows {
                expected: 3,
                actual: 4
            }))
        );
        drop((longer, table));
        // Nothing was kept by any of them.
        assert_eq!(live(&allocator), 0);
        rig.close(&allocator);
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
        let before = (rig.driver.calls(), sim.calls().nanos());
        let column = Tensor::zeroed(&allocator, DType::U32, &[64 << 20], &stream).unwrap();
        let nanos = sim.calls().nanos() - before.1;
        let calls = rig.driver.calls().since(&before.0);
        let calls: Vec<(String, u64)> = calls.iter().map(|(n, c)| (n.to_string(), c)).collect();
        stream.synchronize().unwrap();

        // Every device tries to write.
        let reached: Vec<usize> = (0..devices)
            .filter(|ordinal| {
                let device = rig.driver.device(*ordinal).unwrap();
                let context = Context::primary(&device).unwrap();
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

/// The resource that `make` builds over an allocator, to be shared.
fn shared<R: MemoryResource + 'static>(
    rig: &Rig,
    make: impl FnOnce(Allocator) -> R,
) -> Arc<dyn MemoryResource> {
    Arc::new(make(rig.allocator()))
}

/// S5.45, S5.9: a column over any resource, whose block the resource knows.
#[test]
fn s5_45_s5_9_columns_are_made_of_any_resource() {
    each(|rig| {
        let stream = rig.stream();
        let stacks = [
            shared(rig, |allocator| allocator),
            shared(rig, AccessOrdered::new),
            shared(rig, |allocator| {
                Budget::new(AccessOrdered::new(allocator), Some(1 << 20))
            }),
            Arc::new(CudaMemory::new(&rig.context)),
        ];
        for resource in stacks {
            let column = column(&resource, &[3i64, 5, 8], &stream).unwrap();
            let id = column.id().unwrap();
            assert_eq!(
                (id.ptr(), id.bytes(), column.is_external()),
                (column.ptr(), 24, false)
            );
            assert_eq!(resource.state(&id), BlockState::Live);
            assert_eq!(resource.usage().unwrap().requested.current, 24);
            column.record_stream(&rig.stream()).unwrap();
            assert_eq!(values::<i64>(&column).unwrap(), [3, 5, 8]);
            let refused = column.into_buffer::<u64>().expect_err("another type");
            assert_matches!(refused.error, Error::Invalid(InvalidArgument::DType { .. }));
            let buffer = refused.value.into_buffer::<i64>().unwrap();
            assert_eq!(buffer.id(), Some(id));
            let refused = Tensor::from_buffer(buffer, &[2, 2]).expect_err("of four");
            assert_matches!(
                refused.error,
                Error::Invalid(InvalidArgument::Length {
                    expected: 4,
                    found: 3
                })
            );
            let again = Tensor::from_buffer(*refused.value, &[3, 1]).unwrap();
            assert_eq!(again.id(), Some(id));
            assert_eq!(values::<i64>(&again).unwrap(), [3, 5, 8]);
            drop(again);
            assert_eq!(resource.usage().unwrap().requested.current, 0);
            resource.reap().unwrap();
            assert_eq!(resource.state(&id), BlockState::Free);
            let zeros = Tensor::zeroed(&resource, DType::F32, &[7], &stream).unwrap();
            assert_eq!(values::<f32>(&zeros).unwrap(), [0.0; 7]);
            let empty = Tensor::uninit(&resource, DType::F32, &[0], &stream);
            assert_eq!(empty.unwrap().id(), None);
            drop(zeros);
            resource.reap().unwrap();
        }
    });
}

/// S5.47, S5.37: a launch on another stream comes between the column's own copies, by its block alone.
#[test]
fn s5_37_s5_47_recorders_accept_columns_of_their_resource() {
    each(|rig| {
        let resource = shared(rig, AccessOrdered::new);
        let [a, b] = rig.streams();
        let mut column = column(&resource, &[1u32; 1024], &a).unwrap();
        for round in 2..5u32 {
            let busy = rig.busy(&a);
            set(&mut column, &[round; 1024]).unwrap();
            let mut launch = Launch::strict(&resource, &b);
            launch.read_write(&column).unwrap();
            assert_eq!(launch.blocks().count(), 1);
            launch.preflight().unwrap();
            rig.stamp(column.ptr(), 4096, 10 * round, &b);
            launch.commit().unwrap();
            assert_eq!(
                column.as_slice::<u32>().unwrap().to_vec().unwrap(),
                [10 * round; 1024]
            );
            busy.release();
        }
        // An export comes after the launch, the end of the column after the consumer.
        let busy = rig.busy(&b);
        let mut launch = Launch::strict(&resource, &b);
        launch.write(&column).unwrap();
        launch.preflight().unwrap();
        rig.stamp(column.ptr(), 4096, 99, &b);
        launch.commit().unwrap();
        let consumer = rig.stream();
        let (ptr, id) = (column.ptr(), column.id().unwrap());
        let tensor = column
            .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&consumer))
            .unwrap();
        drop(column);
        rig.stamp(ptr, 4096, 100, &consumer);
        assert_eq!(resource.state(&id), BlockState::Live);
        drop(tensor);
        assert_ne!(resource.state(&id), BlockState::Live);
        let next = crate::common::column(&resource, &[5u32; 1024], &a).unwrap();
        busy.release();
        assert_eq!(next.as_slice::<u32>().unwrap().to_vec().unwrap(), [5; 1024]);
        drop(next);
        resource.reap().unwrap();
        assert_eq!(resource.usage().unwrap().outstanding(), 0);
    });
}
