//! Programs as plain data, and random ones.

use cualloc::Policy;
use cualloc::sim::Mode;

use super::rng::Rng;

/// What a program runs on.
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
    pub tuning: Tuning,
}

/// Settings of the allocator beside its policy and its limit.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub views: bool,
    pub capture_checks: bool,
    pub slack: Option<f64>,
    pub budget: Option<u64>,
    pub handle: Option<u64>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            views: true,
            capture_checks: false,
            slack: None,
            budget: None,
            handle: None,
        }
    }
}

/// A malformed request to free.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bad {
    /// An address of nobody.
    Foreign,
    /// An address inside a live block.
    Interior,
    /// An address that was freed before.
    Double,
}

/// What the relief hook does beside freeing the block that was left to it first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Relief {
    Nothing,
    /// Frees all that was left to it.
    All,
    Trim,
    Synchronize,
    /// Takes a block and gives it back.
    Allocate,
}

/// One step. Streams and blocks are numbers, taken modulo what there is, so that a program stays
/// meaningful when steps are taken out of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    Alloc {
        stream: u8,
        bytes: usize,
        align: u8,
        raw: bool,
    },
    /// Takes a block, uses it and gives it back, so many times.
    Again {
        stream: u8,
        bytes: usize,
        times: u8,
    },
    /// A block inside one handle, or outside views.
    Place {
        stream: u8,
        bytes: usize,
        align: u8,
        single: bool,
        views: bool,
    },
    /// A block of cached memory, or none.
    Cached {
        stream: u8,
        bytes: usize,
    },
    /// Guards a part of a block; in parts of 256.
    Guard {
        block: u16,
        from: u8,
        part: u8,
    },
    Unguard {
        guard: u16,
    },
    /// Asks where a part of a block lies.
    Segments {
        block: u16,
        from: u8,
        part: u8,
    },
    /// Sizes and alignments that no device has.
    Absurd {
        stream: u8,
        bytes: usize,
        alignment: usize,
    },
    Free {
        block: u16,
    },
    Drop {
        block: u16,
    },
    IntoRaw {
        block: u16,
    },
    FreeBad {
        block: u16,
        kind: Bad,
    },
    /// Says that a stream will use the block, also by an address inside it.
    RecordStream {
        block: u16,
        stream: u8,
        inside: bool,
    },
    /// Uses the block on a stream once, and says so.
    RecordUse {
        block: u16,
        stream: u8,
        write: bool,
    },
    /// Submits work on the block to its own stream (0) or one of those recorded.
    Use {
        block: u16,
        on: u8,
        write: bool,
    },
    Wait {
        from: u8,
        to: u8,
    },
    HostSync {
        stream: u8,
    },
    NewStream {
        raw: bool,
    },
    Retire {
        stream: u8,
    },
    /// Lets go of a stream without telling the allocator.
    Leave {
        stream: u8,
    },
    Limit {
        bytes: Option<u64>,
    },
    Trim {
        keep: u64,
    },
    EmptyCache,
    /// Leaves a block to the relief hook, which frees it when a request would fail.
    Spare {
        block: u16,
    },
    /// Sets the relief hook, or removes it.
    Hook {
        relief: Option<Relief>,
        stream: u8,
    },
    /// Looks at everything: what lies in large-block caches leaves them.
    Look,
    /// Takes a block of another allocator on the same device, or gives one back.
    Other {
        stream: u8,
        bytes: Option<usize>,
    },
    /// Closes the allocator, and goes on with a new one.
    Reopen,
    Reserve {
        stream: u8,
        bytes: usize,
    },
    Mark {
        stream: u8,
    },
    Synchronize,
    ResetPeaks,
    Check,
    /// Completes the next work of some stream.
    Complete {
        pick: u16,
        count: u8,
    },
    CompleteAll,
    Fail {
        call: u8,
        nth: u8,
        times: u8,
        code: u8,
    },
    Mend,
    /// Memory that another process takes.
    Taken {
        bytes: u64,
    },
}

/// Steps with the rest of their fields at random.
impl Op {
    pub fn use_of(block: u16, rng: &mut Rng) -> Op {
        Op::Use {
            block,
            on: rng.next() as u8,
            write: rng.chance(70),
        }
    }

    pub fn record_stream(block: u16, stream: u8, rng: &mut Rng) -> Op {
        Op::RecordStream {
            block,
            stream,
            inside: rng.chance(20),
        }
    }

    pub fn record_use(block: u16, stream: u8, rng: &mut Rng) -> Op {
        Op::RecordUse {
            block,
            stream,
            write: rng.chance(50),
        }
    }

