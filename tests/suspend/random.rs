//! Random programs against a model that says of each block whether its memory is there and what is in it (I8): the
//! simulator reports what touches memory that is away, and calls of the driver fail now and then.

mod memory;

use super::support::*;
use crate::common::rng::Rng;
use cualloc::Tag;
use cualloc::allocator::SegmentHook;

/// How many programs a run has; the full checks set more.
const PROGRAMS: &str = "CUALLOC_SUSPEND_PROGRAMS";
const USUAL: u64 = 30;

/// The program to begin with; 1 if none is named.
const FIRST: &str = "CUALLOC_SUSPEND_SEED";

/// Steps of one program.
const STEPS: usize = 120;

/// Calls that fail in suspensions and their ends.
const CALLS: [&str; 14] = [
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamSynchronize",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuEventQuery",
];

const TAGS: [&str; 2] = ["weights", "cache"];

/// The owner of a block's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// A stream outside of pools.
    Stream,
    Pool(usize),
}

struct Held {
    block: Block,
    home: Home,
    stream: usize,
    /// Its contents; none if they are unknown.
    word: Option<u32>,
    /// A capture left it.
    captured: bool,
}

/// A graph that writes its words into its output.
struct Captured {
    exec: GraphExec,
    pool: usize,
    output: u64,
    bytes: usize,
    word: u32,
}

struct Program<'a> {
    rig: &'a Rig,
    allocator: &'a Allocator,
    random: Rng,
    /// A call may have failed that leaves memory behind which cannot be given back.
    loses: bool,
    streams: [Stream; 3],
    pools: Vec<GraphPool>,
    held: Vec<Held>,
    graphs: Vec<Captured>,
    words: u32,
    /// The suspended memory in the model: everything outside of pools, and each pool.
    arenas: bool,
    away: Vec<bool>,
    peer: bool,
    seen: Seen,
}

/// How often what is not always possible was done.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    down: u64,
    up: u64,
    failed_down: u64,
    failed_up: u64,
    refused: u64,
    kept: u64,
    launched: u64,
}

#[derive(Debug, Clone, Copy)]
enum What {
    All,
    Pool(usize),
    Tag(usize),
}

