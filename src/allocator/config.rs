//! Configuration: a builder, and one string for it.

use std::str::FromStr;

/// Where segments come from and how they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Packed where the device supports virtual memory management, classic elsewhere.
    #[default]
    Auto,
    /// Arenas in reserved address space with physical handles mapped into them.
    Packed,
    /// `cuMemAlloc` segments with the constants of PyTorch's caching allocator.
    Classic,
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

/// Settings of an allocator. The default suits every workload.
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
    /// blocks of up to 64 KiB that are at hand are given out and taken back without a call of the
    /// driver until the process is seen to capture streams, by
    /// [`begin_capture`](crate::driver::Entered::begin_capture) or by any call that asks anyway
    /// (for larger blocks, for more memory, at markers). For programs that begin captures through
    /// other libraries and want each misuse reported, the first one included.
    pub capture_checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            policy: Policy::Auto,
            limit: None,
            peers: Vec::new(),
            views: true,
            capture_checks: false,
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

    /// Asks about captures from the start, or only when they are seen.
    pub fn capture_checks(mut self, on: bool) -> Self {
        self.capture_checks = on;
        self
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
        match std::env::var(CONFIG_VARIABLE) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(_)) => Err(ConfigError::NotUnicode),
        }
    }

    /// Checks settings against each other.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`], [`ConfigError::InvalidValue`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.policy == Policy::Classic && !self.peers.is_empty() {
            return Err(ConfigError::Contradiction {
                first: "policy=classic",
                second: "peers",
            });
        }
        match self.limit {
            Some(Limit::Fraction(f)) if !(f > 0.0 && f <= 1.0) => Err(ConfigError::InvalidValue {
                key: "limit".into(),
                value: f.to_string(),
            }),
            Some(Limit::Bytes(0)) => Err(ConfigError::InvalidValue {
                key: "limit".into(),
                value: "0".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// Why settings were refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A part of the string that is not `key=value`.
    #[error("`{0}` is not of the form key=value")]
    NotAPair(String),
    /// A key that does not exist.
    #[error("unknown setting `{0}`")]
    UnknownKey(String),
    /// A key that occurs twice.
    #[error("setting `{0}` is given twice")]
    Repeated(String),
    /// A value that the key does not take.
    #[error("`{value}` is not a valid value of `{key}`")]
    InvalidValue {
        /// The setting.
        key: String,
        /// What was given.
        value: String,
    },
    /// Settings that exclude each other.
    #[error("`{first}` and `{second}` exclude each other")]
    Contradiction {
        /// One of them.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The environment variable is not Unicode.
    #[error("the environment variable {CONFIG_VARIABLE} is not Unicode")]
    NotUnicode,
}

/// Parses `key=value` pairs separated by commas: `policy=packed|classic|auto`, `limit=BYTES` (with
/// an optional suffix K, M, G, T for powers of 1024) or `limit=SHARE%`, `peers=1+2`, `views=on|off`,
/// `capture_checks=on|off`.
///
/// ```
/// use cualloc::allocator::{Config, Policy};
/// let config: Config = "policy=packed,limit=12G".parse()?;
/// assert_eq!(config, Config::new().policy(Policy::Packed).limit(Some(12 << 30)));
/// assert!("polcy=packed".parse::<Config>().is_err());
/// # Ok::<(), cualloc::allocator::ConfigError>(())
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
                _ => return Err(ConfigError::UnknownKey(key.into())),
            }
        }
        config.validate()?;
        Ok(config)
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
    if let Some(percent) = value.strip_suffix('%') {
        return percent
            .parse::<f64>()
            .ok()
            .map(|p| Limit::Fraction(p / 100.0));
    }
    let (digits, shift) = match value.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(digits) => (
            digits,
            10 * (1 + "KMGT".find(&value[digits.len()..])? as u32),
        ),
        None => (value, 0),
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    Some(Limit::Bytes(bytes))
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
        ] {
            assert!(
                matches!(parse(bad), Err(ConfigError::InvalidValue { .. })),
                "{bad}: {:?}",
                parse(bad)
            );
        }
        assert!(matches!(
            parse("policy=classic,peers=1"),
            Err(ConfigError::Contradiction { .. })
        ));
    }
}
