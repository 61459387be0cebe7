//! Makes a failing program small, and prints it.

use super::common::shrink::{Failure, guarded, shrink};
use super::machine::{Summary, run};
use super::program::{Op, Relief, Setup, Want};

/// Runs a program, checking the heap every few steps; a panic is a failure like any other.
pub fn attempt(setup: &Setup, ops: &[Op], check_every: usize) -> Result<Summary, Failure> {
    let mut failed = None;
    let result = guarded(|| {
        run(setup, ops, check_every).map_err(|failure| {
            failed = Some(failure.step);
            failure.what
        })
    });
    result.map_err(|what| Failure {
        step: failed.unwrap_or(ops.len()),
        what,
    })
}

/// The smallest program found that still fails like the first, and how.
pub fn smallest(
    setup: &Setup,
    ops: &[Op],
    first: Failure,
    check_every: usize,
) -> (Vec<Op>, Failure) {
    let again = |ops: &[Op]| attempt(setup, ops, check_every).map(drop);
    shrink(ops, first, again, |op| simpler(*op))
}

fn simpler(op: Op) -> Vec<Op> {
    let mut list = Vec::new();
    match op {
        Op::Alloc(want) => list.extend(smaller(want).map(Op::Alloc)),
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
            want,
            single,
            views,
        } => {
            let of = |want, single, views| Op::Place {
                want,
                single,
                views,
            };
            list.extend([of(want, single, true), of(want, false, views)]);
            list.extend(smaller(want).map(|want| of(want, single, views)));
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

fn smaller(want: Want) -> impl Iterator<Item = Want> {
    let bytes = [want.bytes.next_power_of_two() / 2, want.bytes / 2];
    let bytes = bytes.into_iter().filter(|bytes| *bytes >= 256);
    let shorter = bytes.map(move |bytes| Want { bytes, ..want });
    let plain = [
        Want { align: 0, ..want },
        Want {
            stream: want.stream % 8,
            ..want
        },
    ];
    plain.into_iter().chain(shorter)
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
