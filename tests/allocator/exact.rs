//! Statistics are exact, however many threads allocate and free: they are compared with sums that the threads keep
//! themselves, while all of them wait.
//!
//! `CUALLOC_EXACT_OPS` is the number of operations, a million by default.

use std::any::Any;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::AtomicI64;
use std::thread;

use crate::common::prelude::*;
use crate::common::rng::Rng;
use cualloc::Stats;

const THREADS: usize = 16;
/// Fewer than threads: some share one.
const STREAMS: usize = 11;
/// Operations of a thread between two comparisons.
const STEP: usize = 500;
/// The maximum number of blocks of a thread.
const HELD: usize = 48;

fn operations() -> usize {
    match std::env::var("CUALLOC_EXACT_OPS") {
        Ok(text) => text
            .parse()
            .expect("CUALLOC_EXACT_OPS is a number of operations"),
        Err(_) => 1_000_000,
    }
}

/// From one byte to 1 MiB, small ones more often.
fn bytes(numbers: &mut Rng) -> usize {
    let most = 512_u64 << numbers.below(12);
    1 + numbers.below(most) as usize
}

/// Live blocks as the threads count them. A thread may free a block that another one allocated, so only the sums over
/// all threads are meaningful.
#[derive(Default)]
struct Sums {
    blocks: AtomicI64,
    requested: AtomicI64,
    allocated: AtomicI64,
}

impl Sums {
    fn add(&self, block: &Block, sign: i64) {
        self.blocks.fetch_add(sign, Ordering::Relaxed);
        let requested = sign * block.requested() as i64;
        self.requested.fetch_add(requested, Ordering::Relaxed);
        let allocated = sign * block.size() as i64;
        self.allocated.fetch_add(allocated, Ordering::Relaxed);
    }

    fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed) as u64
    }

    /// At a moment without calls in progress.
    fn compare(&self, stats: &Stats) {
        let count = |sum: &AtomicI64| sum.load(Ordering::Relaxed) as u64;
        assert_eq!(stats.all.allocations.current, count(&self.blocks));
        assert_eq!(stats.all.requested.current, count(&self.requested));
        assert_eq!(stats.all.allocated.current, count(&self.allocated));
        let parts = stats.small.allocated.current + stats.large.allocated.current;
        assert_eq!(stats.all.allocated.current, parts);
        assert!(stats.all.active.current >= stats.all.allocated.current);
        assert!(stats.all.reserved.current >= stats.all.active.current);
        for counter in [
            stats.all.allocations,
            stats.all.requested,
            stats.all.allocated,
        ] {
            assert_eq!(
                counter.total_allocated - counter.total_freed,
                counter.current
            );
            assert!(counter.peak >= counter.current);
        }
        assert!(stats.all.reserved.peak >= stats.all.reserved.current);
    }
}

/// The state shared by all threads.
struct Common<'a> {
    allocator: &'a Allocator,
    streams: Vec<Stream>,
    sums: Sums,
    barrier: Barrier,
    /// Blocks on their way from one thread to another that frees them, by receiver.
    mail: Vec<Mutex<Vec<Block>>>,
}

impl<'a> Common<'a> {
    fn new(rig: &Rig, allocator: &'a Allocator) -> Self {
        Common {
            allocator,
            streams: (0..STREAMS).map(|_| rig.stream()).collect(),
            sums: Sums::default(),
            barrier: Barrier::new(THREADS),
            mail: (0..THREADS).map(|_| Mutex::default()).collect(),
        }
    }

    /// Runs `body` once per thread.
    fn run(&self, body: impl Fn(&mut Worker<'_, 'a>) + Sync) {
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let body = &body;
                scope.spawn(move || {
                    let mut worker = Worker {
                        common: self,
                        thread,
                        numbers: Rng::new(thread as u64),
                        held: Vec::new(),
                    };
                    // The others would wait for this thread at the next barrier, for ever.
                    let done = catch_unwind(AssertUnwindSafe(|| body(&mut worker)));
                    done.unwrap_or_else(|why| give_up(&*why));
                    worker.held.drain(..).for_each(|block| self.free(block));
                });
            }
        });
    }

    fn free(&self, block: Block) {
        self.sums.add(&block, -1);
        block.free().unwrap();
    }
}

