//! The basis of views: one physical memory mapped at two addresses.
//!
//! What is written through one address is read through the other by the next operation in order, and neighbours in a
//! page, which have separate addresses, do not race. On a GPU by plain and atomic accesses, the read-only path, fills,
//! copies, bulk copies and a second device; on the simulator by fills and copies.

mod cases;
mod lab;

use crate::common::prelude::*;
use cualloc::driver::Device;
use lab::{ANY, Aliased, CHECK, Lab, STORE, Words};

/// Bytes of the memory, and rounds of each case on a GPU.
const SIZES: [(usize, u32); 2] = [(2 * MIB, 2000), (32 * MIB, 200)];

fn rounds(on_gpu: u32) -> u32 {
    if on_cuda() { on_gpu } else { 3 }
}

fn each_size(test: impl Fn(&Lab<'_>, &Aliased<'_>, u32)) {
    only(Policy::Packed, |rig| {
        let lab = Lab::new(rig);
        for (bytes, on_gpu) in SIZES {
            let memory = Aliased::new(&lab, bytes, &[rig.context.device().clone()]);
            test(&lab, &memory, rounds(on_gpu));
        }
    });
}

fn run(list: &[cases::Case]) {
    each_size(|lab, memory, rounds| {
        for case in list.iter().filter(|case| lab.can(case)) {
            for round in 0..rounds {
                let [first, second] = memory.at;
                let (write, read) = if round % 2 == 0 {
                    (first, second)
                } else {
                    (second, first)
                };
                (case.run)(lab, write, read, memory.bytes, round * 7919 + 13);
            }
            lab.settle();
            let (name, bytes) = (case.name, memory.bytes);
            assert_eq!(lab.take_bad(), 0, "{name}, {bytes} bytes: wrong words");
            eprintln!("{bytes} bytes, {rounds} rounds: {name}");
        }
    });
}

#[test]
fn a_write_through_one_address_is_read_through_the_other() {
    run(cases::IN_ORDER);
}

#[test]
fn neighbours_in_a_page_do_not_race_at_two_addresses() {
    run(cases::AT_ONCE);
}

/// Violations are detected: otherwise the other tests would show nothing.
#[test]
fn wrong_words_are_counted() {
    each_size(|lab, memory, _| {
        let [first, second] = memory.at;
        let words = (memory.bytes / 4) as u64;
        lab.fill(first, memory.bytes, 1, &lab.a);
        lab.check(second, memory.bytes, 2, &lab.a);
        lab.settle();
        assert_eq!(lab.take_bad(), words);
        if lab.words.is_some() {
            lab.words(CHECK, ANY, first, memory.bytes, 3, &lab.a);
            lab.words(lab::READ_ONLY, 0, second, memory.bytes, 3, &lab.a);
            lab.words(lab::CONSTANT, 1, second, memory.bytes, u32::MAX, &lab.a);
            lab.settle();
            assert_eq!(lab.take_bad(), 2 * words);
        }
        if lab.bulk.is_some() {
            lab.bulk_check(ANY, second, memory.bytes, 4, &lab.a);
            lab.settle();
            assert_eq!(lab.take_bad(), words);
        }
    });
}

/// Other memory is mapped at an address directly after an unmapping there, while a kernel runs.
#[test]
fn an_address_shows_the_memory_that_is_mapped_there_now() {
    only(Policy::Packed, |rig| {
        let lab = Lab::new(rig);
        let memory = [3, 5].map(|_| Aliased::new(&lab, 2 * MIB, &[rig.context.device().clone()]));
        let place = lab.reserve(2 * MIB);
        for round in 0..rounds(500) {
            let _beside = (round % 8 == 0).then(|| rig.busy_for(&lab.b, 2_000_000));
            let shown = &memory[round as usize % 2];
            lab.fill(shown.at[0], shown.bytes, round, &lab.a);
            shown.show(&lab, place);
            lab.check(place, shown.bytes, round, &lab.a);
            rig.settle(&lab.a);
            lab.hide(place, shown.bytes);
        }
        lab.settle();
        assert_eq!(lab.take_bad(), 0);
        lab.unreserve(place, 2 * MIB);
    });
}

/// The second device, with access to the first one's memory; none, with a note, if there is no such device.
fn peer(rig: &Rig) -> Option<(Device, Context)> {
    if rig.driver.device_count().unwrap() < 2 {
        eprintln!("SKIPPED: needs two devices");
        return None;
    }
    let (first, second) = (rig.context.device(), rig.driver.device(1).unwrap());
    if !second.can_access_peer(first).unwrap() {
        eprintln!("SKIPPED: the second device has no access to the first");
        return None;
    }
    let context = Context::primary(&second).unwrap();
    Some((second, context))
}

/// Two devices, each through its own address: ordered accesses read what the other device wrote, and concurrent
/// accesses do not change each other's pieces of a page.
#[test]
fn devices_share_memory_at_two_addresses() {
    only_on(Policy::Packed, SimConfig::with_devices(2, 8 << 30), |rig| {
        let Some((device, context)) = peer(rig) else {
            return;
        };
        let lab = Lab::new(rig);
        let theirs = Lab::in_context(rig, context);
        for (bytes, on_gpu) in SIZES {
            let memory = Aliased::new(&lab, bytes, &[rig.context.device().clone(), device.clone()]);
            let [ours, other] = memory.at;
            for round in 0..rounds(on_gpu) / 2 {
                let seed = round * 7919;
                lab.fill(ours, bytes, seed, &lab.a);
                theirs.follow(&theirs.a, &lab.a);
                theirs.check(other, bytes, seed, &theirs.a);
                theirs.fill(other, bytes, seed + 1, &theirs.a);
                lab.follow(&lab.a, &theirs.a);
                lab.check(ours, bytes, seed + 1, &lab.a);
                if let (Some(_), Some(_)) = (&lab.words, &theirs.words) {
                    theirs.follow(&theirs.a, &lab.a);
                    let each: [(&Lab<'_>, u64, Words); 2] = [(&lab, ours, 0), (&theirs, other, 1)];
                    for (lab, at, parity) in each {
                        let value = seed + 100 * parity;
                        lab.words(STORE, parity, at, bytes, value, &lab.a);
                        lab.words(lab::ATOMIC_ADD, parity, at, bytes, 7, &lab.a);
                        lab.words(CHECK, parity, at, bytes, value + 7, &lab.a);
                    }
                    lab.follow(&lab.a, &theirs.a);
                    lab.words(CHECK, 1, ours, bytes, seed + 107, &lab.a);
                }
            }
            lab.settle();
            theirs.settle();
            assert_eq!((lab.take_bad(), theirs.take_bad()), (0, 0), "{bytes} bytes");
        }
    });
}
