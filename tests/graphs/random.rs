//! Random capture programs (G4): the simulator runs each graph in orders that its edges allow, and is the oracle.

use super::support::*;
use std::cell::Cell;

/// How many operations a run has; the full checks set more.
const OPERATIONS: &str = "CUALLOC_GRAPH_OPERATIONS";
const USUAL: usize = 100_000;

/// Operations of one program, after which it is begun anew with another seed.
const PROGRAM: usize = 2_000;

/// Seeds that once found something, beside the counted ones.
const KEPT: [u64; 4] = [0x9e37, 0x5eed, 0xbad, 0xf00d];

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        // A linear congruence, of which the high half counts.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }
}

/// A program under way.
struct Program<'a> {
    rig: &'a Rig,
    allocator: &'a Allocator,
    pool: &'a GraphPool,
    random: Random,
    streams: [Stream; 4],
    /// Blocks and the stream that uses each.
    live: Vec<(Block, usize)>,
    execs: Vec<GraphExec>,
    operations: usize,
}

impl Program<'_> {
    fn bytes(&mut self) -> usize {
        match self.random.below(4) {
            0 => (self.random.below(40) + 1) * 512,
            1 => (self.random.below(30) + 1) * 64 * KIB,
            _ => (self.random.below(24) + 1) * 512 * KIB + 512,
        }
    }

    /// A capture with forks, joins, records and frees; now and then one that fails.
    fn capture(&mut self) {
        let scope = self.pool.enter(Scope::NextCapture).unwrap();
        let main = self.random.below(4);
        self.streams[main].begin_capture(MODE).unwrap();
        let mut joined = vec![main];
        let mut own: Vec<(Block, usize, Vec<usize>)> = Vec::new();
        for _ in 0..self.random.below(60) + 4 {
            self.operations += 1;
            let stream = joined[self.random.below(joined.len())];
            match self.random.below(10) {
                0..=3 => {
                    let bytes = self.bytes();
                    let block = used(self.rig, self.allocator, bytes, &self.streams[stream]);
                    own.push((block, stream, Vec::new()));
                }
                4..=6 if !own.is_empty() => {
                    let at = self.random.below(own.len());
                    drop(own.swap_remove(at));
                }
                7 if !own.is_empty() => {
                    // Another stream of the capture uses a block, behind its own.
                    let at = self.random.below(own.len());
                    let (block, home, users) = &mut own[at];
                    if stream != *home {
                        self.streams[stream].wait_for(&self.streams[*home]).unwrap();
                        for user in users.iter().filter(|user| **user != stream) {
                            self.streams[stream].wait_for(&self.streams[*user]).unwrap();
                        }
                        let bytes = block.requested();
                        self.rig.stamp(block.ptr(), bytes, 9, &self.streams[stream]);
                        block.record_stream(&self.streams[stream]).unwrap();
                        users.push(stream);
                        // What the owner gives it from here on comes behind.
                        self.streams[*home].wait_for(&self.streams[stream]).unwrap();
                    }
                }
                8 => {
                    let fresh = self.random.below(4);
                    self.streams[fresh].wait_for(&self.streams[stream]).unwrap();
                    if !joined.contains(&fresh) {
                        joined.push(fresh);
                    }
                }
                _ => {
                    let other = joined[self.random.below(joined.len())];
                    if other != stream {
                        self.streams[stream].wait_for(&self.streams[other]).unwrap();
                    }
                }
            }
        }
        let fails = joined.len() > 1 && self.random.below(8) == 0;
        let left = if fails { main } else { usize::MAX };
        for stream in joined.iter().copied().filter(|stream| *stream != left) {
            if stream != main && !fails {
                self.streams[main].wait_for(&self.streams[stream]).unwrap();
            }
        }
        match self.streams[main].end_capture() {
            Ok(graph) => self.execs.extend(graph.instantiate()),
            Err(error) => assert!(fails, "{error}"),
        }
        scope.leave().unwrap();
        // Outputs: what some later launch may write anew.
        let kept = own.into_iter().filter(|_| self.random.0.is_multiple_of(3));
        self.live
            .extend(kept.map(|(block, stream, _)| (block, stream)));
    }

    /// One graph at a time, each behind the ones before: the promise.
    fn launch(&mut self) {
        self.operations += 1;
        let count = self.execs.len();
        if count == 0 {
            return;
        }
        let exec = self.random.below(count);
        let stream = self.random.below(4);
        for other in 0..4 {
            if other != stream {
                self.streams[stream].wait_for(&self.streams[other]).unwrap();
            }
        }
        launch(&mut self.execs[exec], &self.streams[stream]);
        for other in 0..4 {
            if other != stream {
                self.streams[other].wait_for(&self.streams[stream]).unwrap();
            }
        }
        if count > 12 {
            drop(self.execs.swap_remove(exec));
        }
    }

    fn step(&mut self) {
        match self.random.below(6) {
            0 | 1 => self.capture(),
            2 | 3 => self.launch(),
            4 if !self.live.is_empty() => {
                self.operations += 1;
                let at = self.random.below(self.live.len());
                drop(self.live.swap_remove(at));
            }
            _ => {
                self.operations += 1;
                // Work outside of captures and of the pool.
                let bytes = self.bytes();
                let stream = self.random.below(4);
                drop(used(self.rig, self.allocator, bytes, &self.streams[stream]));
            }
        }
    }
}

fn program(seed: u64) -> usize {
    let operations = Cell::new(0);
    packed(|rig| {
        let allocator = rig.allocator();
        let pool = allocator.graph_pool().unwrap();
        let mut program = Program {
            rig,
            allocator: &allocator,
            pool: &pool,
            random: Random(seed),
            streams: rig.streams(),
            live: Vec::new(),
            execs: Vec::new(),
            operations: 0,
        };
        let mut looks = 0;
        while program.operations < PROGRAM {
            program.step();
            looks += 1;
            if looks % 16 == 0 {
                allocator.check().unwrap();
                let reports = rig.sim().map(|sim| sim.reports()).unwrap_or_default();
                assert!(reports.is_empty(), "seed {seed:#x}: {reports:#?}");
            }
        }
        operations.set(program.operations);
        let Program {
            live,
            execs,
            streams,
            ..
        } = program;
        drop((live, execs));
        streams
            .iter()
            .for_each(|stream| stream.synchronize().unwrap());
        drop(pool);
        rig.close(&allocator);
    });
    operations.get()
}

#[test]
fn no_two_uses_of_memory_meet_in_random_captures() {
    let wanted = std::env::var(OPERATIONS)
        .ok()
        .and_then(|text| text.parse().ok());
    let wanted: usize = wanted.unwrap_or(USUAL);
    let mut done: usize = KEPT.into_iter().map(program).sum();
    let mut seed = 1;
    while done < wanted {
        done += program(seed);
        seed += 1;
    }
}
