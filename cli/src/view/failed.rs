//! Requests that failed in the recorded program, as the page shows them.

use super::contexts::shortened;
use super::encode;
use cualloc::error::Cause;
use cualloc::record::FailedRequest;
use cualloc::trace::Trace;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Most failed requests that are listed.
const LISTED: usize = 200;
/// Groups of live blocks that are named, as an error of the library does.
const HOLDERS: usize = 5;

/// What live blocks have in common: a context, else a power of two below their size, and a stream.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Context(usize),
    Size(u32, u32),
}

/// The last request that failed, with the members that an out-of-memory error of the library has as JSON, and its row.
pub fn last(trace: &Trace, failed: &[FailedRequest]) -> Option<Value> {
    let (at, (row, bytes)) = trace.failed_requests().enumerate().last()?;
    let told = failed.get(at).cloned().unwrap_or_default();
    let live = trace.live_bytes().nth(row).unwrap_or(0);
    let holders = holders(trace, row);
    let listed: u64 = holders.iter().map(|(_, (bytes, _))| bytes).sum();
    let (bound, bound_of) = match (told.cause, told.limit, told.device_memory) {
        (Some(Cause::Device | Cause::Others), _, Some(memory)) => (Some(memory), Some("device")),
        (_, Some(limit), _) => (Some(limit), Some("limit")),
        (_, None, Some(memory)) => (Some(memory), Some("device")),
        (_, None, None) => (None, None),
    };
    let shown = |bytes: Option<u64>| bytes.map(|bytes| bytes.min(encode::MOST));
    let holders = holders.iter().map(|(group, (bytes, blocks))| {
        let (name, least, below, stream) = match group {
            Group::Context(context) => (
                Some(shortened(&trace.contexts()[*context])),
                None,
                None,
                None,
            ),
            Group::Size(log, stream) => (None, Some(1 << log), Some(2 << log), Some(*stream)),
        };
        json!({
            "by": if name.is_some() { "context" } else { "size" },
            "name": name,
            "least": shown(least),
            "below": shown(below),
            "stream": stream,
            "bytes": bytes.min(&encode::MOST),
            "blocks": blocks,
        })
    });
    Some(json!({
        "recorded": true,
        "row": row,
        "device": told.device,
        "cause": told.cause.map(Cause::name),
        "requested": bytes.min(encode::MOST),
        "live": live.min(encode::MOST),
        "bound": shown(bound),
        "bound_of": bound_of,
        "missing": shown(told.missing),
        "advice": told.advice(),
        "context": told.context.as_deref().map(shortened),
        "holders": holders.collect::<Vec<_>>(),
        "other_live": live.saturating_sub(listed).min(encode::MOST),
        "limit": shown(told.limit),
        "driver_free": shown(told.device_free),
        "driver_total": shown(told.device_memory),
        "pending": [],
        "pinned": [],
        "holes": [],
    }))
}

/// All requests that failed: row, bytes, what was live, cause and context; of many the last ones.
pub fn all(trace: &Trace, failed: &[FailedRequest]) -> Vec<Value> {
    let mut rows: Vec<(usize, (usize, u64))> = trace.failed_requests().enumerate().collect();
    rows.drain(..rows.len().saturating_sub(LISTED));
    let live: Vec<u64> = match rows.is_empty() {
        true => Vec::new(),
        false => trace.live_bytes().collect(),
    };
    let line = |(at, (row, bytes)): (usize, (usize, u64))| {
        let told = failed.get(at);
        let cause = told.and_then(|told| told.cause).map(Cause::name);
        let context = told.and_then(|told| told.context.as_deref()).map(shortened);
        let [bytes, live] = [bytes, live[row]].map(|bytes| bytes.min(encode::MOST));
        json!([row, bytes, live, cause, context])
    };
    rows.into_iter().map(line).collect()
}

/// The groups of blocks live at a row that hold the most bytes: bytes and blocks of each.
fn holders(trace: &Trace, row: usize) -> Vec<(Group, (u64, u64))> {
    let mut sums: BTreeMap<Group, (u64, u64)> = BTreeMap::new();
    let is_live =
        |born: usize, freed: Option<usize>| born <= row && freed.is_none_or(|at| at > row);
    for (id, block) in trace.allocations().iter().enumerate() {
        if !is_live(block.allocated, block.released) {
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
