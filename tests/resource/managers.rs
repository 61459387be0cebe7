//! The launch recorder and the manager.

mod manager {
    use crate::common::*;
    use crate::held;
    use cualloc::driver::{KernelParam, Module, Stream, sys};
    use cualloc::error::{InvalidArgument, StreamMisuse};
    use cualloc::exchange::{DType, Schema, Table, Tensor};
    use cualloc::resource::*;
    use cualloc::sim::FailPlan;
    use cualloc::{Allocator, DeviceBuffer, DeviceCopy, Error, Policy, Request, Tag};
    use std::mem::MaybeUninit;
    use std::sync::Arc;

    const T: Tag = Tag::new("test");
    type Order = AccessOrdered<Allocator>;

    fn packed(test: impl Fn(&Rig)) {
        only(Policy::Packed, test);
    }

    fn runtime(rig: &Rig, stack: impl MemoryResource + 'static) -> DeviceRuntime {
        DeviceRuntime::new(stack, StreamPool::new(&rig.context))
    }

    fn managed(rig: &Rig, budget: u64) -> (Manager, DeviceRuntime, Stream) {
        let runtime = runtime(rig, AccessOrdered::new(rig.allocator()));
        let manager = Manager::new(0, Some(budget))
            .with_runtime(&runtime)
            .unwrap();
        let (_, stream) = runtime.streams().acquire().unwrap();
        (manager, runtime, stream)
    }

    fn allocate<T: DeviceCopy>(
        manager: &Manager,
        len: usize,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        DeviceBuffer::uninit(manager, len, stream)
    }

    fn refusal(call: &str) -> FailPlan {
        FailPlan::call(call, sys::CUresult::CUDA_ERROR_INVALID_VALUE).unwrap()
    }

    /// S5.1: without a runtime typed slices come from the driver within the budget, and raw blocks from
    /// nowhere.
    #[test]
    fn s5_1_manager_without_a_runtime_gives_typed_buffers_only() {
        packed(|rig| {
            let manager = Manager::new(0, Some(1024));
            let (before, stream) = (rig.memory_calls(), rig.stream());
            let slice = allocate::<f32>(&manager, 200, &stream).unwrap();
            assert_eq!(
                (manager.usage().unwrap().requested.current, slice.byte_len()),
                (800, 800)
            );
            assert!(rig.memory_calls() > before);
            rig.stamp(slice.as_device_ptr(), 800, 1, &stream);
            let calls = rig.memory_calls();
            let refused = allocate::<u8>(&manager, 225, &stream);
            assert!(matches!(
                refused,
                Err(Error::OverBudget { requested: 225, .. })
            ));
            let raw = manager.allocate_block(&Request::new(1), &stream);
            assert!(matches!(raw, Err(Error::NoRuntime { device: 0 })));
            assert_eq!(
                (
                    manager.usage().unwrap().requested.current,
                    rig.memory_calls()
                ),
                (800, calls)
            );
            drop(slice);
            assert_eq!(
                (
                    manager.usage().unwrap().requested.current,
                    manager.usage().unwrap().requested.peak
                ),
                (0, 800)
            );
            let elsewhere = Manager::new(1, None);
            let wrong = allocate::<u8>(&elsewhere, 1, &stream);
            assert!(matches!(wrong, Err(Error::WrongDevice { .. })));
            let other = DeviceRuntime::on(&rig.context).unwrap();
            let wrong = Manager::new(1, Some(1)).with_runtime(&other);
            assert!(matches!(wrong, Err(Error::WrongDevice { .. })));
        });
    }

    /// S5.45, S5.48: columns, and the row counts of tables, count against a manager's budget.
    #[test]
    fn s5_45_s5_48_columns_count_against_the_budget() {
        packed(|rig| {
            let (manager, runtime, stream) = managed(rig, 1024);
            let source = || Arc::new(manager.clone());
            let column = |element| Tensor::uninit(&source(), element, &[64], &stream);
            let schema = Schema::new([("key", DType::U32), ("value", DType::F64)]);
            let columns: Result<_, _> = schema
                .fields()
                .iter()
                .map(|(_, dtype)| column(*dtype))
                .collect();
            let rows = Tensor::zeroed(&source(), DType::U64, &[1], &stream).unwrap();
            let table = Table::new(schema, columns.unwrap(), rows).unwrap();
            assert_eq!(manager.usage().unwrap().requested.current, 64 * 12 + 8);
            assert_eq!(
                (table.byte_len(), table.schema().row_bytes()),
                (64 * 12, 12)
            );
            assert!(!table.is_empty());
            assert!(column(DType::U64).is_err(), "512 bytes more");
            assert_eq!(manager.clone().headroom(), Some(1024 - 776));
            drop(table);
            assert_eq!(manager.usage().unwrap().requested.current, 0);
            runtime.resource().reap().unwrap();
        });
    }

