//! How scarce memory is: levels, listeners, the watchdog.

use crate::{T, packed, take};
use cualloc::resource::*;
use cualloc::{DeviceBuffer, Request};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
fn s1_32_s1_53_every_entry_point_notifies_listeners() {
    packed(|rig| {
        let stream = rig.stream();
        let inner = Arc::new(AccessOrdered::new(rig.allocator()));
        let guard = Arc::new(Relief::new(Budget::new(inner, Some(1000))));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&heard);
        guard
            .get_ref()
            .on_pressure(move |old, new| log.lock().unwrap().push((old, new)));
        let told = || std::mem::take(&mut *heard.lock().unwrap());
        use Pressure::*;
        let block = take(&guard, 1000, &stream);
        assert_eq!(told(), [(None, Critical)], "allocate");
        guard.deallocate_block(block).unwrap();
        assert_eq!(told(), [], "still pending");
        guard.reap().unwrap();
        assert_eq!(told(), [(Critical, None)], "reap");
        let owned = DeviceBuffer::<u8>::uninit(&guard, 850, &stream).unwrap();
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
    });
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

/// S1.35, S1.54: the watchdog pauses by its clock and threshold, without a device; stopping it releases all waiters.
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
    // The clock does not advance from here on: only the stop releases them.
    watchdog.stop();
    for _ in 0..4 {
        let limit = Duration::from_secs(30);
        done.recv_timeout(limit).expect("a waiter is released");
    }
    watchdog.stop();
    let blind = Watchdog::start_with_clock(&clock, 100, second, || None).unwrap();
    assert!(blind.wait_for_first_check(Duration::from_secs(1)));
    assert!(!blind.is_paused());
    blind.wait_if_paused();
}

/// S3.24
#[test]
fn s3_24_fractions_are_validated_and_changes_reported_once() {
    let pairs = [(0.0, 0.5), (0.5, 0.5), (0.9, 0.5), (0.5, 1.1)];
    for (warning, critical) in pairs.into_iter().chain([(f64::NAN, 0.5), (0.5, f64::NAN)]) {
        let made = PressureMonitor::new(warning, critical);
        assert!(made.is_err(), "{warning} {critical}");
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let monitor = PressureMonitor::new(0.5, 1.0)
        .unwrap()
        .on_transition(move |old, new| log.lock().unwrap().push((old, new)))
        .on_eviction(|bytes| bytes / 2);
    for used in [0, 49, 50, 99, 100, 100, 10] {
        monitor.observe(used, 100);
    }
    use Pressure::{Critical, High, None};
    let expected = [(None, High), (High, Critical), (Critical, None)];
    assert_eq!(*seen.lock().unwrap(), expected);
    assert_eq!(monitor.evicted(), (50, 2));
    assert_eq!(monitor.observe(0, 0), None);
    assert_eq!(monitor.observe(u64::MAX, u64::MAX), Critical);
}
