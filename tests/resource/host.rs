//! The suite for page-locked memory: what the one over device memory asks, as far as it has a meaning
//! for memory that the host writes.

use std::collections::BTreeMap;

use cualloc::Policy;
use cualloc::driver::Stream;
use cualloc::driver::sys::CUresult;
use cualloc::pool::{PinnedConfig, PinnedLease, PinnedPool};
use cualloc::sim::FailPlan;

use crate::common::*;

const BUFFER: usize = 64 * KIB;

fn run(config: PinnedConfig) {
    for policy in [Policy::Packed, Policy::Classic] {
        only(policy, |rig| {
            let pool = PinnedPool::new(&rig.context, config).unwrap();
            basic(&pool);
            mixes(&pool, config);
            threads(rig, &pool);
            exhaustion(rig, &pool, config);
            streams(rig, &pool);
            drop(pool);
            if let Some(sim) = rig.maybe_sim() {
                assert_eq!(sim.leaks().host, 0);
            }
        });
    }
}

#[test]
fn s4_6_pinned_pool_passes_the_suite() {
    run(PinnedConfig {
        initial: 2,
        maximum: 8,
        buffer_bytes: BUFFER,
        oversize: true,
    });
}

#[test]
fn s4_7_pinned_pool_that_starts_empty_passes_the_suite() {
    run(PinnedConfig {
        initial: 0,
        maximum: 5,
        buffer_bytes: BUFFER,
        oversize: false,
    });
}

fn idle(pool: &PinnedPool) {
    let stats = pool.stats();
    assert_eq!(
        (stats.in_use, stats.in_flight, stats.stale),
        (0, 0, 0),
        "{stats:?}"
    );
    assert_eq!(stats.total, stats.free);
}

fn basic(pool: &PinnedPool) {
    idle(pool);
    let mut first = pool.acquire(1000).unwrap().typed::<u32>(250).unwrap();
    let second = pool.acquire(0).unwrap();
    assert!(first.capacity() >= 1000);
    assert_eq!(pool.stats().in_use, 2);
    first.write(&[7; 250]).unwrap();
    assert_eq!(first.initialised().unwrap(), [7; 250]);
    let ranges = |lease: *const u8| (lease as usize, lease as usize + 1000);
    let (a, b) = (ranges(first.as_ptr().cast()), ranges(second.as_ptr()));
    assert!(a.1 <= b.0 || b.1 <= a.0);
    drop((first, second));
    idle(pool);
    pool.trim(0);
    assert_eq!((pool.stats().total, pool.stats().bytes), (0, 0));
}

/// Random sizes in random order, each buffer's contents whole until it goes.
fn mixes(pool: &PinnedPool, config: PinnedConfig) {
    let mut seed = 11u64;
    let mut below = |end: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
        (seed >> 33) % end
    };
    let largest = if config.oversize { 2 * BUFFER } else { BUFFER };
    let mut live: Vec<PinnedLease<u8>> = Vec::new();
    let mut words = Vec::new();
    for step in 0..300 {
        if live.len() < config.maximum && below(100) < 60 {
            let bytes = 1 + below(largest as u64) as usize;
            let mut lease = pool.acquire(bytes).unwrap().typed::<u8>(bytes).unwrap();
            lease.write(&vec![step as u8; bytes]).unwrap();
            live.push(lease);
            words.push(step as u8);
        } else if !live.is_empty() {
            let at = below(live.len() as u64) as usize;
            let (mut lease, word) = (live.swap_remove(at), words.swap_remove(at));
            assert!(
                lease
                    .initialised()
                    .unwrap()
                    .iter()
                    .all(|byte| *byte == word)
            );
        }
        assert_eq!(pool.stats().in_use, live.len());
        let mut ranges = BTreeMap::new();
        for lease in &live {
            let start = lease.as_ptr() as usize;
            assert_eq!(ranges.insert(start, start + lease.capacity()), None);
        }
        let starts = ranges.keys().skip(1);
        assert!(ranges.values().zip(starts).all(|(end, start)| end <= start));
    }
    drop(live);
    idle(pool);
}

/// Threads with streams of their own, buffers returned by other threads.
fn threads(rig: &Rig, pool: &PinnedPool) {
    let context = &rig.context;
    let (sender, receiver) = std::sync::mpsc::channel::<PinnedLease<u8>>();
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let sender = sender.clone();
            scope.spawn(move || {
                let stream = Stream::new(context).unwrap();
                for step in 0..50 {
                    // Others may have all buffers at this moment.
                    let Ok(mut lease) = pool.acquire(100) else {
                        continue;
                    };
                    lease.write(&[number; 100]).unwrap();
                    lease.record_use(&stream).unwrap();
                    lease.wait().unwrap();
                    assert_eq!(lease.initialised().unwrap()[..100], [number; 100]);
                    if step % 2 == 0 {
                        sender.send(lease).unwrap();
                    }
                }
            });
        }
        drop(sender);
        scope.spawn(move || receiver.into_iter().for_each(drop));
    });
    idle(pool);
}

/// The maximum, and the driver's refusal, are errors that change nothing, and it goes on afterwards.
fn exhaustion(rig: &Rig, pool: &PinnedPool, config: PinnedConfig) {
    let mut live: Vec<_> = (0..config.maximum)
        .map(|_| pool.acquire(1).unwrap())
        .collect();
    let before = pool.stats();
    assert!(pool.acquire(1).is_err());
    assert_eq!(pool.stats(), before);
    live.pop();
    live.push(pool.acquire(1).unwrap());
    drop(live);
    idle(pool);
    pool.trim(0);
    let Some(sim) = rig.sim() else { return };
    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    sim.fail(FailPlan::call("cuMemHostAlloc", code).unwrap());
    assert_eq!(pool.acquire(1).unwrap_err().code(), code);
    assert_eq!(pool.stats().total, 0);
    drop(pool.acquire(1).unwrap());
    idle(pool);
}

/// A buffer that is returned while a stream uses it is not leased again before the stream is done.
fn streams(rig: &Rig, pool: &PinnedPool) {
    let stream = rig.stream();
    pool.trim(0);
    let mut lease = pool.acquire(100).unwrap();
    lease.write(&[1; 100]).unwrap();
    let at = lease.as_ptr() as usize;
    let busy = rig.busy(&stream);
    lease.record_use(&stream).unwrap();
    assert!(!lease.is_complete().unwrap());
    drop(lease);
    assert_eq!((pool.stats().in_use, pool.stats().in_flight), (0, 1));
    let next = pool.acquire(100).unwrap();
    assert_ne!(next.as_ptr() as usize, at);
    busy.release();
    stream.synchronize().unwrap();
    drop(next);
    idle(pool);
    pool.trim(0);
}
