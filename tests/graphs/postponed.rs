//! Uses of memory from outside of a pool that are recorded on a stream in a capture which a pool serves: they count
//! from the end of the capture on.

use super::support::*;

/// How a use is recorded.
type Record = fn(&Allocator, &Block, &Stream) -> Result<(), Error>;

/// Each way to record a use of a block on a stream.
const WAYS: [Record; 4] = [
    |_, block, stream| block.record_stream(stream),
    |_, block, stream| block.record_use(stream),
    |allocator, block, stream| allocator.raw_record_stream(block.ptr(), stream.raw()),
    |allocator, block, stream| allocator.raw_record_use(block.ptr(), stream.raw()),
];

/// Small blocks of stream caches, and large ones.
const SIZES: [usize; 3] = [512, 40 * KIB, 4 * MIB];

/// The memory at an address serves a stream again. Small blocks come back with their pages.
fn assert_free_again(rig: &Rig, allocator: &Allocator, (at, bytes): (u64, usize), stream: &Stream) {
    // Asks for what is complete by now.
    allocator.trim(u64::MAX).unwrap();
    assert!(
        bytes <= 64 * KIB || is_given(allocator, bytes, at, stream),
        "{bytes}"
    );
    rig.settle(stream);
    assert_trimmed(rig, allocator);
}

/// Whether a stream gets the memory at an address.
fn is_given(allocator: &Allocator, bytes: usize, at: u64, stream: &Stream) -> bool {
    // More than a page of small blocks has.
    let blocks: Vec<Block> = allocator.allocate_blocks(8 + 64 * KIB / bytes, bytes, stream);
    let bytes = bytes as u64;
    blocks.iter().any(|block| {
        (at..at + bytes).contains(&block.ptr()) || (block.ptr()..block.ptr() + bytes).contains(&at)
    })
}

#[test]
fn a_block_that_a_capture_uses_is_reused_after_the_capture() {
    packed(|rig| {
        for (way, bytes) in WAYS.iter().flat_map(|way| SIZES.map(|bytes| (way, bytes))) {
            let allocator = rig.checked();
            let pool = allocator.graph_pool().unwrap();
            let [owner, capturing] = rig.streams();
            let block = used(rig, &allocator, bytes, &owner);
            rig.settle(&owner);
            let at = block.ptr();
            let graph = capture(&pool, &capturing, || {
                rig.stamp(at, bytes, 1, &capturing);
                way(&allocator, &block, &capturing).unwrap();
                block.free().unwrap();
                assert!(!is_given(&allocator, bytes, at, &owner), "{bytes}");
                allocator.trim(u64::MAX).unwrap();
                allocator.check().unwrap();
                assert!(!is_given(&allocator, bytes, at, &owner), "{bytes}");
            });
            drop(graph);
            allocator.check().unwrap();
            drop(pool);
            assert_free_again(rig, &allocator, (at, bytes), &owner);
        }
    });
}

/// What the stream is given after its capture, until the block is freed, counts as after any recorded use.
#[test]
fn work_after_the_capture_counts_too() {
    packed(|rig| {
        for bytes in SIZES {
            let allocator = rig.checked();
            let pool = allocator.graph_pool().unwrap();
            let [owner, capturing] = rig.streams();
            let block = used(rig, &allocator, bytes, &owner);
            rig.settle(&owner);
            let at = block.ptr();
            drop(capture(&pool, &capturing, || {
                block.record_stream(&capturing).unwrap();
            }));
            let held = rig.hold(&capturing);
            rig.stamp(at, bytes, 2, &capturing);
            drop(block);
            assert!(!is_given(&allocator, bytes, at, &owner), "{bytes}");
            held.release();
            allocator.synchronize().unwrap();
            drop(pool);
            assert_free_again(rig, &allocator, (at, bytes), &owner);
        }
    });
}

/// A scope that does not serve the capture leaves it as it is without one.
#[test]
fn a_capture_that_no_pool_serves_refuses_the_use() {
    pooled(|_rig, allocator, pool, [owner, capturing, other]| {
        let block = allocator.allocate(MIB, &owner).unwrap();
        let before = allocator.block_of(block.ptr());
        let scopes = [
            Scope::Stream(&other),
            Scope::When(Box::new(|_| false)),
            Scope::Capture(u64::MAX),
        ];
        for scope in scopes {
            let scope = pool.enter(scope).unwrap();
            let under_way = Capturing::begin(&capturing, MODE);
            for way in WAYS {
                let refused = way(&allocator, &block, &capturing);
                assert_matches!(refused, Err(Error::Capturing { .. }));
            }
            drop(under_way.end().unwrap());
            scope.leave().unwrap();
        }
        assert_eq!(allocator.block_of(block.ptr()), before);
        let at = block.ptr();
        drop(block);
        assert_eq!(allocator.allocate(MIB, &owner).unwrap().ptr(), at);
    });
}

