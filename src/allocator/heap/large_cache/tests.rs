//! Large blocks in caches and at their homes: how they leave a cache, and what the figures count.

use crate::allocator::{Allocator, Block, Config, Policy};
use crate::driver::Stream;
use crate::sim::{SimConfig, Simulator};

const MIB: usize = 1 << 20;

/// An allocator whose heap was recently contended, and two streams.
pub(crate) fn contended(test: impl FnOnce(&Allocator, [&Stream; 2])) {
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let driver = simulator.driver().unwrap();
    let context = driver.context(0).unwrap();
    let config = Config::new().policy(Policy::Packed);
    let allocator = Allocator::with_config(&context, config).unwrap();
    let streams = [0, 1].map(|_| Stream::new(&context).unwrap());
    // Both are registered from here on.
    for stream in &streams {
        drop(allocator.allocate(1, stream).unwrap());
    }
    allocator.engine().lock().caches.contention = u32::MAX;
    test(&allocator, streams.each_ref());
    allocator.check().unwrap();
    allocator.close().unwrap();
}

/// Adjacent blocks, of which the second is in a large-block cache.
fn row(allocator: &Allocator, stream: &Stream) -> [Block; 3] {
    drop(allocator.allocate(64 * MIB, stream).unwrap());
    // Nothing is pending on either stream.
    allocator.synchronize().unwrap();
    let [left, middle, right] = [2, 3, 2].map(|mib| allocator.allocate(mib * MIB, stream).unwrap());
    let at = middle.ptr();
    drop(middle);
    let middle = allocator.allocate(3 * MIB, stream).unwrap();
    assert_eq!(middle.ptr(), at);
    [left, middle, right]
}

fn in_large_caches(allocator: &Allocator) -> u64 {
    allocator
        .engine()
        .lock()
        .caches
        .idle_in_large_caches()
        .blocks
}

#[test]
fn blocks_stay_beside_other_work_until_contention_is_over() {
    contended(|allocator, [a, b]| {
        let [left, middle, right] = row(allocator, a);
        let at = middle.ptr();
        let other = allocator.allocate(MIB, b).unwrap();
        drop((middle, right, other));
        assert_eq!(in_large_caches(allocator), 3);
        let middle = allocator.allocate(3 * MIB, a).unwrap();
        assert_eq!(middle.ptr(), at);
        drop(middle);
        allocator.engine().lock().caches.contention = 1;
        let whole = allocator.allocate(5 * MIB, b).unwrap();
        assert_eq!(in_large_caches(allocator), 0);
        drop((left, whole));
    });
}

#[test]
fn memory_in_large_caches_is_used_before_growth() {
    contended(|allocator, [a, b]| {
        let [left, middle, right] = row(allocator, a);
        // No free piece is long enough, and the live bytes are far below the peak.
        let rest = [2, 1, 2, 52].map(|mib| Some(allocator.allocate(mib * MIB, a).unwrap()));
        let [hole, wall, gap, rest] = rest;
        drop((hole, gap, middle));
        allocator.synchronize().unwrap();
        // A snapshot empties the large-block caches.
        allocator.snapshot();
        let middle = allocator.allocate(3 * MIB, a).unwrap();
        let reserved = allocator.stats().all.reserved.current;
        drop(middle);
        assert!(in_large_caches(allocator) > 0);
        let other = allocator.allocate(3 * MIB, b).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, reserved);
        assert_eq!(in_large_caches(allocator), 0);
        drop((left, right, wall, rest, other));
    });
}

#[test]
fn s1_19_blocks_in_a_large_cache_are_not_part_of_a_peak() {
    contended(|allocator, [a, b]| {
        let [left, middle, right] = row(allocator, a);
        let other = allocator.allocate(MIB, b).unwrap();
        drop(other);
        allocator.reset_peaks();
        let peak = allocator.stats().all.allocated.peak;
        drop(middle);
        assert_eq!(in_large_caches(allocator), 1);
        let other = allocator.allocate(3 * MIB, b).unwrap();
        assert_eq!(allocator.stats().all.allocated.peak, peak);
        assert_eq!(allocator.stats().large.allocated.peak, peak);
        let more = allocator.allocate(MIB, b).unwrap();
        assert_eq!(allocator.stats().all.allocated.peak, peak + MIB as u64);
        drop((left, right, other, more));
    });
}
