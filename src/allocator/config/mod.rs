//! Configuration: a builder, and one string for it.

mod debug;
mod text;

pub use debug::DebugModes;

use std::time::Duration;

use crate::error::ConfigError;

use crate::allocator::size::PHYSICAL_GRANULE;

/// Where segments come from and how they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Packed where the device supports virtual memory management, and does not refuse it when it is
    /// tried; classic elsewhere.
    #[default]
    Auto,
    /// Arenas in reserved address space with physical handles mapped into them.
    Packed,
    /// `cuMemAlloc` segments with the constants of PyTorch's caching allocator.
    Classic,
}

impl Policy {
    /// The name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Auto => "auto",
            Policy::Packed => "packed",
            Policy::Classic => "classic",
        }
    }
}

/// Whether memory counts more than driver calls. Packed policy only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Profile {
    /// Only where memory is scarce: near the limit, or after the driver refused some
    /// ([`Regime`](crate::allocator::Regime)).
    #[default]
    Default,
    /// Always: programs that repeat hold 1 % instead of 2 % more than they request, for two to three times the driver
    /// calls while the pool grows. [`Waits::Always`] is the default with it.
    Dense,
}

/// Whether an allocation may wait for unfinished work of streams other than its own in order to reuse their memory.
///
/// If that work itself depends on work that the allocating stream gets later (a receive posted early, a kernel that
/// polls a flag), such a wait is a deadlock; and it always costs overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Waits {
    /// Only when the limit or the device leaves no room for new memory.
    #[default]
    Scarce,
    /// Before memory is added beyond the soft cap ([`Packing::soft_cap`](crate::allocator::Packing)): the least memory,
    /// and the least overlap of streams.
    Always,
    /// Not at all, on the device or on the host: a request that could only be served by waiting fails with
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    Never,
}

/// A bound on memory held from the driver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// Bytes.
    Bytes(u64),
    /// A share of the device's total memory, above 0 and at most 1. It bounds this allocator only,
    /// not the process.
    Fraction(f64),
}

/// Name of the environment variable that [`Config::from_env`] reads.
pub const CONFIG_VARIABLE: &str = "CUALLOC_CONFIG";

/// Settings of an allocator. The defaults suit most programs; the guide's page on configuration says what to change
/// when memory or time is short.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Segment policy.
    pub policy: Policy,
    /// Bound on memory held from the driver (segments and handles, not requests); none by default.
    pub limit: Option<Limit>,
    /// Bytes of the device that stay free for the rest of CUDA (modules, cuBLAS, cuDNN, NCCL): no growth leaves less.
    /// By default 2 % of the device, at most 512 MiB. 0 bytes if less than twice as much is free when the allocator is
    /// created. Memory that the allocator holds already is not given back for it, and [`resume`](crate::Allocator::resume)
    /// ignores it.
    pub headroom: Option<u64>,
    /// Ordinals of further devices that may access the memory. Packed policy only.
    pub peers: Vec<usize>,
    /// Whether an allocation may wait for unfinished work of other streams; by default as the profile says.
    pub waits: Option<Waits>,
    /// Whether memory may be used through second layouts (views), on by default. Packed policy only.
    /// Work that reads through one address what a grid still running writes through another (a
    /// persistent kernel, a dependent launch before its wait) is outside what views promise.
    pub views: bool,
    /// Whether every call asks from the start if its stream is being captured. Off by default: then
    /// cached blocks of up to 64 KiB are given out and taken back without a call of the
    /// driver until the process is seen to capture streams, by
    /// [`begin_capture`](crate::driver::Stream::begin_capture) or by any call that asks anyway
    /// (for larger blocks, for more memory, at markers). For programs that begin captures through
    /// other libraries and want each misuse reported, the first one included.
    pub capture_checks: bool,
    /// Whether streams that the allocator knows may be captured into graphs, on by default. Off is the program's
    /// promise that none ever is: then no call asks about captures, and streams that are adopted or kept are asked
    /// at any time whether they are idle. Where the promise is broken the capture is spoilt, or the graph has memory
    /// that others get as well.
    pub captures: bool,
    /// Whether the owners of raw streams may destroy them without [`retire_raw`](crate::Allocator::retire_raw), off by
    /// default. With it the handle of a stream that is neither this crate's nor adopted is used in calls that name the
    /// stream alone, never in frees. Others get memory that was freed on it when a later call names it, or when the
    /// context was synchronised, which is done before much of it is held back. With a driver that
    /// has no stream ids (before CUDA 12) it changes nothing.
    pub unretired_streams: bool,
    /// Whether a raw call that names a default stream by its special handle (null, 1 or 2) while
    /// another context than the allocator's is current is
    /// [`Error::WrongContext`](crate::Error::WrongContext): the handle means the stream of the
    /// allocator's context, which is not the one that a launch with that handle would go to. On by
    /// default in builds with debug assertions, off in others.
    pub context_checks: bool,
    /// Whether the device is tested, once in a process and before the first view is built, for
    /// keeping memory the same through two addresses; on by default. If it fails, no views are used.
    pub self_test: bool,
    /// Whether memory counts more than driver calls. Packed policy only.
    pub profile: Profile,
    /// Bytes of the physical handles that large blocks are made of: a power of two from 2 MiB to 64 MiB. Smaller ones
    /// are made for the rest of a growth, and where the limit asks for them: at most a 512th of it, and a 2048th once more
    /// than half of it is held. By default they follow the pool, and where memory is scarce also the request. Packed policy
    /// only.
    pub handle: Option<u64>,
    /// Whether a tool that `NVTX_INJECTION64_PATH` names is told of blocks and of slow paths, on by default; the first
    /// allocator that may loads it. Where the tool tracks memory, as compute-sanitizer does, [`Policy::Auto`] is the
    /// classic policy: such a tool takes no heaps in mapped memory. Nothing is loaded where the variable is not set.
    pub nvtx: bool,
    /// How long memory for large blocks stays with the allocator that none of them has: what was too much for so long
    /// goes back to the driver, at the latest when it was for twice as long, in a call that comes to the heap anyway: one that
    /// waits for memory or frees a large block, or [`Allocator::decay`](crate::Allocator::decay). There is no thread
    /// for it. By default memory stays until it is trimmed or needed elsewhere.
    pub decay: Option<Duration>,
    /// The part of it that stays with [`decay`](Self::decay): a share of the most bytes that blocks ever had at once,
    /// from 0 to 1.
    pub keep: Option<f64>,
    /// What the allocator looks for in the program that uses it; nothing by default.
    pub debug: DebugModes,
}

