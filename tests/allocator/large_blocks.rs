//! Large blocks that are freed and requested again immediately: they stay in their stream's cache, and no
//! statistic, report or other stream shows a difference.

use crate::common::prelude::*;
use cualloc::allocator::{BlockState, Counter, PoolStats};

const LARGE: usize = 3 * MIB;

/// An allocator that expects blocks of [`LARGE`] bytes to be requested again on the first stream.
fn used_to_pairs<const N: usize>(rig: &Rig) -> (Checked<'_>, [Stream; N]) {
    let (allocator, streams) = rig.scene();
    make_used(&allocator, &streams[0]);
    (allocator, streams)
}

fn make_used(allocator: &Allocator, stream: &Stream) {
    for _ in 0..4 {
        drop(allocator.allocate(LARGE, stream).unwrap());
    }
}

/// Whether a pair is served without the heap: they count each large request that they serve.
fn pairs_stay(allocator: &Allocator, stream: &Stream) -> bool {
    let ready = allocator.stats().reclaim.ready;
    for _ in 0..10 {
        drop(allocator.allocate(LARGE, stream).unwrap());
    }
    allocator.stats().reclaim.ready == ready
}

fn live_in_snapshot(allocator: &Allocator) -> (u64, u64) {
    let blocks = allocator.snapshot().into_iter().flat_map(|s| s.blocks);
    let live = blocks.filter(|b| b.state == BlockState::Live);
    live.fold((0, 0), |(count, bytes), b| (count + 1, bytes + b.requested))
}

fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

#[test]
fn pairs_reuse_their_cache_and_address() {
    packed(|rig| {
        let (allocator, [a]) = used_to_pairs(rig);
        assert!(pairs_stay(&allocator, &a));
        let first = allocator.allocate(LARGE, &a).unwrap();
        let (at, life) = (first.ptr(), first.generation());
        drop(first);
        let second = allocator.allocate(LARGE - 100, &a).unwrap();
        assert_eq!(second.ptr(), at);
        assert_ne!(second.generation(), life);
        assert_eq!(second.requested(), LARGE - 100);
        allocator.check().unwrap();
    });
}

/// Counts of a stream's large-block caches remain after its retirement.
#[test]
fn figures_do_not_fall_when_a_stream_is_retired() {
    packed(|rig| {
        let streams: [Stream; 3] = rig.streams();
        let allocator = rig.checked();
        for stream in &streams {
            make_used(&allocator, stream);
            assert!(pairs_stay(&allocator, stream));
        }
        for stream in &streams {
            let before = allocator.stats();
            allocator.retire(stream).unwrap();
            let after = allocator.stats();
            assert!(before.hits >= 10 && after.hits >= before.hits);
            for (before, after) in [(before.all, after.all), (before.large, after.large)] {
                let counters = |pool: PoolStats| [pool.allocations, pool.requested, pool.allocated];
                for (before, after) in counters(before).into_iter().zip(counters(after)) {
                    assert!(after.total_allocated >= before.total_allocated);
                    assert!(after.total_freed >= before.total_freed);
                    assert_eq!(after.current, before.current);
                }
            }
        }
    });
}

/// Figures are exact at any moment, also for allocations in the large-block cache.
#[test]
fn s1_19_figures_distinguish_live_blocks_from_cached_memory() {
    packed(|rig| {
        let (allocator, [a]) = used_to_pairs(rig);
        let _kept = allocator.allocate(5 * MIB, &a).unwrap();
        make_used(&allocator, &a);
        let before = allocator.stats();
        let block = allocator.allocate(LARGE - 100, &a).unwrap();
        let during = allocator.stats();
        let live = (2, (5 * MIB + LARGE - 100) as u64);
        assert_eq!(live_in_snapshot(&allocator), live);
        assert_eq!(allocator.stats().all.requested, during.all.requested);
        drop(block);
        let after = allocator.stats();
        for [before, during, after] in [
            [before.all, during.all, after.all],
            [before.large, during.large, after.large],
        ] {
            assert_eq!(before.allocations.current, 1);
            assert_eq!(during.allocations.current, 2);
            assert_eq!(after.allocations.current, 1);
            let more = |f: fn(&PoolStats) -> Counter| {
                let [before, during, after] = [f(&before), f(&during), f(&after)];
                assert_eq!(before.current, after.current);
                assert_eq!(before.peak, after.peak);
                assert_eq!(
                    during.total_allocated - before.total_allocated,
                    after.total_freed - before.total_freed
                );
                for counter in [before, during, after] {
                    let left = counter.total_allocated - counter.total_freed;
                    assert_eq!(left, counter.current);
                }
                during.current - before.current
            };
            assert_eq!(more(|pool| pool.allocations), 1);
            assert_eq!(more(|pool| pool.requested), LARGE as u64 - 100);
            assert_eq!(more(|pool| pool.allocated), LARGE as u64);
            assert_eq!(more(|pool| pool.active), LARGE as u64);
        }
        assert_eq!(during.hits - before.hits, 1);
        assert_eq!(after.free - during.free, LARGE as u64);
        // Memory kept for the request; the snapshot has returned it to the heap meanwhile.
        assert_eq!(before.cache_bytes - during.cache_bytes, LARGE as u64);
        assert_eq!(after.cache_bytes, during.cache_bytes);
        assert_eq!(
            allocator.cached(),
            after.all.reserved.current - 5 * MIB as u64
        );
    });
}

