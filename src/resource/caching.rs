//! The caching resource: the allocator itself.

use crate::allocator::{Allocator, Block, Engine, Grant, Lifetime, Request, Trimmed, unaligned};
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream};
use crate::error::{Error, Refused};

use super::block::RawBlock;
use super::traits::{MemoryResource, UseTracking};
use super::usage::Usage;

/// The life of a record of an allocator, as a generation.
#[inline(always)]
fn generation(id: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(id)
}

/// The life of a block that came from here.
#[inline]
fn life(allocator: &Allocator, id: &BlockId) -> Option<Lifetime> {
    let (generation, record) = ((id.generation() >> 32) as u32, id.generation() as u32);
    (id.source() == allocator.engine().id).then_some(Lifetime {
        id: record,
        generation,
        ptr: id.ptr(),
    })
}

fn parts(allocator: &Allocator, id: &BlockId) -> Result<Lifetime, Error> {
    life(allocator, id).ok_or_else(|| id.gone())
}

fn live(allocator: &Allocator, id: &BlockId) -> Result<(), Error> {
    if allocator.engine().is_live(&parts(allocator, id)?) {
        Ok(())
    } else {
        Err(id.gone())
    }
}

/// Who a block of an allocator is, as a block of a resource.
pub(crate) fn identity_of(block: &Block, stream: u64) -> BlockId {
    let engine = block.engine();
    let (id, times) = block.generation();
    BlockId::new(
        (engine.id, generation(id, times)),
        (block.ptr(), block.requested()),
        stream,
        engine.device.ordinal(),
    )
}

/// Whether the stream of an allocator's block was retired, or is about to be, so that the allocator takes its last
/// marker for the end of all its work. Never of a block of which a resource above the allocator keeps the order of uses.
#[inline]
pub(crate) fn is_retired(allocator: &Allocator, block: &RawBlock) -> bool {
    allocator.engine().retirements() != block.retirements() && may_be_retired(allocator, block)
}

#[cold]
fn may_be_retired(allocator: &Allocator, block: &RawBlock) -> bool {
    block.keepers() == 0 && is_of_retired_stream(allocator, &block.id())
}

/// The same of whatever block has a name.
pub(crate) fn is_of_retired_stream(allocator: &Allocator, id: &BlockId) -> bool {
    life(allocator, id).is_some_and(|life| allocator.engine().stream_retired(&life))
}

/// A block that was handed out since so many streams were retired, by name.
#[inline(always)]
pub(crate) fn named(
    engine: &Engine,
    grant: &Grant,
    request: &Request,
    (stream, retirements): (u64, u64),
) -> RawBlock {
    let life = generation(engine.id_of(&grant.place), grant.place.generation);
    let id = BlockId::new(
        (engine.id, life),
        (grant.ptr(), request.bytes()),
        stream,
        engine.device.ordinal(),
    );
    // SAFETY: it was handed out to nobody else.
    let mut block = unsafe { RawBlock::new(id, grant.bytes() as usize, request) };
    block.set_retirements(retirements);
    block
}

#[inline(never)]
fn allocate_named(engine: &Engine, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
    let asks = engine.named(stream)?;
    // Before there is a block that could leak: a thread's default stream is asked each time.
    let id = stream.id()?;
    let retirements = engine.retirements();
    let grant = engine.allocate(&asks, request)?;
    Ok(named(engine, &grant, request, (id, retirements)))
}

/// Frees a small block, if its stream cache can do it without a look at anything else. False, with nothing changed, if not.
#[inline(always)]
pub(crate) fn free_at_once(allocator: &Allocator, block: &RawBlock) -> bool {
    block.keepers() == 0
        && life(allocator, &block.id()).is_some_and(|life| allocator.engine().free_at_once(&life))
}

#[inline(never)]
fn deallocate_watched(allocator: &Allocator, block: RawBlock) -> Result<(), Refused<RawBlock>> {
    let id = block.id();
    let life = block.returned().and_then(|()| parts(allocator, &id));
    if block.is_abandoned()
        && let Ok(life) = &life
        && allocator.engine().is_live(life)
    {
        allocator.engine().drop_block(*life);
        return Ok(());
    }
    let freed = life.and_then(|life| match allocator.engine().free_block(&life) {
        Err(Error::NotLive { .. } | Error::NotOurs { .. }) => Err(id.gone()),
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
/// other. Put an [`AccessOrdered`](super::AccessOrdered) on top to have the order of streams kept.
// SAFETY: a block has one owner by the metadata of its allocator, which keeps memory from other streams until
// every recorded use is complete, and finds blocks by a key that is theirs alone.
unsafe impl MemoryResource for Allocator {
    #[inline]
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let engine = self.engine();
        // Before there is a block, so that a retirement meanwhile is seen.
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
        if free_at_once(self, &block) {
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
        live(self, id)?;
        let engine = self.engine();
        engine.record(id.ptr(), &engine.named(stream)?, true)
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        live(self, id)?;
        let engine = self.engine();
        engine.record(id.ptr(), &engine.named(stream)?, false)
    }
}
