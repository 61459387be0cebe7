//! Safe code cannot free, lend or exchange memory that safe code still owns, mixes no drivers, and does not hang in a
//! forked child. `docs/contract.md` has a row for each family of functions.

mod exchanged;

use crate::common::prelude::*;
use cualloc::PinnedBuffer;
use cualloc::error::StreamMisuse;
use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use cualloc::exchange::{DType, Peer, Tensor};
use cualloc::pool::{DriverPool, DriverPoolConfig, TypedPool, WorkspacePool};
use cualloc::resource::{Access, AccessOrdered, CudaMemory, MemoryResource};

struct World {
    sim: Simulator,
    driver: Driver,
    context: Context,
    allocator: Allocator,
}

impl World {
    fn new(mode: Mode, strict: bool) -> World {
        let mut config = SimConfig::with_devices(1, 1 << 30);
        config.mode = mode;
        config.strict_undefined = strict;
        let sim = Simulator::new(config).unwrap();
        let driver = sim.driver().unwrap();
        let context = driver.context(0).unwrap();
        let allocator = Allocator::with_config(&context, Config::new()).unwrap();
        World {
            sim,
            driver,
            context,
            allocator,
        }
    }

    fn stream(&self) -> Stream {
        Stream::new(&self.context).unwrap()
    }

    /// A second context of the device, which lives as long as the simulator.
    fn beside(&self) -> Context {
        let raw = self.sim.create_context(0).unwrap();
        // SAFETY: just created, and never destroyed.
        unsafe { Context::from_raw(&self.driver, raw) }.unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.sim.complete_all();
            assert_eq!(self.sim.take_reports(), []);
        }
    }
}

/// D2: what a block was used for is known to the resource that keeps the order of its uses, so it does not
/// go back past that.
#[test]
fn d2_no_block_bypasses_the_layer_that_tracks_its_uses() {
    let world = World::new(Mode::Lag(1000), false);
    let (home, other) = (world.stream(), world.stream());
    let ordered = AccessOrdered::new(world.allocator.clone());
    let twice = Arc::new(AccessOrdered::new(Arc::new(ordered)));
    let resource: Arc<dyn MemoryResource> = twice.clone();
    let column = Tensor::zeroed(&resource, DType::U32, &[1 << 18], &home).unwrap();
    let lent = column
        .to_dlpack::<DLManagedTensorVersioned>(&Peer::on(&other))
        .unwrap();
    drop(lent);
    drop(column);
    let mut block = twice.allocate_block(&Request::new(1 << 20), &home).unwrap();
    let kept = |error: &Error| matches!(error, Error::Stream(StreamMisuse::KeptAbove));
    for below in [
        &world.allocator as &dyn MemoryResource,
        twice.get_ref().as_ref(),
    ] {
        let failed = below.deallocate_block(block).expect_err("past the keeper");
        assert!(kept(&failed.error), "{}", failed.error);
        block = *failed.value;
    }
    twice.deallocate_block(block).unwrap();
    // Blocks of another resource of the same kind are unknown.
    let stranger = AccessOrdered::new(world.allocator.clone());
    let block = stranger.allocate_block(&Request::new(64), &home).unwrap();
    let failed = twice.deallocate_block(block).expect_err("a stranger's");
    stranger.deallocate_block(*failed.value).unwrap();
    // The same of sources that hand out names.
    for source in [
        Arc::new(DriverPool::new(&world.context, DriverPoolConfig::new()).unwrap())
            as Arc<dyn MemoryResource>,
        Arc::new(WorkspacePool::new(&world.allocator)),
        Arc::new(CudaMemory::new(&world.context)),
    ] {
        let above = AccessOrdered::new(Arc::clone(&source));
        let Ok(block) = above.allocate_block(&Request::new(4096), &home) else {
            continue;
        };
        let failed = source.deallocate_block(block).expect_err("past the keeper");
        assert!(kept(&failed.error), "{}", failed.error);
        above.deallocate_block(*failed.value).unwrap();
    }
}

