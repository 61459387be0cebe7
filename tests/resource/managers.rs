//! Managers: typed buffers and blocks within a budget, and its figures.

use crate::common::*;
use crate::held;
use cualloc::driver::{KernelParam, Module, Stream, sys};
use cualloc::error::InvalidArgument;
use cualloc::exchange::{DType, Schema, Table, Tensor};
use cualloc::resource::*;
use cualloc::sim::FailPlan;
use cualloc::{DeviceBuffer, DeviceCopy, Error, Policy, Request};
use std::mem::MaybeUninit;
use std::sync::Arc;

pub fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

fn runtime(rig: &Rig, stack: impl MemoryResource + 'static) -> DeviceRuntime {
    DeviceRuntime::new(stack, StreamPool::new(&rig.context))
}

pub fn managed(rig: &Rig, budget: u64) -> (Manager, DeviceRuntime, Stream) {
    let runtime = runtime(rig, AccessOrdered::new(rig.allocator()));
    let manager = Manager::new(0, Some(budget))
        .with_runtime(&runtime)
        .unwrap();
    let (_, stream) = runtime.streams().acquire().unwrap();
    (manager, runtime, stream)
}

pub fn allocate<T: DeviceCopy>(
    manager: &Manager,
    len: usize,
    stream: &Stream,
) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
    DeviceBuffer::uninit(manager, len, stream)
}

pub fn refusal(call: &str) -> FailPlan {
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
