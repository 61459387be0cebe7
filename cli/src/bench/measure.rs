//! From work to figures: repetition, clocks, threads, medians.

use super::source::Handles;
use super::workload::{Churn, Failure, Source, pairs};
use cualloc::Block;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How much of each work is done.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Measured batches of pairs, of which the median counts.
    pub batches: usize,
    pub pairs: usize,
    /// Measured passes of churns and runs of threads, of which the median counts.
    pub passes: usize,
    pub small_churn: usize,
    pub wide_churn: usize,
    pub thread_churn: usize,
    /// The largest number of free blocks that a pair is measured beside.
    pub free_blocks: usize,
}

impl Scale {
    pub const FULL: Scale = Scale {
        batches: 7,
        pairs: 20_000,
        passes: 3,
        small_churn: 400_000,
        wide_churn: 200_000,
        thread_churn: 200_000,
        free_blocks: 100_000,
    };

    /// A look at it within seconds.
    pub const QUICK: Scale = Scale {
        batches: 3,
        pairs: 2_000,
        passes: 1,
        small_churn: 40_000,
        wide_churn: 20_000,
        thread_churn: 20_000,
        free_blocks: 10_000,
    };
}

/// The middle one; of an even number the upper one of both.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn nanos_each(time: Duration, count: usize) -> f64 {
    time.as_nanos() as f64 / count as f64
}

/// Nanoseconds of an allocation with its free.
///
/// # Errors
/// The source's.
pub fn pair<S: Source>(
    source: &S,
    bytes: usize,
    stream: &S::Stream,
    scale: &Scale,
) -> Result<f64, Failure> {
    pairs(source, bytes, stream, scale.pairs / 10)?;
    let mut figures = Vec::new();
    for _ in 0..scale.batches {
        let start = Instant::now();
        pairs(source, bytes, stream, scale.pairs)?;
        figures.push(nanos_each(start.elapsed(), scale.pairs));
    }
    Ok(median(figures))
}

/// Nanoseconds of one operation, after a pass that is not measured.
///
/// # Errors
/// The source's.
pub fn churn<S: Source>(
    source: &S,
    stream: &S::Stream,
    work: &Churn,
    scale: &Scale,
) -> Result<f64, Failure> {
    let mut slots = work.slots::<S>();
    let count = work.operations();
    work.run(source, stream, &mut slots, count)?;
    let mut figures = Vec::new();
    for _ in 0..scale.passes {
        let start = Instant::now();
        work.run(source, stream, &mut slots, count)?;
        figures.push(nanos_each(start.elapsed(), count));
    }
    empty(source, slots)?;
    Ok(median(figures))
}

fn empty<S: Source>(source: &S, slots: super::workload::Slots<S>) -> Result<(), Failure> {
    slots
        .into_iter()
        .flatten()
        .try_for_each(|block| source.free(block))
}

/// Millions of operations a second of all threads together. `stream` says which stream a thread uses,
/// `work` what it does.
///
/// # Errors
/// The source's, of one of the threads.
pub fn threads<S: Source>(
    source: &S,
    count: usize,
    stream: impl Fn(usize) -> usize + Sync,
    work: impl Fn(usize, usize) -> Churn + Sync,
    scale: &Scale,
) -> Result<f64, Failure> {
    let operations = scale.thread_churn;
    let mut figures = Vec::new();
    for _ in 0..scale.passes {
        let body = |thread: usize, gates: &Gates| {
            let stream = source.stream(stream(thread));
            let work = work(thread, operations);
            let mut slots = work.slots::<S>();
            let warm = work.run(source, &stream, &mut slots, operations / 10);
            let done = gates.measure(|| {
                warm?;
                work.run(source, &stream, &mut slots, operations)
            });
            let emptied = empty(source, slots);
            let ((), time) = done?;
            emptied.and(Ok(time))
        };
        let time = timed(count, body)?;
        figures.push((count * operations) as f64 / time.as_secs_f64() / 1e6);
    }
    Ok(median(figures))
}