/// D2: the same for small blocks, which their stream cache could take back immediately.
#[test]
fn d2_small_blocks_do_not_bypass_it_either() {
    let world = World::new(Mode::Instant, false);
    let (stream, resource) = (world.stream(), AccessOrdered::new(world.allocator.clone()));
    drop(world.allocator.allocate(100, &stream).unwrap());
    let block = resource
        .allocate_block(&Request::new(100), &stream)
        .unwrap();
    let failed = world
        .allocator
        .deallocate_block(block)
        .expect_err("past the keeper");
    resource.deallocate_block(*failed.value).unwrap();
    let block =
        MemoryResource::allocate_block(&world.allocator, &Request::new(100), &stream).unwrap();
    world.allocator.deallocate_block(block).unwrap();
}

/// D10: neither side of an exchange has to keep its word for our own memory to be in order.
#[test]
fn d10_reimported_memory_is_ordered_whatever_was_declared() {
    let consumers: [fn(&Stream) -> Peer; 3] = [
        |_| ordered(),
        |other| Peer::starting_on(other),
        |other| Peer::on(other),
    ];
    for consumer in consumers {
        let world = World::new(Mode::Manual, true);
        let [home, named, other] = [0; 3].map(|_| world.stream());
        let column = Tensor::zeroed(&world.allocator, DType::F32, &[1000], &home).unwrap();
        let tensor = column
            .to_dlpack::<DLManagedTensorVersioned>(&consumer(&named))
            .unwrap();
        let mut seen = Tensor::from_dlpack(tensor, &other, ordered()).unwrap();
        assert_eq!(values::<f32>(&seen).unwrap(), [0.0; 1000]);
        // And once more, from what came back.
        let tensor = seen
            .to_dlpack::<DLManagedTensorVersioned>(&ordered())
            .unwrap();
        let again = Tensor::from_dlpack(tensor, &named, ordered()).unwrap();
        assert_eq!(values::<f32>(&again).unwrap(), [0.0; 1000]);
        set(&mut seen, &[1.0f32; 1000]).unwrap();
        assert_eq!(values::<f32>(&column).unwrap(), [1.0; 1000]);
        drop((column, seen, again));
    }
}

/// D10: the same of an Arrow array.
#[cfg(feature = "arrow")]
#[test]
fn d10_reimported_arrays_are_ordered() {
    let world = World::new(Mode::Manual, true);
    let (home, other) = (world.stream(), world.stream());
    let column = Tensor::zeroed(&world.allocator, DType::F32, &[1000], &home).unwrap();
    let array = column.to_arrow(&ordered()).unwrap();
    let seen = Tensor::from_arrow(array, DType::F32, &other, ordered()).unwrap();
    assert_eq!(values::<f32>(&seen).unwrap(), [0.0; 1000]);
}

/// D10: columns over one memory take turns, whichever threads use them.
#[test]
fn d10_columns_of_one_memory_take_turns() {
    let world = World::new(Mode::Lag(2), true);
    let (home, other) = (world.stream(), world.stream());
    let mut column = Tensor::zeroed(&world.allocator, DType::U32, &[100], &home).unwrap();
    let tensor = column
        .to_dlpack::<DLManagedTensorVersioned>(&ordered())
        .unwrap();
    let mut seen = Tensor::from_dlpack(tensor, &other, ordered()).unwrap();
    let round = |column: &mut Tensor, value: u32| {
        for _ in 0..3000 {
            set(column, &[value; 100]).unwrap();
            let values = column.as_slice::<u32>().unwrap().to_vec().unwrap();
            assert!(values.iter().all(|v| *v == values[0]), "torn");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| round(&mut column, 1));
        scope.spawn(|| round(&mut seen, 2));
    });
}

/// D10: an operation on another thread waits for the turn, also if the first one takes long to be queued.
#[test]
fn d10_an_operation_waits_for_one_on_another_thread() {
    let world = World::new(Mode::Lag(2), true);
    let (home, other) = (world.stream(), world.stream());
    let mut column = Tensor::zeroed(&world.allocator, DType::U32, &[100], &home).unwrap();
    let lend = || column.to_dlpack::<DLManagedTensorVersioned>(&ordered());
    let mut seen = Tensor::from_dlpack(lend().unwrap(), &other, ordered()).unwrap();
    let (first, second) = (AtomicBool::new(false), AtomicBool::new(false));
    let (queued, ended) = (Arc::new(first), Arc::new(second));
    let (copies, early) = (Arc::clone(&queued), Arc::clone(&ended));
    let too_early = Arc::new(AtomicBool::new(false));
    let seen_early = Arc::clone(&too_early);
    world.sim.before(move |moment| {
        if moment.call.starts_with("cuMemcpyHtoD") && !copies.swap(true, Ordering::SeqCst) {
            for _ in 0..20_000 {
                std::thread::yield_now();
            }
            seen_early.store(early.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("a copy is queued", || queued.load(Ordering::SeqCst));
            set(&mut seen, &[2u32; 100]).unwrap();
            ended.store(true, Ordering::SeqCst);
        });
        set(&mut column, &[1u32; 100]).unwrap();
    });
    world.sim.clear_hooks();
    assert!(
        !too_early.load(Ordering::SeqCst),
        "it was queued in between"
    );
    assert_eq!(values::<u32>(&column).unwrap(), [2; 100]);
}

