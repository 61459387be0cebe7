//! Turns workloads into figures: repetition, clocks, threads, medians.

use super::source::Handles;
use super::workload::{Churn, Failure, Slots, Source, pairs};
use cualloc::allocator::RangeOptions;
use cualloc::driver::Stream;
use cualloc::{Allocator, Block};
use std::array;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The amount of each workload to run.
#[derive(Clone, Copy)]
pub struct Scale {
    /// Number of measured batches of pairs; the median is reported.
    pub batches: usize,
    /// Number of measured passes of churns and runs of threads; the median is reported.
    pub passes: usize,
    /// The divisor of the numbers of operations.
    pub divisor: usize,
}

impl Scale {
    pub const FULL: Scale = Scale {
        batches: 7,
        passes: 3,
        divisor: 1,
    };

    /// A scale that takes seconds.
    pub const QUICK: Scale = Scale {
        batches: 3,
        passes: 1,
        divisor: 10,
    };

    pub fn pairs(&self) -> usize {
        20_000 / self.divisor
    }
}

/// Returns the median; for an even number of values the upper of the two middle ones.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn median_of(count: usize, mut run: impl FnMut() -> Result<f64, Failure>) -> Result<f64, Failure> {
    let figures = (0..count).map(|_| run());
    Ok(median(figures.collect::<Result<_, _>>()?))
}

fn nanos_per_operation(time: Duration, count: usize) -> f64 {
    time.as_nanos() as f64 / count as f64
}

/// Measures an allocation with its free, in nanoseconds.
pub fn pair<S: Source>(source: &S, bytes: usize, scale: &Scale) -> Result<f64, Failure> {
    let stream = source.stream(0);
    pairs(source, bytes, &stream, scale.pairs() / 10)?;
    median_of(scale.batches, || {
        let start = Instant::now();
        pairs(source, bytes, &stream, scale.pairs())?;
        Ok(nanos_per_operation(start.elapsed(), scale.pairs()))
    })
}

/// Measures one operation in nanoseconds, after one unmeasured pass.
pub fn churn<S: Source>(source: &S, work: &Churn, scale: &Scale) -> Result<f64, Failure> {
    let (stream, count) = (source.stream(0), work.operations());
    let mut slots = work.slots::<S>();
    work.run(source, &stream, &mut slots, count)?;
    let figure = median_of(scale.passes, || {
        let start = Instant::now();
        work.run(source, &stream, &mut slots, count)?;
        Ok(nanos_per_operation(start.elapsed(), count))
    })?;
    empty(source, slots)?;
    Ok(figure)
}

fn empty<S: Source>(source: &S, slots: Slots<S>) -> Result<(), Failure> {
    let mut blocks = slots.into_iter().flatten();
    blocks.try_for_each(|block| source.free(block))
}

/// Measures all threads together, in millions of operations per second. `stream` returns the stream of a thread, `work`
/// its workload.
pub fn threads<S: Source>(
    source: &S,
    count: usize,
    stream: impl Fn(usize) -> usize + Sync,
    work: impl Fn(usize, usize) -> Churn + Sync,
    scale: &Scale,
) -> Result<f64, Failure> {
    let operations = 200_000 / scale.divisor;
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
    median_of(scale.passes, || {
        let time = measure_threads(count, body)?;
        Ok((count * operations) as f64 / time.as_secs_f64() / 1e6)
    })
}

/// When a thread started and finished its measured part.
type Span = (Instant, Instant);

/// Barriers before and after the measured part. Every thread passes both, even after a failure.
struct Gates {
    start: Barrier,
    end: Barrier,
}

impl Gates {
    fn measure<T>(&self, run: impl FnOnce() -> Result<T, Failure>) -> Result<(T, Span), Failure> {
        self.start.wait();
        let start = Instant::now();
        let done = run();
        let end = Instant::now();
        self.end.wait();
        Ok((done?, (start, end)))
    }
}

