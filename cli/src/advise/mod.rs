//! `cualloc advise`: whether recorded allocations fit into so much memory, and with which settings.

mod trial;

use crate::machine::Machine;
use crate::options::{AdviseOptions, DeviceChoice, GlobalOptions};
use crate::output::{self, Output, SCHEMA};
use crate::replay::{self, Fault};
use crate::settings::Settings;
use crate::size::Size;
use crate::table::{Cell, Column, Table};
use crate::{Failure, Outcome, for_each, input, text};
use cualloc::allocator::Profile;
use cualloc::trace::{Capacity, Pass, Trace};
use indicatif::BinaryBytes;
use serde::Serialize;
use trial::{Choice, Stop, Trial, Trials};

/// Recordings of more live bytes are not replayed: a simulated device of that size takes very long to fill.
const MOST: u64 = 512 << 30;

/// The width of a size that is not known beforehand.
const SIZE: usize = 10;

/// One line of `--json`: a trace and a size.
#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
    trace: &'a str,
    memory_bytes: u64,
    fits: bool,
    requested_peak_bytes: u64,
    /// Requests that failed in the recorded program: what fits serves them, too.
    failed_requests: usize,
    /// What would have been live at most had they succeeded.
    required_peak_bytes: u64,
    /// The smallest memory that the settings which need least run under.
    needed_bytes: Option<u64>,
    /// What is left if that is all they get. Null if it does not fit.
    spare_bytes: Option<u64>,
    /// What is missing. Null if it fits.
    missing_bytes: Option<u64>,
    /// The cheapest settings that fit, as `CUALLOC_CONFIG` takes them.
    settings: Option<&'a str>,
    /// All settings that were tried: those that fit before the others, and of those the cheapest first.
    choices: &'a [ChoiceLine],
    /// What `CUALLOC_CONFIG` says.
    config: Option<&'a str>,
    /// Null: there is an answer.
    error: Option<String>,
    /// Why it does not fit.
    reasons: Vec<String>,
    /// What the file lacks.
    warnings: &'a [String],
}

/// Settings, and what they cost.
#[derive(Serialize)]
struct ChoiceLine {
    /// As `CUALLOC_CONFIG` takes them.
    settings: String,
    policy: &'static str,
    profile: &'static str,
    views: bool,
    /// If it is set.
    handle_bytes: Option<u64>,
    fits: bool,
    /// Why it does not fit.
    reason: Option<String>,
    /// Of all replays. Null if it does not fit, like the next three.
    reserved_peak_bytes: Option<u64>,
    /// Of all replays, as the simulated driver is modelled.
    driver_ns: Option<u64>,
    /// How often memory was given back, or work waited for, before an allocation was tried again.
    retries: Option<u64>,
    replays: Vec<ReplayLine>,
    /// As a table shows them.
    #[serde(skip)]
    shown: String,
}

#[derive(Serialize)]
struct ReplayLine {
    reserved_peak_bytes: u64,
    driver_calls: u64,
    handle_ops: u64,
    driver_ns: u64,
}

impl ReplayLine {
    fn new(pass: &Pass) -> ReplayLine {
        ReplayLine {
            reserved_peak_bytes: pass.reserved_peak,
            driver_calls: pass.calls.total(),
            handle_ops: pass.calls.handle_ops(),
            driver_ns: pass.calls.nanos(),
        }
    }
}

impl ChoiceLine {
    fn new(choice: &Choice, limit: u64, trial: &Trial) -> ChoiceLine {
        let config = &choice.config;
        let fits = trial.fits();
        ChoiceLine {
            settings: choice.under(limit),
            policy: trial.policy.name(),
            profile: match config.profile {
                Profile::Dense => "dense",
                _ => "default",
            },
            views: config.views,
            handle_bytes: config.handle,
            fits,
            reason: trial.why.clone(),
            reserved_peak_bytes: fits.then_some(trial.reserved_peak),
            driver_ns: fits.then(|| trial.nanos()),
            retries: fits.then_some(trial.retries),
            replays: trial.passes.iter().map(ReplayLine::new).collect(),
            shown: choice.shown(),
        }
    }
}

/// What there is to say of a trace under one size.
struct Advice {
    memory: u64,
    needed: Option<u64>,
    choices: Vec<ChoiceLine>,
}

