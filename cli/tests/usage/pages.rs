//! Pages of `cualloc view`.

use crate::files::{folder, text};
use crate::{
    data, fed, file, meta, object, packed, refused, replayed, run, scratch, stderr, stdout,
};

#[test]
fn a_page_is_made_of_a_trace_and_of_a_replay_that_fails() {
    let page = |arguments: &[&str]| {
        let output = fed(
            &[&["view", "-", "-o", "-"], arguments].concat(),
            &text("lf.csv"),
        );
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let page = stdout(&output);
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        (page, stderr(&output))
    };
    let (whole, said) = page(&["--policy", "classic", "--maps", "0"]);
    assert!(whole.contains("\"policy\":\"classic\"") && whole.contains("\"error\":null"));
    assert_eq!(said, "");
    let (short, said) = page(&["--limit", "1K"]);
    assert!(
        said.contains("the page ends where the replay did: row 1 failed"),
        "{said}"
    );
    assert!(short.contains("\"cause\":\"limit\""));
    let path = scratch().join("page.html");
    let name = path.to_str().unwrap();
    let lf = data("lf.csv");
    assert!(run(&["view", &lf, "-o", name]).status.success());
    assert!(
        std::fs::read(&path)
            .unwrap()
            .starts_with(b"<!DOCTYPE html>")
    );
    refused(
        &run(&["view", &lf, "-o", name, "--device", "cuda"]),
        "simulator",
    );
    refused(&run(&["view", &lf, "-o", name, "--limit", "0"]), "limit");
    let output = run(&["view", &data("none.csv"), "-o", name, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(object(&output)["completed"], false);
    let output = run(&["view", &lf, "-o", "/nowhere/page.html"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot be written"));
}

/// A snapshot of PyTorch's as JSON: two blocks in one stack, the first freed.
const SNAPSHOT: &str = r#" {"segments": [], "device_traces": [[
    {"action": "alloc", "addr": 512, "size": 3000, "stream": 0, "frames": [{"filename": "/m/a.py", "line": 7, "name": "f"}]},
    {"action": "alloc", "addr": 8192, "size": 70000, "stream": 5, "frames": [{"filename": "/m/a.py", "line": 7, "name": "f"}]},
    {"action": "free_requested", "addr": 512, "size": 3000, "stream": 0},
    {"action": "free_completed", "addr": 512, "size": 3000, "stream": 0}]]}"#;

/// The page of a program that ran out of memory begins with that: the request, who held the memory, and the limit.
#[test]
fn a_page_shows_the_request_that_failed() {
    use cualloc::record::{Context, Recorder, Target};
    use cualloc::sim::{SimConfig, Simulator};
    let folder = folder("failed", "run.rec", b"");
    let path = folder.join("run.rec");
    let simulator = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let context = simulator.context(0).unwrap();
    let config = cualloc::Config::new().limit(Some(64 << 20));
    let allocator = cualloc::Allocator::with_config(&context, config).unwrap();
    let stream = allocator.create_stream().unwrap();
    let recorder = Recorder::start(Target::File(&path)).unwrap();
    let mut live = Vec::new();
    for (name, mib, count) in [("model;weights", 6, 2), ("step;</script>", 4, 10)] {
        Context::new(name).enter();
        live.extend((0..count).map(|_| allocator.allocate(mib << 20, &stream).unwrap()));
    }
    assert!(allocator.allocate(20 << 20, &stream).is_err());
    Context::NONE.enter();
    drop(live);
    recorder.finish().unwrap();
    let file = path.to_str().unwrap();
    let recorded = run(&["view", "-q", file, "-o", "-"]);
    assert!(recorded.status.success(), "{recorded:?}");
    let page = stdout(&recorded);
    let shown = meta(&page);
    let oom = &shown["out_of_memory"];
    let mib = |mib: u64| mib << 20;
    assert_eq!(
        (oom["recorded"].as_bool(), oom["row"].as_u64()),
        (Some(true), Some(12))
    );
    assert_eq!(oom["cause"], "limit");
    for (name, bytes) in [
        ("requested", 20),
        ("live", 52),
        ("bound", 64),
        ("missing", 8),
    ] {
        assert_eq!(oom[name], mib(bytes), "{name}");
    }
    let advice = oom["advice"].as_str().unwrap();
    assert!(
        advice.starts_with("Raise the limit by 8388608 bytes"),
        "{advice}"
    );
    let holders = oom["holders"].as_array().unwrap();
    let held = holders
        .iter()
        .map(|of| (of["name"].as_str().unwrap(), of["bytes"].as_u64()));
    let expected = [
        ("step;</script>", Some(mib(40))),
        ("model;weights", Some(mib(12))),
    ];
    assert!(held.eq(expected), "{holders:?}");
    assert_eq!(holders[0]["blocks"], 10);
    assert_eq!(
        shown["failed"],
        serde_json::json!([[12, mib(20), mib(52), "limit", "step;</script>"]])
    );
    assert_eq!(
        shown["recorded"],
        serde_json::json!({"limit": mib(64), "memory": 1u64 << 30})
    );
    assert_eq!(
        (&shown["error"], &shown["limit"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
    // As a trace and as a snapshot it knows the request and who held the memory.
    for to in ["csv", "pytorch"] {
        let exported = run(&["export", file, "--to", to, "--out", "-"]);
        let page = stdout(&fed(&["view", "-q", "-", "-o", "-"], &exported.stdout));
        let shown = meta(&page);
        let oom = &shown["out_of_memory"];
        assert_eq!(
            (&oom["requested"], &oom["live"]),
            (&mib(20).into(), &mib(52).into()),
            "{to}"
        );
        assert_eq!(
            (&oom["cause"], &shown["recorded"]["memory"]),
            (&serde_json::Value::Null, &serde_json::Value::Null)
        );
        let of = &oom["holders"][0];
        // A trace as text has no contexts: sizes stand for them.
        let (bytes, blocks) = if to == "csv" { (52, 12) } else { (40, 10) };
        let held = (mib(bytes).into(), blocks.into());
        assert_eq!((&of["bytes"], &of["blocks"]), (&held.0, &held.1), "{to}");
        let free = match to {
            "csv" => serde_json::Value::Null,
            _ => ((1u64 << 30) - mib(52)).into(),
        };
        assert_eq!(oom["driver_free"], free, "{to}");
    }
    // A replay that runs out of memory itself is what its page is about.
    let page = stdout(&run(&["view", "-q", file, "-o", "-", "--limit", "32M"]));
    let shown = meta(&page);
    assert!(shown["error"].is_string() && shown["out_of_memory"]["recorded"].is_null());
    assert_eq!(shown["out_of_memory"]["holders"][0]["by"], "size");
    assert_eq!(shown["failed"].as_array().unwrap().len(), 1);
}

#[test]
fn snapshots_are_read_as_json_too() {
    let path = file("snapshot.json", SNAPSHOT.as_bytes());
    let line = object(&replayed(&path));
    assert_eq!(line["trace"], "snapshot");
    assert_eq!(line["requested_peak_bytes"], 73_000);
    let packed = packed(SNAPSHOT.as_bytes());
    let output = fed(&["replay", "--device", "sim", "--json", "-"], &packed);
    assert_eq!(object(&output)["rows"], 3);
    let output = fed(&["replay", "--device", "sim", "-"], b"{\"segments\": [}");
    assert_eq!(output.status.code(), Some(1));
    let complaint = stderr(&output);
    let why = "error: <stdin>: this looks like JSON with an error (expected value at line 1 column 15), which is not read";
    assert!(complaint.starts_with(why), "{complaint}");
}

#[test]
fn a_page_of_two_files_shows_the_changes() {
    let (before, after) = (file("two.json", SNAPSHOT.as_bytes()), data("lf.csv"));
    let before = before.to_str().unwrap();
    let page = run(&["view", "-q", before, &after, "-o", "-"]);
    assert_eq!(page.status.code(), Some(0), "{}", stderr(&page));
    let meta = meta(&stdout(&page));
    assert_eq!(meta["name"], "lf");
    let both = &meta["difference"];
    assert_eq!(
        [&both["before"]["name"], &both["after"]["name"]],
        ["two", "lf"]
    );
    assert_eq!(both["before"]["requested"], 73_000);
    let peak = both["groups"]["peak"]["context"].as_array().unwrap();
    let stack = peak.iter().find(|line| line[0] == "a.py:7:f").unwrap();
    assert_eq!(stack, &serde_json::json!(["a.py:7:f", 2, 73_000, 0, 0]));

    let alone = run(&["view", "-q", before, "-o", "-"]);
    assert!(stdout(&alone).contains("\"difference\":null"));
    refused(
        &run(&["view", "-", "-", "-o", "x.html"]),
        "stdin can be read once",
    );
    refused(
        &run(&["view", before, before, before, "-o", "x.html"]),
        "unexpected",
    );
    let missing = run(&["view", "-q", "no_such.csv", &after, "-o", "missing.html"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        stderr(&missing).starts_with("error: no_such.csv: "),
        "{}",
        stderr(&missing)
    );
    assert!(!scratch().join("missing.html").exists());
}
