//! Views that are cut short to be continued otherwise.
//!
//! A stitch continues a view behind its open end. Work that never comes to rest leaves long open runs in
//! the middle of views as well; the bound on mappings would have idle views go for each new one. So the
//! end of such a view goes instead, if nobody can reach memory through it, and the view is continued
//! where its longest open run ends.

use crate::allocator::engine::Engine;
use crate::allocator::heap::cut::Cut;
use crate::allocator::size::GRANULE;
use crate::error::Error;

impl Engine {
    /// Unmaps the end of a view. If that fails, the view stays as it was.
    pub(crate) fn shorten(&self, cut: Cut) -> Result<(), Error> {
        let taken = self.lock().cut_view(cut);
        let Some((at, gone)) = taken else {
            return Ok(());
        };
        let bytes = gone
            .iter()
            .map(|mapping| u64::from(mapping.granules))
            .sum::<u64>()
            * GRANULE;
        let unmapped = self.context.enter().and_then(|entered| {
            // SAFETY: the view's last mappings, whole; no block lies in them, nobody else takes them
            // away, and every use through the view's addresses was seen complete by the host.
            unsafe { entered.mem_unmap(at, bytes as usize) }
        });
        let mut heap = self.lock();
        if unmapped.is_ok() {
            heap.extents.lookup.forget(at, bytes);
        }
        heap.cut_done(cut, gone, unmapped.is_ok());
        drop(heap);
        unmapped.map_err(|error| self.error(error))
    }
}
