//! Who waits for a step of the thread, and finds what it made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Gate, MIB, ask, grow, is_ahead, made, rig};
use crate::allocator::carried::Outcome;
use crate::allocator::config::Config;
use crate::allocator::{Allocator, Contents, Policy, Select};
use crate::driver::Stream;
use crate::error::Error;
use crate::sim::{SimConfig, Simulator};

#[test]
fn threads_that_grow_beside_it_lose_nothing() -> Outcome {
    let rig = rig()?;
    std::thread::scope(|threads| {
        for seed in 1..4u64 {
            let (allocator, context) = (&rig.allocator, &rig.context);
            threads.spawn(move || -> Result<(), Error> {
                let stream = Stream::new(context)?;
                let (mut random, mut live) = (seed, Vec::new());
                for round in 0..200 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let bytes = 70_000 + (random >> 40) as usize % (6 * MIB);
                    live.push(allocator.allocate(bytes, &stream)?);
                    if live.len() > 3 + round / 20 {
                        live.swap_remove((random >> 33) as usize % live.len());
                    }
                    if round % 16 == 0 {
                        allocator.check()?;
                    }
                    if round % 64 == 63 {
                        allocator.trim(0)?;
                    }
                }
                Ok(())
            });
        }
    });
    rig.end()
}

/// Memory that the thread has in hand is waited for before a request fails for want of it.
#[test]
fn a_request_gets_what_is_in_the_hands_of_the_thread() -> Outcome {
    let sim = Simulator::new(SimConfig::with_devices(1, 40 << 20))?;
    let driver = sim.driver()?;
    let context = driver.context(0)?;
    let config = Config::new().policy(Policy::Packed).ahead(true);
    let allocator = Allocator::with_config(&context, config)?;
    let stream = Stream::new(&context)?;
    let gate = Gate::new(&sim, &allocator, "cuMemCreate", 4);
    let block = allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let other = allocator.allocate(20 * MIB, &stream);
    gate.pass();
    let other = other?;
    allocator.check()?;
    drop((block, other));
    allocator.close()?;
    assert_eq!((sim.memory_in_use(0), sim.reports().len()), (0, 0));
    Ok(())
}

#[test]
fn a_trim_gives_back_what_was_made_ahead_and_stops_more() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 4);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let trimmed = rig.allocator.trim(0);
    gate.pass();
    assert_eq!(trimmed?.released, 8 << 20);
    rig.allocator.await_ahead();
    assert_eq!(rig.sim.memory_in_use(0), 20 << 20);
    let made = made(&rig.allocator);
    assert_eq!((made.bytes, made.used), (8 << 20, 0));
    // The next growth asks again.
    let next = grow(&rig.allocator, 10, &stream)?;
    assert!(rig.sim.memory_in_use(0) > 30 << 20);
    drop((block, next));
    assert_eq!(rig.allocator.empty_cache()?.pending, 0);
    assert_eq!(rig.sim.memory_in_use(0), 0);
    rig.end()
}

#[test]
fn nothing_is_made_while_memory_is_suspended() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    // SAFETY: nothing uses the memory.
    let done = unsafe { rig.allocator.suspend(Select::Allocator, Contents::Drop) };
    gate.pass();
    done?;
    assert_eq!(rig.sim.memory_in_use(0), 0);
    ask(rig.allocator.engine(), block.ptr() + (28 << 20), 16 << 20);
    rig.allocator.await_ahead();
    assert_eq!(rig.sim.memory_in_use(0), 0);
    rig.allocator.resume(Select::Allocator)?;
    drop(grow(&rig.allocator, 40, &stream)?);
    assert!(made(&rig.allocator).bytes > 8 << 20);
    drop(block);
    rig.end()
}

/// What it calls, such as a logger, may come back to the allocator.
#[test]
fn the_thread_does_not_wait_for_itself() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let (back, trims) = (
        Arc::downgrade(rig.allocator.shared()),
        Arc::<AtomicU64>::default(),
    );
    let counted = Arc::clone(&trims);
    rig.sim.after(move |moment| {
        if is_ahead() && moment.call == "cuMemSetAccess" {
            let engine = back.upgrade();
            let trimmed = engine.is_some_and(|engine| {
                engine.await_ahead();
                engine.trim(0).is_ok()
            });
            counted.fetch_add(u64::from(trimmed), Ordering::Relaxed);
        }
    });
    let block = grow(&rig.allocator, 20, &stream)?;
    assert_eq!(trims.load(Ordering::Relaxed), 1, "no step came after it");
    rig.sim.clear_hooks();
    drop(block);
    rig.end()
}
