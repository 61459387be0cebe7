//! A typed pool on one device, as a source of memory without a type.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;

use crate::allocator::{Allocator, Block};
use crate::driver::{Context, Stream, sys};
use crate::resource::{
    BlockIdentity, MemoryResource, Refused, ResourceBlock, ResourceError, Tag, adopt,
};

use super::error::PoolError;
use super::notes::Sought;
use super::places::{Cache, Wish};

/// A [`TypedPool`](super::TypedPool) on one device, as a
/// [`MemoryResource`]: bytes come from what the stream returned last with
/// the same size, else from the best fit at hand, else from wherever the allocator finds them. Shares
/// memory and figures with the pool; cheap to clone.
#[derive(Clone)]
pub struct DeviceTypedPool {
    cache: Arc<Cache>,
}

/// The element type of what has none, so that no buffer's is the same.
struct Untyped;

impl DeviceTypedPool {
    pub(super) fn new(cache: Arc<Cache>) -> DeviceTypedPool {
        DeviceTypedPool { cache }
    }

    /// The device's allocator, under the pool.
    pub fn allocator(&self) -> &Allocator {
        &self.cache.allocator
    }

    pub(crate) fn block(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Block, PoolError> {
        let wish = Wish {
            cache: &self.cache,
            len: bytes,
            alignment,
            sought: Self::sought(bytes, stream.id()?),
        };
        wish.obtain(stream)
    }

    /// What is to be done when the block at an address was freed: to be asked before.
    pub(crate) fn when_returned(
        &self,
        stream: u64,
        bytes: usize,
        address: sys::CUdeviceptr,
    ) -> impl FnOnce() + use<'_> {
        let note = self.cache.when_returned(address);
        let sought = Self::sought(bytes, stream);
        move || {
            note(&sought);
            self.cache.surplus.release(false);
        }
    }

    fn sought(bytes: usize, stream: u64) -> Sought {
        Sought {
            stream,
            bytes,
            capacity: bytes,
            element: TypeId::of::<Untyped>(),
        }
    }
}

impl fmt::Debug for DeviceTypedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceTypedPool")
            .field("allocator", self.allocator())
            .finish_non_exhaustive()
    }
}

/// The last returned of equal size come first.
// SAFETY: the blocks are its allocator's.
unsafe impl MemoryResource for DeviceTypedPool {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        let block = self.block(bytes, alignment, stream)?;
        Ok(adopt(block, stream.id()?, alignment, tag))
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        let BlockIdentity {
            stream, bytes, ptr, ..
        } = block.identity();
        let returned = self.when_returned(stream, bytes, ptr);
        self.allocator().deallocate_block(block)?;
        returned();
        Ok(())
    }

    fn context(&self) -> &Context {
        Allocator::context(self.allocator())
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(self.allocator())
    }
}