impl Program<'_> {
    fn word(&mut self) -> u32 {
        self.words += 1;
        self.words
    }

    fn bytes(&mut self) -> usize {
        match self.random.index(5) {
            0 => (self.random.index(40) + 1) * 512,
            1 => (self.random.index(30) + 1) * 64 * KIB,
            2 => (self.random.index(12) + 1) * MIB + 512,
            _ => (self.random.index(8) + 1) * 2 * MIB,
        }
    }

    fn is_there(&self, held: &Held) -> bool {
        match held.home {
            Home::Stream => !self.arenas,
            Home::Pool(pool) => !self.away[pool],
        }
    }

    fn one(&mut self) -> Option<usize> {
        let count = self.held.len();
        (count > 0).then(|| self.random.index(count))
    }

    /// The blocks' contents are what they are said to be.
    fn look(&self, at: usize) {
        let held = &self.held[at];
        if let (true, Some(word)) = (self.is_there(held), held.word) {
            let (ptr, bytes) = (held.block.ptr(), held.block.requested() / 4 * 4);
            let wrong = self
                .rig
                .mismatches(ptr, bytes, word, &self.streams[held.stream]);
            assert_eq!(wrong, 0, "block {word} at {ptr:#x}, {:?}", held.home);
            self.assert_access(ptr);
        }
    }

    /// Access is what the configuration says.
    fn assert_access(&self, ptr: u64) {
        let entered = self.rig.context.enter().unwrap();
        for number in 0..self.rig.driver.device_count().unwrap() {
            let device = self.rig.driver.device(number).unwrap();
            let granted = entered.has_access(ptr, &device).unwrap();
            assert_eq!(granted, number == 0 || (self.peer && number == 1));
        }
    }

    fn write(&mut self, at: usize) {
        if self.is_there(&self.held[at]) {
            let word = self.word();
            let held = &mut self.held[at];
            let bytes = held.block.requested() / 4 * 4;
            let stream = &self.streams[held.stream];
            self.rig.stamp(held.block.ptr(), bytes, word, stream);
            held.word = Some(word);
        }
    }

    // ---- suspension ----------------------------------------------------------------------------------

    fn select(&self, what: What) -> Select<'_> {
        match what {
            What::All => Select::Allocator,
            What::Pool(pool) => Select::Pool(&self.pools[pool]),
            What::Tag(tag) => Select::Tag(Tag::new(TAGS[tag])),
        }
    }

    fn what(&mut self) -> What {
        match self.random.index(4) {
            0 | 1 => What::All,
            2 => What::Pool(self.random.index(self.pools.len())),
            _ => What::Tag(self.random.index(2)),
        }
    }

    /// Has a call fail now and then.
    fn trouble(&mut self) -> bool {
        let Some(sim) = self.rig.maybe_sim() else {
            return false;
        };
        if self.random.index(3) > 0 {
            return false;
        }
        for _ in 0..=self.random.index(2) {
            let call = CALLS[self.random.index(CALLS.len())];
            let code = match self.random.index(2) {
                0 => CUresult::CUDA_ERROR_NOT_PERMITTED,
                _ => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            };
            let plan = FailPlan::call(call, code).unwrap();
            let nth = self.random.index(8) as u64 + 1;
            let plan = plan.nth(nth).times([1, 1, 2, 100][self.random.index(4)]);
            let executed = self.random.chance(50);
            self.loses |= matches!(
                (call, executed),
                ("cuMemCreate", true) | ("cuMemRelease", false)
            );
            sim.fail(if executed { plan.executed() } else { plan });
        }
        true
    }

    fn calm(&self) {
        if let Some(sim) = self.rig.maybe_sim() {
            sim.clear_failures();
        }
    }

    fn is_meant(&self, what: What, held: &Held) -> bool {
        match (what, held.home) {
            (What::All, _) => true,
            (What::Pool(one), Home::Pool(pool)) => one == pool,
            (What::Tag(tag), Home::Pool(pool)) => pool % 2 == tag,
            _ => false,
        }
    }

    /// The suspended memory according to the allocator.
    fn ask(&mut self) {
        for pool in 0..self.pools.len() {
            let select = Select::Pool(&self.pools[pool]);
            self.away[pool] = self.allocator.is_suspended(select).unwrap();
        }
        let any = self.allocator.is_suspended(Select::Allocator).unwrap();
        let others = self.away.iter().any(|away| *away);
        if !any {
            assert!(!others);
            self.arenas = false;
        } else if !others {
            self.arenas = true;
        }
    }

    fn suspend(&mut self) {
        let what = self.what();
        let otherwise = [Contents::Drop, Contents::Pinned, Contents::Host][self.random.index(3)];
        let tagged = [Contents::Drop, Contents::Pinned][self.random.index(2)];
        let keep = Keep::from(otherwise).tag(TAGS[0], tagged);
        let before: Vec<bool> = self.held.iter().map(|held| self.is_there(held)).collect();
        // Work in the order of one pool ends before it goes; no graph is launched meanwhile.
        let failing = self.trouble();
        let done = try_suspend(self.allocator, self.select(what), keep);
        self.calm();
        let all = self.arenas;
        match &done {
            Ok(done) => {
                self.seen.down += 1;
                self.seen.kept += u64::from(done.kept > 0);
                if let What::All = what {
                    self.arenas = true;
                }
            }
            Err(Error::Suspended) => self.seen.refused += 1,
            Err(error) => {
                assert!(failing, "{what:?}: {error:?}");
                self.seen.failed_down += 1;
                if let What::All = what {
                    // Memory that could not be restored stays suspended.
                    let error = self.allocator.allocate(512, &self.streams[0]);
                    self.arenas = matches!(error, Err(Error::Suspended));
                }
            }
        }
        let arenas = self.arenas;
        self.ask();
        self.arenas = arenas;
        if let Err(Error::Suspended) = done {
            assert_eq!(all, self.arenas);
            return;
        }
        for (at, was_there) in before.into_iter().enumerate() {
            let held = &self.held[at];
            let kept = match held.home {
                Home::Pool(pool) if pool % 2 == 0 => tagged,
                _ => otherwise,
            };
            if self.is_meant(what, held) && was_there && kept == Contents::Drop {
                self.held[at].word = None;
            }
        }
    }

    fn resume(&mut self) {
        let what = self.what();
        let failing = self.trouble();
        let done = self.allocator.resume(self.select(what));
        self.calm();
        match done {
            Ok(_) => {
                self.seen.up += 1;
                if let What::All = what {
                    self.arenas = false;
                }
            }
            Err(Error::NotSuspended) => self.seen.refused += 1,
            Err(error) => {
                let short = matches!(error, Error::OutOfMemory(_));
                assert!(failing || short, "{what:?}: {error:?}");
                self.seen.failed_up += 1;
            }
        }
        let arenas = self.arenas;
        self.ask();
        self.arenas = arenas;
    }

    fn step(&mut self) {
        match self.random.index(24) {
            0..=5 => self.allocate(),
            6..=8 => self.free(),
            9 => self.share(),
            10 => self.capture(),
            11 | 12 => self.launch(),
            13..=15 => {
                if let Some(at) = self.one() {
                    self.look(at);
                }
            }
            16 => {
                if let Some(at) = self.one() {
                    self.write(at);
                }
            }
            17 | 18 => self.suspend(),
            19..=21 => self.resume(),
            22 => match self.allocator.trim(0) {
                Ok(_) => assert!(!self.arenas),
                Err(Error::Suspended) => assert!(self.arenas),
                Err(error) => panic!("{error:?}"),
            },
            _ => {
                // A new pool for an old one, of which blocks and graphs may be there still.
                let at = self.random.index(self.pools.len());
                let empty = |held: &Held| held.home != Home::Pool(at);
                if self.held.iter().all(empty) && self.graphs.iter().all(|g| g.pool != at) {
                    await_graphs(&self.pools[at]);
                    let tag = TAGS[at % 2];
                    self.pools[at] = self.allocator.graph_pool_for(tag).unwrap();
                    self.away[at] = false;
                }
            }
        }
    }

    /// Everything comes back, and is what it was.
    fn finish(&mut self) {
        match self.allocator.resume(Select::Allocator) {
            Ok(_) | Err(Error::NotSuspended) => {}
            Err(Error::OutOfMemory(_)) => {
                self.held.truncate(1);
                self.graphs.clear();
                return;
            }
            Err(error) => panic!("{error:?}"),
        }
        self.arenas = false;
        self.ask();
        assert!(!self.arenas);
        (0..self.held.len()).for_each(|at| self.look(at));
    }
}

