//! Processes of this machine, by their ids.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
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

/// Returns the process at the other end of a socket, and its user. A process of another namespace has no id here.
pub(super) fn of_socket(socket: &OwnedFd) -> Option<(Option<Pid>, u32)> {
    unsafe extern "C" {
        fn getsockopt(
            socket: c_int,
            level: c_int,
            name: c_int,
            value: *mut c_void,
            bytes: *mut u32,
        ) -> c_int;
    }
    const SOL_SOCKET: c_int = 1;
    const SO_PEERCRED: c_int = if cfg!(target_arch = "powerpc64") {
        21
    } else {
        17
    };
    // Process, user and group. The type of `rustix` cannot represent a process without an id.
    let (mut found, mut bytes) = ([0_u32; 3], 12);
    // SAFETY: the option has this size, and both pointers are to locals.
    let failed = unsafe {
        let value = (&raw mut found).cast();
        getsockopt(
            socket.as_raw_fd(),
            SOL_SOCKET,
            SO_PEERCRED,
            value,
            &raw mut bytes,
        )
    };
    let [pid, user, _] = found;
    (failed == 0 && bytes == 12).then(|| (Pid::from_raw(pid.cast_signed()), user))
}