/// Free memory does not count towards a peak, neither of large blocks nor of small ones.
#[test]
fn s1_19_blocks_in_a_large_cache_are_not_part_of_a_peak() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene();
        // No request below is the largest so far.
        drop(allocator.allocate(64 * MIB, &a).unwrap());
        make_used(&allocator, &a);
        allocator.reset_peaks();
        assert_eq!(allocator.stats().all.allocated.peak, 0);
        drop(allocator.allocate(LARGE, &a).unwrap());
        let peak = |allocator: &Allocator| allocator.stats().all.allocated.peak;
        assert_eq!(peak(&allocator), LARGE as u64);
        // Only one of the two is ever live.
        drop(allocator.allocate(LARGE - MIB, &a).unwrap());
        assert_eq!(peak(&allocator), LARGE as u64);
        make_used(&allocator, &a);
        let _small = allocator.allocate_blocks(LARGE / (64 * KIB), 64 * KIB, &a);
        assert_eq!(peak(&allocator), LARGE as u64);
        let _block = allocator.allocate(LARGE, &a).unwrap();
        assert_eq!(peak(&allocator), 2 * LARGE as u64);
    });
}

#[test]
fn s1_13_a_second_free_of_a_block_in_a_large_cache_is_refused() {
    packed(|rig| {
        let (allocator, [a]) = used_to_pairs(rig);
        let ptr = allocator.allocate(LARGE, &a).unwrap().into_raw();
        let inside = allocator.raw_free(ptr + 512);
        assert_matches!(inside, Err(Error::InteriorPointer { base, .. }) if base == ptr);
        assert_eq!(allocator.usable_size(ptr), Some(LARGE as u64));
        assert!(allocator.owns(ptr + 1000));
        allocator.raw_free(ptr).unwrap();
        for ptr in [ptr, ptr + 512] {
            assert_matches!(allocator.raw_free(ptr), Err(Error::NotLive { .. }));
        }
        assert!(!allocator.owns(ptr));
        assert!(allocator.block_of(ptr).is_none());
        assert_eq!(allocator.usable_size(ptr), None);
        assert!(allocator.guard(ptr, 512).is_err());
        // Without these queries, which look into the heap, the block is in a cache again.
        make_used(&allocator, &a);
        let ptr = allocator.allocate(LARGE, &a).unwrap().into_raw();
        allocator.raw_free(ptr).unwrap();
        assert_matches!(allocator.raw_free(ptr), Err(Error::NotLive { .. }));
    });
}

/// A use by another stream, and a guard, apply to the present allocation, and keep its memory after the free.
#[test]
fn s1_40_uses_and_guards_of_lives_in_large_caches_count() {
    packed(|rig| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        make_used(&allocator, &a);
        let hold = rig.busy(&b);
        let block = allocator.allocate(LARGE, &a).unwrap();
        let ptr = block.ptr();
        block.record_stream(&b).unwrap();
        drop(block);
        let next = allocator.allocate(LARGE, &a).unwrap();
        assert_ne!(next.ptr(), ptr, "the other stream is not done");
        hold.release();
        drop(next);
        b.synchronize().unwrap();
        make_used(&allocator, &a);
        let block = allocator.allocate(LARGE, &a).unwrap();
        let ptr = block.ptr();
        let _guard = allocator.guard(ptr, LARGE as u64).unwrap();
        drop(block);
        let next = allocator.allocate(LARGE, &a).unwrap();
        assert_ne!(next.ptr(), ptr, "a guard keeps it");
    });
}

