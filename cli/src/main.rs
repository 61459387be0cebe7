//! The `cualloc` command: what the machine has, replays of recorded allocations, the smallest limits
//! they run under, and what an allocation costs.
//!
//! Results go to stdout, everything else to stderr. The exit code is 0 only if all went well, 2 if
//! the command line makes no sense, else 1.

mod bench;
mod capacity;
mod info;
mod input;
mod machine;
mod options;
mod output;
mod replay;

use clap::Parser;
use options::{Cli, Command};
use output::Output;
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
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    let mut output = Output::stdout();
    let outcome = match &cli.command {
        Command::Info(options) => info::run(options, &mut output),
        Command::Replay(options) => replay::run(options, &mut output),
        Command::Capacity(options) => capacity::run(options, &mut output),
        Command::Bench(options) => bench::run(options, &mut output),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader has seen all it wanted; nothing went wrong that it should be told.
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::FAILURE
        }
        Err(failure) => {
            output::complain(&failure);
            match failure {
                Failure::Usage(_) => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
