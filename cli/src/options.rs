//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use cualloc::allocator::Policy;
use std::path::PathBuf;
use std::str::FromStr;

/// A caching GPU memory allocator, on your machine's GPU or on a simulated one.
#[derive(Parser, Debug)]
#[command(name = "cualloc", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show the driver, its devices and what they can do.
    Info(InfoOptions),
    /// Replay recorded allocations and show memory, driver calls and time.
    Replay(ReplayOptions),
    /// Find the smallest memory limit that recorded allocations run under.
    Capacity(TraceOptions),
    /// Measure what an allocation costs, alone and with many threads.
    Bench(BenchOptions),
}

#[derive(Args, Debug)]
pub struct InfoOptions {
    #[command(flatten)]
    pub machine: MachineOptions,
}

#[derive(Args, Debug)]
pub struct MachineOptions {
    /// What to run on; `auto` is the GPU if there is one, else the simulator.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Write one JSON object per line instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Memory of the simulated device, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 144 << 30)]
    pub sim_memory: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DeviceChoice {
    Auto,
    Cuda,
    Sim,
}

#[derive(Args, Debug)]
pub struct TraceOptions {
    /// Trace files, plain or gzip.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// How memory is taken from the driver; by default the best that the device supports.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyChoice>,
    /// Only grow: no second layouts of memory that is held (packed policy).
    #[arg(long)]
    pub no_views: bool,
    /// Fill every block with kernels, check it just before it is freed, and count wrong words.
    #[arg(long)]
    pub verify: bool,
    /// On the simulator: work submitted at one row completes this many rows later.
    #[arg(long, value_name = "ROWS", default_value_t = 0)]
    pub lag: u64,
    /// Decides which checks are delayed, when verifying over several streams.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub machine: MachineOptions,
}

#[derive(Args, Debug)]
pub struct ReplayOptions {
    /// How often to replay each file, on one allocator.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// The most memory to hold: bytes, or a multiple of the requested peak like `1.02x`.
    #[arg(long, value_name = "BYTES|R")]
    pub limit: Option<Limit>,
    #[command(flatten)]
    pub traces: TraceOptions,
}

#[derive(Args, Debug)]
pub struct BenchOptions {
    /// How memory is taken from the driver; by default the best that the device supports.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyChoice>,
    /// Only these, separated by commas; by default all.
    #[arg(long, value_enum, value_name = "WORK", value_delimiter = ',')]
    pub only: Vec<Work>,
    /// A tenth of the operations and fewer repetitions: a look, not a measurement.
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub machine: MachineOptions,
}

/// What `bench` can do, in the order in which it does it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Work {
    /// An allocation and its free, in seven sizes.
    Pair,
    /// The same with stream handles and pointers.
    Raw,
    /// Random slots, filled and emptied: small blocks, and all sizes.
    Churn,
    /// Many threads, on a stream each and on one for all.
    Threads,
    /// Many threads with blocks of 1 MiB.
    LargeThreads,
    /// Blocks that another stream used.
    Cross,
    /// A pair beside many free blocks.
    FreeBlocks,
    /// A pair through a stack of resources, a workspace pool and a typed pool.
    FrontEnds,
}

impl Work {
    /// All of them.
    pub const ALL: [Work; 8] = [
        Work::Pair,
        Work::Raw,
        Work::Churn,
        Work::Threads,
        Work::LargeThreads,
        Work::Cross,
        Work::FreeBlocks,
        Work::FrontEnds,
    ];
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PolicyChoice {
    Packed,
    Classic,
}

impl TraceOptions {
    /// The policy to ask the allocator for.
    pub fn policy(&self) -> Policy {
        policy(self.policy)
    }
}

impl BenchOptions {
    /// The policy to ask the allocator for.
    pub fn policy(&self) -> Policy {
        policy(self.policy)
    }
}

fn policy(choice: Option<PolicyChoice>) -> Policy {
    match choice {
        None => Policy::Auto,
        Some(PolicyChoice::Packed) => Policy::Packed,
        Some(PolicyChoice::Classic) => Policy::Classic,
    }
}

/// A memory limit as written on the command line.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Limit {
    Bytes(u64),
    /// A multiple of the trace's requested peak.
    Ratio(f64),
}

impl Limit {
    /// The limit in bytes for a trace with this requested peak.
    pub fn bytes(self, requested_peak: u64) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            // Rounding to a float and back is far finer than any granule of memory.
            Limit::Ratio(ratio) => (requested_peak as f64 * ratio) as u64,
        }
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let wrong = || {
            format!(
                "`{text}` is neither a number of bytes nor a multiple of the requested peak like `1.02x`"
            )
        };
        match text.strip_suffix('x') {
            None => text.parse().map(Limit::Bytes).map_err(|_| wrong()),
            Some(ratio) => match ratio.parse::<f64>() {
                Ok(ratio) if ratio.is_finite() && ratio > 0.0 => Ok(Limit::Ratio(ratio)),
                _ => Err(wrong()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn limits() {
        assert_eq!("1048576".parse(), Ok(Limit::Bytes(1 << 20)));
        assert_eq!("1.5x".parse(), Ok(Limit::Ratio(1.5)));
        assert_eq!(Limit::Ratio(1.5).bytes(1000), 1500);
        assert_eq!(Limit::Bytes(7).bytes(1000), 7);
        for text in [
            "", "x", "-1", "1.5", "0x", "-1x", "nanx", "infx", "1 x", "10k",
        ] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
