//! The figures agree with the contents of the heap after every kind of call.

use crate::common::prelude::*;
use crate::common::rng::Rng;
use cualloc::allocator::{BlockState, Stats};
use cualloc::error::InvalidArgument;

impl Rng {
    /// Sizes over many powers of two.
    fn size(&mut self, bits: usize) -> usize {
        let top = 1 << (4 + self.index(bits - 3));
        1 + self.index(top)
    }
}

/// The figures found by a walk over all segments.
#[derive(Debug, Default, PartialEq, Eq)]
struct Walk {
    reserved: u64,
    allocated: u64,
    requested: u64,
    free: u64,
    blocks: u64,
    small: u64,
    /// Bytes aliased at home, and bytes of blocks in views.
    aliased: u64,
    viewed: u64,
}

fn walk(allocator: &Allocator) -> Walk {
    let mut sum = Walk::default();
    for segment in allocator.snapshot() {
        // A view is a second layout of bytes that are counted where they are held.
        if !segment.view {
            sum.reserved += segment.size;
        }
        let mut end = segment.address;
        for block in segment.blocks {
            assert!(block.address == end || segment.view, "a gap or an overlap");
            end += block.size;
            match block.state {
                BlockState::Aliased => sum.aliased += block.size,
                BlockState::Live => {
                    sum.allocated += block.size;
                    sum.requested += block.requested;
                    sum.blocks += 1;
                    if segment.view {
                        sum.viewed += block.size;
                    }
                    if block.small {
                        sum.small += block.size;
                    }
                }
                _ => sum.free += block.size,
            }
        }
        assert!(end == segment.address + segment.size || segment.view);
    }
    sum
}

/// S1.38: the counters equal what a walk over all segments finds, and what the driver provided.
#[test]
fn s1_38_counters_equal_a_walk() {
    each(|rig| {
        for lag in [0, 6] {
            let allocator = rig.checked_limit(GIB);
            let streams: [Stream; 3] = rig.streams();
            rig.set_mode(Mode::Lag(lag));
            let mut random = Rng::new(88_172_645 + lag);
            let mut live: Vec<Block> = Vec::new();
            for step in 0..4000 {
                match random.index(20) {
                    0 => {
                        let at = random.index(live.len() + 1);
                        if let Some(block) = live.get(at) {
                            block.record_stream(&streams[random.index(3)]).unwrap();
                        }
                    }
                    1 if step % 11 == 0 => {
                        allocator.trim(0).unwrap();
                    }
                    2..=10 if live.len() < 200 => {
                        let bytes = random.size(24);
                        match allocator.allocate(bytes, &streams[random.index(3)]) {
                            Ok(block) => live.push(block),
                            Err(error) => assert!(error.is_out_of_memory(), "{error:?}"),
                        }
                    }
                    _ if !live.is_empty() => {
                        live.swap_remove(random.index(live.len()));
                    }
                    _ => {}
                }
                rig.advance_row();
                if step % 25 == 0 {
                    let (stats, walk) = (allocator.stats(), walk(&allocator));
                    let all = stats.all;
                    assert_eq!(walk.aliased, walk.viewed);
                    assert_eq!(walk.reserved, all.reserved.current);
                    assert_eq!(walk.allocated, all.allocated.current);
                    assert_eq!(walk.requested, all.requested.current);
                    assert_eq!(walk.blocks, all.allocations.current);
                    assert_eq!(walk.small, stats.small.allocated.current);
                    assert_eq!(walk.free, stats.cached());
                    assert_eq!(live.len() as u64, walk.blocks);
                    let sizes: u64 = live.iter().map(Block::size).sum();
                    assert_eq!(sizes, walk.allocated);
                    rig.assert_held(walk.reserved);
                    allocator.check().unwrap();
                }
            }
            live.clear();
        }
    });
}

