//! `view`: an HTML page that shows what is in memory, when and where.

mod contexts;
mod difference;
mod encode;
mod failed;
mod film;
#[cfg(test)]
mod tests;

use crate::input::{self, Input};
use crate::machine::Machine;
use crate::options::{DeviceChoice, GlobalOptions, ViewOptions};
use crate::output::Output;
use crate::settings::Settings;
use crate::sink::{self, STDOUT};
use crate::{Failure, FileError, Outcome, replay, text};
use contexts::Contexts;
use cualloc::Error;
use cualloc::driver::Context;
use cualloc::record::{Profile, Share};
use cualloc::trace::{Replay, Trace};
use difference::Side;
use encode::exact;
use film::ReplayData;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The template of the page, with placeholders between `@@`.
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

/// The text shown beside the pictures.
struct Frame<'a> {
    input: &'a Input,
    /// The trace it is compared with.
    before: Option<Side<'a>>,
    limit: Option<u64>,
    memory: u64,
    config: Option<&'a str>,
}

pub fn run(global: &GlobalOptions, options: &ViewOptions, output: &mut Output) -> Outcome {
    if global.device() == DeviceChoice::Cuda {
        let only = "--device cuda is not for view, which replays on the simulator";
        return Err(Failure::usage(only));
    }
    replay::check(&options.files)?;
    let out = out(options)?;
    let settings = Settings::read(&options.placement)?;
    settings.announce(output);
    let memory = global.sim_memory();
    let limit_of = |trace: &Trace| settings.limit_for(options.limit.limit, trace, memory);
    let mut inputs = Vec::with_capacity(options.files.len());
    for path in &options.files {
        inputs.push((path, input::read(path, &options.input, output)?));
    }
    // The last file is shown, together with the changes from the first to it.
    let (mut before, mut shown) = (None, None);
    let last = inputs.len() - 1;
    for (index, (path, input)) in inputs.iter().enumerate() {
        let trace = &input.trace;
        let device = Machine::Simulated { memory }.context(options.lag)?;
        let bar = output.progress(trace.rows().len() as u64, trace.name());
        let config = settings.config().clone().limit(limit_of(trace));
        let replay = Replay::new(trace).config(config);
        let replay = replay.on_progress(|done| bar.set_position(done));
        let done = if index < last {
            let report = replay.run(device.context());
            report.map(|report| before = Some(Side::new(trace, &report)))
        } else {
            let frame = Frame {
                input,
                before: before.take(),
                limit: limit_of(trace),
                memory,
                config: settings.text(),
            };
            let page = page(&frame, replay, options.maps, device.context());
            page.map(|page| shown = Some(page))
        };
        bar.finish_and_clear();
        done.map_err(|error| FileError::cannot_replay(path, error))?;
    }
    let Some(page) = shown else { return Ok(true) };
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

/// Returns the path of the page, which must not replace an input file.
fn out(options: &ViewOptions) -> Result<PathBuf, Failure> {
    let last = options.files.last().map(|path| text::trace_name(path));
    let name = || format!("{}.view.html", last.unwrap_or_default());
    let out = options.out.clone().unwrap_or_else(|| name().into());
    if options.open && text::is_standard(&out) {
        let wrong = "--open needs a file: -o - writes to standard output";
        return Err(Failure::usage(wrong));
    }
    if let Some(read) = options.files.iter().find(|file| input::is_same(file, &out)) {
        return Err(Failure::usage(format!(
            "the page would replace {}, which is read: name another file with -o",
            text::file(read, input::STDIN)
        )));
    }
    Ok(out)
}

/// Starts the system's program for opening pages, without waiting for it.
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

/// A page to write.
struct Page {
    meta: Value,
    columns: encode::Columns,
}

/// Replays the trace and collects what the page shows.
fn page(
    frame: &Frame<'_>,
    replay: Replay<'_>,
    maps: u16,
    context: &Context,
) -> Result<Page, Error> {
    let Input {
        trace,
        stacks,
        warnings,
        recorded,
    } = frame.input;
    let mut film = ReplayData::new(trace, maps);
    let report = replay.watch(|seen| film.watch(seen)).run(context)?;
    let picture = match &report.error {
        // The JSON was written by the library, so it is valid.
        Some(Error::OutOfMemory(picture)) => serde_json::from_str(&picture.to_json()).ok(),
        _ => failed::last(trace, &recorded.failed),
    };
    let contexts = Contexts::of(trace);
    let columns = film.columns(&contexts);
    let after = Side::new(trace, &report);
    let before = frame.before.as_ref();
    let meta = json!({
        "schema": 2,
        "name": trace.name(),
        "policy": report.policy.name(),
        "limit": exact(frame.limit),
        "memory": exact(frame.memory),
        "config": frame.config,
        "rows": film.rows(),
        "rows_of_file": trace.rows().len(),
        "streams": trace.streams(),
        "contexts": contexts.names,
        "error": after.error,
        "warnings": warnings,
        "out_of_memory": picture,
        "failed": failed::all(trace, &recorded.failed),
        "recorded": { "limit": exact(recorded.limit), "memory": exact(recorded.memory) },
        "times": times(&recorded.times),
        "difference": before.map(|before| difference::of(before, &after)),
        "stacks": stacks.as_ref().map(by_stack),
        "stacks_at": stacks.as_ref().and_then(Profile::moment).map(|moment| moment.to_string()),
    });
    Ok(Page { meta, columns })
}

/// The maximum number of rows whose time is on the page, which interpolates between them.
const TIMES: usize = 1000;

/// Returns rows in even distances, with their times in microseconds.
fn times(nanos: &[u64]) -> Vec<[u64; 2]> {
    let step = nanos.len().div_ceil(TIMES).max(1);
    let last = nanos.len().checked_sub(1);
    let rows = (0..nanos.len()).step_by(step).chain(last);
    let at = |row: usize| nanos.get(row).map(|nanos| [row as u64, nanos / 1000]);
    rows.filter_map(at).collect()
}

/// The maximum number of stacks shown; the others share one line.
const STACKS: usize = 200;

/// Returns the stacks that hold the most or requested the most: name, live blocks and bytes, and total bytes.
fn by_stack(profile: &Profile) -> Vec<Value> {
    let mut shares = Vec::from_iter(profile.shares());
    shares.sort_by_key(|(_, share)| std::cmp::Reverse((share.live_bytes, share.allocated)));
    let rest = shares.split_off(STACKS.min(shares.len()));
    let line = |name: &str, live, live_bytes, allocated| {
        json!([name, exact(live), exact(live_bytes), exact(allocated)])
    };
    let shown = shares.iter().map(|(name, share)| {
        let name = contexts::shorten(name);
        line(&name, share.live, share.live_bytes, share.allocated)
    });
    let mut lines = Vec::from_iter(shown);
    if !rest.is_empty() {
        let sum = |figure: fn(&Share) -> u64| {
            let figures = rest.iter().map(|(_, share)| figure(share));
            figures.fold(0, u64::saturating_add)
        };
        let (live_bytes, allocated) = (sum(|share| share.live_bytes), sum(|share| share.allocated));
        lines.push(line(
            "other stacks",
            sum(|share| share.live),
            live_bytes,
            allocated,
        ));
    }
    lines
}

impl Page {
    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        // Should a script from a file ever get into the page, it cannot know the nonce and is not executed.
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