/// Memory in a large-block cache is available to a request of another length or of another stream, to a request at a
/// limit, and to a trim.
#[test]
fn s1_40_memory_in_large_caches_is_available_to_others() {
    packed(|rig| {
        let (allocator, [a, b]) = rig.scene_with(Config::new().limit(Some(4 * MIB as u64)));
        drop(allocator.allocate(4 * MIB, &a).unwrap());
        make_used(&allocator, &a);
        assert!(pairs_stay(&allocator, &a));
        drop(allocator.allocate(4 * MIB, &a).unwrap());
        make_used(&allocator, &a);
        // Beside the block at hand there is no room.
        drop(allocator.allocate(4 * MIB, &b).unwrap());
        make_used(&allocator, &a);
        let single = Request::new(2 * MIB).single_handle();
        drop(allocator.allocate_with(single, &a).unwrap());
        make_used(&allocator, &a);
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
    });
}

/// A block next to one that is freed leaves its large-block cache, so that both become one piece.
#[test]
fn blocks_in_a_large_cache_merge_with_their_neighbours() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene_limit(8 * MIB);
        let row = [2, 3, 3].map(|mib| allocator.allocate(mib * MIB, &a).unwrap());
        let [left, middle, _right] = row;
        drop(middle);
        make_used(&allocator, &a);
        assert!(pairs_stay(&allocator, &a));
        drop(left);
        let whole = allocator.allocate(5 * MIB, &a).unwrap();
        let segments = allocator.segments_of(whole.ptr(), 5 * MIB as u64).unwrap();
        assert!(segments.iter().all(|s| s.address >= whole.ptr()));
        assert_eq!(allocator.stats().reclaim.stitched, 0);
    });
}

#[test]
fn retirement_and_the_end_take_everything_out_of_the_large_caches() {
    packed(|rig| {
        let (allocator, [a, b]) = used_to_pairs(rig);
        let block = allocator.allocate(LARGE, &a).unwrap();
        allocator.retire(&a).unwrap();
        drop(block);
        assert_eq!(live_in_snapshot(&allocator), (0, 0));
        allocator.check().unwrap();
        make_used(&allocator, &b);
        let block = allocator.allocate(LARGE, &b).unwrap();
        assert_eq!(live_in_snapshot(&allocator), (1, LARGE as u64));
        assert_matches!(allocator.close(), Err(Error::InUse { count: 1, .. }));
        drop(block);
        make_used(&allocator, &b);
        drop(allocator);
        // The last block closes an allocator that has no handle any more.
        let allocator = rig.allocator();
        make_used(&allocator, &b);
        let block = allocator.allocate(LARGE, &b).unwrap();
        drop(allocator);
        drop(block);
        if let Some(sim) = rig.maybe_sim() {
            let leaks = sim.leaks();
            assert_eq!((leaks.handles, leaks.mappings, leaks.bytes), (0, 0, 0));
        }
    });
}

/// Another stream's block, and a block of a foreign owner's stream that lies in its stream cache's large-block
/// cache.
fn beside_a_foreign_cache(rig: &Rig) -> (Checked<'_>, Stream, Block, RawStream) {
    let (allocator, [stream]) = rig.scene();
    let kept = allocator.allocate(5 * MIB, &stream).unwrap();
    let foreign = RawStream::new(rig);
    make_used(&allocator, &foreign.borrowed());
    assert!(pairs_stay(&allocator, &foreign.borrowed()));
    (allocator, stream, kept, foreign)
}

/// R24: a block that was freed to a large-block cache leaves it in a call of another stream. By then the stream of a
/// foreign owner may be destroyed, and a marker recorded on its handle would be on the wrong stream.
#[test]
fn r24_flushing_a_large_cache_uses_no_stream_that_may_be_destroyed() {
    packed(|rig| {
        let (allocator, b, _kept, foreign) = beside_a_foreign_cache(rig);
        foreign.destroy();
        let markers = allocator.stats().markers;
        let _block = allocator.allocate(5 * MIB, &b).unwrap();
        assert_eq!(live_in_snapshot(&allocator).0, 2);
        assert_eq!(allocator.stats().markers, markers);
    });
}

/// Calls of a stream record the markers that are due on it.
#[test]
fn blocks_from_a_large_cache_are_marked_in_a_call_of_their_stream() {
    packed(|rig| {
        let (allocator, _, kept, foreign) = beside_a_foreign_cache(rig);
        let markers = allocator.stats().markers;
        let block = allocator.allocate(5 * MIB, &foreign.borrowed()).unwrap();
        assert_eq!(allocator.stats().markers, markers + 1);
        drop((kept, block));
        foreign.retire(&allocator);
    });
}

