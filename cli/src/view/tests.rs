use super::contexts::Contexts;
use super::difference::{self, Side};
use super::film::{PlacedBlock, ReplayData};
use super::{Frame, STACKS, by_stack, page};
use crate::input::Input;
use crate::machine::simulator;
use cualloc::allocator::BlockState;
use cualloc::record::{Profile, Recording, Snapshot};
use cualloc::trace::{Op, Replay, Row, Trace};
use serde_json::{Value, json};

#[path = "../../../tests/common/recorded.rs"]
mod recorded;

/// A trace of blocks of growing and shrinking sizes on two streams.
fn trace(name: &str, blocks: usize) -> Trace {
    let mut rows = Vec::new();
    let row = |op, id: usize, bytes| Row {
        op,
        stream: (id % 2) as u32 * 7,
        id,
        bytes,
    };
    for id in 0..blocks {
        let bytes = 1 + (id as u64 * 7919) % 97 * ((id as u64 % 5) * 40_000 + 100);
        rows.push(row(Op::Allocate, id, bytes));
        if id >= 9 {
            rows.push(row(Op::Free, id - 9, 0));
        }
        if id >= 12 && id % 3 == 0 {
            rows.push(row(Op::Complete, id - 12, 0));
        }
    }
    Trace::from_rows(name, rows).unwrap()
}

