//! The text of a configuration.

use std::str::FromStr;
use std::time::Duration;

use crate::allocator::config::{Config, DebugModes, Limit, Policy, Profile, Waits};
use crate::error::ConfigError;

/// Parses `key=value` pairs separated by commas: `policy=packed|classic|auto`, `limit=BYTES` or `limit=SHARE%` (as
/// [`Limit`] is written, with units like `12G` and `1.5GiB`), `headroom=BYTES`, `waits=scarce|always|never`,
/// `profile=default|dense`, `peers=1+2`, `decay=TIME|off` (`500ms`, `10s`, `2m`, `1h`), `keep=SHARE%`,
/// `captures=watched|never`, `debug=guard+poison+quarantine:SIZE+leaks|off` (any of them). Settings that few programs
/// need: `tune.views=on|off`, `tune.handle=BYTES`, `tune.capture_checks=on|off`, `tune.unretired_streams=on|off`,
/// `tune.host_cache=BYTES`, `tune.checks=context|none`, `tune.self_test=on|off`, `tune.nvtx=auto|off`.
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
                "headroom" => config.headroom = Some(parse_bytes(value).ok_or_else(invalid)?),
                "peers" => {
                    config.peers = value
                        .split('+')
                        .map(|p| p.parse().map_err(|_| invalid()))
                        .collect::<Result<_, _>>()?;
                }
                "waits" => {
                    config.waits = Some(match value {
                        "scarce" => Waits::Scarce,
                        "always" => Waits::Always,
                        "never" => Waits::Never,
                        _ => return Err(invalid()),
                    })
                }
                "tune.views" => config.views = parse_switch(value).ok_or_else(invalid)?,
                "tune.capture_checks" => {
                    config.capture_checks = parse_switch(value).ok_or_else(invalid)?;
                }
                "captures" => {
                    config.captures = match value {
                        "watched" => true,
                        "never" => false,
                        _ => return Err(invalid()),
                    }
                }
                "tune.unretired_streams" => {
                    config.unretired_streams = parse_switch(value).ok_or_else(invalid)?;
                }
                "tune.host_cache" => {
                    config.host_cache = Some(parse_bytes(value).ok_or_else(invalid)?)
                }
                "tune.checks" => {
                    config.context_checks = match value {
                        "context" => true,
                        "none" => false,
                        _ => return Err(invalid()),
                    }
                }
                "tune.self_test" => config.self_test = parse_switch(value).ok_or_else(invalid)?,
                "profile" => {
                    config.profile = match value {
                        "default" => Profile::Default,
                        "dense" => Profile::Dense,
                        "quick" => {
                            let (key, instead) = ("profile=quick".into(), "profile=default");
                            return Err(ConfigError::Removed { key, instead });
                        }
                        _ => return Err(invalid()),
                    }
                }
                "tune.handle" => match parse_limit(value) {
                    Some(Limit::Bytes(bytes)) => config.handle = Some(bytes),
                    _ => return Err(invalid()),
                },
                "tune.nvtx" => {
                    config.nvtx = match value {
                        "auto" => true,
                        "off" => false,
                        _ => return Err(invalid()),
                    }
                }
                "decay" => {
                    config.decay = match value {
                        "off" => None,
                        _ => Some(parse_time(value).ok_or_else(invalid)?),
                    }
                }
                "keep" => match parse_limit(value) {
                    Some(Limit::Fraction(share)) => config.keep = Some(share),
                    _ => return Err(invalid()),
                },
                "debug" => config.debug = parse_debug(value).ok_or_else(invalid)?,
                _ => return Err(unknown(key)),
            }
        }
        config.validate()?;
        Ok(config)
    }
}

/// Settings of earlier versions, and their replacements.
const REPLACED: [(&str, &str); 9] = [
    ("slack", "profile"),
    ("budget", "profile"),
    ("views", "tune.views"),
    ("handle", "tune.handle"),
    ("capture_checks", "tune.capture_checks"),
    ("unretired_streams", "tune.unretired_streams"),
    ("checks", "tune.checks"),
    ("self_test", "tune.self_test"),
    ("nvtx", "tune.nvtx"),
];

