use super::Line;
use super::measure::{Scale, churn, crossing, median, pair, threads};
use super::source::{Handles, Malloc, Pointers, Stack, typed, workspaces};
use super::workload::{Churn, Source};
use crate::machine::Machine;
use cualloc::driver::Stream;
use cualloc::{Allocator, Config};

const SCALE: Scale = Scale {
    batches: 3,
    pairs: 300,
    passes: 1,
    small_churn: 2000,
    wide_churn: 2000,
    thread_churn: 500,
    free_blocks: 10,
};

fn rig(test: impl FnOnce(&Allocator, &[Stream])) {
    let ground = Machine::Simulated { memory: 8 << 30 }.context(0).unwrap();
    let allocator = Allocator::with_config(ground.context(), Config::new()).unwrap();
    let streams: Vec<_> = (0..32)
        .map(|_| Stream::new(ground.context()).unwrap())
        .collect();
    test(&allocator, &streams);
    allocator.close().unwrap();
}

#[test]
fn lines_read_as_those_of_other_harnesses() {
    for (work, case, value, unit, text) in [
        (
            "pair",
            "4096 B",
            25.04,
            "ns",
            "pair cualloc 4096 B: 25.0 ns",
        ),
        (
            "threads",
            "T=16",
            25.04,
            "Mops/s",
            "threads cualloc T=16: 25.04 Mops/s",
        ),
    ] {
        let line = Line {
            schema: 1,
            work,
            name: "cualloc",
            case: case.to_owned(),
            value: Some(value),
            unit,
            device: "sim",
            policy: "packed",
            error: None,
        };
        assert_eq!(line.to_string(), text);
    }
}

#[test]
fn medians() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 3.0);
    assert!(median(Vec::new()).is_nan());
}

/// Every source does as many allocations as it is asked for, and has them all back at the end.
#[test]
fn pairs_are_made_and_taken_back() {
    rig(|allocator, streams| {
        let batches = (SCALE.pairs / 10 + SCALE.batches * SCALE.pairs) as u64;
        let handles = Handles { allocator, streams };
        pair(&handles, 4096, &handles.stream(0), &SCALE).unwrap();
        let count = || allocator.stats().all.allocations;
        assert_eq!(count().total_allocated, batches);
        let pointers = Pointers { allocator, streams };
        pair(&pointers, 4096, &pointers.stream(0), &SCALE).unwrap();
        assert_eq!(count().total_allocated, 2 * batches);
        let stack = Stack::new(allocator, streams);
        pair(&stack, 4096, &stack.stream(0), &SCALE).unwrap();
        let typed = typed(allocator, streams);
        pair(&typed, 4096, &typed.stream(0), &SCALE).unwrap();
        assert_eq!(count().total_allocated, 4 * batches);
        let workspaces = workspaces(allocator, streams);
        pair(&workspaces, 4096, &workspaces.stream(0), &SCALE).unwrap();
        // All from one slab.
        assert_eq!(count().total_allocated, 4 * batches + 1);
        drop(workspaces);
        assert_eq!(count().current, 0);
    });
}

#[test]
fn churns_do_every_operation() {
    rig(|allocator, streams| {
        let work = Churn::log_uniform(64, SCALE.small_churn, 1, 512, 64 << 10);
        let handles = Handles { allocator, streams };
        churn(&handles, &handles.stream(0), &work, &SCALE).unwrap();
        let count = allocator.stats().all.allocations;
        assert_eq!(count.current, 0);
        // An unmeasured and a measured pass fill and empty every slot equally often.
        assert_eq!(count.total_allocated, SCALE.small_churn as u64);
        assert_eq!(count.total_freed, SCALE.small_churn as u64);
    });
}

#[test]
fn threads_have_streams_of_their_own_or_one() {
    rig(|allocator, streams| {
        let handles = Handles { allocator, streams };
        let own = threads(&handles, 3, |thread| thread, Churn::of_thread, &SCALE).unwrap();
        assert!(own > 0.0);
        assert_eq!(allocator.stats().streams, 3);
        threads(&handles, 3, |_| 0, Churn::of_thread, &SCALE).unwrap();
        assert_eq!(allocator.stats().streams, 3);
        assert_eq!(allocator.stats().all.allocations.current, 0);
        assert!(threads(&Malloc, 3, |_| 0, Churn::of_thread, &SCALE).unwrap() > 0.0);
    });
}

#[test]
fn blocks_of_other_streams_cost_markers() {
    rig(|allocator, streams| {
        let handles = Handles { allocator, streams };
        // Batches of 512 frees get a marker.
        let scale = Scale {
            pairs: 2_000,
            ..SCALE
        };
        let figures = crossing(&handles, 2, &scale).unwrap();
        assert!(figures.free > 0.0 && figures.pair > figures.free);
        // Records of markers and their queries are counted calls.
        assert!(figures.calls > 0.0, "{figures:?}");
        assert_eq!(allocator.stats().streams, 4);
        assert_eq!(allocator.stats().all.allocations.current, 0);
    });
}

/// Numbers that a C++ program (GCC 12) printed for the same seeds.
#[test]
fn sequences_are_those_of_a_cpp_program() {
    let churn = Churn::log_uniform(4096, 400_000, 1, 512, 65536);
    assert_eq!(churn.sizes[..4], SMALL.0);
    assert_eq!(churn.picks[..4], SMALL.1);
    let churn = Churn::log_uniform(2048, 200_000, 2, 512, 32 << 20);
    assert_eq!(churn.sizes[..4], WIDE.0);
    assert_eq!(churn.picks[..4], WIDE.1);
    let churn = Churn::of_thread(3, 200_000);
    assert_eq!(churn.sizes[..4], THREAD.0);
    assert_eq!(churn.picks[..4], THREAD.1);
}

const SMALL: ([usize; 4], [u32; 4]) = ([980, 992, 4571, 566], [2110, 1755, 2520, 2800]);
const WIDE: ([usize; 4], [u32; 4]) = (
    [11_520_215, 6_374_047, 3_051_585, 14_656_868],
    [1350, 1640, 873, 1624],
);
const THREAD: ([usize; 4], [u32; 4]) = ([4096, 65536, 4096, 16384], [21, 6, 63, 51]);
