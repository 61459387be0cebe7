//! The memory manager of a device, as a composition: exact live bytes in a budget, and requests counted.

use crate::common::*;
use crate::{held, packed, refusal, take};
use cualloc::driver::{KernelParam, Module, Stream};
use cualloc::error::InvalidArgument;
use cualloc::exchange::{DType, Schema, Table, Tensor};
use cualloc::resource::*;
use cualloc::{DeviceBuffer, DeviceCopy, Error, Request};
use std::mem::MaybeUninit;
use std::sync::Arc;

pub type Manager = Arc<Budget<Arc<dyn MemoryResource>>>;

fn manager(stack: &Arc<dyn MemoryResource>, budget: u64) -> Manager {
    Arc::new(Budget::of_live(Arc::clone(stack), Some(budget)))
}

pub fn managed(rig: &Rig, budget: u64) -> (Manager, Arc<dyn MemoryResource>, Stream) {
    let stack: Arc<dyn MemoryResource> = Arc::new(AccessOrdered::new(rig.allocator()));
    (manager(&stack, budget), stack, rig.stream())
}

pub fn allocate<T: DeviceCopy>(
    manager: &Manager,
    len: usize,
    stream: &Stream,
) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
    DeviceBuffer::uninit(manager, len, stream)
}

/// Live bytes, and their peak.
fn live(manager: &Manager) -> (u64, u64) {
    let requested = manager.usage().unwrap().requested;
    (requested.current, requested.peak)
}

/// S5.1: memory comes from the resource that was named, here the driver itself, and from nowhere else.
#[test]
fn s5_1_manager_allocates_from_its_resource_alone() {
    packed(|rig| {
        let direct: Arc<dyn MemoryResource> = Arc::new(CudaMemory::new(&rig.context));
        let (manager, stream) = (manager(&direct, 1024), rig.stream());
        let before = rig.calls("cuMemAlloc_v2");
        let slice = allocate::<f32>(&manager, 200, &stream).unwrap();
        assert_eq!((live(&manager), slice.byte_len()), ((800, 800), 800));
        rig.stamp(slice.as_device_ptr(), 800, 1, &stream);
        let refused = allocate::<u8>(&manager, 225, &stream);
        let refused = refused.unwrap_err();
        assert_matches!(refused, Error::OverBudget { requested: 225, .. });
        assert_eq!(rig.calls("cuMemAlloc_v2"), before + 1);
        let block = take(&manager, 1, &stream);
        assert_eq!(rig.calls("cuMemAlloc_v2"), before + 2);
        manager.deallocate_block(block).unwrap();
        drop(slice);
        assert_eq!(live(&manager), (0, 801));
    });
}

/// S5.45, S5.48: columns, and the row counts of tables, count against a manager's budget.
#[test]
fn s5_45_s5_48_columns_count_against_the_budget() {
    packed(|rig| {
        let (manager, stack, stream) = managed(rig, 1024);
        let column = |element| Tensor::uninit(&manager, element, &[64], &stream);
        let schema = Schema::new([("key", DType::U32), ("value", DType::F64)]);
        let fields = schema.fields().iter();
        let columns: Result<_, _> = fields.map(|(_, dtype)| column(*dtype)).collect();
        let rows = Tensor::zeroed(&manager, DType::U64, &[1], &stream).unwrap();
        let table = Table::new(schema, columns.unwrap(), rows).unwrap();
        assert_eq!(live(&manager).0, 64 * 12 + 8);
        let size = (table.byte_len(), table.schema().row_bytes());
        assert_eq!((size, table.is_empty()), ((64 * 12, 12), false));
        assert!(column(DType::U64).is_err(), "512 bytes more");
        assert_eq!(manager.headroom(), Some(1024 - 776));
        drop(table);
        assert_eq!(live(&manager).0, 0);
        stack.reap().unwrap();
    });
}

const WORDS: &str = concat!(include_str!("../../src/driver/words.ptx"), "\0");