/// Returns the time from the first thread's start to the last thread's end, by the threads' own clocks: with more
/// threads than processors, a thread that only waits at the barriers might wake up late.
fn measure_threads(
    count: usize,
    body: impl Fn(usize, &Gates) -> Result<Span, Failure> + Sync,
) -> Result<Duration, Failure> {
    let gates = Gates {
        start: Barrier::new(count),
        end: Barrier::new(count),
    };
    thread::scope(|scope| {
        let (body, gates) = (&body, &gates);
        let spawn = |thread| scope.spawn(move || body(thread, gates));
        let threads = Vec::from_iter((0..count).map(spawn));
        let joined = threads.into_iter().map(|thread| thread.join());
        let spans = joined.map(|joined| joined.map_err(|_| "a thread panicked")?);
        let spans = spans.collect::<Result<Vec<_>, Failure>>()?;
        let start = spans.iter().map(|(start, _)| *start).min();
        let end = spans.iter().map(|(_, end)| *end).max();
        Ok(start
            .zip(end)
            .map_or(Duration::ZERO, |(start, end)| end - start))
    })
}

/// Number of blocks freed together, so that the cost of reading the clock is negligible.
const TOGETHER: usize = 64;

/// The costs of blocks of 4 KiB that a second stream used, as their threads see them: nanoseconds of a free,
/// nanoseconds of allocation, record and free together, and driver calls of these. Every thread has two streams of its
/// own. No work is submitted.
pub fn crossing(source: &Handles<'_>, count: usize, scale: &Scale) -> Result<[f64; 3], Failure> {
    let driver = source.allocator.context().driver();
    let rounds = (scale.pairs() / TOGETHER).max(1);
    let (per_thread, all) = (rounds * TOGETHER, count * rounds * TOGETHER);
    let frees = AtomicU64::new(0);
    let body = |thread: usize, gates: &Gates| {
        let (time, span) = gates.measure(|| cross(source, thread, rounds))?;
        frees.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        Ok(span)
    };
    measure_threads(count, body)?;
    let mut figures = Vec::new();
    for _ in 0..scale.passes {
        frees.store(0, Ordering::Relaxed);
        let before = driver.calls();
        let time = measure_threads(count, body)?;
        figures.push([
            frees.load(Ordering::Relaxed) as f64 / all as f64,
            nanos_per_operation(time, per_thread),
            driver.calls().since(&before).total() as f64 / all as f64,
        ]);
    }
    let of = |part| median(figures.iter().map(|figure| figure[part]).collect());
    Ok(array::from_fn(of))
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

/// Microseconds of each round, by what is measured.
pub type Rounds = Vec<(&'static str, Vec<f64>)>;

/// Commits and decommits of 1 GiB in granules of 32 MiB: from the driver, from the granules of another range, and from
/// those that another stream decommitted. The device is idle.
pub fn ranges(allocator: &Allocator, streams: &[Stream], scale: &Scale) -> Result<Rounds, Failure> {
    const BYTES: u64 = 1 << 30;
    let options = RangeOptions::new().granule(32 << 20);
    let first = allocator.reserve_range(BYTES, options)?;
    let second = allocator.reserve_range(BYTES, options)?;
    let micros = |run: &dyn Fn() -> Result<(), cualloc::Error>| {
        let start = Instant::now();
        run()?;
        Ok::<_, Failure>(start.elapsed().as_nanos() as f64 / 1e3)
    };
    let mut rounds: Rounds = [
        "commit driver",
        "commit idle",
        "commit other-stream",
        "decommit",
        "trim",
    ]
    .map(|name| (name, Vec::new()))
    .into();
    let all = 0..BYTES;
    for _ in 0..scale.pairs() / 100 {
        let times = [
            micros(&|| first.commit(all.clone(), &streams[0]))?,
            {
                first.decommit(all.clone(), &streams[0])?;
                streams[0].synchronize()?;
                micros(&|| second.commit(all.clone(), &streams[0]))?
            },
            {
                second.decommit(all.clone(), &streams[0])?;
                streams[0].synchronize()?;
                micros(&|| first.commit(all.clone(), &streams[1]))?
            },
            micros(&|| first.decommit(all.clone(), &streams[1]))?,
            {
                streams[1].synchronize()?;
                micros(&|| allocator.trim(0).map(drop))?
            },
        ];
        for ((_, known), time) in rounds.iter_mut().zip(times) {
            known.push(time);
        }
    }
    first.close(&streams[0])?;
    second.close(&streams[0])?;
    Ok(rounds)
}