/// S1.39: memory that `empty_cache` released serves no later request.
#[test]
fn s1_39_released_memory_is_not_reused() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        drop(allocator.allocate(MIB, &stream).unwrap());
        drop(allocator.allocate(512, &stream).unwrap());
        stream.synchronize().unwrap();
        let kept = allocator.allocate(512, &stream).unwrap();
        allocator.synchronize().unwrap();
        allocator.trim(0).unwrap();
        let reserved = allocator.stats().all.reserved.current;
        assert_eq!(reserved, 2 * MIB as u64);
        rig.assert_held(reserved);
        drop(kept);
        allocator.synchronize().unwrap();
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!(trimmed.pending, 0);
        assert_eq!(allocator.stats().all.reserved.current, 0);
        for bytes in [MIB, 512, 6 * MIB] {
            let block = allocator.allocate(bytes, &stream).unwrap();
            let (start, end) = (block.ptr(), block.ptr() + block.size());
            let inside = |s: &cualloc::allocator::SegmentInfo| {
                s.address <= start && end <= s.address + s.size
            };
            assert!(allocator.snapshot().iter().any(inside), "{bytes}");
            rig.stamp(start, bytes, 5, &stream);
            assert_eq!(rig.mismatches(start, bytes, 5, &stream), 0);
        }
    });
}

/// S1.41: the number of records follows the live blocks, not the history. 10^7 pairs without
/// optimisation take longer than a test should, so an unoptimised build makes 2 * 10^6; both policies count.
#[test]
fn s1_41_metadata_is_bounded() {
    let pairs = if cfg!(debug_assertions) {
        1_000_000
    } else {
        5_000_000
    };
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let mut random = Rng::new(4711);
        let mut live: Vec<Option<Block>> = (0..64).map(|_| None).collect();
        let mut peak = 0;
        for _ in 0..pairs {
            let slot = random.index(64);
            live[slot] = None;
            let bytes = random.size(16);
            live[slot] = Some(allocator.allocate(bytes, &stream).unwrap());
            peak = peak.max(allocator.stats().all.allocations.current);
        }
        let stats = allocator.stats();
        assert!(peak == 64 && stats.all.allocations.total_allocated >= pairs);
        assert!(stats.nodes <= 4 * peak, "{} records", stats.nodes);
        live.clear();
    });
}

/// S1.43: a panic in a hook is caught, and counts as nothing freed; every call works afterwards.
#[test]
fn s1_43_panic_in_a_hook_poisons_nothing() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [stream]) = rig.scene_limit(BLOCK);
        let first = allocator.allocate(BLOCK, &stream).unwrap();
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("panics", |_| {
            panic!("on purpose")
        }));
        let stats = allocator.stats();
        let asked = || allocator.stats().reclaim.hooks;
        let refused = allocator.allocate(BLOCK, &stream).unwrap_err();
        assert!(refused.is_out_of_memory());
        assert_eq!(asked(), 1);
        allocator.check().unwrap();
        let after = allocator.stats();
        assert_eq!(after.all, stats.all, "queries tell the truth");
        assert_ne!(after.all.allocated.current, 0);
        // Again, and in a second thread.
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| allocator.allocate(BLOCK, &stream).map(drop));
            let refused = thread.join().expect("the panic was not let through");
            assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        });
        assert_eq!(asked(), 2);
        assert!(allocator.remove_relief_hook("panics"));
        let refused = allocator.allocate(BLOCK, &stream).unwrap_err();
        assert!(refused.is_out_of_memory());
        assert!(allocator.owns(first.ptr()));
        assert_eq!(allocator.snapshot().len(), 1);
        drop(first);
        let _second = allocator.allocate(BLOCK, &stream).unwrap();
    });
}