/// A capture of a raw stream in a pool's scope, through the driver's own functions.
fn raw_capture(pool: &GraphPool, raw: &RawStream, rig: &Rig, work: impl FnOnce()) {
    let scope = pool.enter(Scope::Thread).unwrap();
    super::common::capturing::begin(rig, raw.raw())();
    work();
    let code = super::common::capturing::end(rig, raw.raw())();
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the capture is spoilt");
    scope.leave().unwrap();
}

/// The state of a raw stream in the allocator before it captures.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Known {
    Not,
    Used,
    Adopted,
}

/// The driver does not tell the id of a stream that captures, which the allocator may never have seen before.
#[test]
fn raw_streams_are_found_again_after_the_capture() {
    packed(|rig| {
        if rig.sim().is_none() {
            return;
        }
        for (known, bytes) in [Known::Not, Known::Used, Known::Adopted]
            .into_iter()
            .flat_map(|known| SIZES.map(|bytes| (known, bytes)))
        {
            for named_after in [false, true] {
                let allocator = rig.checked();
                let pool = allocator.graph_pool().unwrap();
                let (owner, raw) = (rig.stream(), RawStream::new(rig));
                match known {
                    Known::Not => {}
                    Known::Used => {
                        let ptr = allocator.raw_allocate(MIB, raw.raw()).unwrap();
                        allocator.raw_free(ptr).unwrap();
                    }
                    Known::Adopted => allocator.raw_adopt(raw.raw()).unwrap(),
                }
                let block = used(rig, &allocator, bytes, &owner);
                rig.settle(&owner);
                let at = block.ptr();
                raw_capture(&pool, &raw, rig, || {
                    allocator.raw_record_stream(at, raw.raw()).unwrap();
                    let refused = allocator.raw_retire(raw.raw());
                    assert_matches!(refused, Err(Error::Capturing { .. }));
                    drop(block);
                    assert!(!is_given(&allocator, bytes, at, &owner), "{known:?}");
                });
                if named_after {
                    let ptr = allocator.raw_allocate(2 * MIB, raw.raw()).unwrap();
                    allocator.raw_free(ptr).unwrap();
                    allocator.check().unwrap();
                }
                raw.retire(&allocator);
                allocator.check().unwrap();
                drop(pool);
                assert_free_again(rig, &allocator, (at, bytes), &owner);
            }
        }
    });
}

/// A stream of this crate that is named by its handle alone is kept alive as long as it is needed.
#[test]
fn a_stream_of_this_crate_is_kept_by_a_use_on_its_handle() {
    pooled(|rig, allocator, pool, [owner, capturing]| {
        let block = used(rig, &allocator, 2 * MIB, &owner);
        rig.settle(&owner);
        drop(capture(&pool, &capturing, || {
            allocator
                .raw_record_stream(block.ptr(), capturing.raw())
                .unwrap();
        }));
        let held = rig.hold(&capturing);
        rig.stamp(block.ptr(), 2 * MIB, 1, &capturing);
        // The allocator is the last to hold it.
        drop(capturing);
        let at = block.ptr();
        drop(block);
        assert_ne!(allocator.allocate(2 * MIB, &owner).unwrap().ptr(), at);
        held.release();
        drop(pool);
        allocator.synchronize().unwrap();
    });
}

/// Where streams go without being retired, another one may have the handle by the time that a call names it.
#[test]
fn a_use_on_a_destroyed_stream_waits_for_the_context() {
    packed(|rig| {
        if rig.sim().is_none() {
            return;
        }
        for bytes in SIZES {
            let allocator = rig.checked_with(Config::new().unretired_streams(true));
            let pool = allocator.graph_pool().unwrap();
            let (owner, raw) = (rig.stream(), RawStream::new(rig));
            let block = used(rig, &allocator, bytes, &owner);
            rig.settle(&owner);
            let (at, handle) = (block.ptr(), raw.raw());
            raw_capture(&pool, &raw, rig, || {
                allocator.raw_record_stream(at, raw.raw()).unwrap();
                drop(block);
            });
            raw.destroy();
            let next = RawStream::new(rig);
            assert_eq!(next.raw(), handle, "the handle comes again");
            let ptr = allocator.raw_allocate(bytes, next.raw()).unwrap();
            assert_ne!(ptr, at);
            allocator.raw_free(ptr).unwrap();
            next.retire(&allocator);
            assert!(!is_given(&allocator, bytes, at, &owner), "{bytes}");
            allocator.synchronize().unwrap();
            drop(pool);
            assert_free_again(rig, &allocator, (at, bytes), &owner);
        }
    });
}
