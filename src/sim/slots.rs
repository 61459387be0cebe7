//! The places of the simulators that live in this process, and the way from a C call to one of them.

use super::call::Call;
use super::hooks::{self, Hooks, SLOT_COUNT};
use super::state::State;
use crate::driver::sys::CUresult;
use std::fmt::{Debug, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

type Place = Mutex<Option<Box<State>>>;

static SLOTS: [Place; SLOT_COUNT] = [const { Mutex::new(None) }; SLOT_COUNT];
static TAKEN: Mutex<[bool; SLOT_COUNT]> = Mutex::new([false; SLOT_COUNT]);
static FREED: Condvar = Condvar::new();

/// Takes a free place, waiting for one if all are taken.
pub(super) fn take(state: Box<State>) -> usize {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(slot) = taken.iter().position(|taken| !taken) {
            taken[slot] = true;
            drop(taken);
            *lock(slot) = Some(state);
            return slot;
        }
        taken = FREED.wait(taken).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Ends the simulator of that place; tables that still point to it answer "driver shut down".
pub(super) fn release(slot: usize) {
    let state = lock(slot).take();
    drop(state);
    hooks::set(slot, |hooks| *hooks = Hooks::default());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken[slot] = false;
    FREED.notify_one();
}

/// Locks one place.
pub(super) fn lock(slot: usize) -> MutexGuard<'static, Option<Box<State>>> {
    SLOTS[slot].lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call of the driver: counts it, fails it where a plan says so, and runs it, between its hooks.
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
    let result = match state.begin(call) {
        Ok(()) => match run(state) {
            Ok(()) => CUresult::CUDA_SUCCESS,
            Err(code) => code,
        },
        Err(code) => code,
    };
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
