//! Budgets, and reserves under them.

use crate::common::*;
use crate::relief::{Guard, guard};
use crate::{ask, outstanding, packed, refusal, take};
use cualloc::driver::Stream;
use cualloc::resource::*;
use cualloc::{Allocator, DeviceBuffer, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// S1.24, S1.36: a budget that can change; errors before any driver call; defaults.
#[test]
fn s1_24_s1_36_budget_is_set_at_run_time() {
    const RESERVE: u64 = 4 << 20;
    packed(|rig| {
        let stream = rig.stream();
        let open = guard(rig, None);
        let defaults = (open.get_ref().limit(), open.policy(), open.ordinal());
        assert_eq!(defaults, (None, OomPolicy::Fail, 0));
        let guard = guard(rig, RESERVE + 1000);
        let request = |bytes| ask(&guard, bytes, &stream);
        let reserve = request(RESERVE as usize).unwrap();
        let calls = rig.memory_calls();
        match request(1001) {
            Err(Error::OverBudget {
                requested,
                limit,
                used,
                ..
            }) => assert_eq!((requested, limit, used), (1001, RESERVE + 1000, RESERVE)),
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.memory_calls(), calls);
        let budget = guard.get_ref();
        budget.set_limit(None);
        assert_eq!((budget.limit(), budget.remaining()), (None, None));
        let block = request(1001).unwrap();
        budget.set_limit(Some(500));
        let usage = guard.usage().unwrap();
        assert_eq!(usage.outstanding(), RESERVE + 1001, "stays");
        assert_eq!(usage.limit, Some(500));
        assert!(request(1).is_err());
        guard.deallocate_block(block).unwrap();
        guard.deallocate_block(reserve).unwrap();
        budget.set_limit(Some(0));
        assert!(request(1).is_err(), "0 is no room");
    });
}

/// S1.33: a reserve is a buffer of the guard, held until it is dropped; what cannot be held is an error.
#[test]
fn s1_33_reservation_holds_memory() {
    each(|rig| {
        let (allocator, stream) = (rig.allocator(), rig.stream());
        let before = allocator.stats().all.allocated.current;
        let guard = Budget::new(allocator.clone(), Some(64 << 20));
        let guard = Arc::new(Relief::new(guard));
        let reserve = |bytes| DeviceBuffer::<u8>::uninit(&guard, bytes, &stream);
        let held = reserve(32 * MIB).unwrap();
        assert_eq!((held.byte_len(), guard.ordinal()), (32 * MIB, 0));
        assert_eq!(guard.headroom(), Some(32 << 20));
        assert!(allocator.stats().all.allocated.current >= before + 32 * MIB as u64);
        if let Some(driver) = rig.driver_held() {
            assert!(driver >= 32 * MIB as u64);
        }
        let mut held = Some(held);
        // Released once, by the bytes that were held.
        let release = |held: &mut Option<DeviceBuffer<_>>| {
            held.take()
                .map_or(0, |held: DeviceBuffer<_>| held.byte_len())
        };
        assert_eq!(release(&mut held), 32 * MIB);
        assert_eq!(release(&mut held), 0);
        assert_eq!(allocator.stats().all.allocated.current, before);
        assert!(reserve(1 << 50).is_err());
        guard.get_ref().set_limit(None);
        assert!(reserve(1 << 50).is_err());
        drop(guard);
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
                            let block = take(&guard, size * 100, &stream);
                            // The resetting thread runs while the block is live.
                            for _ in 0..3 {
                                let stats = guard.usage().unwrap();
                                assert!(stats.requested.peak >= stats.outstanding(), "{stats:?}");
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
            sim.fail(refusal("cuMemGetInfo_v2"));
            let device = guard.usage().unwrap().device_memory;
            assert_eq!(device, None, "not known is not nothing");
        }
        let stream = rig.stream();
        let block = take(&guard, 100, &stream);
        assert_eq!(guard.usage().unwrap().blocks.current, 1);
        guard.deallocate_block(block).unwrap();
        assert_eq!(guard.usage().unwrap().requested.peak, 100);
    });
}

fn rig_free_stream(guard: &Guard<Allocator>) -> Stream {
    guard.get_ref().get_ref().create_stream().unwrap()
}

/// S1.52: what a hook frees through the guard counts once, whatever it says that it freed.
#[test]
fn s1_52_bytes_freed_by_a_hook_count_once() {
    packed(|rig| {
        let stream = rig.stream();
        let guard = Arc::new(guard(rig, 10_000));
        let kept: Arc<std::sync::Mutex<Vec<RawBlock>>> = Arc::default();
        for _ in 0..3 {
            kept.lock().unwrap().push(take(&guard, 3000, &stream));
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
        let block = take(&guard, 5000, &stream);
        assert_eq!(outstanding(&guard), 8000);
        assert_eq!(guard.headroom(), Some(2000));
        assert_eq!(
            guard.get_ref().get_ref().usage().unwrap().requested.current,
            8000
        );
        guard.remove_relief_hook("frees two");
        assert!(ask(&guard, 2001, &stream).is_err());
        let rest = take(&guard, 2000, &stream);
        guard.deallocate_block(rest).unwrap();
        guard.deallocate_block(block).unwrap();
        for block in kept.lock().unwrap().drain(..) {
            guard.deallocate_block(block).unwrap();
        }
        assert_eq!(outstanding(&guard), 0);
    });
}
