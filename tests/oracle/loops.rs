//! Random programs that repeat themselves.

use cualloc::Policy;
use cualloc::sim::Mode;

use super::program::{CALLS, MIB, Op, Relief, Setup, Tuning, placed};
use super::rng::Rng;

/// Chosen once for a program.
struct ReusePredictor {
    /// The sizes that are asked for.
    sizes: Vec<u64>,
    largest: u64,
    base: u64,
    faults: bool,
    guards: bool,
    /// A second allocator works beside the first.
    other: bool,
    manual: bool,
}

impl ReusePredictor {
    fn size(&self, rng: &mut Rng) -> usize {
        let size = self.sizes[rng.below(self.sizes.len() as u64) as usize];
        // The next one up is of another bin.
        size as usize + if rng.chance(3) { 512 } else { 0 }
    }

    fn limit(&self, rng: &mut Rng) -> u64 {
        self.base / 8 + rng.below(self.base)
    }
}

fn tuning(rng: &mut Rng, policy: Policy, limit: Option<u64>) -> Tuning {
    let capture_checks = rng.chance(10);
    if policy == Policy::Classic {
        return Tuning {
            capture_checks,
            ..Tuning::default()
        };
    }
    let views = !rng.chance(10);
    Tuning {
        views,
        capture_checks,
        slack: rng.chance(15).then(|| rng.below(100) as f64 / 100.0),
        // So that the last level is reached.
        budget: (views && rng.chance(40)).then(|| 1 + rng.log_uniform(200)),
        handle: Some((2 * MIB) << rng.below(5))
            .filter(|handle| rng.chance(25) && limit.is_none_or(|limit| limit >= *handle)),
    }
}

/// A random setup and a program whose body is run again and again, with small changes.
pub fn repeating(seed: u64, policy: Policy, length: usize) -> (Setup, Vec<Op>) {
    let mut rng = Rng::new(seed ^ 0x0010_0b5e);
    let mode = match rng.below(4) {
        0 => Mode::Instant,
        1 => Mode::Lag(1 + rng.log_uniform(200)),
        _ => Mode::Manual,
    };
    let largest = [64 << 10, 2 * MIB, 32 * MIB, 64 * MIB][rng.below(4) as usize];
    let alike = rng.chance(50);
    let predictor = ReusePredictor {
        sizes: (0..1 + rng.below(12))
            .map(|_| match alike {
                true => largest / 16 + rng.below(largest - largest / 16),
                false => rng.log_uniform(largest),
            })
            .collect(),
        largest,
        base: (largest * 4).max(64 * MIB),
        faults: rng.chance(25),
        guards: rng.chance(30),
        other: rng.chance(30),
        manual: mode == Mode::Manual,
    };
    let limit = rng.chance(40).then(|| predictor.limit(&mut rng));
    let setup = Setup {
        policy,
        mode,
        executed: rng.chance(50),
        memory: if rng.chance(30) {
            predictor.base + rng.below(predictor.base)
        } else {
            64 << 30
        },
        limit,
        stream_ids: !rng.chance(8),
        legacy: rng.chance(8),
        per_thread: rng.chance(8),
        tuning: tuning(&mut rng, policy, limit),
    };
    let mut ops: Vec<Op> = (0..rng.below(6))
        .map(|_| Op::NewStream {
            raw: rng.chance(30),
        })
        .collect();
    let tight = rng.chance(35);
    while ops.len() < length {
        let body = body(&mut rng, &predictor);
        if tight {
            // Room for what is live, and little more: what is free is scattered.
            let peak = peak(&body) / 100 * (100 + rng.below(30));
            let bytes = Some(peak.max(4 * MIB));
            ops.push(Op::Limit { bytes });
        }
        for _ in 0..1 + rng.log_uniform(24) {
            for op in &body {
                match rng.below(100) {
                    0 => {}
                    1..3 => ops.extend(work(&mut rng, &predictor)),
                    3..6 => ops.extend(event(&mut rng, &predictor)),
                    _ => ops.push(*op),
                }
            }
            ops.extend(event(&mut rng, &predictor));
        }
    }
    ops.truncate(length);
    (setup, ops)
}

/// Most bytes that are live at once if nothing else is.
fn peak(body: &[Op]) -> u64 {
    let (mut live, mut peak) = (Vec::new(), 0);
    for op in body {
        let sum: u64 = live.iter().sum();
        match *op {
            Op::Alloc { bytes, .. } => {
                live.push(bytes as u64);
                peak = peak.max(sum + bytes as u64);
            }
            Op::Again { bytes, .. } => peak = peak.max(sum + bytes as u64),
            Op::Free { block } | Op::Drop { block } if !live.is_empty() => {
                live.swap_remove(usize::from(block) % live.len());
            }
            _ => {}
        }
    }
    peak
}