/// What the packed policy is told beside its own rules.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tuning {
    pub profile: Profile,
    pub handle: Option<u64>,
    pub waits: Waits,
}

/// The default of `headroom`, as a share of the device and in bytes at most. PyTorch 2.11 on an H200 takes 68 MiB for its
/// first matrix product, 6 for a convolution, 96 for a linear solver, 8 for an FFT and 70 for a captured graph: 248 MiB
/// in all. NCCL takes 768 MiB when two devices start it.
const HEADROOM_PERCENT: u64 = 2;
const HEADROOM_MAX: u64 = 512 << 20;

/// Largest size of a handle that can be asked for, in bytes.
const HANDLE_MAX: u64 = 64 << 20;

impl Default for Config {
    fn default() -> Self {
        Config {
            policy: Policy::Auto,
            limit: None,
            headroom: None,
            peers: Vec::new(),
            waits: None,
            views: true,
            capture_checks: false,
            captures: true,
            unretired_streams: false,
            context_checks: cfg!(debug_assertions),
            self_test: true,
            profile: Profile::Default,
            handle: None,
            nvtx: true,
            decay: None,
            keep: None,
            debug: DebugModes::new(),
        }
    }
}

impl Config {
    /// The default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the segment policy.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Bounds the bytes held from the driver; `None` lifts the bound.
    pub fn limit(mut self, bytes: Option<u64>) -> Self {
        self.limit = bytes.map(Limit::Bytes);
        self
    }

    /// Bounds the bytes held from the driver to a share of the device's memory.
    pub fn limit_fraction(mut self, fraction: f64) -> Self {
        self.limit = Some(Limit::Fraction(fraction));
        self
    }

    /// Leaves this number of bytes of the device free for the rest of CUDA.
    pub fn headroom(mut self, bytes: u64) -> Self {
        self.headroom = Some(bytes);
        self
    }

    /// Sets when an allocation may wait for unfinished work of other streams.
    pub fn waits(mut self, waits: Waits) -> Self {
        self.waits = Some(waits);
        self
    }

    /// Allows or forbids views.
    pub fn views(mut self, on: bool) -> Self {
        self.views = on;
        self
    }

    /// Asks about captures from the start, or only when they are seen. With it streams that may be idle are
    /// never asked by other threads, which would spoil a capture that begins at that moment.
    pub fn capture_checks(mut self, on: bool) -> Self {
        self.capture_checks = on;
        self
    }

    /// Allows for captures of the allocator's streams, or promises that there are none.
    pub fn captures(mut self, on: bool) -> Self {
        self.captures = on;
        self
    }

    /// Allows for raw streams that are destroyed without being retired, or relies on their owners.
    pub fn unretired_streams(mut self, on: bool) -> Self {
        self.unretired_streams = on;
        self
    }

