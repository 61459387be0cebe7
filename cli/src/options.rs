//! The command line.

use crate::Failure;
use crate::size::{Limit, Size, live};
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::PathBuf;

const SIM_MEMORY: Size = Size(144 << 30);

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
    ///
    /// A limit bounds what the allocator holds: a device needs its headroom (2 % of it, at most 512 MiB) and what other
    /// programs take beside it.
    #[command(
        after_help = "Examples:\n  cualloc capacity run.rec\n  cualloc capacity trace.csv.gz --policy classic"
    )]
    Capacity(TraceOptions),
    /// Report whether recorded allocations fit into a given amount of memory, and with which settings.
    ///
    /// The amount is what the allocator may hold: a device needs its headroom (2 % of it, at most 512 MiB) and what other
    /// programs take beside it.
    #[command(
        after_help = "Examples:\n  cualloc advise snapshot.pickle\n  cualloc advise run.rec --memory 24GiB,80GiB --all"
    )]
    Advise(AdviseOptions),
    /// Write a recording in the format of another tool.
    #[command(
        after_help = "Examples:\n  cualloc export run.rec --to pytorch --out snapshot.pickle\n  cualloc export snapshot.pickle --to csv --out trace.csv"
    )]
    Export(ExportOptions),
    /// Write an HTML page that shows what is in memory, when and where.
    #[command(
        after_help = "Examples:\n  cualloc view run.rec --open\n  cualloc view before.rec after.rec -o page.html"
    )]
    View(ViewOptions),
    /// Generate a synthetic trace.
    #[command(
        after_help = "Examples:\n  cualloc generate random --rows 100000 --out random.csv.gz\n  cualloc generate churn --live 2GiB --out - | cualloc replay -"
    )]
    Generate(GenerateOptions),
    /// Write several copies of a trace, each with randomly varied sizes.
    #[command(
        after_help = "Examples:\n  cualloc vary run.rec --copies 2 --percent 10 --out varied.csv"
    )]
    Vary(VaryOptions),
    /// Measure the cost of allocations, single-threaded and with many threads.
    #[command(
        after_help = "Examples:\n  cualloc bench --quick\n  cualloc bench --only pair,churn --json"
    )]
    Bench(BenchOptions),
    /// Generate shell completions.
    #[command(
        after_help = "Examples:\n  cualloc completions bash > ~/.local/share/bash-completion/completions/cualloc"
    )]
    Completions {
        /// The shell to generate completions for.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Generate a manual page.
    #[command(after_help = "Examples:\n  cualloc man replay | man -l -")]
    Man {
        /// Subcommand to document, instead of the whole command.
        #[arg(value_name = "SUBCOMMAND")]
        page: Option<String>,
    },
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Everywhere")]
pub struct GlobalOptions {
    /// Device to run on; by default `auto`: the GPU if there is one, else the simulator.
    #[arg(long, value_enum, global = true)]
    device: Option<DeviceChoice>,
    /// Memory of the simulated device [default: 144 GiB].
    #[arg(long, value_name = "SIZE", global = true, allow_hyphen_values = true)]
    sim_memory: Option<Size>,
    /// Write one JSON object per line instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only results and errors.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

impl Cli {
    /// Parses the command line. A negative number after an option is reported as an invalid value, not as an unknown
    /// option.
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

    /// Whether an option that configures the simulator is given.
    pub fn has_simulator_option(&self) -> bool {
        self.sim_memory.is_some()
    }

    /// Rejects simulator options when no simulator will be used.
    pub fn check_simulator(&self) -> Result<(), Failure> {
        match self.device() {
            DeviceChoice::Cuda if self.has_simulator_option() => Err(Failure::usage(
                "--sim-memory is for the simulator, not for --device cuda",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the first option about a device, for subcommands that use none.
    pub fn device_option(&self) -> Option<&'static str> {
        let device = self.device.map(|_| "--device");
        device.or(self.sim_memory.map(|_| "--sim-memory"))
    }
}

/// How files are read.
#[derive(Args, Debug)]
pub struct InputOptions {
    /// GPU to use, if a snapshot, a recording or a log has several; by default the one with the most rows.
    #[arg(long, value_name = "N")]
    pub gpu: Option<usize>,
    /// Maximum number of rows or events in a file: each takes 80 bytes to 1 KB of memory.
    #[arg(long, value_name = "N", default_value_t = MAX_ROWS)]
    pub max_rows: u64,
}

#[derive(Args, Clone, Copy, Default, Debug)]
pub struct PlacementOptions {
    /// How memory is obtained from the driver; by default the best that the device supports.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyChoice>,
    /// Only grow: never map reserved memory a second time (packed policy).
    #[arg(long)]
    pub no_views: bool,
}

#[derive(Args, Debug)]
pub struct LimitOptions {
    /// Maximum of reserved memory: a size, a share of the device's memory like `90%`, or a multiple of the requested
    /// peak like `1.02x`.
    #[arg(long, value_name = "SIZE|SHARE%|RATIOx", allow_hyphen_values = true)]
    pub limit: Option<Limit>,
}

/// The options for the files that get one table row each.
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
    /// Show all columns, whatever the width of the terminal.
    #[arg(long, conflicts_with = "json")]
    pub wide: bool,
}

#[derive(Args, Debug)]
pub struct ExportOptions {
    /// Recording of cualloc (CUALLOC_RECORD), plain or gzip; for csv any file that `replay` reads; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Output format.
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
    /// A PyTorch memory snapshot as a pickle, for PyTorch's viewer.
    Pytorch,
    /// The same snapshot as JSON.
    PytorchJson,
    /// A profile by stacks or contexts, for pprof; its `inuse` values are those of `collapsed`.
    Pprof,
    /// Live bytes by stacks or contexts when the program ran out of memory, else at the peak, for flame graphs.
    Collapsed,
}

#[derive(Args, Debug)]
pub struct ViewOptions {
    /// Trace, recording, PyTorch snapshot or allocation log, plain or gzip; `-` is standard input. With two files the
    /// page shows the second, and what grew and shrank between them.
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
    /// Number of memory maps at equal distances, in addition to those at the peak and at the end.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u16).range(..=1000))]
    pub maps: u16,
    #[command(flatten)]
    pub input: InputOptions,
}

#[derive(Args, Debug)]
pub struct GenerateOptions {
    /// The kind of program to imitate.
    #[arg(value_enum)]
    pub kind: KindChoice,
    /// Seed of the random numbers; the same seed gives the same trace on every machine.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Number of rows; the default depends on the kind.
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Number of streams of a random program; by default the seed determines it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub streams: Option<u16>,
    /// Maximum of live bytes of a random program [default: 8 GiB].
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
    /// Random blocks on random streams; live memory varies between a maximum and a 32nd of it.
    Random,
    /// The same, with memory always full.
    Churn,
}

#[derive(Args, Debug)]
pub struct VaryOptions {
    /// Trace, recording, PyTorch snapshot or allocation log, plain or gzip; `-` is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Number of copies to write, one after another.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub copies: u32,
    /// By how many percent a size may change.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..100))]
    pub percent: u8,
    /// Seed of the random changes of sizes.
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
    /// Seed that decides which checks are delayed, when verifying over several streams.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "verify")]
    pub seed: u64,
}

#[derive(Args, Debug)]
pub struct AdviseOptions {
    #[command(flatten)]
    pub table: TableOptions,
    /// Memory that the allocator may reserve, like `24GiB`; several sizes separated by commas. Default: the amount that
    /// is needed.
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
    /// Number of replays of each file, on one allocator; --json reports each one and uses about 2.5 KB of memory for
    /// it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    #[command(flatten)]
    pub limit: LimitOptions,
    /// Report each replay in this number of parts of equal length; needs --json.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub parts: Option<u16>,
    /// Check the allocator's data structures after every this many rows.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: Option<u32>,
    #[command(flatten)]
    pub traces: TraceOptions,
}

#[derive(Args, Debug)]
pub struct BenchOptions {
    /// How memory is obtained from the driver; by default the best that the device supports.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyChoice>,
    /// Benchmarks to run, separated by commas; by default all.
    #[arg(long, value_enum, value_name = "WORK", value_delimiter = ',')]
    pub only: Vec<Work>,
    /// Run a tenth of the operations with fewer repetitions: for a rough impression only.
    #[arg(long)]
    pub quick: bool,
}

/// The benchmarks of `bench`, in the order in which they run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Work {
    /// An allocation and its free, in seven sizes.
    Pair,
    /// The same with raw stream handles and pointers.
    Raw,
    /// Random slots, filled and emptied: small blocks, and blocks of all sizes.
    Churn,
    /// Many threads, on one stream each and on one stream for all.
    Threads,
    /// Many threads with blocks of 1 MiB.
    LargeThreads,
    /// Blocks that another stream has used.
    Cross,
    /// A pair while many free blocks exist.
    FreeBlocks,
    /// A pair through a stack of resources, a workspace pool and a typed pool.
    FrontEnds,
    /// Commits and decommits of 1 GiB of a growable range, in granules of 32 MiB.
    Ranges,
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
