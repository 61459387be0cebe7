//! Traces made up by rules.

use cualloc::trace::generate::{Kind, Program, Rows, vary, vary_rows};
use cualloc::trace::{Op, Row, Trace};

const KINDS: [Kind; 4] = [Kind::Large, Kind::Sharded, Kind::Random, Kind::Churn];

fn program(kind: Kind, seed: u64, rows: usize) -> Program {
    let mut program = Program::new(kind, seed);
    program.rows = Some(rows);
    program
}

fn trace(kind: Kind, seed: u64, rows: usize) -> Trace {
    program(kind, seed, rows).trace("made up").unwrap()
}

/// Depends on every field of every row (FNV-1a).
fn fingerprint(trace: &Trace) -> u64 {
    trace
        .rows()
        .iter()
        .flat_map(|row| {
            [
                row.op as u64,
                row.id as u64,
                row.bytes,
                u64::from(row.stream),
            ]
        })
        .flat_map(u64::to_le_bytes)
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        })
}

/// The largest and the smallest number of live blocks, the latter after the first `warm` rows.
fn live(trace: &Trace, warm: usize) -> (usize, usize) {
    let (mut now, mut most, mut fewest) = (0usize, 0, usize::MAX);
    for (index, row) in trace.rows().iter().enumerate() {
        match row.op {
            Op::Allocate => now += 1,
            _ if trace.allocations()[row.id].released == Some(index) => now -= 1,
            _ => {}
        }
        most = most.max(now);
        if index >= warm {
            fewest = fewest.min(now);
        }
    }
    (most, fewest)
}

#[test]
fn equal_programs_give_equal_traces_and_other_seeds_others() {
    for kind in KINDS {
        let one = fingerprint(&trace(kind, 1, 3000));
        assert_eq!(one, fingerprint(&trace(kind, 1, 3000)), "{kind:?}");
        assert_ne!(one, fingerprint(&trace(kind, 2, 3000)), "{kind:?}");
    }
}

#[test]
fn a_short_program_is_the_beginning_of_a_long_one() {
    for kind in KINDS {
        let (short, long) = (trace(kind, 5, 500), trace(kind, 5, 900));
        assert!(short.rows().len() >= 500, "{kind:?}");
        assert_eq!(short.rows()[..500], long.rows()[..500], "{kind:?}");
    }
}

#[test]
fn large_programs_have_few_large_blocks_of_sizes_that_do_not_repeat() {
    let trace = Program::new(Kind::Large, 3).trace("large").unwrap();
    assert_eq!(trace.rows().len(), 12_000);
    assert_eq!(live(&trace, 100), (12, 4));
    let mut sizes: Vec<u64> = trace
        .allocations()
        .iter()
        .map(|block| block.bytes)
        .collect();
    assert!(
        sizes
            .iter()
            .all(|bytes| (64 << 20..2 << 30).contains(bytes))
    );
    sizes.sort_unstable();
    let blocks = sizes.len();
    sizes.dedup();
    assert!(
        sizes.len() * 1000 >= blocks * 999,
        "{} of {blocks}",
        sizes.len()
    );
    // The middle of the logarithms, within a tenth.
    let median = sizes[sizes.len() / 2] as f64 / f64::from(64 << 20);
    assert!((5.1..6.3).contains(&median), "{median}");
}

/// The live blocks at each row.
fn live_bytes(trace: &Trace) -> Vec<u64> {
    let rows = trace.rows().iter();
    let live = rows.scan(0, |live, row| {
        match row.op {
            Op::Allocate => *live += row.bytes,
            _ => *live -= trace.allocations()[row.id].bytes,
        }
        Some(*live)
    });
    live.collect()
}

#[test]
fn random_programs_keep_to_their_bounds() {
    for (streams, bound) in [(1, 256 << 20), (3, 1 << 30), (8, 8 << 30)] {
        let mean = [Kind::Random, Kind::Churn].map(|kind| {
            let mut program = program(kind, 7, 20_000);
            (program.streams, program.live) = (Some(streams), Some(bound));
            let trace = program.trace("random").unwrap();
            assert_eq!(trace.streams().len(), usize::from(streams));
            let peak = trace.requested_peak();
            assert!(peak <= bound && peak * 10 >= bound * 9, "{peak} of {bound}");
            let blocks = trace.allocations();
            assert!(
                blocks
                    .iter()
                    .all(|block| (512..512 << 20).contains(&block.bytes))
            );
            live_bytes(&trace).iter().sum::<u64>() / 20_000
        });
        // One wanders, the other stays near its bound.
        assert!(mean[0] * 5 < mean[1] * 4, "{mean:?} of {bound}");
    }
}

#[test]
fn sharded_programs_gather_and_reduce_on_separate_streams() {
    let trace = Program::new(Kind::Sharded, 1).trace("sharded").unwrap();
    assert_eq!(trace.streams(), [0, 1, 2]);
    let of = |stream: u16| {
        trace
            .allocations()
            .iter()
            .filter(move |b| b.stream == u32::from(stream))
    };
    // Gathered blocks are used on another stream, so all of them complete late.
    let late = trace
        .rows()
        .iter()
        .filter(|row| row.op == Op::Complete && row.stream == 1);
    let gathered = of(1).count();
    assert!(gathered >= 4 * 48, "{gathered}");
    assert!(late.count() + 2 >= gathered);
    assert!(of(2).count() >= 4 * 48);
    // Only what is gathered for the next layer and what is kept through is live between the steps.
    assert!(of(1).all(|block| block.released.is_some()));
}

