//! The places of the simulators that live in this process, and the way from a C call to one of them.

use super::call::Call;
use super::hooks::{self, Hooks, SLOT_COUNT};
use super::state::State;
use crate::driver::sys::CUresult;
use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

static SLOTS: [Mutex<Option<Box<State>>>; SLOT_COUNT] = [const { Mutex::new(None) }; SLOT_COUNT];
static FREE: Mutex<Free> = Mutex::new(Free {
    used: 0,
    ended: VecDeque::new(),
    left: VecDeque::new(),
});
static FREED: Condvar = Condvar::new();

/// The free places. A driver whose simulator was dropped calls the function of its place, so places are reused as late
/// as possible: a late call must not reach another simulator.
struct Free {
    /// The first place that was never used.
    used: usize,
    /// Places whose simulators and drivers have ended, the oldest first.
    ended: VecDeque<usize>,
    /// Places whose simulators ended but whose drivers exist; used when no other place is free.
    left: VecDeque<usize>,
}

impl Free {
    fn next(&mut self) -> Option<usize> {
        if self.used < SLOT_COUNT {
            self.used += 1;
            return Some(self.used - 1);
        }
        self.ended.pop_front().or_else(|| self.left.pop_front())
    }
}

fn free() -> MutexGuard<'static, Free> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A simulator's place, held by it and by its drivers.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) slot: usize,
}

impl Place {
    /// Takes a place, waiting for one if all are taken.
    pub(super) fn take(state: Box<State>) -> Arc<Place> {
        let mut places = free();
        loop {
            if let Some(slot) = places.next() {
                drop(places);
                *lock(slot) = Some(state);
                return Arc::new(Place { slot });
            }
            places = FREED.wait(places).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the simulator; tables that still point to it answer "driver shut down".
    pub(super) fn end(&self) {
        let state = lock(self.slot).take();
        drop(state);
        hooks::set(self.slot, |hooks| *hooks = Hooks::default());
        free().left.push_back(self.slot);
        FREED.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = free();
        let at = places.left.iter().position(|slot| *slot == self.slot);
        if let Some(slot) = at.and_then(|at| places.left.remove(at)) {
            places.ended.push_back(slot);
        }
    }
}

pub(super) fn lock(slot: usize) -> MutexGuard<'static, Option<Box<State>>> {
    SLOTS[slot].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one call of the driver: counts it, injects the planned failure, and calls its hooks.
pub(super) fn call(
    slot: usize,
    call: Call,
    summary: impl Fn() -> String,
    run: impl FnOnce(&mut State) -> Result<(), CUresult>,
) -> CUresult {
    let between = hooks::begin(slot, call.name());
    let result = locked(slot, call, summary, run);
    if let Some(between) = between {
        between.end(result);
    }
    result
}

fn locked(
    slot: usize,
    call: Call,
    summary: impl Fn() -> String,
    run: impl FnOnce(&mut State) -> Result<(), CUresult>,
) -> CUresult {
    let mut guard = lock(slot);
    let Some(state) = guard.as_deref_mut() else {
        return CUresult::CUDA_ERROR_DEINITIALIZED;
    };
    let done = match hooks::is_callback() {
        true => state.refuse_in_callback(call),
        false => state.enter(call, run),
    };
    let result = done.err().unwrap_or(CUresult::CUDA_SUCCESS);
    if state.logging() {
        state.log(call, summary(), result);
    }
    let callbacks = state.take_callbacks();
    drop(guard);
    for callback in callbacks {
        callback.run();
    }
    result
}

/// The arguments of a call as `name=value, ...`.
pub(super) fn summary(list: &[(&str, &dyn Debug)]) -> String {
    let mut text = String::new();
    for (index, (name, value)) in list.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        // Writing to a String does not fail.
        let _ = write!(text, "{comma}{name}={value:?}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::SLOT_COUNT;
    use crate::driver::sys::CUresult;
    use crate::sim::{SimConfig, Simulator};

    #[test]
    fn the_driver_of_a_dead_simulator_reaches_no_other_one() {
        let sim = Simulator::new(SimConfig::default()).unwrap();
        let late = sim.driver().unwrap();
        drop(sim);
        // More simulators than places: this one's place is not reused while others are free.
        for _ in 0..3 * SLOT_COUNT {
            let other = Simulator::new(SimConfig::default()).unwrap();
            let ended = CUresult::CUDA_ERROR_DEINITIALIZED;
            assert_eq!(late.device_count().unwrap_err().code(), ended);
            assert!(other.driver().unwrap().device_count().is_ok());
        }
    }
}