impl Advice {
    /// The cheapest settings that fit.
    fn best(&self) -> Option<&ChoiceLine> {
        self.choices.first().filter(|choice| choice.fits)
    }

    /// The smallest memory that is known to do: where the settings that need least do not need least after all,
    /// the size itself.
    fn needed(&self) -> Option<u64> {
        match (self.best(), self.needed) {
            (Some(_), needed) => Some(needed.map_or(self.memory, |needed| needed.min(self.memory))),
            (None, needed) => needed.filter(|needed| *needed > self.memory),
        }
    }

    fn spare(&self) -> Option<u64> {
        let spare = self.needed()?.min(self.memory);
        self.best().map(|_| self.memory - spare)
    }

    fn missing(&self) -> Option<u64> {
        let missing = self.needed()?.checked_sub(self.memory);
        missing.filter(|_| self.best().is_none())
    }

    /// Why it does not fit: what those settings say that need least.
    fn reasons(&self) -> Vec<String> {
        match self.best() {
            Some(_) => Vec::new(),
            None => {
                let reasons = self
                    .choices
                    .iter()
                    .filter_map(|choice| choice.reason.clone());
                reasons.take(1).collect()
            }
        }
    }
}

pub fn run(global: &GlobalOptions, options: &AdviseOptions, output: &mut Output) -> Outcome {
    replay::check(&options.files)?;
    if global.device() == DeviceChoice::Cuda {
        let told = "--device cuda is not for advise, which replays on the simulator alone";
        return Err(Failure::Usage(told.to_owned()));
    }
    if global.about_simulator() {
        let told = "--sim-memory is not for advise: --memory says how much there is";
        return Err(Failure::Usage(told.to_owned()));
    }
    let settings = Settings::read(None, false)?;
    let choices = Choice::all(settings.text())?;
    if settings.limit().is_some() {
        output.note("the limit of CUALLOC_CONFIG is not used: --memory says how much there is");
    }
    let table = table(options, &choices);
    for_each(&options.files, output, |path, output| {
        let read = input::read(path, &options.input, output)?;
        let (trace, warnings, file) = (read.trace, read.warnings, text::file(path, input::STDIN));
        if let Some(failed) = replay::failed_requests(&trace) {
            output.note(&format!("{file}: {failed}; what fits serves them, too"));
        }
        let advice = match advise(global, options, &trace, &choices, output) {
            Ok(advice) => advice,
            Err(Stop::Command(failure)) => return Err(failure),
            Err(Stop::Begin(error)) => return Err(Failure::no_replay(path, error)),
            Err(Stop::Faults(faults)) => {
                replay::complain(path, &faults);
                let reasons = faults.into_iter().map(|fault| fault.text).collect();
                output.failure(trace.name(), reasons)?;
                return Ok(false);
            }
        };
        for advice in &advice {
            if output.json {
                output.json(&line(&trace, &warnings, advice, settings.text()))?;
                continue;
            }
            let shown = if options.all { usize::MAX } else { 1 };
            for choice in advice.choices.iter().take(shown) {
                output.row(&table, cells(&trace, advice, choice))?;
            }
            for reason in advice.reasons() {
                let size = Size(advice.memory);
                output.note(&format!("{file} does not fit into {size}: {reason}"));
            }
        }
        Ok(true)
    })
}

/// What there is to say of a trace under each of the sizes.
fn advise(
    global: &GlobalOptions,
    options: &AdviseOptions,
    trace: &Trace,
    choices: &[Choice],
    output: &Output,
) -> Result<Vec<Advice>, Stop> {
    let peak = trace.required_peak();
    if peak > MOST {
        return Err(Stop::Faults(vec![Fault::new(format!(
            "expected a trace that requires at most {}, found one that requires {}",
            BinaryBytes(MOST),
            BinaryBytes(peak)
        ))]));
    }
    // Limits bound what is held, and never the device.
    let most = peak * (Capacity::FACTOR + 1);
    let machine = Machine::Simulated {
        memory: global.sim_memory().max(most),
    };
    let bar = output.spinner(trace.name());
    let told = |settings: &str, limit| {
        let limit = output::mebibytes(limit);
        bar.set_message(format!("{settings} under {limit} MiB"));
        bar.tick();
    };
    let mut trials = Trials::new(&machine, options.lag, trace, choices, told)?;
    let needed = trials.needed();
    let advice = needed.and_then(|needed| {
        let mut sizes: Vec<u64> = options.memory.iter().map(|size| size.0).collect();
        if sizes.is_empty() {
            let none = || Stop::Faults(vec![Fault::new(text::no_limit(peak))]);
            sizes.push(needed.ok_or_else(none)?);
        }
        let sizes = sizes.into_iter();
        sizes
            .map(|memory| under(&mut trials, choices, memory, needed))
            .collect()
    });
    drop(trials);
    bar.finish_and_clear();
    advice
}