    /// Refuses default streams by their handles while another context is current, or takes them for those
    /// of the allocator's context without a question.
    pub fn context_checks(mut self, on: bool) -> Self {
        self.context_checks = on;
        self
    }

    /// Switches the test of the device before the first view on or off.
    pub fn self_test(mut self, on: bool) -> Self {
        self.self_test = on;
        self
    }

    /// Chooses whether memory counts more than driver calls.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// Fixes the bytes of the physical handles for large blocks.
    pub fn handle(mut self, bytes: u64) -> Self {
        self.handle = Some(bytes);
        self
    }

    /// Tells an attached tool of blocks and slow paths, or does not look for one.
    pub fn nvtx(mut self, on: bool) -> Self {
        self.nvtx = on;
        self
    }

    /// Gives back what has been idle for so long; `None` keeps it.
    pub fn decay(mut self, idle: Option<Duration>) -> Self {
        self.decay = idle;
        self
    }

    /// Keeps idle memory up to a share of the most bytes that blocks ever had at once.
    pub fn keep(mut self, share: f64) -> Self {
        self.keep = Some(share);
        self
    }

    /// Looks for errors of the program that uses the memory.
    pub fn debug(mut self, modes: DebugModes) -> Self {
        self.debug = modes;
        self
    }

    /// The bytes that `headroom` means on a device with this amount of memory.
    pub(crate) fn headroom_on(&self, memory: u64) -> u64 {
        let share = memory / 100 * HEADROOM_PERCENT;
        self.headroom.unwrap_or(share.min(HEADROOM_MAX))
    }

    pub(crate) fn tuning(&self) -> Tuning {
        Tuning {
            profile: self.profile,
            handle: self.handle,
            waits: self.waits.unwrap_or(match self.profile {
                Profile::Default => Waits::Scarce,
                Profile::Dense => Waits::Always,
            }),
        }
    }

    /// Lets further devices access the memory.
    pub fn peers(mut self, ordinals: impl IntoIterator<Item = usize>) -> Self {
        self.peers = ordinals.into_iter().collect();
        self
    }

    /// Reads the settings from the environment variable `CUALLOC_CONFIG`; the default settings if
    /// it is not set.
    ///
    /// # Errors
    /// As [`FromStr`](std::str::FromStr); also if the variable is not Unicode.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::environment()?.parse()
    }

    /// The text of the environment variable `CUALLOC_CONFIG`: empty if it is not set, and where the process has more
    /// rights than whoever started it (secure execution).
    ///
    /// # Errors
    /// [`ConfigError::NotUnicode`].
    pub fn environment() -> Result<String, ConfigError> {
        let text = crate::environment::variable(CONFIG_VARIABLE).unwrap_or_default();
        text.into_string().map_err(|_| ConfigError::NotUnicode)
    }

    /// Checks settings against each other.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`], [`ConfigError::InvalidValue`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let classic = self.policy == Policy::Classic;
        let dense = self.profile == Profile::Dense;
        let contradictions = [
            (classic && !self.peers.is_empty(), "policy=classic", "peers"),
            (
                classic && self.handle.is_some(),
                "policy=classic",
                "tune.handle",
            ),
            (classic && dense, "policy=classic", "profile=dense"),
            (self.handle_above_limit(), "limit", "tune.handle"),
            (
                self.keep.is_some() && self.decay.is_none(),
                "keep",
                "decay=off",
            ),
            (
                self.capture_checks && !self.captures,
                "captures=never",
                "tune.capture_checks=on",
            ),
        ];
        for (holds, first, second) in contradictions {
            if holds {
                return Err(ConfigError::Contradiction { first, second });
            }
        }
        let invalid = |key: &str, value: String| {
            let key = key.into();
            Err(ConfigError::InvalidValue { key, value })
        };
        match (self.decay, self.keep) {
            (Some(Duration::ZERO), _) => return invalid("decay", "0s".into()),
            (_, Some(share)) if !(0.0..=1.0).contains(&share) => {
                return invalid("keep", share.to_string());
            }
            _ => {}
        }
        let sizes = PHYSICAL_GRANULE..=HANDLE_MAX;
        if let Some(bytes) = self.handle
            && !(sizes.contains(&bytes) && bytes.is_power_of_two())
        {
            return invalid("tune.handle", bytes.to_string());
        }
        match self.limit {
            Some(Limit::Fraction(f)) if !(f > 0.0 && f <= 1.0) => invalid("limit", f.to_string()),
            Some(Limit::Bytes(0)) => invalid("limit", "0".into()),
            _ => Ok(()),
        }
    }
}

impl Config {
    fn handle_above_limit(&self) -> bool {
        match (self.handle, self.limit) {
            (Some(handle), Some(Limit::Bytes(limit))) => handle > limit,
            _ => false,
        }
    }
}
