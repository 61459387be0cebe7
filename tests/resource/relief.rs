//! Relief: hooks, policies, and what they are asked for.

use crate::common::*;
use crate::{ask, outstanding, packed, recoveries, take};
use cualloc::driver::{Stream, sys};
use cualloc::error::StreamMisuse;
use cualloc::resource::*;
use cualloc::sim::FailPlan;
use cualloc::{Allocator, Error, Refused, Request};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub type Guard<R> = Relief<Budget<R>>;

pub fn guard(rig: &Rig, budget: impl Into<Option<u64>>) -> Guard<Allocator> {
    Relief::new(Budget::new(rig.allocator(), budget.into()))
}

/// Refuses while its allocator holds more than this number of bytes from the driver.
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
        let guard = Relief::new(full);
        guard.set_policy(OomPolicy::FreeCaches);
        let block = take(&guard, 4 * MIB, &stream);
        assert_eq!(recoveries(&guard), 1);
        let reserved = allocator.stats().all.reserved.current;
        assert!(reserved < cached, "caches were kept");
        let more = take(&guard, 4 * MIB, &stream);
        assert!(ask(&guard, 4 * MIB, &stream).is_err());
        assert_eq!(recoveries(&guard), 1, "a retry that failed is none");
        guard.deallocate_block(more).unwrap();
        guard.deallocate_block(block).unwrap();
    });
}

/// S1.30, S5.29: a request that can never fit runs no hook, empties nothing and does not wait.
#[test]
fn s1_30_a_budget_smaller_than_the_request_fails_immediately() {
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
            let refused = ask(&guard, 101, &stream);
            assert_matches!(
                refused,
                Err(Error::OverBudget {
                    requested: 101,
                    limit: 100,
                    ..
                })
            );
            // Before the policy that waits, by a clock that stands still.
            assert_eq!(allocator.stats().all.reserved.current, reserved);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 0, "a hook was asked");
        assert_eq!(clock.waits(), 0);
        assert_eq!(recoveries(&guard), 0);
    });
}

/// S1.25: waiting looks every 100 ms of the clock it was given, and gives up in time.
#[test]
fn s1_25_wait_policy_follows_its_clock() {
    packed(|rig| {
        let stream = rig.stream();
        let clock = Clock::manual();
        let guard = guard(rig, 1000).with_clock(&clock);
        guard.set_policy(OomPolicy::Wait(Duration::from_millis(250)));
        let block = take(&guard, 1000, &stream);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ask(&guard, 600, &stream));
            clock.await_waiter(0);
            guard.deallocate_block(block).unwrap();
            clock.advance(Duration::from_millis(100));
            let block = waiting.join().unwrap().unwrap();
            assert_eq!(recoveries(&guard), 1);
            let seen = clock.waits();
            let waiting = scope.spawn(|| ask(&guard, 600, &stream));
            for number in 0..3 {
                clock.await_waiter(seen + number);
                clock.advance(Duration::from_millis(100));
            }
            assert!(waiting.join().unwrap().is_err());
            assert_eq!(clock.waits(), seen + 3, "100, 200 and 250 ms");
            guard.deallocate_block(block).unwrap();
        });
        assert_eq!(recoveries(&guard), 1);
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
            assert!(ask(&guard, 101, &stream).is_err());
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
        let held = take(&guard, 600, &stream);
        assert!(ask(&guard, 500, &stream).is_err());
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
        let block = take(&guard, 500, &stream);
        assert!(order.lock().unwrap().is_empty());
        // S1.52: what a hook freed is counted once, by the free.
        assert_eq!(outstanding(&guard), 500);
        assert_eq!(recoveries(&guard), 1, "a hook saved it");
        guard.deallocate_block(block).unwrap();
        assert_eq!(outstanding(&guard), 0);
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
        let fits = take(&guard, 100, &stream);
        assert!(
            order.lock().unwrap().is_empty(),
            "no hook runs for a request that fits"
        );
        assert!(ask(&guard, 1, &stream).is_err());
        assert_eq!(*order.lock().unwrap(), ["hook", "policy"]);
        guard.deallocate_block(fits).unwrap();
        assert!(guard.remove_relief_hook("hook"));
        assert!(!guard.remove_relief_hook("hook"));
    });
}

/// S1.49: out of memory is known by the driver's code.
#[test]
fn s1_49_only_the_code_means_out_of_memory() {
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
            let error = ask(&guard, 64 * MIB, &stream).unwrap_err();
            assert_eq!(error.is_out_of_memory(), expected == 1);
            assert_eq!(runs.load(Ordering::SeqCst), expected);
            sim.clear_failures();
        }
        assert_eq!(outstanding(&guard), 0);
        // And no text does.
        let loud = Relief::new(Arc::new(Loud(rig.allocator())));
        loud.set_policy(OomPolicy::Checkpoint);
        let counted = Arc::clone(&runs);
        loud.set_checkpoint(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let error = ask(&loud, 64, &stream).unwrap_err();
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
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.0)
    }
}

/// A hook's own request fails if memory is short, and no hook runs for it.
#[test]
fn a_hook_that_lacks_memory_itself_runs_no_hooks() {
    packed(|rig| {
        let stream = rig.stream();
        let guard = Arc::new(guard(rig, 1000));
        let allocator = rig.limited(8 * MIB);
        let runs = Arc::new(AtomicU64::new(0));
        let (below, asked) = (allocator.clone(), Arc::clone(&runs));
        let of_guard: Arc<OnceLock<Arc<Guard<Allocator>>>> = Arc::default();
        let _ = of_guard.set(Arc::clone(&guard));
        let own = stream.clone();
        let hook = ReliefHook::new("stages", move |_| {
            asked.fetch_add(1, Ordering::Relaxed);
            let staged = below.allocate(16 * MIB, &own);
            assert!(staged.is_err_and(|error| error.is_out_of_memory()));
            let guard = of_guard.get().unwrap();
            let staged = ask(&guard, 2000, &own);
            assert!(staged.is_err_and(|error| error.is_out_of_memory()));
            let staged = ask(&guard, 500, &own);
            assert!(staged.is_err_and(|error| error.is_out_of_memory()));
            0
        });
        allocator.add_relief_hook(hook.clone());
        guard.add_relief_hook(hook);
        let held = take(&guard, 900, &stream);
        let block = allocator.allocate(5 * MIB, &stream).unwrap();
        for round in 1..3 {
            let refused = ask(&guard, 500, &stream);
            assert!(refused.is_err_and(|error| error.is_out_of_memory()));
            assert_eq!(runs.load(Ordering::Relaxed), 2 * round - 1);
            let refused = allocator.allocate(5 * MIB, &stream);
            assert!(refused.is_err_and(|error| error.is_out_of_memory()));
            assert_eq!(runs.load(Ordering::Relaxed), 2 * round);
        }
        drop(block);
        guard.deallocate_block(held).unwrap();
        assert!(allocator.remove_relief_hook("stages") && guard.remove_relief_hook("stages"));
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
            let block = take(&guard, 10, &busy);
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
                let block = take(&guard, 1, &also);
                guard.deallocate_block(block).unwrap();
            }
        });
        guard.get_ref().on_pressure(|_, _| panic!("in a listener"));
        let held = take(&guard, 900, &stream);
        assert!(ask(&guard, 200, &stream).is_err());
        assert!(!guard.remove_relief_hook("busy"), "it ran");
        guard.deallocate_block(held).unwrap();
        assert_eq!(outstanding(&guard), 0);
        let block = take(&guard, 1000, &stream);
        guard.deallocate_block(block).unwrap();
        guard.remove_relief_hook("panics");
    });
}