/// D10: what is called while an operation is queued, such as a logger, may use the same memory.
#[test]
fn d10_a_nested_operation_does_not_wait_for_the_outer_one() {
    let world = World::new(Mode::Lag(2), true);
    let (home, other) = (world.stream(), world.stream());
    let mut column = Tensor::zeroed(&world.allocator, DType::U32, &[100], &home).unwrap();
    let lend = || column.to_dlpack::<DLManagedTensorVersioned>(&ordered());
    let seen = Tensor::from_dlpack(lend().unwrap(), &other, ordered()).unwrap();
    let inside = Arc::new(Mutex::new(Some(seen)));
    let left = Arc::clone(&inside);
    world.sim.before(move |moment| {
        let seen = left
            .lock()
            .unwrap()
            .take_if(|_| moment.call.starts_with("cuMemcpyHtoD"));
        if let Some(mut seen) = seen {
            set(&mut seen, &[2u32; 100]).unwrap();
        }
    });
    set(&mut column, &[1u32; 100]).unwrap();
    world.sim.clear_hooks();
    assert!(inside.lock().unwrap().is_none(), "nothing was copied");
    assert_eq!(values::<u32>(&column).unwrap(), [1; 100]);
}

/// D10: on another thread the handle of a per-thread default stream means another stream.
#[test]
fn d10_a_column_of_a_threads_own_stream_stays_there() {
    let world = World::new(Mode::Manual, true);
    let own = Stream::per_thread(&world.context);
    let other = world.stream();
    let mut column = Tensor::zeroed(&world.allocator, DType::F32, &[1000], &own).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let wrong = |error: Error| matches!(error, Error::Stream(StreamMisuse::WrongThread));
            assert!(wrong(values::<f32>(&column).unwrap_err()));
            assert!(wrong(set(&mut column, &[1.0f32; 1000]).unwrap_err()));
            // Lending and taking back is in order all the same, and so is who comes back kept from it: what no
            // event of this thread could follow is waited for.
            assert!(
                !world.sim.pending().is_empty(),
                "the thread's own work waits"
            );
            let tensor = column
                .to_dlpack::<DLManagedTensor>(&Peer::on(&other))
                .unwrap();
            assert!(world.sim.pending().is_empty(), "nothing of it is left");
            let seen = Tensor::from_dlpack(tensor, &other, ordered()).unwrap();
            assert!(wrong(values::<f32>(&seen).unwrap_err()));
        });
    });
    assert_eq!(values::<f32>(&column).unwrap(), [0.0; 1000]);
}

fn is_foreign<T>(result: Result<T, Error>) {
    let error = result.err();
    assert_matches!(error, Some(Error::Stream(StreamMisuse::ForeignDriver)));
}

