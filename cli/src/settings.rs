//! The allocator's settings: those of the environment, overridden by options.

use crate::Failure;
use crate::options::{PlacementOptions, PolicyChoice, TraceOptions};
use crate::output::Output;
use crate::size::Limit;
use cualloc::allocator::{CONFIG_VARIABLE, Config, Policy};
use cualloc::trace::{Replay, Trace};

pub struct Settings {
    config: Config,
    /// The text of the variable.
    text: Option<String>,
}

impl Settings {
    /// Reads `CUALLOC_CONFIG`, which options override.
    pub fn read(options: &PlacementOptions) -> Result<Settings, Failure> {
        let wrong = |error| Failure::usage(format!("{CONFIG_VARIABLE}: {error}"));
        let mut config = Config::from_env().map_err(wrong)?;
        if let Some(policy) = options.policy {
            config = config.policy(match policy {
                PolicyChoice::Packed => Policy::Packed,
                PolicyChoice::Classic => Policy::Classic,
            });
        }
        if options.no_views {
            config = config.views(false);
        }
        config.validate().map_err(|error| {
            Failure::usage(format!(
                "{CONFIG_VARIABLE} and the options contradict each other: {error}"
            ))
        })?;
        let text = std::env::var(CONFIG_VARIABLE).ok();
        Ok(Settings {
            config,
            text: text.filter(|text| !text.trim().is_empty()),
        })
    }

    pub fn limit(&self) -> Option<Limit> {
        self.config.limit.map(Limit::Of)
    }

    /// Returns the limit in bytes for a trace, set by an option or else by the environment.
    pub fn limit_for(&self, option: Option<Limit>, trace: &Trace, memory: u64) -> Option<u64> {
        let limit = option.or_else(|| self.limit())?;
        Some(limit.bytes(trace.requested_peak(), memory))
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn replay<'a>(
        &self,
        trace: &'a Trace,
        options: &TraceOptions,
        limit: Option<u64>,
    ) -> Replay<'a> {
        Replay::new(trace)
            .config(self.config.clone().limit(limit))
            .verify(options.verify)
            .seed(options.seed)
    }

    /// Returns the text of the variable, if it is set.
    pub fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// Notes on stderr that the default settings are not in effect.
    pub fn announce(&self, output: &Output) {
        if let Some(text) = &self.text {
            output.note(&format!("the allocator is set by {CONFIG_VARIABLE}={text}"));
        }
    }
}
