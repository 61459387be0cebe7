//! Retirement of streams, including their uses of graph pools.

use crate::allocator::engine::Engine;
use crate::allocator::engine::leaving;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::run::uses;
use crate::error::{Error, StreamMisuse};

/// Returns the slot of a known stream, or an error that says why it is unknown.
pub(crate) fn known(engine: &Engine, named: &Named<'_>) -> Result<u32, Error> {
    let mut heap = engine.open()?;
    let known = {
        let heap = &mut *heap;
        heap.caches
            .find_slot(&mut heap.streams, named.key, named.raw as usize)
    };
    known.ok_or_else(|| heap.streams.unknown_error(named.raw as usize))
}

/// Returns all slots of a known stream: more than one if other threads retired it while it stayed in use.
fn known_all(engine: &Engine, named: &Named<'_>) -> Result<Vec<u32>, Error> {
    let mut heap = engine.open()?;
    {
        let heap = &mut *heap;
        heap.caches
            .find_slot(&mut heap.streams, named.key, named.raw as usize)
    };
    let slots = heap.streams.all_of(named.key);
    if slots.is_empty() {
        return Err(heap.streams.unknown_error(named.raw as usize));
    }
    Ok(slots)
}

/// Records the last marker of a stream whose owner is about to destroy it.
pub(crate) fn retire(engine: &Engine, named: &Named<'_>) -> Result<(), Error> {
    let slots = match known_all(engine, named) {
        Err(_) if uses::pools_use_stream(engine, named) => Vec::new(),
        Err(error @ Error::Stream(StreamMisuse::Unknown { .. })) => {
            uses::note_retirement(engine, named);
            return Err(error);
        }
        known => known?,
    };
    engine.refuse_capture(named)?;
    uses::leave(engine, named)?;
    for stream in slots {
        leaving::retire_slot(engine, stream, named.key)?;
    }
    Ok(())
}