/// S4: ids and handles of one driver mean nothing to another one.
#[test]
fn s4_streams_of_another_driver_are_refused() {
    let (ours, theirs) = (
        World::new(Mode::Instant, false),
        World::new(Mode::Instant, false),
    );
    let (home, foreign) = (ours.stream(), theirs.stream());
    assert_ne!(home.id().unwrap(), foreign.id().unwrap());
    let a = &ours.allocator;
    for bytes in [100, 100 << 10, 8 << 20] {
        is_foreign(a.allocate(bytes, &foreign));
        is_foreign(a.allocate_with(Request::new(bytes).align(4096), &foreign));
        is_foreign(a.allocate_with(Request::new(bytes).cached_only(), &foreign));
        is_foreign(a.reserve(bytes, &foreign));
        let block = a.allocate(bytes, &home).unwrap();
        is_foreign(block.record_stream(&foreign));
        is_foreign(block.record_use(&foreign));
    }
    is_foreign(a.retire(&foreign));
    is_foreign(a.allocate(100, &Stream::legacy(&theirs.context)));
    is_foreign(a.allocate(100, &Stream::per_thread(&theirs.context)));

    is_foreign(DeviceBuffer::<u32>::zeroed(a, 100, &foreign));
    let mut buffer = DeviceBuffer::<u32>::zeroed(a, 100, &home).unwrap();
    is_foreign(buffer.fill(1, &foreign));
    is_foreign(buffer.prepare_use(&foreign, Access::ReadWrite));
    is_foreign(buffer.finish_use(&foreign, Access::ReadWrite));
    let host = PinnedBuffer::<u32>::zeroed(&ours.context, 100).unwrap();
    let refused = buffer.as_slice().download(host, &foreign);
    is_foreign(refused.map_err(|refused| refused.error));
    let other = DeviceBuffer::<u32>::zeroed(&theirs.allocator, 100, &foreign).unwrap();
    is_foreign(buffer.copy_from(&other.as_slice(), &home));

    assert!(Tensor::zeroed(a, DType::U32, &[100], &foreign).is_err());
    let column = Tensor::zeroed(a, DType::U32, &[100], &home).unwrap();
    let tensor = column.to_dlpack::<DLManagedTensor>(&ordered()).unwrap();
    assert!(Tensor::from_dlpack(tensor, &foreign, ordered()).is_err());
    let peer = Peer::on(&foreign);
    assert!(column.to_dlpack::<DLManagedTensor>(&peer).is_err());

    let native = DriverPool::new(&ours.context, DriverPoolConfig::new()).unwrap();
    is_foreign(DeviceBuffer::<u8>::uninit(&native, 100, &foreign));
    let workspaces = WorkspacePool::new(a);
    is_foreign(workspaces.lease(&foreign, 100));
    let typed = TypedPool::new(a);
    drop(DeviceBuffer::<u32>::uninit(&typed, 100, &home).unwrap());
    is_foreign(DeviceBuffer::<u32>::uninit(&typed, 100, &foreign));

    let resource = AccessOrdered::new(a.clone());
    let block = resource.allocate_block(&Request::new(100), &home).unwrap();
    let id = block.id();
    is_foreign(resource.record_stream(&id, &foreign));
    is_foreign(resource.record_use(&id, &foreign));
    is_foreign(resource.prepare_use(&id, &foreign, Access::Read));
    is_foreign(resource.finish_use(&id, &foreign, Access::Read));
    resource.deallocate_block(block).unwrap();

    let event = theirs.context.enter().unwrap().create_event().unwrap();
    let invalid = sys::CUresult::CUDA_ERROR_INVALID_HANDLE;
    assert_eq!(event.record(&home).unwrap_err().code(), invalid);
    assert_eq!(home.wait(&event).unwrap_err().code(), invalid);
    let entered = ours.context.enter().unwrap();
    assert_eq!(entered.query(&event).unwrap_err().code(), invalid);
    assert_eq!(entered.wait(&event).unwrap_err().code(), invalid);
    let peer = entered.enable_peer_access(&theirs.context).unwrap_err();
    assert_eq!(peer.code(), invalid);
    drop(entered);

    // Another table over the same functions is the same driver.
    let again = ours.sim.driver().unwrap();
    let context = again.context(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    drop(a.allocate(100 << 10, &stream).unwrap());
    assert!(!ours.driver.is_forked_child());
    a.check().unwrap();
}

/// D9: whatever lock a thread of the parent holds, calls in a child return immediately.
#[cfg(unix)]
#[test]
fn d9_children_of_busy_threads_do_not_hang() {
    use cualloc::pool::{PinnedConfig, PinnedPool, PoolReport};
    use cualloc::resource::{Budget, Relief, Sanitizer};

    unsafe extern "C" {
        fn fork() -> i32;
        fn alarm(seconds: u32) -> u32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    if rig.sim().is_none() {
        eprintln!("SKIPPED: a child of a process that uses a GPU is not for a test");
        return;
    }
    let context = rig.context.clone();
    let a = Allocator::with_config(&context, Config::new()).unwrap();
    let workspaces = WorkspacePool::new(&a);
    let typed = TypedPool::new(&a);
    let pinned = PinnedPool::new(&context, PinnedConfig::new().buffer_bytes(4096)).unwrap();
    let ordered = Arc::new(AccessOrdered::new(Sanitizer::new(Budget::new(
        a.clone(),
        Some(1 << 29),
    ))));
    let guard = Relief::new(Budget::new(Arc::clone(&ordered), Some(1 << 29)));
    let manager = Arc::new(Budget::of_live(Arc::clone(&ordered), Some(1 << 29)));
    let stream = rig.stream();
    let stop = AtomicBool::new(false);
    let work = |mut k: usize, stream: &Stream| {
        while !stop.load(Ordering::Relaxed) {
            k += 1;
            drop(a.allocate(100_000 + 4096 * (k % 200), stream).unwrap());
            drop(a.snapshot());
            drop(workspaces.lease(stream, 1000 * (k % 9 + 1)).unwrap());
            drop(DeviceBuffer::<u32>::uninit(&typed, k % 1000 + 1, stream).unwrap());
            drop(pinned.acquire::<u8>(100).unwrap());
            let block = ordered.allocate_block(&Request::new(1000), stream).unwrap();
            drop(ordered.get_ref().live());
            ordered.deallocate_block(block).unwrap();
            drop(DeviceBuffer::<u8>::uninit(&manager, 100, stream).unwrap());
            let block = guard.allocate_block(&Request::new(1000), stream).unwrap();
            guard.deallocate_block(block).unwrap();
        }
    };
    // All that a child may call: (whether calls that can fail did, whether the others know nothing).
    let ask = || {
        let block = ordered.allocate_block(&Request::new(100), &stream);
        let refused = a.trim(0).is_err()
            && a.allocate(100, &stream).is_err()
            && a.allocate(1 << 20, &stream).is_err()
            && a.test_views().is_err()
            && workspaces.lease(&stream, 100).is_err()
            && DeviceBuffer::<u32>::uninit(&typed, 10, &stream).is_err()
            && pinned.acquire::<u8>(100).is_err()
            && Context::primary(context.device()).is_err()
            && DeviceBuffer::<u8>::uninit(&manager, 100, &stream).is_err()
            && guard.allocate_block(&Request::new(100), &stream).is_err()
            && block.is_err();
        a.set_limit(Some(1));
        a.reset_peaks();
        let unknown = a.stats() == Default::default()
            && a.snapshot().is_empty()
            && a.check().is_err()
            && !a.owns(1 << 40)
            && a.block_of(1 << 40).is_none()
            && a.usable_size(1 << 40).is_none()
            && a.cached() == 0
            && a.fragmentation() == Default::default()
            && a.limit().is_none()
            && !a.remove_relief_hook("none");
        let text = format!(
            "{a:?} {workspaces:?} {typed:?} {pinned:?} {:?}",
            PoolReport::of(&a)
        );
        let _ = workspaces.trim(0);
        pinned.trim(0);
        let _ = (
            workspaces.usage(),
            typed.usage(),
            pinned.usage(),
            pinned.generation(),
        );
        typed.reset_accumulated_stats();
        let outstanding =
            ordered.usage().unwrap().outstanding() + ordered.get_ref().live().len() as u64;
        let (_, _) = (manager.usage().unwrap(), guard.usage().unwrap());
        guard.get_ref().on_pressure(|_, _| ());
        let _ = guard.remove_relief_hook("none");
        refused && unknown && outstanding == 0 && !text.is_empty()
    };
    let statuses: Vec<i32> = std::thread::scope(|scope| {
        for k in 0..2 {
            let (work, stream) = (&work, rig.stream());
            scope.spawn(move || work(k, &stream));
        }
        let forked = |_| {
            // SAFETY: the child calls nothing of the driver and ends here.
            let pid = unsafe { fork() };
            if pid == 0 {
                // SAFETY: as above; an alarm ends it if it hangs.
                unsafe { alarm(30) };
                let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask));
                // SAFETY: as above.
                unsafe { _exit(told.map_or(2, |good| i32::from(!good))) }
            }
            let mut status = 0;
            // SAFETY: our child, and a local.
            assert_eq!(unsafe { waitpid(pid, &mut status, 0) }, pid);
            status
        };
        let _stop = SetAtEnd(&stop);
        (0..60).map(forked).collect()
    });
    // The low bits are the signal: 14 is the alarm.
    assert!(statuses.iter().all(|status| *status == 0), "{statuses:?}");
}
