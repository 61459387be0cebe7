//! A driver call of one thread does not keep other threads from ready memory, and a default configuration keeps memory.

use std::sync::Condvar;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Duration;

use crate::common::prelude::*;

/// A gate in driver functions: while closed, it blocks the first call that reaches it until it is opened; other calls
/// pass.
#[derive(Default)]
struct Gate {
    inner: Mutex<Inside>,
    moved: Condvar,
}

#[derive(Default)]
struct Inside {
    closed: bool,
    occupied: bool,
    /// It was never opened, so the rest of the test would wait forever.
    gave_up: bool,
}

/// No test takes this long unless something waits that must not.
const FOR_EVER: Duration = Duration::from_secs(60);

impl Gate {
    fn of(sim: &Simulator, calls: &'static [&'static str]) -> Arc<Gate> {
        let gate = Arc::<Gate>::default();
        let within = Arc::clone(&gate);
        sim.before(move |moment| {
            if calls.contains(&moment.call) {
                within.pass();
            }
        });
        gate
    }

    fn pass(&self) {
        let mut inside = self.inner.lock().unwrap();
        if !inside.closed || inside.occupied {
            return;
        }
        inside.occupied = true;
        self.moved.notify_all();
        let waited = self
            .moved
            .wait_timeout_while(inside, FOR_EVER, |inside| inside.closed);
        let (mut inside, timeout) = waited.unwrap();
        inside.gave_up |= timeout.timed_out();
    }

    fn close(&self) {
        *self.inner.lock().unwrap() = Inside {
            closed: true,
            ..Inside::default()
        };
    }

    /// Waits until a call is inside.
    fn await_call(&self) {
        let inside = self.inner.lock().unwrap();
        let waited = self
            .moved
            .wait_timeout_while(inside, FOR_EVER, |inside| !inside.occupied);
        assert!(
            !waited.unwrap().1.timed_out(),
            "the function was not called"
        );
    }

    /// Lets the call continue; it must have waited until now.
    fn open(&self) {
        let mut inside = self.inner.lock().unwrap();
        inside.closed = false;
        self.moved.notify_all();
        assert!(!inside.gave_up, "another thread waited for the call");
    }
}

/// R58: while one thread obtains new memory from the driver, others are served from ready memory, on other streams and
/// on the same one.
#[test]
fn r58_growth_in_one_thread_does_not_block_hits_in_others() {
    each_simulated(|rig, sim| {
        let gate = Gate::of(sim, &["cuMemCreate", "cuMemAlloc_v2"]);
        let (allocator, streams) = rig.scene::<2>();
        let sizes = [4 * KIB, 64 * KIB, 256 * KIB, 2 * MIB];
        for stream in &streams {
            drop(sizes.map(|bytes| allocator.allocate(bytes, stream).unwrap()));
        }
        gate.close();
        thread::scope(|scope| {
            let grown = scope.spawn(|| allocator.allocate(512 * MIB, &streams[0]).map(drop));
            gate.await_call();
            for _ in 0..100 {
                for (stream, bytes) in streams.iter().flat_map(|s| sizes.map(|bytes| (s, bytes))) {
                    allocator.allocate(bytes, stream).unwrap().free().unwrap();
                }
            }
            gate.open();
            grown.join().unwrap().unwrap();
        });
        sim.clear_hooks();
    });
}

/// R31: 32 threads free blocks that other streams used, one of them is held up in an event record, and
/// all others finish.
#[test]
fn r31_frees_do_not_serialise_on_event_records() {
    const THREADS: usize = 32;
    each_simulated(|rig, sim| {
        let gate = Gate::of(sim, &["cuEventRecord"]);
        let (allocator, streams) = rig.scene::<{ 2 * THREADS }>();
        let work = |thread: usize| {
            // Enough for several markers.
            for _ in 0..200 {
                let block = allocator.allocate(64 * KIB, &streams[thread]).unwrap();
                block.record_stream(&streams[THREADS + thread]).unwrap();
                block.free().unwrap();
            }
        };
        // From here on every stream is known.
        thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || work(thread));
            }
        });
        gate.close();
        thread::scope(|scope| {
            let work = &work;
            let held_up = scope.spawn(move || work(0));
            gate.await_call();
            let others: Vec<_> = (1..THREADS)
                .map(|thread| scope.spawn(move || work(thread)))
                .collect();
            for other in others {
                other.join().unwrap();
            }
            gate.open();
            held_up.join().unwrap();
        });
        sim.clear_hooks();
    });
}

