//! The race detector against a plain model: for random programs, both find the same first race.

use crate::common::rng::Rng;
use crate::support::*;
use cualloc::sim::Report;

const STREAMS: usize = 3;
const EVENTS: usize = 4;
const BYTES: u64 = 64;

#[derive(Clone, Debug)]
enum Step {
    Write {
        stream: usize,
        at: u64,
        len: u64,
    },
    Copy {
        stream: usize,
        to: u64,
        from: u64,
        len: u64,
    },
    Record {
        stream: usize,
        event: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    Observe {
        event: usize,
    },
}

fn program(seed: u64) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    let mut steps = Vec::new();
    for _ in 0..30 {
        let stream = rng.index(STREAMS);
        let event = rng.index(EVENTS);
        let at = rng.below(BYTES);
        let len = rng.below((BYTES - at).min(8)) + 1;
        let other = rng.below(BYTES - len + 1);
        steps.push(match rng.below(10) {
            0 => Step::Write { stream, at, len },
            1 => Step::Copy {
                stream,
                to: at,
                from: other,
                len,
            },
            2..6 => Step::Record { stream, event },
            6..9 => Step::Wait { stream, event },
            _ => Step::Observe { event },
        });
    }
    steps
}

/// One operation of the model: its stream, what it follows, what it reads and writes.
struct Node {
    after: Vec<bool>,
    writes: Option<(u64, u64)>,
    reads: Option<(u64, u64)>,
}

fn overlap(a: Option<(u64, u64)>, b: Option<(u64, u64)>) -> bool {
    matches!((a, b), (Some((a, n)), Some((b, m))) if a < b + m && b < a + n)
}

/// The index of the first step that races with an earlier one.
fn first_race(steps: &[Step]) -> Option<usize> {
    let mut nodes: Vec<Node> = Vec::new();
    let size = steps.len();
    // What each stream, event and the host know to have happened before.
    let mut known = vec![vec![false; size]; STREAMS];
    let mut events = vec![vec![false; size]; EVENTS];
    let mut host = vec![false; size];
    let join = |into: &mut Vec<bool>, from: &[bool]| {
        into.iter_mut()
            .zip(from)
            .for_each(|(into, from)| *into |= from);
    };
    for (index, step) in steps.iter().enumerate() {
        let mut node = Node {
            after: vec![],
            writes: None,
            reads: None,
        };
        match *step {
            Step::Write { stream, at, len } => {
                join(&mut known[stream], &host);
                node.after = known[stream].clone();
                node.writes = Some((at, len));
                known[stream][index] = true;
            }
            Step::Copy {
                stream,
                to,
                from,
                len,
            } => {
                join(&mut known[stream], &host);
                node.after = known[stream].clone();
                node.writes = Some((to, len));
                node.reads = Some((from, len));
                known[stream][index] = true;
            }
            Step::Record { stream, event } => {
                join(&mut known[stream], &host);
                events[event] = known[stream].clone();
            }
            Step::Wait { stream, event } => {
                let row = events[event].clone();
                join(&mut known[stream], &row);
            }
            Step::Observe { event } => join(&mut host, &events[event]),
        }
        let races = nodes.iter().enumerate().any(|(earlier, old)| {
            let unordered = !node.after.get(earlier).copied().unwrap_or(true);
            let clash = overlap(node.writes, old.writes)
                || overlap(node.writes, old.reads)
                || overlap(node.reads, old.writes);
            unordered && clash
        });
        if races {
            return Some(index);
        }
        nodes.push(node);
    }
    None
}

fn submit(
    bench: &Bench,
    step: &Step,
    streams: &[cualloc::driver::sys::CUstream],
    events: &[cualloc::driver::sys::CUevent],
    memory: u64,
) {
    match *step {
        Step::Write { stream, at, len } => {
            bench.memset(memory + at, 1, len as usize, streams[stream])
        }
        Step::Copy {
            stream,
            to,
            from,
            len,
        } => {
            let stream = streams[stream];
            let code = call!(
                bench,
                cuMemcpyDtoDAsync_v2(memory + to, memory + from, len as usize, stream)
            );
            assert_eq!(code, OK);
        }
        Step::Record { stream, event } => bench.record(events[event], streams[stream]),
        Step::Wait { stream, event } => bench.wait(streams[stream], events[event]),
        Step::Observe { event } => {
            ok!(bench, cuEventSynchronize(events[event]));
        }
    }
}

#[test]
fn the_detector_finds_the_first_race_of_every_program() {
    let (mut racy, mut clean) = (0, 0);
    for seed in 0..3000 {
        let steps = program(seed);
        let expected = first_race(&steps);
        let bench = bench();
        let streams: Vec<_> = (0..STREAMS).map(|_| bench.stream()).collect();
        let events: Vec<_> = (0..EVENTS).map(|_| bench.event()).collect();
        let memory = bench.alloc(BYTES as usize);
        let found = steps.iter().position(|step| {
            submit(&bench, step, &streams, &events, memory);
            bench.sim.report_count() > 0
        });
        assert_eq!(found, expected, "seed {seed}: {steps:?}");
        match found {
            Some(_) => racy += 1,
            None => clean += 1,
        }
    }
    assert!(
        racy > 300 && clean > 300,
        "{racy} racy, {clean} clean programs"
    );
}

#[test]
fn completion_order_does_not_change_whether_a_program_races() {
    for seed in 0..1000 {
        let steps = program(seed);
        let expected = first_race(&steps).is_some();
        let bench = bench();
        bench.manual();
        let streams: Vec<_> = (0..STREAMS).map(|_| bench.stream()).collect();
        let events: Vec<_> = (0..EVENTS).map(|_| bench.event()).collect();
        let memory = bench.alloc(BYTES as usize);
        let mut rng = Rng::new(seed ^ 0x5eed);
        for step in &steps {
            submit(&bench, step, &streams, &events, memory);
            let ready = bench.sim.ready_streams();
            if !ready.is_empty() && rng.below(3) == 0 {
                assert_eq!(bench.sim.complete_stream(rng.pick(&ready), 1), 1);
            }
        }
        bench.sim.complete_all();
        assert!(bench.sim.pending().is_empty());
        let races = bench.sim.take_reports();
        assert!(
            races
                .iter()
                .all(|report| matches!(report, Report::Race { .. }))
        );
        assert_eq!(!races.is_empty(), expected, "seed {seed}: {steps:?}");
    }
}
