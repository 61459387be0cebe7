//! Pools whose blocks can go by their keys, as resources.

use std::sync::Arc;

use crate::allocator::{Allocator, Trimmed};
use crate::driver::{Context, Stream};
use crate::error::{Error, InvalidArgument, Refused};
use crate::resource::{
    BlockIdentity, BlockKey, BlockState, MemoryResource, Outstanding, PoolUsage, ResourceBlock,
    Tag, Tracking,
};

use super::native::NativePool;
use super::native_block::NativeBlock;
use super::workspace::{Lease, WorkspacePool};

/// Blocks of [`NativePool`]s and [`WorkspacePool`]s have addresses that are multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// A request for nothing is an error, also of those pools that have an answer to it.
fn check(bytes: usize, alignment: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }));
    }
    if !alignment.is_power_of_two() || alignment > ALIGNMENT {
        return Err(Error::Invalid(InvalidArgument::Alignment {
            bytes: alignment as u64,
        }));
    }
    Ok(())
}

/// What a pool says of its own blocks, and how their uses are recorded. `$known` finds a live one.
macro_rules! known_uses {
    ($known:ident) => {
        fn state(&self, block: &BlockIdentity) -> BlockState {
            match $known(self, block) {
                Ok(_) => BlockState::Live,
                Err(_) => BlockState::Freed,
            }
        }

        fn tracking(&self) -> Tracking {
            Tracking::Reuse
        }

        fn record_use(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
            $known(self, block)?.record_use(stream)
        }

        fn record_stream(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
            $known(self, block)?.record_stream(stream)
        }
    };
}

fn lease(pool: &WorkspacePool, block: &BlockIdentity) -> Result<Arc<Lease>, Error> {
    let known = pool.keyed().get(block.key.generation);
    let known = known.filter(|_| block.key.source == pool.keyed().source());
    known.ok_or_else(|| block.gone())
}

/// Each block is a [`Lease`]; idle slabs count as used.
// SAFETY: each block stands for a lease, which waits for its uses.
unsafe impl MemoryResource for WorkspacePool {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        check(bytes, alignment)?;
        let id = stream.id()?;
        let lease = self.lease(stream, bytes)?;
        let (ptr, size) = (lease.ptr(), lease.size());
        let key = BlockKey {
            source: self.keyed().source(),
            id: 0,
            generation: self.keyed().insert(lease),
        };
        let identity = BlockIdentity {
            key,
            ptr,
            bytes,
            stream: id,
            device: self.device(),
        };
        // SAFETY: the table has the lease, and gives it to whoever brings the block back.
        Ok(unsafe { ResourceBlock::new(identity, size, alignment, tag) })
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        if let Err(kept) = block.returned() {
            return Err(Refused::new(block, kept));
        }
        let identity = block.identity();
        let ours = identity.key.source == self.keyed().source();
        match ours.then(|| self.keyed().take(identity.key.generation)) {
            Some(Some(lease)) => {
                drop(lease);
                Ok(())
            }
            _ => Err(Refused::new(block, identity.gone())),
        }
    }

    fn context(&self) -> &Context {
        Allocator::context(self.allocator())
    }

    fn outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.stats().requested_bytes,
            pending: 0,
        }
    }

    /// Idle slabs first, then the allocator's unused memory.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let held = self.allocator().stats().all.reserved.current;
        let surplus = held.saturating_sub(keep);
        WorkspacePool::trim(self, self.stats().free_bytes.saturating_sub(surplus));
        Allocator::trim(self.allocator(), keep)
    }

    fn usage(&self) -> Result<PoolUsage, Error> {
        self.allocator().usage()
    }

    fn reset_peaks(&self) -> Result<(), Error> {
        MemoryResource::reset_peaks(self.allocator())
    }

    known_uses!(lease);
}

fn native(pool: &NativePool, block: &BlockIdentity) -> Result<Arc<NativeBlock>, Error> {
    let known = pool.keyed().get(block.key.generation);
    let known = known.filter(|_| block.key.source == pool.keyed().source());
    known.ok_or_else(|| block.gone())
}

/// A live block keeps the pool, also when its last handle is dropped.
// SAFETY: each block stands for one of the pool, which waits for its uses.
unsafe impl MemoryResource for NativePool {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        check(bytes, alignment)?;
        let block = NativePool::allocate(self, bytes, stream)?;
        let (ptr, stream) = (block.ptr(), block.stream_id());
        let key = BlockKey {
            source: self.keyed().source(),
            id: 0,
            generation: self.keyed().insert(block),
        };
        let identity = BlockIdentity {
            key,
            ptr,
            bytes,
            stream,
            device: self.ordinal(),
        };
        // SAFETY: the table has the block, and gives it to whoever brings its name back.
        Ok(unsafe { ResourceBlock::new(identity, bytes as u64, alignment, tag) })
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        if let Err(kept) = block.returned() {
            return Err(Refused::new(block, kept));
        }
        let identity = block.identity();
        let number = identity.key.generation;
        let ours = identity.key.source == self.keyed().source();
        let Some(Some(native)) = ours.then(|| self.keyed().take(number)) else {
            return Err(Refused::new(block, identity.gone()));
        };
        if block.is_abandoned() {
            // Kept until it can go, as any dropped one.
            drop(native);
            return Ok(());
        }
        native.release().map_err(|error| {
            self.keyed().put(number, native);
            Refused::new(block, error)
        })
    }

    fn context(&self) -> &Context {
        NativePool::context(self)
    }

    fn outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.requested(),
            pending: 0,
        }
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        Ok(Trimmed {
            released: self.trim_held(keep)?,
            ..Trimmed::default()
        })
    }

    fn usage(&self) -> Result<PoolUsage, Error> {
        NativePool::usage(self)
    }

    fn reset_peaks(&self) -> Result<(), Error> {
        NativePool::reset_peaks(self)
    }

    known_uses!(native);
}
