//! Columns and tables: what they are made of, whom they belong to, and when their memory goes.

use crate::common::*;
use crate::exchange::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::column::*;
use cualloc::driver::{Context, Stream};
use cualloc::error::{ImportFault, InvalidArgument};
use cualloc::resource::{AccessOrdered, BlockState, Budget, CudaMemory, Launch, MemoryResource};
use cualloc::sim::SimConfig;
use std::sync::Arc;

fn floats(allocator: &Allocator, rows: usize, stream: &Stream) -> Column {
    let values: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    Column::from_slice(allocator, &values, stream).unwrap()
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
        let (record, life) = block.generation();
        assert_eq!(id.generation(), u64::from(life) << 32 | u64::from(record));
        drop(block);
        let next = floats(&allocator, 300, &a);
        assert_eq!(next.ptr(), ptr);
        assert_ne!(next.block().unwrap(), id);
        let elsewhere = rig.allocator();
        let there = floats(&elsewhere, 1, &a).block().unwrap();
        assert_ne!(there.source(), id.source());
        assert_eq!(id.source(), allocator.id());

        let Some(other) = other() else { return };
        let plain = Plain::new(&rig.context, 400);
        let seen = Seen::floats(plain.ptr, 100);
        let (imported, count) = foreign_tensor(other, &seen, false, &b, Producer::Ordered);
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
            Err(Error::Invalid(InvalidArgument::DType {
                expected: ElementType::I32,
                found: ElementType::Bool
            }))
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
        assert_eq!(back.to_vec::<f32>().unwrap(), [0f32; 0]);
        assert_eq!(rig.driver.calls().total(), calls);
        assert!(!back.is_external());
        drop((back, empty));
        let huge = Column::uninit(&allocator, ElementType::F64, usize::MAX / 4, &stream);
        assert!(matches!(
            huge,
            Err(Error::Invalid(InvalidArgument::TooLarge { .. }))
        ));
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
            let (column, count) = foreign_tensor(other, &seen, version, &a, Producer::Ordered);
            let column = column.unwrap();
            assert_eq!((column.is_external(), column.block()), (true, None));
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
            Err(Error::Invalid(InvalidArgument::Arity {
                columns: 1,
                fields: 2
            }))
        ));
        let wrong = vec![column(ElementType::U32, 64), column(ElementType::F32, 64)];
        assert!(matches!(
            make(wrong, count()),
            Err(Error::Invalid(InvalidArgument::FieldType {
                index: 1,
                expected: ElementType::F64,
                ..
            }))
        ));
        let short = vec![column(ElementType::U32, 63), column(ElementType::F64, 64)];
        assert!(matches!(
            make(short, count()),
            Err(Error::Invalid(InvalidArgument::ColumnRows {
                index: 0,
                rows: 63,
                capacity: 64
            }))
        ));
        let both = || vec![column(ElementType::U32, 64), column(ElementType::F64, 64)];
        let wrong = make(both(), column(ElementType::U32, 1));
        assert!(matches!(
            wrong,
            Err(Error::Invalid(InvalidArgument::DType { .. }))
        ));
        let wrong = make(both(), column(ElementType::U64, 2));
        assert!(matches!(
            wrong,
            Err(Error::Invalid(InvalidArgument::Length { .. }))
        ));

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
            Err(Error::Invalid(InvalidArgument::RowsAlreadySet { rows: 17 }))
        ));
        // A device that may count again makes the host forget; too many rows are found out.
        let ptr = table.row_count_mut_ptr();
        assert_eq!(table.cached_rows(), None);
        rig.stamp(ptr, 4, 65, &stream);
        assert!(matches!(
            table.rows(),
            Err(Error::Invalid(InvalidArgument::Rows {
                rows: 65,
                capacity: 64
            }))
        ));
        // All bits set is a count, and too large; it is not taken for "unset".
        rig.stamp(ptr, 8, u32::MAX, &stream);
        assert!(matches!(
            table.rows(),
            Err(Error::Invalid(InvalidArgument::Rows { rows: u64::MAX, .. }))
        ));
        assert!(matches!(
            table.set_cached_rows(u64::MAX),
            Err(Error::Invalid(InvalidArgument::Rows { .. }))
        ));
        assert!(matches!(
            table.set_cached_rows(65),
            Err(Error::Invalid(InvalidArgument::Rows { .. }))
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
            Err(Error::Invalid(InvalidArgument::Arity {
                columns: 1,
                fields: 2
            }))
        ));
        let mut swapped = tensors();
        swapped.reverse();
        assert!(matches!(
            import(swapped),
            Err(Error::Invalid(InvalidArgument::FieldType { index: 0, .. }))
        ));
        let mut unequal = tensors();
        let longer = Column::zeroed(&allocator, ElementType::F64, 4, &stream).unwrap();
        unequal[1] = longer.to_dlpack(&consumer).unwrap();
        assert!(matches!(
            import(unequal),
            Err(Error::Import(ImportFault::UnequalRows {
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

/// What `make` puts over an allocator, to be shared.
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
            let column = Column::from_slice_in(Arc::clone(&resource), &[3i64, 5, 8], &stream);
            let column = column.unwrap();
            let id = column.block().unwrap();
            assert_eq!(
                (id.ptr(), id.bytes(), column.is_external()),
                (column.ptr(), 24, false)
            );
            assert_eq!(resource.state(&id), BlockState::Live);
            assert_eq!(resource.usage().unwrap().requested.current, 24);
            column.record_stream(&rig.stream()).unwrap();
            assert_eq!(column.to_vec::<i64>().unwrap(), [3, 5, 8]);
            // Neither is it an allocator's.
            let column = column.into_block().expect_err("a resource's");
            let owned = column.into_owned().unwrap();
            assert_eq!(owned.id(), Some(id));
            // SAFETY: the block's own stream, and nothing else uses it.
            let refused = unsafe { Column::from_owned(owned, ElementType::I64, 1000, &stream) };
            let refused = refused.unwrap_err();
            assert!(matches!(
                refused.error,
                Error::Invalid(InvalidArgument::TooSmall { .. })
            ));
            // SAFETY: as above.
            let again = unsafe { Column::from_owned(*refused.value, ElementType::I64, 2, &stream) };
            let again = again.unwrap();
            assert_eq!(
                (again.block(), again.to_vec::<i64>().unwrap()),
                (Some(id), vec![3, 5])
            );
            drop(again);
            assert_eq!(resource.usage().unwrap().requested.current, 0);
            resource.reap().unwrap();
            assert_eq!(resource.state(&id), BlockState::Free);
            let zeros = Column::zeroed_in(Arc::clone(&resource), ElementType::F32, 7, &stream);
            assert_eq!(zeros.unwrap().to_vec::<f32>().unwrap(), [0.0; 7]);
            let empty = Column::uninit_in(Arc::clone(&resource), ElementType::F32, 0, &stream);
            assert_eq!(empty.unwrap().block(), None);
            resource.reap().unwrap();
        }
    });
}

/// S5.47, S5.37: a launch on another stream comes between the column's own copies, by its block alone.
#[test]
fn s5_37_s5_47_recorders_know_columns_of_their_resource() {
    each(|rig| {
        let resource = shared(rig, AccessOrdered::new);
        let [a, b] = rig.streams();
        let mut column = Column::from_slice_in(Arc::clone(&resource), &[1u32; 1024], &a).unwrap();
        for round in 2..5u32 {
            let busy = rig.busy(&a);
            column.copy_from_slice(&[round; 1024]).unwrap();
            let mut launch = Launch::strict(&resource, &b);
            launch.read_write(&column).unwrap();
            assert_eq!(launch.blocks().count(), 1);
            launch.preflight().unwrap();
            rig.stamp(column.ptr(), 4096, 10 * round, &b);
            launch.commit().unwrap();
            assert_eq!(column.to_vec::<u32>().unwrap(), [10 * round; 1024]);
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
        let (ptr, id) = (column.ptr(), column.block().unwrap());
        let tensor = column
            .to_dlpack_versioned(&Consumer::Tracked(consumer.clone()))
            .unwrap();
        drop(column);
        rig.stamp(ptr, 4096, 100, &consumer);
        assert_eq!(resource.state(&id), BlockState::Live);
        drop(tensor);
        assert_ne!(resource.state(&id), BlockState::Live);
        let next = Column::from_slice_in(Arc::clone(&resource), &[5u32; 1024], &a).unwrap();
        busy.release();
        assert_eq!(next.to_vec::<u32>().unwrap(), [5; 1024]);
        drop(next);
        resource.reap().unwrap();
        assert_eq!(resource.usage().unwrap().outstanding(), 0);
    });
}
