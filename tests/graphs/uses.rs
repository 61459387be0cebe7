//! Uses of a pool's memory by work outside of captures, beside graphs that were captured with it.

use super::support::*;
use cualloc::error::StreamMisuse;

/// [`pooled`] on a simulator with interludes.
fn with_interludes<const N: usize>(
    test: impl Fn(&Rig, &Simulator, Allocator, GraphPool, [Stream; N]),
) {
    pooled(|rig, allocator, pool, streams| {
        let Some(sim) = rig.sim() else { return };
        interlude::install(sim);
        test(rig, sim, allocator, pool, streams);
    });
}

#[test]
fn work_outside_gets_no_memory_that_a_launch_would_write() {
    pooled(|rig, allocator, pool, [stream]| {
        let mut at = 0;
        let graph = capture(&pool, &stream, || {
            at = used(rig, &allocator, 4 * MIB, &stream).ptr();
        });
        let scope = pool.enter(Scope::Thread).unwrap();
        let beside = used(rig, &allocator, 4 * MIB, &stream);
        assert_ne!(beside.ptr(), at);
        run(&graph, &stream);
        let word = 4 * MIB as u32;
        assert_eq!(rig.mismatches(beside.ptr(), 4 * MIB, word, &stream), 0);
        // No graph uses it, so it is reused immediately, and captures may get it.
        let own = beside.ptr();
        drop(beside);
        assert_eq!(used(rig, &allocator, 4 * MIB, &stream).ptr(), own);
        rig.settle(&stream);
        drop(scope);
        let large = graph_of((rig, &allocator), &pool, 8 * MIB, &stream);
        assert_eq!(footprint(&allocator, &pool).physical, 8 * MIB as u64);
        let _scope = pool.enter(Scope::Thread).unwrap();
        assert_ne!(used(rig, &allocator, 4 * MIB, &stream).ptr(), own);
        drop((graph, large));
        // No launch comes any more.
        await_leases(&allocator, &pool, 0);
        rig.settle(&stream);
        let first = used(rig, &allocator, 4 * MIB, &stream);
        let second = used(rig, &allocator, 4 * MIB, &stream);
        assert!([first.ptr(), second.ptr()].contains(&at));
    });
}

#[test]
fn a_block_that_a_capture_recorded_is_a_graphs_from_then_on() {
    pooled(|rig, allocator, pool, [stream, reader]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = used(rig, &allocator, 2 * MIB, &stream);
        let at = block.ptr();
        rig.settle(&stream);
        let under_way = Capturing::begin(&reader, MODE);
        rig.stamp(at, 2 * MIB, 1, &reader);
        block.record_stream(&reader).unwrap();
        let graph = under_way.end().unwrap();
        drop(block);
        rig.settle(&stream);
        rig.settle(&reader);
        let other = used(rig, &allocator, 2 * MIB, &stream);
        assert_ne!(other.ptr(), at, "the graph writes there");
        run(&graph, &reader);
        // A graph that was made by hand may use whatever there is.
        drop(graph);
        let own = other.ptr();
        drop(other);
        let by_hand = Graph::new(&rig.context).unwrap();
        // SAFETY: the graph is alive, and this thread's.
        unsafe { pool.retain(by_hand.raw()) }.unwrap();
        let third = used(rig, &allocator, 2 * MIB, &stream);
        assert!(third.ptr() != own && third.ptr() != at);
    });
}

/// A block's own stream is not recorded on it: the free finds that it captures, and is put off until it does not.
#[test]
fn a_block_that_is_freed_while_its_own_stream_captures_is_a_graphs() {
    pooled(|rig, allocator, pool, [stream]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        for by_another_thread in [false, true] {
            let block = used(rig, &allocator, 2 * MIB, &stream);
            let at = block.ptr();
            rig.settle(&stream);
            let under_way = Capturing::begin(&stream, MODE);
            rig.stamp(at, 2 * MIB, 1, &stream);
            match by_another_thread {
                true => std::thread::scope(|threads| {
                    threads.spawn(|| drop(block));
                }),
                false => drop(block),
            }
            let graph = under_way.end().unwrap();
            rig.settle(&stream);
            let others = [(); 2].map(|()| used(rig, &allocator, 2 * MIB, &stream));
            for other in &others {
                assert_ne!(other.ptr(), at, "the graph writes there");
            }
            run(&graph, &stream);
            drop((graph, others));
            rig.settle(&stream);
        }
    });
}

