//! Random programs against an independent model: no two live or pending blocks overlap under any
//! legal completion order, and the heap is those of the model after each step.
//!
//! A program is plain data made from a seed. One that fails is shrunk and printed as the lines of a
//! test; the shadow at the function table ([`shadow`]) is the model's only source on the order of
//! streams.
//!
//! More of it, with other programs each time:
//!
//! ```text
//! CUALLOC_ORACLE_OPS=100000000 CUALLOC_ORACLE_SEED=7 cargo test --release --test oracle -- --nocapture
//! ```

#[path = "../common/mod.rs"]
mod common;
mod machine;
mod program;
mod random;
mod shadow;
mod shrink;

use std::time::Instant;

use common::{lost, rng};
use cualloc::Policy;
use cualloc::sim::Mode;
use program::{Bad, Op, Setup, Tuning, Want};
use random::{filling, general, repeating};
use shrink::{attempt, print, smallest};

const LENGTH: usize = 2000;
/// Operations in all, unless the environment asks for more.
const OPERATIONS: u64 = 2_400_000;
const CHECK_EVERY: usize = 50;
/// From so many steps on, what random programs are to contain is asked for. Most of them have no fault at
/// all, so that a few may well lack one.
const TELLING: u64 = 100_000;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Makes the program of a seed.
type Generator = fn(u64, Policy, usize) -> (Setup, Vec<Op>);

/// Programs share nothing, so a long run is spread over so many threads.
fn workers(total: u64) -> u64 {
    if total < 5_000_000 {
        return 1;
    }
    std::thread::available_parallelism().map_or(1, |n| n.get().min(6) as u64)
}

