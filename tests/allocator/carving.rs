//! How blocks are cut out of segments, found, split and merged.

use crate::common::prelude::*;
use cualloc::allocator::{BlockInfo, BlockState};

fn blocks(allocator: &Allocator) -> Vec<BlockInfo> {
    let segments = allocator.snapshot();
    segments.into_iter().flat_map(|s| s.blocks).collect()
}

fn block_at(allocator: &Allocator, address: u64) -> BlockInfo {
    let mut all = blocks(allocator).into_iter();
    all.find(|b| b.address == address).expect("no block there")
}

/// Blocks of the given sizes, one behind the other.
fn row<const N: usize>(allocator: &Allocator, stream: &Stream, sizes: [usize; N]) -> [Block; N] {
    let blocks = sizes.map(|bytes| allocator.allocate(bytes, stream).unwrap());
    for pair in blocks.windows(2) {
        assert_eq!(pair[0].ptr() + pair[0].size(), pair[1].ptr());
    }
    blocks
}

/// S1.1, S1.3, S1.4: the sizes that are requested from the driver.
#[test]
fn s1_1_s1_3_s1_4_segments_have_the_classic_sizes() {
    only(Policy::Classic, |rig| {
        let stream = rig.stream();
        for (request, segment) in [
            (MIB, 2 * MIB),
            (1, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB - 511, 10 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 1, 12 * MIB),
            (33 * MIB, 34 * MIB),
        ] {
            let allocator = rig.checked();
            let held = segment as u64;
            let _block = allocator.allocate(request, &stream).unwrap();
            assert_eq!(allocator.stats().all.reserved.current, held, "{request}");
            rig.assert_held(held);
        }
    });
}

/// S1.2: a block's size is the request rounded up to 512 bytes.
#[test]
fn s1_2_blocks_have_rounded_sizes() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        for (request, size) in [(1, 512), (511, 512), (512, 512), (513, 1024), (1025, 1536)] {
            let block = allocator.allocate(request, &stream).unwrap();
            assert_eq!(block.size(), size, "{request}");
            assert_eq!(allocator.usable_size(block.ptr()), Some(size));
            assert_eq!(allocator.stats().all.allocated.current, size);
            assert_eq!(allocator.stats().all.requested.current, request as u64);
        }
    });
}

/// S1.5: small up to the border, large above it, and neither serves the other.
#[test]
fn s1_5_blocks_keep_their_pool() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let border = if rig.packed() { 64 * KIB } else { MIB };
        let small = allocator.allocate(border, &stream).unwrap();
        let large = allocator.allocate(border + 1, &stream).unwrap();
        assert!(allocator.block_of(small.ptr()).unwrap().small);
        assert!(!allocator.block_of(large.ptr()).unwrap().small);
        let (freed_large, freed_small) = (large.ptr(), small.ptr());
        drop(large);
        drop(small);
        // A hole in the large pool is no place for a small block, nor the other way round.
        let again = allocator.allocate(512, &stream).unwrap();
        assert!(allocator.block_of(again.ptr()).unwrap().small);
        assert_eq!(again.ptr(), freed_small);
        let other = allocator.allocate(border + 513, &stream).unwrap();
        assert!(!allocator.block_of(other.ptr()).unwrap().small);
        assert_eq!(other.ptr(), freed_large);
        let stats = allocator.stats();
        assert_eq!(stats.small.allocations.current, 1);
        assert_eq!(stats.large.allocations.current, 1);
    });
}

/// Makes stream caches merge the freed blocks that they keep unmerged. Releases nothing.
fn merge(allocator: &Allocator) {
    assert_eq!(allocator.trim(u64::MAX).unwrap().released, 0);
}

