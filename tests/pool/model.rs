//! The simulator as a model of stream order: what tests of pools lean on.

use cualloc::Policy;
use cualloc::driver::sys::CUresult;
use cualloc::driver::{MemoryPool, PoolProperties, Stream, sys};
use cualloc::sim::{Mode, Report, SimConfig};

use crate::common::{MIB, Rig};
use crate::fill;

fn model() -> Option<(Rig, [Stream; 2])> {
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs the simulator");
        return None;
    }
    let rig = Rig::new(Policy::Packed, SimConfig::with_devices(1, 1 << 30));
    let streams = rig.streams();
    Some((rig, streams))
}

fn pool(rig: &Rig, max_bytes: usize) -> MemoryPool {
    let properties = PoolProperties {
        device: rig.context.device().raw(),
        export: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        max_bytes,
    };
    MemoryPool::new(&rig.context, &properties).unwrap()
}

fn take(rig: &Rig, pool: &MemoryPool, bytes: usize, stream: &Stream) -> Result<u64, CUresult> {
    let entered = rig.context.enter().unwrap();
    // SAFETY: the stream is alive.
    unsafe { entered.mem_alloc_from_pool(bytes, pool, stream.raw()) }.map_err(|e| e.code())
}

fn give(rig: &Rig, ptr: u64, stream: &Stream) -> Result<(), CUresult> {
    let entered = rig.context.enter().unwrap();
    // SAFETY: a simulated driver; wrong ones are what some tests are about.
    unsafe { entered.mem_free_async(ptr, stream.raw()) }.map_err(|e| e.code())
}

/// S3.16
#[test]
fn s3_16_streams_have_a_submitted_and_a_reached_counter() {
    let Some((rig, [a, b])) = model() else { return };
    let sim = rig.sim().unwrap();
    sim.set_mode(Mode::Manual);
    let id = a.id().unwrap();
    let before = sim.progress(id).unwrap();
    for _ in 0..3 {
        sim.busy(a.raw(), 10).unwrap();
    }
    let now = sim.progress(id).unwrap();
    assert_eq!(now.submitted, before.submitted + 3);
    assert_eq!(now.reached, before.reached);
    assert_eq!(sim.complete_stream(id, 2), 2);
    assert_eq!(sim.progress(id).unwrap().reached, before.reached + 2);
    a.synchronize().unwrap();
    let now = sim.progress(id).unwrap();
    assert_eq!(now.reached, now.submitted);
    let other = sim.progress(b.id().unwrap()).unwrap();
    assert_eq!(other.submitted, other.reached);
    assert_eq!(sim.progress(u64::MAX), None);
}

/// S3.17
#[test]
fn s3_17_memory_is_ready_in_the_order_of_its_stream() {
    for ordered in [true, false] {
        let Some((rig, [a, b])) = model() else { return };
        let sim = rig.sim().unwrap();
        sim.set_mode(Mode::Manual);
        let pool = pool(&rig, 0);
        sim.busy(a.raw(), 10).unwrap();
        let before = sim.progress(a.id().unwrap()).unwrap();
        let ptr = take(&rig, &pool, MIB, &a).unwrap();
        let ready = sim.progress(a.id().unwrap()).unwrap();
        assert!(ready.submitted > before.submitted, "at once, with a number");
        assert!(ready.reached < ready.submitted);
        fill(&rig.context, ptr, MIB, &a);
        let event = rig.context.enter().unwrap().create_event().unwrap();
        event.record(&a).unwrap();
        if ordered {
            b.wait(&event).unwrap();
        }
        fill(&rig.context, ptr, MIB, &b);
        sim.complete_all();
        let races = sim.take_reports();
        assert_eq!(races.is_empty(), ordered, "{races:?}");
        assert!(races.iter().all(|r| matches!(r, Report::Race { .. })));
        a.wait(&event).unwrap();
    }
}

