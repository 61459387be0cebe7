//! Which requests go to a pool, and that all others are unaffected by captures.

use super::support::*;
use cualloc::allocator::PoolScope;

#[test]
fn without_a_scope_a_capture_is_refused() {
    pooled(|_rig, allocator, pool, [stream]| {
        let under_way = Capturing::begin(&stream, MODE);
        for bytes in [512, MIB] {
            let refused = allocator.allocate(bytes, &stream);
            assert_matches!(refused, Err(Error::Capturing { .. }));
        }
        drop(under_way.end().unwrap());
        assert_eq!(footprint(&allocator, &pool).physical, 0);
    });
}

#[test]
fn each_scope_routes_its_requests_to_its_pool() {
    packed(|rig| {
        let allocator = rig.checked();
        let pools: [GraphPool; 5] = std::array::from_fn(|_| allocator.graph_pool().unwrap());
        let [capturing, named, filtered, plain] = rig.streams();
        let raw = filtered.raw() as usize;
        let of = |pool: &GraphPool| pool.footprint().unwrap().live;
        let ask = |stream: &Stream, pool: &GraphPool, bytes: usize| {
            let before = of(pool);
            let block = allocator.allocate(bytes, stream).unwrap();
            assert_eq!(of(pool) - before, block.size(), "{bytes} bytes");
            block
        };
        let under_way = Capturing::begin(&capturing, MODE);
        let id = capturing.capture_id().unwrap().unwrap();
        let scopes = [
            pools[0].enter(Scope::Thread).unwrap(),
            pools[1]
                .enter(Scope::When(Box::new(move |stream| stream as usize == raw)))
                .unwrap(),
            pools[2].enter(Scope::Stream(&named)).unwrap(),
            pools[3].enter(Scope::Capture(id)).unwrap(),
        ];
        for bytes in [512, 3 * MIB] {
            drop(ask(&plain, &pools[0], bytes));
            drop(ask(&filtered, &pools[1], bytes));
            drop(ask(&named, &pools[2], bytes));
            drop(ask(&capturing, &pools[3], bytes));
        }
        drop(under_way.end().unwrap());
        let [thread, when, stream, capture] = scopes;
        // The thread's is what is left.
        drop((when, stream, capture));
        drop(ask(&named, &pools[0], MIB));
        drop(ask(&capturing, &pools[0], MIB));
        drop(thread);
        let before = allocator.stats().all.allocated.current;
        let _eager = allocator.allocate(MIB, &plain).unwrap();
        assert_eq!(allocator.stats().all.allocated.current - before, MIB as u64);
        let _next = pools[4].enter(Scope::NextCapture).unwrap();
        drop(allocator.allocate(MIB, &plain).unwrap());
        assert_eq!(of(&pools[4]), 0, "nothing captures");
        let under_way = Capturing::begin(&plain, MODE);
        drop(ask(&plain, &pools[4], MIB));
        drop(under_way.end().unwrap());
    });
}

/// A predicate that allocates would be called for its own request: that is an error, and the request that it was called
/// for continues.
#[test]
fn an_allocation_in_a_predicate_is_an_error() {
    packed(|rig| {
        let (allocator, other) = (rig.allocator(), rig.allocator());
        let pool = allocator.graph_pool().unwrap();
        let [stream, beside] = rig.streams();
        let [freed, kept] = [(); 2].map(|()| allocator.allocate(MIB, &stream).unwrap().into_raw());
        let (asked, refused) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(Mutex::new(Vec::new())),
        );
        let scope = {
            let (asked, refused) = (Arc::clone(&asked), Arc::clone(&refused));
            let (allocator, other) = (allocator.clone(), other.clone());
            let (own, beside) = (stream.clone(), beside.clone());
            let predicate = move |_| {
                let first = refused.try_lock();
                let mut refused = first.expect("the predicate is asked about its own request");
                for bytes in [512, 3 * MIB] {
                    for stream in [&own, &beside] {
                        refused.push(allocator.allocate(bytes, stream).unwrap_err());
                        let cached = Request::new(bytes).cached_only();
                        refused.push(allocator.allocate_with(cached, stream).unwrap_err());
                        let raw = allocator.raw_allocate(bytes, stream.raw());
                        refused.push(raw.unwrap_err());
                    }
                    // One without scopes asks no predicate.
                    drop(other.allocate(bytes, &own).unwrap());
                }
                if beside.is_capturing().unwrap() {
                    let recorded = allocator.raw_record_stream(kept, beside.raw());
                    refused.push(recorded.unwrap_err());
                }
                if asked.fetch_add(1, Ordering::Relaxed) == 0 {
                    allocator.raw_free(freed).unwrap();
                }
                true
            };
            pool.enter(Scope::When(Box::new(predicate))).unwrap()
        };
        let block = allocator.allocate(MIB, &stream).unwrap();
        assert_eq!(footprint(&allocator, &pool).live, MIB as u64);
        let under_way = Capturing::begin(&beside, MODE);
        drop(allocator.allocate(MIB, &beside).unwrap());
        drop(under_way.end().unwrap());
        drop((scope, block));
        assert!(asked.load(Ordering::Relaxed) >= 2);
        let refused = refused.lock().unwrap();
        for error in &*refused {
            let expected = Error::GraphPool(GraphPoolError::InPredicate);
            assert_eq!(error.to_string(), expected.to_string());
        }
        assert_eq!(refused.len() as u64, 12 * asked.load(Ordering::Relaxed) + 1);
        allocator.raw_free(kept).unwrap();
        drop(allocator.allocate(MIB, &stream).unwrap());
        drop(pool);
        other.close().unwrap();
        rig.close(&allocator);
    });
}

