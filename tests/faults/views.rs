//! Paths through second layouts of memory.

use cualloc::Error;

use crate::world::{MIB, PACKED, PLAIN, Scenario, World};

/// Two and a half handles.
const PART: usize = 5 * MIB;
/// The largest block over two free parts.
const TWO: usize = 9 * MIB;

const SCATTERED: Scenario = Scenario {
    policies: PACKED,
    limit: Some(20 << 20),
    ..PLAIN
};

/// Parts in a row, of which every second one, allocated on stream `on`, is free.
fn scattered(w: &mut World, pieces: usize, on: usize) {
    let first = w.blocks.len();
    for _ in 0..pieces {
        w.put(PART, 0);
        w.put(PART, on);
    }
    (0..pieces).for_each(|at| w.free(first + 2 * at + 1).unwrap());
}

/// The same, with a view over two of the free parts in which no block is left.
fn viewed(w: &mut World, pieces: usize) {
    scattered(w, pieces, 0);
    w.settle();
    w.put(TWO, 0);
    w.free(2 * pieces).unwrap();
    assert_eq!(w.alloc.stats().reclaim.stitched, 1);
    w.settle();
}

/// 20 MiB of which half a MiB and three whole handles are free, a tail of 1.5 MiB, and a whole handle and
/// half of the next.
fn open_ends(w: &mut World) {
    let first = w.blocks.len();
    let row = [1536, 6656, 2560, 1536, 2048, 3072, 3072];
    row.iter().for_each(|kib| w.put(kib << 10, 0));
    [1, 3, 5].iter().for_each(|at| w.free(first + at).unwrap());
}

/// Without a fault the act is what its name says.
fn stitched(w: &World) -> bool {
    w.alloc.stats().reclaim.stitched > 0
}

pub fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "stitch",
            proof: stitched,
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
            },
            act: |w| w.take(TWO, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "stitch behind waits",
            proof: stitched,
            prepare: |w| {
                w.stream();
                w.put(100, 1);
                scattered(w, 2, 1);
            },
            limit: Some(22 << 20),
            act: |w| w.take(TWO, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "stitch with new memory",
            proof: stitched,
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
            },
            limit: Some(22 << 20),
            act: |w| w.take(TWO + 2 * MIB, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "stitch between open ends, with memory made before",
            proof: |w| stitched(w) && w.alloc.stats().all.reserved.current == 22 << 20,
            prepare: |w| {
                open_ends(w);
                w.settle();
            },
            limit: Some(22 << 20),
            act: |w| w.take(12 * MIB + MIB / 2, 0),
            ..SCATTERED
        },
        Scenario {
            name: "stitch on a full device",
            proof: stitched,
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
            },
            memory: 22 << 20,
            limit: None,
            act: |w| w.take(TWO + 2 * MIB, 0),
            ..SCATTERED
        },
        Scenario {
            name: "extension",
            proof: |w| w.alloc.stats().reclaim.stitched == 2,
            prepare: |w| viewed(w, 4),
            limit: Some(40 << 20),
            act: |w| w.take(TWO + 4 * MIB, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "extension behind a live block",
            proof: |w| w.alloc.stats().reclaim.stitched == 2,
            prepare: |w| {
                viewed(w, 4);
                w.put(6 * MIB, 0);
                w.settle();
            },
            limit: Some(40 << 20),
            act: |w| w.take(11 * MIB, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "a run in a view behind a wait",
            proof: |w| w.alloc.stats().reclaim.views > 0,
            prepare: |w| {
                viewed(w, 2);
                w.stream();
                w.put(PART, 1);
                w.free(5).unwrap();
            },
            act: |w| w.take(TWO, 0),
            atomic: true,
            ..SCATTERED
        },
        Scenario {
            name: "free of a block in a view that another stream uses",
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
                w.put(TWO, 0);
                w.stream();
                w.blocks[4]
                    .as_ref()
                    .unwrap()
                    .record_stream(&w.streams[1])
                    .unwrap();
                w.settle();
                w.sim.busy(w.streams[1].raw(), 1000).unwrap();
            },
            act: |w| w.free(4),
            ..SCATTERED
        },
        Scenario {
            name: "eviction for another arena",
            proof: |w| w.driver.calls().get("cuMemUnmap") > 1,
            prepare: |w| viewed(w, 2),
            act: |w| w.take(100, 0),
            ..SCATTERED
        },
        Scenario {
            name: "trim of one view beside another in use",
            prepare: |w| {
                scattered(w, 4, 0);
                w.settle();
                w.put(TWO, 0);
                w.put(TWO, 0);
                assert_eq!(w.alloc.stats().reclaim.stitched, 2);
                w.free(8).unwrap();
                w.settle();
            },
            limit: Some(40 << 20),
            act: |w| w.alloc.trim(0).map(drop),
            ..SCATTERED
        },
        Scenario {
            name: "trim while another stream uses a view",
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
                w.put(TWO, 0);
                w.stream();
                w.blocks[4]
                    .as_ref()
                    .unwrap()
                    .record_stream(&w.streams[1])
                    .unwrap();
                w.settle();
                w.sim.busy(w.streams[1].raw(), 1000).unwrap();
                w.free(4).unwrap();
            },
            act: |w| {
                w.alloc.trim(0)?;
                w.take(TWO, 0)
            },
            ..SCATTERED
        },
        Scenario {
            name: "host wait for a view in use",
            proof: |w| w.driver.calls().get("cuMemUnmap") > 1,
            prepare: |w| {
                scattered(w, 2, 0);
                w.settle();
                w.put(TWO, 0);
                w.stream();
                w.blocks[4]
                    .as_ref()
                    .unwrap()
                    .record_stream(&w.streams[1])
                    .unwrap();
                w.settle();
                w.work(4, 1);
                w.free(4).unwrap();
            },
            act: |w| w.take(100, 0),
            ..SCATTERED
        },
        Scenario {
            name: "close with views",
            prepare: |w| {
                viewed(w, 2);
                w.blocks.clear();
            },
            act: |w| match w.alloc.close() {
                Err(Error::Closed) => Ok(()),
                result => result,
            },
            ..SCATTERED
        },
    ]
}
