//! Replays of a trace under limits, each with its own settings, and their results.

use crate::machine::ReplayContext;
use crate::replay::{self, Fault};
use crate::{Failure, text};
use cualloc::Error;
use cualloc::allocator::{Config, Policy};
use cualloc::trace::{Capacity, Pass, Replay, ReplayReport, Trace};
use indicatif::BinaryBytes;

/// The settings to try, from those that are usually cheap to those that usually need least memory.
const CHOICES: [&str; 6] = [
    "policy=classic",
    "policy=packed,tune.views=off",
    "policy=packed",
    "policy=packed,profile=dense,tune.views=off",
    "policy=packed,profile=dense",
    "policy=packed,profile=dense,tune.handle=2M",
];

/// An allocator that never reserves more than a quarter of its limit behaves identically under every larger limit: the
/// policies consider the limit only from half of it on, and no request exceeds what is reserved in the end.
const UNSEEN: u64 = 4;

pub struct Choice {
    /// The text for `CUALLOC_CONFIG`, without a limit.
    pub text: String,
    pub config: Config,
}

impl Choice {
    /// Returns all settings to try: those of the environment, if there are any, and [`CHOICES`].
    pub fn all(environment: Option<&str>) -> Result<Vec<Choice>, Failure> {
        let own = environment.map(without_limit);
        let own = own.filter(|own| !own.is_empty() && !CHOICES.contains(&own.as_str()));
        let texts = own.into_iter().chain(CHOICES.map(str::to_owned));
        let choices = texts.map(|text| match text.parse() {
            Ok(config) => Ok(Choice { text, config }),
            Err(error) => Err(Failure::usage(format!("{text}: {error}"))),
        });
        choices.collect()
    }

    pub fn shown(&self) -> String {
        let words = self.text.split(',').map(|word| match word.split_once('=') {
            Some(("policy" | "profile", value)) => value,
            _ => word,
        });
        words.collect::<Vec<_>>().join(" ")
    }

    pub fn under(&self, limit: u64) -> String {
        format!("{},limit={limit}", self.text)
    }
}

fn without_limit(text: &str) -> String {
    let key = |pair: &str| pair.split('=').next().map(str::trim) == Some("limit");
    let kept = text.split(',').map(str::trim).filter(|pair| !key(pair));
    kept.collect::<Vec<_>>().join(",")
}

#[derive(Clone, Default)]
pub struct Trial {
    pub policy: Policy,
    pub reserved_peak: u64,
    /// All passes, if they completed.
    pub passes: Vec<Pass>,
    /// How often memory was released or work was awaited before an allocation was tried again.
    pub retries: u64,
    pub why: Option<String>,
}

impl Trial {
    pub fn fits(&self) -> bool {
        self.why.is_none()
    }

    pub fn nanos(&self) -> u64 {
        self.passes.iter().map(|pass| pass.calls.nanos()).sum()
    }

    fn refused(policy: Policy, why: String) -> Trial {
        Trial {
            policy,
            why: Some(why),
            ..Trial::default()
        }
    }
}

/// Why there is no result for a trace.
pub enum Stop {
    /// A replay could not start.
    Begin(Error),
    /// A replay failed for a reason other than lack of memory.
    Faults(Vec<Fault>),
}

impl Stop {
    pub fn fault(text: String) -> Stop {
        Stop::Faults(vec![Fault::new(text)])
    }
}

/// Called before each replay with its settings and its limit.
type Progress<'a> = Box<dyn FnMut(&str, u64) + 'a>;

/// All trials of a trace. Trials of different sizes share results where possible.
pub struct Trials<'a> {
    trace: &'a Trace,
    choices: &'a [Choice],
    device: &'a ReplayContext,
    progress: Progress<'a>,
    /// The known results of each choice, by limit.
    known: Vec<Vec<(u64, Trial)>>,
}