/// Runs random programs of one policy, a part of all operations.
fn judge(policy: Policy, generate: Generator, part: u64) -> machine::Summary {
    let total = setting("CUALLOC_ORACLE_OPS", OPERATIONS) / part;
    let seed = setting("CUALLOC_ORACLE_SEED", 1);
    let started = Instant::now();
    let programs = total.div_ceil(LENGTH as u64);
    let workers = workers(total);
    let mut sums = machine::Summary::default();
    std::thread::scope(|scope| {
        let run = move |worker: u64| {
            let share = (worker..programs).step_by(workers as usize);
            judge_some(policy, generate, share.map(|n| seed << 32 | n))
        };
        let threads: Vec<_> = (1..workers)
            .map(|worker| scope.spawn(move || run(worker)))
            .collect();
        sums.add(&run(0));
        for thread in threads {
            match thread.join() {
                Ok(more) => sums.add(&more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    let rate = sums.steps as f64 / started.elapsed().as_secs_f64();
    eprintln!("{policy:?}: {programs} programs, {rate:.0} steps per second, {sums:?}");
    // Programs in which nothing happens would prove nothing.
    assert!(sums.allocations * 20 > sums.steps, "{sums:?}");
    if sums.steps >= TELLING {
        assert!(sums.out_of_memory > 0 && sums.faults > 0, "{sums:?}");
    }
    sums
}

fn judge_some(
    policy: Policy,
    generate: Generator,
    programs: impl Iterator<Item = u64>,
) -> machine::Summary {
    let mut sums = machine::Summary::default();
    for program in programs {
        let (setup, ops) = generate(program, policy, LENGTH);
        match attempt(&setup, &ops, CHECK_EVERY) {
            Ok(summary) => sums.add(&summary),
            Err(found) => {
                eprintln!(
                    "program {program:#x} fails at step {}: {}",
                    found.step, found.what
                );
                let (small, failure) = smallest(&setup, &ops, found, CHECK_EVERY);
                panic!(
                    "program {program:#x} of {policy:?}:\n{}",
                    print(&setup, &small, &failure)
                );
            }
        }
    }
    sums
}

/// R34
#[test]
fn r34_packed_random_programs_agree_with_the_model() {
    judge(Policy::Packed, general, 2);
}

/// R34
#[test]
fn r34_classic_random_programs_agree_with_the_model() {
    judge(Policy::Classic, general, 2);
}

/// R34: under a limit that scattered memory has to meet. Blocks lie in views in half of all steps, and
/// so do they when views are evicted, memory is trimmed, and calls are made to fail.
#[test]
fn r34_scattered_programs_agree_with_the_model() {
    let sums = judge(Policy::Packed, filling, 20);
    if sums.steps < TELLING {
        return;
    }
    assert!(sums.in_views * 5 >= sums.allocations * 2, "{sums:?}");
    assert!(sums.beside_views * 2 >= sums.steps, "{sums:?}");
    let hit = [sums.trims_beside, sums.faults_beside, sums.evictions_beside];
    assert!(
        hit.into_iter().all(|count| count * 5000 > sums.steps),
        "{sums:?}"
    );
}

/// R34: programs that do the same again and again, as most users do, with an event now and then.
#[test]
fn r34_packed_programs_in_loops_agree_with_the_model() {
    judge(Policy::Packed, repeating, 20);
}

/// R34: as above.
#[test]
fn r34_classic_programs_in_loops_agree_with_the_model() {
    judge(Policy::Classic, repeating, 40);
}

/// Runs a program that failed once.
fn replay(setup: Setup, ops: &[Op]) {
    if let Err(failure) = attempt(&setup, ops, 1) {
        panic!("step {}: {}", failure.step, failure.what);
    }
}

fn plain(policy: Policy) -> Setup {
    Setup {
        policy,
        mode: Mode::Manual,
        executed: false,
        memory: 64 << 30,
        limit: None,
        stream_ids: true,
        legacy: false,
        per_thread: false,
        tuning: Tuning::default(),
    }
}

const fn alloc(stream: u8, bytes: usize) -> Op {
    Op::Alloc(Want::of(stream, bytes))
}

const fn raw(stream: u8, bytes: usize) -> Op {
    Op::Alloc(Want {
        raw: true,
        ..Want::of(stream, bytes)
    })
}

/// An aligned start beyond the first pieces of a run.
#[test]
fn an_aligned_block_may_begin_beyond_the_first_piece() {
    let ops = [
        raw(0, 20),
        Op::Free { block: 0 },
        Op::NewStream { raw: false },
        alloc(1, 512),
        raw(0, 512),
        Op::Free { block: 1 },
        Op::Alloc(Want {
            align: 17,
            raw: true,
            ..Want::of(0, 59)
        }),
    ];
    replay(plain(Policy::Classic), &ops);
}

/// No more idle memory has to go than the driver lacks.
#[test]
fn idle_memory_and_what_the_driver_has_left_add_up() {
    let setup = Setup {
        memory: 392_838_640,
        ..plain(Policy::Classic)
    };
    let ops = [
        alloc(0, 8 << 20),
        Op::Taken { bytes: 292_687_226 },
        alloc(0, 16 << 20),
        Op::Free { block: 1 },
        alloc(0, 64 << 20),
    ];
    replay(setup, &ops);
}

/// A page that waited for another stream is given back when that is done.
#[test]
fn a_page_that_becomes_whole_late_is_no_reason_to_fail() {
    let setup = Setup {
        memory: 524_228_577,
        per_thread: true,
        ..plain(Policy::Packed)
    };
    let ops = [
        Op::Taken { bytes: 521_563_563 },
        alloc(1, 512),
        alloc(0, 3),
        Op::Free { block: 0 },
        alloc(1, 23),
        Op::Free { block: 0 },
        Op::RecordStream {
            block: 0,
            stream: 0,
            inside: false,
        },
        Op::Free { block: 0 },
        alloc(1, 131_072),
    ];
    replay(setup, &ops);
}

/// The last marker of a stream covers what was freed inside its pages.
#[test]
fn small_blocks_of_a_retired_stream_stay_pending() {
    let ops = [
        Op::NewStream { raw: false },
        alloc(0, 60 << 10),
        Op::Use {
            block: 0,
            on: 0,
            write: true,
        },
        Op::Free { block: 0 },
        Op::Retire { stream: 0 },
        alloc(0, 60 << 10),
        Op::Use {
            block: 0,
            on: 0,
            write: true,
        },
    ];
    replay(plain(Policy::Packed), &ops);
}

/// What a stream was seen done with on the way to a failure is given back before it.
#[test]
fn pages_of_an_idle_stream_are_given_back_before_a_request_fails() {
    let setup = Setup {
        mode: Mode::Lag(3),
        limit: Some(51 << 20),
        ..plain(Policy::Packed)
    };
    let ops = [
        Op::NewStream { raw: false },
        alloc(5, 1 << 20),
        alloc(0, 182),
        Op::Free { block: 162 },
        Op::RecordStream {
            block: 11_659,
            stream: 207,
            inside: false,
        },
        Op::Free { block: 4 },
        raw(2, 27_070_035),
        alloc(5, 23_924_913),
    ];
    replay(setup, &ops);
}

/// A refused call beside a large block that nobody holds and that stays with its stream cache.
#[test]
fn refused_calls_beside_a_large_cache_change_nothing() {
    let bad = |kind| Op::FreeBad { block: 0, kind };
    let absurd = Op::Absurd {
        stream: 0,
        bytes: usize::MAX,
        alignment: 1,
    };
    let pair = [alloc(0, 2 << 20), Op::Free { block: 1 }];
    for refused in [
        absurd,
        bad(Bad::Foreign),
        bad(Bad::Interior),
        bad(Bad::Double),
    ] {
        let mut ops = vec![alloc(0, 512)];
        ops.extend(pair.repeat(3));
        ops.push(refused);
        replay(plain(Policy::Packed), &ops);
    }
}

/// A raw stream is destroyed while a block of it lies in a large-block cache, from where the next stream's call
/// takes it.
#[test]
fn a_block_in_a_large_cache_outlives_its_raw_stream() {
    let again = Op::Again {
        stream: 1,
        bytes: 2 << 20,
        times: 3,
    };
    let ops = [
        alloc(0, 512),
        Op::NewStream { raw: true },
        again,
        Op::Leave { stream: 1 },
        alloc(0, 131_072),
    ];
    replay(plain(Policy::Packed), &ops);
}
