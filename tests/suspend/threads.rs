//! Other threads go on with what they may: they get memory that is there, or hear that it is not.

use super::support::*;
use crate::common::rng::Rng;

#[test]
fn requests_beside_a_suspension_get_memory_or_an_error() {
    packed(|rig| {
        let allocator = rig.checked();
        let (over, first) = (AtomicBool::new(false), rig.stream());
        let kept = allocator.allocate(3 * MIB, &first).unwrap();
        rig.stamp(kept.ptr(), 3 * MIB, 4, &first);
        std::thread::scope(|threads| {
            for seed in 1..4 {
                let (allocator, over, stream) = (&allocator, &over, rig.stream());
                threads.spawn(move || {
                    let (mut random, mut live) = (Rng::new(seed), Vec::new());
                    while !over.load(Ordering::Relaxed) {
                        let bytes = [512, 3000, 70_000, 3 * MIB][random.index(4)];
                        match allocator.allocate(bytes, &stream) {
                            Ok(block) => live.push(block),
                            Err(Error::Suspended) => std::thread::yield_now(),
                            Err(error) => panic!("{error:?}"),
                        }
                        if live.len() > 20 {
                            live.swap_remove(random.index(20));
                        }
                    }
                });
            }
            let _over = SetAtEnd(&over);
            let suspend = || match try_suspend(&allocator, Select::Allocator, Contents::Pinned) {
                Ok(_) => true,
                // A request is under way, and has memory in hand.
                Err(Error::InUse { what: "call", .. }) => false,
                Err(error) => panic!("{error:?}"),
            };
            for _ in 0..30 {
                wait_until("no request is under way", suspend);
                let refused = allocator.allocate(512, &first);
                assert_matches!(refused, Err(Error::Suspended));
                resume(&allocator);
            }
        });
        assert_eq!(rig.mismatches(kept.ptr(), 3 * MIB, 4, &first), 0);
        drop(kept);
        rig.settle(&first);
    });
}
