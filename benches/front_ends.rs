//! What the front ends add to an allocation and its free, on the simulator: all pairs are of the same
//! size, so the bare allocator's is the part that they share.

mod common;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use cualloc::Tag;
use cualloc::pool::{TypedPool, WorkspacePool};
use cualloc::resource::{AccessOrdered, Budget, Logging, MemoryResource};
use cualloc::{DeviceBuffer, Request};

use common::{KIB, Rig, quick};

const BYTES: usize = 64 * KIB;
const TAG: Tag = Tag::new("benchmark");

fn resource_pair(rig: &Rig, resource: &impl MemoryResource) {
    let block = resource
        .allocate_block(&Request::new(black_box(BYTES)).tag(TAG), &rig.stream)
        .unwrap();
    resource.deallocate_block(block).unwrap();
}

fn front_ends(criterion: &mut Criterion) {
    // One rig each, so that none meets the memory of another.
    let mut group = criterion.benchmark_group("front end pair");
    group.bench_function("allocator", |bencher| {
        let rig = Rig::new();
        bencher.iter(|| {
            drop(
                rig.allocator
                    .allocate(black_box(BYTES), &rig.stream)
                    .unwrap(),
            )
        });
    });
    group.bench_function("caching resource", |bencher| {
        let rig = Rig::new();
        bencher.iter(|| resource_pair(&rig, &rig.allocator));
    });
    group.bench_function("pooled, budget, logging", |bencher| {
        let rig = Rig::new();
        let stack = Logging::new(Budget::new(rig.allocator.clone(), Some(1 << 30)), ());
        bencher.iter(|| resource_pair(&rig, &stack));
    });
    group.bench_function("stack of stacks", |bencher| {
        let rig = Rig::new();
        let inner = Logging::new(Budget::new(rig.allocator.clone(), Some(1 << 30)), ());
        let inner: Arc<dyn MemoryResource> = Arc::new(inner);
        let stack = Logging::new(Budget::new(inner, Some(1 << 29)), ());
        bencher.iter(|| resource_pair(&rig, &stack));
    });
    group.bench_function("asynchronous resource", |bencher| {
        let rig = Rig::new();
        let resource = AccessOrdered::new(rig.allocator.clone());
        bencher.iter(|| resource_pair(&rig, &resource));
    });
    group.bench_function("workspace lease", |bencher| {
        let rig = Rig::new();
        let pool = WorkspacePool::new(&rig.allocator);
        bencher.iter(|| drop(pool.lease(&rig.stream, black_box(BYTES)).unwrap()));
    });
    group.bench_function("typed pool", |bencher| {
        let rig = Rig::new();
        let pool = TypedPool::new(&rig.allocator);
        bencher.iter(|| {
            drop(DeviceBuffer::<f32>::uninit(&pool, black_box(BYTES / 4), &rig.stream).unwrap())
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = quick();
    targets = front_ends
}
criterion_main!(benches);