/// S3.17: an event from before the allocation does not make it usable.
#[test]
fn s3_17_an_older_event_does_not_suffice() {
    let Some((rig, [a, b])) = model() else { return };
    let sim = rig.sim().unwrap();
    sim.set_mode(Mode::Manual);
    let pool = pool(&rig, 0);
    let event = rig.context.enter().unwrap().create_event().unwrap();
    event.record(&a).unwrap();
    let ptr = take(&rig, &pool, MIB, &a).unwrap();
    b.wait(&event).unwrap();
    fill(&rig.context, ptr, MIB, &b);
    sim.complete_all();
    assert!(!sim.take_reports().is_empty());
}

/// S3.18
#[test]
fn s3_18_freed_memory_waits_for_its_stream() {
    let Some((rig, [a, b])) = model() else { return };
    let sim = rig.sim().unwrap();
    sim.set_mode(Mode::Manual);
    let pool = pool(&rig, 0);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    pool.set(attribute, 0).unwrap();
    let ptr = take(&rig, &pool, 32 * MIB, &a).unwrap();
    sim.busy(a.raw(), 10).unwrap();
    give(&rig, ptr, &a).unwrap();
    let other = take(&rig, &pool, 32 * MIB, &b).unwrap();
    assert_ne!(other, ptr, "pending");
    assert_eq!(
        take(&rig, &pool, MIB, &a).unwrap(),
        ptr,
        "its own stream may"
    );
    give(&rig, ptr, &a).unwrap();
    sim.complete_all();
    assert_eq!(take(&rig, &pool, MIB, &b).unwrap(), ptr, "reached");
    assert!(sim.take_reports().is_empty());
}

/// S3.19
#[test]
fn s3_19_figures_and_addresses() {
    let Some((rig, [a, _])) = model() else { return };
    let sim = rig.sim().unwrap();
    let pool = pool(&rig, 0);
    let get = |attribute| pool.get(attribute).unwrap();
    use sys::CUmemPool_attribute as A;
    let mut seen = Vec::new();
    for round in 0..3 {
        sim.set_mode(Mode::Manual);
        let live = take(&rig, &pool, 32 * MIB, &a).unwrap();
        let pending = take(&rig, &pool, 32 * MIB, &a).unwrap();
        for ptr in [live, pending] {
            assert!(!seen.contains(&ptr), "round {round}: {ptr:#x} was released");
            seen.push(ptr);
        }
        sim.busy(a.raw(), 10).unwrap();
        give(&rig, pending, &a).unwrap();
        pool.trim_to(0).unwrap();
        let held = get(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        assert_eq!(held, 64 << 20, "live and pending bytes stay");
        assert_eq!(get(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 32 << 20);
        assert_eq!(sim.leaks().pool_allocations, 1);
        sim.set_mode(Mode::Instant);
        give(&rig, live, &a).unwrap();
        // The threshold is 0.
        a.synchronize().unwrap();
        assert_eq!(get(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
        assert_eq!(get(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
        assert_eq!(get(A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 64 << 20);
        assert_eq!(get(A::CU_MEMPOOL_ATTR_USED_MEM_HIGH), 64 << 20);
    }
    assert!(sim.take_reports().is_empty());
}

/// S3.20
#[test]
fn s3_20_limits_and_misuse_are_errors() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let Some((rig, [a, b])) = model() else { return };
        let sim = rig.sim().unwrap();
        let pool = pool(&rig, 64 * MIB);
        let first = take(&rig, &pool, 1, &a).unwrap();
        let second = take(&rig, &pool, 1, &a).unwrap();
        assert_eq!(second - first, 512, "granularity");
        let full = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        assert_eq!(take(&rig, &pool, 65 * MIB, &a), Err(full));
        let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(take(&rig, &pool, 0, &a).map(drop), invalid);
        give(&rig, first, &a).unwrap();
        assert_eq!(give(&rig, first, &a), invalid, "twice");
        assert_eq!(give(&rig, second + 512, &a), invalid, "foreign");
        sim.take_reports();
        runs.push((first, second, take(&rig, &pool, MIB, &b).unwrap()));
    }
    assert_eq!(runs[0], runs[1], "deterministic");
}
