//! Whether to take a run that maps no more handles.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;

impl Heap {
    /// Whether a request should leave handles whole where it can: near the limit, where others must find
    /// whole ones to stitch, if it is small. Not of a lone stream, whose requests are served without any
    /// look at handles.
    pub(crate) fn spares_handles(&self, want: &Want) -> bool {
        self.rules.maps()
            && want.space == SpaceId::Large
            && u64::from(want.granules) * crate::allocator::size::GRANULE < SPARING_BELOW
            && self.streams.several()
            && !self.bounds_hold(0)
    }
}

/// Requests below this many bytes leave handles whole near the limit, if they can. Larger ones would take
/// from long runs what large requests find in one piece now. From simulation over recorded work.
pub(crate) const SPARING_BELOW: u64 = 8 << 20;
