//! The carving core on its own, over memory from elsewhere.

use crate::common::prelude::*;
use cualloc::allocator::{BlockInfo, BlockState, Carved, Carver, CarverStats, SegmentInfo};
use cualloc::error::InvalidArgument;

/// S1.15: the carving core counts what it finds, holds and hands out.
#[test]
fn s1_15_figures_of_the_carving_core() {
    let (mut carver, stream) = (Carver::new(), 1);
    assert_eq!(carver.stats(), CarverStats::default());
    assert_eq!(carver.find(stream, 1000).unwrap(), None);
    let first = carver.insert(0x4000_0000, 2 << 20, stream, 1000).unwrap();
    let second = carver.find(stream, 4096).unwrap().unwrap();
    let stats = carver.stats();
    assert_eq!((stats.hits, stats.misses), (1, 1));
    assert_eq!((stats.reserved, stats.allocated), (2 << 20, 5120));
    assert_eq!((stats.cached, stats.blocks), ((2 << 20) - 5120, 3));
    assert_eq!((stats.free_blocks, stats.peak), (1, 5120));
    carver.give_back(first.address).unwrap();
    let stats = carver.stats();
    assert_eq!((stats.allocated, stats.peak), (4096, 5120));
    assert_eq!((stats.blocks, stats.free_blocks), (3, 2));
    // A block pending on a stream is cached, and cannot be found.
    carver.record(second.address, 2).unwrap();
    carver.give_back(second.address).unwrap();
    let stats = carver.stats();
    assert_eq!((stats.allocated, stats.cached), (0, 2 << 20));
    assert_eq!((stats.blocks, stats.free_blocks), (3, 2));
    carver.complete(2);
    let stats = carver.stats();
    assert_eq!((stats.blocks, stats.free_blocks), (1, 1));
}

/// S1.15: find, insert, return, over memory from elsewhere.
#[test]
fn s1_15_the_carving_core_serves_an_external_provider() {
    let mut carver = Carver::new();
    let mut provider = 0x4000_0000u64;
    let mut segments = 0;
    let mut allocate = |carver: &mut Carver, stream: u64, bytes: usize| {
        if let Some(found) = carver.find(stream, bytes).unwrap() {
            return (found, segments);
        }
        segments += 1;
        let size = cualloc::allocator::size::classic_segment_size(bytes).unwrap();
        let base = provider;
        provider += size + MIB as u64;
        (carver.insert(base, size, stream, bytes).unwrap(), segments)
    };
    let at = |address, size| Carved { address, size };
    let (first, made) = allocate(&mut carver, 1, 1000);
    assert_eq!((first, made), (at(0x4000_0000, 1024), 1));
    let (second, made) = allocate(&mut carver, 1, 4096);
    assert_eq!((second, made), (at(0x4000_0400, 4096), 1));
    let (separator, _) = allocate(&mut carver, 1, 512);
    assert_eq!(carver.give_back(first.address).unwrap(), first);
    assert_eq!(carver.give_back(second.address).unwrap(), second);
    // Merged: 1024 + 4096.
    assert_eq!(allocate(&mut carver, 1, 5120).0, at(first.address, 5120));
    assert!(carver.give_back(first.address).is_ok());
    assert_matches!(carver.give_back(first.address), Err(Error::NotLive { ptr }) if ptr == first.address);
    // Another stream gets a segment of its own.
    let (foreign, made) = allocate(&mut carver, 2, 512);
    assert_eq!(made, 2);
    // Out of circulation until the other stream is through.
    let (shared, _) = allocate(&mut carver, 1, 5120);
    carver.record(shared.address, 2).unwrap();
    carver.give_back(shared.address).unwrap();
    let elsewhere = carver.find(1, 5120).unwrap().unwrap();
    assert_ne!(elsewhere.address, shared.address);
    assert_eq!(carver.remove_idle(), []);
    carver.complete(2);
    assert_eq!(carver.find(1, 5120).unwrap(), Some(shared));
    for block in [shared, elsewhere, separator, foreign] {
        carver.give_back(block.address).unwrap();
    }
    assert_eq!(carver.remove_idle().len(), 2);
    assert_eq!(carver.find(1, 1).unwrap(), None);
    assert!(carver.snapshot().is_empty());
}

