//! The suite for page-locked memory: what the one over device memory asks, as far as it has a meaning
//! for memory that the host writes.

use std::collections::BTreeMap;

use cualloc::driver::Stream;
use cualloc::driver::sys::CUresult;
use cualloc::pool::{PinnedConfig, PinnedPool};
use cualloc::sim::FailPlan;
use cualloc::{PinnedBuffer, Policy};

use crate::common::*;

const BUFFER: usize = 64 * KIB;

/// A pool of so many blocks at first and at most, and whether larger requests are served.
struct Setting {
    initial: usize,
    maximum: usize,
    oversize: bool,
}

fn run(setting: Setting) {
    let config = PinnedConfig::new()
        .initial(setting.initial)
        .maximum(setting.maximum)
        .buffer_bytes(BUFFER)
        .oversize(setting.oversize);
    for policy in [Policy::Packed, Policy::Classic] {
        only(policy, |rig| {
            let pool = PinnedPool::new(&rig.context, config).unwrap();
            basic(&pool);
            mixes(&pool, &setting);
            threads(rig, &pool);
            exhaustion(rig, &pool, &setting);
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
    run(Setting {
        initial: 2,
        maximum: 8,
        oversize: true,
    });
}

#[test]
fn s4_7_pinned_pool_that_starts_empty_passes_the_suite() {
    run(Setting {
        initial: 0,
        maximum: 5,
        oversize: false,
    });
}

fn idle(pool: &PinnedPool) {
    let stats = pool.usage();
    assert_eq!((stats.blocks.current, stats.pending), (0, 0), "{stats:?}");
    assert_eq!(stats.reserved.current, stats.cached_blocks * BUFFER as u64);
}

fn basic(pool: &PinnedPool) {
    idle(pool);
    let first = pool.acquire::<u32>(250).unwrap();
    let second = pool.acquire::<u8>(0).unwrap();
    assert_eq!(pool.usage().blocks.current, 2);
    let first = first.write(&[7; 250]).unwrap();
    assert_eq!(first[..], [7; 250]);
    let (a, b) = (first.as_ptr() as usize, second.as_ptr() as usize);
    assert!(a.abs_diff(b) >= BUFFER);
    drop((first, second));
    idle(pool);
    pool.trim(0);
    assert_eq!(pool.usage().reserved.current, 0);
}

/// Random sizes in random order, each buffer's contents whole until it goes.
fn mixes(pool: &PinnedPool, setting: &Setting) {
    let mut seed = 11u64;
    let mut below = |end: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
        (seed >> 33) % end
    };
    let largest = if setting.oversize { 2 * BUFFER } else { BUFFER };
    let mut live: Vec<PinnedBuffer<u8>> = Vec::new();
    let mut words = Vec::new();
    for step in 0..300 {
        if live.len() < setting.maximum && below(100) < 60 {
            let bytes = 1 + below(largest as u64) as usize;
            let buffer = pool.acquire(bytes).unwrap();
            live.push(buffer.write(&vec![step as u8; bytes]).unwrap());
            words.push(step as u8);
        } else if !live.is_empty() {
            let at = below(live.len() as u64) as usize;
            let (buffer, word) = (live.swap_remove(at), words.swap_remove(at));
            assert!(buffer.iter().all(|byte| *byte == word));
        }
        assert_eq!(pool.usage().blocks.current, live.len() as u64);
        let mut ranges = BTreeMap::new();
        for buffer in &live {
            let start = buffer.as_ptr() as usize;
            assert_eq!(ranges.insert(start, start + buffer.len()), None);
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
    let (sender, receiver) = std::sync::mpsc::channel::<PinnedBuffer<u8>>();
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let sender = sender.clone();
            scope.spawn(move || {
                let stream = Stream::new(context).unwrap();
                for step in 0..50 {
                    // Others may have all buffers at this moment.
                    let Ok(buffer) = pool.acquire(100) else {
                        continue;
                    };
                    let mut buffer = buffer.write(&[number; 100]).unwrap();
                    buffer.record_use(&stream).unwrap();
                    assert_eq!(buffer[..], [number; 100]);
                    if step % 2 == 0 {
                        sender.send(buffer).unwrap();
                    }
                    stream.synchronize().unwrap();
                }
            });
        }
        drop(sender);
        scope.spawn(move || receiver.into_iter().for_each(drop));
    });
    idle(pool);
}

/// The maximum, and the driver's refusal, are errors that change nothing, and it goes on afterwards.
fn exhaustion(rig: &Rig, pool: &PinnedPool, setting: &Setting) {
    let mut live: Vec<_> = (0..setting.maximum)
        .map(|_| pool.acquire::<u8>(1).unwrap())
        .collect();
    let before = pool.usage();
    assert!(pool.acquire::<u8>(1).is_err());
    assert_eq!(pool.usage(), before);
    live.pop();
    live.push(pool.acquire::<u8>(1).unwrap());
    drop(live);
    idle(pool);
    pool.trim(0);
    let Some(sim) = rig.sim() else { return };
    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    sim.fail(FailPlan::call("cuMemHostAlloc", code).unwrap());
    assert_eq!(pool.acquire::<u8>(1).unwrap_err().code(), code);
    assert_eq!(pool.usage().reserved.current, 0);
    drop(pool.acquire::<u8>(1).unwrap());
    idle(pool);
}

/// A buffer that is returned while a stream uses it is not leased again before the stream is done.
fn streams(rig: &Rig, pool: &PinnedPool) {
    let stream = rig.stream();
    pool.trim(0);
    let mut buffer = pool.acquire::<u8>(100).unwrap();
    let at = buffer.as_ptr() as usize;
    let busy = rig.busy(&stream);
    buffer.record_use(&stream).unwrap();
    drop(buffer);
    assert_eq!(
        (pool.usage().blocks.current, pool.usage().pending),
        (0, BUFFER as u64)
    );
    let next = pool.acquire::<u8>(100).unwrap();
    assert_ne!(next.as_ptr() as usize, at);
    busy.release();
    stream.synchronize().unwrap();
    drop(next);
    idle(pool);
    pool.trim(0);
}
