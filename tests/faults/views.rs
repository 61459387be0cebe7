//! Paths through second layouts of memory.

use crate::world::{Act, MIB, PACKED, Scenario, World, close};

/// Two and a half handles.
const PART: usize = 5 * MIB;
/// The largest block over two free parts.
const TWO: usize = 9 * MIB;

fn scattered_case(name: &'static str, act: Act) -> Scenario {
    Scenario::of(name, act).policies(PACKED).limit(20 << 20)
}

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

/// A view over two of the free parts, with a block that is recorded on another stream.
fn shared_view(w: &mut World) {
    scattered(w, 2, 0);
    w.settle();
    w.put(TWO, 0);
    w.stream();
    w.record(4, 1);
    w.settle();
}

/// A [shared view](shared_view) whose other stream is busy.
fn used_view(w: &mut World) {
    shared_view(w);
    w.sim.busy(w.streams[1].raw(), 1000).unwrap();
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
        scattered_case("stitch", |w| w.take(TWO, 0))
            .after(|w| {
                scattered(w, 2, 0);
                w.settle();
            })
            .atomic()
            .proof(stitched),
        scattered_case("stitch behind waits", |w| w.take(TWO, 0))
            .limit(22 << 20)
            .after(|w| {
                w.stream();
                w.put(100, 1);
                scattered(w, 2, 1);
            })
            .atomic()
            .proof(stitched),
        scattered_case("stitch with new memory", |w| w.take(TWO + 2 * MIB, 0))
            .limit(22 << 20)
            .after(|w| {
                scattered(w, 2, 0);
                w.settle();
            })
            .atomic()
            .proof(stitched),
        scattered_case("stitch between open ends, with memory made before", |w| {
            w.take(12 * MIB + MIB / 2, 0)
        })
        .limit(22 << 20)
        .after(|w| {
            open_ends(w);
            w.settle();
        })
        .proof(|w| stitched(w) && w.alloc.stats().all.reserved.current == 22 << 20),
        Scenario::of("stitch on a full device", |w| w.take(TWO + 2 * MIB, 0))
            .policies(PACKED)
            .memory(22 << 20)
            .after(|w| {
                scattered(w, 2, 0);
                w.settle();
            })
            .proof(stitched),
        scattered_case("extension", |w| w.take(TWO + 4 * MIB, 0))
            .limit(40 << 20)
            .after(|w| viewed(w, 4))
            .atomic()
            .proof(|w| w.alloc.stats().reclaim.stitched == 2),
        scattered_case("extension behind a live block", |w| w.take(11 * MIB, 0))
            .limit(40 << 20)
            .after(|w| {
                viewed(w, 4);
                w.put(6 * MIB, 0);
                w.settle();
            })
            .atomic()
            .proof(|w| w.alloc.stats().reclaim.stitched == 2),
        scattered_case("a run in a view behind a wait", |w| w.take(TWO, 0))
            .after(|w| {
                viewed(w, 2);
                w.stream();
                w.put(PART, 1);
                w.free(5).unwrap();
            })
            .atomic()
            .proof(|w| w.alloc.stats().reclaim.views > 0),
        scattered_case("free of a block in a view that another stream uses", |w| {
            w.free(4)
        })
        .after(used_view),
        scattered_case("eviction for another arena", |w| w.take(100, 0))
            .after(|w| viewed(w, 2))
            .proof(|w| w.driver.calls().get("cuMemUnmap") > 1),
        scattered_case("trim of one view beside another in use", |w| {
            w.alloc.trim(0).map(drop)
        })
        .limit(40 << 20)
        .after(|w| {
            scattered(w, 4, 0);
            w.settle();
            w.put(TWO, 0);
            w.put(TWO, 0);
            assert_eq!(w.alloc.stats().reclaim.stitched, 2);
            w.free(8).unwrap();
            w.settle();
        }),
        scattered_case("trim while another stream uses a view", |w| {
            w.alloc.trim(0)?;
            w.take(TWO, 0)
        })
        .after(|w| {
            used_view(w);
            w.free(4).unwrap();
        }),
        scattered_case("host wait for a view in use", |w| w.take(100, 0))
            .after(|w| {
                shared_view(w);
                w.work(4, 1);
                w.free(4).unwrap();
            })
            .proof(|w| w.driver.calls().get("cuMemUnmap") > 1),
        scattered_case("close with views", close).after(|w| {
            viewed(w, 2);
            w.blocks.clear();
        }),
    ]
}
