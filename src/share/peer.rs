//! Processes of this machine, by their ids.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Returns when a running process started: a number that distinguishes it from other processes that have its id.
pub(super) fn start_of(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may contain spaces and parentheses.
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    // A process that has ended is listed until its parent has asked for its result.
    let running = !matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| running)
}

/// Returns the number of the namespace in which this process has its id.
pub(super) fn namespace() -> u64 {
    let namespace = std::fs::metadata("/proc/self/ns/pid");
    namespace.map_or(0, |namespace| namespace.ino())
}

/// Returns a descriptor that becomes readable when the process ends.
pub(super) fn watch(pid: Option<Pid>) -> Option<OwnedFd> {
    pidfd_open(pid?, PidfdFlags::empty()).ok()
}
