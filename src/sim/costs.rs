//! Counts of calls, what they would have cost, and failures on order.

use super::call::{Call, NAMES};
use super::config::ConfigError;
use crate::driver::sys::CUresult;

/// Modelled nanoseconds of each driver function.
#[derive(Clone, Debug)]
pub struct CostTable {
    nanos: Vec<u64>,
}

/// Medians of one H200 (driver 580, CUDA 13.0); 0 for calls never measured.
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

impl Default for CostTable {
    fn default() -> Self {
        let mut table = CostTable {
            nanos: vec![0; NAMES.len()],
        };
        for &(call, nanos) in MEASURED {
            table.nanos[call as usize] = nanos;
        }
        table
    }
}

impl CostTable {
    /// Sets what one call of `name` costs, in nanoseconds. `cuMemSetAccess` and `cuMemUnmap` cost
    /// this much for each mapping in their range.
    ///
    /// # Errors
    /// [`ConfigError::UnknownFunction`] if there is no such function.
    pub fn set(&mut self, name: &str, nanos: u64) -> Result<(), ConfigError> {
        let index = Call::index_of(name).ok_or_else(|| ConfigError::UnknownFunction {
            name: name.to_owned(),
        })?;
        self.nanos[index] = nanos;
        Ok(())
    }

    /// What one call of `name` costs, in nanoseconds; `None` if there is no such function.
    pub fn get(&self, name: &str) -> Option<u64> {
        Call::index_of(name).map(|index| self.nanos[index])
    }

    /// Costs of a program that never synchronised a stream, where a query takes 1.2 us.
    pub fn slow_queries() -> CostTable {
        let mut table = CostTable::default();
        table.nanos[Call::cuEventQuery as usize] = 1_200;
        table
    }

    pub(super) fn of(&self, call: Call) -> u64 {
        self.nanos[call as usize]
    }
}

/// How often each function was called, and what that would have cost.
#[derive(Clone, Debug)]
pub struct Counters {
    calls: Vec<u64>,
    /// Modelled nanoseconds of all calls, waits included.
    pub nanos: u64,
    /// Calls that wait for the device: synchronise calls, `cuMemFree`.
    pub waits: u64,
    /// Those of them that found something to wait for.
    pub blocked_waits: u64,
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
    /// Calls of `name`; 0 for an unknown name.
    pub fn get(&self, name: &str) -> u64 {
        Call::index_of(name).map_or(0, |index| self.calls[index])
    }

    /// All functions that were called, with their counts, in the order of `wrapper.h`.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES
            .iter()
            .zip(&self.calls)
            .filter(|(_, count)| **count > 0)
            .map(|(name, count)| (*name, *count))
    }

    /// All calls but those of `cuStreamGetId`, `cuStreamIsCapturing` and `cuCtxGetCurrent`.
    pub fn total(&self) -> u64 {
        let uncounted = [
            Call::cuStreamGetId,
            Call::cuStreamIsCapturing,
            Call::cuCtxGetCurrent,
        ];
        let skipped: u64 = uncounted
            .iter()
            .map(|call| self.calls[*call as usize])
            .sum();
        self.calls.iter().sum::<u64>() - skipped
    }

    pub(super) fn count(&mut self, call: Call, nanos: u64) {
        self.calls[call as usize] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
    }
}

/// An order to fail calls.
#[derive(Clone, Debug)]
pub struct FailPlan {
    pub(super) call: Option<usize>,
    pub(super) skip: u64,
    pub(super) times: u64,
    pub(super) code: CUresult,
    pub(super) sticky: bool,
}

impl FailPlan {
    /// Fails the next call of `name` with `code`.
    ///
    /// # Errors
    /// [`ConfigError::UnknownFunction`] if there is no such function.
    pub fn call(name: &str, code: CUresult) -> Result<FailPlan, ConfigError> {
        let index = Call::index_of(name).ok_or_else(|| ConfigError::UnknownFunction {
            name: name.to_owned(),
        })?;
        Ok(FailPlan {
            call: Some(index),
            skip: 0,
            times: 1,
            code,
            sticky: false,
        })
    }

    /// Fails the next call of any counted function (all but `cuStreamGetId`,
    /// `cuStreamIsCapturing` and `cuCtxGetCurrent`) with `code`.
    pub fn any(code: CUresult) -> FailPlan {
        FailPlan {
            call: None,
            skip: 0,
            times: 1,
            code,
            sticky: false,
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

    /// Makes the failure one that lasts, as that of a kernel does: with the call that fails, the calling
    /// thread's context is lost (without one, all are), and every later call on it returns the code.
    pub fn sticky(mut self) -> FailPlan {
        self.sticky = true;
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
