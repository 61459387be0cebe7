//! The allocator's settings: those of the environment, and options before them.

use crate::Failure;
use crate::options::{PlacementOptions, PolicyChoice, TraceOptions};
use crate::output::Output;
use crate::size::Limit;
use cualloc::allocator::{CONFIG_VARIABLE, Config, Policy};
use cualloc::trace::{Replay, Trace};

/// What the environment says, with the options on top.
pub struct Settings {
    config: Config,
    /// As the variable has it.
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

    /// The limit of the environment.
    pub fn limit(&self) -> Option<Limit> {
        self.config.limit.map(Limit::Of)
    }

    /// The limit in bytes that an option or else the environment sets for a trace.
    pub fn limit_for(&self, option: Option<Limit>, trace: &Trace, memory: u64) -> Option<u64> {
        let limit = option.or_else(|| self.limit())?;
        Some(limit.bytes(trace.requested_peak(), memory))
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A replay of a trace under them, with this limit.
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

    /// What the variable says, if anything.
    pub fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// Says that results are not those of the default settings.
    pub fn announce(&self, output: &Output) {
        if let Some(text) = &self.text {
            output.note(&format!("the allocator is set by {CONFIG_VARIABLE}={text}"));
        }
    }
}
