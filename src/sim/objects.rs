//! Other objects with handles: kernels, pools and host functions.

use super::clocks::Clock;
use super::hooks;
use crate::driver::sys::{CUhostFn, CUmemAllocationHandleType};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A host function to run once the lock is released.
pub(super) struct Callback {
    pub(super) function: CUhostFn,
    pub(super) data: usize,
    /// Whether it belongs to a user object: then all its driver calls are refused.
    pub(super) alone: bool,
    /// Whether another thread runs it, in order, while the thread that caused it continues.
    pub(super) late: bool,
}

type LateCall = Box<dyn FnOnce() + Send>;

/// Runs a function on another thread, after all functions that were passed before, as the driver's own thread does.
fn run_late(run: impl FnOnce() + Send + 'static) {
    static WAITING: Mutex<VecDeque<LateCall>> = Mutex::new(VecDeque::new());
    static TURN: Mutex<()> = Mutex::new(());
    let waiting = || WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    waiting().push_back(Box::new(run));
    drop(thread::spawn(move || {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let next = waiting().pop_front();
        if let Some(next) = next {
            next();
        }
    }));
}

impl Callback {
    pub(super) fn run(self) {
        if let Some(function) = self.function {
            // SAFETY: the caller that passed the function to the driver guarantees that it may be called with
            // this argument.
            let run = move || unsafe { function(self.data as *mut std::ffi::c_void) };
            match (self.alone, self.late) {
                (true, true) => run_late(move || hooks::as_callback(run)),
                (true, false) => hooks::as_callback(run),
                (false, _) => run(),
            }
        }
    }
}

/// A kernel that the simulator can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Fill,
    Check,
    Spin,
}

/// A free stretch of a pool's segment, reusable after an operation of a queue.
pub(super) struct Free {
    pub(super) bytes: u64,
    pub(super) queue: u32,
    pub(super) seq: u64,
    pub(super) clock: Arc<Clock>,
}

/// A live block.
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) pool: u64,
}

pub(super) struct Pool {
    pub(super) device: usize,
    pub(super) default: bool,
    pub(super) destroyed: bool,
    /// Number of imports that are not destroyed; here they share the handle of the pool.
    pub(super) imports: u64,
    pub(super) max: u64,
    pub(super) handle_types: CUmemAllocationHandleType,
    pub(super) threshold: u64,
    pub(super) follow_events: bool,
    pub(super) opportunistic: bool,
    pub(super) internal: bool,
    pub(super) access: u64,
    /// Segments: first address and size.
    pub(super) segments: BTreeMap<u64, u64>,
    pub(super) free: BTreeMap<u64, Free>,
    pub(super) reserved_high: u64,
    pub(super) used: u64,
    pub(super) used_high: u64,
}

impl Pool {
    pub(super) fn new(
        device: usize,
        default: bool,
        max: u64,
        handle_types: CUmemAllocationHandleType,
    ) -> Pool {
        Pool {
            device,
            default,
            destroyed: false,
            imports: 0,
            max,
            handle_types,
            threshold: 0,
            follow_events: true,
            opportunistic: true,
            internal: true,
            access: 1 << device,
            segments: BTreeMap::new(),
            free: BTreeMap::new(),
            reserved_high: 0,
            used: 0,
            used_high: 0,
        }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.segments.values().sum()
    }
}