    const WORDS: &str = concat!(include_str!("../../src/driver/words.ptx"), "\0");

    /// S5.45: slices and columns are parameters of kernels.
    #[test]
    fn s5_45_slices_and_columns_are_kernel_parameters() {
        packed(|rig| {
            let (manager, runtime, stream) = managed(rig, 1 << 20);
            let slice = allocate::<u32>(&manager, 64, &stream).unwrap();
            let source = Arc::new(manager.clone());
            let column = Tensor::zeroed(&source, DType::U32, &[64], &stream).unwrap();
            let text = std::ffi::CStr::from_bytes_with_nul(WORDS.as_bytes()).unwrap();
            let module = Module::from_ptx(&rig.context, text).unwrap();
            let fill = module.function(c"cualloc_fill").unwrap();
            for (target, seed) in [(&slice as &dyn KernelParam, 7_u32), (&column, 9)] {
                let (grid, block) = ([1, 1, 1], [32, 1, 1]);
                let params: [&dyn KernelParam; 3] = [target, &64_u64, &seed];
                // SAFETY: 64 words at an address, from a seed on; all of them live.
                unsafe { fill.launch(&stream, grid, block, 0, &params) }.unwrap();
            }
            stream.synchronize().unwrap();
            let first = rig
                .sim()
                .map(|sim| sim.read_memory(slice.as_device_ptr(), 8).unwrap());
            assert!(first.is_none_or(|bytes| bytes == [7, 0, 0, 0, 8, 0, 0, 0]));
            let expected: Vec<u32> = (9..9 + 64).collect();
            assert_eq!(
                column.as_slice::<u32>().unwrap().to_vec().unwrap(),
                expected
            );
            drop((slice, column));
            runtime.resource().reap().unwrap();
        });
    }

    /// S5.2, S5.3: exact bytes, reserved before the driver is asked, rolled back on any failure.
    #[test]
    fn s5_2_s5_3_budget_is_exact_and_rolled_back() {
        packed(|rig| {
            let (manager, _runtime, stream) = managed(rig, 1024);
            let slice = allocate::<u16>(&manager, 333, &stream).unwrap();
            assert_eq!(
                (
                    manager.usage().unwrap().requested.current,
                    slice.byte_len(),
                    slice.len()
                ),
                (666, 666, 333)
            );
            drop(slice);
            match allocate::<u8>(&manager, 2048, &stream) {
                Err(Error::OverBudget {
                    owner,
                    requested,
                    limit,
                    ..
                }) => {
                    assert_eq!((owner, requested, limit), ("manager", 2048, 1024));
                }
                other => panic!("{other:?}"),
            }
            let overflow = allocate::<u64>(&manager, usize::MAX / 4, &stream);
            assert!(matches!(
                overflow,
                Err(Error::Invalid(InvalidArgument::TooLarge {
                    element_bytes: 8,
                    ..
                }))
            ));
            assert_eq!(manager.usage().unwrap().requested.current, 0);
            let Some(sim) = rig.sim() else { return };
            sim.fail(refusal("cuEventRecord"));
            assert!(allocate::<u8>(&manager, 1024, &stream).is_err());
            assert_eq!(
                (
                    manager.usage().unwrap().requested.current,
                    manager.usage().unwrap().requested.current
                ),
                (0, 0)
            );
        });
    }

