//! Options by handle.

use std::collections::BTreeMap;

use cualloc::Config;

use crate::cualloc_options_t;
use crate::device::Source;
use crate::handle_table::HandleTable;
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};

static OPTIONS: HandleTable<Options> = HandleTable::new(
    0xca11,
    "the handle belongs to no options: they were freed or never existed",
);

/// The options that were set, by key.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) source: Source,
    settings: BTreeMap<String, String>,
}

pub(crate) fn add() -> Result<*mut cualloc_options_t, Failure> {
    Ok(OPTIONS.add(Options::default())? as *mut cualloc_options_t)
}

pub(crate) fn remove(handle: *mut cualloc_options_t) -> Result<(), Failure> {
    OPTIONS.remove(handle as u64).map(drop)
}

/// Returns the options of a handle; null means the defaults.
pub(crate) fn find(handle: *const cualloc_options_t) -> Result<Options, Failure> {
    match handle.is_null() {
        true => Ok(Options::default()),
        false => OPTIONS.with(handle as u64, |options| options.clone()),
    }
}

pub(crate) fn set(handle: *mut cualloc_options_t, key: &str, value: &str) -> Result<(), Failure> {
    if handle.is_null() {
        return Err(NULL);
    }
    let (key, value) = (key.trim(), value.trim());
    let source = match key {
        "device" => Some(Source::named(value)?),
        _ => {
            checked(key, value)?;
            None
        }
    };
    OPTIONS.with(handle as u64, |options| match source {
        Some(source) => options.source = source,
        None => {
            options.settings.insert(key.to_owned(), value.to_owned());
        }
    })
}

/// Validates a single setting.
fn checked(key: &str, value: &str) -> Result<(), Failure> {
    if key.contains([',', '=']) || value.contains(',') {
        let why = "expected a key without `,` and `=`, and a value without `,`";
        return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
    }
    format!("{key}={value}").parse::<Config>()?;
    Ok(())
}

/// Defaults of all allocators, for settings not set explicitly.
const DEFAULTS: &[&str] = &["tune.checks=none"];
const SHARED_DEFAULTS: &[&str] = &["tune.checks=none", "tune.unretired_streams=on"];

/// The key of one setting.
fn key(part: &str) -> &str {
    part.split('=').next().unwrap_or(part).trim()
}

impl Options {
    /// Combines the settings of the environment variable with the options set here, which take precedence. With these
    /// defaults null, 1 and 2 are streams of the allocator's context whatever context is current, in debug builds too.
    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let text = self.with_defaults(&Config::environment()?, DEFAULTS);
        Ok(text.parse::<Config>()?)
    }

    /// [`config`](Self::config) for shared allocators: their users do not know of each other, so streams need not be
    /// retired.
    pub(crate) fn shared_config(&self) -> Result<Config, Failure> {
        Ok(self
            .merge_shared(&Config::environment()?)
            .parse::<Config>()?)
    }

    fn merge_shared(&self, inherited: &str) -> String {
        self.with_defaults(inherited, SHARED_DEFAULTS)
    }

    /// Returns all settings, with each default whose key is not set.
    fn with_defaults(&self, inherited: &str, defaults: &[&str]) -> String {
        let text = self.over(inherited);
        let unsaid = |default: &&&str| text.split(',').all(|part| key(part) != key(default));
        let mut parts: Vec<&str> = defaults.iter().filter(unsaid).copied().collect();
        parts.push(&text);
        parts.join(",")
    }

    fn over(&self, inherited: &str) -> String {
        let stays = |part: &&str| !self.settings.contains_key(key(part));
        let inherited = inherited.split(',').filter(stays).map(str::to_owned);
        let own = self
            .settings
            .iter()
            .map(|(key, value)| format!("{key}={value}"));
        let parts: Vec<String> = inherited.chain(own).collect();
        parts.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(own: &[(&str, &str)]) -> Options {
        let own = own.iter();
        Options {
            settings: own
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect(),
            ..Options::default()
        }
    }

    fn over(inherited: &str, own: &[(&str, &str)]) -> String {
        with(own).over(inherited)
    }

    #[test]
    fn options_override_the_environment() {
        assert_eq!(
            over("limit=1G, tune.views=off", &[]),
            "limit=1G, tune.views=off"
        );
        assert_eq!(
            over("limit=1G, tune.views=off", &[("limit", "2G")]),
            " tune.views=off,limit=2G"
        );
        assert_eq!(over(" limit =1G", &[("limit", "2G")]), "limit=2G");
        assert_eq!(over("", &[]), "");
        // Invalid settings in the environment variable remain an error.
        assert_eq!(
            over("limit=1G,limit=1G,x", &[("tune.views", "on")]),
            "limit=1G,limit=1G,x,tune.views=on"
        );
    }

    #[test]
    fn shared_allocators_accept_streams_that_are_never_retired() {
        let shared = |inherited: &str, own: &[(&str, &str)]| {
            let config = with(own).merge_shared(inherited).parse::<Config>().unwrap();
            config.unretired_streams
        };
        assert!(SHARED_DEFAULTS.starts_with(DEFAULTS));
        assert!(shared("", &[]) && shared("limit=1G", &[("tune.views", "off")]));
        assert!(!shared("tune.views=off, tune.unretired_streams = off", &[]));
        assert!(!shared("", &[("tune.unretired_streams", "off")]));
    }

    #[test]
    fn contexts_are_checked_if_configured() {
        let checks = |inherited: &str, own: &[(&str, &str)]| {
            let text = with(own).with_defaults(inherited, DEFAULTS);
            text.parse::<Config>().unwrap().context_checks
        };
        assert!(!checks("", &[]) && !checks("limit=1G", &[("tune.views", "off")]));
        assert!(checks("tune.checks = context", &[]) && checks("", &[("tune.checks", "context")]));
        assert!(!checks("tune.checks=context", &[("tune.checks", "none")]));
    }

    #[test]
    fn an_empty_environment_is_no_setting() {
        let config = over("", &[("limit", "2G")]).parse::<Config>().unwrap();
        assert_eq!(config, Config::new().limit(Some(2 << 30)));
    }

    #[test]
    fn one_call_sets_one_option() {
        for (key, value) in [
            ("limit", "1G,tune.views=off"),
            ("limit=1G,views", "off"),
            ("limit=1", ""),
        ] {
            let refused = checked(key, value).unwrap_err();
            assert_eq!(refused.code(), CUALLOC_INVALID_ARGUMENT, "{key} {value}");
        }
    }
}
