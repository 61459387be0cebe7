//! Recordings: read, made up, and replayed.

mod format;
mod generate;
#[cfg(feature = "sim")]
mod replay;
#[path = "../common/watchdog.rs"]
mod watchdog;