    /// S5.4, S5.67: the count drops at once, the device's budget when the memory has left.
    #[test]
    fn s5_4_s5_67_live_and_pending_are_apart() {
        packed(|rig| {
            let budget = Arc::new(Budget::new(AccessOrdered::new(rig.allocator()), Some(3000)));
            let runtime = runtime(rig, Arc::clone(&budget));
            let manager = Manager::new(0, Some(2000)).with_runtime(&runtime).unwrap();
            let (_, stream) = runtime.streams().acquire().unwrap();
            let slice =
                DeviceBuffer::<u8>::uninit_with(&manager, Request::new(2000).tag("raw"), &stream)
                    .unwrap();
            assert_eq!(slice.id().unwrap().ptr(), slice.as_device_ptr());
            drop(slice);
            assert_eq!(manager.usage().unwrap().requested.current, 0);
            assert_eq!(held(runtime.resource()), (0, 2000));
            assert_eq!(
                budget.usage().unwrap().outstanding(),
                2000,
                "bounds live and pending"
            );
            let slice = allocate::<u8>(&manager, 1500, &stream).unwrap();
            assert_eq!(held(&manager), (1500, 0));
            assert_eq!(held(runtime.resource()), (1500, 0), "reaped for it");
            drop(slice);
            runtime.resource().reap().unwrap();
            assert_eq!(
                (
                    budget.usage().unwrap().outstanding(),
                    manager.usage().unwrap().outstanding()
                ),
                (0, 0)
            );
        });
    }

