//! The allocator itself, on the simulator: host time of allocations and frees, beside the host's own
//! allocator. The work is that of `cualloc bench`.

mod common;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};

use common::source::{Handles, Malloc, Pointers};
use common::workload::{Churn, Source, log_uniform_sizes, pairs};
use common::{KIB, Rig, quick};

const SIZES: [(&str, usize); 6] = [
    ("512 B", 512),
    ("4 KiB", 4 * KIB),
    ("64 KiB", 64 * KIB),
    ("1 MiB", 1024 * KIB),
    ("4 MiB", 4096 * KIB),
    ("64 MiB", 65536 * KIB),
];

impl Rig {
    fn handles(&self) -> Handles<'_> {
        Handles {
            allocator: &self.allocator,
            streams: std::slice::from_ref(&self.stream),
        }
    }

    fn pointers(&self) -> Pointers<'_> {
        Pointers {
            allocator: &self.allocator,
            streams: std::slice::from_ref(&self.stream),
        }
    }
}

fn pair<S: Source>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    source: &S,
    (size, bytes): (&str, usize),
) {
    let stream = source.stream(0);
    group.bench_function(BenchmarkId::new(name, size), |bencher| {
        bencher.iter(|| pairs(source, bytes, &stream, 1).unwrap());
    });
}

/// An allocation and its free, which find the memory of the pair before.
fn pairs_by_size(criterion: &mut Criterion) {
    let rig = Rig::new();
    let mut group = criterion.benchmark_group("pair");
    for size in SIZES {
        pair(&mut group, "block", &rig.handles(), size);
        pair(&mut group, "raw", &rig.pointers(), size);
        pair(&mut group, "malloc", &Malloc, size);
    }
    group.finish();
}

/// The time of one operation.
fn churn<S: Source>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    source: &S,
    work: &Churn,
) {
    let stream = source.stream(0);
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            let mut slots = work.slots::<S>();
            let all = work.operations();
            // Until memory need not grow any more.
            work.run(source, &stream, &mut slots, all).unwrap();
            let start = std::time::Instant::now();
            let mut left = count as usize;
            while left > 0 {
                let part = left.min(all);
                work.run(source, &stream, &mut slots, part).unwrap();
                left -= part;
            }
            let time = start.elapsed();
            for block in slots.into_iter().flatten() {
                source.free(block).unwrap();
            }
            time
        });
    });
}

/// Random slots that are filled where empty, and emptied where full.
fn churns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("churn operation");
    for (name, slots, seed, high) in [
        ("4096 slots, 512 B to 64 KiB", 4096, 1, 64 * KIB),
        ("2048 slots, 512 B to 32 MiB", 2048, 2, 32768 * KIB),
    ] {
        let work = Churn::log_uniform(slots, 50_000, seed, 512, high);
        let rig = Rig::new();
        churn(&mut group, name, &rig.handles(), &work);
        churn(&mut group, &format!("{name}, malloc"), &Malloc, &work);
    }
    group.finish();
}

/// A pair beside many free blocks, none of which has free neighbours.
fn free_blocks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pair beside free blocks");
    for count in [10, 1000, 100_000] {
        let rig = Rig::new();
        let handles = rig.handles();
        let sizes = log_uniform_sizes(2 * count, 3, 512, 64 * KIB);
        let mut kept: Vec<_> = sizes
            .into_iter()
            .map(|bytes| Some(rig.allocator.allocate(bytes, &rig.stream).unwrap()))
            .collect();
        kept.iter_mut().step_by(2).for_each(|block| *block = None);
        pair(
            &mut group,
            "block",
            &handles,
            (&count.to_string(), 20 * KIB),
        );
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
    targets = pairs_by_size, churns, free_blocks, cross_stream
}
criterion_main!(benches);
