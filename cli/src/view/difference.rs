//! The growth and shrinkage between two traces.

use super::contexts;
use super::encode::exact;
use super::failed::is_live;
use crate::size::Size;
use crate::text;
use cualloc::trace::{ReplayReport, Trace};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Maximum number of lines of a table, besides the one for all others.
const LINES: usize = 200;

/// Number of points of a curve.
const POINTS: usize = 600;

/// A trace and the result of its replay.
pub struct Side<'a> {
    trace: &'a Trace,
    reserved_peak: u64,
    /// Why the replay ended before its last row.
    pub error: Option<String>,
}

impl<'a> Side<'a> {
    pub fn new(trace: &'a Trace, report: &ReplayReport) -> Side<'a> {
        let error = report.failed.map(|(_, row)| match &report.error {
            Some(error) => format!("row {row} failed: {}", text::chain(error)),
            None => format!("row {row} failed"),
        });
        Side {
            trace,
            reserved_peak: report.reserved_peak,
            error,
        }
    }
}

/// Number and bytes of a group's blocks, before and after.
type Sums = [(u64, u64); 2];

/// The instant whose live blocks are summed.
#[derive(Clone, Copy)]
enum Instant {
    Peak,
    End,
    All,
}

/// Compares both traces, for the page's script.
pub fn of(before: &Side<'_>, after: &Side<'_>) -> Value {
    let groups = |instant| {
        let names: [fn(&Trace, usize) -> String; 3] = [context, size, stream];
        let mut groups = names.map(|_| HashMap::<String, Sums>::new());
        for (side, trace) in [before.trace, after.trace].into_iter().enumerate() {
            // The name is computed once for blocks with equal properties.
            for (id, blocks, bytes) in group_alike(trace, instant) {
                for (sums, name) in groups.iter_mut().zip(names) {
                    let sum = &mut sums.entry(name(trace, id)).or_default()[side];
                    *sum = (sum.0 + blocks, sum.1.saturating_add(bytes));
                }
            }
        }
        let [context, size, stream] = groups.map(lines);
        json!({ "context": context, "size": size, "stream": stream })
    };
    json!({
        "before": figures(before),
        "after": figures(after),
        "groups": {
            "peak": groups(Instant::Peak),
            "end": groups(Instant::End),
            "all": groups(Instant::All),
        },
    })
}

fn figures(side: &Side<'_>) -> Value {
    json!({
        "name": side.trace.name(),
        "rows": side.trace.rows().len(),
        "requested": side.trace.requested_peak(),
        "reserved": side.reserved_peak,
        "error": side.error,
        "curve": curve(side.trace),
    })
}

/// Returns the most bytes requested in each of the parts that the rows are divided into.
fn curve(trace: &Trace) -> Vec<u64> {
    let rows = trace.rows().len();
    let mut points = vec![0; POINTS.min(rows)];
    for (index, live) in trace.live_bytes().enumerate() {
        let point = index * points.len() / rows;
        points[point] = live.max(points[point]);
    }
    points
}

fn context(trace: &Trace, id: usize) -> String {
    let context = trace.context_of(id);
    let name = context.and_then(|context| trace.contexts().get(context));
    name.map_or("no context".to_owned(), |name| contexts::shorten(name))
}

/// Rounds to powers of two: equal programs request nearly equal sizes.
fn size(trace: &Trace, id: usize) -> String {
    let bytes = trace.allocations()[id].bytes;
    match bytes.checked_ilog2() {
        Some(power) if power < 63 => format!("{} to {}", Size(1 << power), Size(2 << power)),
        _ => "more".to_owned(),
    }
}

fn stream(trace: &Trace, id: usize) -> String {
    format!("stream {}", trace.allocations()[id].stream)
}

/// Groups blocks by size, stream and context; yields one block, the number and the bytes of each group.
fn group_alike(trace: &Trace, instant: Instant) -> impl Iterator<Item = (usize, u64, u64)> {
    let peak = trace.peak_row();
    let mut groups = BTreeMap::new();
    for (id, block) in trace.allocations().iter().enumerate() {
        let counts = match instant {
            Instant::All => true,
            Instant::End => block.released.is_none(),
            Instant::Peak => is_live(block, peak),
        };
        if counts {
            let key = (block.bytes.ilog2(), block.stream, trace.context_of(id));
            let (_, blocks, bytes) = groups.entry(key).or_insert((id, 0, 0u64));
            *blocks += 1;
            *bytes = bytes.saturating_add(block.bytes);
        }
    }
    groups.into_values()
}

/// Returns the groups, the largest change first: name, then blocks and bytes before and after.
fn lines(sums: HashMap<String, Sums>) -> Vec<Value> {
    let mut sums: Vec<(String, Sums)> = sums.into_iter().collect();
    let change = |[before, after]: &Sums| before.1.abs_diff(after.1);
    sums.sort_by(|a, b| change(&b.1).cmp(&change(&a.1)).then(a.0.cmp(&b.0)));
    let rest = sums.split_off(LINES.min(sums.len()));
    if !rest.is_empty() {
        let mut all = Sums::default();
        for (_, sums) in &rest {
            for (all, sum) in all.iter_mut().zip(sums) {
                *all = (all.0 + sum.0, all.1.saturating_add(sum.1));
            }
        }
        sums.push((format!("{} others", rest.len()), all));
    }
    let line = |(name, [before, after]): (String, Sums)| {
        json!([name, before.0, exact(before.1), after.0, exact(after.1)])
    };
    sums.into_iter().map(line).collect()
}
