//! Pages of the process that no other allocator of the process knows, for page-locked memory.

use std::ffi::c_void;
use std::ptr::NonNull;

/// Maps zeroed pages and touches them. They are huge where the system allows it, and are not inherited by forked
/// children, for which they would be copied. `None` if the system has no memory, or is not supported.
#[cfg(target_os = "linux")]
pub(super) fn map(bytes: usize) -> Option<NonNull<c_void>> {
    const PAGE: usize = 4096;
    // SAFETY: new pages at an address that the system chooses.
    let address = unsafe {
        imp::mmap(
            std::ptr::null_mut(),
            bytes,
            imp::READ_WRITE,
            imp::PRIVATE,
            -1,
            0,
        )
    };
    let address = NonNull::new(address).filter(|at| at.as_ptr().addr() != usize::MAX)?;
    for advice in [imp::HUGE_PAGES, imp::DONT_FORK] {
        // SAFETY: the pages were mapped above. A refusal changes nothing.
        unsafe { imp::madvise(address.as_ptr(), bytes, advice) };
    }
    for at in (0..bytes).step_by(PAGE) {
        // SAFETY: the address lies in the pages, which nothing else uses.
        unsafe { address.cast::<u8>().add(at).write_volatile(0) };
    }
    Some(address)
}

/// Unmaps pages of [`map`].
///
/// # Safety
/// Nothing uses the pages any more.
#[cfg(target_os = "linux")]
pub(super) unsafe fn unmap(address: NonNull<c_void>, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe { imp::munmap(address.as_ptr(), bytes) };
}

#[cfg(not(target_os = "linux"))]
pub(super) fn map(_bytes: usize) -> Option<NonNull<c_void>> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn unmap(_address: NonNull<c_void>, _bytes: usize) {}

#[cfg(target_os = "linux")]
mod imp {
    use std::ffi::{c_int, c_void};

    pub const READ_WRITE: c_int = 3;
    pub const PRIVATE: c_int = 0x22;
    pub const HUGE_PAGES: c_int = 14;
    pub const DONT_FORK: c_int = 10;

    unsafe extern "C" {
        pub fn mmap(
            at: *mut c_void,
            bytes: usize,
            protection: c_int,
            flags: c_int,
            file: c_int,
            offset: i64,
        ) -> *mut c_void;
        pub fn munmap(at: *mut c_void, bytes: usize) -> c_int;
        pub fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }
}
