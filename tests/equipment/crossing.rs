//! A program of several threads with several streams each, whose blocks cross streams: what a framework does that
//! copies on one stream and computes on another.

use super::workload::{Failure, log_uniform_sizes};
use cualloc::Allocator;
use cualloc::driver::{Stream, sys};
use cualloc::sim::{Mode, Simulator};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that live at a time, of all threads together.
const LIVE: usize = 240 << 20;
const LARGEST: usize = 36 << 20;
const SMALLEST: usize = 4 << 10;
/// Rows until work is complete: a row is an allocation with all that comes with it.
const LAG: u64 = 12;

/// A block in use: its address, its bytes.
type Live = (sys::CUdeviceptr, usize);

struct Thread {
    streams: Vec<sys::CUstream>,
    live: VecDeque<Live>,
    bytes: usize,
    rounds: usize,
}

/// The program: each of its threads in turn, as the driver sees them.
pub struct Crossing<'a> {
    simulator: &'a Simulator,
    allocator: &'a Allocator,
    threads: Vec<Thread>,
    sizes: Vec<usize>,
    requested: usize,
    /// Most bytes that were asked for at a time.
    peak: usize,
    /// Calls of the allocator under way, as far as the driver's calls are counted.
    inside: Arc<AtomicBool>,
    calls: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

impl<'a> Crossing<'a> {
    /// A number of threads with a number of streams each, adopted by the allocator. Work is complete some rows later.
    pub fn new(
        simulator: &'a Simulator,
        allocator: &'a Allocator,
        (threads, streams): (usize, usize),
    ) -> Result<Crossing<'a>, Failure> {
        let context = allocator.context();
        let mut all = Vec::new();
        for number in 0..threads {
            simulator.as_thread(number as u32 + 1, || make_current(allocator))?;
            let mut own = Vec::new();
            for _ in 0..streams {
                let stream = Stream::new(context)?;
                own.push(stream.raw());
                // It lives as long as the process.
                std::mem::forget(stream);
            }
            all.push(Thread {
                streams: own,
                live: VecDeque::new(),
                bytes: 0,
                rounds: number,
            });
        }
        let inside = Arc::new(AtomicBool::new(false));
        let calls = Arc::new(Mutex::new(BTreeMap::new()));
        let (counted, counts) = (Arc::clone(&inside), Arc::clone(&calls));
        simulator.before(move |moment| {
            if counted.load(Ordering::Relaxed) {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                *counts.entry(moment.call).or_insert(0) += 1;
            }
        });
        simulator.set_mode(Mode::Lag(
            std::env::var("LAG")
                .ok()
                .and_then(|l| l.parse().ok())
                .unwrap_or(LAG),
        ));
        Ok(Crossing {
            simulator,
            allocator,
            threads: all,
            sizes: log_uniform_sizes(8192, 3, SMALLEST, LARGEST),
            requested: 0,
            peak: 0,
            inside,
            calls,
        })
    }

    /// Runs a number of rows: an allocation, work with it on its stream and on another one, and the frees that keep the
    /// sum of all blocks constant. How many calls of the allocator that were.
    pub fn run(&mut self, rows: usize) -> Result<usize, Failure> {
        let mut operations = 0;
        for row in 0..rows {
            let at = row % self.threads.len();
            let simulator = self.simulator;
            operations += simulator.as_thread(at as u32 + 1, || self.row(at))?;
            simulator.advance_row();
        }
        Ok(operations)
    }

    fn row(&mut self, at: usize) -> Result<usize, Failure> {
        let most = LIVE / self.threads.len();
        let thread = &mut self.threads[at];
        thread.rounds += 1;
        let round = thread.rounds;
        let bytes = self.sizes[(round * 4 + at) % self.sizes.len()];
        let mut operations = 0;
        let (allocator, inside) = (self.allocator, &self.inside);
        let counted = |call: &mut dyn FnMut() -> Result<u64, cualloc::Error>| {
            inside.store(true, Ordering::Relaxed);
            let done = call();
            inside.store(false, Ordering::Relaxed);
            done
        };
        while thread.bytes + bytes > most {
            let Some((ptr, bytes)) = thread.live.pop_front() else {
                break;
            };
            // SAFETY: the block is live, and no work uses it from here on.
            counted(&mut || unsafe { allocator.free_raw(ptr) }.map(|()| 0))?;
            operations += 1;
            thread.bytes -= bytes;
            self.requested -= bytes;
        }
        let count = thread.streams.len();
        let (stream, other) = (
            thread.streams[round % count],
            thread.streams[(round + 1) % count],
        );
        // SAFETY: the streams live as long as the process.
        let ptr = counted(&mut || unsafe { allocator.allocate_raw(bytes, stream) })?;
        operations += 1;
        self.busy(stream)?;
        if round.is_multiple_of(2) {
            // SAFETY: as above, and the block is live.
            counted(&mut || unsafe { allocator.record_stream_raw(ptr, other) }.map(|()| 0))?;
            operations += 1;
            self.busy(other)?;
        }
        let thread = &mut self.threads[at];
        thread.live.push_back((ptr, bytes));
        thread.bytes += bytes;
        self.requested += bytes;
        self.peak = self.peak.max(self.requested);
        Ok(operations)
    }

    fn busy(&self, stream: sys::CUstream) -> Result<(), Failure> {
        let done = self.simulator.busy(stream, 1000);
        done.map_err(|code| format!("no work was submitted: {code:?}").into())
    }

    /// Calls of the driver by name, including queries that nothing else counts.
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.clone()
    }

    /// Most bytes held from the driver, by those asked for at a time, in percent.
    pub fn held(&self) -> u64 {
        self.allocator.stats().all.reserved.peak * 100 / self.peak.max(1) as u64
    }
}

/// As frameworks do it once on each thread.
fn make_current(allocator: &Allocator) -> Result<(), Failure> {
    let context = allocator.context();
    let set = context.driver().functions().cuCtxSetCurrent;
    // SAFETY: the context is alive as long as the allocator.
    match set.map(|set| unsafe { set(context.raw()) }) {
        Some(sys::CUresult::CUDA_SUCCESS) => Ok(()),
        _ => Err("the context was not made current".into()),
    }
}
