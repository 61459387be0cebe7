//! Random programs of three kinds: a bit of everything, requests that fill a limit, and the same again and again.

use cualloc::Policy;
use cualloc::sim::Mode;

use super::program::{Bad, CALLS, Op, Relief, Setup, Tuning, Want};
use super::rng::Rng;

const MIB: u64 = 1 << 20;

/// What only some programs have.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Always,
    Faults,
    Guards,
    /// Streams come and go.
    Streams,
    /// The program completes the work.
    Manual,
    /// A second allocator works beside the first.
    Other,
}

use Part::*;

/// A kind of step, with its weight among those that a program has.
type Row = (u64, Part, fn(&mut Draw) -> Op);

/// Draws the steps of a program.
struct Draw {
    rng: Rng,
    parts: Vec<Part>,
    /// Sizes that are asked for again and again; if there are none, any size up to the largest is.
    sizes: Vec<u64>,
    largest: u64,
    /// Limits and the like are about this.
    base: u64,
    /// The number of live blocks at most.
    most: usize,
    /// The limit that requests are to fill, instead of sizes drawn for themselves.
    fill: Option<u64>,
    freeing: bool,
    /// Bytes that are live if nothing is refused.
    live: Vec<u64>,
    /// Percentage of blocks that are held by their address.
    raw: u64,
}

impl Draw {
    fn new(rng: Rng, largest: u64) -> Draw {
        Draw {
            rng,
            parts: vec![Always],
            sizes: Vec::new(),
            largest,
            base: (largest * 4).max(64 * MIB),
            most: usize::MAX,
            fill: None,
            freeing: false,
            live: Vec::new(),
            raw: 30,
        }
    }

    fn has(&mut self, part: Part, percent: u64) {
        if self.rng.chance(percent) {
            self.parts.push(part);
        }
    }

    fn setup(&mut self, policy: Policy, limit: Option<u64>, unusual: u64) -> Setup {
        let mode = match self.rng.below(4) {
            0 => Mode::Instant,
            1 => Mode::Lag(1 + self.rng.log_uniform(200)),
            _ => Mode::Manual,
        };
        if mode == Mode::Manual {
            self.parts.push(Manual);
        }
        Setup {
            policy,
            mode,
            executed: self.rng.chance(50),
            memory: match self.rng.chance(30) {
                true => self.base + self.rng.below(self.base),
                false => 64 << 30,
            },
            limit,
            stream_ids: !self.rng.chance(unusual),
            legacy: self.rng.chance(unusual),
            per_thread: self.rng.chance(unusual),
            tuning: Tuning::default(),
        }
    }

    fn step(&mut self, rows: &[Row]) -> Op {
        let parts = self.parts.clone();
        let rows = || rows.iter().filter(|(_, part, _)| parts.contains(part));
        let mut at = self.rng.below(rows().map(|(weight, ..)| weight).sum());
        let found = rows().find(|(weight, ..)| {
            let here = at < *weight;
            at = at.wrapping_sub(*weight);
            here
        });
        found.map_or(Op::Check, |(_, _, make)| make(self))
    }

    fn stream(&mut self) -> u8 {
        self.rng.next() as u8
    }

    fn block(&mut self) -> u16 {
        self.rng.next() as u16
    }

    fn bytes(&mut self) -> usize {
        if self.sizes.is_empty() {
            return self.rng.log_uniform(self.largest) as usize;
        }
        // The next one up is of another bin.
        let more = if self.rng.chance(3) { 512 } else { 0 };
        self.rng.pick(&self.sizes) as usize + more
    }

    /// The bytes of the next request under the limit that is to be filled; none while memory is being freed. They are
    /// often more than any piece of what is free.
    fn filling(&mut self, limit: u64) -> Option<usize> {
        let room = (limit / 100 * 96).saturating_sub(self.live.iter().sum());
        self.freeing = room < if self.freeing { limit / 4 } else { limit / 12 };
        let bytes = match self.rng.below(100) {
            0..3 => self.rng.log_uniform(64 << 10),
            3..6 => room / 100 * (20 + self.rng.below(40)),
            _ => room / 100 * (80 + self.rng.below(18)),
        };
        (!self.freeing).then_some(bytes.max(1) as usize)
    }

