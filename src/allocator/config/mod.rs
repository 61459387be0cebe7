//! Configuration: a builder, and its text form.

mod debug;
mod text;

pub use debug::DebugModes;

use std::time::Duration;

use crate::error::ConfigError;

use crate::allocator::size::PHYSICAL_GRANULE;

/// Segment policy: where segments come from and how they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Packed where the device supports virtual memory management and a trial succeeds; otherwise classic.
    #[default]
    Auto,
    /// Arenas in reserved address space with physical handles mapped into them.
    Packed,
    /// `cuMemAlloc` segments with the constants of PyTorch's caching allocator.
    Classic,
}

impl Policy {
    /// Returns the name used in settings.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Auto => "auto",
            Policy::Packed => "packed",
            Policy::Classic => "classic",
        }
    }
}

/// Whether saving memory has priority over saving driver calls. Packed policy only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Profile {
    /// Only while memory is scarce: near the limit, or after the driver refused memory
    /// ([`Regime`](crate::allocator::Regime)).
    #[default]
    Default,
    /// Always: repetitive programs reserve 1 % instead of 2 % more than they request, at two to three times the driver
    /// calls while the pool grows. It implies [`Waits::Always`] by default.
    Dense,
}

/// Whether an allocation may wait for unfinished work of other streams in order to reuse their memory.
///
/// If that work in turn depends on later work of the allocating stream (a receive posted early, a kernel that polls a
/// flag), the wait is a deadlock. Every such wait also reduces overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Waits {
    /// Only when the limit or the device leaves no room for new memory.
    #[default]
    Scarce,
    /// Before memory is added beyond the soft cap ([`Packing::soft_cap`](crate::allocator::Packing)): the least memory,
    /// and the least overlap of streams.
    Always,
    /// Never, on the device or on the host: a request that only a wait could serve fails with
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    Never,
}

/// A limit on memory obtained from the driver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// Bytes.
    Bytes(u64),
    /// A share of the device's total memory, above 0 and at most 1. It limits this allocator only, not the process.
    Fraction(f64),
}

/// Name of the environment variable that [`Config::from_env`] reads.
pub const CONFIG_VARIABLE: &str = "CUALLOC_CONFIG";

/// Settings of an allocator. The defaults suit most programs; the guide's page on configuration describes what to
/// change when memory or time is short.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Segment policy.
    pub policy: Policy,
    /// Limit on memory obtained from the driver (segments and handles, not requests); none by default.
    pub limit: Option<Limit>,
    /// Bytes of the device that growth leaves free for the rest of CUDA (modules, cuBLAS, cuDNN, NCCL). By default 2 %
    /// of the device, at most 512 MiB; 0 if less than twice that is free when the allocator is created. Reserved memory
    /// is not released to restore the headroom, and [`resume`](crate::Allocator::resume) ignores it.
    pub headroom: Option<u64>,
    /// Ordinals of other devices that may access the memory. Packed policy only.
    pub peers: Vec<usize>,
    /// Whether an allocation may wait for unfinished work of other streams; the default depends on the profile.
    pub waits: Option<Waits>,
    /// Whether memory may be used through second mappings (views), on by default. Packed policy only. Views do not
    /// support work that reads through one address what a grid that is still running writes through another (a
    /// persistent kernel, a dependent launch before its wait).
    pub views: bool,
    /// Whether every call queries from the start if its stream is capturing. Off by default: then blocks of up to 64
    /// KiB are allocated from and freed to caches without a driver call until the process is known to capture streams,
    /// because of [`begin_capture`](crate::driver::Stream::begin_capture) or of any call that queries the driver anyway
    /// (for larger blocks, for growth, at markers). Use it for programs that begin captures through other libraries and
    /// want every misuse reported, including the first.
    pub capture_checks: bool,
    /// Whether streams known to the allocator may be captured into graphs, on by default. Off is the program's promise
    /// that none ever is: then no call queries captures, and the idleness of adopted and owned streams is queried at
    /// any time. If the promise is broken, the capture is invalidated, or the graph uses memory that other requests
    /// receive as well.
    pub captures: bool,
    /// Whether the owners of raw streams may destroy them without [`retire_raw`](crate::Allocator::retire_raw), off by
    /// default. With it the handle of a stream that is neither owned by this crate nor adopted is used only in calls
    /// that name the stream, never in frees. Other streams receive memory that was freed on it when a later call names
    /// it, or when the context is synchronised, which happens before much memory is held back. With a driver without
    /// stream ids (before CUDA 12) it has no effect.
    pub unretired_streams: bool,
    /// Maximum number of bytes of page-locked host memory that are kept for the next suspension, until
    /// [`trim`](crate::Allocator::trim); by default all of it. Locking pages takes longer than the copies.
    pub host_cache: Option<u64>,
    /// Whether a raw call that names a default stream by its special handle (null, 1 or 2) while another context than
    /// the allocator's is current returns [`Error::WrongContext`](crate::Error::WrongContext). Here the handle means
    /// the stream of the allocator's context, but a launch with that handle would go to the current context. On by
    /// default in builds with debug assertions, off in others.
    pub context_checks: bool,
    /// Whether the device is tested before the first view is built, once per process: a write through one mapping must
    /// be visible through another. On by default. If the test fails, no views are used.
    pub self_test: bool,
    /// Whether saving memory has priority over saving driver calls. Packed policy only.
    pub profile: Profile,
    /// Bytes of the physical handles for large blocks: a power of two from 2 MiB to 64 MiB. Smaller handles are created
    /// for the remainder of a growth, and where the limit requires them: at most a 512th of it, and a 2048th once more
    /// than half of it is reserved. By default handle sizes follow the pool, and while memory is scarce also the
    /// request. Packed policy only.
    pub handle: Option<u64>,
    /// Whether a tool named by `NVTX_INJECTION64_PATH` receives blocks and slow paths, on by default; the first
    /// allocator with this setting loads it. If the tool tracks memory, as compute-sanitizer does, [`Policy::Auto`] is
    /// the classic policy, because such tools do not accept heaps in mapped memory. Nothing is loaded if the variable
    /// is not set.
    pub nvtx: bool,
    /// How long unused memory for large blocks stays reserved. Memory that was in excess for that long is released to
    /// the driver, at the latest after twice that time. The release happens in a call that enters the heap anyway (one
    /// that waits for memory or frees a large block), or in [`Allocator::decay`](crate::Allocator::decay); there is no
    /// thread for it. By default memory stays until it is trimmed or needed elsewhere.
    pub decay: Option<Duration>,
    /// The share that [`decay`](Self::decay) never releases: a fraction of the peak of allocated bytes, from 0 to 1.
    pub keep: Option<f64>,
    /// Debug modes; all off by default.
    pub debug: DebugModes,
}

