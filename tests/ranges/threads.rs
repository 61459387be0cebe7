//! Threads that use one range and its allocator at the same time.

use super::support::*;
use crate::common::rng::Rng;
use std::thread;

#[test]
fn threads_commit_and_decommit_parts_of_a_range() {
    packed(|rig| {
        let (allocator, []) = rig.scene_limit(48 * MIB);
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        thread::scope(|scope| {
            for part in 0..4u64 {
                let (allocator, range) = (&allocator, &range);
                scope.spawn(move || {
                    let (stream, mut random) = (rig.stream(), Rng::new(part));
                    let mut block = None;
                    for round in 0..100u32 {
                        let first = 4 * part + random.below(4);
                        let own = granules(first, 4 * part + 4);
                        match range.commit(own.clone(), &stream) {
                            Ok(()) => {
                                stamp(rig, range, own.clone(), round, &stream);
                                assert_stamped(rig, range, own, round, &stream);
                            }
                            Err(error) => drop(out_of_memory(error)),
                        }
                        let all = granules(4 * part, 4 * part + 4);
                        range.decommit(all, &stream).unwrap();
                        block = allocator.allocate(3 * MIB, &stream).ok();
                        if round.is_multiple_of(16) {
                            allocator.trim(0).unwrap();
                        }
                    }
                    drop(block);
                });
            }
        });
        assert_eq!(states(&range).0, 0);
        allocator.check().unwrap();
    });
}

#[test]
fn a_suspension_beside_commits_is_refused_or_excludes_them() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let range = allocator.reserve_range(16 * GRANULE, options()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..100 {
                    // SAFETY: the other thread submits no work.
                    match unsafe { allocator.suspend(Select::Range(&range), Contents::Drop) } {
                        Ok(_) => drop(allocator.resume(Select::Range(&range)).unwrap()),
                        Err(error) => assert_matches!(error, Error::InUse { .. }),
                    }
                }
            });
            for index in 0..100 {
                let own = granules(index % 16, index % 16 + 1);
                match range.commit(own.clone(), &stream) {
                    Ok(()) | Err(Error::Suspended) => {}
                    Err(error) => panic!("{error:?}"),
                }
                match range.decommit(own, &stream) {
                    Ok(()) | Err(Error::Suspended) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
        });
        allocator.check().unwrap();
    });
}
