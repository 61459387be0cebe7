//! The steps of a reclaim.

use std::sync::Arc;

use crate::allocator::engine::hooks::ReliefHook;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::take::Part;
use crate::allocator::physical::{Fresh, Release};
use crate::allocator::plan::growth::Growth;
use crate::allocator::stream::finder::Run;
use crate::allocator::stream::slot::StreamKey;
use crate::allocator::view::mapping::{Stitch, ViewRun};
use crate::driver::Event;

pub(crate) enum Step {
    /// Takes a run of ready memory.
    Take(Run),
    /// Takes a part of free memory, behind waits if it needs any.
    Claim(Part),
    /// Takes a run in a view, behind waits if it needs any.
    View(ViewRun),
    /// Maps handles contiguously in a view, and takes the block there.
    Stitch(Box<Stitch>),
    /// Unmaps idle views, so that their handles can be released.
    Evict(Vec<u64>),
    /// Unmaps idle views to free their addresses.
    FreeAddresses(Vec<u64>),
    /// Reserves address space.
    Reserve { space: SpaceId, bytes: u64 },
    /// Creates handles of the packed policy, and takes the block.
    Grow(Growth),
    /// Obtains a segment of the classic policy.
    Segment(Fresh),
    /// Creates the memory that a stitch lacks, as free memory.
    Supply(Fresh),
    /// Returns pages that the caches of small blocks do not need to the heap.
    Flush,
    /// Completes some more pieces.
    Complete,
    /// Frees the free blocks in the large-block caches.
    EmptyCaches,
    /// Retries releases that failed earlier.
    Retry,
    /// Polls all streams with markers, including those polled recently.
    Poll,
    /// Releases idle memory to the driver.
    Release(Vec<Release>),
    /// Takes this many bytes of memory that has left a range.
    Settle(u64),
    /// Records a marker on the requesting stream, which has this key.
    Mark(StreamKey),
    /// Queries the free memory of the device.
    QueryDevice,
    /// Waits on the host for a marker of a stream.
    HostWait {
        stream: u32,
        bound: u64,
        event: Arc<Event>,
    },
    /// Calls a hook to free the bytes that are missing.
    Hook { hook: ReliefHook, missing: u64 },
    /// Waits for all work of the contexts.
    Synchronise,
    /// Reports that no memory could be obtained.
    Fail,
}

impl Step {
    /// Whether reaching this step counts the request as a miss.
    pub(crate) fn is_miss(&self) -> bool {
        use Step::{Fail, Grow, Hook, HostWait, Release, Segment, Stitch, Supply, Synchronise};
        matches!(
            self,
            Stitch(_)
                | Grow(_)
                | Segment(_)
                | Supply(_)
                | Release(_)
                | HostWait { .. }
                | Hook { .. }
                | Synchronise
                | Fail
        )
    }
}