/// Settings of the packed policy.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tuning {
    pub profile: Profile,
    pub handle: Option<u64>,
    pub waits: Waits,
}

/// The default of `headroom`, as a share of the device and in bytes at most. PyTorch 2.11 on an H200 takes 68 MiB for
/// its first matrix product, 6 for a convolution, 96 for a linear solver, 8 for an FFT and 70 for a captured graph: 248
/// MiB in all. NCCL takes 768 MiB when two devices start it.
const HEADROOM_PERCENT: u64 = 2;
const HEADROOM_MAX: u64 = 512 << 20;

/// Largest handle size that can be configured, in bytes.
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
            host_cache: None,
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
    /// Returns the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the segment policy.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Limits the bytes obtained from the driver; `None` removes the limit.
    pub fn limit(mut self, bytes: Option<u64>) -> Self {
        self.limit = bytes.map(Limit::Bytes);
        self
    }

    /// Limits the bytes obtained from the driver to a share of the device's memory.
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

    /// Sets whether captures are queried from the start, or only once one is seen. When on, other threads never query
    /// whether a stream is idle, because a query would invalidate a capture that begins concurrently.
    pub fn capture_checks(mut self, on: bool) -> Self {
        self.capture_checks = on;
        self
    }

    /// Sets whether the allocator's streams may capture; `false` promises that none does.
    pub fn captures(mut self, on: bool) -> Self {
        self.captures = on;
        self
    }

    /// Sets whether raw streams may be destroyed without being retired.
    pub fn unretired_streams(mut self, on: bool) -> Self {
        self.unretired_streams = on;
        self
    }

    /// Limits the page-locked host memory that is kept between suspensions, in bytes.
    pub fn host_cache(mut self, bytes: u64) -> Self {
        self.host_cache = Some(bytes);
        self
    }

    /// Sets whether a default stream's special handle is refused while another context is current, or taken as that of
    /// the allocator's context without a check.
    pub fn context_checks(mut self, on: bool) -> Self {
        self.context_checks = on;
        self
    }

    /// Switches the self-test before the first view on or off.
    pub fn self_test(mut self, on: bool) -> Self {
        self.self_test = on;
        self
    }

    /// Sets whether saving memory has priority over saving driver calls.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// Sets the bytes of the physical handles for large blocks.
    pub fn handle(mut self, bytes: u64) -> Self {
        self.handle = Some(bytes);
        self
    }

    /// Sets whether blocks and slow paths are reported to an attached tool.
    pub fn nvtx(mut self, on: bool) -> Self {
        self.nvtx = on;
        self
    }

    /// Releases memory that has been idle for this long; `None` keeps it.
    pub fn decay(mut self, idle: Option<Duration>) -> Self {
        self.decay = idle;
        self
    }

    /// Keeps idle memory up to a share of the peak of allocated bytes.
    pub fn keep(mut self, share: f64) -> Self {
        self.keep = Some(share);
        self
    }

    /// Sets the debug modes.
    pub fn debug(mut self, modes: DebugModes) -> Self {
        self.debug = modes;
        self
    }

    /// Returns the headroom in bytes on a device with this amount of memory.
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

    /// Lets other devices access the memory.
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

    /// Returns the text of the environment variable `CUALLOC_CONFIG`: empty if it is not set, and if the process runs
    /// with more privileges than the user who started it (secure execution).
    ///
    /// # Errors
    /// [`ConfigError::NotUnicode`].
    pub fn environment() -> Result<String, ConfigError> {
        let text = crate::environment::variable(CONFIG_VARIABLE).unwrap_or_default();
        text.into_string().map_err(|_| ConfigError::NotUnicode)
    }

    /// Validates the settings against each other.
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
