//! The identity of blocks, and queries about them.

use cualloc::Request;
use cualloc::driver::Stream;
use cualloc::error::StreamMisuse;
use cualloc::resource::*;

use super::*;

/// S5.13, S5.14: identity is source, record and generation, never used again.
#[test]
fn s5_13_s5_14_identity_survives_reuse_of_the_address() {
    packed(|rig| {
        let (allocator, other, stream) = (rig.allocator(), rig.allocator(), rig.stream());
        let first = take(&allocator, 512, &stream);
        let old = first.id();
        assert!(old.source() >= 1 && old.generation() >= 1);
        assert_eq!(
            (old.ptr(), old.bytes(), old.ordinal()),
            (first.ptr(), 512, 0)
        );
        assert_eq!(
            (first.alignment(), first.id().stream_id()),
            (1, stream.id().unwrap())
        );
        allocator.deallocate_block(first).unwrap();
        let reuse = || {
            let second = take(&allocator, 512, &stream);
            assert_eq!(second.ptr(), old.ptr(), "the same memory");
            assert_ne!(second.id(), old);
            assert_eq!(allocator.state(&old), BlockState::Free);
            second
        };
        allocator.deallocate_block(reuse()).unwrap();
        // Releases nothing, and leaves no page to a stream.
        allocator.trim(u64::MAX).unwrap();
        let second = reuse();
        let used = MemoryResource::record_use(&allocator, &old, &stream);
        assert!(matches!(used, Err(Error::UseAfterFree { .. })));
        // Another allocator's block is refused and comes back.
        let failure = other.deallocate_block(second).unwrap_err();
        assert!(matches!(failure.error, Error::UseAfterFree { .. }));
        assert_eq!(other.usage().unwrap().requested.current, 0);
        allocator.deallocate_block(*failure.value).unwrap();
        let direct = CudaMemory::new(&rig.context);
        let block = take(&direct, 8, &stream);
        assert_ne!(block.id().source(), old.source());
        direct.deallocate_block(block).unwrap();
    });
}

/// S5.15, S5.16, S5.17: tags, accesses and errors with their data.
#[test]
fn s5_15_s5_16_s5_17_tags_accesses_and_errors() {
    packed(|rig| {
        assert_eq!(Tag::default().as_str(), "untagged");
        assert_eq!(Access::Read.merge(Access::Write), Access::ReadWrite);
        assert_eq!(Access::Read.merge(Access::Read), Access::Read);
        let budget = Budget::new(rig.allocator(), Some(100));
        let stream = rig.stream();
        let block = take(&budget, 60, &stream);
        match ask(&budget, 41, &stream) {
            Err(Error::OverBudget {
                requested,
                limit,
                used,
                ..
            }) => {
                assert_eq!((requested, limit, used), (41, 100, 60));
            }
            other => panic!("{other:?}"),
        }
        let id = block.id();
        assert_eq!(id.range(20, 40).unwrap(), id.ptr() + 20);
        let outside = id.range(20, 41);
        match outside {
            Err(Error::OutOfBounds {
                generation,
                start,
                end,
                len,
            }) => {
                assert_eq!(generation, Some(id.generation()));
                assert_eq!((start, end, len), (20, 61, 60));
            }
            other => panic!("{other:?}"),
        }
        assert!(id.range(usize::MAX, 2).is_err());
        budget.deallocate_block(block).unwrap();
        // Stream 0 is the default stream.
        let pool = StreamPool::new(&rig.context);
        let default = pool.get(0).unwrap();
        let legacy = Stream::legacy(&rig.context);
        assert_eq!(default.id().unwrap(), legacy.id().unwrap());
    });
}

/// S5.13, S5.15: a block's debug text names it, its label and its stream.
#[test]
fn s5_13_s5_15_debug_text_of_a_block() {
    packed(|rig| {
        let (resource, stream) = (asynchronous(rig), rig.stream());
        let request = Request::new(512).tag("label");
        let block = resource.allocate_block(&request, &stream).unwrap();
        let id = block.id();
        let text = format!("{block:?}");
        for part in [
            format!("ptr: {:#x}", id.ptr()),
            "bytes: 512".into(),
            "tag: \"label\"".into(),
            format!("stream: {}", id.stream_id()),
            format!("generation: {}", id.generation()),
        ] {
            assert!(text.contains(&part), "{part} in {text}");
        }
        resource.deallocate_block(block).unwrap();
        resource.reap().unwrap();
    });
}

/// S5.18: what cannot track says so.
#[test]
fn s5_18_use_tracking_is_refused_by_default() {
    packed(|rig| {
        let [a, b] = rig.streams();
        let direct = CudaMemory::new(&rig.context);
        let block = take(&direct, 64, &a);
        let id = block.id();
        assert_eq!(direct.use_tracking(), UseTracking::None);
        for refused in [
            direct.record_use(&id, &b),
            direct.prepare_use(&id, &b, Access::Read),
            direct.finish_use(&id, &b, Access::Write),
        ] {
            let misuse = StreamMisuse::NotTracked {
                asked: "",
                stream: b.id().unwrap(),
            };
            match refused {
                Err(Error::Stream(StreamMisuse::NotTracked { stream, .. })) => {
                    assert!(
                        matches!(misuse, StreamMisuse::NotTracked { stream: s, .. } if s == stream)
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        direct.deallocate_block(block).unwrap();
        // The caching resource does not put streams in order, and says so.
        let caching = rig.allocator();
        let block = take(&caching, 64, &a);
        let refused = caching.prepare_use(&block.id(), &b, Access::Read);
        assert!(matches!(refused, Err(Error::Stream(_))));
        caching.prepare_use(&block.id(), &a, Access::Write).unwrap();
        caching.deallocate_block(block).unwrap();
    });
}

/// S5.27: a stale identity is refused at every call, without a driver call.
#[test]
fn s5_27_stale_identity_has_no_effect() {
    packed(|rig| {
        let resource = asynchronous(rig);
        let [a, b] = rig.streams();
        let old = take(&resource, 512, &a);
        let id = old.id();
        resource.deallocate_block(old).unwrap();
        let new = take(&resource, 512, &a);
        assert_eq!(new.ptr(), id.ptr(), "the address is in use again");
        let calls = rig.driver.calls().total();
        for refused in [
            resource.record_use(&id, &b),
            resource.prepare_use(&id, &b, Access::Write),
            resource.finish_use(&id, &b, Access::Write),
        ] {
            assert!(matches!(refused, Err(Error::UseAfterFree { .. })));
        }
        assert_eq!(rig.driver.calls().total(), calls);
        resource.deallocate_block(new).unwrap();
        resource.reap().unwrap();
    });
}
