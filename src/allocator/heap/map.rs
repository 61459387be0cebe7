//! Views whose mapping failed.

use crate::driver::DriverError;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::view::mapping::{Stitch, Unmapped};

impl Heap {
    /// Heap what is left of a stitch that failed.
    pub(crate) fn not_mapped(
        &mut self,
        want: &Want,
        stitch: Stitch,
        failed: Unmapped,
    ) -> DriverError {
        let error = failed.error();
        match failed {
            Unmapped::Undone(_) => self.not_stitched(want, stitch, 0, &[]),
            Unmapped::NotMade(failure) => {
                self.not_stitched(want, stitch, 0, &[]);
                self.set_apart(SpaceId::Large, failure);
            }
            Unmapped::Stuck(_, mapped, handles) => {
                self.not_stitched(want, stitch, mapped, &handles);
            }
        }
        error
    }
}
