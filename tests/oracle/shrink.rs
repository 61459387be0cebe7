//! Makes a failing program small, and prints it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::machine::{Failure, Summary, run};
use super::program::{Op, Relief, Setup};

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Keeps the panics of attempts off the terminal: there are many, and the last is told by its text.
fn silence_attempts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
}

/// Runs a program, checking the heap every few steps; a panic is a failure like any other.
pub fn attempt(setup: &Setup, ops: &[Op], check_every: usize) -> Result<Summary, Failure> {
    silence_attempts();
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| run(setup, ops, check_every)));
    QUIET.set(false);
    result.unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(Failure {
            step: ops.len(),
            what: format!("panic: {}", what.unwrap_or_default()),
        })
    })
}

/// The smallest program found that still fails like the first, and how.
pub fn shrink(
    setup: &Setup,
    ops: &[Op],
    first: &Failure,
    check_every: usize,
) -> (Vec<Op>, Failure) {
    // What is told before the first number: a shorter program may fail in another way as well.
    let kind = |what: &str| {
        what.split(|c: char| c.is_ascii_digit())
            .next()
            .unwrap_or("")
            .len()
    };
    let wanted = &first.what[..kind(&first.what)];
    let fails = |ops: &[Op]| {
        let failure = attempt(setup, ops, check_every).err()?;
        failure.what.starts_with(wanted).then_some(failure)
    };
    let Some(mut failure) = fails(ops) else {
        let what = "the failure does not come again".into();
        return (ops.to_vec(), Failure { step: 0, what });
    };
    let mut best = ops[..ops.len().min(failure.step + 1)].to_vec();
    let mut chunk = best.len() / 2;
    while chunk > 0 {
        let mut at = 0;
        while at < best.len() {
            let mut shorter = best.clone();
            shorter.drain(at..(at + chunk).min(best.len()));
            match fails(&shorter) {
                Some(found) => {
                    shorter.truncate(found.step + 1);
                    (best, failure) = (shorter, found);
                }
                None => at += chunk,
            }
        }
        chunk /= 2;
    }
    for _ in 0..12 {
        let mut progress = false;
        for at in 0..best.len() {
            for simpler in simpler(best[at]) {
                let mut trial = best.clone();
                trial[at] = simpler;
                if let Some(found) = fails(&trial) {
                    (best, failure, progress) = (trial, found, true);
                    break;
                }
            }
        }
        if !progress {
            break;
        }
    }
    (best, failure)
}

fn simpler(op: Op) -> Vec<Op> {
    let mut list = Vec::new();
    match op {
        Op::Alloc {
            stream,
            bytes,
            align,
            raw,
        } => {
            if align > 0 {
                list.push(Op::Alloc {
                    stream,
                    bytes,
                    align: 0,
                    raw,
                });
            }
            if bytes > 512 {
                list.push(Op::Alloc {
                    stream,
                    bytes: bytes.next_power_of_two() / 2,
                    align,
                    raw,
                });
                list.push(Op::Alloc {
                    stream,
                    bytes: bytes / 2,
                    align,
                    raw,
                });
            }
            if stream > 0 {
                list.push(Op::Alloc {
                    stream: stream % 8,
                    bytes,
                    align,
                    raw,
                });
            }
        }
        Op::Again {
            stream,
            bytes,
            times,
        } => {
            for (bytes, times) in [(bytes, times / 2), (bytes.div_ceil(2), times)] {
                list.push(Op::Again {
                    stream,
                    bytes,
                    times,
                });
            }
        }
        Op::Place {
            stream,
            bytes,
            align,
            single,
            views,
        } => {
            for (bytes, align, single, views) in [
                (bytes, align, single, true),
                (bytes, align, false, views),
                (bytes, 0, single, views),
                (bytes.div_ceil(2), align, single, views),
            ] {
                list.push(Op::Place {
                    stream,
                    bytes,
                    align,
                    single,
                    views,
                });
            }
        }
        Op::Hook { relief, stream } if relief.is_some_and(|relief| relief != Relief::Nothing) => {
            list.push(Op::Hook {
                relief: Some(Relief::Nothing),
                stream,
            });
        }
        Op::EmptyCache => list.push(Op::Trim { keep: 0 }),
        Op::Guard { block, .. } => list.push(Op::Guard {
            block,
            from: 0,
            part: 255,
        }),
        Op::Free { block } if block > 300 => list.push(Op::Free { block: block % 256 }),
        Op::Drop { block } => list.push(Op::Free { block }),
        Op::Trim { keep } if keep > 0 => list.push(Op::Trim { keep: 0 }),
        Op::Complete { count, .. } if count > 0 => list.push(Op::CompleteAll),
        Op::CompleteAll => list.push(Op::Synchronize),
        Op::Leave { stream } => list.push(Op::Retire { stream }),
        Op::NewStream { raw: true } => list.push(Op::NewStream { raw: false }),
        _ => {}
    }
    list.retain(|simpler| *simpler != op);
    list
}

/// A failing program as lines of a regression test.
pub fn print(setup: &Setup, ops: &[Op], failure: &Failure) -> String {
    let mut text = format!(
        "{}\n    replay(\n        {setup:?},\n        &[\n",
        failure.what
    );
    for op in ops {
        text.push_str(&format!("            Op::{op:?},\n"));
    }
    text.push_str("        ],\n    );\n");
    text
}
