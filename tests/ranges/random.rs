//! Random programs of commits, decommits, ordinary requests, frees, suspensions and captures, with failing driver calls,
//! under the judge of the driver's calls, against a model that knows the contents of each granule and block.

use super::support::*;
use crate::checker::table::{Checker, Fault, install};
use crate::common::rng::Rng;
use cualloc::driver::GraphExec;
use cualloc::driver::sys::CuFunctions;
use std::cell::RefCell;

/// How many operations a run has; the full checks set more.
const OPERATIONS: &str = "CUALLOC_RANGE_OPERATIONS";
const USUAL: u64 = 10_000;

/// The program to begin with; 1 if none is named.
const FIRST: &str = "CUALLOC_RANGE_SEED";

/// Operations of one program.
const STEPS: u64 = 500;

const SPAN: u64 = 12;

/// Calls that fail.
const CALLS: [&str; 7] = [
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuEventRecord",
    "cuEventQuery",
];

/// A granule that the program may use: the stream that its uses are ordered by, and its contents.
#[derive(Debug, Clone, Copy)]
struct Page {
    stream: usize,
    /// Another stream that uses it, recorded, and behind which the first one is not.
    shared: Option<usize>,
    word: Option<u32>,
}

struct Held {
    range: Range,
    stripes: u64,
    pages: Vec<Option<Page>>,
    away: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    commits: u64,
    refused: u64,
    decommits: u64,
    shared: u64,
    blocks: u64,
    short: u64,
    suspended: u64,
    captured: u64,
    failed: u64,
}

struct Program<'a> {
    rig: &'a Rig,
    allocator: &'a Allocator,
    judge: Option<Arc<Checker>>,
    random: Rng,
    streams: [Stream; 3],
    ranges: Vec<Held>,
    blocks: Vec<(Block, usize, u32)>,
    words: u32,
    failing: bool,
    seen: Seen,
}

