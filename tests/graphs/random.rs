//! Random capture programs (G4): the simulator runs each graph in orders that its edges allow, and the judge of the
//! driver's calls looks at every block. Both know nothing of the allocator.

use super::judged::{Judge, OURS, judged};
use super::support::*;
use cualloc::allocator::{Checkpoint, PoolScope};
use cualloc::driver::{Dependency, Function};
use std::cell::Cell;

/// How many operations a run has; the full checks set more.
const OPERATIONS: &str = "CUALLOC_GRAPH_OPERATIONS";
const USUAL: usize = 100_000;

/// The first seed that counts on, for a long run in parts; 1 if none is named.
const FIRST: &str = "CUALLOC_GRAPH_SEED";

/// Number of operations of one program; the next one has another seed.
const PROGRAM: usize = 2_000;

/// Seeds that once found something, beside the counted ones.
const KEPT: [u64; 5] = [0x9e37, 0x5eed, 0xbad, 0xf00d, 2960];

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

/// The edge that lets the next kernel begin while the last one runs.
const EARLY: sys::CUgraphEdgeData = sys::CUgraphEdgeData {
    from_port: 1,
    to_port: 0,
    type_: 1,
    reserved: [0; 5],
};

/// A capture under way.
struct Capture {
    under_way: Capturing,
    scope: Option<PoolScope>,
    /// Streams that are in it.
    joined: Vec<usize>,
    /// Its blocks, each with its own stream, and others that used it.
    own: Vec<(Block, usize, Vec<usize>)>,
}

/// A program under way. The last stream is known by its handle alone.
struct Program<'a> {
    rig: &'a Rig,
    judge: &'a Judge,
    allocator: &'a Allocator,
    pool: &'a GraphPool,
    random: Random,
    streams: [Stream; 4],
    fill: &'a Function,
    /// Blocks and the stream that uses each.
    live: Vec<(Block, usize)>,
    /// Blocks that a request outside of captures got from the pool, with what is in them.
    outside: Vec<(Block, usize, u32)>,
    points: Vec<Checkpoint>,
    execs: Vec<GraphExec>,
    /// Executables are launched. Else the simulator runs nothing of a graph, and sees nothing wrong with it.
    launches: bool,
    /// Requests outside of captures get the memory of graphs; no such block is live during a launch.
    reuses: bool,
    operations: usize,
    seen: Seen,
}

/// How often what is not always possible was done.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Seen {
    operations: usize,
    restored: usize,
    outside: usize,
    early: usize,
    left: usize,
    judged: usize,
}

impl<'a> Program<'a> {
    /// A block of the pool, all its bytes written.
    fn used(&self, bytes: usize, stream: usize) -> Block {
        let from = (self.rig, self.allocator);
        self.judge.used(OURS, from, bytes, &self.streams[stream])
    }

