//! Cache lines that are asked for before they are needed.

/// Asks the processor for the cache line around an address, which may be any, so that a later access need not wait for
/// it. Nothing is read as far as a program can tell. Where a processor's instruction for it is not known nothing is done.
#[inline(always)]
pub(crate) fn prefetch(pointer: *const ()) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which every address is good for.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(pointer.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = pointer;
}
