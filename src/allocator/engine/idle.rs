//! Idle memory: how it is found, and its release when it has been idle for long.

use crate::allocator::engine::Engine;
use crate::allocator::engine::decay::Decay;
use crate::allocator::engine::release;
use crate::allocator::engine::self_test;
use crate::allocator::plan;
use crate::allocator::stream::slot::StreamKey;
use crate::driver::process;
use crate::error::Error;
use crate::error::memory::Bytes;

/// Finds idle memory without a wait: records and polls markers where that is allowed, and makes caches return
/// memory that they do not need. Returns the bytes that this released to the driver, and the result of retrying
/// earlier failed releases.
pub(crate) fn find(engine: &Engine) -> Result<(u64, Result<u64, Error>), Error> {
    process::do_postponed();
    engine.free_deferred();
    let ours: Vec<(u32, StreamKey)> = {
        let mut heap = engine.open()?;
        heap.ensure_serving()?;
        heap.flush_caches();
        heap.streams.kept_without_marker()
    };
    engine.cover_all(&ours)?;
    let retried = release::release_quarantined(engine);
    let finished = self_test::finish(engine, false)?;
    engine.lock().streams.reset_backoff();
    engine.poll()?;
    let mut heap = engine.lock();
    heap.complete_uses();
    // Includes blocks held back for streams that have completed by now.
    heap.flush_caches();
    drop(heap);
    Ok((finished.released, retried))
}

/// Releases memory that has been idle for long, if a check is due. On a failure the next check tries again.
#[inline]
pub(crate) fn release_if_due(engine: &Engine) {
    if let Some(decay) = &engine.decay {
        release_and_log(engine, decay);
    }
}

#[cold]
fn release_and_log(engine: &Engine, decay: &Decay) {
    if !process::is_unwatched() {
        return;
    }
    match release_idle(engine, decay) {
        Ok(0) => {}
        Ok(bytes) => log::debug!(
            "allocator {}: released {} of idle memory",
            engine.id,
            Bytes(bytes)
        ),
        Err(error) => log::debug!(
            "allocator {}: cannot release idle memory: {error}",
            engine.id
        ),
    }
}

/// The same, but returns the bytes released.
pub(crate) fn release_idle(engine: &Engine, decay: &Decay) -> Result<u64, Error> {
    if !decay.is_due() {
        return Ok(0);
    }
    let ours = {
        let mut heap = engine.open()?;
        heap.flush_caches();
        heap.streams.kept_without_marker()
    };
    engine.cover_all(&ours)?;
    engine.lock().streams.reset_backoff();
    engine.poll()?;
    let mut heap = engine.open()?;
    heap.complete_uses();
    // Includes blocks held back for streams that have completed by now.
    heap.flush_caches();
    let views = decay.turn(heap.views.clock);
    let (_, allocated) = heap.live_totals();
    let all = &heap.stats.all;
    let keep = (all.allocated.peak as f64 * decay.keep) as u64;
    let spare = all.reserved.current.saturating_sub(allocated);
    // Memory that no block has used since the last check.
    let held = heap.stats.large.reserved.current;
    let idle = held.saturating_sub({
        let now = heap.stats.large.allocated.current;
        std::mem::replace(&mut heap.recent_peak, now).max(now)
    });
    let idle = idle.min(spare.saturating_sub(keep));
    let ranges = heap.ranges.leaving > 0;
    let unused = match idle {
        0 => Vec::new(),
        _ => heap.views.idle_since(&heap.streams, views),
    };
    drop(heap);
    let left = match ranges {
        true => release::release_aged(engine)?,
        false => 0,
    };
    if idle == 0 {
        return Ok(left);
    }
    release::evict(engine, &unused)?;
    let plan = plan::release::plan_decay(&mut engine.lock(), idle);
    Ok(left + release::release(engine, plan)?)
}
