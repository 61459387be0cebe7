//! The `cualloc` command: describes the machine, replays recorded allocations, finds the smallest limit they run under
//! and the settings with which they fit, exports and visualises recordings, generates traces, and measures the cost of
//! allocations.
//!
//! Results go to stdout, everything else to stderr. The exit code is 0 only if everything succeeded, 2 if the command
//! line is invalid, else 1.

mod advise;
mod bench;
mod capacity;
mod export;
mod failure;
mod generate;
mod info;
mod input;
mod machine;
mod options;
mod output;
mod pages;
mod replay;
mod settings;
mod sink;
mod size;
mod table;
mod text;
mod view;
#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;

use failure::{Failure, FileError, Outcome};
use options::{Cli, Command};
use output::Output;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs `work` for each file, continuing after failures; returns whether all succeeded.
fn for_each(
    files: &[PathBuf],
    output: &mut Output,
    mut work: impl FnMut(&Path, &mut Output) -> Outcome,
) -> Outcome {
    let mut well = true;
    for path in files {
        let outcome = work(path, output);
        well &= output.report_outcome(outcome)?;
    }
    Ok(well)
}

fn main() -> ExitCode {
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(error) => return exit_code_of(&error),
    };
    let usual = if cli.global.quiet { "error" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(usual)).init();
    let mut output = Output::new(&cli.global);
    let global = &cli.global;
    let outcome = match &cli.command {
        Command::Info => info::run(global, &mut output),
        Command::Replay(options) => replay::run(global, options, &mut output),
        Command::Capacity(options) => capacity::run(global, options, &mut output),
        Command::Advise(options) => advise::run(global, options, &mut output),
        Command::Generate(options) => generate::run(global, options, &mut output),
        Command::Export(options) => export::run(options, &mut output),
        Command::View(options) => view::run(global, options, &mut output),
        Command::Vary(options) => generate::vary(global, options, &mut output),
        Command::Bench(options) => bench::run(global, options, &mut output),
        Command::Completions { shell } => pages::completions(global, *shell),
        Command::Man { page } => pages::man(global, page.as_deref()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader has closed the pipe because it needs no more, which is not an error.
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::FAILURE
        }
        Err(Failure::Usage(message)) => {
            output::error(&message);
            ExitCode::from(2)
        }
        Err(failure) => {
            // If nothing can be written, the exit code still reports the failure.
            let _ = output.failed(&failure);
            ExitCode::FAILURE
        }
    }
}

/// Handles a command line that is invalid or asks for help.
fn exit_code_of(error: &clap::Error) -> ExitCode {
    let steers =
        |argument: std::ffi::OsString| argument.to_string_lossy().chars().any(char::is_control);
    // Messages quote arguments verbatim; help texts quote none.
    if error.use_stderr() && std::env::args_os().any(steers) {
        let lines = error.render().to_string();
        for line in lines.lines().filter(|line| !line.is_empty()) {
            output::plain(line);
        }
    } else {
        // There may be no reader.
        let _ = error.print();
    }
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(2),
    }
}