/// When a thread began and ended what is measured.
type Span = (Instant, Instant);

/// Where threads wait for each other. Every thread passes both, whatever fails.
struct Gates {
    start: Barrier,
    end: Barrier,
}

impl Gates {
    /// Runs a thread's part between both gates.
    fn measure<T>(&self, run: impl FnOnce() -> Result<T, Failure>) -> Result<(T, Span), Failure> {
        self.start.wait();
        let start = Instant::now();
        let done = run();
        let end = Instant::now();
        self.end.wait();
        Ok((done?, (start, end)))
    }
}

/// The time from the first thread's start to the last one's end: by their own clocks, for a thread that
/// only waited for both might come late where there are more threads than processors.
fn timed(
    count: usize,
    body: impl Fn(usize, &Gates) -> Result<Span, Failure> + Sync,
) -> Result<Duration, Failure> {
    let gates = Gates {
        start: Barrier::new(count),
        end: Barrier::new(count),
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|thread| {
                let (body, gates) = (&body, &gates);
                scope.spawn(move || body(thread, gates))
            })
            .collect();
        let mut spans = Vec::new();
        for thread in threads {
            spans.push(thread.join().map_err(|_| "a thread panicked")??);
        }
        let start = spans.iter().map(|(start, _)| *start).min();
        let end = spans.iter().map(|(_, end)| *end).max();
        match (start, end) {
            (Some(start), Some(end)) => Ok(end - start),
            _ => Err("no threads were asked for".into()),
        }
    })
}

/// What blocks cost that another stream used.
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    /// Nanoseconds of a free alone, as its thread sees it.
    pub free: f64,
    /// Nanoseconds of allocation, record and free together, as their thread sees them.
    pub pair: f64,
    /// Counted calls of the driver for each free; of the whole pair, in the steady state.
    pub calls: f64,
}

/// Blocks that are freed together, so that the clock costs little beside them.
const TOGETHER: usize = 64;

/// Every thread has a stream of its own and another one, on which its blocks are said to be used. The
/// blocks have 4 KiB. No work is submitted.
///
/// # Errors
/// The allocator's.
pub fn crossing(source: &Handles<'_>, count: usize, scale: &Scale) -> Result<Crossing, Failure> {
    let driver = source.allocator.context().driver();
    let rounds = (scale.pairs / TOGETHER).max(1);
    let (per_thread, all) = (rounds * TOGETHER, count * rounds * TOGETHER);
    let frees = AtomicU64::new(0);
    let body = |thread: usize, gates: &Gates| {
        let (time, span) = gates.measure(|| cross(source, thread, rounds))?;
        frees.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        Ok(span)
    };
    timed(count, body)?;
    let mut figures = Vec::new();
    for _ in 0..scale.passes {
        frees.store(0, Ordering::Relaxed);
        let before = driver.calls();
        let time = timed(count, body)?;
        figures.push(Crossing {
            free: frees.load(Ordering::Relaxed) as f64 / all as f64,
            pair: nanos_each(time, per_thread),
            calls: driver.calls().since(&before).total() as f64 / all as f64,
        });
    }
    let of = |part: fn(&Crossing) -> f64| median(figures.iter().map(part).collect());
    Ok(Crossing {
        free: of(|figure| figure.free),
        pair: of(|figure| figure.pair),
        calls: of(|figure| figure.calls),
    })
}

/// The time spent in frees.
fn cross(source: &Handles<'_>, thread: usize, rounds: usize) -> Result<Duration, Failure> {
    let (own, other) = (source.stream(2 * thread), source.stream(2 * thread + 1));
    let mut blocks: Vec<Block> = Vec::with_capacity(TOGETHER);
    let mut time = Duration::ZERO;
    for _ in 0..rounds {
        for _ in 0..TOGETHER {
            let block = source.allocate(4096, &own)?;
            block.record_stream(&other)?;
            blocks.push(block);
        }
        let start = Instant::now();
        blocks.clear();
        time += start.elapsed();
    }
    Ok(time)
}