/// The driver reports the end of destroyed graphs with a short delay.
fn await_graphs(pool: &GraphPool) {
    wait_until("the graphs are gone", || {
        pool.footprint().unwrap().leases == 0
    });
}

fn program(seed: u64, seen: &mut Seen) {
    let sum = std::cell::RefCell::new(*seen);
    let config = SimConfig {
        seed,
        late_destructors: seed.is_multiple_of(2),
        ..SimConfig::with_devices(3, 512 << 20)
    };
    only_on(Policy::Packed, config, |rig| {
        let mut config: Config = match seed % 5 {
            0 => "debug=guard+quarantine:64M+poison".parse().unwrap(),
            _ => Config::new(),
        };
        let sees = |n| {
            let (own, other) = (rig.context.device(), rig.driver.device(n).unwrap());
            other.can_access_peer(own).unwrap()
        };
        let peer = seed.is_multiple_of(3) && rig.driver.device_count().unwrap() > 1 && sees(1);
        if peer {
            config = config.peers([1]);
        }
        if seed % 7 < 3 {
            config = config.limit(Some(160 << 20));
        }
        let allocator = rig.allocator_with(config);
        if let (Some(sim), true) = (rig.maybe_sim(), seed % 4 < 2) {
            sim.set_mode(Mode::Lag(3));
        }
        allocator.add_segment_hook(SegmentHook::new("none", |_, _| {}));
        let pools = [0, 1, 0].map(|tag| allocator.graph_pool_for(TAGS[tag]).unwrap());
        let mut program = Program {
            rig,
            allocator: &allocator,
            random: Rng::new(seed),
            loses: false,
            streams: rig.streams(),
            pools: pools.into(),
            held: Vec::new(),
            graphs: Vec::new(),
            words: 0,
            arenas: false,
            away: vec![false; 3],
            peer,
            seen: *sum.borrow(),
        };
        for step in 0..STEPS {
            program.step();
            if let Some(sim) = rig.maybe_sim() {
                sim.advance_row();
                let reports = sim.reports();
                assert!(reports.is_empty(), "seed {seed}, step {step}: {reports:#?}");
            }
            allocator.check().unwrap();
        }
        program.finish();
        *sum.borrow_mut() = program.seen;
        let Program {
            streams,
            held,
            graphs,
            pools,
            loses,
            ..
        } = program;
        rig.set_mode(Mode::Instant);
        drop(graphs);
        pools.iter().for_each(await_graphs);
        drop((held, pools));
        for stream in &streams {
            rig.settle(stream);
        }
        drop(streams);
        match loses {
            true => rig.end(&allocator),
            false => rig.close(&allocator),
        }
        let leaks = rig.maybe_sim().map(|sim| sim.leaks());
        assert!(leaks.is_none_or(|leaks| (leaks.reservations, leaks.mappings) == (0, 0)));
    });
    *seen = *sum.borrow();
}

#[test]
fn random_programs_suspend_and_resume_memory() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (first, count) = (
        number(FIRST).unwrap_or(1),
        number(PROGRAMS).unwrap_or(USUAL),
    );
    let mut seen = Seen::default();
    for seed in first..first + count {
        eprintln!("seed {seed}");
        program(seed, &mut seen);
    }
    eprintln!("{seen:?}");
    let Seen {
        down,
        up,
        failed_down,
        failed_up,
        refused,
        kept,
        launched,
    } = seen;
    let least = [down, up, refused, kept, launched].into_iter().min();
    assert!(count < USUAL || least > Some(0), "{seen:?}");
    if !on_cuda() && count >= USUAL {
        assert!(failed_down.min(failed_up) > 0, "{seen:?}");
    }
}
