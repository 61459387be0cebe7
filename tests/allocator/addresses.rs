//! Address space stays bounded, however long a program runs and however many allocators it has.

use crate::common::*;
use cualloc::allocator::{Allocator, Block, Policy};
use cualloc::driver::sys::CUresult;
use cualloc::sim::{FailPlan, SimConfig};

/// Calls so far, but for the one by which the first allocator tried the device's virtual memory.
fn calls(rig: &Rig, name: &str) -> u64 {
    rig.calls(name) - 1
}

/// Uneven sizes from 1 to 64 MiB.
fn sizes(round: usize) -> impl Iterator<Item = usize> {
    (0..6).map(move |i| MIB + (round * 7919 + i * 104_729) % 63 * MIB + (round * 31 + i) % 97 * 512)
}

/// R3: neither memory nor address space grows from round to round.
#[test]
fn r3_filling_and_emptying_for_ever_beside_a_survivor_stays_bounded() {
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let mut survivor: Option<Block> = None;
        let mut after_warm_up = 0;
        for round in 0..1000 {
            let mut blocks: Vec<Block> = sizes(round)
                .map(|bytes| allocator.allocate(bytes, &stream).unwrap())
                .collect();
            // One of this round lives until one of the next does.
            survivor = Some(blocks.swap_remove(round % 6));
            drop(blocks);
            if round % 50 == 49 {
                stream.synchronize().unwrap();
                allocator.trim(0).unwrap();
            }
            if round == 20 {
                after_warm_up = calls(rig, "cuMemAddressReserve");
            }
        }
        assert_eq!(after_warm_up, 1);
        assert_eq!(calls(rig, "cuMemAddressReserve"), after_warm_up);
        let all = allocator.stats().all;
        assert!(all.reserved.peak <= all.requested.peak * 105 / 100 + (16 << 20));
        allocator.check().unwrap();
        drop(survivor);
        rig.close(&allocator);
        assert_eq!(
            calls(rig, "cuMemAddressFree"),
            calls(rig, "cuMemAddressReserve")
        );
    });
}

#[test]
fn a_thousand_allocators_of_a_device_share_its_address_space() {
    only(Policy::Packed, |rig| {
        let stream = rig.stream();
        let mut open: Vec<(Allocator, [Block; 2])> = Vec::new();
        for _ in 0..1000 {
            let allocator = rig.allocator();
            let blocks = [4 * MIB, 1000].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
            open.push((allocator, blocks));
        }
        assert!(calls(rig, "cuMemAddressReserve") <= 2);
        // The ones in between go: their address space serves others.
        let mut kept = Vec::new();
        for (at, (allocator, blocks)) in open.into_iter().enumerate() {
            if at % 2 == 0 {
                kept.push((allocator, blocks));
            } else {
                drop(blocks);
                allocator.close().unwrap();
            }
        }
        for _ in 0..500 {
            let allocator = rig.allocator();
            let blocks = [8 * MIB, 1000].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
            kept.push((allocator, blocks));
        }
        assert!(calls(rig, "cuMemAddressReserve") <= 2);
        assert_eq!(calls(rig, "cuMemAddressFree"), 0);
        let mut starts: Vec<u64> = kept
            .iter()
            .flat_map(|(_, b)| b.each_ref().map(Block::ptr))
            .collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(
            starts.len(),
            2 * kept.len(),
            "no address is given out twice"
        );
        for (allocator, blocks) in kept {
            drop(blocks);
            allocator.close().unwrap();
        }
        assert_eq!(
            calls(rig, "cuMemAddressFree"),
            calls(rig, "cuMemAddressReserve")
        );
        rig.assert_clean();
    });
}

#[test]
fn one_allocator_after_the_other_reserves_anew_only_when_none_is_left() {
    only(Policy::Packed, |rig| {
        let stream = rig.stream();
        for round in 1..=3 {
            let first = rig.allocator();
            let one = first.allocate(8 * MIB, &stream).unwrap();
            let second = rig.allocator();
            let two = second.allocate(8 * MIB, &stream).unwrap();
            drop(one);
            first.close().unwrap();
            assert_eq!(calls(rig, "cuMemAddressFree"), round - 1);
            drop(two);
            second.close().unwrap();
            assert_eq!(calls(rig, "cuMemAddressReserve"), round);
            assert_eq!(calls(rig, "cuMemAddressFree"), round);
        }
    });
}

#[test]
fn address_space_that_cannot_be_freed_is_freed_by_the_next_close() {
    only_on(Policy::Packed, SimConfig::default(), |rig| {
        let Some(sim) = rig.sim() else { return };
        let stream = rig.stream();
        let allocator = rig.allocator();
        drop(allocator.allocate(8 * MIB, &stream).unwrap());
        sim.fail(FailPlan::call("cuMemAddressFree", CUresult::CUDA_ERROR_INVALID_VALUE).unwrap());
        allocator.close().unwrap_err();
        allocator.close().unwrap();
        assert_eq!(calls(rig, "cuMemAddressFree"), 2);
    });
}
