//! Several threads with programs of their own on one allocator.
//!
//! What they do in which order is up to the machine, so the judge is simpler: no two live blocks
//! overlap, the simulator sees no race, and in the end everything is given back.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cualloc::allocator::Request;
use cualloc::driver::{Context, Stream};
use cualloc::error::StreamMisuse;
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::{Allocator, Block, Config, Error, Policy};

use super::rng::Rng;

/// Live blocks of all threads: start to end.
#[derive(Default)]
struct Live(Mutex<BTreeMap<u64, u64>>);

impl Live {
    fn add(&self, block: &Block) {
        let (start, end) = (block.ptr(), block.ptr() + block.size());
        let mut live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((s, e)) = live.range(..end).next_back() {
            assert!(*e <= start, "{start:#x}..{end:#x} overlaps {s:#x}..{e:#x}");
        }
        live.insert(start, end);
    }

    /// Before the block is freed: afterwards its address may be somebody else's.
    fn remove(&self, block: &Block) {
        let mut live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(live.remove(&block.ptr()).is_some());
    }
}

/// What the threads have in common.
struct Shared {
    live: Live,
    /// Blocks that whoever comes next frees.
    left: Mutex<Vec<Block>>,
    /// A stream for all of them.
    stream: Stream,
    /// Sizes that are asked for again and again.
    sizes: Vec<usize>,
}

