//! The `cualloc` command: what the machine has, replays of recorded allocations, the smallest limits
//! they run under, whether they fit into a memory and how, recordings in other tools' formats and as pictures,
//! traces made up by rules, and what an allocation costs.
//!
//! Results go to stdout, everything else to stderr. The exit code is 0 only if all went well, 2 if
//! the command line makes no sense, else 1.

mod advise;
mod bench;
mod capacity;
mod export;
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

use options::{Cli, Command};
use output::{ErrorLine, Output};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What a subcommand comes to when it ran to its end: whether all went well.
type Outcome = Result<bool, Failure>;

/// Why a subcommand stopped.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The options contradict each other or the machine.
    #[error("{0}")]
    Usage(String),
    /// No reader is left for the results.
    #[error("the results cannot be written")]
    Output(#[from] std::io::Error),
    /// The device that was asked for cannot be had.
    #[error(transparent)]
    Machine(#[from] machine::MachineError),
    /// There is no result for a file, which the error names.
    #[error("{error}")]
    File {
        trace: String,
        /// The line of the file that is to blame.
        line: Option<u64>,
        error: Box<dyn std::error::Error>,
    },
}

impl Failure {
    /// There is no result for a file, since its replay cannot begin.
    fn no_replay(path: &Path, error: impl Into<replay::CannotBegin>) -> Failure {
        #[derive(Debug, thiserror::Error)]
        #[error("{}: the replay cannot begin", text::file(path, input::STDIN))]
        struct NoReplay {
            path: PathBuf,
            source: replay::CannotBegin,
        }
        let (path, source) = (path.to_owned(), error.into());
        Failure::File {
            trace: input::name(&path),
            line: None,
            error: Box::new(NoReplay { path, source }),
        }
    }
}

/// Does something for each file, also behind those that there is no result for; whether all went well.
fn for_each(
    files: &[PathBuf],
    output: &mut Output,
    mut work: impl FnMut(&Path, &mut Output) -> Outcome,
) -> Outcome {
    let mut well = true;
    for path in files {
        well &= match work(path, output) {
            Err(Failure::File { trace, line, error }) => {
                output.failed(&trace, line, &*error)?;
                false
            }
            outcome => outcome?,
        };
    }
    Ok(well)
}

fn main() -> ExitCode {
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
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
        // The reader has seen all it wanted; nothing went wrong that it should be told.
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::FAILURE
        }
        Err(Failure::Usage(message)) => {
            output::error(&message);
            ExitCode::from(2)
        }
        Err(Failure::File { trace, line, error }) => {
            // The exit code says the same if nothing can be written.
            let _ = output.failed(&trace, line, &*error);
            ExitCode::FAILURE
        }
        Err(failure) => {
            output::error(&text::chain(&failure));
            if output.json && !matches!(failure, Failure::Output(_)) {
                // The exit code says the same to who does not read this either.
                let _ = output.json(&ErrorLine::new(&failure));
            }
            ExitCode::FAILURE
        }
    }
}

/// The command line cannot be read, or asks for help.
fn refused(error: &clap::Error) -> ExitCode {
    let steers =
        |argument: std::ffi::OsString| argument.to_string_lossy().chars().any(char::is_control);
    // Messages quote arguments as they are, and help quotes none.
    if error.use_stderr() && std::env::args_os().any(steers) {
        let lines = error.render().to_string();
        for line in lines.lines().filter(|line| !line.is_empty()) {
            output::plain(line);
        }
    } else {
        // Nobody may be there to read it.
        let _ = error.print();
    }
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(2),
    }
}
