//! Configuration: a builder, and one string for it.

use std::str::FromStr;

use crate::error::ConfigError;

use super::size::PHYSICAL_GRANULE;

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

/// What counts more while a pool grows: memory or time. Packed policy only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Profile {
    /// Handles are small beside the pool, so that all of it stays useful.
    #[default]
    Dense,
    /// Fewer and larger handles: the first rounds of a program pay the driver about half as much, and up to
    /// 4 % more memory is held than asked for by programs that repeat, 13 % by such that never do.
    Quick,
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

/// Settings of an allocator. The default suits most programs; the guide's page on tuning says which it
/// does not.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Segment policy.
    pub policy: Policy,
    /// Bound on memory held from the driver (segments and handles, not requests); none by default.
    pub limit: Option<Limit>,
    /// Ordinals of further devices that may access the memory. Packed policy only.
    pub peers: Vec<usize>,
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
    /// context was synchronised, which is done before much of it is held back. Needs a driver with stream ids (CUDA 12);
    /// on others a new stream under the handle of an old one counts as that.
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
    /// Slack of the soft cap on growth over the peak of live requested bytes: a share of that peak,
    /// from 0 to 1, but at least 16 MiB. By default 1 % to 6.8 %, as the work needs it. Packed policy
    /// only.
    pub slack: Option<f64>,
    /// Handles that may be mapped into views before the next level of slack, handle size and waits is
    /// taken; 1500 by default (12,000 before the last level). Packed policy only, with views.
    pub budget: Option<u64>,
    /// Whether small or few physical handles are made while the pool grows. Packed policy only.
    pub profile: Profile,
    /// Bytes of the physical handles that large blocks are made of: a multiple of 2 MiB, up to 1 GiB.
    /// Smaller ones are made for the rest of a growth and near the limit. By default 2 MiB to 32 MiB,
    /// as the pool grows, or a part of a very large request. Packed policy only.
    pub handle: Option<u64>,
}

/// What the packed policy is told beside its own rules.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tuning {
    pub slack: Option<f64>,
    pub budget: Option<u64>,
    pub profile: Profile,
    pub handle: Option<u64>,
}

/// Largest size of a handle that can be asked for.
const HANDLE_MAX: u64 = 1 << 30;