#[test]
fn changed_sizes_stay_within_their_share() {
    let first = trace(Kind::Sharded, 2, 1500);
    let vary_rows = vary(&first, "varied", 3, 20, 9).unwrap();
    let blocks = first.allocations().len();
    assert_eq!(vary_rows.allocations().len(), 3 * blocks);
    let mut same = 0;
    for (index, block) in vary_rows.allocations().iter().enumerate() {
        let was = first.allocations()[index % blocks].bytes;
        assert!(block.released.is_some());
        assert!(block.bytes * 100 >= was * 79 && block.bytes * 100 <= was * 121);
        same += u32::from(block.bytes == was);
    }
    assert!((same as usize) < blocks / 5, "{same} of {blocks}");
    assert_eq!(
        fingerprint(&vary(&first, "same", 1, 0, 1).unwrap()) == fingerprint(&first),
        {
            first
                .allocations()
                .iter()
                .all(|block| block.released.is_some())
        }
    );
}

/// The rows, and whether the reported figures are those of a trace of them.
fn agree(mut rows: Rows<'_>) {
    let all: Vec<_> = rows.by_ref().collect();
    let trace = Trace::from_rows("all", all.iter().copied()).unwrap();
    assert_eq!(rows.rows(), trace.rows().len());
    assert_eq!(rows.allocations(), trace.allocations().len());
    assert_eq!(rows.streams(), trace.streams().len());
    assert_eq!(rows.requested_peak().unwrap(), trace.requested_peak());
}

#[test]
fn figures_of_rows_that_are_not_kept_are_those_of_the_trace() {
    for kind in KINDS {
        // Wherever it is cut off: what is free there and completes later never does.
        for rows in [
            0, 1, 77, 78, 79, 80, 300, 301, 302, 303, 304, 305, 306, 307, 2000,
        ] {
            agree(program(kind, 3, rows).rows());
        }
        agree(vary_rows(&trace(kind, 3, 1500), 3, 30, 1));
    }
    agree(Program::new(Kind::Sharded, 1).rows());
}

/// Copies keep failed requests in their places and change their sizes as they change others.
#[test]
fn varied_traces_keep_failed_requests() {
    let text = "op,id,bytes,stream\noom,0,1000,2\na,0,1000,0\noom,0,1000000,0\nf,0,0,0\n";
    let trace = Trace::read("failed", text.as_bytes()).unwrap();
    let ops = [Op::Oom, Op::Allocate, Op::Oom, Op::Free].repeat(2);
    let rows: Vec<Row> = vary_rows(&trace, 2, 20, 1).collect();
    assert_eq!(rows.iter().map(|row| row.op).collect::<Vec<_>>(), ops);
    let large = |row: &Row| (800_000..=1_200_000).contains(&row.bytes);
    assert!(large(&rows[2]) && large(&rows[6]) && rows[2].bytes != rows[6].bytes);
    assert_eq!((rows[0].stream, rows[2].stream), (2, 0));
    agree(vary_rows(&trace, 3, 30, 1));
}

#[test]
fn sizes_that_no_longer_fit_are_reported() {
    let text = format!("op,id,bytes,stream\na,0,{},0\n", u64::MAX - 7);
    let huge = Trace::read("huge", text.as_bytes()).unwrap();
    for seed in 0..20 {
        let mut rows = vary_rows(&huge, 4, 99, seed);
        assert_eq!(rows.by_ref().count(), 8);
        assert!(rows.requested_peak().is_ok());
    }
    let text = format!("op,id,bytes,stream\na,0,{0},0\na,1,{0},0\n", u64::MAX / 2);
    let two = Trace::read("two", text.as_bytes()).unwrap();
    let mut told = 0;
    for seed in 0..20 {
        let mut rows = vary_rows(&two, 1, 99, seed);
        let fits = Trace::from_rows("two", rows.by_ref());
        assert_eq!(fits.is_err(), rows.requested_peak().is_err());
        told += usize::from(fits.is_err());
    }
    assert!((1..20).contains(&told), "{told}");
}

#[test]
fn written_traces_are_read_back() {
    for kind in KINDS {
        let trace = trace(kind, 4, 700);
        let mut text = Vec::new();
        trace.write(&mut text).unwrap();
        let read = Trace::read("again", text.as_slice()).unwrap();
        assert_eq!(fingerprint(&read), fingerprint(&trace), "{kind:?}");
        assert_eq!(read.requested_peak(), trace.requested_peak());
    }
}

#[test]
fn rows_that_break_the_format_make_no_trace() {
    let mut rows = trace(Kind::Large, 1, 50).rows().to_vec();
    rows[10].id += 1000;
    let error = Trace::from_rows("broken", rows).unwrap_err();
    assert_eq!(error.line(), Trace::line_of(10));
}
