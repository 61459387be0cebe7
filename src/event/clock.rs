//! Time stamps: the processor's counter if all cores share one.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns the current ticks. Monotonic on each thread, and comparable between threads.
#[inline(always)]
pub(crate) fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let (low, high): (u32, u32);
        // Returned as two halves, so that callers that store them separately need not combine them first: compilers do
        // not know that the instruction clears the upper bits.
        // SAFETY: every x86-64 processor has the instruction, which changes these registers alone.
        unsafe {
            std::arch::asm!("rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
        }
        u64::from(high) << 32 | u64::from(low)
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let ticks: u64;
        // SAFETY: the register may be read by programs, and nothing else changes.
        unsafe {
            std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
        }
        ticks
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Returns the ticks per second, measured once in the process: the first call takes two milliseconds or a little more.
pub(crate) fn per_second() -> u64 {
    static RATE: OnceLock<u64> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (instant, first) = (Instant::now(), ticks());
        std::thread::sleep(Duration::from_millis(2));
        let (passed, ticks) = (instant.elapsed(), ticks().saturating_sub(first));
        ((ticks as f64 / passed.as_secs_f64()).round() as u64).max(1)
    })
}