    fn free(&self, block: Block) {
        self.judge.free(block);
    }

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
        let mut capture = Capture {
            under_way: Capturing::begin(&self.streams[main], MODE),
            scope: Some(scope),
            joined: vec![main],
            own: Vec::new(),
        };
        for _ in 0..self.random.below(60) + 4 {
            self.operations += 1;
            self.captured(&mut capture);
            self.judge.finds_nothing("in a capture");
        }
        let Capture {
            under_way,
            scope,
            joined,
            own,
        } = capture;
        let fails = joined.len() > 1 && self.random.below(8) == 0;
        let left = if fails { main } else { usize::MAX };
        for stream in joined.iter().copied().filter(|stream| *stream != left) {
            if stream != main && !fails {
                self.streams[main].wait_for(&self.streams[stream]).unwrap();
            }
        }
        match under_way.end() {
            Ok(graph) => self.execs.extend(graph.instantiate()),
            Err(error) => assert!(fails, "{error}"),
        }
        drop(scope);
        // Outputs, which a later launch may overwrite.
        for (block, stream, _) in own {
            match self.random.0.is_multiple_of(3) {
                true => self.live.push((block, stream)),
                false => self.free(block),
            }
        }
    }

    /// Something in a capture.
    fn captured(&mut self, capture: &mut Capture) {
        let Capture {
            scope, joined, own, ..
        } = capture;
        let stream = joined[self.random.below(joined.len())];
        match self.random.below(16) {
            0..=4 if scope.is_some() => {
                let bytes = self.bytes();
                let block = self.used(bytes, stream);
                own.push((block, stream, Vec::new()));
            }
            5..=7 if !own.is_empty() => {
                let (block, ..) = own.swap_remove(self.random.below(own.len()));
                match self.random.below(8) {
                    0 => std::thread::scope(|threads| {
                        let judge = self.judge.clone();
                        threads.spawn(move || judge.free(block));
                    }),
                    _ => self.free(block),
                }
            }
            8 if !own.is_empty() => {
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
                    self.judge.recorded(block, &self.streams[stream]);
                    users.push(stream);
                    // Later work of the owner is ordered after it.
                    if scope.is_none() || self.random.below(2) == 0 {
                        self.streams[*home].wait_for(&self.streams[stream]).unwrap();
                        users.clear();
                    } else {
                        let (block, ..) = own.swap_remove(at);
                        self.free(block);
                    }
                }
            }
            9 => {
                let fresh = self.random.below(4);
                self.streams[fresh].wait_for(&self.streams[stream]).unwrap();
                if !joined.contains(&fresh) {
                    joined.push(fresh);
                }
            }
            10 if scope.is_some() => self.early(joined, stream),
            11 if scope.is_some() => self.set_back(stream),
            12 if !self.live.is_empty() => {
                let at = self.random.below(self.live.len());
                let (block, _) = self.live.swap_remove(at);
                self.free(block);
            }
            13 if self.random.below(24) == 0 => {
                drop(scope.take());
                self.seen.left += 1;
            }
            _ => {
                let other = joined[self.random.below(joined.len())];
                if other != stream {
                    self.streams[stream].wait_for(&self.streams[other]).unwrap();
                }
            }
        }
    }

    /// The dependencies of a stream's next node.
    fn present(&self, stream: usize) -> Vec<Dependency> {
        let info = self.streams[stream].capture_info().unwrap();
        info.unwrap().dependencies
    }

    fn depend(&self, stream: usize, on: &[Dependency], add: bool) {
        let raw = self.streams[stream].raw();
        // SAFETY: nodes of the stream's capture.
        unsafe { self.rig.driver.set_capture_dependencies(raw, on, add) }.unwrap();
    }

    /// A block that a kernel writes, the only kind of node behind which others may begin early.
    fn used_by_kernel(&self, bytes: usize, stream: usize) -> Block {
        let stream = &self.streams[stream];
        let block = self.allocator.allocate(bytes, stream).unwrap();
        self.judge.handed_out(OURS, &block, stream);
        let (ptr, words, seed) = (block.ptr(), bytes as u64 / 4, bytes as u32);
        // SAFETY: the kernel writes the block, and its module outlives the program.
        unsafe {
            self.fill
                .launch(stream, [8, 1, 1], [256, 1, 1], 0, &[&ptr, &words, &seed])
        }
        .unwrap();
        block
    }

    /// A kernel of another stream begins while one of this stream, which used freed memory, may run.
    fn early(&mut self, joined: &mut Vec<usize>, stream: usize) {
        let (bytes, other) = (self.bytes(), self.random.below(4));
        if other != stream {
            self.streams[other].wait_for(&self.streams[stream]).unwrap();
            if !joined.contains(&other) {
                joined.push(other);
            }
        }
        self.free(self.used_by_kernel(bytes, stream));
        if other != stream {
            let last = self.present(stream);
            let early: Vec<_> = last.iter().map(|on| on.with_edge(EARLY)).collect();
            self.depend(other, &early, true);
            self.free(self.used_by_kernel(bytes, other));
            self.seen.early += 1;
        }
    }

    /// A stream is set back, so that what it did last runs beside what it does next; then it is behind both.
    fn set_back(&mut self, stream: usize) {
        let before = self.present(stream);
        if before.is_empty() {
            return;
        }
        let bytes = self.bytes();
        self.free(self.used(bytes, stream));
        let branch = self.present(stream);
        self.depend(stream, &before, false);
        self.free(self.used(bytes, stream));
        self.depend(stream, &branch, true);
    }

    /// A request outside of captures for the pool's memory.
    fn outside(&mut self) {
        let bytes = self.bytes();
        let stream = self.random.below(4);
        let scope = self.pool.enter(Scope::Thread).unwrap();
        let block = self.used(bytes, stream);
        drop(scope);
        self.outside.push((block, stream, bytes as u32));
    }

    /// One of them goes; no launch has touched it.
    fn look_outside(&mut self) {
        if !self.outside.is_empty() {
            let at = self.random.below(self.outside.len());
            let (block, stream, word) = self.outside.swap_remove(at);
            let (stream, bytes) = (&self.streams[stream], block.requested());
            assert_eq!(self.rig.mismatches(block.ptr(), bytes, word, stream), 0);
            self.free(block);
            self.seen.outside += 1;
        }
    }

    /// Comes back to an earlier time, if no capture is under way, with or without work in flight.
    fn restore(&mut self) {
        let at = self.random.below(self.points.len());
        if self.random.below(2) == 0 {
            for stream in &self.streams {
                stream.synchronize().unwrap();
            }
        }
        // SAFETY: blocks that cease are only freed.
        let restored = match unsafe { self.pool.restore(&self.points[at]) } {
            Ok(restored) => restored,
            Err(Error::GraphPool(_)) => return,
            Err(error) => panic!("{error:?}"),
        };
        self.seen.restored += 1;
        self.judge.restored(&restored.ceased, &restored.revived);
        let gone = |block: &Block| restored.ceased.contains(&block.ptr());
        let live = std::mem::take(&mut self.live);
        let outside = std::mem::take(&mut self.outside);
        let mut lost = Vec::new();
        for (block, stream) in live {
            match gone(&block) {
                true => lost.push(block),
                false => self.live.push((block, stream)),
            }
        }
        for (block, stream, word) in outside {
            match gone(&block) {
                true => lost.push(block),
                false => self.outside.push((block, stream, word)),
            }
        }
        for block in lost {
            let error = block.free().unwrap_err();
            assert_matches!(error.error, Error::NotLive { .. });
            std::mem::forget(error);
        }
        let revived = restored.revived.into_iter();
        self.live.extend(revived.map(|block| (block, 0)));
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
        if !self.launches {
            return drop(self.execs.swap_remove(exec));
        }
        while self.reuses && !self.outside.is_empty() {
            self.look_outside();
        }
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
        match self.random.below(10) {
            0..=2 => self.capture(),
            3 | 4 => self.launch(),
            5 => self.outside(),
            6 => self.look_outside(),
            7 if self.points.len() < 3 => {
                self.operations += 1;
                self.points.push(self.pool.checkpoint().unwrap());
            }
            7 => {
                self.operations += 1;
                self.restore();
            }
            8 if !self.live.is_empty() => {
                self.operations += 1;
                let at = self.random.below(self.live.len());
                let (block, _) = self.live.swap_remove(at);
                self.free(block);
            }
            _ => {
                self.operations += 1;
                // Work outside of captures and of the pool.
                let bytes = self.bytes();
                let stream = self.random.below(4);
                let from = (self.rig, self.allocator);
                let block = self.judge.used(None, from, bytes, &self.streams[stream]);
                self.free(block);
            }
        }
    }
}