/// A plan sets memory aside that still waits for work; meanwhile others look at what waits, and the plan fails.
#[test]
fn memory_of_a_failed_plan_keeps_its_uses() {
    with_interludes(|rig, sim, allocator, pool, [stream, other]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        let at = block.ptr();
        let held = rig.hold(&stream);
        rig.stamp(at, 2 * MIB, 1, &stream);
        // Another use that is waited for; otherwise nothing would be polled.
        drop(used(rig, &allocator, MIB, &other));
        drop(block);
        sim.fail(FailPlan::call("cuMemCreate", CUresult::CUDA_ERROR_INVALID_VALUE).unwrap());
        let looking = allocator.clone();
        interlude::before("cuMemCreate", move || {
            looking.trim(0).unwrap();
            looking.check().unwrap();
        });
        // The front of it is free memory, the rest is new.
        allocator.allocate(4 * MIB, &stream).unwrap_err();
        assert!(!interlude::is_due());
        assert_eq!(sim.clear_failures(), 0);
        allocator.check().unwrap();
        let beside = used(rig, &allocator, 2 * MIB, &other);
        assert_ne!(beside.ptr(), at, "its kernel has not begun");
        held.release();
        rig.settle(&stream);
        let behind = used(rig, &allocator, 2 * MIB, &other);
        assert_eq!(behind.ptr(), at);
    });
}

/// A plan sets memory aside that a capture freed; the capture ends meanwhile, and the plan fails.
#[test]
fn memory_that_a_failed_plan_had_is_free_when_the_capture_has_ended() {
    with_interludes(|rig, sim, allocator, pool, [stream]| {
        let scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        let block = used(rig, &allocator, 2 * MIB, &stream);
        let at = block.ptr();
        drop(block);
        sim.fail(FailPlan::call("cuMemCreate", CUresult::CUDA_ERROR_INVALID_VALUE).unwrap());
        let looking = allocator.clone();
        interlude::before("cuMemCreate", move || {
            drop(under_way.end().unwrap());
            // This notices the end of the capture.
            looking.trim(0).unwrap();
        });
        allocator.allocate(4 * MIB, &stream).unwrap_err();
        assert!(!interlude::is_due());
        assert_eq!(sim.clear_failures(), 0);
        scope.leave().unwrap();
        assert_eq!(footprint(&allocator, &pool).free, 2 * MIB as u64);
        let next = capture(&pool, &stream, || {
            assert_eq!(used(rig, &allocator, 2 * MIB, &stream).ptr(), at);
        });
        assert_eq!(footprint(&allocator, &pool).physical, 2 * MIB as u64);
        run(&next, &stream);
    });
}

#[test]
fn a_retirement_waits_for_a_free_that_uses_the_stream() {
    with_interludes(|rig, sim, allocator, pool, []| {
        let raw = RawStream::new(rig);
        let _scope = pool.enter(Scope::Thread).unwrap();
        let at = allocator.raw_allocate(2 * MIB, raw.raw()).unwrap();
        let gone = Arc::new(AtomicBool::new(false));
        let (done, stream) = (Arc::clone(&gone), raw.raw() as usize);
        let (retiring, driver) = (allocator.clone(), rig.driver.clone());
        let functions = sim.functions();
        let records = rig.calls("cuEventRecord");
        interlude::before("cuEventRecord", move || {
            let done = Arc::clone(&done);
            let seen = Arc::clone(&done);
            std::thread::spawn(move || {
                let stream = stream as sys::CUstream;
                // SAFETY: the stream is alive, and nothing more comes.
                unsafe {
                    retiring.retire_raw(stream).unwrap();
                    let code = functions.cuStreamDestroy_v2.unwrap()(stream);
                    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
                }
                done.store(true, Ordering::Release);
            });
            // Its own event is recorded; from there it has to wait for this call.
            wait_until("the retirement has recorded its event", || {
                driver.calls().get("cuEventRecord") != records
            });
            let mut rounds = 0;
            while !seen.load(Ordering::Acquire) && rounds < 20_000 {
                std::thread::yield_now();
                rounds += 1;
            }
        });
        allocator.raw_free(at).unwrap();
        assert!(!interlude::is_due());
        wait_until("the stream is retired", || gone.load(Ordering::Acquire));
        std::mem::forget(raw);
    });
}

