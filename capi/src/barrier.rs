//! A memory barrier that the calling thread issues on behalf of all threads of the process.

/// Registers for process-wide barriers and returns whether the system supports them. Must precede the first barrier;
/// may be called repeatedly.
pub(crate) fn prepare() -> bool {
    imp::prepare()
}

/// Makes every thread of the process pass a full memory barrier between this call and its return. Returns false if the
/// system cannot do that; no ordering is guaranteed then.
pub(crate) fn for_all_threads() -> bool {
    imp::for_all_threads()
}

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod imp {
    use std::ffi::{c_int, c_long, c_uint};
    use std::sync::OnceLock;

    #[cfg(target_arch = "x86_64")]
    const SYS_MEMBARRIER: c_long = 324;
    #[cfg(target_arch = "aarch64")]
    const SYS_MEMBARRIER: c_long = 283;
    const PRIVATE_EXPEDITED: c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

    unsafe extern "C" {
        fn syscall(number: c_long, ...) -> c_long;
    }

    fn membarrier(command: c_int) -> bool {
        // SAFETY: the call takes a command, flags and a processor, and writes nothing.
        unsafe { syscall(SYS_MEMBARRIER, command, 0 as c_uint, 0 as c_int) == 0 }
    }

    pub(super) fn prepare() -> bool {
        static READY: OnceLock<bool> = OnceLock::new();
        *READY.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED))
    }

    pub(super) fn for_all_threads() -> bool {
        prepare() && membarrier(PRIVATE_EXPEDITED)
    }
}

#[cfg(windows)]
mod imp {
    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn FlushProcessWriteBuffers();
    }

    pub(super) fn prepare() -> bool {
        true
    }

    pub(super) fn for_all_threads() -> bool {
        // SAFETY: the call takes and returns nothing.
        unsafe { FlushProcessWriteBuffers() };
        true
    }
}

#[cfg(not(any(
    windows,
    all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64")
    )
)))]
mod imp {
    pub(super) fn prepare() -> bool {
        false
    }

    pub(super) fn for_all_threads() -> bool {
        false
    }
}