fn unknown(key: &str) -> ConfigError {
    let replaced = REPLACED.iter().find(|(old, _)| *old == key);
    match replaced {
        Some((_, instead)) => ConfigError::Removed {
            key: key.into(),
            instead,
        },
        None => ConfigError::UnknownKey(key.into()),
    }
}

/// Parses a number of bytes above 0, or a share of the device's memory above 0 % and up to 100 %: `4096`, `512M`,
/// `1.5GiB`, `99%`. The units `K`, `M`, `G`, `T` and `KiB` to `TiB` are powers of 1024, `KB` to `TB` powers of 1000;
/// case does not matter.
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

/// Bytes in quarantine if no number is given.
const QUARANTINE: u64 = 64 << 20;

fn parse_debug(text: &str) -> Option<DebugModes> {
    let mut modes = DebugModes::new();
    if text == "off" {
        return Some(modes);
    }
    for mode in text.split('+') {
        let before = modes;
        match mode.split_once(':') {
            None => match mode {
                "guard" => modes.guard = true,
                "poison" => modes.poison = true,
                "quarantine" => modes.quarantine = QUARANTINE,
                "leaks" => modes.leaks = true,
                _ => return None,
            },
            Some(("quarantine", size)) if before.quarantine == 0 => match parse_limit(size) {
                Some(Limit::Bytes(bytes)) => modes.quarantine = bytes,
                _ => return None,
            },
            Some(_) => return None,
        }
        // A repeated or empty mode.
        if modes == before {
            return None;
        }
    }
    Some(modes)
}