    fn want(&mut self, bytes: usize, aligned: u64) -> Want {
        Want {
            stream: self.stream(),
            bytes,
            align: match self.rng.chance(aligned) {
                true => self.rng.below(22) as u8,
                false => 0,
            },
            raw: self.rng.chance(self.raw),
        }
    }

    fn limit(&mut self) -> u64 {
        self.base / 6 + self.rng.below(self.base)
    }

    fn nothing_or(&mut self, bytes: u64) -> u64 {
        match self.rng.chance(55) {
            true => 0,
            false => self.rng.below(bytes),
        }
    }
}

// ---- steps -------------------------------------------------------------------------------------

fn alloc(d: &mut Draw) -> Op {
    let bytes = match d.fill {
        Some(limit) => d.filling(limit),
        None => (d.live.len() < d.most).then(|| d.bytes()),
    };
    let Some(bytes) = bytes else {
        return give_back(d);
    };
    d.live.push(bytes as u64);
    Op::Alloc(d.want(bytes, 6))
}

fn give_back(d: &mut Draw) -> Op {
    let block = d.block();
    if !d.live.is_empty() {
        d.live.swap_remove(usize::from(block) % d.live.len());
    }
    match d.rng.chance(50) {
        true => Op::Free { block },
        false => Op::Drop { block },
    }
}

fn place(d: &mut Draw) -> Op {
    if d.live.len() >= d.most {
        return give_back(d);
    }
    let bytes = d.bytes();
    d.live.push(bytes as u64);
    Op::Place {
        want: d.want(bytes, 20),
        single: d.rng.chance(55),
        views: d.rng.chance(50),
    }
}

fn cached(d: &mut Draw) -> Op {
    Op::Cached {
        stream: d.stream(),
        bytes: d.bytes(),
    }
}

fn again(d: &mut Draw) -> Op {
    Op::Again {
        stream: d.stream(),
        bytes: d.bytes(),
        times: d.rng.below(6) as u8,
    }
}

fn reserve(d: &mut Draw) -> Op {
    Op::Reserve {
        stream: d.stream(),
        bytes: d.bytes(),
    }
}

fn other(d: &mut Draw) -> Op {
    Op::Other {
        stream: d.stream(),
        bytes: d.rng.chance(50).then(|| d.bytes()),
    }
}

fn guard(d: &mut Draw) -> Op {
    Op::Guard {
        block: d.block(),
        from: d.stream(),
        part: d.stream(),
    }
}

fn segments(d: &mut Draw) -> Op {
    Op::Segments {
        block: d.block(),
        from: d.stream(),
        part: d.stream(),
    }
}

fn use_block(d: &mut Draw) -> Op {
    Op::Use {
        block: d.block(),
        on: d.stream(),
        write: d.rng.chance(70),
    }
}

fn record_stream(d: &mut Draw) -> Op {
    Op::RecordStream {
        block: d.block(),
        stream: d.stream(),
        inside: d.rng.chance(20),
    }
}

fn record_use(d: &mut Draw) -> Op {
    Op::RecordUse {
        block: d.block(),
        stream: d.stream(),
        write: d.rng.chance(50),
    }
}

fn wait(d: &mut Draw) -> Op {
    Op::Wait {
        from: d.stream(),
        to: d.stream(),
    }
}

fn new_stream(d: &mut Draw) -> Op {
    Op::NewStream {
        raw: d.rng.chance(50),
    }
}

fn absurd(d: &mut Draw) -> Op {
    let (bytes, alignment) = match d.rng.below(3) {
        0 => (0, 1),
        1 => (usize::MAX - d.rng.index(1024), 1),
        _ => (4096, d.rng.pick(&[0, 3, 4 << 20])),
    };
    Op::Absurd {
        stream: d.stream(),
        bytes,
        alignment,
    }
}

fn free_bad(d: &mut Draw) -> Op {
    Op::FreeBad {
        block: d.block(),
        kind: d.rng.pick(&[Bad::Foreign, Bad::Interior, Bad::Double]),
    }
}

fn hook(d: &mut Draw) -> Op {
    let kinds = [
        Relief::Nothing,
        Relief::All,
        Relief::Trim,
        Relief::Synchronize,
        Relief::Allocate,
    ];
    Op::Hook {
        relief: d.rng.chance(85).then(|| d.rng.pick(&kinds)),
        stream: d.stream(),
    }
}

fn limit(d: &mut Draw) -> Op {
    Op::Limit {
        bytes: d.rng.chance(65).then(|| d.limit()),
    }
}

