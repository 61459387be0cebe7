//! Suspended memory that nothing can use any more.

use crate::allocator::engine::Engine;
use crate::allocator::suspend::target;
use crate::allocator::suspend::{Suspension, Target, commit};
use crate::error::Error;
use crate::sync::order::wait_for_context;
use std::collections::BTreeMap;

/// Discards the suspended memory of pools and ranges that can no longer be used.
pub(crate) fn discard_unused(engine: &Engine) -> Result<(), Error> {
    let away = {
        let mut heap = engine.lock();
        if heap.suspended.working || heap.suspended.map.is_empty() {
            return Ok(());
        }
        let away = {
            let heap = &mut *heap;
            heap.suspended.take_unused(|target| match target {
                Target::Pool(id) => heap.graphs.is_unused(id),
                Target::Range(id) => heap.ranges.is_unused(id),
                Target::Arenas => false,
            })
        };
        heap.suspended.working = !away.is_empty();
        away
    };
    discard(engine, away)
}

/// Discards all suspended memory: no block is live any more.
pub(crate) fn discard_all(engine: &Engine) -> Result<(), Error> {
    engine.suspender.drop_spare();
    let away = std::mem::take(&mut engine.lock().suspended.map);
    discard(engine, away.into_iter().collect())
}

fn discard(engine: &Engine, away: BTreeMap<Target, Suspension>) -> Result<(), Error> {
    if away.is_empty() {
        return Ok(());
    }
    let (targets, mut discarded): (Vec<Target>, Vec<Suspension>) = away.into_iter().unzip();
    let entered = engine.context.enter();
    let given = entered.and_then(|entered| {
        // The target of a copy that may still be running is kept.
        if discarded.iter().any(|one| one.unseen) {
            wait_for_context(entered.context())?;
            discarded.iter_mut().for_each(|one| one.unseen = false);
        }
        commit::give_back(&entered, &mut discarded)
    });
    let mut heap = engine.lock();
    let mut copies = Vec::new();
    for (target, mut suspension) in targets.into_iter().zip(discarded) {
        let mut copy = std::mem::take(&mut suspension.copy);
        if suspension.unseen {
            copy.leak();
        }
        copies.push(copy);
        match given {
            Ok(()) => target::discard(&mut heap, target, suspension),
            Err(_) => drop(heap.suspended.map.insert(target, suspension)),
        }
    }
    heap.suspended.working = false;
    drop(heap);
    drop(copies);
    given.map_err(|e| engine.error(e))
}