#[test]
fn a_block_that_comes_back_forgets_streams_that_were_retired() {
    pooled(|rig, allocator, pool, [stream]| {
        let raw = RawStream::new(rig);
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        allocator.raw_record_stream(block.ptr(), raw.raw()).unwrap();
        let point = pool.checkpoint().unwrap();
        drop(block);
        raw.retire(&allocator);
        rig.settle(&stream);
        allocator.trim(0).unwrap();
        drop(used(rig, &allocator, MIB, &stream));
        rig.settle(&stream);
        // SAFETY: no block ceases.
        let restored = unsafe { pool.restore(&point) };
        match restored {
            // The memory went back.
            Err(error) => assert_eq!(graph_pool_error(error), GraphPoolError::ForeignCheckpoint),
            Ok(restored) => drop(restored),
        }
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        let raws = [(); 2].map(|()| RawStream::new(rig));
        for raw in &raws {
            allocator.raw_record_stream(block.ptr(), raw.raw()).unwrap();
        }
        let graph = Graph::new(&rig.context).unwrap();
        // SAFETY: the graph is alive, and this thread's: the addresses stay.
        unsafe { pool.retain(graph.raw()) }.unwrap();
        let point = pool.checkpoint().unwrap();
        drop(block);
        raws.into_iter().for_each(|raw| raw.retire(&allocator));
        rig.settle(&stream);
        // SAFETY: no block ceases.
        let restored = unsafe { pool.restore(&point) }.unwrap();
        assert_eq!(restored.revived.len(), 1);
    });
}

/// The uses of a raw stream are complete and forgotten, except that a checkpoint has the block.
#[test]
fn a_block_that_comes_back_forgets_streams_that_were_unknown_when_retired() {
    pooled(|rig, allocator, pool, [stream]| {
        let raw = RawStream::new(rig);
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        allocator.raw_record_stream(block.ptr(), raw.raw()).unwrap();
        let graph = Graph::new(&rig.context).unwrap();
        // SAFETY: the graph is alive, and this thread's: the addresses stay.
        unsafe { pool.retain(graph.raw()) }.unwrap();
        let point = pool.checkpoint().unwrap();
        drop(block);
        rig.settle(&stream);
        allocator.trim(0).unwrap();
        let unknown = allocator.raw_retire(raw.raw());
        assert_matches!(unknown, Err(Error::Stream(StreamMisuse::Unknown { .. })));
        raw.destroy();
        // SAFETY: no block ceases.
        let restored = unsafe { pool.restore(&point) }.unwrap();
        assert_eq!(restored.revived.len(), 1);
    });
}

/// Where the driver has no ids of streams, a new one may have the handle of one that was retired.
#[test]
fn a_reused_handle_is_another_stream() {
    let without_ids = |functions| sys::CuFunctions {
        cuStreamGetId: None,
        ..functions
    };
    let Some(rig) = Rig::behind(Policy::Packed, without_ids) else {
        return;
    };
    let allocator = rig.allocator();
    let pool = allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    for records in [false, true] {
        let owner = rig.stream();
        let raw = RawStream::new(&rig);
        let by = if records { owner.raw() } else { raw.raw() };
        let at = allocator.raw_allocate(2 * MIB, by).unwrap();
        let held = rig.hold(&raw.borrowed());
        rig.stamp(at, 2 * MIB, 1, &raw.borrowed());
        if records {
            allocator.raw_record_use(at, raw.raw()).unwrap();
        } else {
            allocator.raw_free(at).unwrap();
        }
        let handle = raw.raw();
        allocator.raw_retire(handle).unwrap();
        raw.destroy();
        if records {
            allocator.raw_free(at).unwrap();
        }
        let again = RawStream::new(&rig);
        assert_eq!(again.raw(), handle);
        let other = allocator.raw_allocate(2 * MIB, again.raw()).unwrap();
        assert_ne!(other, at, "its kernel has not begun");
        drop(held);
        allocator.raw_free(other).unwrap();
        again.retire(&allocator);
        owner.synchronize().unwrap();
        allocator.trim(0).unwrap();
    }
    drop((scope, pool));
    rig.close(&allocator);
    rig.assert_clean();
}