    /// S5.5: the inner refusal has the same shape.
    #[test]
    fn s5_5_both_budgets_refuse_alike() {
        packed(|rig| {
            let runtime = runtime(rig, Budget::new(rig.allocator(), Some(500)));
            let manager = Manager::new(0, Some(1000)).with_runtime(&runtime).unwrap();
            let stream = rig.stream();
            match allocate::<u8>(&manager, 501, &stream) {
                Err(Error::OverBudget {
                    owner,
                    requested,
                    limit,
                    used,
                }) => {
                    assert_eq!((owner, requested), ("budget", 501));
                    assert_eq!((used, limit), (0, 500));
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(manager.usage().unwrap().requested.current, 0);
        });
    }

    /// S5.6, S5.7: queries, resets, and the proof that a region allocates nothing.
    #[test]
    fn s5_6_s5_7_queries_and_counts() {
        packed(|rig| {
            let (manager, _runtime, stream) = managed(rig, 1000);
            assert_eq!(
                (
                    manager.usage().unwrap().limit,
                    manager.usage().unwrap().remaining()
                ),
                (Some(1000), Some(1000))
            );
            let slice = allocate::<u8>(&manager, 800, &stream).unwrap();
            assert_eq!(
                (
                    manager.usage().unwrap().requested.peak,
                    manager.usage().unwrap().remaining()
                ),
                (800, Some(200))
            );
            manager.check(200).unwrap();
            let tight = manager.check(201);
            assert!(matches!(
                tight,
                Err(Error::OverBudget { requested: 201, .. })
            ));
            drop(slice);
            assert_eq!(
                (
                    manager.usage().unwrap().requested.peak,
                    manager.usage().unwrap().requested.current
                ),
                (800, 0)
            );
            manager.reset_peak_stats();
            assert_eq!(manager.usage().unwrap().requested.peak, 0);
            assert_eq!(manager.usage().unwrap().requests, 1);
            manager.reset_accumulated_stats();
            let _ = manager.check(1);
            assert_eq!(
                manager.usage().unwrap().requests,
                0,
                "nothing was allocated"
            );
            assert!(allocate::<u8>(&manager, 2000, &stream).is_err());
            assert_eq!(manager.usage().unwrap().requests, 1);
        });
    }

    /// S5.8, S5.54: as bytes it is the same memory with the same owner, freed once.
    #[test]
    fn s5_8_s5_54_bytes_of_a_slice_are_freed_once() {
        packed(|rig| {
            let (manager, runtime, stream) = managed(rig, 1 << 20);
            let slice = DeviceBuffer::<f64>::zeroed(&manager, 100, &stream).unwrap();
            let (ptr, block) = (slice.as_device_ptr(), slice.id());
            let bytes = slice.into_bytes();
            assert_eq!(
                (bytes.as_device_ptr(), bytes.len(), bytes.id()),
                (ptr, 800, block)
            );
            assert_eq!(bytes.home().unwrap().id(), manager.id());
            assert_eq!(manager.usage().unwrap().requested.current, 800);
            drop(bytes);
            assert_eq!(manager.usage().unwrap().requested.current, 0);
            let outstanding = held(runtime.resource());
            assert_eq!(outstanding, (0, 800));
            let resource = Arc::downgrade(runtime.resource());
            drop((manager, runtime));
            assert!(resource.upgrade().is_none(), "nothing keeps the runtime");
        });
    }

    /// S5.9, S5.10: who owns it; nothing costs nothing.
    #[test]
    fn s5_9_s5_10_identity_and_empty_slices() {
        packed(|rig| {
            let (manager, _runtime, stream) = managed(rig, 100);
            let calls = rig.driver.calls().total();
            let none = allocate::<u32>(&manager, 0, &stream).unwrap();
            let unit = allocate::<[u8; 0]>(&manager, 7, &stream).unwrap();
            assert!(none.is_empty() && none.id().is_none());
            assert_eq!((unit.len(), unit.byte_len()), (7, 0));
            assert_eq!(rig.driver.calls().total(), calls);
            assert_eq!(manager.usage().unwrap().requested.current, 0);
            assert!(none.launch_id().is_none() && !none.is_external());
            let slice = allocate::<u8>(&manager, 100, &stream).unwrap();
            // SAFETY: the slice lives longer.
            let foreign = unsafe {
                DeviceBuffer::<u8>::from_raw_parts(slice.as_device_ptr(), 100, &stream, ()).unwrap()
            };
            assert!(foreign.id().is_none());
            assert!(foreign.launch_id().is_none() && foreign.is_external());
            drop(foreign);
            assert_eq!(manager.usage().unwrap().requested.current, 100);
            assert_eq!(slice.home().unwrap().id(), manager.id());
            assert!(manager.id() >= 1);
            let Some(sim) = rig.sim() else { return };
            sim.fail(refusal("cuEventRecord"));
            let slice = *slice.free().unwrap_err().value;
            assert_eq!(
                manager.usage().unwrap().requested.current,
                100,
                "still there"
            );
            slice.free().unwrap();
            assert_eq!(manager.usage().unwrap().requested.current, 0);
        });
    }

    /// S5.55: whatever is called, the heap stay with what is there.
    #[test]
    fn s5_55_no_call_desynchronises_the_figures() {
        packed(|rig| {
            let (manager, runtime, stream) = managed(rig, 10_000);
            let slice = allocate::<u8>(&manager, 1000, &stream).unwrap();
            let id = slice.id().unwrap();
            manager.reset_peak_stats();
            manager.reset_accumulated_stats();
            runtime.resource().record_use(&id, &stream).unwrap();
            runtime.resource().reap().unwrap();
            runtime.resource().trim(0).unwrap();
            assert_eq!(manager.usage().unwrap().requested.current, 1000);
            drop(slice);
            assert_eq!(
                (
                    manager.usage().unwrap().requested.current,
                    manager.usage().unwrap().remaining()
                ),
                (0, Some(10_000))
            );
            allocate::<u8>(&manager, 10_000, &stream)
                .unwrap()
                .free()
                .unwrap();
            runtime.resource().reap().unwrap();
            assert_eq!(held(&manager), (0, 0));
        });
    }

    fn pair(rig: &Rig) -> (Order, Stream, Stream, RawBlock, RawBlock) {
        let resource = AccessOrdered::new(rig.allocator());
        let [a, b] = rig.streams();
        let one = resource
            .allocate_block(&Request::new(4096).tag(T), &a)
            .unwrap();
        let two = resource
            .allocate_block(&Request::new(4096).tag(T), &a)
            .unwrap();
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
            let block = direct.allocate_block(&Request::new(64).tag(T), &b).unwrap();
            let mut strict = Launch::strict(&direct, &b);
            strict.read(&block).unwrap();
            assert!(matches!(
                strict.preflight(),
                Err(Error::Rejected {
                    index: 0,
                    external: false
                })
            ));
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
                assert!(matches!(
                    result,
                    Err(Error::Stream(StreamMisuse::LaunchOrder { .. }))
                ));
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
            assert!(matches!(
                recorder.preflight(),
                Err(Error::UseAfterFree { .. })
            ));
        });
    }

    /// S5.44: one slice, without a recorder.
    #[test]
    fn s5_44_single_slice_helpers() {
        packed(|rig| {
            let (manager, runtime, stream) = managed(rig, 1 << 20);
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
            runtime.resource().reap().unwrap();
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
}