/// After a predicate that panicked the thread is in none.
#[test]
fn a_predicate_that_panics_is_over() {
    pooled(|_rig, allocator, pool, [stream]| {
        let panics = |_| panic!("a predicate that panics");
        let scope = pool.enter(Scope::When(Box::new(panics))).unwrap();
        let ask = || allocator.allocate(MIB, &stream).map(drop);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask));
        assert!(caught.is_err());
        drop(scope);
        let _scope = pool.enter(Scope::When(Box::new(|_| true))).unwrap();
        ask().unwrap();
    });
}

#[test]
fn streams_by_their_handles_capture_with_memory_of_pools() {
    pooled(|rig, allocator, pool, []| {
        let raw = RawStream::new(rig);
        let stream = raw.borrowed();
        let graph = capture(&pool, &stream, || {
            let first = allocator.raw_allocate(MIB, raw.raw()).unwrap();
            rig.stamp(first, MIB, 1, &stream);
            allocator.raw_free(first).unwrap();
            let second = allocator.raw_allocate(MIB, raw.raw()).unwrap();
            assert_eq!(second, first);
            allocator.raw_record_stream(second, raw.raw()).unwrap();
            allocator.raw_free(second).unwrap();
            assert!(allocator.raw_free(second).is_err(), "freed before");
        });
        run(&graph, &stream);
        drop((graph, pool, stream));
        raw.destroy();
    });
}

/// Steps of a thread on eight streams, and their result: addresses of its blocks, and the peak of held memory.
fn eager(allocator: &Allocator, streams: &[Stream; 8]) -> (Vec<(usize, u64)>, u64) {
    let mut addresses = Vec::new();
    let mut live: Vec<Block> = Vec::new();
    for step in 0..800usize {
        let bytes = (step * 7919 % 97 + 1) * 64 * KIB / if step % 3 == 0 { 64 } else { 1 };
        let block = allocator.allocate(bytes, &streams[step * 5 % 8]).unwrap();
        if step % 7 == 0 {
            block.record_stream(&streams[step % 8]).unwrap();
        }
        addresses.push(block.ptr());
        live.push(block);
        if live.len() > 12 {
            drop(live.swap_remove(step * 31 % 12));
        }
    }
    let peak = allocator.stats().all.reserved.peak;
    // More than the device has: all free memory is released, which does not suffice, and the capture continues.
    let error = allocator.allocate(1024 * GIB, &streams[0]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error:?}");
    drop(allocator.allocate(40 * MIB, &streams[1]).unwrap());
    // Where a region of addresses lies does not matter: each block is identified by its place in one.
    let mut sorted = addresses.clone();
    sorted.sort_unstable();
    let starts = sorted.chunk_by(|one, next| next - one < GIB as u64 / 2);
    let starts: Vec<u64> = starts.map(|region| region[0]).collect();
    let mut met = Vec::new();
    let places = addresses.iter().map(|at| {
        let start = starts[starts.partition_point(|start| start <= at) - 1];
        let known = met.iter().position(|known| *known == start);
        let region = known.unwrap_or_else(|| {
            met.push(start);
            met.len() - 1
        });
        (region, at - start)
    });
    (places.collect(), peak)
}