/// A place that was chosen for an alignment is not given to a request without alignment.
#[test]
fn blocks_with_constraints_are_not_kept_in_a_large_cache() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene();
        drop(allocator.allocate(64 * MIB, &a).unwrap());
        let _wall = allocator.allocate(LARGE - 512, &a).unwrap();
        make_used(&allocator, &a);
        let first = allocator.allocate(LARGE, &a).unwrap().ptr();
        let request = Request::new(LARGE).align(2 * MIB);
        let aligned = allocator.allocate_with(request, &a).unwrap();
        assert_ne!(aligned.ptr(), first);
        drop(aligned);
        let block = allocator.allocate(LARGE, &a).unwrap();
        assert_eq!(block.ptr(), first, "where the heap would put it");
    });
}

/// Every block lies where it would lie if the heap served each request.
#[test]
fn layouts_do_not_depend_on_large_caches() {
    packed(|rig| {
        let a = rig.stream();
        let place = |by_the_heap: bool| {
            let allocator = rig.checked();
            let first = allocator.allocate(64 * MIB, &a).unwrap();
            let base = first.ptr();
            drop(first);
            let pairs = |mib: usize| {
                for _ in 0..4 {
                    if by_the_heap {
                        // Takes everything out of the large-block caches.
                        allocator.snapshot();
                    }
                    drop(allocator.allocate(mib * MIB, &a).unwrap());
                }
            };
            let mut kept = Vec::new();
            for round in 0..200 {
                pairs(3);
                let bytes = (1 + round * 7 % 5) * MIB + 512 * round;
                kept.push(allocator.allocate(bytes, &a).unwrap());
                if round % 3 != 0 {
                    pairs(1 + round % 4);
                    kept.swap_remove(round / 4);
                }
                pairs(3);
            }
            let places: Vec<u64> = kept.iter().map(|b| b.ptr().wrapping_sub(base)).collect();
            let ready = allocator.stats().reclaim.ready;
            (places, ready)
        };
        let (by_the_heap, served) = place(true);
        let (with_large_caches, left) = place(false);
        assert_eq!(by_the_heap, with_large_caches);
        assert!(left < served / 2, "{left} of {served}");
    });
}

/// While a request waits for its memory, a relief hook gets a block that is expected to be requested again, like that
/// of the request: only the last one stays in its stream cache.
#[test]
fn r18_a_block_allocated_by_a_hook_is_counted() {
    packed(|rig| {
        let (allocator, [a]) = rig.scene_limit(30 * MIB);
        for bytes in [LARGE, 8 * MIB] {
            for _ in 0..4 {
                drop(allocator.allocate(bytes, &a).unwrap());
            }
        }
        let given = Arc::new(Mutex::new(Some(allocator.allocate(24 * MIB, &a).unwrap())));
        let taken: Arc<Mutex<Option<Block>>> = Arc::default();
        let hook = {
            let (given, taken) = (given.clone(), taken.clone());
            let (allocator, a) = (allocator.clone(), a.clone());
            move |_| {
                given.lock().unwrap().take();
                let mut taken = taken.lock().unwrap();
                if taken.is_none() {
                    *taken = allocator.allocate(LARGE, &a).ok();
                }
                0
            }
        };
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("takes some", hook));
        let _large = allocator.allocate(8 * MIB, &a).unwrap();
        allocator.check().unwrap();
        let inner = taken.lock().unwrap().take().expect("the hook was asked");
        let hole = inner.ptr();
        drop(inner);
        allocator.check().unwrap();
        let small = allocator.allocate(MIB, &a).unwrap();
        assert_eq!(small.ptr(), hole, "the shortest hole that is long enough");
        allocator.remove_relief_hook("takes some");
    });
}

/// R61: a stream cache that serves only from its large-block cache counts as in use, and keeps its free runs.
#[test]
fn r61_a_cache_that_is_busy_with_large_blocks_keeps_its_blocks() {
    packed(|rig| {
        const PAGE: usize = 64 * KIB;
        const STEP: usize = 2 * MIB / PAGE;
        let (allocator, [a, b]) = used_to_pairs(rig);
        let small = [(); 128].map(|()| allocator.allocate(512, &a).unwrap());
        drop(small);
        let kept = allocator.stats().cache_bytes;
        assert!(kept > 0, "nothing is kept as it was");
        let mut pages: Vec<Block> = Vec::new();
        for _ in 0..3 {
            make_used(&allocator, &a);
            assert!(pairs_stay(&allocator, &a));
            // Each time the other stream lacks a page at least once, and looks at what others have.
            let reserved = allocator.stats().all.reserved.current;
            pages.extend((0..STEP).map(|_| allocator.allocate(PAGE, &b).unwrap()));
            assert!(pages.len() == STEP || allocator.stats().all.reserved.current > reserved);
            assert_eq!(allocator.stats().cache_bytes, kept);
        }
    });
}