/// S1.44: another allocator's block is an error and leaves all counters alone.
#[test]
fn s1_44_foreign_blocks_are_refused() {
    each(|rig| {
        let (mine, yours) = (rig.allocator(), rig.allocator());
        let stream = rig.stream();
        drop(mine.allocate(4 * KIB, &stream).unwrap());
        for bytes in [4 * KIB, 4 * MIB] {
            let block = yours.allocate(bytes, &stream).unwrap();
            let before = (mine.stats(), yours.stats());
            for result in [
                mine.raw_free(block.ptr()),
                mine.raw_record_stream(block.ptr(), stream.raw()),
            ] {
                assert_matches!(result, Err(Error::NotOurs { .. }));
            }
            assert_eq!(mine.usable_size(block.ptr()), None);
            assert!(!mine.owns(block.ptr()) && yours.owns(block.ptr()));
            assert_eq!((mine.stats(), yours.stats()), before);
        }
        mine.check().unwrap();
        mine.close().unwrap();
        yours.close().unwrap();
    });
}

/// S1.45: alignment, device, events, lack of memory: each has a specific result.
#[test]
fn s1_45_every_special_case_has_a_result() {
    for policy in [Policy::Packed, Policy::Classic] {
        only_on(policy, SimConfig::with_devices(2, GIB as u64), |rig| {
            let allocator = rig.limited(64 * MIB);
            let stream = rig.stream();
            for alignment in [0, 3, 513, 4 << 20, usize::MAX] {
                let refused = allocator.allocate_with(Request::new(512).align(alignment), &stream);
                assert_matches!(
                    refused,
                    Err(Error::Invalid(InvalidArgument::Alignment { .. })),
                    "{alignment}"
                );
            }
            let mut kept = Vec::new();
            for alignment in [1, 256, 512, 4096, 1 << 16, 1 << 20, 2 << 20] {
                for bytes in [512, 3 * MIB] {
                    let request = Request::new(bytes).align(alignment);
                    let block = allocator.allocate_with(request, &stream).unwrap();
                    assert_eq!(block.ptr() % alignment as u64, 0, "{alignment}");
                    rig.stamp(block.ptr(), bytes, 1, &stream);
                    kept.push(block);
                }
                kept.pop();
            }
            kept.clear();
            allocator.check().unwrap();
            // Lack of memory: everything else is tried first, and the error says what there is.
            let error = allocator.allocate(65 * MIB, &stream).unwrap_err();
            assert!(error.is_out_of_memory());
            // Events: a use elsewhere makes a marker, none does not.
            let other = rig.stream();
            let block = allocator.allocate(12 * MIB, &stream).unwrap();
            block.record_stream(&other).unwrap();
            let before = allocator.stats().markers;
            drop(block);
            assert!(allocator.stats().markers > before);
            // Device: memory is not handed out on another device's stream.
            match rig.driver.device(1) {
                Err(_) => eprintln!("SKIPPED in part: needs two devices"),
                Ok(device) => {
                    let second = Context::primary(&device).unwrap();
                    let foreign = Stream::new(&second).unwrap();
                    let error = allocator.allocate(512, &foreign).unwrap_err();
                    assert_matches!(
                        error,
                        Error::WrongDevice {
                            expected: 0,
                            found: 1
                        }
                    );
                }
            }
            rig.close(&allocator);
            assert_matches!(allocator.allocate(512, &stream), Err(Error::Closed));
        });
    }
}

/// S1.42: sizes near the maximum are errors before any driver call.
#[test]
fn s1_42_huge_sizes_ask_nothing_of_the_driver() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        drop(allocator.allocate(512, &stream).unwrap());
        let (calls, stats) = (rig.driver.calls().total(), allocator.stats());
        for bytes in [0, usize::MAX, usize::MAX - 511, 1 << 63, (1 << 40) + 1] {
            let error = allocator.allocate(bytes, &stream).unwrap_err();
            assert_matches!(
                error,
                Error::Invalid(InvalidArgument::Size { .. }),
                "{bytes}"
            );
        }
        assert_eq!(rig.driver.calls().total(), calls);
        assert_eq!(allocator.stats(), stats);
        // Within reason but beyond the device: out of memory, and nothing is left of the attempt.
        let error = allocator.allocate(1 << 40, &stream).unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
        let after = allocator.stats().all;
        assert_eq!(after.allocated.current, stats.all.allocated.current);
    });
}

