//! A pool's part for one device, as a source of memory without a type.

use std::fmt;
use std::sync::Arc;

use crate::allocator::{Allocator, size};
use crate::driver::{Context, Stream};
use crate::error::{Error, InvalidArgument, Refused};
use crate::resource::{BlockIdentity, MemoryResource, ResourceBlock, Tag, adopt};

use super::part::Part;

/// A [`TypedPool`](super::TypedPool) or [`ThresholdPool`](super::ThresholdPool) on one device, as a
/// [`MemoryResource`]: bytes come from what the stream returned last with the same size, else from the best
/// fit in cached memory, else from wherever the allocator finds them. The pool's cap or threshold is honoured
/// as with buffers. Shares memory and figures with the pool; cheap to clone, `Send` and `Sync`.
#[derive(Clone)]
pub struct DevicePool {
    part: Arc<Part>,
    allocator: Allocator,
}

impl DevicePool {
    /// Makes the part's allocator if there is none yet.
    pub(super) fn new(part: &Arc<Part>) -> Result<DevicePool, Error> {
        Ok(DevicePool {
            part: Arc::clone(part),
            allocator: part.allocator()?.clone(),
        })
    }

    /// The device's allocator, under the pool.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// A relief hook, for an allocator of others that runs out of memory on the device: gives unused
    /// memory of this pool back to the driver. It does not keep the pool.
    pub fn relief(&self) -> impl Fn(u64) -> u64 + Send + Sync + use<> {
        self.part.relief()
    }
}

impl fmt::Debug for DevicePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePool")
            .field("allocator", &self.allocator)
            .finish_non_exhaustive()
    }
}

// SAFETY: the blocks are its allocator's.
unsafe impl MemoryResource for DevicePool {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        if bytes == 0 || size::round_size(bytes).is_none() {
            let requested = bytes as u64;
            return Err(Error::Invalid(InvalidArgument::Size { bytes: requested }));
        }
        let id = stream.id()?;
        let block = self.part.block(&(id, bytes), alignment, stream)?;
        Ok(adopt(block, id, alignment, tag))
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        let BlockIdentity {
            stream, bytes, ptr, ..
        } = block.identity();
        self.allocator.deallocate_block(block)?;
        self.part.table.remember(&(stream, bytes), ptr);
        self.part.release(false);
        Ok(())
    }

    fn context(&self) -> &Context {
        self.allocator.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.allocator)
    }
}