/// Ends the process, and prints the message although the harness captures output.
fn give_up(why: &(dyn Any + Send)) -> ! {
    let text = why.downcast_ref::<String>().map(String::as_str);
    let text = text.or(why.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("a thread panicked");
    let _ = writeln!(std::io::stderr(), "a thread of {}: {text}", file!());
    std::process::exit(101)
}

struct Worker<'c, 'a> {
    common: &'c Common<'a>,
    thread: usize,
    numbers: Rng,
    held: Vec<Block>,
}

impl Worker<'_, '_> {
    /// Waits for all threads; one of them then compares, while the others wait.
    fn meet(&self, look: impl FnOnce(&Stats)) {
        if self.common.barrier.wait().is_leader() {
            look(&self.common.allocator.stats());
        }
        self.common.barrier.wait();
    }

    fn allocate(&mut self, bytes: usize) {
        let stream = &self.common.streams[self.thread % STREAMS];
        let block = self.common.allocator.allocate(bytes, stream).unwrap();
        self.common.sums.add(&block, 1);
        self.held.push(block);
    }

    fn take_any(&mut self) -> Option<Block> {
        let at = self.numbers.below(self.held.len().max(1) as u64) as usize;
        (at < self.held.len()).then(|| self.held.swap_remove(at))
    }

    fn read_mail(&self) {
        let mail = std::mem::take(&mut *self.common.mail[self.thread].lock().unwrap());
        mail.into_iter().for_each(|block| self.common.free(block));
    }

    /// One operation of the mixture.
    fn step(&mut self) {
        let choice = self.numbers.below(64);
        if self.held.len() < HELD && choice < 34 || self.held.is_empty() {
            let bytes = bytes(&mut self.numbers);
            self.allocate(bytes);
            return;
        }
        let Some(block) = self.take_any() else { return };
        match choice {
            // A use by another stream: the free is pending until that is done.
            60.. => {
                let other = &self.common.streams[(self.thread + 1) % STREAMS];
                block.record_stream(other).unwrap();
                self.common.free(block);
            }
            // Freed by another thread.
            52.. => {
                let receiver = self.numbers.below(THREADS as u64) as usize;
                self.common.mail[receiver].lock().unwrap().push(block);
                self.read_mail();
            }
            _ => self.common.free(block),
        }
    }
}

/// Counts of live blocks, and of requested and allocated bytes, equal the threads' own sums at every barrier. A
/// concurrent observer never sees a peak below a value that it has seen before.
#[test]
fn s1_19_current_figures_are_the_sums_of_live_blocks() {
    let observed = AtomicU64::new(0);
    each(|rig| {
        let allocator = rig.checked();
        let common = Common::new(rig, &allocator);
        let rounds = operations() / 2 / (THREADS * STEP);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| observe(&allocator, &done, &observed));
            let _done = SetAtEnd(&done);
            common.run(|worker| {
                for _ in 0..rounds.max(1) {
                    (0..STEP).for_each(|_| worker.step());
                    worker.read_mail();
                    worker.meet(|stats| common.sums.compare(stats));
                }
            });
        });
        for mail in &common.mail {
            let mail = std::mem::take(&mut *mail.lock().unwrap());
            mail.into_iter().for_each(|block| common.free(block));
        }
        common.sums.compare(&allocator.stats());
    });
    assert!(observed.into_inner() > 0, "nothing was ever seen alive");
}

/// Peaks of allocated and reserved bytes, while other threads work.
fn observe(allocator: &Allocator, done: &AtomicBool, observed: &AtomicU64) {
    let (mut allocated, mut reserved) = (0, 0);
    while !done.load(Ordering::Relaxed) {
        let stats = allocator.stats();
        allocated = stats.all.allocated.current.max(allocated);
        reserved = stats.all.reserved.current.max(reserved);
        assert!(stats.all.allocated.peak >= allocated);
        assert!(stats.all.reserved.peak >= reserved);
        thread::yield_now();
    }
    observed.fetch_max(allocated, Ordering::Relaxed);
}

