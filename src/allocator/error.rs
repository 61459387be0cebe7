//! Errors of the allocator: values with data and a source chain.

use std::fmt;

use crate::driver::{DriverError, LoadError};

use super::config::ConfigError;
use super::stats::Bytes;

/// Why a call of the allocator failed. Nothing is lost and nothing has changed, except where a
/// variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver is not there or not usable.
    #[error("the CUDA driver is unavailable")]
    DriverUnavailable(#[from] LoadError),
    /// A driver call failed in a way that has no variant of its own.
    #[error("a driver call failed")]
    Driver(#[from] DriverError),
    /// The context is lost: nothing of it can be used any more. Memory is left alone.
    #[error("the context is lost")]
    ContextLost(#[source] DriverError),
    /// The process is a forked child; its parent's driver state is not usable here.
    #[error("a forked child cannot use its parent's device memory")]
    ForkedChild,
    /// The process is exiting: the driver may have shut down, and takes the memory back itself.
    #[error("the process is exiting")]
    Exiting,
    /// The allocator was closed.
    #[error("the allocator is closed")]
    Closed,
    /// A request of zero bytes or of more than any device has.
    #[error("{requested} bytes is not a valid size")]
    InvalidSize {
        /// Bytes asked for.
        requested: u64,
    },
    /// An alignment that is no power of two or is above 2 MiB.
    #[error("{alignment} is not a valid alignment")]
    InvalidAlignment {
        /// Bytes asked for.
        alignment: u64,
    },
    /// No memory, after everything was tried.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// There is no cached memory that the stream may use without a wait, and the request was for that alone.
    #[error("no cached memory serves the request")]
    NotCached,
    /// A pointer that this allocator never handed out.
    #[error("{ptr:#x} is not memory of this allocator")]
    NotOurs {
        /// The pointer.
        ptr: u64,
    },
    /// A pointer into this allocator's memory where no block is live: a double free, or a pointer
    /// that was never a block's start.
    #[error("no live block at {ptr:#x}")]
    NotLive {
        /// The pointer.
        ptr: u64,
    },
    /// A pointer into the middle of a live block.
    #[error("{ptr:#x} lies inside the block at {base:#x}")]
    InteriorPointer {
        /// The pointer.
        ptr: u64,
        /// Start of the block around it.
        base: u64,
    },
    /// A range that is empty or reaches beyond the block that it begins in.
    #[error("{bytes} bytes at {ptr:#x} are no part of one block")]
    InvalidRange {
        /// First byte.
        ptr: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Close was asked for while guards keep memory; nothing was closed.
    #[error("{guards} guards keep {bytes} bytes of freed blocks")]
    Guarded {
        /// Guards that live.
        guards: u64,
        /// Bytes of freed blocks that they keep.
        bytes: u64,
    },
    /// The stream is being captured into a graph.
    #[error("stream {stream:#x} is capturing")]
    Capturing {
        /// The stream's handle.
        stream: usize,
    },
    /// The stream's context is on another device than the allocator's memory.
    #[error("the stream is on device {stream_device}, the memory on device {device}")]
    WrongDevice {
        /// Ordinal of the allocator's device.
        device: usize,
        /// Ordinal of the stream's device.
        stream_device: usize,
    },
    /// A default stream was named by its handle while another context than the allocator's was
    /// current: the handle means the stream of the allocator's context. Only with
    /// [`Config::context_checks`](super::Config::context_checks).
    #[error(
        "stream {stream:#x} is that of context {expected:#x}, and context {current:#x} is current"
    )]
    WrongContext {
        /// The special handle.
        stream: usize,
        /// Handle of the context that is current.
        current: usize,
        /// Handle of the allocator's context.
        expected: usize,
    },
    /// The stream belongs to another driver: its id and its handle mean nothing here.
    #[error("the stream belongs to another driver")]
    ForeignDriver,
    /// The stream was never seen by this allocator.
    #[error("stream {stream:#x} is not known to this allocator")]
    UnknownStream {
        /// The stream's handle.
        stream: usize,
    },
    /// The handle of the per-thread default stream was given, and the calling thread's own is not known
    /// to this allocator, but another thread's: what concerns that one is for its thread to ask.
    #[error("stream {stream:#x} is known of other threads, not of this one")]
    OtherThread {
        /// The stream's handle.
        stream: usize,
    },
    /// Close was asked for while blocks are live; nothing was closed.
    #[error("{blocks} blocks of {bytes} bytes are live")]
    LiveBlocks {
        /// Live blocks.
        blocks: u64,
        /// Their bytes, after rounding.
        bytes: u64,
    },
    /// Not everything could be given back, because work that may use it is not known to be over, or because a
    /// trim on another thread is about to give it back.
    #[error("{bytes} bytes are still held")]
    StillHeld {
        /// Bytes held from the driver, those among them that are on their way back.
        bytes: u64,
    },
    /// Settings that are unknown or contradict each other.
    #[error("invalid configuration")]
    InvalidConfig(#[from] ConfigError),
    /// The device cannot do what the configuration asks for.
    #[error("not supported by the device: {what}")]
    NotSupported {
        /// The ability that is missing.
        what: &'static str,
    },
    /// The device says that it can do what the configuration asks for, and refused it when it was tried.
    #[error("refused by the device: {what}")]
    Refused {
        /// The ability that is refused.
        what: &'static str,
        /// The call that was refused.
        source: DriverError,
    },
}

impl Error {
    /// Whether memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory(_))
    }

    /// The driver's error behind this one, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            Error::Driver(error)
            | Error::ContextLost(error)
            | Error::Refused { source: error, .. } => Some(*error),
            Error::OutOfMemory(oom) => oom.driver,
            _ => None,
        }
    }
}

