//! What grew and what shrank from one trace to another.

use super::contexts;
use crate::size::Size;
use cualloc::trace::Trace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Lines of a table, and one for all others.
const LINES: usize = 200;

/// Points of a curve.
const POINTS: usize = 600;

/// A trace, and what its replay came to.
pub struct Side<'a> {
    pub trace: &'a Trace,
    pub reserved_peak: u64,
    pub error: Option<String>,
}

/// Blocks and bytes of a group, before and after.
type Sums = [(u64, u64); 2];

/// Of which blocks sums are taken.
#[derive(Clone, Copy)]
enum Instant {
    Peak,
    End,
    All,
}

/// Both traces in figures, as the page's script reads them.
pub fn of(before: &Side<'_>, after: &Side<'_>) -> Value {
    let groups = |instant| {
        let sums = |name: fn(&Trace, usize) -> String| {
            let mut sums: HashMap<String, Sums> = HashMap::new();
            for (side, trace) in [before.trace, after.trace].into_iter().enumerate() {
                add(&mut sums, side, trace, instant, name);
            }
            lines(sums)
        };
        json!({ "context": sums(context), "size": sums(size), "stream": sums(stream) })
    };
    json!({
        "before": told(before),
        "after": told(after),
        "groups": {
            "peak": groups(Instant::Peak),
            "end": groups(Instant::End),
            "all": groups(Instant::All),
        },
    })
}

fn told(side: &Side<'_>) -> Value {
    json!({
        "name": side.trace.name(),
        "rows": side.trace.rows().len(),
        "requested": side.trace.requested_peak(),
        "reserved": side.reserved_peak,
        "error": side.error,
        "curve": curve(side.trace),
    })
}

/// The most bytes requested in each of the parts that the rows are divided into.
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
    name.map_or("no context".to_owned(), |name| contexts::shortened(name))
}

/// Powers of two: equal programs ask for nearly equal sizes.
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

fn add(
    sums: &mut HashMap<String, Sums>,
    side: usize,
    trace: &Trace,
    instant: Instant,
    name: fn(&Trace, usize) -> String,
) {
    let peak = trace.peak_row();
    // Names are made once for what is equal in them.
    let mut known: BTreeMap<(u32, u32, Option<usize>), (u64, u64)> = BTreeMap::new();
    let mut examples = BTreeMap::new();
    for (id, block) in trace.allocations().iter().enumerate() {
        let counts = match instant {
            Instant::All => true,
            Instant::End => block.released.is_none(),
            Instant::Peak => {
                block.allocated <= peak && block.released.is_none_or(|released| released > peak)
            }
        };
        if counts {
            let like = (block.bytes.ilog2(), block.stream, trace.context_of(id));
            examples.entry(like).or_insert(id);
            let sum = known.entry(like).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(block.bytes));
        }
    }
    for (like, (blocks, bytes)) in known {
        let Some(id) = examples.get(&like) else {
            continue;
        };
        let sum = &mut sums.entry(name(trace, *id)).or_default()[side];
        *sum = (sum.0 + blocks, sum.1.saturating_add(bytes));
    }
}

/// The groups, the largest change first: name, then blocks and bytes before and after.
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
        let most = super::encode::MOST;
        json!([
            name,
            before.0,
            before.1.min(most),
            after.0,
            after.1.min(most)
        ])
    };
    sums.into_iter().map(line).collect()
}
