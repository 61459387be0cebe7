//! `view`: a page for a browser that shows what is in memory, when and where.

mod encode;
mod film;
mod levels;
#[cfg(test)]
mod tests;

use crate::input::{self, InputError};
use crate::machine::Machine;
use crate::options::{DeviceChoice, GlobalOptions, ViewOptions};
use crate::output::Output;
use crate::replay::{CannotBegin, policy_name};
use crate::settings::Settings;
use crate::sink::Sink;
use crate::{Failure, Outcome, text};
use cualloc::Error;
use cualloc::driver::Context;
use cualloc::trace::{Replay, Trace};
use film::Film;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::PathBuf;

/// The page, with the names of what goes into it between `@@`.
const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPTS: [&str; 3] = [
    include_str!("data.js"),
    include_str!("oom.js"),
    include_str!("page.js"),
];

/// What messages call stdout.
const STDOUT: &str = "<stdout>";

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
enum ViewError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{}: the replay cannot begin", text::file(path, input::STDIN))]
    Replay { path: PathBuf, source: CannotBegin },
    #[error("{}: cannot be written", text::file(path, STDOUT))]
    Write { path: PathBuf, source: io::Error },
}

/// What is shown in words beside the pictures.
struct Frame<'a> {
    trace: &'a Trace,
    limit: Option<u64>,
    memory: u64,
    config: Option<&'a str>,
}

pub fn run(global: &GlobalOptions, options: &ViewOptions, output: &mut Output) -> Outcome {
    if global.device() == DeviceChoice::Cuda {
        let only = "--device cuda is not for view, which replays on the simulator";
        return Err(Failure::Usage(only.to_owned()));
    }
    let settings = Settings::read(options.policy, options.no_views)?;
    settings.announce(output);
    let machine = Machine::Simulated {
        memory: global.sim_memory(),
    };
    let trace = match input::read(&options.file, options.max_rows) {
        Ok(trace) => trace,
        Err(error) => return failed(options, output, &error.into()),
    };
    let limit = match options.limit.or_else(|| settings.limit()) {
        None => None,
        Some(limit) => Some(limit.bytes(trace.requested_peak(), machine.memory()?)),
    };
    let ground = machine.context(options.lag)?;
    let frame = Frame {
        trace: &trace,
        limit,
        memory: machine.memory()?,
        config: settings.text(),
    };
    let replay = Replay::new(&trace).config(settings.config().clone().limit(limit));
    let bar = output.progress(trace.rows().len() as u64, trace.name());
    let replay = replay.on_progress(|done| bar.set_position(done));
    let page = page(&frame, replay, options.maps, ground.context());
    bar.finish_and_clear();
    let page = match page {
        Ok(page) => page,
        Err(source) => {
            let path = options.file.clone();
            let source = source.into();
            return failed(options, output, &ViewError::Replay { path, source });
        }
    };
    if let Some(error) = page.meta["error"].as_str() {
        output.note(&format!("the page ends where the replay did: {error}"));
    }
    let written = Sink::create(&options.out).and_then(|sink| sink.write(|to| page.write(to)));
    match written {
        Ok(()) => Ok(true),
        Err(source) if source.kind() == io::ErrorKind::BrokenPipe => Err(Failure::Output(source)),
        Err(source) => {
            let path = options.out.clone();
            failed(options, output, &ViewError::Write { path, source })
        }
    }
}

fn failed(options: &ViewOptions, output: &mut Output, error: &ViewError) -> Outcome {
    let line = match error {
        ViewError::Input(error) => error.line(),
        _ => None,
    };
    output.failed(&input::name(&options.file), line, error)?;
    Ok(false)
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
    let error = report.failed.map(|(_, row)| match &report.error {
        Some(error) => format!("row {row} failed: {}", text::chain(error)),
        None => format!("row {row} failed"),
    });
    let picture = match &report.error {
        // It is made by the library, so it is read without a fault.
        Some(Error::OutOfMemory(picture)) => serde_json::from_str(&picture.to_json()).ok(),
        _ => None::<Value>,
    };
    let columns = film.columns();
    let meta = json!({
        "schema": 1,
        "name": frame.trace.name(),
        "policy": policy_name(report.policy),
        "limit": frame.limit.map(|limit| limit.min(encode::MOST)),
        "memory": frame.memory.min(encode::MOST),
        "config": frame.config,
        "rows": film.rows(),
        "rows_of_file": frame.trace.rows().len(),
        "streams": frame.trace.streams(),
        "finest": levels::FINEST,
        "error": error,
        "out_of_memory": picture,
        "columns": columns.counts,
    });
    Ok(Page { meta, columns })
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
