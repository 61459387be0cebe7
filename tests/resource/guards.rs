//! The guard, its hooks, policies and pressure; reservation and watchdog.

mod guard {
    use crate::common::*;
    use cualloc::driver::{Stream, sys};
    use cualloc::error::StreamMisuse;
    use cualloc::resource::*;
    use cualloc::sim::FailPlan;
    use cualloc::{Allocator, BlockId, Error, Policy, Refused, Request, Tag};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex, OnceLock};
    use std::time::Duration;

    const T: Tag = Tag::new("test");

    type Guard<R> = Relief<Budget<R>>;

    fn packed(test: impl Fn(&Rig)) {
        only(Policy::Packed, test);
    }

    fn guard(rig: &Rig, budget: impl Into<Option<u64>>) -> Guard<Allocator> {
        Relief::new(Budget::new(rig.allocator(), budget.into()))
    }

    /// S1.24, S1.36: a budget that can change; errors before any driver call; defaults.
    #[test]
    fn s1_24_s1_36_budget_is_set_at_run_time() {
        const RESERVE: u64 = 4 << 20;
        packed(|rig| {
            let stream = rig.stream();
            let open = guard(rig, None);
            assert_eq!(
                (open.get_ref().limit(), open.policy()),
                (None, OomPolicy::Fail)
            );
            assert_eq!((open.ordinal(), open.release_reserve().unwrap()), (0, 0));
            let guard = guard(rig, RESERVE + 1000)
                .with_policy(OomPolicy::FreeCaches)
                .with_reserve(RESERVE as usize)
                .unwrap();
            assert_eq!(guard.policy(), OomPolicy::FreeCaches);
            guard.set_policy(OomPolicy::Fail);
            let calls = rig.memory_calls();
            match guard.allocate_block(&Request::new(1001).tag(T), &stream) {
                Err(Error::OverBudget {
                    requested,
                    limit,
                    used,
                    ..
                }) => {
                    assert_eq!((requested, limit, used), (1001, RESERVE + 1000, RESERVE));
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(rig.memory_calls(), calls);
            let budget = guard.get_ref();
            budget.set_limit(None);
            assert_eq!((budget.limit(), budget.remaining()), (None, None));
            let block = guard
                .allocate_block(&Request::new(1001).tag(T), &stream)
                .unwrap();
            budget.set_limit(Some(500));
            assert_eq!(
                guard.usage().unwrap().outstanding(),
                RESERVE + 1001,
                "stays"
            );
            assert_eq!(guard.usage().unwrap().limit, Some(500));
            assert!(
                guard
                    .allocate_block(&Request::new(1).tag(T), &stream)
                    .is_err()
            );
            guard.deallocate_block(block).unwrap();
            assert_eq!(guard.reserved(), RESERVE);
            assert_eq!(guard.release_reserve().unwrap(), RESERVE);
            assert_eq!(guard.release_reserve().unwrap(), 0);
            guard.get_ref().set_limit(Some(0));
            assert!(
                guard
                    .allocate_block(&Request::new(1).tag(T), &stream)
                    .is_err(),
                "0 is no room"
            );
        });
    }

    /// Refuses while its allocator holds more than so many bytes from the driver.
    struct Full(Allocator, u64);

    // SAFETY: passes everything on.
    unsafe impl MemoryResource for Full {
        fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
            let used = self.0.stats().all.reserved.current;
            if used > self.1 {
                return Err(Error::OverBudget {
                    owner: "device",
                    requested: request.bytes() as u64,
                    limit: self.1,
                    used,
                });
            }
            MemoryResource::allocate_block(&self.0, request, stream)
        }
        fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
            self.0.deallocate_block(block)
        }
        fn ordinal(&self) -> usize {
            self.0.ordinal()
        }
        fn upstream(&self) -> Option<&dyn MemoryResource> {
            Some(&self.0)
        }
    }

    /// S1.25, S1.48: caches are really given back; a recovery counts once it has succeeded.
    #[test]
    fn s1_25_s1_48_free_caches_recovers() {
        packed(|rig| {
            let (stream, allocator) = (rig.stream(), rig.allocator());
            drop(allocator.allocate(8 * MIB, &stream).unwrap());
            let cached = allocator.stats().all.reserved.current;
            assert!(cached >= 8 * MIB as u64);
            let full = Full(allocator.clone(), 7 * MIB as u64);
            let guard = Relief::new(full).with_policy(OomPolicy::FreeCaches);
            let block = guard
                .allocate_block(&Request::new(4 * MIB).tag(T), &stream)
                .unwrap();
            assert_eq!(guard.usage().unwrap().recoveries, 1);
            let reserved = allocator.stats().all.reserved.current;
            assert!(reserved < cached, "caches were kept");
            let more = guard
                .allocate_block(&Request::new(4 * MIB).tag(T), &stream)
                .unwrap();
            assert!(
                guard
                    .allocate_block(&Request::new(4 * MIB).tag(T), &stream)
                    .is_err()
            );
            assert_eq!(
                guard.usage().unwrap().recoveries,
                1,
                "a retry that failed is none"
            );
            guard.deallocate_block(more).unwrap();
            guard.deallocate_block(block).unwrap();
        });
    }

    /// S1.30, S5.29: for what can never fit nobody is asked, nothing emptied and no time spent.
    #[test]
    fn s1_30_a_budget_smaller_than_the_request_fails_at_once() {
        packed(|rig| {
            let (stream, allocator) = (rig.stream(), rig.allocator());
            drop(allocator.allocate(8 * MIB, &stream).unwrap());
            let reserved = allocator.stats().all.reserved.current;
            let clock = Clock::manual();
            let budget = Budget::new(allocator.clone(), Some(100));
            let guard = Relief::new(budget).with_clock(&clock);
            let asked = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&asked);
            guard.add_relief_hook(ReliefHook::new("cache", move |_| {
                count.fetch_add(1, Ordering::SeqCst);
                0
            }));
            for policy in [
                OomPolicy::Fail,
                OomPolicy::FreeCaches,
                OomPolicy::Wait(Duration::from_secs(1)),
            ] {
                guard.set_policy(policy);
                let refused = guard.allocate_block(&Request::new(101).tag(T), &stream);
                assert!(
                    matches!(
                        refused,
                        Err(Error::OverBudget {
                            requested: 101,
                            limit: 100,
                            ..
                        })
                    ),
                    "{refused:?}"
                );
                // Before the policy that waits, by a clock that stands still.
                assert_eq!(allocator.stats().all.reserved.current, reserved);
            }
            assert_eq!(asked.load(Ordering::SeqCst), 0, "a hook was asked");
            assert_eq!(clock.waits(), 0);
            assert_eq!(guard.usage().unwrap().recoveries, 0);
        });
    }

    trait Shared: Sized {
        fn shared(self) -> Arc<Self> {
            Arc::new(self)
        }
    }

    impl Shared for AccessOrdered {}

    /// S1.25: waiting looks every 100 ms of the clock it was given, and gives up in time.
    #[test]
    fn s1_25_wait_policy_goes_by_its_clock() {
        packed(|rig| {
            let stream = rig.stream();
            let clock = Clock::manual();
            let guard = guard(rig, 1000)
                .with_policy(OomPolicy::Wait(Duration::from_millis(250)))
                .with_clock(&clock);
            let block = guard
                .allocate_block(&Request::new(1000).tag(T), &stream)
                .unwrap();
            std::thread::scope(|scope| {
                let waiting =
                    scope.spawn(|| guard.allocate_block(&Request::new(600).tag(T), &stream));
                clock.await_waiter(0);
                guard.deallocate_block(block).unwrap();
                clock.advance(Duration::from_millis(100));
                let block = waiting.join().unwrap().unwrap();
                assert_eq!(guard.usage().unwrap().recoveries, 1);
                let seen = clock.waits();
                let waiting =
                    scope.spawn(|| guard.allocate_block(&Request::new(600).tag(T), &stream));
                for number in 0..3 {
                    clock.await_waiter(seen + number);
                    clock.advance(Duration::from_millis(100));
                }
                assert!(waiting.join().unwrap().is_err());
                assert_eq!(clock.waits(), seen + 3, "100, 200 and 250 ms");
                guard.deallocate_block(block).unwrap();
            });
            assert_eq!(guard.usage().unwrap().recoveries, 1);
        });
    }

    /// S1.26: the checkpoint runs under its policy only, and the request fails.
    #[test]
    fn s1_26_checkpoint_runs_under_its_policy_only() {
        packed(|rig| {
            let (stream, guard) = (rig.stream(), guard(rig, 100));
            let runs = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&runs);
            guard.set_checkpoint(move |error| {
                assert!(error.is_out_of_memory());
                counted.fetch_add(1, Ordering::SeqCst);
            });
            for (policy, expected) in [
                (OomPolicy::Fail, 0),
                (OomPolicy::FreeCaches, 0),
                (OomPolicy::Wait(Duration::ZERO), 0),
                (OomPolicy::Checkpoint, 1),
            ] {
                guard.set_policy(policy);
                assert!(
                    guard
                        .allocate_block(&Request::new(101).tag(T), &stream)
                        .is_err()
                );
                assert_eq!(runs.load(Ordering::SeqCst), expected, "{policy:?}");
            }
        });
    }

    /// S1.27, S1.28, S1.29: order by priority, yield, registration; overhead; enough is enough.
    #[test]
    fn s1_27_s1_28_s1_29_hooks_run_in_order() {
        packed(|rig| {
            let stream = rig.stream();
            let guard = Arc::new(guard(rig, 1000));
            let order = Arc::new(Mutex::new(Vec::new()));
            let add = |name: &'static str, priority, estimate, overhead| {
                let order = Arc::clone(&order);
                let hook = ReliefHook::new(name, move |missing| {
                    order.lock().unwrap().push((name, missing));
                    0
                });
                let hook = hook.priority(priority).estimated_yield(estimate);
                guard.add_relief_hook(hook.overhead(overhead))
            };
            add("late", 2, 900, 0);
            add("small", 1, 10, 0);
            add("large", 1, 20, 0);
            add("second", 1, 20, 0);
            add("hungry", 0, 0, 401);
            add("modest", 0, 0, 400);
            assert!(!add("first", -1, 0, 0));
            assert!(add("first", -1, 0, 0), "names are unique");
            let held = guard
                .allocate_block(&Request::new(600).tag(T), &stream)
                .unwrap();
            assert!(
                guard
                    .allocate_block(&Request::new(500).tag(T), &stream)
                    .is_err()
            );
            let seen: Vec<_> = order.lock().unwrap().drain(..).collect();
            let names: Vec<_> = seen.iter().map(|(name, _)| *name).collect();
            assert_eq!(
                names,
                ["first", "modest", "large", "second", "small", "late"]
            );
            assert!(seen.iter().all(|(_, missing)| *missing == 100));
            // One that frees enough is the last.
            let (store, freeing) = (Arc::new(Mutex::new(Some(held))), Arc::downgrade(&guard));
            let hook = ReliefHook::new("frees", move |_| {
                let guard = freeing.upgrade().unwrap();
                let block = store.lock().unwrap().take().unwrap();
                guard.deallocate_block(block).unwrap();
                600
            });
            guard.add_relief_hook(hook.priority(-5));
            let block = guard
                .allocate_block(&Request::new(500).tag(T), &stream)
                .unwrap();
            assert!(order.lock().unwrap().is_empty());
            // S1.52: what a hook freed is counted once, by the free.
            assert_eq!(guard.usage().unwrap().outstanding(), 500);
            assert_eq!(guard.usage().unwrap().recoveries, 1, "a hook saved it");
            guard.deallocate_block(block).unwrap();
            assert_eq!(guard.usage().unwrap().outstanding(), 0);
        });
    }

    /// S1.30: hooks come before the policy; removal says whether there was one.
    #[test]
    fn s1_30_hooks_run_before_the_policy() {
        packed(|rig| {
            let (stream, guard) = (rig.stream(), guard(rig, 100));
            let order = Arc::new(Mutex::new(Vec::new()));
            let (one, two) = (Arc::clone(&order), Arc::clone(&order));
            guard.add_relief_hook(ReliefHook::new("hook", move |_| {
                one.lock().unwrap().push("hook");
                0
            }));
            guard.set_policy(OomPolicy::Checkpoint);
            guard.set_checkpoint(move |_| two.lock().unwrap().push("policy"));
            let fits = guard
                .allocate_block(&Request::new(100).tag(T), &stream)
                .unwrap();
            assert!(
                order.lock().unwrap().is_empty(),
                "nobody is asked for what fits"
            );
            assert!(
                guard
                    .allocate_block(&Request::new(1).tag(T), &stream)
                    .is_err()
            );
            assert_eq!(*order.lock().unwrap(), ["hook", "policy"]);
            guard.deallocate_block(fits).unwrap();
            assert!(guard.remove_relief_hook("hook"));
            assert!(!guard.remove_relief_hook("hook"));
        });
    }

    /// S1.31: the levels and their borders.
    #[test]
    fn s1_31_pressure_levels() {
        let of = |free: u64| Pressure::of(1000 - free, Some(1000));
        for (free, level) in [
            (1000, Pressure::None),
            (301, Pressure::None),
            (300, Pressure::Low),
            (101, Pressure::Low),
            (100, Pressure::Medium),
            (51, Pressure::Medium),
            (50, Pressure::High),
            (1, Pressure::High),
            (0, Pressure::Critical),
        ] {
            assert_eq!(of(free), level, "{free} free");
        }
        assert_eq!(Pressure::of(2000, Some(1000)), Pressure::Critical);
        assert_eq!(Pressure::of(u64::MAX, None), Pressure::None);
        assert_eq!(Pressure::of(0, Some(0)), Pressure::Critical);
        assert_eq!(Pressure::of(u64::MAX - 1, Some(u64::MAX)), Pressure::High);
        let all = [
            Pressure::None,
            Pressure::Low,
            Pressure::Medium,
            Pressure::High,
            Pressure::Critical,
        ];
        assert!(all.is_sorted());
        assert_eq!(
            all.map(Pressure::name),
            ["none", "low", "medium", "high", "critical"]
        );
    }

    /// S1.32, S1.53: every entry point that changes the level tells it.
    #[test]
    fn s1_32_s1_53_listeners_hear_of_every_entry_point() {
        packed(|rig| {
            let stream = rig.stream();
            let inner = AccessOrdered::new(rig.allocator()).shared();
            let guard = Arc::new(Relief::new(Budget::new(inner, Some(1000))));
            let heard = Arc::new(Mutex::new(Vec::new()));
            let log = Arc::clone(&heard);
            let number = guard
                .get_ref()
                .on_pressure(move |old, new| log.lock().unwrap().push((old, new)));
            let told = || std::mem::take(&mut *heard.lock().unwrap());
            use Pressure::*;
            let block = guard
                .allocate_block(&Request::new(1000).tag(T), &stream)
                .unwrap();
            assert_eq!(told(), [(None, Critical)], "allocate");
            guard.deallocate_block(block).unwrap();
            assert_eq!(told(), [], "still pending");
            guard.reap().unwrap();
            assert_eq!(told(), [(Critical, None)], "reap");
            let owned =
                OwnedBlock::allocate(Arc::clone(&guard), &Request::new(850).tag(T), &stream)
                    .unwrap();
            assert_eq!(told(), [(None, Low)], "owned");
            guard.get_ref().set_limit(Some(900));
            assert_eq!(told(), [(Low, Medium)], "a new budget");
            drop(owned);
            // Another request reaps for it.
            guard.set_policy(OomPolicy::FreeCaches);
            let block = guard.allocate_block(&Request::new(100).align(256).tag(T), &stream);
            assert_eq!(told(), [(Medium, None)], "reaped by a request");
            guard.deallocate_block(block.unwrap()).unwrap();
            guard.reap().unwrap();
            assert!(guard.get_ref().remove_listener(number));
            assert!(!guard.get_ref().remove_listener(number));
            let block = guard
                .allocate_block(&Request::new(900).tag(T), &stream)
                .unwrap();
            assert_eq!(told(), []);
            guard.deallocate_block(block).unwrap();
            guard.reap().unwrap();
        });
    }

    /// S1.33: a reservation holds real memory; what cannot be held is an error.
    #[test]
    fn s1_33_reservation_holds_memory() {
        each(|rig| {
            let allocator = rig.allocator();
            let before = allocator.stats().all.allocated.current;
            let held = Relief::new(allocator.clone());
            let held = held.with_reserve(32 * MIB).unwrap();
            assert_eq!((held.reserved(), held.ordinal()), (32 * MIB as u64, 0));
            assert!(allocator.stats().all.allocated.current >= before + 32 * MIB as u64);
            if let Some(driver) = rig.driver_held() {
                assert!(driver >= 32 * MIB as u64);
            }
            drop(held);
            assert_eq!(allocator.stats().all.allocated.current, before);
            let held = Relief::new(allocator.clone());
            let held = held.with_reserve(MIB).unwrap();
            assert_eq!(held.release_reserve().unwrap(), MIB as u64);
            assert_eq!((held.reserved(), held.release_reserve().unwrap()), (0, 0));
            assert_eq!(allocator.stats().all.allocated.current, before);
            let relief = Relief::new(allocator.clone());
            assert!(relief.with_reserve(1 << 50).is_err());
            let build = Relief::new(allocator.clone()).with_reserve(1 << 50);
            assert!(build.is_err());
            drop((held, build));
            rig.close(&allocator);
        });
    }

    /// S1.34, S1.55: the figures; no observer sees a peak below what is used.
    #[test]
    fn s1_34_s1_55_peak_is_never_below_the_current_value() {
        packed(|rig| {
            let guard = guard(rig, None);
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let workers: Vec<_> = (0..2)
                    .map(|_| {
                        scope.spawn(|| {
                            let stream = rig_free_stream(&guard);
                            for size in 1..400 {
                                let block = guard
                                    .allocate_block(&Request::new(size * 100).tag(T), &stream)
                                    .unwrap();
                                // Whoever resets has a turn while the block is there.
                                for _ in 0..3 {
                                    let stats = guard.usage().unwrap();
                                    assert!(
                                        stats.requested.peak >= stats.outstanding(),
                                        "{stats:?}"
                                    );
                                    assert!(
                                        stats.requested.peak >= block.id().bytes() as u64,
                                        "{stats:?}"
                                    );
                                    std::thread::yield_now();
                                }
                                guard.deallocate_block(block).unwrap();
                            }
                        })
                    })
                    .collect();
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        guard.get_ref().reset_peak_stats();
                    }
                });
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let stats = guard.usage().unwrap();
                        assert!(stats.requested.peak >= stats.outstanding(), "{stats:?}");
                    }
                });
                let ended: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
                stop.store(true, Ordering::Relaxed);
                ended.into_iter().for_each(|end| end.unwrap());
            });
            guard.get_ref().reset_peak_stats();
            let stats = guard.usage().unwrap();
            assert_eq!(
                (
                    stats.outstanding(),
                    stats.requested.peak,
                    stats.blocks.current
                ),
                (0, 0, 0)
            );
            let device = stats.device_memory.unwrap();
            assert!(device.total >= device.free && device.total > 0);
            if let Some(sim) = rig.sim() {
                let refusal = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
                sim.fail(FailPlan::call("cuMemGetInfo_v2", refusal).unwrap());
                let device = guard.usage().unwrap().device_memory;
                assert_eq!(device, None, "not known is not nothing");
            }
            let stream = rig.stream();
            let block = guard
                .allocate_block(&Request::new(100).tag(T), &stream)
                .unwrap();
            assert_eq!(guard.usage().unwrap().blocks.current, 1);
            guard.deallocate_block(block).unwrap();
            assert_eq!(guard.usage().unwrap().requested.peak, 100);
        });
    }

    fn rig_free_stream(guard: &Guard<Allocator>) -> Stream {
        guard.get_ref().get_ref().create_stream().unwrap()
    }

    /// Lets time pass until something is so; a watchdog that never looks fails the test.
    fn advance_until(clock: &Clock, done: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never is");
            clock.advance(Duration::from_secs(1));
            std::thread::yield_now();
        }
    }

    /// S1.35, S1.54: pauses by its clock and threshold, without a device; a stop lets all go.
    #[test]
    fn s1_35_s1_54_watchdog_pauses_and_stops() {
        let clock = Clock::manual();
        let free = Arc::new(AtomicU64::new(50));
        let second = Duration::from_secs(1);
        let probe = Arc::clone(&free);
        let watchdog = Watchdog::start_with_clock(&clock, 100, second, move || {
            Some(probe.load(Ordering::SeqCst))
        });
        let watchdog = watchdog.unwrap();
        assert!(watchdog.wait_for_first_check(Duration::from_secs(1)));
        assert!(watchdog.is_paused(), "50 of 100 bytes");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| watchdog.wait_if_paused());
            free.store(100, Ordering::SeqCst);
            // The thread and the waiter wait; the next look is an interval away.
            advance_until(&clock, || !watchdog.is_paused());
            waiter.join().unwrap();
        });
        free.store(0, Ordering::SeqCst);
        advance_until(&clock, || watchdog.is_paused());
        // Not joined before they said that they are through: one that waits for ever must fail the
        // test, not hold it up.
        let watchdog = Arc::new(watchdog);
        let (through, done) = std::sync::mpsc::channel();
        let before = clock.waits();
        for _ in 0..4 {
            let (watchdog, through) = (Arc::clone(&watchdog), through.clone());
            std::thread::spawn(move || {
                watchdog.wait_if_paused();
                through.send(()).unwrap();
            });
        }
        // The watchdog's own thread may have begun a wait as well.
        for waits in before..before + 4 {
            clock.await_waiter(waits);
        }
        // The clock stands still from here on: the stop alone lets them go.
        watchdog.stop();
        for _ in 0..4 {
            let limit = Duration::from_secs(30);
            done.recv_timeout(limit).expect("a waiter is let go");
        }
        watchdog.stop();
        let blind = Watchdog::start_with_clock(&clock, 100, second, || None).unwrap();
        assert!(blind.wait_for_first_check(Duration::from_secs(1)));
        assert!(!blind.is_paused());
        blind.wait_if_paused();
    }

    /// S1.49: out of memory is known by the driver's code.
    #[test]
    fn s1_49_only_the_code_says_out_of_memory() {
        each(|rig| {
            let Some(sim) = rig.sim() else { return };
            let (stream, guard) = (rig.stream(), guard(rig, None));
            guard.set_policy(OomPolicy::Checkpoint);
            let runs = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&runs);
            guard.set_checkpoint(move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
            });
            for (code, expected) in [
                (sys::CUresult::CUDA_ERROR_INVALID_VALUE, 0),
                (sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY, 1),
            ] {
                for call in ["cuMemAlloc_v2", "cuMemCreate"] {
                    sim.fail(FailPlan::call(call, code).unwrap().times(1000));
                }
                let error = guard
                    .allocate_block(&Request::new(64 * MIB).tag(T), &stream)
                    .unwrap_err();
                assert_eq!(error.is_out_of_memory(), expected == 1);
                assert_eq!(runs.load(Ordering::SeqCst), expected);
                sim.clear_failures();
            }
            assert_eq!(guard.usage().unwrap().outstanding(), 0);
            // And no text does.
            let loud = Relief::new(Arc::new(Loud(rig.allocator())));
            loud.set_policy(OomPolicy::Checkpoint);
            let counted = Arc::clone(&runs);
            loud.set_checkpoint(move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
            });
            let error = loud
                .allocate_block(&Request::new(64).tag(T), &stream)
                .unwrap_err();
            assert!(error.to_string().contains("out of memory"), "{error}");
            assert!(!error.is_out_of_memory());
            assert_eq!(runs.load(Ordering::SeqCst), 1);
        });
    }

    /// Refuses everything, in words that mean something else.
    struct Loud(Allocator);

    // SAFETY: hands out nothing.
    unsafe impl MemoryResource for Loud {
        fn allocate_block(&self, _: &Request, _: &Stream) -> Result<RawBlock, Error> {
            Err(Error::from(StreamMisuse::LaunchOrder {
                asked: "out of memory",
                because: "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            }))
        }
        fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
            self.0.deallocate_block(block)
        }
        fn ordinal(&self) -> usize {
            self.0.ordinal()
        }
        fn state(&self, block: &BlockId) -> BlockState {
            self.0.state(block)
        }
    }

    /// S1.52: what a hook frees through the guard counts once, whatever it says that it freed.
    #[test]
    fn s1_52_bytes_freed_by_a_hook_count_once() {
        packed(|rig| {
            let stream = rig.stream();
            let guard = Arc::new(guard(rig, 10_000));
            let kept: Arc<std::sync::Mutex<Vec<RawBlock>>> = Arc::default();
            for _ in 0..3 {
                kept.lock().unwrap().push(
                    guard
                        .allocate_block(&Request::new(3000).tag(T), &stream)
                        .unwrap(),
                );
            }
            let (weak, list) = (Arc::downgrade(&guard), Arc::clone(&kept));
            guard.add_relief_hook(ReliefHook::new("frees two", move |_| {
                let guard = weak.upgrade().unwrap();
                for _ in 0..2 {
                    let block = list.lock().unwrap().pop().unwrap();
                    guard.deallocate_block(block).unwrap();
                }
                6000
            }));
            let block = guard
                .allocate_block(&Request::new(5000).tag(T), &stream)
                .unwrap();
            assert_eq!(guard.usage().unwrap().outstanding(), 8000);
            assert_eq!(
                guard.get_ref().get_ref().usage().unwrap().requested.current,
                8000
            );
            guard.remove_relief_hook("frees two");
            assert!(
                guard
                    .allocate_block(&Request::new(2001).tag(T), &stream)
                    .is_err()
            );
            let rest = guard
                .allocate_block(&Request::new(2000).tag(T), &stream)
                .unwrap();
            guard.deallocate_block(rest).unwrap();
            guard.deallocate_block(block).unwrap();
            for block in kept.lock().unwrap().drain(..) {
                guard.deallocate_block(block).unwrap();
            }
            assert_eq!(guard.usage().unwrap().outstanding(), 0);
        });
    }

    /// S1.50, S1.43: hooks and listeners may use everything, and may panic.
    #[test]
    fn s1_43_s1_50_hooks_and_listeners_run_without_a_lock() {
        packed(|rig| {
            let stream = rig.stream();
            let guard = Arc::new(guard(rig, 1000));
            let inside: Arc<OnceLock<Arc<Guard<Allocator>>>> = Arc::default();
            let _ = inside.set(Arc::clone(&guard));
            let (one, two) = (Arc::clone(&inside), Arc::clone(&inside));
            let busy = stream.clone();
            guard.add_relief_hook(ReliefHook::new("busy", move |_| {
                let guard = one.get().unwrap();
                let block = guard
                    .allocate_block(&Request::new(10).tag(T), &busy)
                    .unwrap();
                guard.deallocate_block(block).unwrap();
                guard.add_relief_hook(ReliefHook::new("added", |_| 0));
                guard.remove_relief_hook("added");
                guard.remove_relief_hook("busy");
                guard.get_ref().set_limit(Some(1000));
                0
            }));
            guard.add_relief_hook(ReliefHook::new("panics", |_| panic!("in a hook")).priority(-1));
            let also = stream.clone();
            guard.get_ref().on_pressure(move |_, new| {
                let guard = two.get().unwrap();
                if new == Pressure::None {
                    let block = guard
                        .allocate_block(&Request::new(1).tag(T), &also)
                        .unwrap();
                    guard.deallocate_block(block).unwrap();
                }
            });
            guard.get_ref().on_pressure(|_, _| panic!("in a listener"));
            let held = guard
                .allocate_block(&Request::new(900).tag(T), &stream)
                .unwrap();
            assert!(
                guard
                    .allocate_block(&Request::new(200).tag(T), &stream)
                    .is_err()
            );
            assert!(!guard.remove_relief_hook("busy"), "it ran");
            guard.deallocate_block(held).unwrap();
            assert_eq!(guard.usage().unwrap().outstanding(), 0);
            let block = guard
                .allocate_block(&Request::new(1000).tag(T), &stream)
                .unwrap();
            guard.deallocate_block(block).unwrap();
            guard.remove_relief_hook("panics");
        });
    }

    /// S1.51, S1.52: at the border of the budget many threads never pass it.
    #[test]
    fn s1_51_s1_52_reservation_is_one_step() {
        packed(|rig| {
            let guard = guard(rig, 10_000);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        let stream = rig_free_stream(&guard);
                        for _ in 0..300 {
                            if let Ok(block) =
                                guard.allocate_block(&Request::new(3000).tag(T), &stream)
                            {
                                let below = guard.get_ref().get_ref().stats().all.requested.current;
                                assert!(below <= 10_000, "{below}");
                                assert!(guard.usage().unwrap().outstanding() <= 10_000);
                                guard.deallocate_block(block).unwrap();
                            }
                        }
                    });
                }
            });
            assert_eq!(
                guard.usage().unwrap().outstanding(),
                guard.get_ref().get_ref().stats().all.requested.current
            );
            assert_eq!(guard.usage().unwrap().outstanding(), 0);
        });
    }
}
