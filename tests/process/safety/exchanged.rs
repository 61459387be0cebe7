//! Memory that is lent, comes back, or goes back, is as large as it was, and no work is left behind.

use super::World;
use crate::common::prelude::*;
use cualloc::PinnedBuffer;
use cualloc::error::InvalidArgument;
use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use cualloc::exchange::{DType, Peer, Schema, Table, Tensor};
use cualloc::pool::{DriverPool, DriverPoolConfig, TypedPool};
use cualloc::resource::{AccessOrdered, CudaMemory, Launch, MemoryResource};

/// D10: an export has no more rows than its column, whatever a table's columns were exchanged for.
#[test]
fn d10_tables_export_no_more_rows_than_their_columns_have() {
    let world = World::new(Mode::Instant, true);
    let (a, stream) = (&world.allocator, world.stream());
    let make = |rows| Tensor::zeroed(a, DType::U32, &[rows], &stream).unwrap();
    let schema = Schema::new([("only", DType::U32)]);
    let mut table = Table::from_columns(a, schema, vec![make(1 << 18)], &stream).unwrap();
    drop(std::mem::replace(&mut table.columns_mut()[0], make(16)));
    let beyond = |error| {
        matches!(
            error,
            Error::Invalid(InvalidArgument::Rows { capacity: 16, .. })
        )
    };
    let consumer = ordered();
    assert!(beyond(
        table.to_dlpack::<DLManagedTensor>(&consumer).unwrap_err()
    ));
    assert!(beyond(
        table
            .to_dlpack::<DLManagedTensorVersioned>(&consumer)
            .unwrap_err()
    ));
    drop(std::mem::replace(
        &mut table.columns_mut()[0],
        make(1 << 19),
    ));
    let mut tensors = table.to_dlpack::<DLManagedTensor>(&consumer).unwrap();
    let back = Tensor::from_dlpack(tensors.remove(0), &stream, ordered()).unwrap();
    assert_eq!(values::<u32>(&back).unwrap(), vec![0; 1 << 18]);
}

/// D2: a source that waits instead of tracking waits for the context of a block's own stream, too, however
/// the block comes back.
#[test]
fn d2_memory_without_tracking_outlives_work_of_its_streams_context() {
    let world = World::new(Mode::Manual, false);
    let second = world.beside();
    let stream = Stream::new(&second).unwrap();
    let direct = Arc::new(CudaMemory::new(&world.context));
    for resource in [
        direct.clone() as Arc<dyn MemoryResource>,
        Arc::new(AccessOrdered::new(direct)),
    ] {
        let make = || Tensor::zeroed(&resource, DType::U32, &[1 << 18], &stream);
        drop(make().unwrap());
        drop(make().unwrap().into_buffer::<u32>().expect("not shared"));
        let reports = world.sim.take_reports();
        assert!(reports.is_empty(), "{}", reports[0]);
    }
}

/// D10: the last release waits for the contexts of consumers whose streams are not tracked.
#[test]
fn d10_the_last_release_waits_for_the_consumers_contexts() {
    let world = World::new(Mode::Manual, false);
    let second = world.beside();
    let (home, theirs) = (world.stream(), Stream::new(&second).unwrap());
    let direct: Arc<dyn MemoryResource> = Arc::new(CudaMemory::new(&world.context));
    let (bytes, kind) = (1 << 20, DType::U32);
    for (column, consumer) in [
        (
            Tensor::uninit(&world.allocator, kind, &[bytes / 4], &home).unwrap(),
            Peer::starting_on(&theirs),
        ),
        (
            Tensor::uninit(&direct, kind, &[bytes / 4], &home).unwrap(),
            Peer::on(&theirs),
        ),
    ] {
        let lent = column.to_dlpack::<DLManagedTensor>(&consumer).unwrap();
        let entered = second.enter().unwrap();
        // SAFETY: the memory is lent to this stream.
        unsafe { entered.memset_d8(column.ptr(), 1, bytes, theirs.raw()) }.unwrap();
        drop(entered);
        let refused = column.into_buffer::<u32>().expect_err("lent");
        drop(lent);
        assert!(!theirs.is_complete().unwrap());
        // The last owner waits for the end of uses that are not recorded.
        drop(refused);
        assert!(theirs.is_complete().unwrap(), "{consumer:?}");
    }
}

