//! The allocator itself, on the simulator: host time of allocations and frees.

mod common;

use std::alloc::{Layout, alloc, dealloc};
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

use common::{KIB, Rig, quick};

const SIZES: [(&str, usize); 6] = [
    ("512 B", 512),
    ("4 KiB", 4 * KIB),
    ("64 KiB", 64 * KIB),
    ("1 MiB", 1024 * KIB),
    ("4 MiB", 4096 * KIB),
    ("64 MiB", 65536 * KIB),
];

/// An allocation and its free, which find the memory of the pair before.
fn pairs(criterion: &mut Criterion) {
    let rig = Rig::new();
    let mut group = criterion.benchmark_group("pair");
    for (name, bytes) in SIZES {
        group.bench_function(BenchmarkId::new("block", name), |bencher| {
            bencher.iter(|| {
                drop(
                    rig.allocator
                        .allocate(black_box(bytes), &rig.stream)
                        .unwrap(),
                )
            });
        });
        group.bench_function(BenchmarkId::new("raw", name), |bencher| {
            let stream = rig.stream.raw();
            bencher.iter(|| {
                // SAFETY: the rig's stream lives, and nothing uses the memory.
                unsafe {
                    let ptr = rig.allocator.allocate_raw(black_box(bytes), stream);
                    rig.allocator.free_raw(ptr.unwrap()).unwrap();
                }
            });
        });
    }
    // The yardstick, in the same run on the same machine.
    group.bench_function(BenchmarkId::new("malloc", "4 KiB"), |bencher| {
        let layout = Layout::from_size_align(4 * KIB, 16).unwrap();
        bencher.iter(|| {
            // SAFETY: the layout's size is not 0, and the memory goes back with the same layout.
            unsafe { dealloc(black_box(alloc(black_box(layout))), layout) }
        });
    });
    group.finish();
}

/// The same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// 512 bytes times a power of two below `2^doublings`, and up to twice that.
    fn bytes(&mut self, doublings: usize) -> usize {
        let base = 512 << self.below(doublings);
        base + self.below(base + 1)
    }
}

/// Random slots that are filled where empty, and emptied where full; the time of one such operation.
fn churn(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("churn operation");
    for (name, slots, doublings) in [
        ("4096 slots, 512 B to 64 KiB", 4096, 7),
        ("2048 slots, 512 B to 32 MiB", 2048, 16),
    ] {
        group.bench_function(name, |bencher| {
            let rig = Rig::new();
            let mut numbers = Numbers(7);
            let mut table: Vec<_> = (0..slots).map(|_| None).collect();
            let mut operation = || {
                let slot = &mut table[numbers.below(slots)];
                if slot.take().is_none() {
                    let bytes = numbers.bytes(doublings);
                    *slot = Some(rig.allocator.allocate(bytes, &rig.stream).unwrap());
                }
            };
            // Until memory need not grow any more.
            for _ in 0..50 * slots {
                operation();
            }
            bencher.iter(operation);
        });
    }
    group.finish();
}

/// A pair beside many free blocks, none of which has free neighbours.
fn free_blocks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pair beside free blocks");
    for count in [10, 1000, 100_000] {
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            let rig = Rig::new();
            let mut numbers = Numbers(7);
            let mut kept: Vec<_> = (0..2 * count)
                .map(|_| {
                    let bytes = numbers.bytes(7);
                    Some(rig.allocator.allocate(bytes, &rig.stream).unwrap())
                })
                .collect();
            for block in kept.iter_mut().step_by(2) {
                *block = None;
            }
            bencher.iter(|| {
                let bytes = black_box(20 * KIB);
                drop(rig.allocator.allocate(bytes, &rig.stream).unwrap());
            });
        });
    }
    group.finish();
}

/// A pair whose block another stream used: the free marks that stream.
fn cross_stream(criterion: &mut Criterion) {
    let rig = Rig::new();
    let other = rig.allocator.create_stream().unwrap();
    criterion.bench_function("pair used on another stream/64 KiB", |bencher| {
        bencher.iter(|| {
            let block = rig.allocator.allocate(64 * KIB, &rig.stream).unwrap();
            block.record_stream(&other).unwrap();
            block.free().unwrap();
        });
    });
}

criterion_group! {
    name = benches;
    config = quick();
    targets = pairs, churn, free_blocks, cross_stream
}
criterion_main!(benches);
