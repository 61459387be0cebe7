//! Tests of state that moves between structures: tickets, uses, and the order between streams.

use std::sync::Arc;

use super::{MIB, Outcome, PAGE, Rig, cached, scattered, viewing};
use crate::Block;
use crate::allocator::extent::record::{COMPLETE, SpaceId};
use crate::allocator::extent::uses::Use;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::inspect::check::check;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::allocator::{Config, Policy};
use crate::error::Error;
use crate::sim::Mode;

/// A page stays pending until its owner, and every stream that the owner is ordered behind, have completed: a block
/// that returns to a stream cache because its stream is ordered behind the others renews the page's ticket.
#[test]
fn a_block_freed_after_a_wait_renews_the_ticket_of_its_page() -> Outcome {
    // The same holds if the other stream that used the block has completed.
    freed_after_a_wait(false)?;
    freed_after_a_wait(true)
}

fn freed_after_a_wait(another: bool) -> Outcome {
    let config = Config::new().limit(Some(16 << 20)).views(false);
    let rig = Rig::new(config.policy(Policy::Packed))?;
    let allocator = &rig.allocator;
    let [a, b, c, idle] = rig.streams()?;
    let small = allocator.allocate(PAGE, &a)?;
    let at = small.ptr();
    let others: Result<Vec<Block>, _> = (1..2 * MIB / PAGE)
        .map(|_| allocator.allocate(PAGE, &c))
        .collect();
    let others = others?;
    let large = allocator.allocate(12 * MIB, &b)?;
    let little = allocator.allocate(MIB, &a)?;
    small.record_stream(&b)?;
    if another {
        small.record_stream(&idle)?;
    }
    rig.sim.set_mode(Mode::Manual);
    rig.write(at, PAGE, &b)?;
    rig.write(large.ptr(), 12 * MIB, &b)?;
    drop((small, little));
    // All frees of the owner so far are complete.
    rig.sim.complete_stream(a.id()?, usize::MAX);
    allocator.trim(u64::MAX)?;
    drop(large);
    let behind = allocator.allocate(12 * MIB, &a)?;
    assert_eq!(allocator.stats().stream_waits, 1);
    allocator.trim(u64::MAX)?;
    allocator.check()?;
    let heap = allocator.engine().lock();
    assert!(heap.caches.held_back.is_empty(), "its stream follows");
    drop(heap);
    let got = cached(allocator, PAGE, &c);
    let none = matches!(got, Err(Error::NotCached));
    assert!(none, "{got:?}: {at:#x} is in use");
    rig.sim.complete_all();
    drop((others, behind));
    rig.end()
}

/// The last marker of a stream closes its batches in the stream caches of other streams: its slot is free as soon as
/// the marker is complete.
#[test]
fn a_last_marker_closes_the_batches_in_other_caches() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a, b] = rig.streams()?;
    // Its stream cache can record a use by itself from here on.
    drop(rig.allocator.allocate(512, &b)?);
    let block = rig.allocator.allocate(512, &a)?;
    block.record_stream(&b)?;
    drop(block);
    rig.allocator.retire(&b)?;
    for _ in 0..2 {
        drop(rig.allocator.allocate(MIB, &a)?);
    }
    assert_eq!(rig.allocator.stats().streams, 1);
    rig.end()
}

/// Restoring a claim restores each part: its class, its owner, the time of its free, and its counts.
#[test]
fn d1_a_claim_is_restored_as_it_was() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b, c] = rig.streams()?;
    let allocator = &rig.allocator;
    let row = [&a, &a, &b, &c, &b, &a];
    let row: Result<Vec<Block>, _> = row.iter().map(|s| allocator.allocate(2 * MIB, s)).collect();
    let mut row: Vec<Option<Block>> = row?.into_iter().map(Some).collect();
    rig.sim.set_mode(Mode::Manual);
    for (stream, at) in [(&a, 1), (&a, 2), (&c, 3), (&b, 4)] {
        let block = row[at].as_ref().ok_or("taken")?;
        rig.write(block.ptr(), 2 * MIB, stream)?;
        block.record_stream(stream)?;
    }
    let first = row[1].as_ref().ok_or("taken")?.ptr();
    [3, 1, 4, 2].into_iter().for_each(|at| row[at] = None);
    let picture = || {
        let heap = allocator.engine().lock();
        let mut pieces: Vec<_> = heap
            .extents
            .large
            .pieces()
            .map(|piece| {
                let cold = heap.extents.records.cold(piece.id);
                let uses = cold.uses.as_slice().to_vec();
                (piece.addr, piece.granules, uses, cold.owner, cold.freed)
            })
            .collect();
        pieces.sort_unstable_by_key(|piece| piece.0);
        (pieces, heap.stats.all, heap.mixed_peak)
    };
    let before = picture();
    assert_eq!(before.0.len(), 4);
    {
        let mut heap = allocator.engine().lock();
        let piece = heap
            .extents
            .piece_around(SpaceId::Large, first)
            .ok_or("no piece")?;
        let mib = (MIB as u64 / GRANULE) as u32;
        let claimed = heap.claim(SpaceId::Large, piece, mib, 6 * mib);
        let (id, shards) = claimed.ok_or("not claimed")?;
        assert_eq!(shards.len(), 4);
        heap.restore(SpaceId::Large, id, shards);
    }
    assert_eq!(picture(), before);
    rig.sim.complete_all();
    drop(row);
    rig.end()
}