/// R55: with default settings memory is kept: a loop over 1 GiB asks the driver for memory once.
#[test]
fn r55_a_default_configuration_reuses_a_gibibyte() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        allocator.allocate(GIB, &stream).unwrap().free().unwrap();
        let before = rig.driver.calls();
        for _ in 0..100 {
            allocator.allocate(GIB, &stream).unwrap().free().unwrap();
        }
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        assert_eq!(allocator.stats().misses, 1);
    });
}

/// Two threads concurrently record uses of a block on their streams, one until the free and one until now: neither use
/// is lost.
#[test]
fn uses_recorded_concurrently_are_both_kept() {
    only(Policy::Packed, |rig| {
        let (allocator, [home, one, other]) = rig.scene();
        // From here on every stream is known.
        let first = allocator.allocate(KIB, &home).unwrap();
        first.record_stream(&one).unwrap();
        first.record_stream(&other).unwrap();
        for _ in 0..100 {
            let blocks: Vec<_> = allocator.allocate_blocks(200, KIB, &home);
            let arrived = AtomicUsize::new(0);
            // Both are at the same block at the same time, to a few instructions.
            let together = |visits: usize| {
                arrived.fetch_add(1, Ordering::Relaxed);
                wait_until("the other thread arrives", || {
                    arrived.load(Ordering::Relaxed) >= 2 * visits
                });
            };
            thread::scope(|scope| {
                scope.spawn(|| {
                    // From here on the thread knows the stream's cache, and notes its uses there, beside the heap's
                    // lock.
                    drop(allocator.allocate(KIB, &one).unwrap());
                    for (at, block) in blocks.iter().enumerate() {
                        together(at + 1);
                        block.record_stream(&one).unwrap();
                    }
                });
                for (at, block) in blocks.iter().enumerate() {
                    together(at + 1);
                    block.record_use(&other).unwrap();
                }
            });
            for block in &blocks {
                let known = allocator.block_of(block.ptr()).unwrap().pending;
                assert_eq!(known.len(), 2, "{known:?}");
            }
        }
    });
}

/// R34: one thread frees blocks that another stream used, a batch at a time, and another one inspects the heap.
#[test]
fn r34_figures_agree_beside_batches_of_frees() {
    only(Policy::Packed, |rig| {
        const BATCH: usize = 512;
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(BATCH, &a).unwrap());
        drop(allocator.allocate(BATCH, &b).unwrap());
        // Batches begun to be freed. Without a pause the loop would rarely release the heap's lock.
        let begun = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                for _ in 0..200 {
                    let blocks: Vec<_> = allocator.allocate_blocks(BATCH, 512, &a);
                    for block in &blocks {
                        block.record_stream(&b).unwrap();
                    }
                    begun.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut seen = 0;
            while !worker.is_finished() {
                let now = begun.load(Ordering::Relaxed);
                if now > seen {
                    seen = now;
                    allocator.check().unwrap();
                }
                thread::yield_now();
            }
        });
    });
}

/// A close during a trim on another thread, which is releasing memory: it returns an error and loses nothing, whether
/// the driver accepts the release or not.
#[test]
fn r2_a_close_beside_a_trim_reports_memory_being_released() {
    each_simulated(|rig, sim| {
        let call = if rig.packed() {
            "cuMemUnmap"
        } else {
            "cuMemFree_v2"
        };
        for refused in [false, true] {
            let (allocator, [stream]) = rig.scene();
            drop(allocator.allocate(8 * MIB, &stream).unwrap());
            stream.synchronize().unwrap();
            let held = allocator.stats().all.reserved.current;
            let answer = Arc::new(Mutex::new(None));
            let (closing, said) = (allocator.clone(), Arc::clone(&answer));
            sim.before(move |moment| {
                let mut said = said.lock().unwrap();
                if moment.call == call && said.is_none() {
                    *said = Some(closing.close());
                }
            });
            if refused {
                sim.fail(FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
            }
            let trimmed = allocator.trim(0);
            sim.clear_hooks();
            assert_eq!(trimmed.is_err(), refused, "{trimmed:?}");
            let answer = answer.lock().unwrap().take().unwrap();
            assert_matches!(answer, Err(Error::StillHeld { bytes }) if bytes == held);
        }
    });
}
