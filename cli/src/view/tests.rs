use super::film::Film;
use super::{Frame, page};
use crate::machine::simulator;
use cualloc::allocator::{BlockState, Config};
use cualloc::trace::{Op, Replay, Row, Trace};

/// A trace of blocks of growing and shrinking sizes on two streams.
fn trace(name: &str, blocks: usize) -> Trace {
    let mut rows = Vec::new();
    let row = |op, id: usize, bytes| Row {
        op,
        stream: (id % 2) as u16 * 7,
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

/// The replay of a trace under this limit, and the page it makes.
fn written(trace: &Trace, limit: Option<u64>) -> String {
    let simulator = simulator(8 << 30).unwrap();
    let frame = Frame {
        trace,
        before: None,
        limit,
        memory: 8 << 30,
        config: Some("limit=</script><img src=x onerror=alert(1)>"),
    };
    let context = simulator.context(0).unwrap();
    let page = page(
        &frame,
        Replay::new(trace).config(Config::default().limit(limit)),
        3,
        &context,
    )
    .unwrap();
    let mut text = Vec::new();
    page.write(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn curves_are_those_of_the_allocator_row_by_row() {
    let trace = trace("sums", 400);
    let simulator = simulator(8 << 30).unwrap();
    let mut film = Film::new(&trace, 4);
    let mut told = Vec::new();
    let report = Replay::new(&trace)
        .watch(|seen| {
            film.watch(seen);
            let all = seen.allocator.stats().all;
            told.push([
                all.requested.current,
                all.allocated.current,
                all.reserved.current,
            ]);
        })
        .run(&simulator.context(0).unwrap())
        .unwrap();
    assert!(report.is_clean());
    assert_eq!(film.rows(), trace.rows().len());
    for (row, expected) in told.iter().enumerate() {
        let shown = [film.requested[row], film.allocated[row], film.reserved[row]];
        assert_eq!(shown, *expected, "after row {row}");
    }
    assert_eq!(film.requested.iter().max(), Some(&trace.requested_peak()));
    assert_eq!(film.reserved.iter().max(), Some(&report.reserved_peak));
}

#[test]
fn maps_hold_what_the_curves_say() {
    let trace = trace("maps", 400);
    let simulator = simulator(8 << 30).unwrap();
    let mut film = Film::new(&trace, 4);
    let replay = Replay::new(&trace).watch(|seen| film.watch(seen));
    replay.run(&simulator.context(0).unwrap()).unwrap();
    let rows: Vec<usize> = film.maps.iter().map(|map| map.row).collect();
    assert!(
        rows.is_sorted() && (5..=6).contains(&rows.len()),
        "{rows:?}"
    );
    assert_eq!(rows.last(), Some(&(trace.rows().len() - 1)));
    let peak = film.requested.iter().max().unwrap();
    assert!(rows.iter().any(|row| film.requested[*row] == *peak));
    for map in &film.maps {
        let home = || map.segments.iter().filter(|segment| !segment.view);
        let held: u64 = home().map(|segment| segment.size).sum();
        assert_eq!(held, film.reserved[map.row]);
        let blocks = map.segments.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockState::Live);
        assert_eq!(
            live.map(|block| block.size).sum::<u64>(),
            film.allocated[map.row]
        );
    }
}

#[test]
fn names_and_settings_stay_text() {
    let hostile = "</script><script>alert(1)</script><!--\" '`${x}";
    let text = written(&trace(hostile, 20), None);
    // Three scripts of the page's own, and the page says so to the browser.
    assert_eq!(text.matches("<script").count(), 3);
    assert_eq!(text.matches("</script>").count(), 3);
    assert!(!text.contains("<img") && !text.contains("<!--"));
    let meta = text.split("id=\"meta\">").nth(1).unwrap();
    let meta = meta.split("</script>").next().unwrap();
    let meta: serde_json::Value = serde_json::from_str(meta).unwrap();
    assert_eq!(meta["name"], hostile);
    let nonce = text.split("script-src 'nonce-").nth(1).unwrap();
    let nonce = nonce.split('\'').next().unwrap();
    assert!(nonce.len() == 16 && text.contains(&format!("<script nonce=\"{nonce}\">")));
    assert!(text.contains("default-src 'none'"));
}

#[test]
fn a_replay_out_of_memory_ends_in_its_picture() {
    let trace = trace("full", 400);
    let limit = trace.requested_peak() / 2;
    let text = written(&trace, Some(limit));
    let meta = text.split("id=\"meta\">").nth(1).unwrap();
    let meta = meta.split("</script>").next().unwrap();
    let meta: serde_json::Value = serde_json::from_str(meta).unwrap();
    let rows = meta["rows"].as_u64().unwrap();
    assert!(rows > 0 && rows < meta["rows_of_file"].as_u64().unwrap());
    assert!(
        meta["error"]
            .as_str()
            .unwrap()
            .starts_with(&format!("row {rows} failed"))
    );
    let failed = trace.rows()[rows as usize - 1];
    assert_eq!(meta["out_of_memory"]["requested"], failed.bytes);
}

#[test]
fn pages_of_many_events_are_small() {
    let text = |blocks| written(&trace("size", blocks), None).len();
    let (few, many) = (text(1_000), text(11_000));
    // 16 MB for a million events would be 16 bytes each.
    let events = trace("size", 11_000).rows().len() - trace("size", 1_000).rows().len();
    assert!((many - few) < 12 * events, "{few} {many} {events}");
}
