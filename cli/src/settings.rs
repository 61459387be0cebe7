//! The allocator's settings: those of the environment, and options before them.

use crate::Failure;
use crate::options::{PolicyChoice, TraceOptions};
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
    /// Reads `CUALLOC_CONFIG`; options count more than what it says.
    pub fn read(policy: Option<PolicyChoice>, no_views: bool) -> Result<Settings, Failure> {
        let wrong = |error| Failure::Usage(format!("{CONFIG_VARIABLE}: {error}"));
        let mut config = Config::from_env().map_err(wrong)?;
        match policy {
            None => {}
            Some(PolicyChoice::Packed) => config = config.policy(Policy::Packed),
            Some(PolicyChoice::Classic) => config = config.policy(Policy::Classic),
        }
        if no_views {
            config = config.views(false);
        }
        config.validate().map_err(|error| {
            Failure::Usage(format!(
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
