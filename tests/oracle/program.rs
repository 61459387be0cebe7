//! Random programs of three kinds: a bit of everything, requests that fill a limit, and the same again and again.

use cualloc::Policy;
use cualloc::sim::Mode;

use super::rng::Rng;
use Act::*;

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Alloc,
    /// Takes a block, uses it and gives it back, a few times.
    Again,
    /// A block inside one handle, or outside views.
    Place,
    /// A block of cached memory, or none.
    Cached,
    GiveBack,
    IntoRaw,
    /// An address that belongs to no block, lies inside a live block, or was freed before.
    FreeBad,
    /// Sizes and alignments that no device has.
    Absurd,
    Guard,
    Unguard,
    /// Asks where a part of a block lies.
    Segments,
    /// Says that a stream will use the block, also by an address inside it.
    RecordStream,
    /// Uses the block on a stream once, and says so.
    RecordUse,
    /// Submits work on the block to its own stream or one of those recorded.
    Use,
    Wait,
    HostSync,
    NewStream,
    Retire,
    /// Drops a stream without telling the allocator.
    Leave,
    Limit,
    /// A limit in MiB.
    LimitTo,
    Trim,
    EmptyCache,
    /// Leaves a block to the relief hook, which frees it when a request would fail.
    Spare,
    /// Sets the relief hook, or removes it.
    Hook,
    /// Looks at everything: what lies in large-block caches leaves them.
    Look,
    /// Takes a block of another allocator on the same device, or gives one back.
    Other,
    /// Closes the allocator, and continues with a new one.
    Reopen,
    Reserve,
    Mark,
    Synchronize,
    ResetPeaks,
    Check,
    /// Completes the next work of some stream.
    Complete,
    CompleteAll,
    Fail,
    Mend,
    /// Memory that another process takes.
    Taken,
}

pub type Step = super::common::program::Step<Act>;

/// A malformed request to free.
#[derive(Clone, Copy, Debug)]
pub enum Bad {
    /// An address outside the allocator.
    Foreign,
    /// An address inside a live block.
    Interior,
    /// An address that was freed before.
    Double,
}

/// What the relief hook does beside freeing the block that was left to it first.
#[derive(Clone, Copy, Debug)]
pub enum Relief {
    Nothing,
    /// Frees all that was left to it.
    All,
    Trim,
    Synchronize,
    /// Takes a block and gives it back.
    Allocate,
}

/// A request for memory.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    pub stream: u32,
    pub bytes: usize,
    /// The alignment is two to the power of this.
    pub align: u32,
    /// The block is held by its address alone.
    pub raw: bool,
}

impl Want {
    pub const fn of(stream: u32, bytes: usize) -> Want {
        Want {
            stream,
            bytes,
            align: 0,
            raw: false,
        }
    }
}

/// Which requests a program makes.
#[derive(Clone, Debug, Default)]
pub struct Wishes {
    /// Sizes that are asked for again and again; if there are none, any size up to the largest is.
    pub sizes: Vec<u64>,
    pub largest: u64,
    /// Limits and the like are about this.
    pub base: u64,
    /// The number of live blocks at most.
    pub most: usize,
    /// The limit that requests are to fill, instead of sizes drawn for themselves.
    pub fill: Option<u64>,
    /// Percentage of blocks that are held by their address.
    pub raw: u64,
}

impl Wishes {
    fn up_to(largest: u64) -> Wishes {
        Wishes {
            largest,
            base: (largest * 4).max(64 * MIB),
            most: usize::MAX,
            raw: 30,
            ..Wishes::default()
        }
    }

    pub fn bytes(&self, rng: &mut Rng) -> usize {
        if self.sizes.is_empty() {
            return rng.log_uniform(self.largest) as usize;
        }
        // The next one up is of another bin.
        let more = if rng.chance(3) { 512 } else { 0 };
        rng.pick(&self.sizes) as usize + more
    }

    pub fn want(&self, stream: u32, bytes: usize, aligned: u64, rng: &mut Rng) -> Want {
        Want {
            stream,
            bytes,
            align: match rng.chance(aligned) {
                true => rng.below(22) as u32,
                false => 0,
            },
            raw: rng.chance(self.raw),
        }
    }

    pub fn limit(&self, rng: &mut Rng) -> u64 {
        self.base / 6 + rng.below(self.base)
    }
}

/// The configuration of a program.
#[derive(Clone, Debug)]
pub struct Setup {
    pub policy: Policy,
    pub mode: Mode,
    /// Calls that fail are executed all the same.
    pub executed: bool,
    /// Bytes of the device's memory.
    pub memory: u64,
    pub limit: Option<u64>,
    /// Whether the driver tells streams apart by ids.
    pub stream_ids: bool,
    /// Whether the legacy and the calling thread's default stream take part.
    pub legacy: bool,
    pub per_thread: bool,
    pub views: bool,
    pub capture_checks: bool,
    pub dense: bool,
    pub handle: Option<u64>,
    pub wishes: Wishes,
}