#[test]
fn uses_that_were_recorded_as_over_keep_one_event_a_stream() {
    pooled(|rig, allocator, pool, [stream, reader]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        let records = rig.calls("cuEventRecord");
        block.record_use(&stream).unwrap();
        assert_eq!(
            rig.calls("cuEventRecord"),
            records,
            "the stream is known, and its end is recorded at the free"
        );
        block.record_use(&reader).unwrap();
        let made = rig.calls("cuEventCreate");
        let held = rig.hold(&reader);
        for _ in 0..60 {
            rig.stamp(block.ptr(), MIB, 1, &reader);
            block.record_use(&reader).unwrap();
        }
        assert!(rig.calls("cuEventCreate") <= made + 2);
        let at = block.ptr();
        drop(block);
        let other = used(rig, &allocator, 2 * MIB, &stream);
        assert_ne!(other.ptr(), at, "the last use is not over");
        held.release();
    });
}

/// A capture on a raw handle that is not named again ends when the stream is retired.
#[test]
fn retiring_a_stream_ends_the_knowledge_of_its_capture() {
    pooled(|rig, allocator, pool, [stream]| {
        let raw = RawStream::new(rig);
        let (one, block) =
            capture_output(&pool, &stream, || used(rig, &allocator, 2 * MIB, &stream));
        let borrowed = raw.borrowed();
        let under_way = Capturing::begin(&borrowed, MODE);
        let scope = pool.enter(Scope::When(Box::new(|_| false))).unwrap();
        allocator.raw_record_stream(block.ptr(), raw.raw()).unwrap();
        drop(block);
        let refused = allocator.raw_retire(raw.raw());
        assert_matches!(refused, Err(Error::Capturing { .. }));
        let two = under_way.end().unwrap();
        drop((one, two, scope));
        rig.settle(&stream);
        raw.retire(&allocator);
        await_leases(&allocator, &pool, 0);
        allocator.trim(0).unwrap();
        assert_eq!(footprint(&allocator, &pool).physical, 0);
    });
}

/// What a recorded stream of the capture did is in the way of others until they are behind it.
#[test]
fn a_recorded_stream_of_the_capture_is_waited_for_by_order() {
    pooled(|rig, allocator, pool, [main, side]| {
        let graph = capture(&pool, &main, || {
            let block = used(rig, &allocator, 4 * MIB, &main);
            let at = block.ptr();
            side.wait_for(&main).unwrap();
            rig.stamp(at, 4 * MIB, 1, &side);
            block.record_stream(&side).unwrap();
            drop(block);
            let beside = used(rig, &allocator, 4 * MIB, &main);
            assert_ne!(beside.ptr(), at, "the side branch uses it");
            main.wait_for(&side).unwrap();
            let behind = used(rig, &allocator, 4 * MIB, &main);
            assert_eq!(behind.ptr(), at);
        });
        for _ in 0..16 {
            run(&graph, &main);
        }
    });
}

/// Two threads record uses by one stream; the one that recorded first comes back last.
#[test]
fn a_use_that_is_recorded_meanwhile_counts() {
    with_interludes(|rig, sim, allocator, pool, [stream, reader]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = Arc::new(allocator.allocate(2 * MIB, &stream).unwrap());
        let at = block.ptr();
        let held = rig.hold(&reader);
        let (other, on) = (Arc::clone(&block), reader.clone());
        let context = rig.context.clone();
        interlude::after("cuEventRecord", move || {
            let entered = context.enter().unwrap();
            // SAFETY: the block is live, and so is the stream.
            unsafe { entered.memset_d32(at, 1, MIB / 4, on.raw()) }.unwrap();
            other.record_use(&on).unwrap();
        });
        block.record_use(&reader).unwrap();
        assert!(!interlude::is_due());
        // The event of this thread is done, the use behind it is not.
        sim.complete_stream(reader.id().unwrap(), 2);
        drop(block);
        rig.settle(&stream);
        let next = used(rig, &allocator, 2 * MIB, &stream);
        assert_ne!(next.ptr(), at, "the other thread's use is not over");
        held.release();
    });
}