/// Parses milliseconds, seconds, minutes or hours, with the unit.
fn parse_time(value: &str) -> Option<Duration> {
    let unit = value.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = value.split_at(unit);
    let factor = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let number: f64 = number.parse().ok().filter(|number| *number > 0.0)?;
    Duration::try_from_secs_f64(number * factor).ok()
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

/// Parses a human-readable number of bytes; a fraction of a byte is rounded down.
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
        // A fraction is invalid in a plain number of bytes, and so are more digits than any unit can use.
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
            parse("tune.handle=8M,tune.self_test=off"),
            Ok(Config::new().handle(8 << 20).self_test(false))
        );
        assert_eq!(parse("headroom=0"), Ok(Config::new().headroom(0)));
        let kept = Config::new().host_cache(12 << 30);
        assert_eq!(parse("tune.host_cache=12G"), Ok(kept));
        let spared = Config::new().headroom(768 << 20);
        assert_eq!(parse("headroom=768M"), Ok(spared.clone()));
        let (card, small) = (80 << 30, 5000 << 20);
        assert_eq!(spared.headroom_on(card), 768 << 20);
        assert_eq!(Config::new().headroom_on(card), 512 << 20);
        assert_eq!(Config::new().headroom_on(small), 100 << 20);
        for (value, on) in [("context", true), ("none", false)] {
            let expected = Config::new().context_checks(on);
            assert_eq!(parse(&format!("tune.checks={value}")), Ok(expected));
        }
        assert_eq!(Config::new().context_checks, cfg!(debug_assertions));
        for (value, waits) in [
            ("scarce", Waits::Scarce),
            ("always", Waits::Always),
            ("never", Waits::Never),
        ] {
            let expected = Config::new().waits(waits);
            assert_eq!(parse(&format!("waits={value}")), Ok(expected));
        }
        assert_eq!(parse("profile=default"), Ok(Config::new()));
        let dense = Config::new().profile(Profile::Dense);
        assert_eq!(parse("profile=dense"), Ok(dense.clone()));
        assert_eq!(dense.tuning().waits, Waits::Always);
        assert_eq!(dense.waits(Waits::Never).tuning().waits, Waits::Never);
        for removed in [
            "slack=2%",
            "budget=100",
            "profile=quick",
            "views=on",
            "nvtx=off",
        ] {
            assert!(matches!(parse(removed), Err(ConfigError::Removed { .. })));
        }
        let error = parse("handle=8M").unwrap_err();
        assert_eq!(
            error.to_string(),
            "setting `handle` was removed: use `tune.handle`"
        );
        assert_eq!(parse("captures=never"), Ok(Config::new().captures(false)));
        assert_eq!(parse("captures=watched"), Ok(Config::new()));
        assert_eq!(parse("debug=off"), Ok(Config::new()));
        let held = Config::new().debug(DebugModes::new().quarantine(64 << 20));
        assert_eq!(parse("debug=quarantine"), Ok(held));
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
            "headroom=2%",
            "headroom=off",
            "policy=torch",
            "peers=a",
            "tune.views=yes",
            "tune.self_test=1",
            "tune.checks=on",
            "captures=off",
            "waits=on",
            "tune.unretired_streams=yes",
            "profile=fast",
            "tune.handle=6M",
            "tune.handle=128M",
            "tune.handle=0",
            "tune.handle=3M",
            "tune.handle=2G",
            "tune.handle=10%",
            "debug=on",
            "debug=guard+guard",
            "debug=guard:1M",
            "debug=quarantine:0",
            "debug=quarantine:1M+quarantine:2M",
            "debug=",
        ] {
            assert!(
                matches!(parse(bad), Err(ConfigError::InvalidValue { .. })),
                "{bad}: {:?}",
                parse(bad)
            );
        }
        for bad in [
            "policy=classic,peers=1",
            "policy=classic,tune.handle=4M",
            "policy=classic,profile=dense",
            "captures=never,tune.capture_checks=on",
            "limit=2M,tune.handle=4M",
        ] {
            assert!(
                matches!(parse(bad), Err(ConfigError::Contradiction { .. })),
                "{bad}: {:?}",
                parse(bad)
            );
        }
    }

    #[test]
    fn settings_may_be_made_by_methods_or_text() {
        let modes = DebugModes::new().guard(true).poison(true).leaks(true);
        for (text, made) in [
            ("debug=guard+poison+leaks", Config::new().debug(modes)),
            ("tune.nvtx=off", Config::new().nvtx(false)),
            ("tune.nvtx=auto", Config::new().nvtx(true)),
            (
                "decay=1s,keep=25%",
                Config::new().decay(Some(Duration::from_secs(1))).keep(0.25),
            ),
        ] {
            assert_eq!(text.parse(), Ok(made), "{text}");
        }
        for (decay, keep) in [(0, 0.5), (1, 1.5)] {
            let decay = Some(Duration::from_secs(decay));
            let refused = Config::new().decay(decay).keep(keep).validate();
            assert!(matches!(refused, Err(ConfigError::InvalidValue { .. })));
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

    #[test]
    fn times_have_units() {
        let parse = |text: &str| text.parse::<Config>();
        let decay = |text: &str| parse(&format!("decay={text}")).map(|config| config.decay);
        for (text, time) in [
            ("500ms", Duration::from_millis(500)),
            ("10s", Duration::from_secs(10)),
            ("1.5m", Duration::from_secs(90)),
            ("1h", Duration::from_secs(3600)),
        ] {
            assert_eq!(decay(text), Ok(Some(time)), "{text}");
        }
        assert_eq!(decay("off"), Ok(None));
        for text in [
            "10", "s", "-1s", "0s", "1d", "infs", "nans", "1e300h", "1 s",
        ] {
            assert!(decay(text).is_err(), "{text}");
        }
        let kept = parse("decay=10s,keep=20%").unwrap();
        assert_eq!(kept.keep, Some(0.2));
        assert!(parse("keep=20%").is_err() && parse("decay=10s,keep=2G").is_err());
    }
}
