//! Stream-ordered pools: reuse, thresholds, limits, attributes.

use crate::support::*;
use cualloc::driver::sys::*;
use std::ptr::null_mut;

const UNIT: u64 = 32 << 20;

fn pool(bench: &Bench, max: usize) -> CUmemoryPool {
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location(0),
        maxSize: max,
        ..Default::default()
    };
    let mut pool = null_mut();
    ok!(bench, cuMemPoolCreate(&mut pool, &props));
    pool
}

fn get(bench: &Bench, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> u64 {
    let mut value = 0u64;
    let place = std::ptr::addr_of_mut!(value).cast();
    ok!(bench, cuMemPoolGetAttribute(pool, attribute, place));
    value
}

fn take(bench: &Bench, bytes: usize, pool: CUmemoryPool, stream: CUstream) -> u64 {
    let mut address = 0;
    let code = call!(
        bench,
        cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream)
    );
    assert_eq!(code, OK);
    address
}

#[test]
fn a_synchronised_pool_keeps_only_its_threshold() {
    let bench = bench();
    let stream = bench.stream();
    let pool = pool(&bench, 0);
    let reserved = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    let memory = take(&bench, 1000, pool, stream);
    assert_eq!(get(&bench, pool, reserved), UNIT);
    ok!(bench, cuMemFreeAsync(memory, stream));
    assert_eq!(get(&bench, pool, reserved), UNIT);
    ok!(bench, cuStreamSynchronize(stream));
    assert_eq!(get(&bench, pool, reserved), 0);
    let mut keep = u64::MAX;
    let place = std::ptr::addr_of_mut!(keep).cast();
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    ok!(bench, cuMemPoolSetAttribute(pool, attribute, place));
    let memory = take(&bench, 1000, pool, stream);
    ok!(bench, cuMemFreeAsync(memory, stream));
    ok!(bench, cuStreamSynchronize(stream));
    assert_eq!(get(&bench, pool, reserved), UNIT);
    ok!(bench, cuMemPoolTrimTo(pool, 0));
    assert_eq!(bench.sim.memory_in_use(0), 0);
    assert_eq!(
        get(
            &bench,
            pool,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH
        ),
        1024
    );
}

#[test]
fn blocks_are_reused_in_order_and_never_race() {
    let bench = bench();
    bench.manual();
    let (a, b) = (bench.stream(), bench.stream());
    let pool = pool(&bench, UNIT as usize);
    let first = take(&bench, 20 << 20, pool, a);
    bench.memset(first, 1, 1000, a);
    ok!(bench, cuMemFreeAsync(first, a));
    let again = take(&bench, 20 << 20, pool, b);
    assert_eq!(again, first, "the limit leaves no other");
    bench.memset(again, 2, 1000, b);
    assert_eq!(
        bench.sim.complete_stream(bench.stream_id(b), 9),
        0,
        "it waits for the free"
    );
    bench.sim.complete_all();
    bench.silent();
    let mut address = 0;
    let code = call!(
        bench,
        cuMemAllocFromPoolAsync(&mut address, 20 << 20, pool, a)
    );
    assert_eq!(code, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
}

#[test]
fn a_destroyed_pool_is_invalid_and_the_default_pool_stays() {
    let bench = bench();
    let own = pool(&bench, 0);
    ok!(bench, cuDeviceSetMemPool(0, own));
    ok!(bench, cuMemPoolDestroy(own));
    let (mut current, mut default) = (null_mut(), null_mut());
    ok!(bench, cuDeviceGetMemPool(&mut current, 0));
    ok!(bench, cuDeviceGetDefaultMemPool(&mut default, 0));
    assert_eq!(current, default);
    assert_eq!(
        call!(bench, cuMemPoolDestroy(default)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    bench.silent();
    assert_eq!(
        call!(bench, cuMemPoolDestroy(own)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(bench.sim.take_reports().len(), 1);
}