fn under(
    trials: &mut Trials<'_>,
    choices: &[Choice],
    memory: u64,
    needed: Option<u64>,
) -> Result<Advice, Stop> {
    let mut lines = Vec::with_capacity(choices.len());
    for (index, choice) in choices.iter().enumerate() {
        let trial = trials.under(index, memory)?;
        lines.push(ChoiceLine::new(choice, memory, &trial));
    }
    // Of what does not fit, what needs least says best why.
    let (mut fitting, mut others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.fits);
    fitting.sort_by_key(|line| line.driver_ns);
    others.reverse();
    fitting.append(&mut others);
    Ok(Advice {
        memory,
        needed,
        choices: fitting,
    })
}

fn line<'a>(
    trace: &'a Trace,
    warnings: &'a [String],
    advice: &'a Advice,
    config: Option<&'a str>,
) -> Line<'a> {
    let best = advice.best();
    Line {
        schema: SCHEMA,
        trace: trace.name(),
        memory_bytes: advice.memory,
        fits: best.is_some(),
        requested_peak_bytes: trace.requested_peak(),
        failed_requests: trace.failed_requests().count(),
        required_peak_bytes: trace.required_peak(),
        needed_bytes: advice.needed(),
        spare_bytes: advice.spare(),
        missing_bytes: advice.missing(),
        settings: best.map(|choice| choice.settings.as_str()),
        choices: &advice.choices,
        config,
        error: None,
        reasons: advice.reasons(),
        warnings,
    }
}

fn table(options: &AdviseOptions, choices: &[Choice]) -> Table {
    let sizes = options.memory.iter().map(|size| size.to_string().len());
    let shown = choices.iter().map(|choice| choice.shown().len());
    let columns = vec![
        Column::new("trace", "", replay::name_width(&options.files), 0),
        Column::new("memory", "", sizes.max().unwrap_or(SIZE), 0),
        Column::new("fits", "", 0, 0),
        Column::new("spare", "MiB", 8, 0),
        Column::new("needed", "MiB", 8, 2),
        Column::new("settings", "", shown.max().unwrap_or(0), 0),
        Column::new("held", "MiB", 8, 3),
        Column::new("calls", "first", 6, 1),
        Column::new("calls", "last", 6, 5),
        Column::new("driver", "ms", 7, 1),
        Column::new("retries", "", 0, 4),
    ];
    let terminal = if options.wide { None } else { output::width() };
    Table::new(columns, terminal)
}

fn cells(trace: &Trace, advice: &Advice, choice: &ChoiceLine) -> Vec<Cell> {
    let mebibytes = |bytes: Option<u64>| Cell::or_dash(bytes.map(output::mebibytes));
    let calls = |replay: Option<&ReplayLine>| Cell::or_dash(replay.map(|it| it.driver_calls));
    let milliseconds = |nanos: u64| format!("{:.1}", nanos as f64 / 1e6);
    let spare = match advice.missing() {
        Some(missing) => format!("-{}", output::mebibytes(missing)).into(),
        None => mebibytes(advice.spare().filter(|_| choice.fits)),
    };
    let fits = if choice.fits { "yes" } else { "no" };
    vec![
        trace.name().into(),
        Size(advice.memory).to_string().into(),
        Cell::verdict(fits.to_owned(), choice.fits),
        spare,
        mebibytes(advice.needed()),
        choice.shown.clone().into(),
        mebibytes(choice.reserved_peak_bytes),
        calls(choice.replays.first()),
        calls(choice.replays.last()),
        Cell::or_dash(choice.driver_ns.map(milliseconds)),
        Cell::or_dash(choice.retries),
    ]
}