    pub fn wait_of(stream: u8, rng: &mut Rng) -> Op {
        Op::Wait {
            from: stream,
            to: rng.next() as u8,
        }
    }

    pub fn give_back(block: u16, rng: &mut Rng) -> Op {
        if rng.chance(50) {
            Op::Free { block }
        } else {
            Op::Drop { block }
        }
    }
}

/// Calls that a fault may hit; number 0 stands for any call.
pub const CALLS: [&str; 18] = [
    "",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuCtxSynchronize",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxSetCurrent",
];

pub const MIB: u64 = 1 << 20;

/// A random setup and program.
pub fn generate(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed);
    let mode = match rng.below(4) {
        0 => Mode::Instant,
        1 => Mode::Lag(1 + rng.log_uniform(200)),
        _ => Mode::Manual,
    };
    let largest = match rng.below(4) {
        0 => 64 << 10,
        1 => 2 * MIB,
        _ => 64 * MIB,
    };
    let base = (largest * 4).max(64 * MIB);
    let limit = |rng: &mut Rng| base / 4 + rng.below(base);
    let setup = Setup {
        policy,
        mode,
        executed: rng.chance(50),
        memory: if rng.chance(30) {
            base + rng.below(base)
        } else {
            64 << 30
        },
        limit: rng.chance(35).then(|| limit(&mut rng)),
        stream_ids: !rng.chance(15),
        legacy: rng.chance(15),
        per_thread: rng.chance(15),
        tuning: Tuning::default(),
    };
    let streams = 1 + rng.below(8) as usize;
    let blocks = rng.log_uniform(256);
    let faults = rng.chance(35);
    let lifecycle = rng.chance(60);
    let mut ops: Vec<Op> = (1..streams)
        .map(|_| Op::NewStream {
            raw: rng.chance(40),
        })
        .collect();
    let (mut live, mut count) = (0u64, streams as u64);
    while ops.len() < length {
        let block = rng.next() as u16;
        let stream = rng.next() as u8;
        let op = match rng.below(1000) {
            0..330 if live < blocks => {
                live += 1;
                let bytes = rng.log_uniform(largest) as usize;
                let align = if rng.chance(8) {
                    rng.below(22) as u8
                } else {
                    0
                };
                Op::Alloc {
                    stream,
                    bytes,
                    align,
                    raw: rng.chance(50),
                }
            }
            0..460 => {
                live = live.saturating_sub(1);
                Op::give_back(block, &mut rng)
            }
            460..680 => Op::use_of(block, &mut rng),
            680..730 => Op::record_stream(block, stream, &mut rng),
            730..760 => Op::record_use(block, stream, &mut rng),
            760..775 => Op::wait_of(stream, &mut rng),
            775..780 => Op::HostSync { stream },
            780..790 if lifecycle && count < 8 => {
                count += 1;
                Op::NewStream {
                    raw: rng.chance(60),
                }
            }
            790..798 if lifecycle && count > 1 => {
                count -= 1;
                if rng.chance(60) {
                    Op::Retire { stream }
                } else {
                    Op::Leave { stream }
                }
            }
            800..803 => Op::Limit {
                bytes: rng.chance(60).then(|| limit(&mut rng)),
            },
            803..808 => Op::Trim {
                keep: if rng.chance(60) { 0 } else { rng.below(base) },
            },
            808..812 => Op::Reserve {
                stream,
                bytes: rng.log_uniform(largest) as usize,
            },
            812..817 => Op::Mark { stream },
            817..819 => Op::Synchronize,
            819..821 => Op::ResetPeaks,
            821..825 => Op::Check,
            825..832 => Op::FreeBad {
                block,
                kind: [Bad::Foreign, Bad::Interior, Bad::Double][rng.below(3) as usize],
            },
            832..835 => match rng.below(3) {
                0 => Op::Absurd {
                    stream,
                    bytes: 0,
                    alignment: 1,
                },
                1 => Op::Absurd {
                    stream,
                    bytes: usize::MAX - rng.below(1024) as usize,
                    alignment: 1,
                },
                _ => Op::Absurd {
                    stream,
                    bytes: 4096,
                    alignment: [0, 3, 4 << 20][rng.below(3) as usize],
                },
            },
            835..838 => Op::IntoRaw { block },
            838..842 => Op::CompleteAll,
            842..857 if faults => Op::Fail {
                call: rng.below(CALLS.len() as u64) as u8,
                nth: 1 + rng.log_uniform(12) as u8,
                times: 1 + rng.below(2) as u8,
                code: rng.below(3) as u8,
            },
            857..872 if faults => Op::Mend,
            872..874 => Op::Taken {
                bytes: if rng.chance(50) {
                    0
                } else {
                    rng.below(base * 2)
                },
            },
            874..914 => match placed(&mut rng, (block, stream), largest, live < blocks) {
                Some(op) => {
                    live += u64::from(matches!(op, Op::Place { .. } | Op::Cached { .. }));
                    op
                }
                None => continue,
            },
            _ if mode == Mode::Manual => Op::Complete {
                pick: block,
                count: 1 + rng.below(6) as u8,
            },
            _ => continue,
        };
        ops.push(op);
    }
    (setup, ops)
}