impl Setup {
    pub fn plain(policy: Policy) -> Setup {
        Setup {
            policy,
            mode: Mode::Manual,
            executed: false,
            memory: 64 << 30,
            limit: None,
            stream_ids: true,
            legacy: false,
            per_thread: false,
            views: true,
            capture_checks: false,
            dense: false,
            handle: None,
            wishes: Wishes::default(),
        }
    }

    fn random(
        policy: Policy,
        limit: Option<u64>,
        wishes: Wishes,
        unusual: u64,
        rng: &mut Rng,
    ) -> Setup {
        Setup {
            mode: match rng.below(4) {
                0 => Mode::Instant,
                1 => Mode::Lag(1 + rng.log_uniform(200)),
                _ => Mode::Manual,
            },
            executed: rng.chance(50),
            memory: match rng.chance(30) {
                true => wishes.base + rng.below(wishes.base),
                false => 64 << 30,
            },
            limit,
            stream_ids: !rng.chance(unusual),
            legacy: rng.chance(unusual),
            per_thread: rng.chance(unusual),
            wishes,
            ..Setup::plain(policy)
        }
    }

    /// Steps for programs that complete the work themselves.
    fn completes(&self, acts: &'static Acts) -> (u64, &'static Acts) {
        let manual = self.mode == Mode::Manual;
        (if manual { 100 } else { 0 }, acts)
    }
}

/// Calls that a fault may hit.
const CALLS: &str = "
    cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuMemRelease cuMemAddressReserve cuMemAlloc_v2
    cuMemFree_v2 cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize cuStreamWaitEvent
    cuCtxSynchronize cuStreamIsCapturing cuThreadExchangeStreamCaptureMode cuCtxSetCurrent
";

/// The name of a call that a fault may hit; the empty one stands for any call.
pub fn failing(rng: &mut Rng) -> &'static str {
    let names: Vec<&str> = CALLS.split_whitespace().chain([""]).collect();
    rng.pick(&names)
}

type Acts = [(Act, u32)];

/// The steps of a program: those that all of its kind have, and those of which each has some share.
fn acts(all: &Acts, some: &[(u64, &Acts)], rng: &mut Rng) -> Vec<(Act, u32)> {
    let mut acts = all.to_vec();
    for (percent, part) in some {
        if rng.chance(*percent) {
            acts.extend_from_slice(part);
        }
    }
    acts
}

fn draw(count: u64, acts: &Acts, rng: &mut Rng) -> Vec<Step> {
    (0..count).map(|_| Step::draw(acts, rng)).collect()
}

/// A few streams, for a program to begin with.
fn streams(most: u64, rng: &mut Rng) -> Vec<Step> {
    draw(rng.below(most), &[(NewStream, 1)], rng)
}

const GENERAL: &Acts = &[
    (Alloc, 330),
    (GiveBack, 130),
    (Use, 220),
    (RecordStream, 50),
    (RecordUse, 30),
    (Wait, 15),
    (HostSync, 5),
    (Limit, 3),
    (Trim, 5),
    (Reserve, 4),
    (Mark, 5),
    (Synchronize, 2),
    (ResetPeaks, 2),
    (Check, 4),
    (FreeBad, 7),
    (Absurd, 3),
    (IntoRaw, 3),
    (CompleteAll, 4),
    (Taken, 2),
    (Place, 8),
    (Cached, 6),
    (Guard, 8),
    (Unguard, 12),
    (Segments, 6),
];

/// A bit of everything.
pub fn general(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Step>) {
    let rng = &mut Rng::new(seed);
    let largest = rng.pick(&[64 << 10, 2 * MIB, 64 * MIB, 64 * MIB]);
    let wishes = Wishes {
        most: rng.log_uniform(256) as usize,
        raw: 50,
        ..Wishes::up_to(largest)
    };
    let limit = rng.chance(35).then(|| wishes.limit(rng));
    let setup = Setup::random(policy, limit, wishes, 15, rng);
    let faults: &Acts = &[(Fail, 15), (Mend, 15)];
    let come_and_go: &Acts = &[(NewStream, 8), (Retire, 5), (Leave, 3)];
    let acts = acts(
        GENERAL,
        &[
            (35, faults),
            (60, come_and_go),
            setup.completes(&[(Complete, 100)]),
        ],
        rng,
    );
    let mut steps = streams(8, rng);
    steps.extend(draw(length as u64, &acts, rng));
    (setup, steps)
}

const FILLING: &Acts = &[
    (Alloc, 460),
    (Use, 240),
    (RecordStream, 40),
    (RecordUse, 20),
    (Wait, 10),
    (Trim, 4),
    (Synchronize, 3),
    (CompleteAll, 2),
];