fn trim(d: &mut Draw) -> Op {
    Op::Trim {
        keep: d.nothing_or(d.fill.unwrap_or(d.base)),
    }
}

fn taken(d: &mut Draw) -> Op {
    Op::Taken {
        bytes: d.nothing_or(d.base * 2),
    }
}

fn fail(d: &mut Draw) -> Op {
    Op::Fail {
        call: d.rng.index(CALLS.len()) as u8,
        nth: 1 + d.rng.log_uniform(12) as u8,
        times: 1 + d.rng.below(2) as u8,
        code: d.rng.below(3) as u8,
    }
}

fn complete(d: &mut Draw) -> Op {
    Op::Complete {
        pick: d.block(),
        count: 1 + d.rng.below(6) as u8,
    }
}

// ---- programs ----------------------------------------------------------------------------------

const GENERAL: &[Row] = &[
    (330, Always, alloc),
    (130, Always, give_back),
    (220, Always, use_block),
    (50, Always, record_stream),
    (30, Always, record_use),
    (15, Always, wait),
    (5, Always, |d| Op::HostSync { stream: d.stream() }),
    (8, Streams, new_stream),
    (5, Streams, |d| Op::Retire { stream: d.stream() }),
    (3, Streams, |d| Op::Leave { stream: d.stream() }),
    (3, Always, limit),
    (5, Always, trim),
    (4, Always, reserve),
    (5, Always, |d| Op::Mark { stream: d.stream() }),
    (2, Always, |_| Op::Synchronize),
    (2, Always, |_| Op::ResetPeaks),
    (4, Always, |_| Op::Check),
    (7, Always, free_bad),
    (3, Always, absurd),
    (3, Always, |d| Op::IntoRaw { block: d.block() }),
    (4, Always, |_| Op::CompleteAll),
    (15, Faults, fail),
    (15, Faults, |_| Op::Mend),
    (2, Always, taken),
    (8, Always, place),
    (6, Always, cached),
    (8, Always, guard),
    (12, Always, |d| Op::Unguard { guard: d.block() }),
    (6, Always, segments),
    (100, Manual, complete),
];

/// A bit of everything.
pub fn general(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed);
    let largest = rng.pick(&[64 << 10, 2 * MIB, 64 * MIB, 64 * MIB]);
    let mut d = Draw::new(rng, largest);
    let limit = d.rng.chance(35).then(|| d.limit());
    let setup = d.setup(policy, limit, 15);
    d.most = d.rng.log_uniform(256) as usize;
    d.raw = 50;
    d.has(Faults, 35);
    d.has(Streams, 60);
    let mut ops: Vec<Op> = (0..d.rng.below(8)).map(|_| new_stream(&mut d)).collect();
    ops.resize_with(length, || d.step(GENERAL));
    (setup, ops)
}

const FILLING: &[Row] = &[
    (460, Always, alloc),
    (240, Always, use_block),
    (40, Always, record_stream),
    (20, Always, record_use),
    (10, Always, wait),
    (4, Always, trim),
    (3, Always, |_| Op::Synchronize),
    (4, Faults, fail),
    (24, Faults, |_| Op::Mend),
    (2, Always, |_| Op::CompleteAll),
    (2, Guards, guard),
    (2, Guards, |d| Op::Unguard { guard: d.block() }),
    (1, Guards, segments),
    (190, Manual, complete),
];

/// Large blocks that fill a limit, or the device: what is free is mostly scattered.
pub fn filling(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed ^ 0xc0de);
    let limit = (48 + rng.below(200)) * MIB;
    let mut d = Draw::new(rng, limit);
    let full_device = d.rng.chance(15);
    let setup = Setup {
        memory: if full_device { limit } else { 64 << 30 },
        ..d.setup(policy, (!full_device).then_some(limit), 0)
    };
    d.fill = Some(limit);
    // What guards keep makes no room.
    d.has(Guards, 10);
    d.has(Faults, 30);
    let mut ops: Vec<Op> = (0..d.rng.below(4)).map(|_| new_stream(&mut d)).collect();
    ops.resize_with(length, || d.step(FILLING));
    (setup, ops)
}

const WORK: &[Row] = &[
    (40, Always, use_block),
    (10, Always, record_stream),
    (6, Always, record_use),
    (4, Always, wait),
    (15, Always, again),
    (3, Always, cached),
    (6, Other, other),
    (16, Manual, complete),
];