/// S1.6, S1.7, S1.45: the search of the carving core in detail, and its errors.
#[test]
fn s1_6_s1_7_s1_45_carver_finds_and_refuses() {
    let mut carver = Carver::new();
    let mib = MIB as u64;
    let base = 16 * mib;
    let row: Vec<Carved> = std::iter::once(carver.insert(base, 2 * mib, 1, 1024).unwrap())
        .chain([512, 4096, 512, 1024, 512].map(|bytes| carver.find(1, bytes).unwrap().unwrap()))
        .collect();
    for at in [4, 2, 0] {
        carver.give_back(row[at].address).unwrap();
    }
    assert_eq!(carver.find(2, 768).unwrap(), None, "of another stream");
    for expected in [row[0], row[4]] {
        assert_eq!(carver.find(1, 768).unwrap(), Some(expected));
    }
    let third = carver.find(1, 768).unwrap().unwrap();
    assert_eq!((third.address, third.size), (row[2].address, 1024));
    // A segment below its request, overlapping, odd or wrapping.
    for (at, size, request) in [
        (64 * mib, mib, 2 * MIB),
        (base + mib, 2 * mib, 1),
        (base - mib, 2 * mib, 1),
        (64 * mib + 1, 2 * mib, 1),
        (64 * mib, 0, 1),
        (u64::MAX - 511, 2 * mib, 1),
        (64 * mib, 2 * mib, usize::MAX),
    ] {
        let before = carver.snapshot();
        let error = carver.insert(at, size, 1, request).unwrap_err();
        assert_eq!(carver.snapshot(), before, "{error}");
    }
    let refused = carver.insert(64 * mib, mib, 1, 2 * MIB);
    assert_matches!(
        refused,
        Err(Error::Invalid(InvalidArgument::TooSmall { usable, needed }))
            if (usable, needed) == (MIB, 2 * MIB)
    );
    // Segments may adjoin.
    for at in [base - 2 * mib, base + 2 * mib] {
        assert_eq!(carver.insert(at, 2 * mib, 1, 1).unwrap().address, at);
    }
    assert!(carver.record(7, 1).is_err());
    assert!(carver.find(1, usize::MAX).is_err());
}

/// S1.15: a snapshot of the carving core describes each block, and for which other streams it waits.
#[test]
fn s1_15_blocks_of_the_carving_core_are_described() {
    let (mut carver, mib) = (Carver::new(), MIB as u64);
    let large = carver.insert(64 * mib, 20 * mib, 1, 12 * MIB).unwrap();
    let small = carver.insert(16 * mib, 2 * mib, 1, 1000).unwrap();
    // Its own stream is no other one.
    carver.record(small.address, 1).unwrap();
    carver.record(small.address, 2).unwrap();
    let first = |carver: &Carver| {
        let snapshot = carver.snapshot();
        let of = |segment: &SegmentInfo| (segment.address, segment.small);
        assert_eq!(of(&snapshot[0]), (16 * mib, true));
        assert_eq!(of(&snapshot[1]), (64 * mib, false));
        for segment in &snapshot {
            let of_segment = |block: &BlockInfo| block.small == segment.small;
            assert!(segment.blocks.iter().all(of_segment));
        }
        let block = snapshot[0].blocks[0].clone();
        assert_eq!(block.stream, Some(1));
        (block.state, block.requested, block.pending, block.is_split)
    };
    assert_eq!(first(&carver), (BlockState::Live, 1000, vec![2], true));
    carver.give_back(small.address).unwrap();
    for other in [1, 3] {
        carver.complete(other);
        assert_eq!(first(&carver), (BlockState::Pending, 0, vec![2], true));
    }
    carver.complete(2);
    assert_eq!(first(&carver), (BlockState::Free, 0, vec![], false));
    let last = carver.snapshot()[1].blocks.clone();
    assert_eq!(
        last.iter().map(|b| b.is_split).collect::<Vec<_>>(),
        [true, true]
    );
    carver.give_back(large.address).unwrap();
    assert_eq!(
        carver.remove_idle(),
        [(16 * mib, 2 * mib), (64 * mib, 20 * mib)]
    );
}