/// G7 without clocks: what others do meanwhile is what they would do alone, call for call, whatever the mode of the
/// capture.
#[test]
fn other_streams_are_unaffected_by_a_capture() {
    use cualloc::driver::sys::CUstreamCaptureMode as Mode;
    packed(|rig| {
        let config = || Config::new().capture_checks(true);
        let alone = {
            let allocator = rig.allocator_with(config());
            let figures = eager(&allocator, &rig.streams());
            rig.close(&allocator);
            figures
        };
        for mode in [
            Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ] {
            let allocator = rig.checked_with(config());
            let (pool, capturing) = (allocator.graph_pool().unwrap(), rig.stream());
            let streams = rig.streams();
            let scope = pool.enter(Scope::NextCapture).unwrap();
            let under_way = Capturing::begin(&capturing, mode);
            let block = used(rig, &allocator, 48 * MIB, &capturing);
            let beside = std::thread::scope(|scope| {
                let beside = scope.spawn(|| eager(&allocator, &streams));
                beside.join().unwrap()
            });
            let differs = (0..800).find(|at| beside.0[*at] != alone.0[*at]);
            assert_eq!(differs, None, "others are placed as they would be alone");
            assert_eq!(beside.1, alone.1);
            // No stream waits through it.
            assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
            drop(block);
            drop(used(rig, &allocator, 50 * MIB, &capturing));
            let graph = under_way.end().unwrap();
            drop(scope);
            run(&graph, &capturing);
        }
    });
}

#[test]
fn a_filter_is_called_without_a_lock_and_only_for_streams() {
    pooled(|_rig, allocator, pool, [stream]| {
        let asked = Arc::new(AtomicU64::new(0));
        let (seen, inner) = (Arc::clone(&asked), allocator.clone());
        let _scope = pool.enter(Scope::When(Box::new(move |_| {
            seen.fetch_add(1, Ordering::Relaxed);
            inner.stats();
            false
        })));
        drop(allocator.allocate(MIB, &stream).unwrap());
        assert!(asked.load(Ordering::Relaxed) > 0);
        assert_eq!(footprint(&allocator, &pool).physical, 0);
    });
}

#[test]
fn a_filter_is_called_once_by_each_form_of_a_request() {
    pooled(|_rig, allocator, pool, [stream, adopted]| {
        allocator.raw_adopt(adopted.raw()).unwrap();
        let asked = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&asked);
        let _scope = pool.enter(Scope::When(Box::new(move |_| {
            seen.fetch_add(1, Ordering::Relaxed);
            false
        })));
        let once = |request: &str, ask: &dyn Fn()| {
            // The second time the stream and its caches are known.
            for _ in 0..2 {
                ask();
                assert_eq!(asked.swap(0, Ordering::Relaxed), 1, "{request}");
            }
        };
        for bytes in [512, MIB] {
            once("by stream", &|| drop(allocator.allocate(bytes, &stream)));
            once("with wishes", &|| {
                let request = Request::new(bytes).align(1024);
                drop(allocator.allocate_with(request, &stream).unwrap());
            });
            for raw in [stream.raw(), adopted.raw(), std::ptr::null_mut()] {
                once(&format!("{bytes} bytes by {raw:?}"), &|| {
                    let ptr = allocator.raw_allocate(bytes, raw).unwrap();
                    allocator.raw_free(ptr).unwrap();
                });
            }
        }
    });
}

#[test]
fn a_scope_that_was_left_meanwhile_serves_no_capture() {
    pooled(|_rig, allocator, pool, [stream]| {
        let entered = Arc::new(Mutex::new(None::<PoolScope>));
        let own = Arc::clone(&entered);
        // The scope's end comes between its answer and the request's memory.
        let when = move |_| {
            let scope = own.lock().unwrap().take();
            scope.is_some_and(|scope| scope.leave().is_ok())
        };
        *entered.lock().unwrap() = Some(pool.enter(Scope::When(Box::new(when))).unwrap());
        let under_way = Capturing::begin(&stream, MODE);
        let refused = allocator.allocate(MIB, &stream);
        assert_matches!(refused, Err(Error::Capturing { .. }));
        drop(under_way.end().unwrap());
        assert!(entered.lock().unwrap().is_none());
        assert_eq!(footprint(&allocator, &pool).physical, 0);
    });
}