/// The page of a trace's replay.
fn written(trace: Trace, stacks: Option<Profile>) -> String {
    let simulator = simulator(8 << 30).unwrap();
    let mut input = Input::new(trace, Vec::new());
    input.stacks = stacks;
    let frame = Frame {
        input: &input,
        before: None,
        limit: None,
        memory: 8 << 30,
        config: Some("limit=</script><img src=x onerror=alert(1)>"),
    };
    let replay = Replay::new(&input.trace);
    let page = page(&frame, replay, 3, &simulator.context(0).unwrap()).unwrap();
    let mut text = Vec::new();
    page.write(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// The figures and words of a page.
fn meta(page: &str) -> Value {
    let meta = page.split("id=\"meta\">").nth(1).unwrap();
    serde_json::from_str(meta.split("</script>").next().unwrap()).unwrap()
}

/// Bytes of live blocks after each row, which the page adds up.
fn curve(film: &ReplayData<'_>, bytes: fn(&PlacedBlock) -> u64) -> Vec<u64> {
    let mut curve = vec![0; film.rows()];
    for block in &film.blocks {
        let end = block.freed.map_or(film.rows(), |row| row.min(film.rows()));
        for live in &mut curve[block.born..end] {
            *live += bytes(block);
        }
    }
    curve
}

#[test]
fn curves_and_maps_are_those_of_the_allocator() {
    let trace = trace("sums", 400);
    let simulator = simulator(8 << 30).unwrap();
    let mut film = ReplayData::new(&trace, 4);
    let mut expected = Vec::new();
    let replay = Replay::new(&trace).watch(|seen| {
        film.watch(seen);
        let all = seen.allocator.stats().all;
        expected.push([all.requested, all.allocated, all.reserved].map(|amount| amount.current));
    });
    let report = replay.run(&simulator.context(0).unwrap()).unwrap();
    assert!(report.is_clean());
    assert_eq!(film.rows(), trace.rows().len());
    let requested = curve(&film, |block| block.asked);
    let allocated = curve(&film, |block| block.held);
    for (row, expected) in expected.iter().enumerate() {
        let shown = [requested[row], allocated[row], film.reserved[row]];
        assert_eq!(shown, *expected, "after row {row}");
    }
    let peak = trace.requested_peak();
    assert_eq!(requested.iter().max(), Some(&peak));
    assert_eq!(film.reserved.iter().max(), Some(&report.reserved_peak));
    let rows: Vec<usize> = film.maps.iter().map(|map| map.row).collect();
    assert!(
        rows.is_sorted() && (5..=6).contains(&rows.len()),
        "{rows:?}"
    );
    assert_eq!(rows.last(), Some(&(trace.rows().len() - 1)));
    assert!(rows.iter().any(|row| requested[*row] == peak));
    for map in &film.maps {
        let home = map.segments.iter().filter(|segment| !segment.view);
        let held: u64 = home.map(|segment| segment.size).sum();
        assert_eq!(held, film.reserved[map.row]);
        let blocks = map.segments.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockState::Live);
        let live: u64 = live.map(|block| block.size).sum();
        assert_eq!(live, allocated[map.row]);
    }
}

#[test]
fn names_and_settings_stay_text() {
    let hostile = "</script><script>alert(1)</script><!--\" '`${x}";
    let stacks = Profile::of_stacks(&recording_of_stacks(&[hostile.to_owned()]));
    let text = written(trace(hostile, 20), Some(stacks));
    // Three scripts of the page's own, and the page says so to the browser.
    assert_eq!(text.matches("<script").count(), 3);
    assert_eq!(text.matches("</script>").count(), 3);
    assert!(!text.contains("<img") && !text.contains("<!--"));
    let meta = meta(&text);
    assert_eq!(meta["name"], hostile);
    assert_eq!(meta["stacks"][0][1], 1);
    let nonce = text.split("script-src 'nonce-").nth(1).unwrap();
    let nonce = nonce.split('\'').next().unwrap();
    assert!(nonce.len() == 16 && text.contains(&format!("<script nonce=\"{nonce}\">")));
    assert!(text.contains("default-src 'none'"));
}

#[test]
fn pages_of_many_events_are_small() {
    let written = |blocks| {
        let trace = trace("size", blocks);
        (trace.rows().len(), written(trace, None).len())
    };
    let ((few, short), (many, long)) = (written(1_000), written(11_000));
    // 16 MB for a million events would be 16 bytes each.
    assert!(
        long - short < 12 * (many - few),
        "{few} {short} {many} {long}"
    );
}

/// A snapshot's trace with a block for each of these contexts, which say how large it is; none is freed.
fn with_contexts(contexts: impl IntoIterator<Item = (String, u64)>) -> Trace {
    let entries = contexts.into_iter().enumerate().map(|(at, (name, size))| {
        json!({
            "action": "alloc", "addr": 512 * at, "size": size, "stream": 0,
            "frames": [{"filename": "", "line": 0, "name": name}],
        })
    });
    let whole = json!({"segments": [], "device_traces": [entries.collect::<Value>()]});
    let snapshot = Snapshot::read(whole.to_string().as_bytes()).unwrap();
    snapshot.to_trace("contexts", 0).unwrap()
}

#[test]
fn contexts_beyond_the_largest_are_one() {
    let trace = with_contexts((0..5000).map(|at| (format!("c{at}"), 10_000 - at)));
    let contexts = Contexts::of(&trace);
    assert_eq!(contexts.names.len(), 4097);
    assert_eq!(contexts.names[0], "c0");
    assert_eq!(contexts.names[4096], "other contexts");
    assert_eq!(contexts.number(&trace, 0), 1);
    assert_eq!(contexts.number(&trace, 4999), 4097);
    assert_eq!(contexts.number(&trace, 5000), 0);
    let long = "é".repeat(150) + &"x".repeat(40);
    let stack = super::contexts::shorten(&[long.as_str(); 4].join(";"));
    assert_eq!(stack.chars().count(), 601);
    assert!(stack.starts_with('…') && stack.ends_with(&long));
}

#[test]
fn a_difference_adds_up_with_any_number_of_groups() {
    let of = |seed: u64| {
        let size = move |at: u64| 1 + (at * 7919 + seed) % 5000 * (1 + at % 3 * 1000);
        with_contexts((0..300 + seed).map(|at| (format!("c{}", at * (1 + seed)), size(at))))
    };
    let (before, after) = (of(0), of(40));
    let side = |trace| {
        let simulator = simulator(8 << 30).unwrap();
        let report = Replay::new(trace).run(&simulator.context(0).unwrap());
        Side::new(trace, &report.unwrap())
    };
    let found = difference::of(&side(&before), &side(&after));
    let sum = |trace: &Trace| {
        let sizes = trace.allocations().iter().map(|block| block.bytes);
        sizes.sum::<u64>()
    };
    let expected = [300, sum(&before), 340, sum(&after)];
    for instant in ["peak", "end", "all"] {
        for (group, most) in [("context", 201), ("size", 40), ("stream", 1)] {
            let lines = found["groups"][instant][group].as_array().unwrap();
            assert!((1..=most).contains(&lines.len()), "{group}: {lines:?}");
            let totals = [1, 2, 3, 4].map(|column| {
                let numbers = lines.iter().map(|line| line[column].as_u64().unwrap());
                numbers.sum::<u64>()
            });
            assert_eq!(totals, expected, "{instant}, {group}");
        }
    }
    let contexts = found["groups"]["all"]["context"].as_array().unwrap();
    assert!(contexts[200][0].as_str().unwrap().ends_with(" others"));
    assert_eq!(found["after"]["requested"], sum(&after));
    let curve = found["after"]["curve"].as_array().unwrap();
    assert_eq!(curve.last(), Some(&sum(&after).into()));
}

/// A recording with a stack for each allocation, as a stranger may write it.
fn recording_of_stacks(names: &[String]) -> Recording {
    let records = (1..=names.len() as u64).flat_map(|number| {
        let (address, size) = (number << 30, number << 20);
        let allocated = [number, address | 1, size, 0];
        [allocated, [number, address | 10, size, number]]
    });
    // A stack for each 512 bytes, so that a block of many of them stands for itself alone.
    Recording::read(&recorded::recording(1, names, records)).unwrap()
}

#[test]
fn stacks_are_listed_by_bytes_and_none_is_omitted() {
    let names: Vec<String> = (0..STACKS + 5)
        .map(|at| format!("main;holder{at}"))
        .collect();
    let recording = recording_of_stacks(&names);
    let lines = by_stack(&Profile::of_stacks(&recording));
    assert_eq!(lines.len(), STACKS + 1);
    let most = (STACKS as u64 + 5) << 20;
    assert_eq!(lines[0], json!([names[STACKS + 4], 1, most, most]));
    let rest = (1 + 2 + 3 + 4 + 5) << 20;
    assert_eq!(lines[STACKS], json!(["other stacks", 5, rest, rest]));
}
