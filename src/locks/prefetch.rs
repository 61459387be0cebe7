//! Prefetching of cache lines.

/// Prefetches the cache line at any address, so that a later access need not wait for it. Has no effect that a program
/// can observe. Does nothing where the processor's instruction is not known.
#[inline(always)]
pub(crate) fn prefetch(pointer: *const ()) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is a hint that accepts any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(pointer.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = pointer;
}
