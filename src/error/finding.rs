//! Findings of the debug modes of an allocator.

use std::fmt;

/// A defect found in a block by a debug mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Misuse {
    /// Bytes after the requested ones were written.
    Overrun,
    /// The block was written after its free: by work that was queued later, or by a stream that was not recorded on it.
    UseAfterFree,
    /// The block is live when the allocator is closed.
    Leak,
}

/// A finding of a debug mode about a block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct Finding {
    /// The defect.
    pub misuse: Misuse,
    /// The first byte of the block.
    pub address: u64,
    /// Requested bytes.
    pub requested: u64,
    /// Offset of the first wrong byte in the block; 0 for a leak.
    pub offset: u64,
    /// The label of the request; "untagged" without one.
    pub tag: &'static str,
    /// The name of the context that the thread was in when it allocated the block.
    pub context: Option<String>,
    /// The handle of the stream that the block was allocated on.
    pub stream: usize,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (requested, offset) = (self.requested, self.offset);
        match self.misuse {
            Misuse::Overrun => write!(
                f,
                "overrun: byte {offset} was written, {} behind the end of",
                offset - requested.min(offset) + 1
            )?,
            Misuse::UseAfterFree => write!(
                f,
                "use after free: byte {offset} was written after the free, or by a stream that was not recorded, of"
            )?,
            Misuse::Leak => f.write_str("leak:")?,
        }
        let (address, stream) = (self.address, self.stream);
        write!(
            f,
            " the block of {requested} bytes at {address:#x}, tag {}",
            self.tag
        )?;
        if let Some(context) = &self.context {
            write!(f, ", context {context}")?;
        }
        write!(f, ", stream {stream:#x}")
    }
}
