//! Counts driver calls, models their cost, and injects failures on request.

use super::call::{Call, NAMES};
use crate::driver::CallCounts;
use crate::driver::sys::CUresult;
use crate::error::ConfigError;

/// Medians of one H200 (driver 580, CUDA 13.0) in nanoseconds; 0 for calls never measured.
const MEASURED: &[(Call, u64)] = &[
    (Call::cuMemCreate, 6_600),
    (Call::cuMemMap, 700),
    (Call::cuMemSetAccess, 19_000),
    (Call::cuMemUnmap, 13_500),
    (Call::cuMemRelease, 10_000),
    (Call::cuMemAlloc_v2, 22_300),
    (Call::cuMemFree_v2, 37_500),
    (Call::cuMemGetInfo_v2, 4_300),
    (Call::cuStreamGetId, 10),
    (Call::cuStreamIsCapturing, 16),
    (Call::cuCtxGetCurrent, 8),
    (Call::cuCtxSetCurrent, 18),
    (Call::cuEventCreate, 55),
    (Call::cuEventDestroy_v2, 54),
    (Call::cuEventRecord, 144),
    (Call::cuEventQuery, 99),
    (Call::cuStreamWaitEvent, 122),
    (Call::cuMemAllocAsync, 240),
    (Call::cuMemAllocFromPoolAsync, 240),
    (Call::cuMemFreeAsync, 240),
];

/// Modelled nanoseconds of a call.
pub(super) fn cost(call: Call) -> u64 {
    let measured = MEASURED.iter().find(|(known, _)| *known == call);
    measured.map_or(0, |&(_, nanos)| nanos)
}

fn index_of(name: &str) -> Result<usize, ConfigError> {
    Call::index_of(name).ok_or_else(|| ConfigError::UnknownFunction {
        name: name.to_owned(),
    })
}

/// Numbers of calls of each function, and their modelled cost.
#[derive(Clone, Debug)]
pub(super) struct Counters {
    calls: Vec<u64>,
    /// Modelled nanoseconds of all calls, waits included.
    pub(super) nanos: u64,
    /// Number of calls that wait for the device.
    pub(super) waits: u64,
    /// Number of those that had something to wait for.
    pub(super) blocked_waits: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            calls: vec![0; NAMES.len()],
            nanos: 0,
            waits: 0,
            blocked_waits: 0,
        }
    }
}

impl Counters {
    pub(super) fn count(&mut self, call: Call, nanos: u64) {
        self.calls[call as usize] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
    }

    pub(super) fn calls(&self) -> CallCounts {
        let counts = NAMES.iter().zip(&self.calls);
        CallCounts::of(
            |name| {
                counts
                    .clone()
                    .find(|(known, _)| **known == name)
                    .map_or(0, |(_, count)| *count)
            },
            self.nanos,
        )
    }
}

/// A request to fail calls.
#[derive(Clone, Debug)]
pub struct FailPlan {
    pub(super) call: Option<usize>,
    pub(super) skip: u64,
    pub(super) times: u64,
    pub(super) fault: Fault,
}

/// What a failing call returns in place of its own result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) code: CUresult,
    pub(super) sticky: bool,
    /// Whether the call is executed nevertheless.
    pub(super) executed: bool,
}

impl FailPlan {
    /// Fails the next call of `name` with `code`.
    ///
    /// # Errors
    /// [`ConfigError::UnknownFunction`] if there is no such function.
    pub fn call(name: &str, code: CUresult) -> Result<FailPlan, ConfigError> {
        Ok(FailPlan {
            call: Some(index_of(name)?),
            ..FailPlan::any(code)
        })
    }

    /// Fails the next call of any counted function (all but `cuStreamGetId`,
    /// `cuStreamIsCapturing` and `cuCtxGetCurrent`) with `code`.
    pub fn any(code: CUresult) -> FailPlan {
        FailPlan {
            call: None,
            skip: 0,
            times: 1,
            fault: Fault {
                code,
                sticky: false,
                executed: false,
            },
        }
    }

    /// Fails the `nth` call from now instead of the first; 0 and 1 mean the first.
    pub fn nth(mut self, nth: u64) -> FailPlan {
        self.skip = nth.saturating_sub(1);
        self
    }

    /// Fails that many calls in a row instead of one.
    pub fn times(mut self, times: u64) -> FailPlan {
        self.times = times;
        self
    }

    /// Makes the failure permanent, like that of a kernel: the failing call loses the calling thread's context (without
    /// one, all contexts), and every later call on it returns the code.
    pub fn sticky(mut self) -> FailPlan {
        self.fault.sticky = true;
        self
    }

    /// Executes the call and then returns the code in place of its result, as a driver does that reports an error of
    /// earlier work: objects are created or destroyed, and work is queued. The host observes nothing by it: a wait that
    /// returns an error proves no completion.
    pub fn executed(mut self) -> FailPlan {
        self.fault.executed = true;
        self
    }

    /// Whether this call fails; counts it.
    pub(super) fn hits(&mut self, call: Call) -> bool {
        let mine = match self.call {
            Some(index) => index == call as usize,
            None => !call.is_uncounted(),
        };
        if !mine || self.times == 0 {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.times -= 1;
        true
    }
}