impl<'a> Trials<'a> {
    pub fn new(
        device: &'a ReplayContext,
        trace: &'a Trace,
        choices: &'a [Choice],
        progress: impl FnMut(&str, u64) + 'a,
    ) -> Trials<'a> {
        Trials {
            trace,
            choices,
            device,
            progress: Box::new(progress),
            known: vec![Vec::new(); choices.len()],
        }
    }

    pub fn under(&mut self, index: usize, limit: u64) -> Result<Trial, Stop> {
        let mut known = self.known[index].iter();
        let known = known.find(|(tried, trial)| {
            let unseen = trial.reserved_peak.saturating_mul(UNSEEN);
            *tried == limit || trial.fits() && unseen <= limit.min(*tried)
        });
        if let Some((_, trial)) = known {
            return Ok(trial.clone());
        }
        let trial = self.replay(index, limit)?;
        self.known[index].push((limit, trial.clone()));
        Ok(trial)
    }

    fn replay(&mut self, index: usize, limit: u64) -> Result<Trial, Stop> {
        let choice = &self.choices[index];
        let config = choice.config.clone().limit(Some(limit));
        let peak = self.trace.required_peak();
        if peak > limit {
            let failed = match peak > self.trace.requested_peak() {
                true => ", including a request that failed",
                false => "",
            };
            let why = format!("the program requires {}{failed}", BinaryBytes(peak));
            return Ok(Trial::refused(config.policy, why));
        }
        // Settings and limit may contradict each other.
        if let Err(error) = config.validate() {
            return Ok(Trial::refused(config.policy, error.to_string()));
        }
        (self.progress)(&choice.text, limit);
        let replay = Replay::new(self.trace).config(config).serve_failed(true);
        let report = replay
            .repeat(Capacity::REPLAYS)
            .run(self.device.context())
            .map_err(Stop::Begin)?;
        trial(report)
    }

    /// Finds the smallest limit for the choice that needs least, as `cualloc capacity` does.
    pub fn needed(&mut self) -> Result<Option<u64>, Stop> {
        let Some(choice) = self.choices.last() else {
            return Ok(None);
        };
        let progress = &mut self.progress;
        let search = Replay::new(self.trace)
            .config(choice.config.clone())
            .serve_failed(true)
            .on_progress(|limit| progress(&choice.text, limit))
            .capacity(self.device.context())
            .map_err(Stop::Begin)?;
        match search.fault {
            Some(report) => Err(Stop::Faults(replay::faults(&report))),
            None => Ok(search.limit),
        }
    }
}

fn trial(mut report: ReplayReport) -> Result<Trial, Stop> {
    let why = match (report.failed, &report.error) {
        (Some((pass, row)), Some(error)) if error.is_out_of_memory() => {
            let why = text::chain(error);
            Some(format!("replay {pass} fails at row {row}: {why}"))
        }
        _ => None,
    };
    if why.is_some() {
        (report.failed, report.error) = (None, None);
    }
    if !report.is_clean() {
        return Err(Stop::Faults(replay::faults(&report)));
    }
    let (stats, steps) = (report.stats, report.stats.reclaim);
    Ok(Trial {
        policy: report.policy,
        reserved_peak: report.reserved_peak_max(),
        passes: report.passes,
        retries: stats.retries + steps.released + steps.host_waits + steps.synchronised,
        why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_of_the_list_and_of_the_environment() {
        let texts = |environment| {
            let choices = Choice::all(environment).map_err(|error| error.to_string());
            let choices = choices.unwrap().into_iter();
            choices.map(|choice| choice.text).collect::<Vec<_>>()
        };
        assert_eq!(texts(None), CHOICES);
        assert_eq!(texts(Some(" limit = 5G ")), CHOICES);
        assert_eq!(texts(Some("policy=packed,limit=5G")), CHOICES);
        let own = texts(Some("tune.views=off, limit=5G ,policy=packed"));
        assert_eq!(own[0], "tune.views=off,policy=packed");
        assert_eq!(own[1..], CHOICES);
        assert!(Choice::all(Some("polcy=packed")).is_err());
    }
}
