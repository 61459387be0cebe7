//! Raw streams that are destroyed without retirement, if the settings allow that.

use crate::common::prelude::*;

fn config() -> Config {
    Config::new().unretired_streams(true)
}

/// Sizes that caches of small and of large blocks keep, and the heap alone.
const SIZES: [usize; 5] = [KIB, 24 * KIB, 3 * MIB, 12 * MIB, 40 * MIB];

/// A free never queries or marks the stream, whatever is freed and however much: the simulator rejects handles of
/// destroyed streams.
#[test]
fn blocks_are_freed_after_their_stream_was_destroyed() {
    each(|rig| {
        for checks in [false, true] {
            let (allocator, [other]) = rig.scene_with(config().capture_checks(checks));
            for _ in 0..3 {
                let (stream, reader) = (RawStream::new(rig), RawStream::new(rig));
                let mut kept = Vec::new();
                for at in 0..60 {
                    let ptr = allocator.raw_allocate(SIZES[at % 5], stream.raw());
                    let ptr = ptr.unwrap();
                    if at % 3 == 0 {
                        allocator.raw_record_stream(ptr, reader.raw()).unwrap();
                    }
                    kept.push(ptr);
                }
                stream.destroy();
                reader.destroy();
                for ptr in kept {
                    allocator.raw_free(ptr).unwrap();
                }
                for at in 0..1000 {
                    drop(allocator.allocate(SIZES[at % 3], &other).unwrap());
                }
                assert_eq!(allocator.stats().all.allocated.current, 0);
                allocator.check().unwrap();
            }
            // The caches give back what they keep, and then it is complete.
            allocator.trim(0).unwrap();
            allocator.synchronize().unwrap();
            assert_eq!(allocator.trim(0).unwrap().pending, 0);
        }
    });
}

/// Unfinished work of a destroyed stream is waited for before others get its memory.
#[test]
fn memory_of_a_destroyed_stream_waits_for_its_work() {
    each_simulated(|rig, sim| {
        for bytes in [32 * KIB, 12 * MIB] {
            let allocator = rig.checked_with(config().limit(Some(16 * MIB as u64)));
            let (stream, other) = (RawStream::new(rig), rig.stream());
            sim.set_mode(Mode::Manual);
            let ptr = {
                let ptr = allocator.raw_allocate(bytes, stream.raw()).unwrap();
                rig.stamp(ptr, bytes, 1, &stream.borrowed());
                ptr
            };
            stream.destroy();
            allocator.raw_free(ptr).unwrap();
            let block = allocator.allocate(12 * MIB, &other).unwrap();
            rig.stamp(block.ptr(), 12 * MIB, 2, &other);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
        }
    });
}

/// A stream that is used further is marked by calls that name it, so that its memory becomes available to all streams
/// without a wait.
#[test]
fn a_stream_that_is_named_again_is_marked_then() {
    only(Policy::Packed, |rig| {
        let allocator = rig.checked_with(config());
        let (stream, other) = (RawStream::new(rig), rig.stream());
        drop(allocator.allocate(KIB, &other).unwrap());
        let allocate = |bytes| allocator.raw_allocate(bytes, stream.raw()).unwrap();
        let free = |ptr: sys::CUdeviceptr| {
            allocator.raw_free(ptr).unwrap();
        };
        let large = allocate(40 * MIB);
        let kept = allocate(50 * MIB);
        allocator.trim(0).unwrap();
        let records = rig.calls("cuEventRecord");
        free(large);
        allocator.trim(0).unwrap();
        assert_eq!(
            rig.calls("cuEventRecord"),
            records,
            "the free names no stream"
        );
        assert!(allocator.trim(0).unwrap().pending > 0);
        let next = allocate(60 * MIB);
        assert!(rig.calls("cuEventRecord") > records);
        let waits = rig.calls("cuCtxSynchronize");
        let pending = allocator.trim(0).unwrap().pending;
        assert_eq!(pending, 0);
        assert_eq!(rig.calls("cuCtxSynchronize"), waits);
        free(next);
        free(kept);
        stream.retire(&allocator);
    });
}

/// Streams that are created, used and destroyed without retirement do not fill the device.
#[test]
fn short_lived_streams_leave_their_memory() {
    each_simulated(|rig, _| {
        let (allocator, [other]) = rig.scene_with(config());
        for _ in 0..100 {
            let stream = RawStream::new(rig);
            let ptr = allocator.raw_allocate(40 * MIB, stream.raw()).unwrap();
            stream.destroy();
            allocator.raw_free(ptr).unwrap();
            drop(allocator.allocate(20 * MIB, &other).unwrap());
        }
        let peak = allocator.stats().all.reserved.peak;
        // Some streams are not yet known to be unused.
        assert!(peak <= 512 * MIB as u64, "{peak} bytes held for 60 MiB");
    });
}
