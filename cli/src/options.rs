//! The command line.

use crate::Failure;
use crate::size::{Limit, Size, live};
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::PathBuf;

/// What `--sim-memory` is without the option.
const SIM_MEMORY: Size = Size(144 << 30);

/// What `--max-rows` is without the option.
const MAX_ROWS: u64 = 20_000_000;

const AFTER_HELP: &str = "\
Sizes are bytes, or numbers with a unit like 512M, 1.5GiB: K, M, G, T and KiB to TiB are powers of 1024, KB to TB \
powers of 1000. The file - is standard input where files are read and standard output where they are written.

Exit codes: 0 if all went well, 2 if the command line or CUALLOC_CONFIG makes no sense, else 1.

Environment: CUALLOC_CONFIG (settings of the allocator for replay, capacity, advise, view and bench; options count more), \
CUALLOC_DRIVER (the only driver library to try), RUST_LOG (what is logged), COLUMNS (the width of tables), NO_COLOR.";

/// A caching GPU memory allocator, on your machine's GPU or on a simulated one.
#[derive(Parser, Debug)]
#[command(name = "cualloc", version, arg_required_else_help = true, after_long_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    pub global: GlobalOptions,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show the driver, its devices and what they can do.
    #[command(after_help = "Examples:\n  cualloc info\n  cualloc info --device sim --json")]
    Info,
    /// Replay recorded allocations and show memory, driver calls and time.
    #[command(
        after_help = "Examples:\n  cualloc replay run.rec --repeat 3\n  cualloc replay snapshot.pickle --gpu 1 --limit 24GiB"
    )]
    Replay(ReplayOptions),
    /// Find the smallest memory limit that recorded allocations run under.
    #[command(
        after_help = "Examples:\n  cualloc capacity run.rec\n  cualloc capacity trace.csv.gz --policy classic"
    )]
    Capacity(TraceOptions),
    /// Say whether recorded allocations fit into so much memory, and with which settings.
    #[command(
        after_help = "Examples:\n  cualloc advise snapshot.pickle\n  cualloc advise run.rec --memory 24GiB,80GiB --all"
    )]
    Advise(AdviseOptions),
    /// Write a recording in the format of another tool.
    #[command(
        after_help = "Examples:\n  cualloc export run.rec --to pytorch --out snapshot.pickle\n  cualloc export snapshot.pickle --to csv --out trace.csv"
    )]
    Export(ExportOptions),
    /// Write a page for a browser that shows what is in memory, when and where.
    #[command(
        after_help = "Examples:\n  cualloc view run.rec --open\n  cualloc view before.rec after.rec -o page.html"
    )]
    View(ViewOptions),
    /// Make up a trace by rules and write it to a file.
    #[command(
        after_help = "Examples:\n  cualloc generate random --rows 100000 --out random.csv.gz\n  cualloc generate churn --live 2GiB --out - | cualloc replay -"
    )]
    Generate(GenerateOptions),
    /// Write a trace several times over, each time with all its sizes changed at random.
    #[command(
        after_help = "Examples:\n  cualloc vary run.rec --copies 2 --percent 10 --out varied.csv"
    )]
    Vary(VaryOptions),
    /// Measure what an allocation costs, alone and with many threads.
    #[command(
        after_help = "Examples:\n  cualloc bench --quick\n  cualloc bench --only pair,churn --json"
    )]
    Bench(BenchOptions),
    /// Write a script that completes this command's words in a shell.
    #[command(
        after_help = "Examples:\n  cualloc completions bash > ~/.local/share/bash-completion/completions/cualloc"
    )]
    Completions {
        /// Which shell reads it.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write a page of the manual.
    #[command(after_help = "Examples:\n  cualloc man replay | man -l -")]
    Man {
        /// Of this subcommand, instead of the whole command.
        #[arg(value_name = "SUBCOMMAND")]
        page: Option<String>,
    },
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Everywhere")]
pub struct GlobalOptions {
    /// What to run on; by default `auto`: the GPU if there is one, else the simulator.
    #[arg(long, value_enum, global = true)]
    device: Option<DeviceChoice>,
    /// Memory of the simulated device [default: 144 GiB].
    #[arg(long, value_name = "SIZE", global = true, allow_hyphen_values = true)]
    sim_memory: Option<Size>,
    /// Write one JSON object per line instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Say nothing but results and errors.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

impl Cli {
    /// Reads the command line. A number below 0 behind an option is a wrong value of it, and not an unknown option.
    pub fn read() -> Result<Cli, clap::Error> {
        let value = |arg: Arg| {
            let takes_value = !arg.is_positional() && arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_value)
        };
        let command = Cli::command().mut_args(value);
        let command = command.mut_subcommands(|subcommand| subcommand.mut_args(value));
        Cli::from_arg_matches(&command.try_get_matches()?)
    }
}

impl GlobalOptions {
    pub fn device(&self) -> DeviceChoice {
        self.device.unwrap_or(DeviceChoice::Auto)
    }

    pub fn sim_memory(&self) -> u64 {
        self.sim_memory.unwrap_or(SIM_MEMORY).0
    }

    /// Whether an option is about the simulator.
    pub fn about_simulator(&self) -> bool {
        self.sim_memory.is_some()
    }

    /// Refuses to be told about a simulator that there will not be.
    pub fn check_simulator(&self) -> Result<(), Failure> {
        match self.device() {
            DeviceChoice::Cuda if self.about_simulator() => Err(Failure::usage(
                "--sim-memory is for the simulator, not for --device cuda",
            )),
            _ => Ok(()),
        }
    }

    /// The first option about a device, for what runs on none.
    pub fn about_device(&self) -> Option<&'static str> {
        let device = self.device.map(|_| "--device");
        device.or(self.sim_memory.map(|_| "--sim-memory"))
    }
}