/// Free memory that waits for one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingBytes {
    /// The driver's id of the stream.
    pub stream_id: u64,
    /// Free bytes that this stream may still use.
    pub bytes: u64,
    /// Part of them that no marker covers: only a synchronised context can share it.
    pub unmarked: u64,
}

/// Memory that cannot be given back because few live blocks lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedSegment {
    /// First byte of the segment or handle.
    pub address: u64,
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes of live blocks in it.
    pub live: u64,
    /// The first live block in it.
    pub block: u64,
}

/// The whole picture at the moment when memory ran out. All figures in bytes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Device ordinal.
    pub device: usize,
    /// Bytes asked for.
    pub requested: u64,
    /// The allocator's limit on memory held from the driver, if one is set.
    pub limit: Option<u64>,
    /// Held from the driver.
    pub reserved: u64,
    /// In live blocks, after rounding.
    pub allocated: u64,
    /// Held and not in live blocks.
    pub cached: u64,
    /// The largest free extent, whatever it is pending on.
    pub largest_free: u64,
    /// The largest run of adjacent free extents, whatever they are pending on.
    pub largest_run: u64,
    /// In live blocks that lie in views; part of `allocated`.
    pub in_views: u64,
    /// In freed blocks that guards keep.
    pub guarded: u64,
    /// Free memory that waits for streams, most first.
    pub pending: Vec<PendingBytes>,
    /// Where live blocks pin the most free memory, most first; a few.
    pub pinned: Vec<PinnedSegment>,
    /// Free on the device by the driver's account, if it could be asked.
    pub driver_free: Option<u64>,
    /// Total of the device by the driver's account, if it could be asked.
    pub driver_total: Option<u64>,
    /// The driver's refusal, or else a failure of it that sent the request another way, if one came.
    pub driver: Option<DriverError>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory on device {}: asked for {}, held {} ({} live, {} cached, largest free extent {})",
            self.device,
            Bytes(self.requested),
            Bytes(self.reserved),
            Bytes(self.allocated),
            Bytes(self.cached),
            Bytes(self.largest_free),
        )?;
        if let Some(limit) = self.limit {
            write!(f, ", limit {}", Bytes(limit))?;
        }
        if let (Some(free), Some(total)) = (self.driver_free, self.driver_total) {
            write!(f, ", device {} free of {}", Bytes(free), Bytes(total))?;
        }
        for pending in &self.pending {
            write!(
                f,
                ", {} pending on stream {}",
                Bytes(pending.bytes),
                pending.stream_id
            )?;
        }
        for pinned in &self.pinned {
            write!(
                f,
                ", {} live of {} at {:#x} pinned by the block at {:#x}",
                Bytes(pinned.live),
                Bytes(pinned.bytes),
                pinned.address,
                pinned.block
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for OutOfMemory {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.driver.as_ref().map(|e| e as _)
    }
}