/// D2: what only a handle could tell is not asked on a thread where the handle means another stream.
#[test]
fn d2_a_threads_own_stream_is_waited_for_from_other_threads() {
    let world = World::new(Mode::Manual, false);
    let second = world.beside();
    // A download whose event cannot be waited for.
    let home = world.stream();
    let buffer = DeviceBuffer::<u32>::zeroed(&world.allocator, 1 << 18, &home).unwrap();
    let copy = std::thread::scope(|scope| {
        let copy = || {
            let own = Stream::per_thread(&world.context);
            let host = PinnedBuffer::<u32>::zeroed(&world.context, 1 << 18).unwrap();
            buffer.download(host, &own).unwrap()
        };
        scope.spawn(copy).join().unwrap()
    });
    // None after which nothing could be waited for.
    let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
    world
        .sim
        .fail(FailPlan::call("cuEventSynchronize", code).unwrap());
    drop(copy.wait().unwrap());
    assert!(
        world
            .sim
            .pending()
            .iter()
            .all(|op| !op.kind.contains("DtoH"))
    );
    // A driver's pool, and a stream of another context than its own.
    let pool = DriverPool::new(&world.context, DriverPoolConfig::new()).unwrap();
    let pool: Arc<dyn MemoryResource> = Arc::new(pool);
    let column = std::thread::scope(|scope| {
        let make = || {
            let own = Stream::per_thread(&second);
            Tensor::zeroed(&pool, DType::U32, &[1 << 18], &own).unwrap()
        };
        scope.spawn(make).join().unwrap()
    });
    drop(column);
    assert!(
        world
            .sim
            .pending()
            .iter()
            .all(|op| !op.kind.contains("Memset"))
    );
}

/// D2: each of very many resources that keep an order is known apart.
#[test]
fn d2_no_block_bypasses_the_last_of_several_layers() {
    let world = World::new(Mode::Instant, false);
    let stream = world.stream();
    let mut all: Vec<Arc<dyn MemoryResource>> = vec![Arc::new(world.allocator.clone())];
    for below in 0..300 {
        all.push(Arc::new(AccessOrdered::new(all[below].clone())));
    }
    let block = all[300].allocate_block(&Request::new(64), &stream).unwrap();
    let failed = all[299]
        .deallocate_block(block)
        .expect_err("past the keeper");
    all[300].deallocate_block(*failed.value).unwrap();
}

/// D2: a thread's own stream is another one on each thread, also where a buffer is returned on it.
#[test]
fn d2_a_buffer_returned_on_another_threads_own_stream_is_recorded_there() {
    let world = World::new(Mode::Manual, false);
    let pool = TypedPool::new(&world.allocator);
    let own = || Stream::per_thread(&world.context);
    let elsewhere = || {
        let made = DeviceBuffer::<u32>::uninit(&pool, 1 << 18, &own()).unwrap();
        (made.as_device_ptr(), made)
    };
    let (ptr, buffer) = world.sim.as_thread(1, elsewhere);
    let _work = DeviceBuffer::<u32>::zeroed(&world.allocator, 100, &own()).unwrap();
    pool.put(buffer, Some(&own())).unwrap();
    let waits = || world.sim.calls().get("cuStreamWaitEvent");
    let before = waits();
    // The other thread's stream comes after what this one was given.
    let (again, _next) = world.sim.as_thread(1, elsewhere);
    assert!(again != ptr || waits() > before);
}

/// D2: a launch that another thread commits is not taken for work of that thread's own stream.
#[test]
fn d2_a_commit_on_another_thread_waits_for_the_launch() {
    let world = World::new(Mode::Manual, false);
    let home = world.stream();
    let resource = AccessOrdered::new(world.allocator.clone());
    let block = resource
        .allocate_block(&Request::new(1 << 20), &home)
        .unwrap();
    let launch = || {
        let own = Stream::per_thread(&world.context);
        let mut recorder = Launch::strict(&resource, &own);
        recorder.write(&block).unwrap().preflight().unwrap();
        let entered = world.context.enter().unwrap();
        // SAFETY: the memory is the block's, and recorded by the commit.
        unsafe { entered.memset_d8(block.ptr(), 1, 1 << 20, own.raw()) }.unwrap();
        recorder
    };
    let recorder = std::thread::scope(|scope| scope.spawn(launch).join().unwrap());
    recorder.commit().unwrap();
    resource.deallocate_block(block).unwrap();
    let _next = DeviceBuffer::<u8>::zeroed(&world.allocator, 1 << 20, &home).unwrap();
}
