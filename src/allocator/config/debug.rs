//! Debug modes: checks of the program that uses the allocator.

/// Debug modes: checks for errors of the program that the hardware does not report. All are off by default, and then
/// cost nothing. With any of them on, blocks come from the heap alone, without caches, and each free waits for the
/// streams that use the block. While a capture is known, blocks are neither filled nor checked.
///
/// Findings are logged as errors, on stderr in a program without a logger, and kept for
/// [`Allocator::findings`](crate::Allocator::findings).
///
/// ```
/// use cualloc::allocator::{Config, DebugModes};
/// let config: Config = "debug=guard+quarantine:64MiB+poison+leaks".parse()?;
/// let modes = DebugModes::new().guard(true).quarantine(64 << 20).poison(true).leaks(true);
/// assert_eq!(config, Config::new().debug(modes));
/// # Ok::<(), cualloc::error::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DebugModes {
    /// Whether the bytes past the requested size, at least 16 up to the block's end, are filled with 0xFD, and checked
    /// at the free and by [`Allocator::check`](crate::Allocator::check). The usable size of a block then equals its
    /// requested size.
    pub guard: bool,
    /// Whether new and freed blocks are filled with 0xDD.
    pub poison: bool,
    /// Bytes of freed blocks that are held back, filled with 0xDD. When that many bytes have been freed after a block,
    /// it is checked for writes and reused. Such blocks count as live, and are freed before a request fails for lack of
    /// memory. 0 disables the quarantine.
    pub quarantine: u64,
    /// Whether blocks that are live when the allocator is closed, or when its last handle is dropped, are listed with
    /// their tags and contexts.
    pub leaks: bool,
}

impl DebugModes {
    /// Returns a value with all modes off.
    pub fn new() -> DebugModes {
        DebugModes::default()
    }

    /// Sets whether the bytes past each block are guarded.
    pub fn guard(mut self, on: bool) -> Self {
        self.guard = on;
        self
    }

    /// Sets whether blocks are filled when they are allocated and freed.
    pub fn poison(mut self, on: bool) -> Self {
        self.poison = on;
        self
    }

    /// Sets the bytes of freed blocks that are held back.
    pub fn quarantine(mut self, bytes: u64) -> Self {
        self.quarantine = bytes;
        self
    }

    /// Sets whether live blocks are listed at the end.
    pub fn leaks(mut self, on: bool) -> Self {
        self.leaks = on;
        self
    }

    /// Whether any mode is on.
    pub fn is_any(&self) -> bool {
        *self != DebugModes::default()
    }
}
