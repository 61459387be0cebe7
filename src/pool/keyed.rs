//! Pools whose blocks can go by their keys, as resources.

use std::sync::Arc;

use crate::allocator::{Allocator, Request, Trimmed};
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream};
use crate::error::{Error, InvalidArgument, Refused};
use crate::resource::{MemoryResource, RawBlock, Usage, UseTracking};

use super::native::NativePool;
use super::native_block::NativeBlock;
use super::workspace::{Lease, WorkspacePool};

/// Blocks of [`NativePool`]s and [`WorkspacePool`]s have addresses that are multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// A request for nothing is an error, also of those pools that have an answer to it.
fn check(request: &Request) -> Result<(), Error> {
    let (bytes, alignment) = (request.bytes(), request.alignment());
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
        fn state(&self, id: &BlockId) -> BlockState {
            match $known(self, id) {
                Ok(_) => BlockState::Live,
                Err(_) => BlockState::Free,
            }
        }

        fn use_tracking(&self) -> UseTracking {
            UseTracking::Reuse
        }

        fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
            $known(self, id)?.record_use(stream)
        }

        fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
            $known(self, id)?.record_stream(stream)
        }
    };
}

fn lease(pool: &WorkspacePool, id: &BlockId) -> Result<Arc<Lease>, Error> {
    let known = pool.keyed().get(id.generation());
    let known = known.filter(|_| id.source() == pool.keyed().source());
    known.ok_or_else(|| id.gone())
}

/// Each block is a [`Lease`]; idle slabs count as used.
// SAFETY: each block stands for a lease, which waits for its uses.
unsafe impl MemoryResource for WorkspacePool {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        check(request)?;
        let id = stream.id()?;
        let lease = self.lease(stream, request.bytes())?;
        let (ptr, size) = (lease.ptr(), lease.size());
        let life = (self.keyed().source(), self.keyed().insert(lease));
        let id = BlockId::new(
            life,
            (ptr, request.bytes()),
            id,
            MemoryResource::ordinal(self),
        );
        // SAFETY: the table has the lease, and gives it to whoever brings the block back.
        Ok(unsafe { RawBlock::new(id, size as usize, request) })
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if let Err(kept) = block.returned() {
            return Err(Refused::new(block, kept));
        }
        let id = block.id();
        let ours = id.source() == self.keyed().source();
        match ours.then(|| self.keyed().take(id.generation())) {
            Some(Some(lease)) => {
                drop(lease);
                Ok(())
            }
            _ => Err(Refused::new(block, id.gone())),
        }
    }

    fn ordinal(&self) -> usize {
        MemoryResource::ordinal(self.allocator())
    }

    fn context(&self) -> Option<&Context> {
        MemoryResource::context(self.allocator())
    }

    fn id(&self) -> u64 {
        self.keyed().source()
    }

    /// Idle slabs first, then the allocator's unused memory.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let held = self.allocator().stats().all.reserved.current;
        let surplus = held.saturating_sub(keep);
        WorkspacePool::trim(self, self.stats().free_bytes.saturating_sub(surplus));
        Allocator::trim(self.allocator(), keep)
    }

    /// As the allocator says, but for the bytes of live leases.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.allocator().usage()?;
        usage.requested.current = self.stats().requested_bytes;
        usage.requested.peak = usage.requested.peak.max(usage.requested.current);
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        self.allocator().reset_peak_stats();
    }

    known_uses!(lease);
}

fn native(pool: &NativePool, id: &BlockId) -> Result<Arc<NativeBlock>, Error> {
    let known = pool.keyed().get(id.generation());
    let known = known.filter(|_| id.source() == pool.keyed().source());
    known.ok_or_else(|| id.gone())
}

/// A live block keeps the pool, also when its last handle is dropped.
// SAFETY: each block stands for one of the pool, which waits for its uses.
unsafe impl MemoryResource for NativePool {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        check(request)?;
        let block = NativePool::allocate(self, request.bytes(), stream)?;
        let (ptr, stream) = (block.ptr(), block.stream_id());
        let life = (self.keyed().source(), self.keyed().insert(block));
        let id = BlockId::new(
            life,
            (ptr, request.bytes()),
            stream,
            MemoryResource::ordinal(self),
        );
        // SAFETY: the table has the block, and gives it to whoever brings its name back.
        Ok(unsafe { RawBlock::new(id, request.bytes(), request) })
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if let Err(kept) = block.returned() {
            return Err(Refused::new(block, kept));
        }
        let id = block.id();
        let number = id.generation();
        let ours = id.source() == self.keyed().source();
        let Some(Some(native)) = ours.then(|| self.keyed().take(number)) else {
            return Err(Refused::new(block, id.gone()));
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

    fn ordinal(&self) -> usize {
        NativePool::ordinal(self)
    }

    fn context(&self) -> Option<&Context> {
        Some(NativePool::context(self))
    }

    fn id(&self) -> u64 {
        self.keyed().source()
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        Ok(Trimmed {
            released: self.trim_held(keep)?,
            ..Trimmed::default()
        })
    }

    fn usage(&self) -> Result<Usage, Error> {
        NativePool::usage(self)
    }

    fn reset_peak_stats(&self) {
        if let Err(error) = NativePool::reset_peaks(self) {
            log::warn!("the peaks of a memory pool stay: {error}");
        }
    }

    known_uses!(native);
}
