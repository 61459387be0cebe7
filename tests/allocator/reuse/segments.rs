//! When segments of the classic policy are freed: once they are unused, whatever the freeing call waits for.

use crate::common::prelude::*;

const SEGMENT: usize = 30 * MIB;

/// On a driver whose `cuMemFree` does not guarantee to wait.
fn classic(test: impl Fn(&Rig)) {
    let mut config = SimConfig::with_devices(1, 8 << 30);
    config.strict_free = true;
    only_on(Policy::Classic, config, test);
}

/// Uses a segment on a stream, behind work that keeps the stream busy for a while, and frees it.
fn used<'a>(rig: &'a Rig, allocator: &Allocator, stream: &Stream) -> Hold<'a> {
    let block = allocator.allocate(SEGMENT, stream).unwrap();
    let busy = rig.busy(stream);
    rig.stamp(block.ptr(), SEGMENT, 7, stream);
    busy
}

/// S1: a trim releases complete memory and reports the rest as pending; it does not wait.
#[test]
fn s1_a_trim_leaves_segments_that_are_in_use() {
    classic(|rig| {
        let (allocator, [a, b]) = rig.scene();
        let idle = allocator.allocate(SEGMENT, &b).unwrap();
        b.synchronize().unwrap();
        let busy = used(rig, &allocator, &a);
        drop(idle);
        rig.settle(&b);
        let waits = [
            rig.calls("cuEventSynchronize"),
            rig.calls("cuCtxSynchronize"),
        ];
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!(
            (trimmed.released, trimmed.pending),
            (SEGMENT as u64, SEGMENT as u64)
        );
        let after = [
            rig.calls("cuEventSynchronize"),
            rig.calls("cuCtxSynchronize"),
        ];
        assert_eq!(waits, after);
        drop(busy);
        rig.settle(&a);
        assert_eq!(allocator.trim(0).unwrap().released, SEGMENT as u64);
    });
}

/// S1: below a limit the host waits for the marker of a segment that must be released.
#[test]
fn s1_a_segment_is_released_only_after_a_wait() {
    classic(|rig| {
        for same in [true, false] {
            let (allocator, [a, b]) = rig.scene_limit(SEGMENT + 8 * MIB);
            let _busy = used(rig, &allocator, &a);
            let stream = if same { &a } else { &b };
            let _next = allocator.allocate(SEGMENT + 4 * MIB, stream).unwrap();
            let stats = allocator.stats();
            assert_eq!((stats.reclaim.host_waits, stats.reclaim.released), (1, 1));
            assert_eq!(stats.reclaim.synchronised, 0);
        }
    });
}

/// S1: for memory that was freed on a caller's stream a trim may not record a marker; the last step waits for the
/// context.
#[test]
fn s1_a_segment_without_a_marker_is_waited_for_with_its_context() {
    classic(|rig| {
        let [a] = rig.streams();
        let raw = RawStream::new(rig);
        let allocator = rig.limited(SEGMENT + 8 * MIB);
        let block = allocator.allocate(SEGMENT, &raw.borrowed()).unwrap();
        let busy = rig.busy(&raw.borrowed());
        rig.stamp(block.ptr(), SEGMENT, 7, &raw.borrowed());
        drop(block);
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!((trimmed.released, trimmed.pending), (0, SEGMENT as u64));
        let next = allocator.allocate(SEGMENT + 4 * MIB, &a).unwrap();
        assert_eq!(allocator.stats().reclaim.synchronised, 1);
        drop((next, busy));
        rig.close(&allocator);
        raw.destroy();
    });
}

/// S1: closing waits for memory in use on any stream.
#[test]
fn s1_closing_waits_before_segments_are_freed() {
    classic(|rig| {
        let [a, b] = rig.streams();
        let allocator = rig.allocator();
        let block = allocator.allocate(SEGMENT, &a).unwrap();
        block.record_stream(&b).unwrap();
        let busy = [rig.busy(&a), rig.busy(&b)];
        rig.stamp(block.ptr(), SEGMENT, 7, &b);
        drop(block);
        rig.close(&allocator);
        drop(busy);
    });
}
