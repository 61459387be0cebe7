//! The caching resource: the allocator itself.

use crate::allocator::calls::record;
use crate::allocator::{
    Allocator, Block, Engine, Grant, Lifetime, Missed, Request, Trimmed, unaligned,
};
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream};
use crate::error::{Error, Refused};

use super::block::RawBlock;
use super::traits::{MemoryResource, UseTracking};
use super::usage::Usage;

#[inline(always)]
fn generation(id: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(id)
}

#[inline]
fn life(allocator: &Allocator, id: &BlockId) -> Option<Lifetime> {
    let (generation, record) = ((id.generation() >> 32) as u32, id.generation() as u32);
    (id.source() == allocator.engine().id).then_some(Lifetime {
        id: record,
        generation,
        ptr: id.ptr(),
    })
}

fn live(allocator: &Allocator, id: &BlockId) -> Result<Lifetime, Error> {
    let life = life(allocator, id).filter(|life| allocator.engine().is_live(life));
    life.ok_or_else(|| id.gone())
}

/// Records a use of a block by the work of a stream so far, or until the block is freed.
fn record(allocator: &Allocator, id: &BlockId, stream: &Stream, over: bool) -> Result<(), Error> {
    live(allocator, id)?;
    let engine = allocator.engine();
    record::use_by(engine, id.ptr(), &engine.named(stream)?, over)
}

pub(crate) fn identity_of(block: &Block, stream: u64) -> BlockId {
    let engine = block.engine();
    let (id, times) = block.generation();
    let (life, range) = (generation(id, times), (block.ptr(), block.requested()));
    BlockId::new((engine.id, life), range, stream, engine.device.ordinal())
}

/// [`MemoryResource::has_retired_stream`] for an allocator's block. False if a resource above orders the block's uses.
#[inline]
pub(crate) fn is_retired(allocator: &Allocator, block: &RawBlock) -> bool {
    allocator.engine().retirements() != block.retirements() && may_be_retired(allocator, block)
}

#[cold]
fn may_be_retired(allocator: &Allocator, block: &RawBlock) -> bool {
    let retired = |life: Lifetime| allocator.engine().stream_retired(&life);
    block.keepers() == 0 && life(allocator, &block.id()).is_some_and(retired)
}

/// The block of a grant to a stream after a number of retirements.
#[inline(always)]
pub(crate) fn named(
    engine: &Engine,
    grant: &Grant,
    request: &Request,
    (stream, retirements): (u64, u64),
) -> RawBlock {
    let life = generation(grant.place.id(&engine.pages), grant.place.generation);
    let range = (grant.ptr(), request.bytes());
    let id = BlockId::new((engine.id, life), range, stream, engine.device.ordinal());
    // SAFETY: the grant was just made, and is named once.
    let mut block = unsafe { RawBlock::new(id, grant.bytes() as usize, request) };
    block.set_retirements(retirements);
    block
}

#[inline(never)]
fn allocate_named(engine: &Engine, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
    let asks = engine.named(stream)?;
    let from = (stream.own_id(), engine.retirements());
    let grant = engine.allocate(&asks, request, Missed(None))?;
    Ok(named(engine, &grant, request, from))
}

/// Frees a small block if its stream cache can take it. Otherwise returns false and changes nothing.
#[inline(always)]
pub(crate) fn try_free(allocator: &Allocator, block: &RawBlock) -> bool {
    block.keepers() == 0
        && life(allocator, &block.id()).is_some_and(|life| allocator.engine().free_quick(&life))
}

#[inline(never)]
fn deallocate_watched(allocator: &Allocator, block: RawBlock) -> Result<(), Refused<RawBlock>> {
    let id = block.id();
    let life = block
        .returned()
        .and_then(|()| life(allocator, &id).ok_or_else(|| id.gone()));
    if block.is_abandoned()
        && let Ok(life) = &life
        && allocator.engine().is_live(life)
    {
        allocator.engine().drop_block(*life, Vec::new());
        return Ok(());
    }
    let freed = life.and_then(
        |life| match allocator.engine().free(life.ptr, Some(&life)) {
            Err(Error::NotLive { .. } | Error::NotOurs { .. }) => Err(id.gone()),
            other => other,
        },
    );
    freed.map_err(|error| Refused::new(block, error))
}

/// The caching resource. Deallocated memory goes to the cache, which keeps it from other streams until every recorded
/// use is complete: no bytes are pending here. An [`AccessOrdered`](super::AccessOrdered) on top orders streams.
// SAFETY: a block has one owner by the metadata of its allocator, which keeps memory from other streams until every
// recorded use is complete, and finds blocks by a unique key.
unsafe impl MemoryResource for Allocator {
    #[inline]
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let engine = self.engine();
        // Read before the allocation, so that a retirement meanwhile is noticed.
        let retirements = engine.retirements();
        if request.is_plain()
            && request.alignment().is_power_of_two()
            && let Some(key) = stream.known_id()
            && let Some(small) = unaligned(request.bytes())
            && let Ok(grant) = engine.hit(key, small)
        {
            return Ok(named(engine, &grant, request, (key, retirements)));
        }
        allocate_named(engine, request, stream)
    }

    #[inline]
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if try_free(self, &block) {
            return Ok(());
        }
        deallocate_watched(self, block)
    }

    #[inline]
    fn as_allocator(&self) -> Option<&Allocator> {
        Some(self)
    }

    #[inline]
    fn has_retired_stream(&self, block: &RawBlock) -> bool {
        is_retired(self, block)
    }

    #[inline]
    fn ordinal(&self) -> usize {
        self.engine().device.ordinal()
    }

    fn context(&self) -> Option<&Context> {
        Some(Allocator::context(self))
    }

    fn id(&self) -> u64 {
        Allocator::id(self)
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        Allocator::trim(self, keep)
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::of(&self.stats()))
    }

    fn reset_peak_stats(&self) {
        Allocator::reset_peaks(self);
    }

    fn state(&self, id: &BlockId) -> BlockState {
        BlockState::live_if(live(self, id).is_ok())
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Reuse
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        record(self, id, stream, true)
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        record(self, id, stream, false)
    }
}