/// As many blocks are taken as are given back.
fn body(rng: &mut Rng, predictor: &ReusePredictor) -> Vec<Op> {
    let most = 1 + rng.log_uniform(40);
    let (mut body, mut left, mut live) = (Vec::new(), most, 0);
    while left + live > 0 {
        let (stream, block) = (rng.next() as u8, rng.next() as u16);
        match rng.below(100) {
            0..35 if left > 0 => {
                (left, live) = (left - 1, live + 1);
                body.push(Op::Alloc {
                    stream,
                    bytes: predictor.size(rng),
                    align: if rng.chance(5) {
                        rng.below(22) as u8
                    } else {
                        0
                    },
                    raw: rng.chance(30),
                });
            }
            35..60 if live > 0 => {
                live -= 1;
                body.push(match rng.below(2) {
                    0 => Op::Free { block },
                    _ => Op::Drop { block },
                });
            }
            60.. => body.extend(work(rng, predictor)),
            _ => {}
        }
    }
    body
}

/// What programs do beside taking and giving back.
fn work(rng: &mut Rng, predictor: &ReusePredictor) -> Option<Op> {
    let (stream, block) = (rng.next() as u8, rng.next() as u16);
    Some(match rng.below(100) {
        0..40 => Op::use_of(block, rng),
        40..50 => Op::record_stream(block, stream, rng),
        50..56 => Op::record_use(block, stream, rng),
        56..60 => Op::wait_of(stream, rng),
        60..75 => Op::Again {
            stream,
            bytes: predictor.size(rng),
            times: rng.below(6) as u8,
        },
        78..84 if predictor.other => Op::Other {
            stream,
            bytes: rng.chance(50).then(|| predictor.size(rng)),
        },
        75..78 => Op::Cached {
            stream,
            bytes: predictor.size(rng),
        },
        _ if predictor.manual => Op::Complete {
            pick: block,
            count: 1 + rng.below(6) as u8,
        },
        _ => return None,
    })
}

/// What happens between two runs of a body.
fn event(rng: &mut Rng, predictor: &ReusePredictor) -> Option<Op> {
    let (stream, block) = (rng.next() as u8, rng.next() as u16);
    let bytes = predictor.size(rng);
    Some(match rng.below(100) {
        0..8 => Op::Limit {
            bytes: rng.chance(70).then(|| predictor.limit(rng)),
        },
        8..13 => Op::Trim {
            keep: if rng.chance(50) {
                0
            } else {
                rng.below(predictor.base)
            },
        },
        13..20 => Op::EmptyCache,
        20..28 => Op::Spare { block },
        28..36 => Op::Hook {
            relief: rng.chance(85).then(|| {
                [
                    Relief::Nothing,
                    Relief::All,
                    Relief::Trim,
                    Relief::Synchronize,
                    Relief::Allocate,
                ][rng.below(5) as usize]
            }),
            stream,
        },
        36..44 => Op::Place {
            stream,
            bytes,
            align: if rng.chance(40) {
                rng.below(22) as u8
            } else {
                0
            },
            single: rng.chance(60),
            views: rng.chance(50),
        },
        44..52 if predictor.guards => placed(rng, (block, stream), predictor.largest, false)?,
        52..56 => Op::NewStream {
            raw: rng.chance(50),
        },
        56..59 => Op::Retire { stream },
        59..61 => Op::Leave { stream },
        61..66 => Op::Reserve { stream, bytes },
        66..69 => Op::Mark { stream },
        69..72 => Op::Synchronize,
        72..74 => Op::HostSync { stream },
        74..76 => Op::ResetPeaks,
        76..79 => Op::Look,
        79 => Op::Reopen,
        80..83 => Op::CompleteAll,
        83..85 => Op::IntoRaw { block },
        85..87 => Op::Taken {
            bytes: if rng.chance(50) {
                0
            } else {
                rng.below(predictor.base * 2)
            },
        },
        87..93 if predictor.faults => Op::Fail {
            call: rng.below(CALLS.len() as u64) as u8,
            nth: 1 + rng.log_uniform(12) as u8,
            times: 1 + rng.below(2) as u8,
            code: rng.below(3) as u8,
        },
        93..99 if predictor.faults => Op::Mend,
        _ => return None,
    })
}
