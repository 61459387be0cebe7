//! `cualloc advise`: whether recorded allocations fit into a given amount of memory, and with which settings.

mod trial;

use crate::machine::{Machine, ReplayContext};
use crate::options::{AdviseOptions, DeviceChoice, GlobalOptions};
use crate::output::{self, Output, SCHEMA};
use crate::replay;
use crate::settings::Settings;
use crate::size::Size;
use crate::table::{Cell, Column, Table};
use crate::{Failure, FileError, Outcome, for_each, input, text};
use cualloc::allocator::Profile;
use cualloc::trace::{Capacity, Pass, Trace};
use indicatif::BinaryBytes;
use serde_json::{Value, json};
use trial::{Choice, Stop, Trial, Trials};

/// Recordings with more live bytes are not replayed: a simulated device of that size takes very long to fill.
const MOST: u64 = 512 << 30;

/// The width of a size that is not known in advance.
const SIZE: usize = 10;

struct Advice<'a> {
    memory: u64,
    needed: Option<u64>,
    /// All settings that were tried: those that fit come first, the cheapest of them at the front.
    trials: Vec<(&'a Choice, Trial)>,
}

impl<'a> Advice<'a> {
    /// The cheapest settings that fit.
    fn best(&self) -> Option<&'a Choice> {
        let (choice, trial) = self.trials.first()?;
        trial.fits().then_some(choice)
    }

    /// The smallest memory that is known to suffice. If the settings that usually need least turn out to need more,
    /// this is the size itself.
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

    /// Why the trace does not fit, according to the settings that need least.
    fn reason(&self) -> Option<&str> {
        let mut reasons = self.trials.iter().map(|(_, trial)| trial.why.as_deref());
        reasons.next().flatten()
    }

    fn object(&self, trace: &Trace, warnings: &[String], config: Option<&str>) -> Value {
        let choices = self.trials.iter().map(|(choice, trial)| {
            let fits = trial.fits();
            json!({
                "settings": choice.under(self.memory),
                "policy": trial.policy.name(),
                "profile": match choice.config.profile {
                    Profile::Dense => "dense",
                    _ => "default",
                },
                "views": choice.config.views,
                "handle_bytes": choice.config.handle,
                "fits": fits,
                "reason": trial.why,
                // Over all replays; null if the trace does not fit. Driver time comes from the simulator's model.
                "reserved_peak_bytes": fits.then_some(trial.reserved_peak),
                "driver_ns": fits.then(|| trial.nanos()),
                "retries": fits.then_some(trial.retries),
                "replays": trial.passes.iter().map(replayed).collect::<Value>(),
            })
        });
        let best = self.best();
        json!({
            "schema": SCHEMA,
            "trace": trace.name(),
            "memory_bytes": self.memory,
            "fits": best.is_some(),
            "requested_peak_bytes": trace.requested_peak(),
            // Memory that fits also serves the requests that failed in the recorded program.
            "failed_requests": trace.failed_requests().count(),
            "required_peak_bytes": trace.required_peak(),
            "needed_bytes": self.needed(),
            "spare_bytes": self.spare(),
            "missing_bytes": self.missing(),
            "settings": best.map(|choice| choice.under(self.memory)),
            "assumes": text::ASSUMED,
            "choices": choices.collect::<Value>(),
            "config": config,
            "error": null,
            "reasons": Vec::from_iter(self.reason()),
            "warnings": warnings,
        })
    }
}

fn replayed(pass: &Pass) -> Value {
    json!({
        "reserved_peak_bytes": pass.reserved_peak,
        "driver_calls": pass.calls.total(),
        "handle_ops": pass.calls.handle_ops(),
        "driver_ns": pass.calls.nanos(),
    })
}

