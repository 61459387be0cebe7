use super::line;
use super::measure::{Scale, churn, crossing, median, pair, ranges, threads};
use super::source::{Handles, Malloc, Pointers, Stack, typed, workspaces};
use super::workload::Churn;
use crate::machine::Machine;
use cualloc::driver::Stream;
use cualloc::{Allocator, Config};

const SCALE: Scale = Scale {
    batches: 3,
    passes: 1,
    divisor: 100,
};

fn rig(test: impl FnOnce(&Allocator, &[Stream])) {
    let device = Machine::Simulated { memory: 8 << 30 }.context(0).unwrap();
    let allocator = Allocator::with_config(device.context(), Config::new()).unwrap();
    let streams: Vec<_> = (0..32)
        .map(|_| Stream::new(device.context()).unwrap())
        .collect();
    test(&allocator, &streams);
    allocator.close().unwrap();
}

#[test]
fn lines_read_as_those_of_other_harnesses() {
    let pair = line("pair", "cualloc", "4096 B", 25.04, "ns");
    assert_eq!(pair, "pair cualloc 4096 B: 25.0 ns");
    let threads = line("threads", "cualloc", "T=16", 25.04, "Mops/s");
    assert_eq!(threads, "threads cualloc T=16: 25.04 Mops/s");
}

#[test]
fn medians() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 3.0);
    assert!(median(Vec::new()).is_nan());
}

/// Every source performs the requested number of allocations, and all blocks are freed at the end.
#[test]
fn pairs_are_made_and_taken_back() {
    rig(|allocator, streams| {
        let batches = (SCALE.pairs() / 10 + SCALE.batches * SCALE.pairs()) as u64;
        let handles = Handles { allocator, streams };
        pair(&handles, 4096, &SCALE).unwrap();
        let count = || allocator.stats().all.allocations;
        assert_eq!(count().total_allocated, batches);
        let pointers = Pointers { allocator, streams };
        pair(&pointers, 4096, &SCALE).unwrap();
        assert_eq!(count().total_allocated, 2 * batches);
        let stack = Stack::new(allocator, streams);
        pair(&stack, 4096, &SCALE).unwrap();
        let typed = typed(allocator, streams);
        pair(&typed, 4096, &SCALE).unwrap();
        assert_eq!(count().total_allocated, 4 * batches);
        let workspaces = workspaces(allocator, streams);
        pair(&workspaces, 4096, &SCALE).unwrap();
        // All blocks come from one slab.
        assert_eq!(count().total_allocated, 4 * batches + 1);
        drop(workspaces);
        assert_eq!(count().current, 0);
    });
}

#[test]
fn churns_do_every_operation() {
    rig(|allocator, streams| {
        let work = Churn::log_uniform(64, 2000, 1, 512, 64 << 10);
        let handles = Handles { allocator, streams };
        churn(&handles, &work, &SCALE).unwrap();
        let count = allocator.stats().all.allocations;
        assert_eq!(count.current, 0);
        // The unmeasured and the measured pass fill and empty every slot equally often.
        assert_eq!(count.total_allocated, 2000);
        assert_eq!(count.total_freed, 2000);
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
        // Every 512 frees get a marker; recording and querying it are counted calls.
        let [free, pair, calls] = crossing(&handles, 2, &Scale::QUICK).unwrap();
        assert!(free > 0.0 && pair > free);
        assert!(calls > 0.0, "{calls}");
        assert_eq!(allocator.stats().streams, 4);
        assert_eq!(allocator.stats().all.allocations.current, 0);
    });
}

/// Numbers printed by a C++ program (GCC 12) for the same seeds.
#[test]
fn sequences_are_those_of_a_cpp_program() {
    let small = Churn::log_uniform(4096, 400_000, 1, 512, 65536);
    let wide = Churn::log_uniform(2048, 200_000, 2, 512, 32 << 20);
    let thread = Churn::of_thread(3, 200_000);
    let large = [11_520_215, 6_374_047, 3_051_585, 14_656_868];
    for (churn, sizes, picks) in [
        (small, [980, 992, 4571, 566], [2110, 1755, 2520, 2800]),
        (wide, large, [1350, 1640, 873, 1624]),
        (thread, [4096, 65536, 4096, 16384], [21, 6, 63, 51]),
    ] {
        assert_eq!(churn.sizes[..4], sizes);
        assert_eq!(churn.picks[..4], picks);
    }
}

#[test]
fn ranges_are_committed_and_returned() {
    let scale = Scale {
        divisor: 10,
        ..SCALE
    };
    rig(|allocator, streams| {
        let rounds = ranges(allocator, streams, &scale).unwrap();
        assert!(rounds.iter().all(|(_, times)| times.len() == 20));
        assert_eq!(allocator.stats().ranges, 0);
    });
}