/// How files are read.
#[derive(Args, Debug)]
pub struct InputOptions {
    /// Of which GPU, if a snapshot, a recording or a log has several; by default the one with the most rows.
    #[arg(long, value_name = "N")]
    pub gpu: Option<usize>,
    /// Rows or events that a file may have: each takes 80 bytes to 1 KB of memory.
    #[arg(long, value_name = "N", default_value_t = MAX_ROWS)]
    pub max_rows: u64,
}

#[derive(Args, Clone, Copy, Default, Debug)]
pub struct PlacementOptions {
    /// How memory is taken from the driver; by default the best that the device supports.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyChoice>,
    /// Only grow: no second layouts of memory that is held (packed policy).
    #[arg(long)]
    pub no_views: bool,
}

#[derive(Args, Debug)]
pub struct LimitOptions {
    /// The most memory to hold: a size, a share of the device's memory like `90%`, or a multiple of the
    /// requested peak like `1.02x`.
    #[arg(long, value_name = "SIZE|SHARE%|RATIOx", allow_hyphen_values = true)]
    pub limit: Option<Limit>,
}

/// Files that have a row in a table each.
#[derive(Args, Debug)]
pub struct TableOptions {
    /// Traces, recordings, PyTorch snapshots or allocation logs (RMM), plain or gzip; `-` is standard input.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// On the simulator: work submitted at one row completes this many rows later.
    #[arg(long, value_name = "ROWS", default_value_t = 0)]
    pub lag: u64,
    #[command(flatten)]
    pub input: InputOptions,
    /// Show all columns, however narrow the terminal is.
    #[arg(long, conflicts_with = "json")]
    pub wide: bool,
}

#[derive(Args, Debug)]
pub struct ExportOptions {
    /// Recording of cualloc (CUALLOC_RECORD), plain or gzip; for csv any file that `replay` reads; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What to write.
    #[arg(long, value_enum)]
    pub to: FormatChoice,
    #[command(flatten)]
    pub input: InputOptions,
    /// File to write; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum FormatChoice {
    /// A trace, which `replay`, `capacity` and `vary` read.
    Csv,
    /// A memory snapshot of PyTorch's as a pickle, for its viewer.
    Pytorch,
    /// The same as JSON.
    PytorchJson,
    /// A profile by stacks or contexts, for pprof; `inuse` figures as `collapsed`.
    Pprof,
    /// Live bytes by stacks or contexts when the program ran out of memory, else at the peak, for flame graphs.
    Collapsed,
}

