//! Requests that failed in the recorded program, for the page.

use super::contexts::shorten;
use super::encode::exact;
use cualloc::allocator::Regime;
use cualloc::error::Cause;
use cualloc::record::FailedRequest;
use cualloc::trace::{Allocation, Trace};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The maximum number of failed requests listed.
const LISTED: usize = 200;
/// The number of groups of live blocks named, as in an error of the library.
const HOLDERS: usize = 5;

/// What groups live blocks: their context, or else their size rounded down to a power of two and their stream.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Context(usize),
    Size(u32, u32),
}

/// Returns the last failed request with its row, with the same members as the JSON of the library's out-of-memory
/// error.
pub fn last(trace: &Trace, failed: &[FailedRequest]) -> Option<Value> {
    let (at, (row, bytes)) = trace.failed_requests().enumerate().last()?;
    let request = failed.get(at).cloned().unwrap_or_default();
    let live = trace.live_bytes().nth(row).unwrap_or(0);
    let holders = holders(trace, row);
    let listed: u64 = holders.iter().map(|(_, (bytes, _))| bytes).sum();
    let by_device = matches!(request.cause, Some(Cause::Device | Cause::Others));
    let (device, limit) = (request.device_memory, request.limit);
    let (bound, bound_of) = match (device, limit) {
        (Some(device), limit) if by_device || limit.is_none() => (Some(device), Some("device")),
        (_, Some(limit)) => (Some(limit), Some("limit")),
        _ => (None, None),
    };
    let holders = holders.iter().map(|(group, (bytes, blocks))| {
        let mut holder = match group {
            Group::Context(context) => {
                json!({ "by": "context", "name": shorten(&trace.contexts()[*context]) })
            }
            Group::Size(log, stream) => json!({
                "by": "size", "least": exact(1 << log), "below": exact(2 << log), "stream": stream,
            }),
        };
        holder["bytes"] = exact(*bytes).into();
        holder["blocks"] = (*blocks).into();
        holder
    });
    Some(json!({
        "recorded": true,
        "row": row,
        "device": request.device,
        "cause": request.cause.map(Cause::name),
        "requested": exact(bytes),
        "live": exact(live),
        "bound": exact(bound),
        "bound_of": bound_of,
        "missing": exact(request.missing),
        "advice": request.advice(),
        "context": request.context.as_deref().map(shorten),
        "holders": holders.collect::<Value>(),
        "other_live": exact(live.saturating_sub(listed)),
        "limit": exact(limit),
        "regime": request.regime.map(Regime::name),
        "driver_free": exact(request.device_free),
        "driver_total": exact(device),
        "pending": [],
        "pinned": [],
        "holes": [],
    }))
}

/// Returns the failed requests: row, bytes, live bytes, cause and context. Only the last ones if there are many.
pub fn all(trace: &Trace, failed: &[FailedRequest]) -> Vec<Value> {
    let mut rows: Vec<(usize, (usize, u64))> = trace.failed_requests().enumerate().collect();
    rows.drain(..rows.len().saturating_sub(LISTED));
    let live = match rows.is_empty() {
        true => Vec::new(),
        false => trace.live_bytes().collect(),
    };
    let line = |(at, (row, bytes)): (usize, (usize, u64))| {
        let request = failed.get(at);
        let cause = request.and_then(|request| request.cause).map(Cause::name);
        let context = request.and_then(|request| request.context.as_deref());
        json!([
            row,
            exact(bytes),
            exact(live[row]),
            cause,
            context.map(shorten)
        ])
    };
    rows.into_iter().map(line).collect()
}

pub fn is_live(block: &Allocation, row: usize) -> bool {
    block.allocated <= row && block.released.is_none_or(|released| released > row)
}

/// Returns the groups of live blocks at a row that hold the most: bytes and blocks of each.
fn holders(trace: &Trace, row: usize) -> Vec<(Group, (u64, u64))> {
    let mut sums: BTreeMap<Group, (u64, u64)> = BTreeMap::new();
    for (id, block) in trace.allocations().iter().enumerate() {
        if !is_live(block, row) {
            continue;
        }
        let group = match trace.context_of(id) {
            Some(context) => Group::Context(context),
            None => Group::Size(block.bytes.checked_ilog2().unwrap_or(0), block.stream),
        };
        let (bytes, blocks) = sums.entry(group).or_default();
        *bytes = bytes.saturating_add(block.bytes);
        *blocks += 1;
    }
    let mut holders: Vec<_> = sums.into_iter().collect();
    holders.sort_by_key(|(_, (bytes, _))| Reverse(*bytes));
    holders.truncate(HOLDERS);
    holders
}