pub fn run(global: &GlobalOptions, options: &AdviseOptions, output: &mut Output) -> Outcome {
    let files = &options.table;
    replay::check(&files.files)?;
    if global.device() == DeviceChoice::Cuda {
        let message = "--device cuda is not for advise, which replays on the simulator alone";
        return Err(Failure::usage(message));
    }
    if global.has_simulator_option() {
        let message = "--sim-memory is not for advise: --memory says how much there is";
        return Err(Failure::usage(message));
    }
    let settings = Settings::read(&Default::default())?;
    let choices = Choice::all(settings.text())?;
    if settings.limit().is_some() {
        output.note("the limit of CUALLOC_CONFIG is not used: --memory says how much there is");
    }
    let table = table(options, &choices);
    for_each(&files.files, output, |path, output| {
        let read = input::read(path, &files.input, output)?;
        let (trace, file) = (&read.trace, text::file(path, input::STDIN));
        if let Some(failed) = replay::failed_requests(trace) {
            output.note(&format!("{file}: {failed}; what fits serves them, too"));
        }
        // A limit bounds only what is reserved, not the size of the device.
        let most = trace.required_peak().min(MOST) * (Capacity::FACTOR + 1);
        let memory = global.sim_memory().max(most);
        let device = Machine::Simulated { memory }.context(files.lag)?;
        let advice = match advise(&device, options, trace, &choices, output) {
            Ok(advice) => advice,
            Err(Stop::Begin(error)) => return Err(FileError::cannot_replay(path, error).into()),
            Err(Stop::Faults(faults)) => {
                replay::print_faults(path, &faults);
                let reasons = replay::texts(&faults);
                let error = reasons.first().map_or("", |reason| reason);
                output.failure(Some(trace.name()), None, error, &reasons)?;
                return Ok(false);
            }
        };
        for advice in &advice {
            if output.json {
                output.json(&advice.object(trace, &read.warnings, settings.text()))?;
                continue;
            }
            let shown = if options.all { usize::MAX } else { 1 };
            for (choice, trial) in advice.trials.iter().take(shown) {
                output.row(&table, cells(trace, advice, choice, trial))?;
            }
            if let Some(reason) = advice.reason() {
                let size = Size(advice.memory);
                output.note(&format!("{file} does not fit into {size}: {reason}"));
            }
        }
        Ok(true)
    })
}

fn advise<'a>(
    device: &ReplayContext,
    options: &AdviseOptions,
    trace: &Trace,
    choices: &'a [Choice],
    output: &Output,
) -> Result<Vec<Advice<'a>>, Stop> {
    let peak = trace.required_peak();
    if peak > MOST {
        let (most, peak) = (BinaryBytes(MOST), BinaryBytes(peak));
        return Err(Stop::fault(format!(
            "expected a trace that requires at most {most}, found one that requires {peak}"
        )));
    }
    let bar = output.spinner(trace.name());
    let progress = |settings: &str, limit| {
        let limit = output::mebibytes(limit);
        bar.set_message(format!("{settings} under {limit} MiB"));
        bar.tick();
    };
    let mut trials = Trials::new(device, trace, choices, progress);
    let needed = trials.needed();
    let advice = needed.and_then(|needed| {
        let mut sizes: Vec<u64> = options.memory.iter().map(|size| size.0).collect();
        if sizes.is_empty() {
            sizes.push(needed.ok_or_else(|| Stop::fault(text::no_limit_message(peak)))?);
        }
        let under = |memory| under(&mut trials, choices, memory, needed);
        sizes.into_iter().map(under).collect()
    });
    drop(trials);
    bar.finish_and_clear();
    advice
}

fn under<'a>(
    trials: &mut Trials<'_>,
    choices: &'a [Choice],
    memory: u64,
    needed: Option<u64>,
) -> Result<Advice<'a>, Stop> {
    let tried = choices.iter().enumerate();
    let tried = tried.map(|(index, choice)| Ok((choice, trials.under(index, memory)?)));
    let tried = tried.collect::<Result<Vec<_>, Stop>>()?;
    let (mut trials, others): (Vec<_>, Vec<_>) =
        tried.into_iter().partition(|(_, trial)| trial.fits());
    trials.sort_by_key(|(_, trial)| trial.nanos());
    // If nothing fits, the settings that need least give the best reason.
    trials.extend(others.into_iter().rev());
    Ok(Advice {
        memory,
        needed,
        trials,
    })
}

fn table(options: &AdviseOptions, choices: &[Choice]) -> Table {
    let sizes = options.memory.iter().map(|size| size.to_string().len());
    let shown = choices.iter().map(|choice| choice.shown().len());
    Table::of_traces(
        &options.table,
        vec![
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
        ],
    )
}

fn cells(trace: &Trace, advice: &Advice<'_>, choice: &Choice, trial: &Trial) -> Vec<Cell> {
    let fits = trial.fits();
    let mebibytes = |bytes: Option<u64>| Cell::or_dash(bytes.map(output::mebibytes));
    let calls = |pass: Option<&Pass>| Cell::or_dash(pass.map(|pass| pass.calls.total()));
    let milliseconds = || format!("{:.1}", trial.nanos() as f64 / 1e6);
    let spare = match advice.missing() {
        Some(missing) => format!("-{}", output::mebibytes(missing)).into(),
        None => mebibytes(advice.spare().filter(|_| fits)),
    };
    vec![
        trace.name().into(),
        Size(advice.memory).to_string().into(),
        Cell::verdict(if fits { "yes" } else { "no" }.to_owned(), fits),
        spare,
        mebibytes(advice.needed()),
        choice.shown().into(),
        mebibytes(fits.then_some(trial.reserved_peak)),
        calls(trial.passes.first()),
        calls(trial.passes.last()),
        Cell::or_dash(fits.then(milliseconds)),
        Cell::or_dash(fits.then_some(trial.retries)),
    ]
}