/// No stream alone has as much room below the peak as a request needs, but all of them together do: the peak does not
/// change.
#[test]
fn s1_19_room_below_the_peak_is_shared() {
    each(|rig| {
        let allocator = rig.allocator();
        let streams = [(); 4].map(|()| rig.stream());
        let allocate = |kib: usize, stream| allocator.allocate(kib << 10, stream).unwrap();
        let mut blocks: Vec<_> = (0..8).map(|n| allocate(16, &streams[n % 4])).collect();
        let peak = allocator.stats().all.allocated.peak;
        assert_eq!(peak, 128 << 10);
        blocks.truncate(4);
        // 64 KiB of room in four parts.
        blocks.push(allocate(40, &streams[0]));
        allocator.check().unwrap();
        blocks.push(allocate(16, &streams[1]));
        blocks.push(allocate(8, &streams[2]));
        allocator.check().unwrap();
        assert_eq!(allocator.stats().all.allocated.peak, peak);
        blocks.push(allocate(1, &streams[3]));
        assert_eq!(allocator.stats().all.allocated.peak, peak + 1024);
        allocator.check().unwrap();
    });
}

/// With small blocks of one stream, all peaks are exact; with several streams, those of requested bytes and of numbers
/// are bounds, which are never below an observed value, nor above what can have been live.
#[test]
fn s1_19_peaks_are_exact_or_bounds() {
    each(|rig| {
        let allocator = rig.allocator();
        let streams = [rig.stream(), rig.stream(), rig.stream()];
        let mut blocks: Vec<_> = (0..50)
            .map(|n| allocator.allocate(700 + 100 * n, &streams[0]).unwrap())
            .collect();
        blocks.truncate(10);
        let requested = (0..50).map(|n| 700 + 100 * n).sum::<usize>() as u64;
        let all = allocator.stats().all;
        assert_eq!((all.requested.peak, all.allocations.peak), (requested, 50));
        // In turn: one stream's rise is another one's fall.
        for round in 0..60 {
            let stream = &streams[round % 3];
            for n in 0..20 {
                blocks.push(allocator.allocate(1 + 977 * n, stream).unwrap());
            }
            blocks.drain(..20);
            let all = allocator.stats().all;
            assert!(all.requested.peak >= requested.max(all.requested.current));
            assert!(all.requested.peak <= all.allocated.peak);
            assert!(all.allocations.peak >= 50.max(all.allocations.current));
            assert!(all.allocations.peak * 512 <= all.allocated.peak);
            allocator.check().unwrap();
        }
        allocator.reset_peaks();
        let all = allocator.stats().all;
        assert_eq!(all.requested.peak, all.requested.current);
        assert_eq!(all.allocations.peak, all.allocations.current);
    });
}

/// S1.19: all figures, and the reset of peaks.
#[test]
fn s1_19_statistics_say_what_happened() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let mut untouched = Stats::default();
        untouched.headroom = allocator.stats().headroom;
        assert_eq!(allocator.stats(), untouched);
        let first = allocator.allocate(5 * MIB + 1, &stream).unwrap();
        let second = allocator.allocate(MIB, &stream).unwrap();
        let stats = allocator.stats();
        let rounded = (6 * MIB + 512) as u64;
        assert_eq!(stats.all.allocated.current, rounded);
        assert_eq!(stats.all.requested.current, (6 * MIB + 1) as u64);
        assert_eq!(stats.all.allocations.current, 2);
        assert_eq!(stats.hits + stats.misses, 2);
        assert_eq!(stats.cached(), stats.all.reserved.current - rounded);
        drop(first);
        let stats = allocator.stats();
        assert_eq!(stats.all.allocated.current, MIB as u64);
        assert_eq!(stats.all.allocated.peak, rounded);
        assert!(stats.free_blocks > 0);
        drop(allocator.allocate(5 * MIB, &stream).unwrap());
        assert!(allocator.stats().hits > stats.hits);
        allocator.reset_peaks();
        assert_eq!(allocator.stats().all.allocated.peak, MIB as u64);
        drop(second);
        allocator.reset_peaks();
        let stats = allocator.stats();
        assert_eq!(stats.all.allocated.peak, 0);
        assert_eq!(stats.all.reserved.peak, stats.all.reserved.current);
        assert_eq!(
            stats.all.allocated.total_freed,
            stats.all.allocated.total_allocated
        );
    });
}

