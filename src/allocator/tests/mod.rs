//! Tests across several modules that inspect the heap, and their common rig.

#[cfg(unix)]
mod fork;
mod generations;
mod streams;
mod uses;

use crate::Block;
use crate::allocator::{Allocator, Config, Policy, Request};
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::sim::{Mode, SimConfig, Simulator};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const PAGE: usize = 64 * KIB;
const PART: usize = 5 * MIB;

pub(in crate::allocator) type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Requests cached memory only.
pub(in crate::allocator) fn cached(
    allocator: &Allocator,
    bytes: usize,
    stream: &Stream,
) -> Result<Block, Error> {
    allocator.allocate_with(Request::new(bytes).cached_only(), stream)
}

/// An allocator on its own simulator.
pub(in crate::allocator) struct Rig {
    pub allocator: Allocator,
    pub context: Context,
    pub sim: Simulator,
}

impl Rig {
    pub fn new(config: Config) -> Result<Rig, Box<dyn std::error::Error>> {
        let sim = Simulator::new(SimConfig::default())?;
        let driver = sim.driver()?;
        let context = driver.context(0)?;
        let allocator = Allocator::with_config(&context, config)?;
        Ok(Rig {
            allocator,
            context,
            sim,
        })
    }

    pub fn streams<const N: usize>(&self) -> Result<[Stream; N], Box<dyn std::error::Error>> {
        let made: Result<Vec<_>, _> = (0..N).map(|_| Stream::new(&self.context)).collect();
        made?.try_into().map_err(|_| "as many as asked for".into())
    }

    /// Submits a write to memory on a stream.
    pub fn write(&self, ptr: u64, bytes: usize, stream: &Stream) -> Outcome {
        let entered = self.context.enter()?;
        // SAFETY: the test owns the memory; the stream is alive.
        unsafe { entered.memset_d8(ptr, 1, bytes, stream.raw()) }?;
        Ok(())
    }

    pub fn end(self) -> Outcome {
        self.sim.complete_all();
        self.allocator.check()?;
        self.allocator.close()?;
        assert!(self.sim.reports().is_empty(), "{:?}", self.sim.reports());
        assert_eq!(self.sim.memory_in_use(0), 0);
        Ok(())
    }
}

/// Live parts on `a`, with free parts between them, which are pending on their streams if requested.
pub(in crate::allocator) fn scattered(
    rig: &Rig,
    a: &Stream,
    between: &[&Stream],
    used: bool,
) -> Result<Vec<Block>, Box<dyn std::error::Error>> {
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for stream in between {
        kept.push(rig.allocator.allocate(PART, a)?);
        freed.push((rig.allocator.allocate(PART, stream)?, *stream));
    }
    if used {
        rig.sim.set_mode(Mode::Manual);
        for (block, stream) in &freed {
            rig.write(block.ptr(), PART, stream)?;
        }
    }
    drop(freed);
    Ok(kept)
}

pub(in crate::allocator) fn viewing(parts: usize) -> Config {
    let limit = 2 * parts * PART;
    Config::new()
        .policy(Policy::Packed)
        .self_test(false)
        .limit(Some(limit as u64))
}