/// S1.6: exact best fit, the lowest address on ties.
#[test]
fn s1_6_smallest_sufficient_block_then_lowest_address() {
    each(|rig| {
        // Small pool, then large pool. What the packed policy keeps in stream caches is handed out latest
        // first, so its smaller unit is one of the large arena, too.
        let small = if rig.packed() { 512 * KIB } else { 1024 };
        for unit in [small, 4 * MIB] {
            let (allocator, [stream]) = rig.scene();
            // Separators keep the free blocks apart.
            let sizes = [4 * unit, unit, unit, unit, 2 * unit, unit, unit, unit];
            if unit > MIB {
                // One segment for all.
                let bytes = sizes.iter().sum();
                allocator.reserve(bytes, &stream).unwrap();
            }
            let [big, _s1, first, _s2, double, _s3, second, _s4] = row(&allocator, &stream, sizes);
            let expected = [first.ptr(), second.ptr(), double.ptr(), big.ptr()];
            // The order of the frees does not matter.
            drop((second, big, first, double));
            let want = unit - unit / 4;
            let mut used = Vec::new();
            for (at, address) in expected.into_iter().enumerate() {
                let block = allocator.allocate(want, &stream).unwrap();
                assert_eq!(block.ptr(), address, "unit {unit}, choice {at}");
                // Use it up, so that the next choice is another block.
                let rest = [unit, unit, 2 * unit, 4 * unit][at] - block.size() as usize;
                if rest > 0 {
                    let filler = allocator.allocate(rest, &stream).unwrap();
                    assert_eq!(filler.ptr(), address + block.size());
                    used.push(filler);
                }
                used.push(block);
            }
        }
    });
}

#[test]
fn s1_7_free_blocks_of_another_stream_are_not_found() {
    each(|rig| {
        for bytes in [4 * KIB, 4 * MIB] {
            let (allocator, [a, b]) = rig.scene();
            // Make both streams known.
            drop(allocator.allocate(bytes, &a).unwrap());
            let block = allocator.allocate(bytes, &b).unwrap();
            let ptr = block.ptr();
            let hold = rig.hold(&b);
            rig.stamp(ptr, bytes, 1, &b);
            drop(block);
            let other = allocator.allocate(bytes, &a).unwrap();
            assert_ne!(other.ptr(), ptr);
            rig.stamp(other.ptr(), bytes, 2, &a);
            let own = allocator.allocate(bytes, &b).unwrap();
            assert_eq!(own.ptr(), ptr, "the own stream needs no wait");
            hold.release();
        }
    });
}

/// S1.8: a small block is split where at least 512 bytes remain.
#[test]
fn s1_8_small_blocks_split_from_one_granule_on() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let [block, _separator] = row(&allocator, &stream, [2048, 512]);
        let ptr = block.ptr();
        drop(block);
        merge(&allocator);
        for (request, size) in [(1024, 1024), (1800, 2048), (1536, 1536), (1, 512)] {
            let block = allocator.allocate(request, &stream).unwrap();
            assert_eq!((block.ptr(), block.size()), (ptr, size), "{request}");
            drop(block);
            merge(&allocator);
        }
    });
}

/// S1.9: a large block is split where more than 1 MiB remains.
#[test]
fn s1_9_large_blocks_split_above_one_mebibyte() {
    only(Policy::Classic, |rig| {
        let (allocator, [stream]) = rig.scene();
        let [block, _separator] = row(&allocator, &stream, [4 * MIB, 2 * MIB]);
        let ptr = block.ptr();
        drop(block);
        for (request, size) in [
            (2 * MIB, 2 * MIB),
            (3 * MIB + 512 * KIB, 4 * MIB),
            (3 * MIB, 4 * MIB),
            (3 * MIB - 512, 3 * MIB - 512),
        ] {
            let block = allocator.allocate(request, &stream).unwrap();
            assert_eq!(block.ptr(), ptr, "{request}");
            assert_eq!(block.size(), size as u64, "{request}");
        }
    });
}

/// S1.10: the head is handed out; the tail is a free block of the same kind behind it.
#[test]
fn s1_10_split_hands_out_the_head_and_keeps_the_tail() {
    each(|rig| {
        for (first, second, end) in [(8192, 2048, 512), (12 * MIB, 4 * MIB, 2 * MIB)] {
            let (allocator, [stream]) = rig.scene();
            allocator.reserve(first + end, &stream).unwrap();
            merge(&allocator);
            let [whole, separator] = row(&allocator, &stream, [first, end]);
            let ptr = whole.ptr();
            drop(whole);
            merge(&allocator);
            let before = block_at(&allocator, ptr);
            assert_eq!(before.size, first as u64);
            let head = allocator.allocate(second, &stream).unwrap();
            assert_eq!((head.ptr(), head.size()), (ptr, second as u64));
            let tail = block_at(&allocator, ptr + second as u64);
            assert_eq!(tail.size, (first - second) as u64);
            assert_eq!(tail.state, BlockState::Free);
            assert_eq!(tail.stream, Some(stream.id().unwrap()));
            assert_eq!(tail.stream, before.stream);
            assert_eq!((tail.device, tail.small), (before.device, before.small));
            // Right neighbour: nothing between it and the head, or it and the separator.
            let all = blocks(&allocator);
            let at = all.iter().position(|b| b.address == ptr).unwrap();
            assert_eq!(all[at + 1], tail);
            assert_eq!(all[at + 2].address, separator.ptr());
            assert!(all[at].is_split && tail.is_split);
        }
    });
}

