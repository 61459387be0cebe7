//! Uses of blocks by other streams.

use crate::allocator::cache::stream_cache::{Using, thread};
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::extent::record::Recorded;
use crate::allocator::graph::pooled;
use crate::allocator::graph::run::allocate;
use crate::allocator::graph::run::uses;
use crate::allocator::stream::slot::StreamKey;
use crate::driver::{process, sys};
use crate::error::Error;

/// Records a use of a block on another stream: all work submitted to that stream until the free, or with `now` only
/// the work submitted so far.
#[inline]
pub(crate) fn use_by(
    engine: &Engine,
    ptr: sys::CUdeviceptr,
    named: &Named<'_>,
    now: bool,
) -> Result<(), Error> {
    engine.usable()?;
    let quick = (!now).then(|| in_caches(engine, ptr, named.key));
    let recorded = match quick.flatten() {
        Some(done) => done,
        None => in_heap(engine, ptr, named, now),
    };
    if process::is_recording() && recorded.is_ok() {
        {
            let heap = engine.lock();
            heap.recorder.record_use(&heap.streams, ptr, named.key)
        };
    }
    recorded
}

/// [`use_by`] until the free, for a block of a graph pool. Returns false for other memory.
pub(crate) fn use_in_pool(
    engine: &Engine,
    ptr: sys::CUdeviceptr,
    life: (u32, u32),
    named: &Named<'_>,
) -> Result<bool, Error> {
    let is_pooled = pooled::is_live(&*engine.open()?, life);
    if is_pooled {
        use_by(engine, ptr, named, false)?;
    }
    Ok(is_pooled)
}

/// Records another stream on a small block, if the two stream caches suffice.
#[inline]
fn in_caches(engine: &Engine, ptr: u64, key: StreamKey) -> Option<Result<(), Error>> {
    let StreamKey::Id(key) = key else {
        return None;
    };
    if !engine.is_fast() {
        return None;
    }
    let (cache, node) = engine.pages.find_node(ptr)?;
    let user = thread::find(key)?;
    let using = {
        let mut inner = user.lock();
        if !inner.serves(engine.owner(key)) {
            return None;
        }
        let using = Using::one(inner.slot)?;
        // Counted first, because the stream must stay known from here on.
        inner.recorded += 1;
        using
    };
    let recorded = {
        let mut inner = cache.lock();
        match inner.live(node, ptr, None) {
            Some(live) if live.using == Using::NONE && Some(inner.slot) != using.slot() => {
                inner.runs.set_using(node, using);
                return Some(Ok(()));
            }
            Some(live) => live.using == using || Some(inner.slot) == using.slot(),
            None => false,
        }
    };
    user.lock().recorded -= 1;
    recorded.then_some(Ok(()))
}

#[inline(never)]
fn in_heap(
    engine: &Engine,
    ptr: sys::CUdeviceptr,
    named: &Named<'_>,
    now: bool,
) -> Result<(), Error> {
    {
        let mut heap = engine.open()?;
        if heap.large_around(ptr).is_none() && heap.caches.small_around(ptr).is_none() {
            return Err(heap.physical.not_live(ptr));
        }
        if let Some(block) = pooled::around(&mut heap, ptr) {
            drop(heap);
            return uses::record(engine, block, named, now);
        }
    }
    // A graph pool serves the capture of the stream. Its markers wait for the end of the capture, and so does the
    // use.
    let captures = match engine.refuse_capture(named) {
        Err(Error::Capturing { .. })
            if engine.is_scoped() && allocate::is_served(engine, named)? =>
        {
            true
        }
        refused => refused.map(|()| false)?,
    };
    if engine.unretired && !captures {
        engine.mark_while_named(named);
    }
    let (mut heap, stream) = engine.slot(engine.open()?, named)?;
    if let StreamKey::Id(key) = named.key {
        thread::remember(key, heap.cache_of(stream));
    }
    let block = heap.large_around(ptr);
    let owner = match block {
        Some(id) => Some(heap.extents.records[id].stream),
        None => heap.caches.small_around(ptr).map(|(_, _, owner)| owner),
    };
    let Some(owner) = owner else {
        return Err(Error::NotLive { ptr });
    };
    let now = now && owner != stream;
    // Covered by the marker below or the next one: later frees get a later ticket.
    let ticket = now.then(|| {
        let slot = &mut heap.streams[stream];
        slot.open_uses = slot.open_uses.saturating_add(1);
        slot.open
    });
    if now && !captures {
        // Steps that may fail come first, so that a use is not recorded if the call returns an error.
        drop(heap);
        engine.mark(stream, named.key)?;
        heap = engine.open()?;
        let slot = &heap.streams[stream];
        if !slot.in_use || slot.key != named.key {
            // A stream is forgotten only when all its work is complete.
            return Ok(());
        }
    }
    match heap.large_around(ptr) {
        Some(id) => heap.record(id, stream, ticket),
        None => {
            let heap = &mut *heap;
            let new = Recorded { stream, ticket };
            if !heap.caches.record_use(&mut heap.streams, ptr, new) {
                return Err(Error::NotLive { ptr });
            }
        }
    }
    Ok(())
}