/// A wish about a block's place (if one may be made), a guard, or a question.
pub fn placed(rng: &mut Rng, (block, stream): (u16, u8), largest: u64, more: bool) -> Option<Op> {
    let bytes = rng.log_uniform(largest) as usize;
    let (from, part) = (rng.next() as u8, rng.next() as u8);
    Some(match rng.below(40) {
        0..8 if more => Op::Place {
            stream,
            bytes,
            align: 0,
            single: rng.chance(50),
            views: rng.chance(50),
        },
        8..14 if more => Op::Cached { stream, bytes },
        14..22 => Op::Guard { block, from, part },
        22..34 => Op::Unguard { guard: block },
        34..40 => Op::Segments { block, from, part },
        _ => return None,
    })
}

/// A random program of large blocks that fill a limit: what is free is mostly scattered.
pub fn contended(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed ^ 0xc0de);
    let limit = (48 + rng.below(200)) * MIB;
    let full_device = rng.chance(15);
    let setup = Setup {
        policy,
        mode: match rng.below(4) {
            0 => Mode::Instant,
            1 => Mode::Lag(1 + rng.log_uniform(100)),
            _ => Mode::Manual,
        },
        executed: rng.chance(50),
        memory: if full_device { limit } else { 64 << 30 },
        limit: (!full_device).then_some(limit),
        stream_ids: true,
        legacy: false,
        per_thread: false,
        tuning: Tuning::default(),
    };
    let streams = 1 + rng.below(4);
    // What guards keep makes no room.
    let guards = rng.chance(10);
    let faults = rng.chance(30);
    let mut ops: Vec<Op> = (1..streams)
        .map(|_| Op::NewStream {
            raw: rng.chance(30),
        })
        .collect();
    // What is live if nothing is refused, and whether memory is being freed or filled.
    let (mut live, mut freeing): (Vec<u64>, bool) = (Vec::new(), false);
    while ops.len() < length {
        let (block, stream) = (rng.next() as u16, rng.next() as u8);
        let room = (limit / 100 * 96).saturating_sub(live.iter().sum());
        freeing = if freeing {
            room < limit / 4
        } else {
            room < limit / 12
        };
        let op = match rng.below(1000) {
            0..460 if !freeing => {
                // Often more than any piece of what is free.
                let bytes = match rng.below(100) {
                    0..3 => rng.log_uniform(64 << 10),
                    3..6 => room / 100 * (20 + rng.below(40)),
                    _ => room / 100 * (80 + rng.below(18)),
                };
                live.push(bytes);
                Op::Alloc {
                    stream,
                    bytes: bytes.max(1) as usize,
                    align: if rng.chance(5) {
                        rng.below(22) as u8
                    } else {
                        0
                    },
                    raw: rng.chance(30),
                }
            }
            0..460 => {
                if !live.is_empty() {
                    live.swap_remove(usize::from(block) % live.len());
                }
                Op::give_back(block, &mut rng)
            }
            460..700 => Op::use_of(block, &mut rng),
            700..740 => Op::record_stream(block, stream, &mut rng),
            740..760 => Op::record_use(block, stream, &mut rng),
            760..770 => Op::wait_of(stream, &mut rng),
            770..774 => Op::Trim {
                keep: rng.below(limit),
            },
            774..777 => Op::Synchronize,
            777..781 if faults => Op::Fail {
                call: rng.below(CALLS.len() as u64) as u8,
                nth: 1 + rng.log_uniform(8) as u8,
                times: 1 + rng.below(2) as u8,
                code: rng.below(3) as u8,
            },
            781..805 if faults => Op::Mend,
            805..807 => Op::CompleteAll,
            807..813 if guards => {
                match placed(&mut rng, (block, stream), room.clamp(1, limit / 8), false) {
                    Some(op) => op,
                    None => continue,
                }
            }
            _ if setup.mode == Mode::Manual => Op::Complete {
                pick: block,
                count: 1 + rng.below(6) as u8,
            },
            _ => continue,
        };
        ops.push(op);
    }
    (setup, ops)
}
