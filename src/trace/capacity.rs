//! The smallest limit that a trace runs under.

use super::replay::{Pass, Replay, ReplayReport};
use super::stage::ReplayDevice;
use crate::allocator::Policy;
use crate::driver::Context;
use crate::error::Error;
use std::collections::HashMap;

/// The result of a search for the smallest limit that a trace runs under.
#[derive(Debug)]
#[non_exhaustive]
pub struct Capacity {
    /// The policy used; never [`Policy::Auto`].
    pub policy: Policy,
    /// The limit in bytes; `None` if the trace runs under no limit up to [`Capacity::FACTOR`] times its requested peak,
    /// or if a replay reported errors.
    pub limit: Option<u64>,
    /// The last pass under that limit.
    pub pass: Option<Pass>,
    /// Number of limits tried.
    pub probes: usize,
    /// The first replay that failed for a reason other than lack of memory; it ends the search.
    pub fault: Option<ReplayReport>,
}

impl Capacity {
    /// The step of the search in bytes: the granule of mapped memory.
    pub const STEP: u64 = 2 << 20;
    /// The search ends at this many times the trace's requested peak.
    pub const FACTOR: u64 = 3;
    /// How many passes in a row must complete under a limit.
    pub const REPLAYS: usize = 3;
    /// A limit counts only if the trace also runs with each of these margins, in thousandths: an allocator that fails
    /// with more memory succeeded by luck with less.
    pub const MARGINS: [u64; 4] = [5, 10, 20, 50];
}

impl Replay<'_> {
    /// Finds, by bisection, the smallest limit under which [`Capacity::REPLAYS`] consecutive passes over the trace
    /// complete, and also with each of [`Capacity::MARGINS`] more. Every probe has its own allocator. The limit of the
    /// [`config`](Replay::config) and [`repeat`](Replay::repeat) are ignored. Fails like [`run`](Replay::run).
    pub fn capacity(mut self, on: &Context) -> Result<Capacity, Error> {
        let peak = match self.serve_failed {
            true => self.trace.required_peak(),
            false => self.trace.requested_peak(),
        };
        self.repeat = Capacity::REPLAYS;
        let progress = std::mem::replace(&mut self.progress, Box::new(|_| {}));
        let mut prober = Prober {
            stage: ReplayDevice::of(on)?,
            replay: self,
            progress,
            known: HashMap::new(),
            policy: Policy::Auto,
            fault: None,
        };
        // In steps: `low` is below every limit that may suffice, `high` is the last one to try.
        let mut low = peak.div_ceil(Capacity::STEP).saturating_sub(1);
        let mut high = peak
            .saturating_mul(Capacity::FACTOR)
            .div_ceil(Capacity::STEP)
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
        let (limit, pass) = found.filter(|_| prober.fault.is_none()).unzip();
        Ok(Capacity {
            policy: prober.policy,
            limit,
            pass,
            probes: prober.known.len(),
            fault: prober.fault,
        })
    }
}

struct Prober<'a> {
    stage: ReplayDevice,
    replay: Replay<'a>,
    progress: Box<dyn FnMut(u64) + 'a>,
    /// Limits tried, and the last pass under those that sufficed.
    known: HashMap<u64, Option<Pass>>,
    policy: Policy,
    fault: Option<ReplayReport>,
}

impl Prober<'_> {
    /// Tries the limit of this many steps; returns its last pass, if it suffices.
    fn counts(&mut self, steps: u64) -> Result<Option<(u64, Pass)>, Error> {
        let limit = steps.saturating_mul(Capacity::STEP);
        let Some(pass) = self.runs(limit)? else {
            return Ok(None);
        };
        for margin in Capacity::MARGINS {
            let more = limit.saturating_add(limit / 1000 * margin);
            if self.runs(more)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some((limit, pass)))
    }

    fn runs(&mut self, limit: u64) -> Result<Option<Pass>, Error> {
        if self.fault.is_some() {
            return Ok(None);
        }
        if let Some(known) = self.known.get(&limit) {
            return Ok(known.clone());
        }
        (self.progress)(limit);
        self.replay.config = self.replay.config.clone().limit(Some(limit));
        let mut report = self.replay.run_on(&self.stage)?;
        self.policy = report.policy;
        self.replay.config = self.replay.config.clone().policy(report.policy);
        let short = report.error.as_ref().is_some_and(Error::is_out_of_memory);
        let pass = match report.failed {
            None => report.passes.pop(),
            Some(_) => None,
        };
        if short {
            (report.failed, report.error) = (None, None);
        }
        self.known.insert(limit, pass.clone());
        if !report.is_clean() {
            self.fault = Some(report);
            return Ok(None);
        }
        Ok(pass)
    }
}