/// Three blocks of two, two and four units, and one behind them.
fn neighbours(allocator: &Allocator, stream: &Stream, unit: usize) -> [Block; 4] {
    allocator.reserve(9 * unit, stream).unwrap();
    merge(allocator);
    row(allocator, stream, [2 * unit, 2 * unit, 4 * unit, unit])
}

/// S1.11: a freed block joins its free neighbours on both sides.
#[test]
fn s1_11_free_merges_with_both_neighbours() {
    each(|rig| {
        for unit in [1024, 2 * MIB] {
            let (allocator, [stream]) = rig.scene();
            let [left, middle, right, _separator] = neighbours(&allocator, &stream, unit);
            let ptr = left.ptr();
            drop((left, right));
            merge(&allocator);
            assert_eq!(block_at(&allocator, ptr).size, 2 * unit as u64);
            drop(middle);
            merge(&allocator);
            let whole = block_at(&allocator, ptr);
            assert_eq!(whole.size, 8 * unit as u64);
            assert_eq!(whole.state, BlockState::Free);
            let again = allocator.allocate(8 * unit, &stream).unwrap();
            assert_eq!(again.ptr(), ptr);
        }
    });
}

/// S1.12: a neighbour that another stream still uses is not merged, and keeps its size.
#[test]
fn s1_12_pending_neighbour_is_not_merged() {
    each(|rig| {
        for unit in [1024, 2 * MIB] {
            let (allocator, [stream, other]) = rig.scene();
            let [left, middle, right, _separator] = neighbours(&allocator, &stream, unit);
            let (first, second) = (left.ptr(), middle.ptr());
            let hold = rig.hold(&other);
            left.record_stream(&other).unwrap();
            drop((left, middle, right));
            merge(&allocator);
            let pending = block_at(&allocator, first);
            assert_eq!(pending.size, 2 * unit as u64);
            assert_eq!(pending.state, BlockState::Pending);
            assert!(pending.pending.contains(&other.id().unwrap()));
            // In the packed large arena pieces of different age stay apart until complete.
            let free = block_at(&allocator, second);
            assert_eq!(free.state, BlockState::Free);
            if unit < MIB || !rig.packed() {
                assert_eq!(free.size, 6 * unit as u64);
            }
            let taken = allocator.allocate(6 * unit, &stream).unwrap();
            assert_eq!(taken.ptr(), second, "the run beside it serves");
            hold.release();
        }
    });
}

/// S1.13: an invalid free is an error and changes nothing.
#[test]
fn s1_13_unknown_and_double_frees_are_refused() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let [block, neighbour] = row(&allocator, &stream, [2048, 2048]);
        let (ptr, end) = (block.into_raw(), neighbour.ptr() + neighbour.size());
        let refuse = |ptr: u64, expected: fn(&Error) -> bool| {
            let (stats, blocks) = (allocator.stats(), blocks(&allocator));
            let error = allocator.raw_free(ptr).unwrap_err();
            assert!(expected(&error), "{ptr:#x}: {error:?}");
            assert_eq!(allocator.stats(), stats);
            assert_eq!(self::blocks(&allocator), blocks);
            allocator.check().unwrap();
        };
        refuse(ptr + 512, |e| matches!(e, Error::InteriorPointer { .. }));
        refuse(ptr + 1, |e| matches!(e, Error::InteriorPointer { .. }));
        refuse(end, |e| matches!(e, Error::NotLive { .. }));
        refuse(0, |e| matches!(e, Error::NotOurs { .. }));
        refuse(0xdead_0000, |e| matches!(e, Error::NotOurs { .. }));
        refuse(u64::MAX, |e| matches!(e, Error::NotOurs { .. }));
        allocator.raw_free(ptr).unwrap();
        refuse(ptr, |e| matches!(e, Error::NotLive { .. }));
    });
}

