//! The frees that a marker covers, and the cost of markers.

use super::late::{BLOCK, covers_no_later_free};
use super::two_devices;
use crate::common::prelude::*;

/// R23: a block freed while a marker is being recorded is not covered by that marker.
#[test]
fn r23_marker_covers_no_free_that_came_after_its_record() {
    covers_no_later_free(
        "cuEventRecord",
        |allocator, [_, b]| drop(allocator.allocate(512, b).unwrap()),
        |rig, a| {
            let Some(sim) = rig.sim() else { return };
            assert!(!interlude::is_due(), "no marker was recorded");
            // The marker that was recorded first completes, the late use does not.
            assert_eq!(sim.complete_stream(a.id().unwrap(), 1), 1);
        },
    );
}

/// R32: in steady state no event is created.
#[test]
fn r32_r74_steady_state_creates_no_events_and_holds_no_more() {
    each(|rig| {
        let allocator = rig.checked_limit(200 * MIB);
        let streams: [Stream; 3] = rig.streams();
        rig.set_mode(Mode::Lag(4));
        let round = |at: usize| {
            let (own, other) = (&streams[at % 3], &streams[(at + 1) % 3]);
            for bytes in [3 * KIB, 3 * MIB, 12 * MIB] {
                let block = allocator.allocate(bytes, own).unwrap();
                block.record_stream(other).unwrap();
                // A stream that is idle when its memory is requested needs no marker.
                rig.stamp(block.ptr(), 3 * KIB, 1, own);
                drop(block);
            }
            if let Some(sim) = rig.maybe_sim() {
                sim.advance_row();
            } else {
                own.synchronize().unwrap();
            }
        };
        // Long enough for the batches of small blocks, too.
        (0..12_000).for_each(round);
        let (events, early) = (rig.calls("cuEventCreate"), allocator.stats());
        (0..1000).for_each(round);
        let late = allocator.stats();
        assert_eq!(late.all.reserved, early.all.reserved);
        assert_eq!(
            (late.misses, late.all.allocations.current),
            (early.misses, 0)
        );
        assert!(
            late.nodes <= early.nodes + 8,
            "{} {}",
            late.nodes,
            early.nodes
        );
        if rig.maybe_sim().is_some() {
            let recorded = late.markers - early.markers;
            // Each use of a large block takes one; those of small blocks share theirs in batches.
            assert!((100..4100).contains(&recorded), "{recorded} markers");
        }
        assert_eq!(rig.calls("cuEventCreate"), events);
    });
}

/// R33: events are reused in the context that they were made in only.
#[test]
fn r33_event_pools_are_per_context() {
    two_devices(|rig, second| {
        let (allocator, [a, b]) = rig.scene();
        let foreign = Stream::new(second).unwrap();
        for round in 0..30 {
            let block = allocator.allocate(BLOCK, &a).unwrap();
            let first = if round % 2 == 0 { &foreign } else { &b };
            block.record_use(first).unwrap();
            block.record_stream(&foreign).unwrap();
            drop(block);
        }
        let stats = allocator.stats();
        assert!(stats.markers > 30);
        assert_eq!(stats.failed_markers, 0);
        assert!(
            rig.calls("cuEventCreate") < stats.markers,
            "events are reused"
        );
    });
}