/// S5.45: slices and columns are parameters of kernels.
#[test]
fn s5_45_slices_and_columns_are_kernel_parameters() {
    packed(|rig| {
        let (manager, stack, stream) = managed(rig, 1 << 20);
        let slice = allocate::<u32>(&manager, 64, &stream).unwrap();
        let column = Tensor::zeroed(&manager, DType::U32, &[64], &stream).unwrap();
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
        let column = column.as_slice::<u32>().unwrap().to_vec().unwrap();
        assert_eq!(column, expected);
        drop(slice);
        stack.reap().unwrap();
    });
}

/// S5.2, S5.3: exact bytes, reserved before the driver is asked, rolled back on any failure.
#[test]
fn s5_2_s5_3_budget_is_exact_and_rolled_back() {
    packed(|rig| {
        let (manager, _stack, stream) = managed(rig, 1024);
        let slice = allocate::<u16>(&manager, 333, &stream).unwrap();
        assert_eq!((live(&manager).0, slice.byte_len()), (666, 666));
        drop(slice);
        match allocate::<u8>(&manager, 2048, &stream) {
            Err(Error::OverBudget {
                owner,
                requested,
                limit,
                ..
            }) => assert_eq!((owner, requested, limit), ("budget", 2048, 1024)),
            other => panic!("{other:?}"),
        }
        let overflow = allocate::<u64>(&manager, usize::MAX / 4, &stream).unwrap_err();
        let too_large = |error: &InvalidArgument| matches!(error, InvalidArgument::TooLarge { .. });
        assert_matches!(&overflow, Error::Invalid(error) if too_large(error));
        assert_eq!(live(&manager).0, 0);
        let Some(sim) = rig.sim() else { return };
        sim.fail(refusal("cuEventRecord"));
        assert!(allocate::<u8>(&manager, 1024, &stream).is_err());
        assert_eq!(live(&manager).0, 0);
    });
}

/// S5.4, S5.67: the count drops at the free, the device's budget when the memory has left.
#[test]
fn s5_4_s5_67_live_and_pending_are_apart() {
    packed(|rig| {
        let bounded = Budget::new(AccessOrdered::new(rig.allocator()), Some(3000));
        let stack: Arc<dyn MemoryResource> = Arc::new(bounded);
        let (manager, stream) = (manager(&stack, 2000), rig.stream());
        let request = Request::new(2000).tag("raw");
        let slice = DeviceBuffer::<u8>::uninit_with(&manager, request, &stream).unwrap();
        assert_eq!(slice.id().unwrap().ptr(), slice.as_device_ptr());
        drop(slice);
        assert_eq!((held(&manager), held(&stack)), ((0, 0), (0, 2000)));
        let outstanding = crate::outstanding(&stack);
        assert_eq!(outstanding, 2000, "bounds live and pending");
        let slice = allocate::<u8>(&manager, 1500, &stream).unwrap();
        let reaped = (held(&manager), held(&stack));
        assert_eq!(reaped, ((1500, 0), (1500, 0)), "reaped for it");
        drop(slice);
        stack.reap().unwrap();
        assert_eq!((held(&manager), held(&stack)), ((0, 0), (0, 0)));
    });
}