/// Phases in which all threads only allocate, or only free, have their extremes at barriers: the peak is exactly the
/// largest of the sums there.
#[test]
fn s1_19_peaks_of_rising_and_falling_phases_are_exact() {
    each(|rig| {
        let allocator = rig.checked();
        let common = Common::new(rig, &allocator);
        let top = AtomicU64::new(0);
        let phases = operations() / 4 / (THREADS * 20);
        common.run(|worker| {
            for phase in 0..phases.max(8) {
                // Half of the phases rise; all threads agree on which ones.
                let count = 10 + worker.numbers.below(20);
                for _ in 0..count {
                    if phase % 2 == 0 {
                        let bytes = bytes(&mut worker.numbers);
                        worker.allocate(bytes);
                    } else if let Some(block) = worker.take_any() {
                        common.free(block);
                    }
                }
                worker.meet(|stats| {
                    common.sums.compare(stats);
                    let now = common.sums.allocated();
                    let highest = top.fetch_max(now, Ordering::Relaxed).max(now);
                    assert_eq!(stats.all.allocated.peak, highest);
                    if phase % 5 == 4 {
                        allocator.reset_peaks();
                        assert_eq!(allocator.stats().all.allocated.peak, now);
                        top.store(now, Ordering::Relaxed);
                    }
                });
            }
        });
    });
}

/// Threads that free a block before each allocation of the same size never exceed the live bytes of the start.
#[test]
fn s1_19_peaks_of_exchanged_blocks_are_exact() {
    each(|rig| {
        let allocator = rig.checked();
        let common = Common::new(rig, &allocator);
        let rounds = operations() / 4 / (THREADS * 2 * 100);
        common.run(|worker| {
            for _ in 0..24 {
                let bytes = bytes(&mut worker.numbers);
                worker.allocate(bytes);
            }
            for _ in 0..rounds.max(1) {
                worker.meet(|_| allocator.reset_peaks());
                for _ in 0..100 {
                    if let Some(block) = worker.take_any() {
                        let bytes = block.requested();
                        common.free(block);
                        worker.allocate(bytes);
                    }
                }
                worker.meet(|stats| {
                    common.sums.compare(stats);
                    assert_eq!(stats.all.allocated.peak, common.sums.allocated());
                    // Nothing was given back to the driver.
                    assert_eq!(stats.all.reserved.peak, stats.all.reserved.current);
                });
            }
        });
    });
}

/// The limits of stream caches count when a large block is compared with the peak: the block is a peak beside small
/// blocks though not by itself.
#[test]
fn s1_19_a_large_block_beside_small_ones_is_a_peak() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene();
        drop(allocator.allocate(8 * MIB, &stream).unwrap());
        let _small = allocator.allocate_blocks(16, 64 * KIB, &stream);
        let _large = allocator.allocate(8 * MIB, &stream).unwrap();
        let all = allocator.stats().all.allocated;
        assert_eq!((all.current, all.peak), (9 * MIB as u64, 9 * MIB as u64));
    });
}

/// Large blocks have their own peaks, even if all blocks together were more at an earlier time.
#[test]
fn s1_19_large_blocks_have_peaks_below_that_of_all() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream]) = rig.scene();
        let small = allocator.allocate_blocks(128, 64 * KIB, &stream);
        let mut large = vec![allocator.allocate(8 * MIB, &stream).unwrap()];
        drop(small);
        let top = 16 * MIB as u64;
        assert_eq!(allocator.stats().all.allocated.peak, top);
        for count in 2..=3 {
            large.push(allocator.allocate(2 * MIB, &stream).unwrap());
            let stats = allocator.stats();
            let pool = stats.large;
            assert_eq!(pool.allocations.peak, count);
            let bytes = (8 + 2 * (count - 1)) * MIB as u64;
            assert_eq!((pool.allocated.peak, pool.requested.peak), (bytes, bytes));
            assert_eq!(stats.all.allocated.peak, top);
        }
    });
}