#[derive(Args, Debug)]
pub struct ViewOptions {
    /// Trace, recording, PyTorch snapshot or allocation log, plain or gzip; `-` is standard input. Of two the page shows the
    /// second, and what grew and shrank from the first to it.
    #[arg(required = true, value_name = "FILE", num_args = 1..=2)]
    pub files: Vec<PathBuf>,
    /// Page to write; `-` is standard output [default: the name of FILE with `.view.html`, in the current folder].
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Open the page in a browser.
    #[arg(long)]
    pub open: bool,
    #[command(flatten)]
    pub placement: PlacementOptions,
    #[command(flatten)]
    pub limit: LimitOptions,
    /// Work submitted at one row completes this many rows later.
    #[arg(long, value_name = "ROWS", default_value_t = 0)]
    pub lag: u64,
    /// How many maps of memory to take, in equal distances, beside those at the peak and at the end.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u16).range(..=1000))]
    pub maps: u16,
    #[command(flatten)]
    pub input: InputOptions,
}

#[derive(Args, Debug)]
pub struct GenerateOptions {
    /// What the program does.
    #[arg(value_enum)]
    pub kind: KindChoice,
    /// Programs of different seeds differ; the same seed gives the same trace everywhere.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Rows to write, instead of as many as usual.
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Streams of a random program, instead of what the seed says.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub streams: Option<u16>,
    /// Most bytes live in a random program, instead of 8 GiB.
    #[arg(long, value_name = "SIZE", value_parser = live, allow_hyphen_values = true)]
    pub live: Option<Size>,
    /// File to write, compressed if it ends in `.gz`; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum KindChoice {
    /// Few, very large blocks that never repeat.
    Large,
    /// Training with sharded parameters, on three streams.
    Sharded,
    /// Random blocks on random streams; what is live wanders between a bound and a 32nd of it.
    Random,
    /// The same, with memory always full.
    Churn,
}

#[derive(Args, Debug)]
pub struct VaryOptions {
    /// Trace, recording, PyTorch snapshot or allocation log, plain or gzip; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// How many copies to write, one after another.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub copies: u32,
    /// By how much of itself a size may change.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..100))]
    pub percent: u8,
    /// Different seeds change the sizes differently.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub input: InputOptions,
    /// File to write, compressed if it ends in `.gz`; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DeviceChoice {
    Auto,
    Cuda,
    Sim,
}

#[derive(Args, Debug)]
pub struct TraceOptions {
    #[command(flatten)]
    pub table: TableOptions,
    #[command(flatten)]
    pub placement: PlacementOptions,
    /// Fill every block with kernels, check it just before it is freed, and count wrong words.
    #[arg(long)]
    pub verify: bool,
    /// Decides which checks are delayed, when verifying over several streams.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "verify")]
    pub seed: u64,
}

#[derive(Args, Debug)]
pub struct AdviseOptions {
    #[command(flatten)]
    pub table: TableOptions,
    /// Memory that the allocator may hold, like `24GiB`; several sizes with commas between. Without it: what is needed.
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    pub memory: Vec<Size>,
    /// Show all settings that were tried, the cheapest that fits first; --json always does.
    #[arg(long, conflicts_with = "json")]
    pub all: bool,
}

#[derive(Args, Debug)]
pub struct ReplayOptions {
    /// Replay each file under both policies, packed and classic, and explain the figures.
    #[arg(long, conflicts_with_all = ["policy", "no_views"])]
    pub compare: bool,
    /// How often to replay each file, on one allocator; --json shows each, for some 2.5 KB of memory.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    #[command(flatten)]
    pub limit: LimitOptions,
    /// Show each replay in so many parts of equal length; needs --json.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub parts: Option<u16>,
    /// Walk over the allocator's structures after each so many rows.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: Option<u32>,
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

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PolicyChoice {
    Packed,
    Classic,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