/// A part that completed while it was claimed is available to all streams once it is restored.
#[test]
fn d1_a_restored_claim_has_its_current_completion() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    let other = allocator.allocate(2 * MIB, &b)?;
    let block = allocator.allocate(2 * MIB, &a)?;
    let ptr = block.ptr();
    drop(block);
    let engine = allocator.engine();
    let mut heap = engine.lock();
    let class = heap.streams.find(StreamKey::Id(a.id()?)).ok_or("no slot")?;
    let piece = heap.extents.piece_around(SpaceId::Large, ptr);
    let piece = piece.ok_or("no piece")?;
    assert_eq!(heap.extents.records[piece].stream, class);
    let claimed = heap.claim(SpaceId::Large, piece, 0, (2 * MIB as u64 / GRANULE) as u32);
    let (id, shards) = claimed.ok_or("not claimed")?;
    let batch = {
        let heap = &mut *heap;
        heap.caches.close_batch(&mut heap.streams, class)
    };
    heap.streams.mark_batch_complete(&batch);
    heap.complete_advanced();
    heap.restore(SpaceId::Large, id, shards);
    let piece = heap.extents.piece_around(SpaceId::Large, ptr);
    let stream = piece.map(|piece| heap.extents.records[piece].stream);
    assert_eq!(stream, Some(COMPLETE));
    drop(heap);
    drop(other);
    allocator.check()?;
    rig.end()
}

/// An extent taken for a request is not yet a block: the lock may be released before it becomes one, and a concurrent
/// check finds the metadata consistent.
#[test]
fn a_taken_extent_is_not_yet_a_block() -> Outcome {
    for policy in [Policy::Classic, Policy::Packed] {
        let rig = Rig::new(Config::new().policy(policy).views(false))?;
        let [a] = rig.streams()?;
        // Too large for a large-block cache.
        let [kept, freed] = [
            rig.allocator.allocate(48 * MIB, &a)?,
            rig.allocator.allocate(48 * MIB, &a)?,
        ];
        let addr = freed.ptr();
        drop((kept, freed));
        rig.allocator.synchronize()?;
        let request = Checked::new(32 * MIB, 1)?;
        let mut heap = rig.allocator.engine().lock();
        heap.empty_large_caches();
        let stream = heap.streams.iter().next().ok_or("no stream")?.0;
        let want = request.want(SpaceId::Large, stream);
        let live = heap.stats.all.allocations.current;
        let id = heap.take_near(&want, &[addr]).ok_or("not taken")?;
        check(&heap)?;
        assert_eq!(heap.stats.all.allocations.current, live);
        let cache = heap.cache_of(stream);
        let grant = heap.grant(id, stream, want.requested, cache);
        check(&heap)?;
        assert_eq!(heap.stats.all.allocations.current, live + 1);
        let id = grant.place.record().ok_or("no record")?;
        heap.free(id);
        check(&heap)?;
        drop(heap);
        rig.end()?;
    }
    Ok(())
}

/// Merged pieces stay pending until all their uses are complete.
#[test]
fn merged_pieces_wait_for_the_newest_use() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Classic))?;
    let [a] = rig.streams()?;
    let allocator = &rig.allocator;
    let [left, right] = [
        allocator.allocate(8 * MIB, &a)?,
        allocator.allocate(8 * MIB, &a)?,
    ];
    drop(left);
    allocator.synchronize()?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(right.ptr(), 8 * MIB, &a)?;
    drop(right);
    let trimmed = allocator.trim(0)?;
    assert_eq!((trimmed.released, trimmed.pending), (0, 20 << 20));
    rig.end()
}

/// The part of a piece that a block does not take stays unchanged.
#[test]
fn the_remainder_of_a_piece_belongs_to_its_stream() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    drop(allocator.allocate(512, &b)?);
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(4 * MIB, &a)?;
    rig.write(block.ptr(), 4 * MIB, &a)?;
    drop(block);
    let half = allocator.allocate(2 * MIB, &a)?;
    assert!(matches!(cached(allocator, MIB, &b), Err(Error::NotCached)));
    assert!(cached(allocator, MIB, &a).is_ok());
    drop(half);
    rig.end()
}

