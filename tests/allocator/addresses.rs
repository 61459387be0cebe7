//! Address space stays bounded, however long a program runs and however many allocators it has.

use crate::common::prelude::*;
use cualloc::error::Cause;

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
                after_warm_up = rig.calls("cuMemAddressReserve");
            }
        }
        assert_eq!(after_warm_up, 1);
        assert_eq!(rig.calls("cuMemAddressReserve"), after_warm_up);
        let all = allocator.stats().all;
        assert!(all.reserved.peak <= all.requested.peak * 105 / 100 + (16 << 20));
        allocator.check().unwrap();
        drop(survivor);
        rig.close(&allocator);
        assert_eq!(
            rig.calls("cuMemAddressFree"),
            rig.calls("cuMemAddressReserve")
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
        assert!(rig.calls("cuMemAddressReserve") <= 2);
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
        assert!(rig.calls("cuMemAddressReserve") <= 2);
        assert_eq!(rig.calls("cuMemAddressFree"), 0);
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
            rig.calls("cuMemAddressFree"),
            rig.calls("cuMemAddressReserve")
        );
        rig.assert_clean();
    });
}

/// A device of 24 GiB whose driver grants little address space, or none at a stretch.
fn cramped(address_space: u64, longest_reservation: u64) -> SimConfig {
    SimConfig {
        address_space,
        longest_reservation,
        ..SimConfig::with_devices(1, 24 << 30)
    }
}

fn made(rig: &Rig, policy: Policy) -> Result<Allocator, Error> {
    Allocator::with_config(&rig.context, Config::new().policy(policy))
}

/// The reservable address space is checked at creation: later, requests would fail with most of the memory free.
#[test]
fn without_enough_address_space_the_policy_is_classic() {
    for longest in [0, 2 << 20, 64 << 20, (512 << 20) - 1] {
        for (space, longest) in [(u64::MAX, longest), (longest, u64::MAX)] {
            let rig = Rig::new(Policy::Auto, cramped(space, longest));
            let Some(sim) = rig.sim() else { return };
            let refused = made(&rig, Policy::Packed).unwrap_err();
            let Error::DeviceRefused { what, cause } = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(
                (what, cause.call()),
                ("address space", "cuMemAddressReserve")
            );
            assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
            // The usual length, then 8 GiB and 512 MiB.
            assert_eq!(rig.calls("cuMemAddressReserve"), 3);
            let allocator = made(&rig, Policy::Auto).unwrap();
            assert_eq!(allocator.policy(), Policy::Classic);
            assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
            let stream = rig.stream();
            for mib in [1, 100, 20 << 10] {
                let block = allocator.allocate(mib * MIB, &stream).unwrap();
                rig.stamp(block.ptr(), 4096, 1, &stream);
                assert_eq!(rig.mismatches(block.ptr(), 4096, 1, &stream), 0);
            }
            rig.close(&allocator);
            rig.assert_clean();
        }
    }
}

#[test]
fn a_reservation_that_is_refused_is_tried_shorter() {
    let granted = [
        (48 << 30, 1),
        ((48 << 30) - 1, 2),
        (8 << 30, 2),
        ((8 << 30) - 1, 3),
        (512 << 20, 3),
    ];
    for (longest, tries) in granted {
        only_simulated_on(Policy::Packed, cramped(u64::MAX, longest), |rig, sim| {
            let allocator = rig.allocator();
            assert_eq!(rig.calls("cuMemAddressReserve"), tries);
            let stream = rig.stream();
            // More than one reservation holds, in blocks that each fit into one.
            let bytes = 100 * MIB;
            let blocks: Vec<Block> = allocator.allocate_blocks(16, bytes, &stream);
            for block in &blocks {
                rig.stamp(block.ptr(), bytes, 1, &stream);
            }
            let reserved = sim.leaks().reservations as u64;
            assert!(reserved * longest >= 1600 << 20, "{reserved}");
            assert!(reserved <= 16, "{reserved}");
            drop(blocks);
            rig.settle(&stream);
            rig.close(&allocator);
            assert_eq!(sim.leaks().reservations, 0);
        });
    }
}

/// The error names addresses rather than memory, which is plentiful; existing memory still serves requests.
#[test]
fn a_request_without_addresses_reports_that() {
    only_simulated_on(Policy::Packed, cramped(1 << 30, 512 << 20), |rig, _| {
        let (allocator, [stream]) = rig.scene();
        for single in [false, true] {
            let request = match single {
                true => Request::new(700 * MIB).single_handle(),
                false => Request::new(700 * MIB),
            };
            let picture = out_of_memory(allocator.allocate_with(request, &stream).unwrap_err());
            assert_eq!(picture.cause(), Cause::Refused, "{picture}");
            let driver = picture.driver.unwrap();
            assert_eq!(driver.call(), "cuMemAddressReserve");
            assert!(
                picture.to_string().contains("cuMemAddressReserve"),
                "{picture}"
            );
            assert!(picture.report().contains("refuses address space"));
            assert!(picture.driver_free.unwrap() > 20 << 30);
        }
        let _kept = allocator.allocate(300 * MIB, &stream).unwrap();
        drop(allocator.allocate(100 * MIB, &stream).unwrap());
        allocator.check().unwrap();
        // A want of memory is one still, whatever addresses there are.
        allocator.set_limit(Some(400 << 20));
        let picture = out_of_memory(allocator.allocate(700 * MIB, &stream).unwrap_err());
        assert_eq!(picture.cause(), Cause::Limit);
    });
}

/// Before a request fails for lack of addresses, it waits for work, and releases free memory to obtain longer holes.
#[test]
fn memory_that_stands_in_the_way_of_addresses_makes_room() {
    only_simulated_on(Policy::Packed, cramped(512 << 20, 512 << 20), |rig, _| {
        let (allocator, [stream, other]) = rig.scene_with(Config::new().views(false));
        let blocks = allocator.allocate_blocks(6, 32 * MIB, &stream);
        let held: Vec<Block> = blocks.into_iter().skip(1).step_by(2).collect();
        allocator.synchronize().unwrap();
        // Holes of 32 MiB between blocks.
        allocator.trim(0).unwrap();
        for block in &held {
            block.record_stream(&other).unwrap();
        }
        let _busy = rig.busy(&other);
        drop(held);
        let long = allocator.allocate(200 * MIB, &stream).unwrap();
        rig.stamp(long.ptr(), 200 * MIB, 1, &stream);
    });
}

/// Small blocks have a separate arena. If it has no addresses, they are placed among large blocks, if there is room.
#[test]
fn small_blocks_that_lack_addresses_lie_beside_large_ones() {
    only_simulated_on(Policy::Packed, cramped(512 << 20, 512 << 20), |rig, _| {
        let (allocator, [stream]) = rig.scene();
        // The rest of its last handle is free.
        let large = allocator.allocate(512 * MIB - 64 * KIB, &stream).unwrap();
        let small = allocator.allocate(40 * KIB, &stream).unwrap();
        rig.stamp(small.ptr(), 40 * KIB, 1, &stream);
        let picture = out_of_memory(allocator.allocate(40 * KIB, &stream).unwrap_err());
        assert_eq!(picture.cause(), Cause::Refused, "{picture}");
        drop(large);
        let again = allocator.allocate(40 * KIB, &stream).unwrap();
        drop((small, again));
        rig.settle(&stream);
    });
}