impl Shared {
    fn left(&self) -> MutexGuard<'_, Vec<Block>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread's program.
fn work(
    alloc: &Allocator,
    context: &Context,
    shared: &Shared,
    sim: &Simulator,
    seed: u64,
    steps: u64,
) {
    let live = &shared.live;
    let mut rng = Rng::new(seed);
    let stream = |alloc: &Allocator| alloc.create_stream().unwrap();
    let mut streams: Vec<Stream> = (0..1 + rng.below(3)).map(|_| stream(alloc)).collect();
    streams.push(shared.stream.clone());
    let mut blocks: Vec<(Block, usize)> = Vec::new();
    let fill = |block: &Block, on: &Stream| {
        let entered = context.enter().unwrap();
        // SAFETY: the block and the stream are alive; nobody else uses the block.
        unsafe { entered.memset_d8(block.ptr(), 1, block.requested(), on.raw()) }.unwrap();
    };
    for _ in 0..steps {
        let at = rng.below(streams.len() as u64) as usize;
        match rng.below(100) {
            0..45 if blocks.len() < 100 => {
                let bytes = match rng.chance(50) {
                    true => shared.sizes[rng.below(shared.sizes.len() as u64) as usize],
                    false => rng.log_uniform(4 << 20) as usize,
                };
                let got = match rng.below(20) {
                    0 => {
                        let wish = Request::new(bytes).single_handle().views(rng.chance(50));
                        alloc.allocate_with(wish, &streams[at]).map(Some)
                    }
                    1 => {
                        let wish = Request::new(bytes).cached_only();
                        alloc.allocate_with(wish, &streams[at]).map(Some)
                    }
                    _ => alloc.allocate(bytes, &streams[at]).map(Some),
                };
                match got {
                    Ok(Some(block)) => {
                        live.add(&block);
                        fill(&block, &streams[at]);
                        blocks.push((block, at));
                    }
                    Ok(None) | Err(Error::OutOfMemory(_) | Error::NotCached) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            45..50 => {
                // Handed out, and back at once, again and again.
                let bytes = shared.sizes[rng.below(shared.sizes.len() as u64) as usize];
                for _ in 0..1 + rng.below(6) {
                    if let Ok(block) = alloc.allocate(bytes, &streams[at]) {
                        live.add(&block);
                        fill(&block, &streams[at]);
                        live.remove(&block);
                        drop(block);
                    }
                }
            }
            50..58 if !blocks.is_empty() => {
                let (block, _) = blocks.swap_remove(rng.below(blocks.len() as u64) as usize);
                shared.left().push(block);
            }
            58..66 => {
                let left = shared.left().pop();
                if let Some(block) = left {
                    live.remove(&block);
                    drop(block);
                }
            }
            0..85 if !blocks.is_empty() => {
                let (block, _) = blocks.swap_remove(rng.below(blocks.len() as u64) as usize);
                live.remove(&block);
                if rng.chance(50) {
                    drop(block);
                } else {
                    block.free().unwrap();
                }
            }
            85..92 if !blocks.is_empty() => {
                let (block, owner) = &blocks[rng.below(blocks.len() as u64) as usize];
                if *owner != at {
                    // The other stream takes over: it follows the owner's work, then uses the block.
                    let event = context.enter().unwrap().create_event().unwrap();
                    event.record(&streams[*owner]).unwrap();
                    streams[at].wait(&event).unwrap();
                    if rng.chance(50) {
                        block.record_stream(&streams[at]).unwrap();
                        fill(block, &streams[at]);
                    } else {
                        fill(block, &streams[at]);
                        block.record_use(&streams[at]).unwrap();
                    }
                    // And the owner follows it again.
                    event.record(&streams[at]).unwrap();
                    streams[*owner].wait(&event).unwrap();
                }
            }
            92 => drop(alloc.trim(rng.below(64 << 20)).unwrap()),
            93 => alloc.synchronize().unwrap(),
            94 => alloc.set_limit(rng.chance(30).then_some(96 << 20)),
            95 if at + 1 < streams.len() => {
                // A stream goes with its blocks, with or without a word.
                blocks.retain(|(block, owner)| {
                    if *owner == at {
                        live.remove(block);
                    }
                    *owner != at
                });
                if rng.chance(50) {
                    match alloc.retire(&streams[at]) {
                        Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
                streams[at] = stream(alloc);
            }
            96 if rng.chance(50) => drop(alloc.snapshot()),
            96 => drop(alloc.empty_cache().unwrap()),
            97 => alloc.check().unwrap(),
            _ => {
                sim.advance_row();
                let ready = sim.ready_streams();
                if !ready.is_empty() {
                    sim.complete_stream(ready[rng.below(ready.len() as u64) as usize], 4);
                }
            }
        }
    }
    for (block, _) in &blocks {
        live.remove(block);
    }
}

/// Threads on one allocator until `total` steps are done.
pub fn judge(policy: Policy, total: u64, seed: u64) {
    const STEPS: u64 = 1500;
    let (mut done, mut round) = (0, seed << 32);
    while done < total {
        round += 1;
        let mut rng = Rng::new(round);
        let threads = 2 + rng.below(3);
        let mut config = SimConfig::with_devices(1, 256 << 20);
        config.mode = [Mode::Instant, Mode::Lag(50), Mode::Manual][rng.below(3) as usize];
        let sim = Simulator::new(config).unwrap();
        let driver = sim.driver().unwrap();
        let context = driver.context(0).unwrap();
        let config = Config::new().policy(policy).context_checks(true);
        let alloc = Allocator::with_config(&context, config).unwrap();
        let shared = Shared {
            live: Live::default(),
            left: Mutex::default(),
            stream: alloc.create_stream().unwrap(),
            sizes: (0..1 + rng.below(6))
                .map(|_| rng.log_uniform(8 << 20) as usize)
                .collect(),
        };
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (alloc, context, shared, sim) = (&alloc, &context, &shared, &sim);
                scope.spawn(move || work(alloc, context, shared, sim, round << 8 | thread, STEPS));
            }
        });
        for block in std::mem::take(&mut *shared.left()) {
            shared.live.remove(&block);
            drop(block);
        }
        alloc
            .check()
            .unwrap_or_else(|e| panic!("round {round:#x}: {e}"));
        assert_eq!(alloc.stats().all.allocations.current, 0, "round {round:#x}");
        alloc
            .close()
            .unwrap_or_else(|e| panic!("round {round:#x}: {e:?}"));
        let reports = sim.reports();
        assert!(reports.is_empty(), "round {round:#x}: {}", reports[0]);
        sim.complete_all();
        drop((shared, alloc, context, driver));
        let leaks = sim.leaks();
        assert!(leaks.is_empty(), "round {round:#x}: {leaks:?}");
        done += threads * STEPS;
    }
    eprintln!("{policy:?}, threads: {done} operations");
}
