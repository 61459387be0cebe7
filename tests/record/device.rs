//! Why memory ran out, and that the advice helps: on the device under test, which may be a GPU.

use crate::causes::{named, raised, refused};
use crate::common::{each, only};
use crate::scene::{MIB, alone};
use cualloc::allocator::{Block, Config, Policy};
use cualloc::error::Cause;

#[test]
fn a_limit_on_the_device() {
    let _alone = alone();
    each(|rig| {
        let (allocator, stream) = (rig.limited(64 * MIB), rig.stream());
        let kept = allocator.allocate(48 * MIB, &stream).unwrap();
        let picture = refused(&allocator, 32 * MIB, &stream);
        named(&picture, Cause::Limit);
        let need = picture.allocated + picture.requested;
        let advice = picture.advice();
        assert!(advice.contains(&format!("to {need} bytes")), "{advice}");
        raised(&allocator, &picture, &stream);
        drop(kept);
        rig.close(&allocator);
    });
}

#[test]
fn pieces_between_live_blocks_on_the_device() {
    let _alone = alone();
    for policy in [Policy::Classic, Policy::Packed] {
        only(policy, |rig| {
            let (allocator, stream) = (rig.limited(64 * MIB), rig.stream());
            let mut blocks: Vec<Option<Block>> = (0..6)
                .map(|_| Some(allocator.allocate(8 * MIB, &stream).unwrap()))
                .collect();
            for block in blocks.iter_mut().step_by(2) {
                drop(block.take());
            }
            // What the first says, the second does.
            if policy == Policy::Classic {
                let picture = refused(&allocator, 24 * MIB, &stream);
                named(&picture, Cause::Fragmented);
                let advice = picture.advice();
                assert!(advice.contains("policy=packed"), "{advice}");
            } else {
                drop(allocator.allocate(24 * MIB, &stream).unwrap());
            }
            drop(blocks);
            rig.close(&allocator);
        });
    }
}

#[test]
fn a_guard_on_the_device() {
    let _alone = alone();
    only(Policy::Packed, |rig| {
        let (allocator, stream) = (rig.limited(32 * MIB), rig.stream());
        let block = allocator.allocate(20 * MIB, &stream).unwrap();
        let guard = allocator.guard(block.ptr(), 20 << 20).unwrap();
        drop(block);
        let picture = refused(&allocator, 20 * MIB, &stream);
        named(&picture, Cause::Pools);
        drop(guard);
        drop(allocator.allocate(20 * MIB, &stream).unwrap());
        rig.close(&allocator);
    });
}

#[test]
fn more_than_the_device_has() {
    let _alone = alone();
    each(|rig| {
        let allocator = rig.allocator_with(Config::new());
        let stream = rig.stream();
        let memory = rig.context.device().total_memory().unwrap() as usize;
        let picture = refused(&allocator, memory + 512 * MIB, &stream);
        named(&picture, Cause::Device);
        drop(allocator.allocate(16 * MIB, &stream).unwrap());
        rig.close(&allocator);
    });
}