/// S1.19: free blocks, the largest of them and records count small blocks, as the snapshot shows them.
#[test]
fn s1_19_small_blocks_count_as_free_blocks_and_records() {
    each(|rig| {
        let allocator = rig.allocator();
        let streams: [Stream; 2] = rig.streams();
        let compare = |allocator: &Allocator, what: &str| {
            let (stats, segments) = allocator.stats_and_snapshot();
            let blocks = segments.iter().flat_map(|segment| &segment.blocks);
            let live = blocks.clone().filter(|b| b.state == BlockState::Live);
            let free = blocks.filter(|b| matches!(b.state, BlockState::Free | BlockState::Pending));
            let sizes: Vec<u64> = free.map(|block| block.size).collect();
            assert_eq!(stats.free_blocks, sizes.len() as u64, "{what}");
            let largest = sizes.iter().max().copied();
            assert_eq!(stats.largest_free, largest.unwrap_or(0), "{what}");
            assert!(
                stats.nodes >= stats.free_blocks + live.count() as u64,
                "{what}"
            );
            allocator.check().unwrap();
            stats.free_blocks
        };
        let mut blocks: Vec<Option<Block>> = (0..1000)
            .map(|at| allocator.allocate(1 + at % 7 * 900, &streams[at / 2 % 2]))
            .map(Result::ok)
            .collect();
        let before = compare(&allocator, "all live");
        blocks.iter_mut().step_by(2).for_each(|block| *block = None);
        assert!(compare(&allocator, "every second one free") > before + 200);
        for block in blocks.iter().flatten().step_by(3) {
            block.record_stream(&streams[0]).unwrap();
        }
        blocks.clear();
        compare(&allocator, "some pending");
        drop(allocator.allocate(3 * MIB, &streams[0]).unwrap());
        compare(&allocator, "a large one free");
        allocator.empty_cache().unwrap();
        compare(&allocator, "cache empty");
        rig.close(&allocator);
        // Enough blocks to leave the heap without a longer free piece.
        let full = rig.limited(2 * MIB);
        let next = || full.allocate(8 * KIB, &streams[0]).ok();
        let mut blocks: Vec<Option<Block>> = std::iter::from_fn(next).map(Some).collect();
        blocks.iter_mut().step_by(2).for_each(|block| *block = None);
        assert_eq!(compare(&full, "the heap full"), 128);
        blocks.clear();
        rig.close(&full);
    });
}

/// With the feature `serde`, values serialise under the names of their fields, and enumerations as their names.
#[test]
fn statistics_and_snapshots_are_serialised() {
    each(|rig| {
        let allocator = rig.allocator();
        let block = allocator.allocate(MIB, &rig.stream()).unwrap();
        let stats = serde_json::to_value(allocator.stats()).unwrap();
        assert_eq!(stats["all"]["allocated"]["current"], MIB);
        assert_eq!(stats["limit"], serde_json::Value::Null);
        assert_eq!(stats["packing"]["regime"], "plentiful");
        let segments = serde_json::to_value(allocator.snapshot()).unwrap();
        let blocks = segments.as_array().unwrap().iter();
        let mut blocks = blocks.flat_map(|segment| segment["blocks"].as_array().unwrap());
        let live = blocks.find(|live| live["address"] == block.ptr()).unwrap();
        assert_eq!(
            (&live["state"], &live["requested"]),
            (&"live".into(), &MIB.into())
        );
    });
}