/// A raw stream that used blocks of a pool is destroyed without retirement, and they are freed afterwards: it is not
/// queried, and the memory stays pending until a wait for everything.
#[test]
fn blocks_are_freed_after_their_stream_was_destroyed() {
    packed(|rig| {
        let allocator = rig.checked_with(Config::new().unretired_streams(true));
        let (pool, other) = (allocator.graph_pool().unwrap(), rig.stream());
        let (owner, reader) = (RawStream::new(rig), RawStream::new(rig));
        let scope = pool.enter(Scope::Thread).unwrap();
        let own = allocator.raw_allocate(2 * MIB, owner.raw()).unwrap();
        let read = allocator.allocate(2 * MIB, &other).unwrap();
        allocator
            .raw_record_stream(read.ptr(), reader.raw())
            .unwrap();
        assert_eq!(footprint(&allocator, &pool).blocks, 2);
        owner.destroy();
        reader.destroy();
        allocator.raw_free(own).unwrap();
        drop(read);
        assert_eq!(footprint(&allocator, &pool).blocks, 0);
        let next = allocator.allocate_blocks(2, 2 * MIB, &other);
        assert_eq!(footprint(&allocator, &pool).physical, 8 * MIB as u64);
        drop((next, scope, pool));
        rig.settle(&other);
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
    });
}

/// [`a_block_that_is_freed_while_its_own_stream_captures_is_a_graphs`], where its stream is never retired, and known to
/// be alive since its capture got memory of the pool.
#[test]
fn a_block_of_an_unretired_stream_that_its_capture_frees_is_a_graphs() {
    packed(|rig| {
        let allocator = rig.checked_with(Config::new().unretired_streams(true));
        let (pool, other) = (allocator.graph_pool().unwrap(), rig.stream());
        let own = RawStream::new(rig);
        let _scope = pool.enter(Scope::Thread).unwrap();
        let at = allocator.raw_allocate(2 * MIB, own.raw()).unwrap();
        let stream = own.borrowed();
        rig.stamp(at, 2 * MIB, 1, &stream);
        rig.settle(&stream);
        let under_way = Capturing::begin(&stream, MODE);
        let inside = allocator.raw_allocate(2 * MIB, own.raw()).unwrap();
        for ptr in [inside, at] {
            rig.stamp(ptr, 2 * MIB, 1, &stream);
            allocator.raw_free(ptr).unwrap();
        }
        let graph = under_way.end().unwrap();
        rig.settle(&stream);
        allocator.synchronize().unwrap();
        let others = [(); 3].map(|()| used(rig, &allocator, 2 * MIB, &other));
        for other in &others {
            assert_ne!(other.ptr(), at, "the graph writes there");
        }
        run(&graph, &stream);
    });
}

/// Memory that is freed while its stream captures is available to all requests as soon as that capture's graph is
/// destroyed, whichever other graphs of the pool exist.
#[test]
fn memory_freed_in_captures_is_available_when_their_graphs_end() {
    pooled(|rig, allocator, pool, [stream]| {
        let _old = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
        let _scope = pool.enter(Scope::Thread).unwrap();
        for _ in 0..12 {
            let block = used(rig, &allocator, 2 * MIB, &stream);
            rig.settle(&stream);
            let under_way = Capturing::begin(&stream, MODE);
            drop(block);
            drop(under_way.end().unwrap());
            await_leases(&allocator, &pool, 1);
            rig.settle(&stream);
        }
        assert_eq!(footprint(&allocator, &pool).physical, 4 << 20);
    });
}
