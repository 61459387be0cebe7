//! The metadata's side of `rungs`.

use super::climb::SPARING_BELOW;
use super::records::SpaceId;
use super::state::State;
use super::want::Want;

impl State {
    /// Whether a request should leave handles whole where it can: near the limit, where others must find
    /// whole ones to stitch, if it is small. Not of a lone stream, whose requests are served without any
    /// look at handles.
    pub(crate) fn spares_handles(&self, want: &Want) -> bool {
        want.space == SpaceId::Large
            && u64::from(want.granules) * super::size::GRANULE < SPARING_BELOW
            && self.streams.several()
            && !self.bounds_hold(0)
    }
}
