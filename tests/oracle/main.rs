//! Random programs against an independent model: no two live or pending blocks overlap under any
//! legal completion order, and the heap is those of the model after each step.
//!
//! A program is plain data made from a seed; one that fails is shrunk and printed. The judge's tracker at the function
//! table is the model's only source on the order of streams.
//!
//! More of it, with other programs each time:
//!
//! ```text
//! CUALLOC_ORACLE_OPS=100000000 CUALLOC_ORACLE_SEED=7 cargo test --release --test oracle -- --nocapture
//! ```

#[path = "../common/mod.rs"]
mod common;
// Other programs use more of it.
#[allow(dead_code)]
#[path = "../judge/checker/mod.rs"]
mod checker;
mod machine;
mod program;

use std::time::Instant;

use common::rng;
use common::shrink::shrink;
use cualloc::Policy;
use cualloc::sim::Mode;
use machine::{Done, Machine, attempt};
use program::{Bad, Setup, Step, Want, filling, general, repeating};

const LENGTH: usize = 2000;
/// Operations in all, unless the environment asks for more.
const OPERATIONS: u64 = 2_400_000;
const CHECK_EVERY: usize = 50;
/// The number of steps from which on random programs are required to contain certain events. Most of them have no fault
/// at all, so that a few may well lack one.
const TELLING: u64 = 100_000;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Makes the program of a seed.
type Generator = fn(u64, Policy, usize) -> (Setup, Vec<Step>);

/// Programs share nothing, so a long run is spread over this many threads.
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
        let (setup, steps) = generate(program, policy, LENGTH);
        let step = |machine: &mut Machine<'_>, step: &Step| machine.step(step);
        let run = |steps: &[Step]| attempt(&setup, steps, step, CHECK_EVERY);
        let first = match run(&steps) {
            Ok(summary) => {
                sums.add(&summary);
                continue;
            }
            Err(failure) => failure,
        };
        let what = format!("program {program:#x} of {policy:?}");
        eprintln!("{what} fails at step {}: {}", first.step, first.what);
        let again = |steps: &[Step]| run(steps).map(drop);
        let (small, failure) = shrink(&steps, first, again, |_| Vec::new());
        panic!("{what}: {}\n{setup:?}\n{small:#?}", failure.what);
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

/// A call of a program that failed once.
type Call = fn(&mut Machine<'_>) -> Done;

/// Runs a program that failed once.
fn replay(setup: Setup, calls: &[Call]) {
    let made = attempt(&setup, calls, |machine, call| call(machine), 1);
    if let Err(failure) = made {
        panic!("step {}: {}", failure.step, failure.what);
    }
}

const fn raw(stream: u32, bytes: usize) -> Want {
    Want {
        raw: true,
        ..Want::of(stream, bytes)
    }
}

/// An aligned start beyond the first pieces of a run.
#[test]
fn an_aligned_block_may_begin_beyond_the_first_piece() {
    let calls: [Call; 7] = [
        |m| m.allocate(raw(0, 20)),
        |m| m.free(0, false),
        |m| m.new_stream(false),
        |m| m.allocate(Want::of(1, 512)),
        |m| m.allocate(raw(0, 512)),
        |m| m.free(1, false),
        |m| {
            m.allocate(Want {
                align: 17,
                ..raw(0, 59)
            })
        },
    ];
    replay(Setup::plain(Policy::Classic), &calls);
}

/// No more idle memory has to go than the driver lacks.
#[test]
fn idle_memory_and_what_the_driver_has_left_add_up() {
    let setup = Setup {
        memory: 392_838_640,
        ..Setup::plain(Policy::Classic)
    };
    let calls: [Call; 5] = [
        |m| m.allocate(Want::of(0, 8 << 20)),
        |m| m.take_memory(292_687_226),
        |m| m.allocate(Want::of(0, 16 << 20)),
        |m| m.free(1, false),
        |m| m.allocate(Want::of(0, 64 << 20)),
    ];
    replay(setup, &calls);
}

/// A page that waited for another stream is given back when that is done.
#[test]
fn a_page_that_becomes_whole_late_does_not_fail_a_request() {
    let setup = Setup {
        memory: 524_228_577,
        per_thread: true,
        ..Setup::plain(Policy::Packed)
    };
    let calls: [Call; 9] = [
        |m| m.take_memory(521_563_563),
        |m| m.allocate(Want::of(1, 512)),
        |m| m.allocate(Want::of(0, 3)),
        |m| m.free(0, false),
        |m| m.allocate(Want::of(1, 23)),
        |m| m.free(0, false),
        |m| m.record_stream(0, 0, false),
        |m| m.free(0, false),
        |m| m.allocate(Want::of(1, 131_072)),
    ];
    replay(setup, &calls);
}

/// The last marker of a stream covers what was freed inside its pages.
#[test]
fn small_blocks_of_a_retired_stream_stay_pending() {
    let calls: [Call; 7] = [
        |m| m.new_stream(false),
        |m| m.allocate(Want::of(0, 60 << 10)),
        |m| m.use_block(0, 0, true),
        |m| m.free(0, false),
        |m| m.leave(0, true),
        |m| m.allocate(Want::of(0, 60 << 10)),
        |m| m.use_block(0, 0, true),
    ];
    replay(Setup::plain(Policy::Packed), &calls);
}

/// What a stream was seen done with on the way to a failure is given back before it.
#[test]
fn pages_of_an_idle_stream_are_given_back_before_a_request_fails() {
    let setup = Setup {
        mode: Mode::Lag(3),
        limit: Some(51 << 20),
        ..Setup::plain(Policy::Packed)
    };
    let calls: [Call; 8] = [
        |m| m.new_stream(false),
        |m| m.allocate(Want::of(1, 1 << 20)),
        |m| m.allocate(Want::of(0, 182)),
        |m| m.free(0, false),
        |m| m.record_stream(0, 1, false),
        |m| m.free(0, false),
        |m| m.allocate(raw(0, 27_070_035)),
        |m| m.allocate(Want::of(1, 23_924_913)),
    ];
    replay(setup, &calls);
}

/// A refused call beside a free large block that stays in its stream cache.
#[test]
fn refused_calls_beside_a_large_cache_change_nothing() {
    let pair: [Call; 2] = [|m| m.allocate(Want::of(0, 2 << 20)), |m| m.free(1, false)];
    let refused: [Call; 4] = [
        |m| m.absurd(0, usize::MAX, 1),
        |m| m.free_bad(0, Bad::Foreign),
        |m| m.free_bad(0, Bad::Interior),
        |m| m.free_bad(0, Bad::Double),
    ];
    for refused in refused {
        let mut calls: Vec<Call> = vec![|m| m.allocate(Want::of(0, 512))];
        calls.extend(pair.repeat(3));
        calls.push(refused);
        replay(Setup::plain(Policy::Packed), &calls);
    }
}

/// A raw stream is destroyed while a block of it lies in a large-block cache, from where the next stream's call
/// takes it.
#[test]
fn a_block_in_a_large_cache_outlives_its_raw_stream() {
    let calls: [Call; 5] = [
        |m| m.allocate(Want::of(0, 512)),
        |m| m.new_stream(true),
        |m| m.again(1, 2 << 20, 3),
        |m| m.leave(1, false),
        |m| m.allocate(Want::of(0, 131_072)),
    ];
    replay(Setup::plain(Policy::Packed), &calls);
}