impl Program<'_> {
    fn word(&mut self) -> u32 {
        self.words += 1;
        self.words
    }

    fn cells(held: &Held, page: u64) -> impl Iterator<Item = u64> {
        let base = held.range.base() + page * GRANULE;
        (0..held.stripes).map(move |stripe| base + stripe * 2 * SPAN * GRANULE)
    }

    fn handed_out(&self, ptr: u64, bytes: u64, stream: usize) {
        if let Some(judge) = &self.judge {
            let mut tracker = judge.tracker();
            let stream = tracker.number(self.streams[stream].raw());
            tracker.handed_out_of(None, ptr, bytes, stream);
        }
    }

    fn freed(&self, ptr: u64) {
        if let Some(judge) = &self.judge {
            judge.tracker().freed(ptr);
        }
    }

    fn recorded(&self, ptr: u64, stream: usize) {
        if let Some(judge) = &self.judge {
            let mut tracker = judge.tracker();
            let stream = tracker.number(self.streams[stream].raw());
            tracker.recorded(ptr, stream);
        }
    }

    /// Has calls fail now and then.
    fn trouble(&mut self) {
        self.failing = self.judge.is_some() && self.random.chance(25);
        let Some(judge) = self.judge.as_ref().filter(|_| self.failing) else {
            return;
        };
        let name = CALLS[self.random.index(CALLS.len())];
        let executed = self.random.chance(40);
        let code = match self.random.chance(50) {
            true => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            false => CUresult::CUDA_ERROR_NOT_PERMITTED,
        };
        judge.fail(Some(Fault {
            name,
            permille: 300,
            code,
            executed,
        }));
    }

    fn calm(&self) {
        if let Some(judge) = &self.judge {
            judge.fail(None);
        }
    }

    fn expected(&mut self, error: &Error) {
        match error {
            Error::OutOfMemory(_) => self.seen.refused += 1,
            Error::Driver(_) if self.failing => self.seen.failed += 1,
            error => panic!("{error:?}"),
        }
    }

    fn span(&mut self) -> (u64, u64) {
        let first = self.random.below(SPAN);
        (first, (first + 1 + self.random.below(4)).min(SPAN))
    }

    // ---- ranges ------------------------------------------------------------------------------

    fn commit(&mut self, capturing: bool) {
        let (at, stream) = (self.random.index(self.ranges.len()), self.random.index(3));
        let (first, end) = self.span();
        let on = self.streams[stream].clone();
        let under_way = capturing.then(|| Capturing::begin(&on, MODE));
        self.trouble();
        let held = &self.ranges[at];
        let done = held.range.commit(granules(first, end), &on);
        self.calm();
        let missing = |held: &Held| -> Vec<u64> {
            (first..end)
                .filter(|page| held.pages[*page as usize].is_none())
                .collect()
        };
        let missing = missing(held);
        let word = self.word();
        if let Err(error) = &done {
            match error {
                Error::Suspended => assert!(self.ranges[at].away),
                error => self.expected(error),
            }
        } else {
            assert!(!self.ranges[at].away);
            self.seen.commits += 1;
            for page in &missing {
                for ptr in Self::cells(&self.ranges[at], *page).collect::<Vec<_>>() {
                    self.handed_out(ptr, GRANULE, stream);
                    self.rig.stamp(ptr, GRANULE as usize, word, &on);
                }
            }
        }
        if let Some(under_way) = under_way {
            let graph = under_way.end().unwrap();
            if done.is_ok() {
                let mut exec: GraphExec = graph.instantiate().unwrap();
                // SAFETY: the simulator and the judge report what is wrong with the memory.
                unsafe { exec.launch(&on) }.unwrap();
                self.seen.captured += 1;
                // The capture has no lease, so the launch ends before anything else uses the memory.
                self.rig.set_mode(Mode::Instant);
                on.synchronize().unwrap();
                self.rig.set_mode(Mode::Lag(6));
            }
        }
        if done.is_ok() {
            for page in missing {
                self.ranges[at].pages[page as usize] = Some(Page {
                    stream,
                    shared: None,
                    word: Some(word),
                });
            }
        }
        self.compare(at);
    }

    /// The range has memory where the model has.
    fn compare(&self, at: usize) {
        let held = &self.ranges[at];
        let map = held.range.committed_map().unwrap();
        let pages = held.pages.iter().enumerate();
        let known = pages.fold(0u64, |map, (page, has)| {
            map | u64::from(has.is_some()) << page
        });
        assert_eq!(map, [known]);
    }

    fn decommit(&mut self) {
        let (at, stream) = (self.random.index(self.ranges.len()), self.random.index(3));
        let (first, end) = self.span();
        if self.ranges[at].away {
            let refused = self.ranges[at]
                .range
                .decommit(granules(first, end), &self.streams[stream]);
            assert_matches!(refused, Err(Error::Suspended));
            return;
        }
        let pages: Vec<(u64, Page)> = (first..end)
            .filter_map(|page| Some((page, self.ranges[at].pages[page as usize]?)))
            .collect();
        // The stream is ordered behind all uses but those that were recorded.
        for (_, page) in &pages {
            if page.stream != stream {
                self.streams[stream]
                    .wait_for(&self.streams[page.stream])
                    .unwrap();
            }
        }
        for (page, _) in &pages {
            for ptr in Self::cells(&self.ranges[at], *page).collect::<Vec<_>>() {
                self.recorded(ptr, stream);
                self.freed(ptr);
            }
        }
        self.trouble();
        let done = self.ranges[at]
            .range
            .decommit(granules(first, end), &self.streams[stream]);
        self.calm();
        done.unwrap();
        self.seen.decommits += 1;
        for (page, _) in pages {
            self.ranges[at].pages[page as usize] = None;
        }
        self.compare(at);
    }

    /// Another stream reads or writes granules, and is recorded.
    fn share(&mut self) {
        let (at, other) = (self.random.index(self.ranges.len()), self.random.index(3));
        let page = self.random.below(SPAN);
        let held = &self.ranges[at];
        let Some(mut known) = held.pages[page as usize].filter(|_| !held.away) else {
            return;
        };
        if known.shared.is_some() || known.stream == other {
            return;
        }
        self.streams[other]
            .wait_for(&self.streams[known.stream])
            .unwrap();
        let word = self.word();
        let cells: Vec<u64> = Self::cells(&self.ranges[at], page).collect();
        self.ranges[at]
            .range
            .record(granules(page, page + 1), &self.streams[other])
            .unwrap();
        for ptr in cells {
            self.recorded(ptr, other);
            self.rig
                .stamp(ptr, GRANULE as usize, word, &self.streams[other]);
        }
        (known.shared, known.word) = (Some(other), Some(word));
        self.ranges[at].pages[page as usize] = Some(known);
        self.seen.shared += 1;
    }

    /// The contents of a granule are what was written last.
    fn look(&mut self) {
        let at = self.random.index(self.ranges.len());
        let page = self.random.below(SPAN);
        let held = &self.ranges[at];
        let Some(known) = held.pages[page as usize].filter(|_| !held.away) else {
            return;
        };
        let on = &self.streams[known.shared.unwrap_or(known.stream)];
        if let Some(word) = known.word {
            for ptr in Self::cells(held, page) {
                let wrong = self.rig.mismatches(ptr, GRANULE as usize, word, on);
                assert_eq!(wrong, 0, "granule {page} of range {at} has not word {word}");
            }
        }
    }

    fn suspend(&mut self) {
        let at = self.random.index(self.ranges.len());
        let keep = self.random.chance(50);
        let contents = if keep { Contents::Host } else { Contents::Drop };
        let select = Select::Range(&self.ranges[at].range);
        if self.ranges[at].away {
            match self.allocator.resume(select) {
                Ok(_) => {
                    self.ranges[at].away = false;
                    self.tell(at, true);
                }
                Err(error) => self.expected(&error),
            }
            return;
        }
        self.tell(at, false);
        let select = Select::Range(&self.ranges[at].range);
        // SAFETY: all work is waited for by the call, and the model uses no memory that is away.
        unsafe { self.allocator.suspend(select, contents) }.unwrap();
        self.seen.suspended += 1;
        self.ranges[at].away = true;
        if !keep {
            for page in self.ranges[at].pages.iter_mut().flatten() {
                page.word = None;
            }
        }
    }

    /// The judge hears that the memory of a range is there, or not.
    fn tell(&self, at: usize, there: bool) {
        let held = &self.ranges[at];
        for (page, known) in held.pages.iter().enumerate() {
            let Some(known) = known else { continue };
            for ptr in Self::cells(held, page as u64) {
                match there {
                    true => self.handed_out(ptr, GRANULE, known.stream),
                    false => self.freed(ptr),
                }
            }
        }
    }

    fn replace(&mut self) {
        let at = self.random.index(self.ranges.len());
        let stripes = 1 + self.random.below(2);
        let layers = options().stripes(stripes, 2 * SPAN * GRANULE);
        let new = self
            .allocator
            .reserve_range(SPAN * GRANULE, layers)
            .unwrap();
        let pages = vec![None; SPAN as usize];
        let new = Held {
            range: new,
            stripes,
            pages,
            away: false,
        };
        if !self.ranges[at].away {
            self.tell(at, false);
        }
        let old = std::mem::replace(&mut self.ranges[at], new);
        if self.random.chance(50) {
            // All streams come before the one that ends the range.
            for other in &self.streams[1..] {
                self.streams[0].wait_for(other).unwrap();
            }
            old.range.close(&self.streams[0]).unwrap();
        }
    }

    // ---- ordinary requests ---------------------------------------------------------------------

    fn allocate(&mut self) {
        let stream = self.random.index(3);
        let bytes = match self.random.index(4) {
            0 => 4096 * (1 + self.random.index(8)),
            1 => 512 * KIB * (1 + self.random.index(4)),
            _ => MIB * (1 + self.random.index(9)),
        };
        self.trouble();
        let got = self.allocator.allocate(bytes, &self.streams[stream]);
        self.calm();
        match got {
            Ok(block) => {
                let word = self.word();
                self.handed_out(block.ptr(), bytes as u64, stream);
                self.rig
                    .stamp(block.ptr(), bytes, word, &self.streams[stream]);
                self.blocks.push((block, stream, word));
                self.seen.blocks += 1;
            }
            Err(error) => {
                self.seen.short += 1;
                self.expected(&error);
            }
        }
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let at = self.random.index(self.blocks.len());
        let (block, stream, word) = self.blocks.swap_remove(at);
        if self.random.chance(20) {
            let on = &self.streams[stream];
            assert_eq!(
                self.rig
                    .mismatches(block.ptr(), block.requested(), word, on),
                0
            );
        }
        self.freed(block.ptr());
        drop(block);
    }

    fn step(&mut self) {
        match self.random.index(40) {
            0..=11 => self.commit(false),
            12 => self.commit(true),
            13..=20 => self.decommit(),
            21..=23 => self.share(),
            24..=26 => self.look(),
            27..=31 => self.allocate(),
            32..=36 => self.free(),
            37 => self.suspend(),
            38 => match self.random.index(4) {
                0 => self.replace(),
                _ => drop(self.allocator.trim(self.random.below(16 << 20))),
            },
            _ => {
                let stream = self.random.index(3);
                self.streams[stream].synchronize().unwrap();
            }
        }
    }
}

