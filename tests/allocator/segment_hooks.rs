//! Segment hooks: reports of memory that is mapped or unmapped.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::prelude::*;
use crate::common::rng::Rng;
use cualloc::allocator::{BlockState, Segment, SegmentChange, SegmentHook};

/// The segments by address, as the hook's reports describe them.
#[derive(Default)]
struct Reported {
    segments: BTreeMap<u64, Segment>,
    ids: BTreeSet<u64>,
    births: usize,
    deaths: usize,
}

impl Reported {
    fn add(&mut self, segment: Segment) {
        let before = self
            .segments
            .range(..segment.address + segment.bytes)
            .next_back();
        let apart = before.is_none_or(|(_, known)| known.address + known.bytes <= segment.address);
        assert!(apart, "{segment:?} overlaps {before:?}");
        self.segments.insert(segment.address, segment);
        self.births += 1;
    }

    fn remove(&mut self, segment: Segment) {
        assert_eq!(self.segments.remove(&segment.address), Some(segment));
        self.deaths += 1;
    }
}

/// Follows the segments of an allocator, and checks at each report that no block can be allocated there.
fn follow(allocator: &Allocator) -> Arc<Mutex<Reported>> {
    let reported: Arc<Mutex<Reported>> = Arc::default();
    let (keeps, inside) = (Arc::clone(&reported), allocator.clone());
    let hook = SegmentHook::new("follows", move |change, segments| {
        let snapshot = inside.snapshot();
        let blocks = || snapshot.iter().flat_map(|segment| &segment.blocks);
        for segment in segments {
            let range = segment.address..segment.address + segment.bytes;
            let obtainable = [BlockState::Live, BlockState::Free, BlockState::Pending];
            let usable = blocks()
                .find(|block| range.contains(&block.address) && obtainable.contains(&block.state));
            assert_eq!(usable, None, "{change:?} of {segment:?}");
            let mut reported = keeps.lock().unwrap();
            match change {
                SegmentChange::Birth => {
                    reported.ids.insert(segment.id);
                    reported.add(*segment);
                }
                _ => reported.remove(*segment),
            }
        }
    });
    assert!(!allocator.add_segment_hook(hook));
    reported
}

#[test]
fn segments_are_reported_before_a_block_can_lie_in_them_and_before_they_are_unmapped() {
    each(|rig| {
        let allocator = rig.limited(256 * MIB);
        let stream = allocator.create_stream().unwrap();
        let reported = follow(&allocator);
        let mut rng = Rng::new(7);
        let mut blocks: Vec<Block> = Vec::new();
        let assert_same = || {
            let reported = reported.lock().unwrap();
            let held: u64 = reported
                .segments
                .values()
                .map(|segment| segment.bytes)
                .sum();
            assert_eq!(held, allocator.stats().all.reserved.current);
            for segment in allocator.snapshot().iter().filter(|segment| !segment.view) {
                let end = segment.address + segment.size;
                let inside = reported.segments.range(segment.address..end);
                let bytes: u64 = inside.map(|(_, known)| known.bytes).sum();
                assert_eq!(bytes, segment.size, "at {:#x}", segment.address);
            }
        };
        for turn in 0..600 {
            let bytes = 1 << rng.below(25);
            match allocator.allocate(bytes + 1, &stream) {
                Ok(block) if rng.below(3) > 0 => blocks.push(block),
                Ok(_) => {}
                Err(error) => {
                    out_of_memory(error);
                    blocks.clear();
                }
            }
            if turn % 50 == 49 {
                blocks.clear();
                rig.settle(&stream);
                allocator.trim(16 << 20).unwrap();
                assert_same();
            }
        }
        assert_same();
        blocks.clear();
        rig.settle(&stream);
        allocator.trim(0).unwrap();
        let reported = reported.lock().unwrap();
        assert!(reported.segments.is_empty());
        assert!(reported.births > 20, "{}", reported.births);
        assert_eq!(
            (reported.births, reported.ids.len()),
            (reported.deaths, reported.births)
        );
    });
}

/// After a release that the driver refuses, the segment is reported as mapped again.
#[test]
fn a_segment_that_is_not_released_is_reported_again() {
    only_simulated(Policy::Classic, |rig, sim| {
        let allocator = rig.allocator();
        let stream = allocator.create_stream().unwrap();
        let reported = follow(&allocator);
        drop(allocator.allocate(20 * MIB, &stream).unwrap());
        rig.settle(&stream);
        let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
        sim.fail(FailPlan::call("cuMemFree_v2", code).unwrap());
        allocator.trim(0).unwrap_err();
        assert_eq!(reported.lock().unwrap().segments.len(), 1);
        allocator.trim(0).unwrap();
        let reported = reported.lock().unwrap();
        assert_eq!((reported.segments.len(), reported.ids.len()), (0, 2));
        assert_eq!((reported.births, reported.deaths), (2, 2));
    });
}
