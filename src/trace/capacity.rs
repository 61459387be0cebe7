//! The smallest limit that a trace runs under.

use super::format::Trace;
use super::replay::{Figures, Options, Report, replay};
use super::stage::Stage;
use crate::allocator::Policy;
use crate::error::Error;
use std::collections::HashMap;

/// Limits are searched in steps of this many bytes: the granule of mapped memory.
pub const LIMIT_STEP: u64 = 2 << 20;

/// The search ends at this many times the trace's requested peak.
pub const LIMIT_FACTOR: u64 = 3;

/// How many replays in a row must complete under a limit.
pub const REPLAYS: usize = 3;

/// A limit counts only if the trace also runs with this much more, in thousandths: an allocator that
/// fails with more memory is lucky with less.
pub const MARGINS: [u64; 4] = [5, 10, 20, 50];

/// The smallest limit found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Capacity {
    /// The limit, in bytes.
    pub limit: u64,
    /// The last of the replays under it.
    pub figures: Figures,
}

/// The end of a search.
#[derive(Debug)]
#[non_exhaustive]
pub struct Search {
    /// The policy in force; never [`Policy::Auto`].
    pub policy: Policy,
    /// The smallest limit; `None` if the trace runs under no limit up to [`LIMIT_FACTOR`] times its
    /// requested peak, or if a report is not in order.
    pub capacity: Option<Capacity>,
    /// How many limits were tried.
    pub probes: usize,
    /// The first replay that went wrong other than for want of memory; it ends the search.
    pub fault: Option<Report>,
}

/// Finds, by bisection, the smallest limit under which [`REPLAYS`] replays of `trace` in a row
/// complete, and also with each of [`MARGINS`] more. Every probe has an allocator of its own.
/// [`Options::limit`] and [`Options::repeat`] are not used. `progress` is told before each probe how
/// many there were, and the limit.
///
/// # Errors
/// As [`replay`].
pub fn capacity(
    stage: &Stage,
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(usize, u64),
) -> Result<Search, Error> {
    let mut prober = Prober {
        stage,
        trace,
        options: options.clone(),
        progress,
        known: HashMap::new(),
        fault: None,
    };
    prober.options.repeat = REPLAYS;
    // In steps: `low` is below every limit that can do, `high` is the last one to try.
    let peak = trace.requested_peak();
    let mut low = peak.div_ceil(LIMIT_STEP).saturating_sub(1);
    let mut high = peak
        .saturating_mul(LIMIT_FACTOR)
        .div_ceil(LIMIT_STEP)
        .max(low + 1);
    let mut found = prober.counts(high)?;
    while found.is_some() && high - low > 1 {
        let middle = low + (high - low) / 2;
        match prober.counts(middle)? {
            Some(capacity) => {
                high = middle;
                found = Some(capacity);
            }
            None => low = middle,
        }
    }
    Ok(Search {
        policy: prober.options.policy,
        capacity: found.filter(|_| prober.fault.is_none()),
        probes: prober.known.len(),
        fault: prober.fault,
    })
}

struct Prober<'a> {
    stage: &'a Stage,
    trace: &'a Trace,
    options: Options,
    progress: &'a mut dyn FnMut(usize, u64),
    /// Limits tried, and the last replay under those that did.
    known: HashMap<u64, Option<Figures>>,
    fault: Option<Report>,
}

impl Prober<'_> {
    /// Whether the limit of so many steps counts.
    fn counts(&mut self, steps: u64) -> Result<Option<Capacity>, Error> {
        let limit = steps.saturating_mul(LIMIT_STEP);
        let Some(figures) = self.runs(limit)? else {
            return Ok(None);
        };
        for margin in MARGINS {
            let more = limit.saturating_add(limit / 1000 * margin);
            if self.runs(more)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(Capacity { limit, figures }))
    }

    fn runs(&mut self, limit: u64) -> Result<Option<Figures>, Error> {
        if self.fault.is_some() {
            return Ok(None);
        }
        if let Some(known) = self.known.get(&limit) {
            return Ok(known.clone());
        }
        (self.progress)(self.known.len(), limit);
        self.options.limit = Some(limit);
        let mut report = replay(self.stage, self.trace, &self.options, &mut |_| {})?;
        self.options.policy = report.policy;
        let figures = match report.failure.take() {
            None => report.replays.pop(),
            Some(failure) => {
                if !failure.is_out_of_memory() {
                    report.failure = Some(failure);
                }
                None
            }
        };
        self.known.insert(limit, figures.clone());
        if !report.is_clean() {
            self.fault = Some(report);
            return Ok(None);
        }
        Ok(figures)
    }
}
