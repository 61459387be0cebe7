//! Requests that failed in a recorded program.

use std::collections::BTreeMap;

use crate::allocator::Regime;
use crate::error::Cause;
use crate::error::memory::{AtLeast, Bytes};
use crate::record::recording::{Action, Recording};
use crate::record::snapshot::{Act, Snapshot};

/// A request that failed for lack of memory in a recorded program, as far as its recording tells. Amounts are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FailedRequest {
    /// Requested bytes.
    pub bytes: u64,
    /// The ordinal of the device.
    pub device: usize,
    /// Why it failed.
    pub cause: Option<Cause>,
    /// Missing bytes, rounded up to a multiple of 512.
    pub missing: Option<u64>,
    /// The allocator's limit at the time; none if it had no limit, or if the recording lacks it.
    pub limit: Option<u64>,
    /// The memory regime at the time, if the recording has it.
    pub regime: Option<Regime>,
    /// Free bytes of the device, rounded down to a multiple of 512.
    pub device_free: Option<u64>,
    /// Total bytes of the device.
    pub device_memory: Option<u64>,
    /// The context that the thread was in.
    pub context: Option<String>,
}

impl FailedRequest {
    /// Returns advice, in a sentence or two, on what would have made the request succeed; empty if the recording does
    /// not contain enough.
    pub fn advice(&self) -> String {
        let free = self.device_free.map(Bytes);
        match (self.cause, self.missing, self.limit) {
            (Some(Cause::Limit), Some(missing), Some(limit)) => format!(
                "Raise the limit by {missing} bytes ({}) to {} bytes, or free as much of what is live.",
                AtLeast(missing),
                limit.saturating_add(missing)
            ),
            (Some(Cause::Others), Some(missing), _) => format!(
                "Others held too much of the device: {} more had to be free.",
                AtLeast(missing)
            ),
            (Some(Cause::Device), Some(missing), _) => format!(
                "Free {} of what is live, request less, or use a device with more memory.",
                AtLeast(missing)
            ),
            (Some(Cause::Refused), ..) => {
                "The driver refused memory that it reported as free.".to_owned()
            }
            (Some(Cause::Pending), ..) => {
                "Wait until the work that may access freed memory is complete, and request again."
                    .to_owned()
            }
            (Some(Cause::Pools), ..) => {
                "Release the guards and graph pools that keep freed memory.".to_owned()
            }
            (Some(Cause::Fragmented), ..) => {
                "Free blocks between free memory, or use policy=packed with views, which join it."
                    .to_owned()
            }
            _ => free.map_or(String::new(), |free| format!("The device had {free} free.")),
        }
    }
}

impl Recording {
    /// Returns the failed requests of one allocator, or of all of them, in the order of the rows of
    /// [`Op::Oom`](crate::trace::Op::Oom) in [`to_trace`](Self::to_trace).
    pub fn failed_requests(&self, allocator: Option<u16>) -> Vec<FailedRequest> {
        let mut limits: BTreeMap<u16, Option<u64>> = BTreeMap::new();
        let mut regimes: BTreeMap<u16, Regime> = BTreeMap::new();
        let mut failed = Vec::new();
        for event in self.events() {
            match event.action {
                Action::Limit(limit) => drop(limits.insert(event.allocator, limit)),
                Action::Regime(regime) => drop(regimes.insert(event.allocator, regime)),
                Action::OutOfMemory {
                    cause,
                    missing,
                    device_free,
                } if event.bytes > 0 && allocator.is_none_or(|only| only == event.allocator) => {
                    failed.push(FailedRequest {
                        bytes: event.bytes,
                        device: self.device_of(event.allocator),
                        cause,
                        missing,
                        limit: limits.get(&event.allocator).copied().flatten(),
                        regime: regimes.get(&event.allocator).copied(),
                        device_free,
                        device_memory: self.device_memory_of(event.allocator),
                        context: self.context(event.context).map(str::to_owned),
                    });
                }
                _ => {}
            }
        }
        failed
    }
}

impl Snapshot {
    /// Returns the failed requests of a device, in the order of the rows of [`Op::Oom`](crate::trace::Op::Oom) in
    /// [`to_trace`](Self::to_trace).
    pub fn failed_requests(&self, device: usize) -> Vec<FailedRequest> {
        let entries = self.traces.get(device).into_iter().flatten();
        let failed = entries.filter(|entry| entry.act == Act::Oom && entry.size > 0);
        failed
            .map(|entry| FailedRequest {
                bytes: entry.size,
                device,
                device_free: Some(entry.address),
                context: self.context(entry.context).map(str::to_owned),
                ..FailedRequest::default()
            })
            .collect()
    }
}
