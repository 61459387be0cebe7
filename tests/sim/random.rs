//! The race detector against a plain model: for random programs, both find the same first race.

use crate::common::rng::Rng;
use crate::support::*;
use cualloc::driver::sys::{CUevent, CUstream};
use cualloc::sim::Report;

const STREAMS: usize = 3;
const EVENTS: usize = 4;
const BYTES: u64 = 64;

/// First byte and bytes.
type Range = (u64, u64);

#[derive(Clone, Copy, Debug)]
enum Act {
    Write {
        to: Range,
    },
    Copy {
        to: Range,
        from: Range,
    },
    Record,
    Wait,
    /// The host waits for the event.
    Observe,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    stream: usize,
    event: usize,
    act: Act,
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
        let (to, from) = ((at, len), (other, len));
        let act = match rng.below(10) {
            0 => Act::Write { to },
            1 => Act::Copy { to, from },
            2..6 => Act::Record,
            6..9 => Act::Wait,
            _ => Act::Observe,
        };
        steps.push(Step { stream, event, act });
    }
    steps
}

/// One operation of the model: its stream, what it follows, what it reads and writes.
struct Node {
    after: Vec<bool>,
    writes: Option<Range>,
    reads: Option<Range>,
}

fn overlap(a: Option<Range>, b: Option<Range>) -> bool {
    matches!((a, b), (Some((a, n)), Some((b, m))) if a < b + m && b < a + n)
}

/// The index of the first step that races with an earlier one.
fn first_race(steps: &[Step]) -> Option<usize> {
    let mut nodes: Vec<Node> = Vec::new();
    let size = steps.len();
    // The operations known to precede each stream, each event and the host.
    let mut known = vec![vec![false; size]; STREAMS];
    let mut events = vec![vec![false; size]; EVENTS];
    let mut host = vec![false; size];
    let join = |into: &mut Vec<bool>, from: &[bool]| {
        into.iter_mut()
            .zip(from)
            .for_each(|(into, from)| *into |= from);
    };
    for (index, Step { stream, event, act }) in steps.iter().copied().enumerate() {
        let mut node = Node {
            after: vec![],
            writes: None,
            reads: None,
        };
        if matches!(act, Act::Write { .. } | Act::Copy { .. } | Act::Record) {
            join(&mut known[stream], &host);
        }
        match act {
            Act::Write { to } => node.writes = Some(to),
            Act::Copy { to, from } => (node.writes, node.reads) = (Some(to), Some(from)),
            Act::Record => events[event] = known[stream].clone(),
            Act::Wait => join(&mut known[stream], &events[event]),
            Act::Observe => join(&mut host, &events[event]),
        }
        if node.writes.is_some() {
            node.after = known[stream].clone();
            known[stream][index] = true;
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

/// A device on which programs run.
struct Device {
    bench: Bench,
    streams: Vec<CUstream>,
    events: Vec<CUevent>,
    memory: u64,
}

impl Device {
    fn new() -> Device {
        let bench = bench();
        Device {
            streams: (0..STREAMS).map(|_| bench.stream()).collect(),
            events: (0..EVENTS).map(|_| bench.event()).collect(),
            memory: bench.alloc(BYTES as usize),
            bench,
        }
    }

    fn submit(&self, step: &Step) {
        let (bench, memory) = (&self.bench, self.memory);
        let (stream, event) = (self.streams[step.stream], self.events[step.event]);
        match step.act {
            Act::Write { to: (at, len) } => bench.memset(memory + at, 1, len as usize, stream),
            Act::Copy { to, from } => {
                let (to, from, len) = (memory + to.0, memory + from.0, to.1 as usize);
                ok!(bench, cuMemcpyDtoDAsync_v2(to, from, len, stream));
            }
            Act::Record => bench.record(event, stream),
            Act::Wait => bench.wait(stream, event),
            Act::Observe => ok!(bench, cuEventSynchronize(event)),
        }
    }
}

#[test]
fn the_detector_finds_the_first_race_of_every_program() {
    let (mut racy, mut clean) = (0, 0);
    for seed in 0..3000 {
        let steps = program(seed);
        let expected = first_race(&steps);
        let device = Device::new();
        let found = steps.iter().position(|step| {
            device.submit(step);
            device.bench.sim.report_count() > 0
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
        let device = Device::new();
        let bench = &device.bench;
        bench.manual();
        let mut rng = Rng::new(seed ^ 0x5eed);
        for step in &steps {
            device.submit(step);
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
