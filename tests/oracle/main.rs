//! Random programs against an independent model: no two live or pending blocks overlap under any
//! legal completion order, and the books are those of the model after each step.
//!
//! More of it, with other programs each time:
//!
//! ```text
//! CUALLOC_ORACLE_OPS=100000000 CUALLOC_ORACLE_SEED=7 cargo test --release --test oracle -- --nocapture
//! ```

mod machine;
mod program;
mod rng;
mod shadow;
mod shrink;

use std::time::Instant;

use cualloc::Policy;

use program::{Op, Setup, generate};
use shrink::{attempt, print, shrink};

const LENGTH: usize = 2000;
const CHECK_EVERY: usize = 50;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Runs random programs of one policy: half of all operations.
fn judge(policy: Policy) {
    let total = setting("CUALLOC_ORACLE_OPS", 1_200_000) / 2;
    let seed = setting("CUALLOC_ORACLE_SEED", 1);
    let started = Instant::now();
    let (mut done, mut number) = (0u64, 0u64);
    let mut sums = machine::Summary::default();
    while done < total {
        let program = seed << 32 | number;
        let (setup, ops) = generate(program, policy, LENGTH);
        match attempt(&setup, &ops, CHECK_EVERY) {
            Ok(summary) => {
                sums.allocations += summary.allocations;
                sums.out_of_memory += summary.out_of_memory;
                sums.waits += summary.waits;
                sums.faults += summary.faults;
            }
            Err(found) => {
                eprintln!(
                    "program {program:#x} fails at step {}: {}",
                    found.step, found.what
                );
                let (small, failure) = shrink(&setup, &ops, &found, CHECK_EVERY);
                panic!(
                    "program {program:#x} of {policy:?}:\n{}",
                    print(&setup, &small, &failure)
                );
            }
        }
        done += ops.len() as u64;
        number += 1;
    }
    let rate = done as f64 / started.elapsed().as_secs_f64();
    eprintln!("{policy:?}: {done} operations in {number} programs, {rate:.0} per second, {sums:?}");
    // Programs in which nothing happens would prove nothing.
    assert!(sums.allocations * 20 > done && sums.out_of_memory > 0 && sums.faults > 0);
}

/// R34
#[test]
fn r34_packed_random_programs_agree_with_the_model() {
    judge(Policy::Packed);
}

/// R34
#[test]
fn r34_classic_random_programs_agree_with_the_model() {
    judge(Policy::Classic);
}

/// Runs a program that failed once.
#[allow(dead_code)]
fn replay(setup: Setup, ops: &[Op]) {
    if let Err(failure) = attempt(&setup, ops, 1) {
        panic!("step {}: {}", failure.step, failure.what);
    }
}