fn program(seed: u64, launches: bool) -> Seen {
    let seen = Cell::new(Seen::default());
    judged(|rig, judge| {
        let module = rig.words();
        let fill = module.function(c"cualloc_fill").unwrap();
        let allocator = rig.checked();
        let pool = allocator.graph_pool().unwrap();
        let reuses = launches && seed.is_multiple_of(3);
        if reuses {
            // SAFETY: before a launch the program reads and frees the blocks that it allocated outside of captures.
            unsafe { pool.reuse_graph_memory() }.unwrap();
            judge.reuses_graph_memory();
        }
        let raw = RawStream::new(rig);
        let [one, two, three] = rig.streams();
        let mut program = Program {
            rig,
            judge,
            allocator: &allocator,
            pool: &pool,
            random: Random(seed),
            streams: [one, two, three, raw.borrowed()],
            fill: &fill,
            live: Vec::new(),
            outside: Vec::new(),
            points: Vec::new(),
            execs: Vec::new(),
            launches,
            reuses,
            operations: 0,
            seen: Seen::default(),
        };
        let mut looks = 0;
        while program.operations < PROGRAM {
            program.step();
            judge.finds_nothing(&format!("seed {seed:#x}"));
            looks += 1;
            assert!(looks < 100 * PROGRAM, "steps without operations");
            if looks % 16 == 0 && launches {
                allocator.check().unwrap();
                let reports = rig.sim().map(|sim| sim.reports()).unwrap_or_default();
                assert!(reports.is_empty(), "seed {seed:#x}: {reports:#?}");
            }
        }
        seen.set(Seen {
            operations: program.operations,
            judged: judge.blocks() as usize,
            ..program.seen
        });
        let Program {
            live,
            outside,
            execs,
            streams,
            ..
        } = program;
        let outside = outside.into_iter().map(|(block, ..)| block);
        let blocks = live.into_iter().map(|(block, _)| block).chain(outside);
        blocks.for_each(|block| judge.free(block));
        drop(execs);
        streams
            .iter()
            .for_each(|stream| stream.synchronize().unwrap());
        // A stream that nothing is known of has nothing to leave.
        let _retired = allocator.retire(&streams[3]);
        drop(streams);
        raw.destroy();
        await_leases(&allocator, &pool, 0);
    });
    seen.get()
}

#[test]
fn no_two_uses_of_memory_overlap_in_random_captures() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let wanted = number(OPERATIONS).map_or(USUAL, |wanted| wanted as usize);
    let (mut all, mut last) = (Seen::default(), 0);
    for seed in KEPT.into_iter().chain(number(FIRST).unwrap_or(1)..) {
        if all.operations >= wanted {
            break;
        }
        let seen = program(seed, true);
        all.operations += seen.operations;
        all.restored += seen.restored;
        all.outside += seen.outside;
        all.early += seen.early;
        all.left += seen.left;
        all.judged += seen.judged;
        last = seed;
    }
    let Seen {
        restored,
        outside,
        early,
        left,
        ..
    } = all;
    eprintln!("{all:?}, the last seed was {last:#x}");
    assert!(restored.min(outside).min(early).min(left) > 0, "{all:?}");
}

/// Graphs that are not launched have no visible effect: here the judge alone detects errors.
#[test]
fn captures_that_are_not_launched_are_judged_by_the_calls_alone() {
    for seed in 1..=10 {
        let seen = program(seed, false);
        assert!(on_cuda() || seen.judged > 100, "seed {seed}: {seen:?}");
    }
}
