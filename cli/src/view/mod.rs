//! `view`: a page for a browser that shows what is in memory, when and where.

mod contexts;
mod difference;
mod encode;
mod failed;
mod film;
#[cfg(test)]
mod tests;

use crate::input::{self, Input, Recorded};
use crate::machine::Machine;
use crate::options::{DeviceChoice, GlobalOptions, ViewOptions};
use crate::output::Output;
use crate::settings::Settings;
use crate::sink::{self, STDOUT};
use crate::{Failure, Outcome, replay, text};
use contexts::Contexts;
use cualloc::Error;
use cualloc::driver::Context;
use cualloc::record::Profile;
use cualloc::trace::{Replay, ReplayReport, Trace};
use difference::Side;
use film::Film;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The page, with the names of what goes into it between `@@`.
const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPTS: [&str; 6] = [
    include_str!("data.js"),
    include_str!("table.js"),
    include_str!("map.js"),
    include_str!("oom.js"),
    include_str!("difference.js"),
    include_str!("page.js"),
];

/// What is shown in words beside the pictures.
struct Frame<'a> {
    trace: &'a Trace,
    /// What it is compared with.
    before: Option<Side<'a>>,
    limit: Option<u64>,
    memory: u64,
    config: Option<&'a str>,
    /// Memory by the stacks of a recording.
    stacks: Option<&'a Profile>,
    /// What the file lacks.
    warnings: &'a [String],
    recorded: &'a Recorded,
}

pub fn run(global: &GlobalOptions, options: &ViewOptions, output: &mut Output) -> Outcome {
    if global.device() == DeviceChoice::Cuda {
        let only = "--device cuda is not for view, which replays on the simulator";
        return Err(Failure::Usage(only.to_owned()));
    }
    replay::check(&options.files)?;
    let out = out(options)?;
    let settings = Settings::read(options.policy, options.no_views)?;
    settings.announce(output);
    let machine = Machine::Simulated {
        memory: global.sim_memory(),
    };
    let mut traces = Vec::with_capacity(options.files.len());
    for path in &options.files {
        traces.push((path, input::read(path, &options.input, output)?));
    }
    // The last one is shown, and what changed from the first to it.
    let Some((path, shown)) = traces.pop() else {
        return Ok(true);
    };
    let trace = &shown.trace;
    let memory = machine.memory()?;
    let limit_of = |trace: &Trace| {
        let limit = options.limit.or_else(|| settings.limit());
        limit.map(|limit| limit.bytes(trace.requested_peak(), memory))
    };
    let replay =
        |trace| Replay::new(trace).config(settings.config().clone().limit(limit_of(trace)));
    let mut before = None;
    for (path, Input { trace, .. }) in &traces {
        let ground = machine.context(options.lag)?;
        let bar = output.progress(trace.rows().len() as u64, trace.name());
        let replay = replay(trace).on_progress(|done| bar.set_position(done));
        let report = replay.run(ground.context());
        bar.finish_and_clear();
        let report = report.map_err(|error| Failure::no_replay(path, error))?;
        before = Some(Side {
            trace,
            reserved_peak: report.reserved_peak,
            error: ended(&report),
        });
    }
    let ground = machine.context(options.lag)?;
    let frame = Frame {
        trace,
        before,
        limit: limit_of(trace),
        memory,
        config: settings.text(),
        stacks: shown.stacks.as_ref(),
        warnings: &shown.warnings,
        recorded: &shown.recorded,
    };
    let bar = output.progress(trace.rows().len() as u64, trace.name());
    let replay = replay(trace).on_progress(|done| bar.set_position(done));
    let page = page(&frame, replay, options.maps, ground.context());
    bar.finish_and_clear();
    let page = page.map_err(|error| Failure::no_replay(path, error))?;
    if let Some(error) = page.meta["error"].as_str() {
        output.note(&format!("the page ends where the replay did: {error}"));
    }
    sink::write(&out, |to| page.write(to))?;
    if options.out.is_none() {
        output.note(&format!("the page is {}", text::file(&out, STDOUT)));
    }
    if options.open
        && let Err(error) = open_in_browser(&out)
    {
        output.warning(&format!("cannot open a browser: {error}"));
    }
    Ok(true)
}

/// Where the page goes. It replaces no file that is read.
fn out(options: &ViewOptions) -> Result<PathBuf, Failure> {
    let last = options.files.last().map(|path| input::name(path));
    let name = || format!("{}.view.html", last.unwrap_or_default());
    let out = options.out.clone().unwrap_or_else(|| name().into());
    if options.open && text::is_standard(&out) {
        let wrong = "--open needs a file: -o - writes to standard output";
        return Err(Failure::Usage(wrong.to_owned()));
    }
    if let Some(read) = options.files.iter().find(|file| input::is_same(file, &out)) {
        return Err(Failure::Usage(format!(
            "the page would replace {}, which is read: name another file with -o",
            text::file(read, input::STDIN)
        )));
    }
    Ok(out)
}

