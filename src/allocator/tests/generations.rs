//! Tests of generations, which repeat after 2^31 allocations of one record or page.

use std::collections::HashSet;

use super::{KIB, Outcome, Rig};
use crate::Block;
use crate::allocator::cache::grant::Lifetime;
use crate::allocator::{Allocator, Config, Policy, Request};

fn lifetime(block: &Block) -> Lifetime {
    let (id, generation) = block.generation();
    let ptr = block.ptr();
    Lifetime {
        id,
        generation,
        ptr,
    }
}

/// Sets the generation of all free records and of all pages.
fn age(allocator: &Allocator, generation: u32) {
    let mut heap = allocator.engine().lock();
    let all: Vec<u32> = heap.extents.records.iter().map(|(id, _)| id).collect();
    for id in all {
        if heap.extents.records[id].is_free() {
            heap.extents.records[id].generation = generation & !1;
        }
    }
    for cache in &heap.caches.all {
        cache.lock().runs.age(generation);
    }
}

/// Blocks stay valid, and former handles invalid, while the generations of their records and pages start again.
#[test]
fn generations_start_again() -> Outcome {
    for policy in [Policy::Packed, Policy::Classic] {
        for bytes in [512, 300 * KIB] {
            let rig = Rig::new(Config::new().policy(policy))?;
            let [a] = rig.streams()?;
            let allocator = &rig.allocator;
            let kept = allocator.allocate(bytes, &a)?;
            drop(allocator.allocate(bytes, &a)?);
            // A snapshot empties the large-block caches.
            allocator.snapshot();
            age(allocator, u32::MAX - 5);
            let mut lives = HashSet::from([(kept.generation(), kept.ptr())]);
            for round in 0..12 {
                let align = if round % 5 == 4 { 1024 } else { 1 };
                let block = allocator.allocate_with(Request::new(bytes).align(align), &a)?;
                let life = lifetime(&block);
                assert!(life.generation % 2 == 1 || bytes == 512);
                let new = lives.insert((block.generation(), block.ptr()));
                assert!(new, "round {round}");
                assert!(allocator.engine().is_live(&life));
                allocator.check()?;
                if round % 3 == 0 {
                    allocator.engine().free(life.ptr, Some(&life))?;
                    std::mem::forget(block);
                } else {
                    drop(block);
                }
                assert!(!allocator.engine().is_live(&life));
                assert!(allocator.engine().free(life.ptr, Some(&life)).is_err());
            }
            let passed = lives
                .iter()
                .any(|((_, generation), _)| generation & (u32::MAX >> 1) < 12);
            assert!(passed, "the generations started again");
            assert!(allocator.engine().is_live(&lifetime(&kept)));
            drop(kept);
            allocator.check()?;
            rig.end()?;
        }
    }
    Ok(())
}