impl Default for Config {
    fn default() -> Self {
        Config {
            policy: Policy::Auto,
            limit: None,
            peers: Vec::new(),
            views: true,
            capture_checks: false,
            captures: true,
            unretired_streams: false,
            context_checks: cfg!(debug_assertions),
            self_test: true,
            slack: None,
            budget: None,
            profile: Profile::Dense,
            handle: None,
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

    /// Fixes the slack of the soft cap, as a share of the peak of live requested bytes.
    pub fn slack(mut self, share: f64) -> Self {
        self.slack = Some(share);
        self
    }

    /// Sets how many handles may be mapped into views on one level.
    pub fn budget(mut self, handles: u64) -> Self {
        self.budget = Some(handles);
        self
    }

    /// Chooses between memory and time while the pool grows.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// Fixes the bytes of the physical handles for large blocks.
    pub fn handle(mut self, bytes: u64) -> Self {
        self.handle = Some(bytes);
        self
    }

    pub(crate) fn tuning(&self) -> Tuning {
        Tuning {
            slack: self.slack,
            budget: self.budget,
            profile: self.profile,
            handle: self.handle,
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
    /// As [`FromStr`]; also if the variable is not Unicode.
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
        let (classic, no_views) = (self.policy == Policy::Classic, !self.views);
        let quick = self.profile == Profile::Quick;
        let contradictions = [
            (classic && !self.peers.is_empty(), "policy=classic", "peers"),
            (classic && self.slack.is_some(), "policy=classic", "slack"),
            (classic && self.budget.is_some(), "policy=classic", "budget"),
            (classic && self.handle.is_some(), "policy=classic", "handle"),
            (classic && quick, "policy=classic", "profile=quick"),
            (quick && self.handle.is_some(), "profile=quick", "handle"),
            (no_views && self.budget.is_some(), "views=off", "budget"),
            (self.handle_above_limit(), "limit", "handle"),
            (
                self.capture_checks && !self.captures,
                "captures=never",
                "capture_checks=on",
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
        match (self.slack, self.budget, self.handle) {
            (Some(share), ..) if !(0.0..=1.0).contains(&share) => {
                return invalid("slack", share.to_string());
            }
            (_, Some(0), _) => return invalid("budget", "0".into()),
            (.., Some(bytes))
                if bytes == 0 || bytes > HANDLE_MAX || !bytes.is_multiple_of(PHYSICAL_GRANULE) =>
            {
                return invalid("handle", bytes.to_string());
            }
            _ => {}
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

/// Parses `key=value` pairs separated by commas: `policy=packed|classic|auto`, `limit=BYTES` or `limit=SHARE%` (as
/// [`Limit`] is written, with units like `12G` and `1.5GiB`), `peers=1+2`, `views=on|off`,
/// `capture_checks=on|off`, `captures=watched|never`, `unretired_streams=on|off`, `checks=context|none`,
/// `self_test=on|off`, `slack=SHARE%`, `budget=HANDLES`, `profile=dense|quick`, `handle=BYTES`.
///
/// ```
/// use cualloc::allocator::{Config, Policy};
/// let config: Config = "policy=packed,limit=12G".parse()?;
/// assert_eq!(config, Config::new().policy(Policy::Packed).limit(Some(12 << 30)));
/// assert!("polcy=packed".parse::<Config>().is_err());
/// # Ok::<(), cualloc::error::ConfigError>(())
/// ```
impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut config = Config::default();
        let mut seen: Vec<&str> = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| ConfigError::NotAPair(pair.into()))?;
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(ConfigError::Repeated(key.into()));
            }
            seen.push(key);
            let invalid = || ConfigError::InvalidValue {
                key: key.into(),
                value: value.into(),
            };
            match key {
                "policy" => {
                    config.policy = match value {
                        "auto" => Policy::Auto,
                        "packed" => Policy::Packed,
                        "classic" => Policy::Classic,
                        _ => return Err(invalid()),
                    }
                }
                "limit" => config.limit = Some(parse_limit(value).ok_or_else(invalid)?),
                "peers" => {
                    config.peers = value
                        .split('+')
                        .map(|p| p.parse().map_err(|_| invalid()))
                        .collect::<Result<_, _>>()?;
                }
                "views" => config.views = parse_switch(value).ok_or_else(invalid)?,
                "capture_checks" => {
                    config.capture_checks = parse_switch(value).ok_or_else(invalid)?;
                }
                "captures" => {
                    config.captures = match value {
                        "watched" => true,
                        "never" => false,
                        _ => return Err(invalid()),
                    }
                }
                "unretired_streams" => {
                    config.unretired_streams = parse_switch(value).ok_or_else(invalid)?;
                }
                "checks" => {
                    config.context_checks = match value {
                        "context" => true,
                        "none" => false,
                        _ => return Err(invalid()),
                    }
                }
                "self_test" => config.self_test = parse_switch(value).ok_or_else(invalid)?,
                "slack" => match parse_limit(value) {
                    Some(Limit::Fraction(share)) => config.slack = Some(share),
                    _ => return Err(invalid()),
                },
                "budget" => config.budget = Some(value.parse().map_err(|_| invalid())?),
                "profile" => {
                    config.profile = match value {
                        "dense" => Profile::Dense,
                        "quick" => Profile::Quick,
                        _ => return Err(invalid()),
                    }
                }
                "handle" => match parse_limit(value) {
                    Some(Limit::Bytes(bytes)) => config.handle = Some(bytes),
                    _ => return Err(invalid()),
                },
                _ => return Err(ConfigError::UnknownKey(key.into())),
            }
        }
        config.validate()?;
        Ok(config)
    }
}

/// Parses a number of bytes above 0, or a share of the device's memory above 0 % and up to 100 %: `4096`, `512M`,
/// `1.5GiB`, `99%`. The units `K`, `M`, `G`, `T` and `KiB` to `TiB` are powers of 1024, `KB` to `TB` powers of 1000;
/// letters may be small.
///
/// ```
/// use cualloc::allocator::Limit;
/// assert_eq!("1.5G".parse(), Ok(Limit::Bytes(3 << 29)));
/// assert_eq!("99%".parse(), Ok(Limit::Fraction(0.99)));
/// ```
impl FromStr for Limit {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let valid = |limit: &Limit| match limit {
            Limit::Bytes(bytes) => *bytes > 0,
            Limit::Fraction(share) => *share > 0.0 && *share <= 1.0,
        };
        parse_limit(text)
            .filter(valid)
            .ok_or_else(|| ConfigError::InvalidValue {
                key: "limit".into(),
                value: text.into(),
            })
    }
}

fn parse_switch(value: &str) -> Option<bool> {
    match value {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

fn parse_limit(value: &str) -> Option<Limit> {
    match value.strip_suffix('%') {
        Some(percent) => percent
            .parse::<f64>()
            .ok()
            .map(|p| Limit::Fraction(p / 100.0)),
        None => parse_bytes(value).map(Limit::Bytes),
    }
}

/// A number of bytes as people write it; what is no whole number of bytes is rounded down.
fn parse_bytes(text: &str) -> Option<u64> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let base: u128 = match unit.get(1..).unwrap_or_default() {
        "" | "ib" => 1024,
        "b" => 1000,
        _ => return None,
    };
    let factor = match unit.chars().next() {
        None => 1,
        Some('b') if unit == "b" => 1,
        Some(letter) => base.pow("kmgt".find(letter)? as u32 + 1),
    };
    let (whole, part) = match number.split_once('.') {
        // A part of a byte is no size, and more digits than a byte of any unit needs are none either.
        Some((whole, part)) if factor > 1 && digits(part) && part.len() <= 18 => (whole, part),
        Some(_) => return None,
        None => (number, ""),
    };
    if !digits(whole) {
        return None;
    }
    let whole = u128::from(whole.parse::<u64>().ok()?).checked_mul(factor)?;
    let part = match part {
        "" => 0,
        part => u128::from(part.parse::<u64>().ok()?) * factor / 10u128.pow(part.len() as u32),
    };
    u64::try_from(whole + part).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_and_contradicting_settings_are_errors() {
        let parse = |text: &str| text.parse::<Config>();
        assert_eq!(parse(""), Ok(Config::default()));
        assert_eq!(
            parse(" limit=512M , policy=auto"),
            Ok(Config::new().limit(Some(512 << 20)))
        );
        assert_eq!(parse("limit=50%"), Ok(Config::new().limit_fraction(0.5)));
        assert_eq!(parse("peers=1+3"), Ok(Config::new().peers([1, 3])));
        assert_eq!(
            parse("slack=2.5%,budget=200,handle=8M,self_test=off"),
            Ok(Config::new()
                .slack(0.025)
                .budget(200)
                .handle(8 << 20)
                .self_test(false))
        );
        for (value, on) in [("context", true), ("none", false)] {
            let expected = Config::new().context_checks(on);
            assert_eq!(parse(&format!("checks={value}")), Ok(expected));
        }
        assert_eq!(Config::new().context_checks, cfg!(debug_assertions));
        assert_eq!(parse("profile=dense"), Ok(Config::new()));
        let quick = Config::new().profile(Profile::Quick);
        assert_eq!(parse("profile=quick"), Ok(quick));
        assert_eq!(parse("captures=never"), Ok(Config::new().captures(false)));
        assert_eq!(parse("captures=watched"), Ok(Config::new()));
        assert_eq!(parse("policy"), Err(ConfigError::NotAPair("policy".into())));
        assert_eq!(
            parse("colour=red"),
            Err(ConfigError::UnknownKey("colour".into()))
        );
        assert_eq!(
            parse("limit=1,limit=2"),
            Err(ConfigError::Repeated("limit".into()))
        );
        for bad in [
            "limit=x",
            "limit=0",
            "limit=0%",
            "limit=101%",
            "limit=99999999999T",
            "policy=torch",
            "peers=a",
            "views=yes",
            "self_test=1",
            "checks=on",
            "captures=off",
            "unretired_streams=yes",
            "slack=2",
            "slack=-1%",
            "slack=101%",
            "slack=NaN%",
            "budget=0",
            "budget=1.5",
            "profile=fast",
            "handle=0",
            "handle=3M",
            "handle=2G",
            "handle=10%",
        ] {
            assert!(
                matches!(parse(bad), Err(ConfigError::InvalidValue { .. })),
                "{bad}: {:?}",
                parse(bad)
            );
        }
        for bad in [
            "policy=classic,peers=1",
            "policy=classic,slack=2%",
            "policy=classic,budget=100",
            "policy=classic,handle=4M",
            "policy=classic,profile=quick",
            "profile=quick,handle=4M",
            "views=off,budget=100",
            "captures=never,capture_checks=on",
            "limit=2M,handle=4M",
        ] {
            assert!(
                matches!(parse(bad), Err(ConfigError::Contradiction { .. })),
                "{bad}: {:?}",
                parse(bad)
            );
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("512B", 512),
            ("1k", 1 << 10),
            ("6G", 6 << 30),
            ("1.5G", 3 << 29),
            ("12GiB", 12 << 30),
            ("144 GiB", 144 << 30),
            ("0.5t", 1 << 39),
            ("2tib", 2 << 40),
            ("3mb", 3_000_000),
            ("80GB", 80_000_000_000),
            ("0.1K", 102),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Limit::Bytes(bytes)), "{text}");
            assert_eq!(parse_limit(text), Some(Limit::Bytes(bytes)), "{text}");
        }
        assert_eq!("99%".parse(), Ok(Limit::Fraction(0.99)));
        let bad = "0 0G 0.0G -1 +1 1.5 1. 1.G .5G G 1.2.3G 1e3 1GG 1iB 1Gi 1P 1x 0x10 1_000 16777216T \
                   18446744073709551616 0% 101% -1% NaN% % １G";
        for text in bad.split(' ').chain(["", "1 G G"]) {
            let refused = text.parse::<Limit>();
            assert!(
                matches!(refused, Err(ConfigError::InvalidValue { .. })),
                "{text}: {refused:?}"
            );
        }
    }
}
