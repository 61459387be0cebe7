//! How the thread ends: with its allocator, a lost context, or not at all in a forked child.

use std::sync::Arc;
use std::thread::yield_now;

use super::{Gate, Helper, MIB, Shared, grow, rig, shared};
use crate::allocator::carried::{Outcome, Rig};
use crate::allocator::config::Config;
use crate::allocator::{Allocator, Contents, Policy, Select};
use crate::driver::{process, sys};
use crate::error::Error;

/// A close waits for the step under way, and no longer; no thread is left.
#[test]
fn a_close_ends_the_thread_in_the_middle_of_its_work() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 2);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    drop(block);
    let closed = rig.allocator.close();
    gate.pass();
    closed?;
    assert!(!shared(&rig.allocator).state().alive);
    let creates = rig.sim.calls().get("cuMemCreate");
    // The trial, the request, and one step of two.
    assert_eq!(creates, 1 + 10 + 4);
    assert_eq!(rig.sim.memory_in_use(0), 0);
    assert_eq!(rig.sim.reports(), []);
    Ok(())
}

/// The last handle goes on another thread while memory is being made, and everything goes with it.
#[test]
fn the_last_handle_may_go_beside_a_step() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let engine = Arc::downgrade(rig.allocator.shared());
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    drop(block);
    let Rig { allocator, sim, .. } = rig;
    let gone = std::thread::spawn(move || drop(allocator));
    gone.join().map_err(|_| "it panicked")?;
    assert_eq!(sim.memory_in_use(0), 0);
    assert_eq!(engine.strong_count(), 0);
    assert_eq!(sim.reports(), []);
    Ok(())
}

/// Where the context is lost nothing is closed, and the thread ends all the same.
#[test]
fn the_last_handle_of_a_lost_allocator_ends_the_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let _block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let lost = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    rig.sim.lose_context(0, lost);
    let refused = rig.allocator.allocate(40 * MIB, &stream);
    assert!(matches!(refused, Err(Error::ContextLost(_))), "{refused:?}");
    let shared = shared(&rig.allocator);
    assert!(shared.state().alive);
    drop(rig.allocator);
    assert!(!shared.state().alive);
    Ok(())
}

/// It notices itself that the context is lost, and ends; requests are told.
#[test]
fn a_context_that_is_lost_in_a_step_ends_the_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemMap", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    rig.sim
        .lose_context(0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    gate.pass();
    while shared(&rig.allocator).state().alive {
        yield_now();
    }
    let refused = rig.allocator.allocate(40 * MIB, &stream);
    assert!(matches!(refused, Err(Error::ContextLost(_))), "{refused:?}");
    drop(block);
    Ok(())
}

/// D9: the thread does not exist in a forked child, and may have held its lock.
#[cfg(unix)]
#[test]
fn d9_a_forked_child_waits_for_no_thread() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let block = grow(&rig.allocator, 20, &stream)?;
    let shared = shared(&rig.allocator);
    let state = shared.state();
    let mut ours = Some((rig.allocator.clone(), block));
    let told = crate::driver::process::child_says(|| {
        let Some((allocator, block)) = ours.take() else {
            return false;
        };
        let refused = matches!(allocator.trim(0), Err(Error::ForkedChild))
            && allocator.close().is_err()
            && allocator.allocate(30 * MIB, &stream).is_err()
            // SAFETY: nothing uses the memory.
            && unsafe { allocator.suspend(Select::Allocator, Contents::Drop) }.is_err();
        allocator.await_ahead();
        drop((allocator, block));
        refused
    });
    drop(state);
    assert!(told);
    drop(ours);
    rig.end()
}

/// D9: a forked child that exits waits for no step of its parent's.
#[cfg(unix)]
#[test]
fn d9_the_exit_of_a_forked_child_waits_for_no_step() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let told = process::child_says(|| process::await_steps() && process::begin_step().is_none());
    gate.pass();
    assert!(told);
    drop(block);
    rig.end()
}

/// Of two allocators of a device each waits for its own thread.
#[test]
fn an_allocator_goes_beside_a_step_of_another() -> Outcome {
    let rig = rig()?;
    let [stream] = rig.streams()?;
    let config = Config::new().policy(Policy::Packed).ahead(true);
    let other = Allocator::with_config(&rig.context, config)?;
    let gate = Gate::new(&rig.sim, &rig.allocator, "cuMemCreate", 1);
    let block = rig.allocator.allocate(20 * MIB, &stream)?;
    gate.await_step();
    let theirs = grow(&other, 20, &stream)?;
    assert_eq!(super::made(&other).bytes, 16 << 20);
    drop(theirs);
    other.close()?;
    assert!(!shared(&other).state().alive);
    let state = shared(&rig.allocator);
    assert!(state.state().stepping);
    gate.pass();
    drop(block);
    rig.end()
}

/// Once the thread has seen that it is to end, nothing is left to it: whoever asks next starts another one.
#[test]
fn a_thread_that_ends_is_asked_for_nothing_more() {
    let shared = Shared::default();
    shared.state().alive = true;
    shared.state().stops = 1;
    assert!(shared.next().is_none());
    assert!(!shared.state().alive);
}

/// A thread that was in its logger while it was stopped ends when it comes back, and gets nothing to do until then.
#[test]
fn a_thread_ends_that_was_stopped_while_it_told() {
    let helper = Helper::default();
    {
        let mut state = helper.shared.state();
        (state.alive, state.telling) = (true, true);
    }
    let (stopped, _) = helper.stop();
    stopped.join();
    drop(stopped);
    assert!(helper.shared.state().rests());
    helper.shared.state().telling = false;
    assert!(helper.shared.next().is_none());
    assert!(!helper.shared.state().alive && !helper.shared.state().rests());
}
