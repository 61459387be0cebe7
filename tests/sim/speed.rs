//! Long runs stay fast and small. Nothing here judges time; `--nocapture` shows it.

use crate::support::*;
use cualloc::sim::Mode;
use std::time::Instant;

#[test]
fn a_million_calls_in_each_mode() {
    for mode in [Mode::Instant, Mode::Lag(200)] {
        let bench = bench();
        bench.sim.set_mode(mode);
        let streams: Vec<_> = (0..4).map(|_| bench.stream()).collect();
        let events: Vec<_> = (0..64).map(|_| bench.event()).collect();
        let memory = bench.alloc(64 << 20);
        let start = Instant::now();
        let rows = 100_000usize;
        for row in 0..rows {
            let stream = streams[row % 4];
            // Each stream has a quarter of its own.
            let at = memory + (row as u64 % 4) * (16 << 20) + (row as u64 * 4096) % (8 << 20);
            bench.memset(at, row as u8, 4096, stream);
            bench.record(events[row % 64], stream);
            let _ = bench.query(events[(row + 1) % 64]);
            bench.wait(streams[(row + 1) % 4], events[row % 64]);
            bench.stream_id(stream);
            bench.sim.advance_row();
        }
        let each = start.elapsed().as_nanos() / (rows as u128 * 6);
        eprintln!("{mode:?}: {each} ns per call");
        bench.sync();
        bench.silent();
    }
}

#[test]
fn the_cost_of_single_calls() {
    let bench = bench();
    let stream = bench.stream();
    let event = bench.event();
    let memory = bench.alloc(1 << 20);
    let time = |name: &str, run: &dyn Fn()| {
        let start = Instant::now();
        for _ in 0..100_000 {
            run();
        }
        eprintln!("{name}: {} ns", start.elapsed().as_nanos() / 100_000);
    };
    time("stream id", &|| assert_ne!(bench.stream_id(stream), 0));
    time("record", &|| bench.record(event, stream));
    time("query", &|| assert_eq!(bench.query(event), OK));
    time("memset", &|| bench.memset(memory, 1, 4096, stream));
    time("alloc and free", &|| {
        let memory = bench.alloc(1 << 20);
        assert_eq!(call!(bench, cuMemFree_v2(memory)), OK);
    });
    time("create, map, access, unmap, release, free", &|| {
        let (at, handle) = bench.mapped(GRANULE);
        assert_eq!(call!(bench, cuMemUnmap(at, GRANULE)), OK);
        assert_eq!(call!(bench, cuMemRelease(handle)), OK);
        assert_eq!(call!(bench, cuMemAddressFree(at, GRANULE)), OK);
    });
    bench.silent();
    assert_eq!(bench.sim.leaks().handles, 0);
}
