//! Recordings: read, made up, and replayed.

mod format;
mod generate;
#[cfg(feature = "sim")]
mod replay;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../common/watchdog.rs"]
mod watchdog;
