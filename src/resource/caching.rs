//! The caching resource: the allocator itself.

use crate::allocator::{Allocator, Block, Engine, Grant, Lifetime, Request, Trimmed, size};
use crate::driver::{Context, Stream};
use crate::error::{Error, Refused};

use super::block::{BlockIdentity, BlockState, ResourceBlock, Tag};
use super::key::BlockKey;
use super::traits::{MemoryResource, Outstanding, Tracking};
use super::usage::PoolUsage;

/// The life of a block that came from here.
#[inline]
fn life(allocator: &Allocator, block: &BlockIdentity) -> Option<Lifetime> {
    let key = block.key;
    match u32::try_from(key.generation) {
        Ok(generation) if key.source == allocator.engine().id => Some(Lifetime {
            id: key.id,
            generation,
            ptr: block.ptr,
        }),
        _ => None,
    }
}

fn parts(allocator: &Allocator, block: &BlockIdentity) -> Result<Lifetime, Error> {
    life(allocator, block).ok_or_else(|| block.gone())
}

fn live(allocator: &Allocator, block: &BlockIdentity) -> Result<(), Error> {
    if allocator.engine().is_live(&parts(allocator, block)?) {
        Ok(())
    } else {
        Err(block.gone())
    }
}

/// Who a block of an allocator is, as a block of a resource.
pub(crate) fn identity_of(block: &Block, stream: u64) -> BlockIdentity {
    let engine = block.engine();
    let (id, generation) = block.generation();
    BlockIdentity {
        key: BlockKey {
            source: engine.id,
            id,
            generation: u64::from(generation),
        },
        ptr: block.ptr(),
        bytes: block.requested(),
        stream,
        device: engine.device.ordinal(),
    }
}

/// A block of the allocator as one of a resource.
pub(crate) fn adopt(block: Block, stream: u64, alignment: usize, tag: Tag) -> ResourceBlock {
    let identity = identity_of(&block, stream);
    // SAFETY: the block's memory, and the block is given up below.
    let named = unsafe { ResourceBlock::new(identity, block.size(), alignment, tag) };
    block.into_raw();
    named
}

/// A block that was just handed out, by name.
#[inline(always)]
fn named(
    engine: &Engine,
    grant: &Grant,
    (bytes, alignment): (usize, usize),
    stream: u64,
    tag: Tag,
) -> ResourceBlock {
    let identity = BlockIdentity {
        key: BlockKey {
            source: engine.id,
            id: engine.id_of(&grant.place),
            generation: u64::from(grant.place.generation),
        },
        ptr: grant.ptr(),
        bytes,
        stream,
        device: engine.device.ordinal(),
    };
    // SAFETY: it was handed out to nobody else.
    unsafe { ResourceBlock::new(identity, grant.bytes(), alignment, tag) }
}

#[inline(never)]
fn allocate_named(
    engine: &Engine,
    (bytes, alignment): (usize, usize),
    stream: &Stream,
    tag: Tag,
) -> Result<ResourceBlock, Error> {
    let asks = engine.named(stream)?;
    // Before there is a block that could leak: a thread's default stream is asked each time.
    let id = stream.id()?;
    let grant = engine.allocate(&asks, &Request::new(bytes).align(alignment))?;
    Ok(named(engine, &grant, (bytes, alignment), id, tag))
}

#[inline(never)]
fn deallocate_watched(
    allocator: &Allocator,
    block: ResourceBlock,
) -> Result<(), Refused<ResourceBlock>> {
    let identity = block.identity();
    let life = block.returned().and_then(|()| parts(allocator, &identity));
    if block.is_abandoned()
        && let Ok(life) = &life
        && allocator.engine().is_live(life)
    {
        allocator.engine().drop_block(*life);
        return Ok(());
    }
    let freed = life.and_then(|life| match allocator.engine().free_block(&life) {
        Err(Error::NotLive { .. } | Error::NotOurs { .. }) => Err(identity.gone()),
        other => other,
    });
    freed.map_err(|error| Refused::new(block, error))
}

/// The caching resource. Deallocated memory goes to the cache at once, which keeps it from other
/// streams until every recorded use is complete; so nothing is ever pending here, and the
/// allocator's own limit bounds what is held from the driver.
///
/// Uses are tracked for reuse: [`record_use`](MemoryResource::record_use) on any stream;
/// preparing and finishing a use on the block's own stream, where there is nothing to do, and on no
/// other. Put an [`AsyncResource`](super::AsyncResource) on top to have the order of streams kept.
// SAFETY: a block has one owner by the metadata of its allocator, which keeps memory from other streams until
// every recorded use is complete, and finds blocks by a key that is theirs alone.
unsafe impl MemoryResource for Allocator {
    #[inline]
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        let engine = self.engine();
        if alignment.is_power_of_two()
            && alignment as u64 <= size::GRANULE
            && let Some(key) = stream.known_id()
            && let Ok(grant) = engine.hit(key, bytes)
        {
            return Ok(named(engine, &grant, (bytes, alignment), key, tag));
        }
        allocate_named(engine, (bytes, alignment), stream, tag)
    }

    #[inline]
    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        if block.keepers() == 0
            && let Some(life) = life(self, &block.identity())
            && self.engine().free_at_once(&life)
        {
            return Ok(());
        }
        deallocate_watched(self, block)
    }

    fn context(&self) -> &Context {
        Allocator::context(self)
    }

    #[inline]
    fn device(&self) -> usize {
        self.engine().device.ordinal()
    }

    fn outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.stats().all.requested.current,
            pending: 0,
        }
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        Allocator::trim(self, keep)
    }

    fn usage(&self) -> Result<PoolUsage, Error> {
        Ok(PoolUsage::of(self))
    }

    fn reset_peaks(&self) -> Result<(), Error> {
        Allocator::reset_peaks(self);
        Ok(())
    }

    fn state(&self, block: &BlockIdentity) -> BlockState {
        match live(self, block) {
            Ok(()) => BlockState::Live,
            Err(_) => BlockState::Freed,
        }
    }

    fn tracking(&self) -> Tracking {
        Tracking::Reuse
    }

    fn record_use(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        live(self, block)?;
        let engine = self.engine();
        engine.record(block.ptr, &engine.named(stream)?, true)
    }

    fn record_stream(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        live(self, block)?;
        let engine = self.engine();
        engine.record(block.ptr, &engine.named(stream)?, false)
    }
}