/// What happens between two runs of a body.
const EVENTS: &[Row] = &[
    (8, Always, limit),
    (5, Always, trim),
    (7, Always, |_| Op::EmptyCache),
    (8, Always, |d| Op::Spare { block: d.block() }),
    (8, Always, hook),
    (8, Always, place),
    (2, Guards, guard),
    (3, Guards, |d| Op::Unguard { guard: d.block() }),
    (2, Guards, segments),
    (4, Always, new_stream),
    (3, Always, |d| Op::Retire { stream: d.stream() }),
    (2, Always, |d| Op::Leave { stream: d.stream() }),
    (5, Always, reserve),
    (3, Always, |d| Op::Mark { stream: d.stream() }),
    (3, Always, |_| Op::Synchronize),
    (2, Always, |d| Op::HostSync { stream: d.stream() }),
    (2, Always, |_| Op::ResetPeaks),
    (3, Always, |_| Op::Look),
    (1, Always, |_| Op::Reopen),
    (3, Always, |_| Op::CompleteAll),
    (2, Always, |d| Op::IntoRaw { block: d.block() }),
    (2, Always, taken),
    (6, Faults, fail),
    (6, Faults, |_| Op::Mend),
];

/// A program whose body is run again and again, with small changes.
pub fn repeating(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed ^ 0x0010_0b5e);
    let largest = rng.pick(&[64 << 10, 2 * MIB, 32 * MIB, 64 * MIB]);
    let mut d = Draw::new(rng, largest);
    let alike = d.rng.chance(50);
    let size = |d: &mut Draw| match alike {
        true => largest / 16 + d.rng.below(largest - largest / 16),
        false => d.rng.log_uniform(largest),
    };
    d.sizes = (0..1 + d.rng.below(12)).map(|_| size(&mut d)).collect();
    d.has(Faults, 25);
    d.has(Guards, 30);
    d.has(Other, 30);
    let limit = d.rng.chance(40).then(|| d.limit());
    let mut setup = d.setup(policy, limit, 8);
    setup.tuning = tuning(&mut d.rng, policy, limit);
    let mut ops: Vec<Op> = (0..d.rng.below(6)).map(|_| new_stream(&mut d)).collect();
    let tight = d.rng.chance(35);
    while ops.len() < length {
        let (body, peak) = body(&mut d);
        if tight {
            // Room for what is live, and little more: what is free is scattered.
            let bytes = Some((peak / 100 * (100 + d.rng.below(30))).max(4 * MIB));
            ops.push(Op::Limit { bytes });
        }
        for _ in 0..1 + d.rng.log_uniform(24) {
            for op in &body {
                match d.rng.below(100) {
                    0 => {}
                    1..3 => ops.push(d.step(WORK)),
                    3..6 => ops.push(d.step(EVENTS)),
                    _ => ops.push(*op),
                }
            }
            ops.push(d.step(EVENTS));
        }
    }
    ops.truncate(length);
    (setup, ops)
}

/// Steps that take as many blocks as they give back, and the most bytes that are live in them.
fn body(d: &mut Draw) -> (Vec<Op>, u64) {
    let (mut left, mut peak, mut body) = (1 + d.rng.log_uniform(40), 0, Vec::new());
    d.live.clear();
    while left > 0 || !d.live.is_empty() {
        match d.rng.below(100) {
            0..35 if left > 0 => {
                left -= 1;
                body.push(alloc(d));
            }
            35..60 if !d.live.is_empty() => body.push(give_back(d)),
            60.. => body.push(d.step(WORK)),
            _ => {}
        }
        let own = match body.last() {
            Some(Op::Again { bytes, .. }) => *bytes as u64,
            _ => 0,
        };
        peak = peak.max(d.live.iter().sum::<u64>() + own);
    }
    (body, peak)
}

fn tuning(rng: &mut Rng, policy: Policy, limit: Option<u64>) -> Tuning {
    let packed = policy == Policy::Packed;
    let views = !packed || !rng.chance(10);
    Tuning {
        views,
        capture_checks: rng.chance(10),
        dense: packed && rng.chance(40),
        handle: Some((2 * MIB) << rng.below(5)).filter(|handle| {
            packed && rng.chance(25) && limit.is_none_or(|limit| limit >= *handle)
        }),
    }
}
