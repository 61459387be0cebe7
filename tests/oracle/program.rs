//! Programs as plain data.

use cualloc::Policy;
use cualloc::sim::Mode;

/// What a program runs on.
#[derive(Clone, Debug)]
pub struct Setup {
    pub policy: Policy,
    pub mode: Mode,
    /// Calls that fail are executed all the same.
    pub executed: bool,
    /// Bytes of the device's memory.
    pub memory: u64,
    pub limit: Option<u64>,
    /// Whether the driver tells streams apart by ids.
    pub stream_ids: bool,
    /// Whether the legacy and the calling thread's default stream take part.
    pub legacy: bool,
    pub per_thread: bool,
    pub tuning: Tuning,
}

/// Settings of the allocator beside its policy and its limit.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub views: bool,
    pub capture_checks: bool,
    pub dense: bool,
    pub handle: Option<u64>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            views: true,
            capture_checks: false,
            dense: false,
            handle: None,
        }
    }
}

/// A malformed request to free.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bad {
    /// An address of nobody.
    Foreign,
    /// An address inside a live block.
    Interior,
    /// An address that was freed before.
    Double,
}

/// What the relief hook does beside freeing the block that was left to it first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Relief {
    Nothing,
    /// Frees all that was left to it.
    All,
    Trim,
    Synchronize,
    /// Takes a block and gives it back.
    Allocate,
}

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Want {
    pub stream: u8,
    pub bytes: usize,
    /// The alignment is two to the power of this, modulo 22.
    pub align: u8,
    /// The block is held by its address alone.
    pub raw: bool,
}

impl Want {
    pub const fn of(stream: u8, bytes: usize) -> Want {
        Want {
            stream,
            bytes,
            align: 0,
            raw: false,
        }
    }
}

/// One step. Streams and blocks are numbers, taken modulo what there is, so that a program stays
/// meaningful when steps are taken out of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    Alloc(Want),
    /// Takes a block, uses it and gives it back, so many times.
    Again {
        stream: u8,
        bytes: usize,
        times: u8,
    },
    /// A block inside one handle, or outside views.
    Place {
        want: Want,
        single: bool,
        views: bool,
    },
    /// A block of cached memory, or none.
    Cached {
        stream: u8,
        bytes: usize,
    },
    /// Guards a part of a block; in parts of 256.
    Guard {
        block: u16,
        from: u8,
        part: u8,
    },
    Unguard {
        guard: u16,
    },
    /// Asks where a part of a block lies.
    Segments {
        block: u16,
        from: u8,
        part: u8,
    },
    /// Sizes and alignments that no device has.
    Absurd {
        stream: u8,
        bytes: usize,
        alignment: usize,
    },
    Free {
        block: u16,
    },
    Drop {
        block: u16,
    },
    IntoRaw {
        block: u16,
    },
    FreeBad {
        block: u16,
        kind: Bad,
    },
    /// Says that a stream will use the block, also by an address inside it.
    RecordStream {
        block: u16,
        stream: u8,
        inside: bool,
    },
    /// Uses the block on a stream once, and says so.
    RecordUse {
        block: u16,
        stream: u8,
        write: bool,
    },
    /// Submits work on the block to its own stream (0) or one of those recorded.
    Use {
        block: u16,
        on: u8,
        write: bool,
    },
    Wait {
        from: u8,
        to: u8,
    },
    HostSync {
        stream: u8,
    },
    NewStream {
        raw: bool,
    },
    Retire {
        stream: u8,
    },
    /// Lets go of a stream without telling the allocator.
    Leave {
        stream: u8,
    },
    Limit {
        bytes: Option<u64>,
    },
    Trim {
        keep: u64,
    },
    EmptyCache,
    /// Leaves a block to the relief hook, which frees it when a request would fail.
    Spare {
        block: u16,
    },
    /// Sets the relief hook, or removes it.
    Hook {
        relief: Option<Relief>,
        stream: u8,
    },
    /// Looks at everything: what lies in large-block caches leaves them.
    Look,
    /// Takes a block of another allocator on the same device, or gives one back.
    Other {
        stream: u8,
        bytes: Option<usize>,
    },
    /// Closes the allocator, and goes on with a new one.
    Reopen,
    Reserve {
        stream: u8,
        bytes: usize,
    },
    Mark {
        stream: u8,
    },
    Synchronize,
    ResetPeaks,
    Check,
    /// Completes the next work of some stream.
    Complete {
        pick: u16,
        count: u8,
    },
    CompleteAll,
    Fail {
        call: u8,
        nth: u8,
        times: u8,
        code: u8,
    },
    Mend,
    /// Memory that another process takes.
    Taken {
        bytes: u64,
    },
}

/// Calls that a fault may hit; number 0 stands for any call.
pub const CALLS: [&str; 18] = [
    "",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuCtxSynchronize",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxSetCurrent",
];
