//! Memory that a thread makes before it is needed: how much, for whom, and who is not disturbed.

mod ends;
mod failures;
mod growths;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{current, yield_now};

use super::{Asked, Helper, Shared};
use crate::Block;
use crate::allocator::carried::Rig;
use crate::allocator::config::Config;
use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::report::MadeAhead;
use crate::allocator::{Allocator, Policy};
use crate::driver::Stream;
use crate::error::Error;
use crate::sim::Simulator;

const MIB: usize = 1 << 20;

fn rig() -> Result<Rig, Box<dyn std::error::Error>> {
    Rig::new(Config::new().policy(Policy::Packed).ahead(true))
}

fn shared(allocator: &Allocator) -> Arc<Shared> {
    let helper = allocator.engine().helper.as_ref();
    Arc::clone(&helper.expect("it is switched on").shared)
}

/// Whether the calling thread is one that makes memory ahead.
fn is_ahead() -> bool {
    current().name() == Some("cualloc-ahead")
}

fn made(allocator: &Allocator) -> MadeAhead {
    allocator.stats().packing.ahead
}

/// A growth, and what is made after it.
fn grow(allocator: &Allocator, mib: usize, stream: &Stream) -> Result<Block, Error> {
    let block = allocator.allocate(mib * MIB, stream)?;
    allocator.await_ahead();
    Ok(block)
}

/// Keeps the thread in its step, before or after the `nth` of its calls of a name, until it is told to stop, or the
/// test has gone on without that. Says whether it came so far.
struct Gate {
    reached: Arc<AtomicBool>,
    passed: Arc<AtomicBool>,
}

impl Gate {
    fn new(sim: &Simulator, allocator: &Allocator, call: &'static str, nth: u64) -> Gate {
        let (reached, passed) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let gate = Gate {
            reached: Arc::clone(&reached),
            passed: Arc::clone(&passed),
        };
        let (shared, count) = (shared(allocator), AtomicU64::new(0));
        sim.after(move |moment| {
            if !is_ahead()
                || moment.call != call
                || count.fetch_add(1, Ordering::Relaxed) + 1 != nth
            {
                return;
            }
            reached.store(true, Ordering::Release);
            while shared.state().stops == 0 && !passed.load(Ordering::Acquire) {
                yield_now();
            }
        });
        gate
    }

    fn await_step(&self) {
        while !self.reached.load(Ordering::Acquire) {
            yield_now();
        }
    }

    fn pass(&self) {
        self.passed.store(true, Ordering::Release);
    }
}

fn a_want() -> Want {
    Want {
        space: SpaceId::Large,
        stream: 0,
        granules: (20 * MIB / 512) as u32,
        align: 1,
        requested: 20 << 20,
        single: false,
        views: true,
    }
}

/// Asks for so many bytes at an address.
fn ask(engine: &Engine, end: u64, bytes: u64) {
    let helper = engine.helper.as_ref().expect("it is switched on");
    let mut state = helper.shared.state();
    state.asked = Some(Asked {
        want: a_want(),
        end,
        bytes,
        leased: false,
    });
    assert!(helper.wake(state, &engine.me).is_empty());
}