/// Large blocks that fill a limit, or the device: what is free is mostly scattered.
pub fn filling(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Step>) {
    let rng = &mut Rng::new(seed ^ 0xc0de);
    let limit = (48 + rng.below(200)) * MIB;
    let full_device = rng.chance(15);
    let wishes = Wishes {
        fill: Some(limit),
        ..Wishes::up_to(limit)
    };
    let setup = Setup {
        memory: if full_device { limit } else { 64 << 30 },
        ..Setup::random(policy, (!full_device).then_some(limit), wishes, 0, rng)
    };
    // Guarded memory makes no room.
    let guards: &Acts = &[(Guard, 2), (Unguard, 2), (Segments, 1)];
    let faults: &Acts = &[(Fail, 4), (Mend, 24)];
    let acts = acts(
        FILLING,
        &[
            (10, guards),
            (30, faults),
            setup.completes(&[(Complete, 190)]),
        ],
        rng,
    );
    let mut steps = streams(4, rng);
    steps.extend(draw(length as u64, &acts, rng));
    (setup, steps)
}

const WORK: &Acts = &[
    (Use, 40),
    (RecordStream, 10),
    (RecordUse, 6),
    (Wait, 4),
    (Again, 15),
    (Cached, 3),
];

/// The steps between two runs of a body.
const EVENTS: &Acts = &[
    (Limit, 8),
    (Trim, 5),
    (EmptyCache, 7),
    (Spare, 8),
    (Hook, 8),
    (Place, 8),
    (NewStream, 4),
    (Retire, 3),
    (Leave, 2),
    (Reserve, 5),
    (Mark, 3),
    (Synchronize, 3),
    (HostSync, 2),
    (ResetPeaks, 2),
    (Look, 3),
    (Reopen, 1),
    (CompleteAll, 3),
    (IntoRaw, 2),
    (Taken, 2),
];

/// A program whose body is run again and again, with small changes.
pub fn repeating(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Step>) {
    let rng = &mut Rng::new(seed ^ 0x0010_0b5e);
    let largest = rng.pick(&[64 << 10, 2 * MIB, 32 * MIB, 64 * MIB]);
    let alike = rng.chance(50);
    let size = |_| match alike {
        true => largest / 16 + rng.below(largest - largest / 16),
        false => rng.log_uniform(largest),
    };
    let wishes = Wishes {
        sizes: (0..1 + seed % 12).map(size).collect(),
        ..Wishes::up_to(largest)
    };
    let limit = rng.chance(40).then(|| wishes.limit(rng));
    let packed = policy == Policy::Packed;
    let setup = Setup {
        views: !packed || !rng.chance(10),
        capture_checks: rng.chance(10),
        dense: packed && rng.chance(40),
        handle: Some((2 * MIB) << rng.below(5)).filter(|handle| {
            packed && rng.chance(25) && limit.is_none_or(|limit| limit >= *handle)
        }),
        ..Setup::random(policy, limit, wishes, 8, rng)
    };
    let work = acts(
        WORK,
        &[(30, &[(Other, 6)]), setup.completes(&[(Complete, 16)])],
        rng,
    );
    let guards: &Acts = &[(Guard, 2), (Unguard, 3), (Segments, 2)];
    let faults: &Acts = &[(Fail, 6), (Mend, 6)];
    let events = acts(EVENTS, &[(30, guards), (25, faults)], rng);
    let tight = rng.chance(35);
    let mut steps = streams(6, rng);
    while steps.len() < length {
        let (body, peak) = body(&setup.wishes, &work, rng);
        if tight {
            // Room for what is live, and little more: what is free is scattered.
            let mebibytes = (peak / 100 * (100 + rng.below(30)) / MIB).max(4) as u32;
            steps.push(Step::of(LimitTo, mebibytes));
        }
        for _ in 0..1 + rng.log_uniform(24) {
            for step in &body {
                match rng.below(100) {
                    0 => {}
                    1..3 => steps.push(Step::draw(&work, rng)),
                    3..6 => steps.push(Step::draw(&events, rng)),
                    _ => steps.push(*step),
                }
            }
            steps.push(Step::draw(&events, rng));
        }
    }
    steps.truncate(length);
    (setup, steps)
}

/// Steps that take as many blocks as they give back, and the most bytes that are live in them.
fn body(wishes: &Wishes, work: &Acts, rng: &mut Rng) -> (Vec<Step>, u64) {
    let mut left = 1 + rng.log_uniform(40);
    let (mut live, mut peak, mut body) = (Vec::new(), 0, Vec::new());
    while left > 0 || !live.is_empty() {
        let act: &Acts = match rng.below(100) {
            0..35 if left > 0 => &[(Alloc, 1)],
            35..60 if !live.is_empty() => &[(GiveBack, 1)],
            60.. => work,
            _ => continue,
        };
        let step = Step::draw(act, rng);
        let bytes = wishes.bytes(&mut step.rng()) as u64;
        let own = match step.act {
            Alloc => {
                left -= 1;
                live.push(bytes);
                0
            }
            GiveBack => {
                live.swap_remove(step.a as usize % live.len());
                0
            }
            Again => bytes,
            _ => 0,
        };
        peak = peak.max(live.iter().sum::<u64>() + own);
        body.push(step);
    }
    (body, peak)
}
