//! Recordings: read, made up, and replayed.

mod format;
mod generate;
mod logs;
#[cfg(feature = "sim")]
mod replay;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[path = "../common/watchdog.rs"]
mod watchdog;