/// S1.13: a former block in the middle of merged free memory is not a live block any more.
#[test]
fn s1_13_pointers_into_merged_memory_are_dead() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        for bytes in [512, 3000, 24 << 10] {
            // More than are kept apart: some of them merge as they are freed.
            let blocks: Vec<Block> = allocator.allocate_blocks(60, bytes, &stream);
            let (even, odd): (Vec<_>, Vec<_>) = blocks
                .into_iter()
                .enumerate()
                .partition(|(at, _)| at % 2 == 0);
            let all: Vec<u64> = even.iter().chain(&odd).map(|(_, b)| b.ptr()).collect();
            // In this order each of the second half has free neighbours.
            drop(even);
            merge(&allocator);
            drop(odd);
            for merged in [false, true] {
                if merged {
                    merge(&allocator);
                }
                let before = allocator.stats();
                for ptr in &all {
                    let freed = allocator.raw_free(*ptr);
                    assert_matches!(freed, Err(Error::NotLive { .. }));
                    assert!(!allocator.owns(*ptr));
                }
                assert_eq!(allocator.stats(), before);
                allocator.check().unwrap();
            }
        }
    });
}

/// S1.14: the properties of a block can be read.
#[test]
fn s1_14_block_metadata_is_readable() {
    each(|rig| {
        let (allocator, [stream, reader]) = rig.scene();
        let [block, neighbour] = row(&allocator, &stream, [1000, 512]);
        block.record_stream(&reader).unwrap();
        let info = allocator.block_of(block.ptr() + 700).unwrap();
        assert_eq!(info.device, Some(0));
        assert_eq!((info.address, info.size), (block.ptr(), 1024));
        assert_eq!(info.requested, 1000);
        assert_eq!(info.stream, Some(stream.id().unwrap()));
        assert_eq!(info.pending, [reader.id().unwrap()]);
        assert_eq!(info.state, BlockState::Live);
        assert!(info.small && info.is_split);
        assert_eq!(allocator.block_of(neighbour.ptr() + 512), None);
        // A segment of its own has no neighbour.
        let alone = allocator.allocate(32 * MIB, &stream).unwrap();
        let info = allocator.block_of(alone.ptr()).unwrap();
        assert!(!info.small);
        // In an arena it may have one.
        assert!(!info.is_split || rig.packed());
        let ptr = neighbour.ptr();
        drop(neighbour);
        assert_eq!(allocator.block_of(ptr), None);
        assert_eq!(block_at(&allocator, ptr).state, BlockState::Free);
    });
}

/// S1.16: recording a use of an address without a live block is an error.
#[test]
fn s1_16_recording_needs_a_live_block() {
    each(|rig| {
        let (allocator, [stream, reader]) = rig.scene();
        let block = allocator.allocate(4096, &stream).unwrap();
        let ptr = block.ptr();
        block.record_stream(&reader).unwrap();
        let info = allocator.block_of(ptr).unwrap();
        assert_eq!(info.pending, [reader.id().unwrap()]);
        drop(block);
        let stats = allocator.stats();
        for (ptr, ours) in [(ptr, true), (ptr + 8, true), (0x77, false), (0, false)] {
            for error in [
                allocator.raw_record_stream(ptr, reader.raw()),
                allocator.raw_record_use(ptr, reader.raw()),
            ] {
                match error {
                    Err(Error::NotLive { .. }) if ours => {}
                    Err(Error::NotOurs { .. }) if !ours => {}
                    other => panic!("{ptr:#x}: {other:?}"),
                }
            }
        }
        assert_eq!(allocator.stats(), stats);
    });
}

/// S1.17: releasable memory returns to the driver; the rest stays reserved.
#[test]
fn s1_17_empty_cache_releases_free_memory() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let _pinned = allocator.allocate(2 * MIB, &stream).unwrap();
        let freed = [30 * MIB, 24 * MIB].map(|b| allocator.allocate(b, &stream).unwrap());
        let _small = allocator.allocate(1000, &stream).unwrap();
        drop(freed);
        stream.synchronize().unwrap();
        allocator.synchronize().unwrap();
        let before = allocator.stats().all.reserved.current;
        let trimmed = allocator.empty_cache().unwrap();
        let stats = allocator.stats();
        assert!(trimmed.released >= 54 * MIB as u64, "{trimmed:?}");
        assert_eq!(before - trimmed.released, stats.all.reserved.current);
        assert!(stats.all.reserved.current >= stats.all.allocated.current);
        // The remaining memory contains live blocks.
        let expected = if rig.packed() { 2 + 2 } else { 20 + 2 };
        assert_eq!(stats.all.reserved.current, (expected * MIB) as u64);
        for segment in allocator.snapshot() {
            let live = |b: &BlockInfo| b.state == BlockState::Live;
            assert!(segment.blocks.iter().any(live), "{segment:?}");
        }
        rig.assert_held(stats.all.reserved.current);
    });
}