/// Uses stored by a stream cache are kept when the heap takes the block over to record another one.
#[test]
fn blocks_held_back_by_a_cache_reach_the_heap() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [a, b, c] = rig.streams()?;
    let allocator = &rig.allocator;
    for stream in [&b, &c] {
        drop(allocator.allocate(512, stream)?);
    }
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(512, &a)?;
    rig.write(block.ptr(), 512, &b)?;
    block.record_stream(&b)?;
    block.record_stream(&c)?;
    drop(block);
    let uses = |heap: &Heap| {
        let held = heap
            .caches
            .held_back
            .iter()
            .map(|held| held.uses.as_slice().len());
        held.collect::<Vec<_>>()
    };
    assert_eq!(uses(&allocator.engine().lock()), [2]);
    rig.end()
}

/// A block that was freed under a guard gets the uses of that free when the guard is dropped.
#[test]
fn a_guarded_block_keeps_its_uses() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    rig.sim.set_mode(Mode::Manual);
    let block = allocator.allocate(2 * MIB, &a)?;
    let guard = allocator.guard(block.ptr(), 2 << 20)?;
    rig.write(block.ptr(), 2 * MIB, &b)?;
    block.record_stream(&b)?;
    drop(block);
    drop(guard);
    assert!(matches!(cached(allocator, MIB, &a), Err(Error::NotCached)));
    assert_eq!(allocator.trim(0)?.pending, 2 << 20);
    rig.end()
}

/// A block in a view is pending on every user of its parts.
#[test]
fn a_block_over_parts_of_several_streams_waits_for_each() -> Outcome {
    let rig = Rig::new(viewing(2))?;
    let [a, b, c] = rig.streams()?;
    let kept = scattered(&rig, &a, &[&b, &c], true)?;
    let block = rig.allocator.allocate(9 * MIB, &a)?;
    assert_eq!(rig.allocator.stats().reclaim.stitched, 1);
    assert_eq!(rig.allocator.stats().stream_waits, 2);
    rig.write(block.ptr(), 9 * MIB, &a)?;
    drop((kept, block));
    rig.end()
}

/// The mappings of a view are removed when all users of its blocks have completed, not only the last one.
#[test]
fn a_view_stays_until_all_its_users_are_done() -> Outcome {
    let rig = Rig::new(viewing(4))?;
    let [a, b] = rig.streams()?;
    let allocator = &rig.allocator;
    let kept = scattered(&rig, &a, &[&a; 4], false)?;
    drop(allocator.allocate(17 * MIB, &a)?);
    allocator.synchronize()?;
    let [one, other] = [
        allocator.allocate(9 * MIB, &a)?,
        allocator.allocate(8 * MIB, &a)?,
    ];
    {
        let heap = allocator.engine().lock();
        let view = |block: &Block| heap.views.view_around(block.ptr()).map(|(base, _)| base);
        assert!(view(&one).is_some() && view(&one) == view(&other));
    }
    one.record_stream(&b)?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(one.ptr(), 9 * MIB, &b)?;
    drop(one);
    drop(other);
    rig.sim.complete_stream(a.id()?, usize::MAX);
    allocator.trim(0)?;
    assert_eq!(allocator.engine().lock().views.map.len(), 1);
    drop(kept);
    rig.end()
}

/// A wait queued after a batch was closed may be behind the event: the marker does not include it.
#[test]
fn a_marker_follows_what_its_stream_followed_when_the_batch_was_closed() -> Outcome {
    let rig = Rig::new(Config::new())?;
    let mut streams = Streams::default();
    let [a, b] = [1, 2].map(|number| {
        let (key, raw) = (StreamKey::Id(number), number as usize);
        streams.add(key, raw, rig.context.clone(), Holder::foreign())
    });
    streams.record_order(a, b, 3, &[]);
    let batch = streams.close_batch(a);
    let bound = batch.bound;
    streams.record_order(a, b, 7, &[]);
    let event = Arc::new(rig.context.enter()?.create_event()?);
    assert!(streams.publish(batch, event).is_none());
    let marker = streams.marker(&Use {
        stream: a,
        ticket: bound,
    });
    let row = marker.map(|marker| marker.row.to_vec());
    assert_eq!(row, Some(vec![0, 3]));
    rig.end()
}

/// A check names what does not agree.
#[test]
fn a_check_reports_a_request_that_does_not_fit_its_block() -> Outcome {
    let rig = Rig::new(Config::new().policy(Policy::Packed))?;
    let [stream] = rig.streams()?;
    let block = rig.allocator.allocate(MIB, &stream)?;
    let set = |requested| {
        let mut heap = rig.allocator.engine().lock();
        let id = heap.extents.lookup.exact(block.ptr());
        let cold = id.map(|id| heap.extents.records.cold_mut(id));
        cold.map(|cold| cold.requested = requested)
            .ok_or("no block")
    };
    for requested in [0, MIB as u64 + 1] {
        set(requested)?;
        assert!(matches!(
            rig.allocator.check(),
            Err(Error::Inconsistent { what, .. }) if what == "a request fits its block"
        ));
    }
    set(MIB as u64)?;
    drop(block);
    rig.end()
}
