//! What an allocator looks for in the program that uses it.

/// What an allocator looks for in the program that uses it: errors that hardware lets pass. Everything is off by default,
/// and costs nothing then. With anything on, blocks come from the heap alone, without caches, and each free waits for the streams
/// that use the block. While a capture is known blocks are neither filled nor checked.
///
/// What is found is logged as an error, on stderr in a program without a logger, and kept for [`Allocator::findings`](crate::Allocator::findings).
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
    /// Whether bytes behind those that were asked for are filled with 0xFD, at least 16 up to the block's end, and
    /// checked at the free and by [`Allocator::check`](crate::Allocator::check). A block has no more usable bytes
    /// than were asked for then.
    pub guard: bool,
    /// Whether new blocks and freed ones are filled with 0xDD.
    pub poison: bool,
    /// Bytes of freed blocks that are held back, filled with 0xDD, until as many were freed after them; then it is
    /// checked whether they were written. They count as live, and are let go before memory runs out. 0 for none.
    pub quarantine: u64,
    /// Whether blocks that are live when the allocator is closed, or when its last handle goes, are listed with
    /// their tags and contexts.
    pub leaks: bool,
}

impl DebugModes {
    /// Everything off.
    pub fn new() -> DebugModes {
        DebugModes::default()
    }

    /// Whether what lies behind blocks is guarded.
    pub fn guard(mut self, on: bool) -> Self {
        self.guard = on;
        self
    }

    /// Whether blocks are filled when they come and go.
    pub fn poison(mut self, on: bool) -> Self {
        self.poison = on;
        self
    }

    /// Holds back so many bytes of freed blocks.
    pub fn quarantine(mut self, bytes: u64) -> Self {
        self.quarantine = bytes;
        self
    }

    /// Whether live blocks are listed at the end.
    pub fn leaks(mut self, on: bool) -> Self {
        self.leaks = on;
        self
    }

    /// Whether anything is on.
    pub fn is_any(&self) -> bool {
        *self != DebugModes::default()
    }
}