/// S5.5: the inner refusal has the same shape.
#[test]
fn s5_5_both_budgets_refuse_alike() {
    packed(|rig| {
        let stack: Arc<dyn MemoryResource> = Arc::new(Budget::new(rig.allocator(), Some(500)));
        let (manager, stream) = (manager(&stack, 1000), rig.stream());
        for (bytes, bound) in [(501, 500), (1001, 1000)] {
            match allocate::<u8>(&manager, bytes, &stream) {
                Err(Error::OverBudget {
                    requested,
                    limit,
                    used,
                    ..
                }) => assert_eq!((requested, used, limit), (bytes as u64, 0, bound)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(live(&manager).0, 0);
    });
}

/// S5.6, S5.7: queries, resets, and the proof that a region allocates nothing.
#[test]
fn s5_6_s5_7_queries_and_counts() {
    packed(|rig| {
        let (manager, _stack, stream) = managed(rig, 1000);
        let (usage, budget) = (|| manager.usage().unwrap(), &manager);
        let limits = || (usage().limit, budget.remaining());
        assert_eq!(limits(), (Some(1000), Some(1000)));
        let slice = allocate::<u8>(&manager, 800, &stream).unwrap();
        assert_eq!(limits(), (Some(1000), Some(200)));
        budget.check(200).unwrap();
        let tight = budget.check(201).unwrap_err();
        assert_matches!(tight, Error::OverBudget { requested: 201, .. });
        drop(slice);
        assert_eq!(live(&manager), (0, 800));
        manager.reset_peak_stats();
        assert_eq!((live(&manager), usage().requests), ((0, 0), 1));
        manager.reset_accumulated_stats();
        let _ = budget.check(1);
        assert_eq!(usage().requests, 0, "nothing was allocated");
        assert!(allocate::<u8>(&manager, 2000, &stream).is_err());
        assert_eq!(usage().requests, 1);
    });
}

/// S5.8, S5.54: as bytes it is the same memory with the same owner, freed once.
#[test]
fn s5_8_s5_54_bytes_of_a_slice_are_freed_once() {
    packed(|rig| {
        let (manager, stack, stream) = managed(rig, 1 << 20);
        let slice = DeviceBuffer::<f64>::zeroed(&manager, 100, &stream).unwrap();
        let (ptr, block) = (slice.as_device_ptr(), slice.id());
        let bytes = slice.into_bytes();
        let same = (bytes.as_device_ptr(), bytes.len(), bytes.id());
        assert_eq!(same, (ptr, 800, block));
        assert_eq!(bytes.home().unwrap().id(), manager.id());
        assert_eq!(live(&manager).0, 800);
        drop(bytes);
        assert_eq!((live(&manager).0, held(&stack)), (0, (0, 800)));
        let weak = Arc::downgrade(&stack);
        drop((manager, stack));
        assert!(weak.upgrade().is_none(), "nothing keeps the stack");
    });
}

/// S5.9, S5.10: who owns it; nothing costs nothing.
#[test]
fn s5_9_s5_10_identity_and_empty_slices() {
    packed(|rig| {
        let (manager, _stack, stream) = managed(rig, 100);
        let calls = rig.driver.calls().total();
        let none = allocate::<u32>(&manager, 0, &stream).unwrap();
        let unit = allocate::<[u8; 0]>(&manager, 7, &stream).unwrap();
        assert!(none.is_empty() && none.id().is_none());
        assert_eq!((unit.len(), unit.byte_len()), (7, 0));
        assert_eq!((rig.driver.calls().total(), live(&manager).0), (calls, 0));
        assert!(none.launch_id().is_none() && !none.is_external());
        let slice = allocate::<u8>(&manager, 100, &stream).unwrap();
        // SAFETY: the slice lives longer.
        let foreign = unsafe {
            DeviceBuffer::<u8>::from_raw_parts(slice.as_device_ptr(), 100, &stream, ()).unwrap()
        };
        assert!(foreign.id().is_none());
        assert!(foreign.launch_id().is_none() && foreign.is_external());
        drop(foreign);
        assert_eq!(live(&manager).0, 100);
        assert_eq!(slice.home().unwrap().id(), manager.id());
        let Some(sim) = rig.sim() else { return };
        sim.fail(refusal("cuEventRecord"));
        let slice = *slice.free().unwrap_err().value;
        assert_eq!(live(&manager).0, 100, "still there");
        slice.free().unwrap();
        assert_eq!(live(&manager).0, 0);
    });
}

/// S5.55: whatever is called, the figures stay with what is there.
#[test]
fn s5_55_no_call_desynchronises_the_figures() {
    packed(|rig| {
        let (manager, stack, stream) = managed(rig, 10_000);
        let slice = allocate::<u8>(&manager, 1000, &stream).unwrap();
        let id = slice.id().unwrap();
        manager.reset_peak_stats();
        manager.reset_accumulated_stats();
        stack.record_use(&id, &stream).unwrap();
        stack.reap().unwrap();
        stack.trim(0).unwrap();
        assert_eq!(live(&manager).0, 1000);
        drop(slice);
        let left = manager.remaining();
        assert_eq!((live(&manager).0, left), (0, Some(10_000)));
        let all = allocate::<u8>(&manager, 10_000, &stream).unwrap();
        all.free().unwrap();
        stack.reap().unwrap();
        assert_eq!((held(&manager), held(&stack)), ((0, 0), (0, 0)));
    });
}