/// Starts the program that opens pages on this system, and does not wait for it.
fn open_in_browser(page: &Path) -> io::Result<()> {
    let mut command = match std::env::consts::OS {
        "macos" => Command::new("open"),
        "windows" => Command::new("explorer"),
        _ => Command::new("xdg-open"),
    };
    let command = command.arg(page).stdin(Stdio::null());
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(())
}

/// Why a replay ended before its last row.
fn ended(report: &ReplayReport) -> Option<String> {
    report.failed.map(|(_, row)| match &report.error {
        Some(error) => format!("row {row} failed: {}", text::chain(error)),
        None => format!("row {row} failed"),
    })
}

/// A page that is to be written.
struct Page {
    meta: Value,
    columns: encode::Columns,
}

/// Replays the trace and keeps what the page shows.
fn page(
    frame: &Frame<'_>,
    replay: Replay<'_>,
    maps: u16,
    context: &Context,
) -> Result<Page, Error> {
    let mut film = Film::new(frame.trace, maps);
    let report = replay.watch(|seen| film.watch(seen)).run(context)?;
    let error = ended(&report);
    let picture = match &report.error {
        // It is made by the library, so it is read without a fault.
        Some(Error::OutOfMemory(picture)) => serde_json::from_str(&picture.to_json()).ok(),
        _ => failed::last(frame.trace, &frame.recorded.failed),
    };
    let contexts = Contexts::of(frame.trace);
    let columns = film.columns(&contexts);
    let after = Side {
        trace: frame.trace,
        reserved_peak: report.reserved_peak,
        error: error.clone(),
    };
    let before = frame.before.as_ref();
    let difference = before.map(|before| difference::of(before, &after));
    let meta = json!({
        "schema": 2,
        "name": frame.trace.name(),
        "policy": report.policy.name(),
        "limit": frame.limit.map(|limit| limit.min(encode::MOST)),
        "memory": frame.memory.min(encode::MOST),
        "config": frame.config,
        "rows": film.rows(),
        "rows_of_file": frame.trace.rows().len(),
        "streams": frame.trace.streams(),
        "contexts": contexts.names,
        "error": error,
        "warnings": frame.warnings,
        "out_of_memory": picture,
        "failed": failed::all(frame.trace, &frame.recorded.failed),
        "recorded": {
            "limit": frame.recorded.limit.map(|limit| limit.min(encode::MOST)),
            "memory": frame.recorded.memory.map(|memory| memory.min(encode::MOST)),
        },
        "difference": difference,
        "stacks": frame.stacks.map(by_stack),
        "stacks_at": frame.stacks.and_then(Profile::moment).map(|moment| moment.to_string()),
    });
    Ok(Page { meta, columns })
}

/// Most stacks that are shown; others are one line.
const STACKS: usize = 200;

/// The stacks that hold the most, or asked for the most: name, blocks and bytes that are live, bytes of all.
fn by_stack(profile: &Profile) -> Vec<Value> {
    let mut shares: Vec<_> = profile.shares().collect();
    shares.sort_by_key(|(_, share)| std::cmp::Reverse((share.live_bytes, share.allocated)));
    let mut rest = [0u64; 3];
    for (_, share) in shares.iter().skip(STACKS) {
        let figures = [share.live, share.live_bytes, share.allocated];
        for (sum, figure) in rest.iter_mut().zip(figures) {
            *sum = sum.saturating_add(figure);
        }
    }
    let line = |name: &str, figures: [u64; 3]| {
        let [live, live_bytes, allocated] = figures.map(|figure| figure.min(encode::MOST));
        json!([name, live, live_bytes, allocated])
    };
    let shown = shares.iter().take(STACKS).map(|(name, share)| {
        let figures = [share.live, share.live_bytes, share.allocated];
        line(&contexts::shortened(name), figures)
    });
    let mut lines: Vec<Value> = shown.collect();
    if shares.len() > STACKS {
        lines.push(line("other stacks", rest));
    }
    lines
}

impl Page {
    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        // Scripts that come with a file cannot know it, should they ever get into the page.
        let nonce = format!("{:016x}", RandomState::new().hash_one(0u8));
        for (index, part) in PAGE.split("@@").enumerate() {
            if index % 2 == 0 {
                to.write_all(part.as_bytes())?;
                continue;
            }
            match part {
                "nonce" => to.write_all(nonce.as_bytes())?,
                "style" => to.write_all(STYLE.as_bytes())?,
                "script" => to.write_all(SCRIPTS.concat().as_bytes())?,
                "meta" => to.write_all(encode::in_script(&self.meta.to_string()).as_bytes())?,
                _ => to.write_all(self.columns.packed()?.as_bytes())?,
            }
        }
        Ok(())
    }
}