fn before(functions: CuFunctions) -> CuFunctions {
    Checker::new(functions, 0).enter();
    install(functions)
}

fn program(seed: u64, steps: u64, seen: Seen) -> Seen {
    let config = SimConfig {
        seed,
        ..SimConfig::with_devices(1, 256 << 20)
    };
    let judged = (!on_cuda()).then(|| Rig::behind_on(Policy::Packed, config.clone(), before));
    let (rig, judge) = match judged {
        Some(rig) => (rig.unwrap(), Some(crate::checker::table::checker())),
        None => (Rig::new(Policy::Packed, config), None),
    };
    let limit = [None, Some(96 << 20), Some(48 << 20)][seed as usize % 3];
    let waits = [Waits::Scarce, Waits::Scarce, Waits::Always, Waits::Never][seed as usize % 4];
    let allocator = rig.allocator_with(Config::new().limit(limit).waits(waits));
    rig.set_mode(Mode::Lag(6));
    let ranges = [1, 2, 1].map(|stripes| {
        let layers = options().stripes(stripes, 2 * SPAN * GRANULE);
        Held {
            range: allocator.reserve_range(SPAN * GRANULE, layers).unwrap(),
            stripes,
            pages: vec![None; SPAN as usize],
            away: false,
        }
    });
    let state = RefCell::new(Program {
        rig: &rig,
        allocator: &allocator,
        judge: judge.clone(),
        random: Rng::new(seed),
        streams: rig.streams(),
        ranges: ranges.into(),
        blocks: Vec::new(),
        words: 0,
        failing: false,
        seen,
    });
    for step in 0..steps {
        state.borrow_mut().step();
        rig.advance_row();
        allocator.check().unwrap();
        let violation = judge
            .as_ref()
            .and_then(|judge| judge.tracker().take_violation());
        assert_eq!(violation, None, "seed {seed}, step {step}");
        if let Some(sim) = rig.maybe_sim() {
            assert_eq!(sim.reports(), [], "seed {seed}, step {step}");
        }
    }
    let Program {
        ranges,
        blocks,
        seen,
        streams,
        ..
    } = state.into_inner();
    rig.set_mode(Mode::Instant);
    streams
        .iter()
        .for_each(|stream| stream.synchronize().unwrap());
    drop((ranges, blocks, streams));
    match judge.as_ref().map_or(0, |judge| judge.lost_memory()) {
        0 => rig.close(&allocator),
        _ => rig.end(&allocator),
    }
    drop(allocator);
    if let Some(sim) = rig.maybe_sim() {
        let leaks = judge.as_ref().map(|judge| judge.unexplained(sim.leaks()));
        assert!(leaks.is_none_or(|leaks| (leaks.reservations, leaks.mappings) == (0, 0)));
    }
    rig.assert_clean();
    Checker::leave();
    seen
}

#[test]
fn random_programs() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (first, count) = (
        number(FIRST).unwrap_or(1),
        number(OPERATIONS).unwrap_or(USUAL),
    );
    let mut seen = Seen::default();
    for seed in first..first + count.div_ceil(STEPS) {
        eprintln!("seed {seed}");
        seen = program(seed, STEPS, seen);
    }
    eprintln!("{seen:?}");
    let Seen {
        commits,
        refused,
        decommits,
        shared,
        blocks,
        suspended,
        captured,
        failed,
        ..
    } = seen;
    let least = [
        commits, refused, decommits, shared, blocks, suspended, captured, failed,
    ];
    let all = least.into_iter().all(|count| count > 0);
    assert!(count < USUAL || on_cuda() || all, "{seen:?}");
}
