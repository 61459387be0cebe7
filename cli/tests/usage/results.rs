//! Results of the command as programs read them: exit codes, fields, warnings.

use crate::{cualloc, data, file, objects, run, scratch, split, stderr};
use serde_json::Value;
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Output, Stdio};

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn sorted(mut names: Vec<&str>) -> Vec<&str> {
    names.sort_unstable();
    names
}

/// Reading a number of JSON may change its last bit.
fn assert_close(value: &Value, expected: f64) {
    let value = value.as_f64().unwrap();
    assert!((value - expected).abs() < 1e-12, "{value} {expected}");
}

const RECORDINGS: [&str; 4] = [
    "dataframe.csv.gz",
    "gpt2_varlen.csv.gz",
    "resnet50.csv.gz",
    "serve_streams.csv.gz",
];

/// Runs the command on all recordings, with these options on the simulator.
fn on_recordings(arguments: &[&str]) -> Output {
    cualloc()
        .args(arguments)
        .args(["--device", "sim", "--json"])
        .args(RECORDINGS.map(data))
        .output()
        .unwrap()
}

#[test]
fn replay_writes_one_object_per_trace_with_these_fields() {
    let output = on_recordings(&["replay", "--repeat", "3"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let lines = objects(&output);
    assert_eq!(lines.len(), RECORDINGS.len());
    for (line, file) in lines.iter().zip(RECORDINGS) {
        assert_eq!(
            keys(line),
            sorted(split(
                "schema trace config error reasons warnings device policy rows allocations streams \
                 limit_bytes requested_peak_bytes required_peak_bytes reserved_peak_bytes ratio \
                 ratio_max completed failed_requests failed_row memory replays"
            ))
        );
        let memory = &line["memory"];
        let (free, largest) = (&memory["free_bytes"], &memory["largest_free_bytes"]);
        assert!(largest.as_u64().unwrap() <= free.as_u64().unwrap());
        assert!((0.0..=1.0).contains(&memory["fragmentation"].as_f64().unwrap()));
        assert!(memory["soft_cap_bytes"].as_u64().unwrap() > 0);
        assert!(memory["last_growth"].is_string());
        assert_eq!(line["trace"], file.trim_end_matches(".csv.gz"));
        assert_eq!(line["device"], "sim");
        assert_eq!(line["policy"], "packed");
        assert_eq!(line["limit_bytes"], Value::Null);
        assert_eq!(line["completed"], true);
        assert_eq!(line["failed_row"], Value::Null);
        let requested = line["requested_peak_bytes"].as_u64().unwrap();
        let reserved = line["reserved_peak_bytes"].as_u64().unwrap();
        assert!(reserved >= requested, "{line}");
        assert_close(&line["ratio"], reserved as f64 / requested as f64);
        let replays = line["replays"].as_array().unwrap();
        assert_eq!(replays.len(), 3);
        assert_eq!(replays[0]["reserved_peak_bytes"], reserved);
        let peaks = replays
            .iter()
            .map(|replay| replay["reserved_peak_bytes"].as_u64().unwrap());
        assert_close(
            &line["ratio_max"],
            peaks.max().unwrap() as f64 / requested as f64,
        );
        for replay in replays {
            assert_eq!(
                keys(replay),
                sorted(split(
                    "reserved_peak_bytes driver_calls handle_ops driver_ns ns_per_row"
                ))
            );
            assert!(replay["ns_per_row"].as_f64().unwrap() > 0.0);
        }
        // Some memory must have come from the driver, at a price.
        let calls = replays[0]["driver_calls"].as_object().unwrap();
        assert!(calls.values().all(|count| count.as_u64().unwrap() > 0));
        assert!(calls.contains_key("cuMemCreate") || calls.contains_key("cuMemAlloc_v2"));
        assert!(replays[0]["driver_ns"].as_u64().unwrap() > 0);
    }
    assert_eq!(lines[3]["streams"], 6);
    assert_eq!(lines[3]["rows"], 6000);
    assert_eq!(lines[3]["requested_peak_bytes"], 682_294_760);
}

#[test]
fn both_policies_are_clean_under_verification_and_lag() {
    for policy in ["packed", "classic"] {
        for lag in ["0", "50"] {
            let options = [
                "replay", "--repeat", "2", "--verify", "--policy", policy, "--lag", lag,
            ];
            let output = on_recordings(&options);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            for line in objects(&output) {
                assert_eq!(line["policy"], policy);
            }
        }
    }
}

#[test]
fn the_replayers_own_work_is_not_counted() {
    let counts = |options: &[&str]| -> Vec<Value> {
        let output = on_recordings(&[&["replay"], options].concat());
        objects(&output)
            .iter()
            .map(|line| {
                let replay = &line["replays"][0];
                Value::from(vec![
                    replay["driver_calls"].clone(),
                    replay["driver_ns"].clone(),
                ])
            })
            .collect()
    };
    // If all work completes immediately, the allocator sees the same program either way.
    assert_eq!(counts(&[]), counts(&["--verify"]));
}

#[test]
fn plain_files_and_both_line_ends_replay_and_people_get_a_table() {
    let output = cualloc()
        .args(["replay", "--device", "sim"])
        .args([data("lf.csv"), data("crlf.csv")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[0].starts_with("trace"));
    assert!(lines[1].starts_with("lf ") && lines[1].ends_with(" ok"));
    assert!(lines[2].starts_with("crlf ") && lines[2].ends_with(" ok"));
}

#[test]
fn compare_replays_each_file_under_both_policies_and_explains_the_figures() {
    let compare = |options: &[&str]| {
        cualloc()
            .args(["replay", "--device", "sim", "--compare", "--repeat", "2"])
            .args(options)
            .args([data("resnet50.csv.gz"), data("lf.csv")])
            .output()
            .unwrap()
    };
    let output = compare(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().take(2).collect())
        .collect();
    let expected = [
        ["resnet50", "packed"],
        ["resnet50", "classic"],
        ["lf", "packed"],
        ["lf", "classic"],
    ];
    assert_eq!(rows, expected, "{text}");
    assert!(stderr(&output).contains("ratio is the peak of memory held"));

    let lines = objects(&compare(&["--json"]));
    let policies: Vec<_> = lines.iter().map(|line| line["policy"].clone()).collect();
    assert_eq!(policies, ["packed", "classic", "packed", "classic"]);
    let ratio = |line: usize| lines[line]["ratio"].as_f64().unwrap();
    assert!(ratio(0) < 1.01 && ratio(1) > 1.1, "{lines:?}");

    let failed = file(
        "compare-failed.csv",
        b"op,id,bytes,stream\na,0,1048576,0\noom,0,2097152,0\nf,0,0,0\n",
    );
    let failed = failed.to_str().unwrap();
    let output = run(&["replay", "--device", "sim", "--compare", failed]);
    let notes = stderr(&output);
    assert_eq!(notes.matches("one request failed").count(), 1, "{notes}");

    for option in [&["--policy", "classic"][..], &["--no-views"]] {
        assert_eq!(compare(option).status.code(), Some(2), "{option:?}");
    }
}

#[test]
fn a_limit_that_is_too_small_fails_and_names_the_row() {
    let path = data("dataframe.csv.gz");
    let output = cualloc()
        .args(["replay", "--device", "sim", "--json", "--limit", "0.5x"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line = &objects(&output)[0];
    assert_eq!(line["limit_bytes"], 5_679_826_971u64 / 2);
    assert_eq!(line["completed"], false);
    assert_eq!(line["replays"].as_array().unwrap().len(), 0);
    let row = line["failed_row"].as_u64().unwrap();
    assert!(row >= 1 && row <= line["rows"].as_u64().unwrap());
    assert!(line["reserved_peak_bytes"].as_u64() <= line["limit_bytes"].as_u64());
    // The header is line 1, so row 1 is line 2.
    let place = format!("{path}:{}: ", row + 1);
    let complaint = stderr(&output);
    assert!(complaint.contains(&place), "{complaint}");
    assert!(complaint.contains(&format!("row {row}")), "{complaint}");
    // The JSON contains the message that people read.
    let error = line["error"].as_str().unwrap();
    assert!(error.contains("out of memory"), "{error}");
    assert!(complaint.contains(error), "{complaint}");
    assert_eq!(line["reasons"][0], error);
    // Why, and what helps.
    assert!(error.contains("(limit): requested "), "{error}");
    assert!(error.contains("Raise the limit by "), "{error}");
    assert_eq!(line["reasons"].as_array().unwrap().len(), 1);
}

#[test]
fn broken_files_are_named_with_their_line_and_the_others_still_run() {
    let broken = data("broken/freed_twice.csv");
    let output = cualloc()
        .args(["replay", "--device", "sim", "--json"])
        .args([&broken, &data("lf.csv")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let complaint = stderr(&output);
    assert!(complaint.contains(&format!("{broken}:4: ")), "{complaint}");
    let lines = objects(&output);
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["trace"], "freed_twice");
    assert_eq!(lines[0]["line"], 4);
    assert_eq!(lines[0]["completed"], false);
    assert_eq!(lines[1]["trace"], "lf");
    assert_eq!(lines[1]["error"], Value::Null);
}

#[test]
fn every_broken_file_fails_both_commands() {
    for entry in std::fs::read_dir(data("broken")).unwrap() {
        let path = entry.unwrap().path();
        for command in ["replay", "capacity"] {
            let output = cualloc()
                .args([command, "--device", "sim", "--json"])
                .arg(&path)
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(1), "{}", path.display());
            let complaint = stderr(&output);
            assert!(
                complaint.contains(&format!("{}:", path.display())),
                "{complaint}"
            );
            // The reason stands in the object, and once on stderr.
            let lines = objects(&output);
            assert_eq!(lines.len(), 1);
            let error = lines[0]["error"].as_str().unwrap();
            assert!(complaint.contains(error), "{complaint} {error}");
            assert_eq!(complaint.lines().count(), 1, "{complaint}");
            let fault = error.rsplit(": ").next().unwrap();
            assert_eq!(complaint.matches(fault).count(), 1, "{complaint}");
        }
    }
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let missing = data("there_is_no_such_file.csv");
    for path in [missing, data("broken")] {
        let output = run(&["replay", "--device=sim", &path]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(&path));
    }
}

#[test]
fn a_torn_gzip_file_is_named_with_the_line_reached() {
    let whole = std::fs::read(data("resnet50.csv.gz")).unwrap();
    let path = file("half.csv.gz", &whole[..whole.len() / 2]);
    let output = run(&["replay", "--device=sim", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let complaint = stderr(&output);
    let rest = complaint
        .split(&format!("{}:", path.display()))
        .nth(1)
        .unwrap();
    let line: u64 = rest.split(':').next().unwrap().parse().unwrap();
    assert!(line > 100 && line < 5000, "{complaint}");
}

#[test]
fn gzip_is_detected_by_content_not_by_name() {
    let text = std::fs::read(data("lf.csv")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&text).unwrap();
    let packed = file("packed.csv", &packed.finish().unwrap());
    let plain = file("plain.csv.gz", &text);
    for path in [packed, plain] {
        let output = run(&["replay", "--device=sim", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[cfg(unix)]
#[test]
fn a_file_name_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let name = OsStr::from_bytes(b"\xff\xfe.csv");
    let path = scratch().join(name);
    std::fs::copy(data("lf.csv"), &path).unwrap();
    let output = cualloc()
        .args(["replay", "--device=sim"])
        .arg(path)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn command_lines_that_make_no_sense_exit_with_2() {
    let lf = data("lf.csv");
    let lf = lf.as_str();
    for arguments in [
        &[][..],
        &["replay"],
        &["capacity"],
        &["unknown"],
        &["replay", "--limit", "much", lf],
        &["replay", "--limit", "-1x", lf],
        &["replay", "--repeat", "0", lf],
        &["replay", "--lag", "-1", lf],
        &["replay", "--device", "tpu", lf],
        &["replay", "--policy", "auto", lf],
        &["capacity", "--repeat", "3", lf],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty());
        assert!(!stderr(&output).is_empty());
    }
}

#[test]
fn warnings_to_a_closed_pipe_cause_no_panic() {
    let mut child = cualloc()
        .args(["replay", "--device", "sim", "--json"])
        .args([data("broken/header.csv"), data("lf.csv")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(objects(&output).len(), 2);
}

#[test]
fn capacity_finds_a_limit_that_replays_confirm() {
    let path = data("serve_streams.csv.gz");
    let output = cualloc()
        .args(["capacity", "--device", "sim", "--json"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let line = &objects(&output)[0];
    assert_eq!(
        keys(line),
        sorted(split(
            "schema trace config error reasons warnings device policy requested_peak_bytes \
             min_limit_bytes min_limit_ratio ns_per_row_at_limit handle_ops assumes"
        ))
    );
    let limit = line["min_limit_bytes"].as_u64().unwrap();
    let requested = line["requested_peak_bytes"].as_u64().unwrap();
    assert!(limit >= requested && limit.is_multiple_of(2 << 20));
    assert_close(&line["min_limit_ratio"], limit as f64 / requested as f64);
    let replays = |limit: u64| {
        let limit = limit.to_string();
        cualloc()
            .args([
                "replay", "--device", "sim", "--repeat", "3", "--limit", &limit,
            ])
            .arg(&path)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!(replays(limit), Some(0));
    // One step less fails, itself or with one of the margins.
    let less = limit - (2 << 20);
    let margins = [0, 5, 10, 20, 50].map(|margin| less + less / 1000 * margin);
    assert!(margins.into_iter().any(|limit| replays(limit) == Some(1)));
}

#[test]
fn capacity_without_any_limit_that_does_fails() {
    let output = cualloc()
        .args(split("capacity --device sim --json --sim-memory 4194304"))
        .arg(data("resnet50.csv.gz"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let line = &objects(&output)[0];
    assert_eq!(line["min_limit_bytes"], Value::Null);
    let error = line["error"].as_str().unwrap();
    assert!(error.contains("runs under no limit"), "{error}");
}

/// A machine without a driver, whatever this one has.
fn without_driver(arguments: &[&str]) -> Output {
    cualloc()
        .env("CUALLOC_DRIVER", data("there_is_no_such_library.so"))
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn info_without_a_driver_prints_the_reason_and_the_simulator() {
    let output = without_driver(&["info"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("no CUDA driver"), "{text}");
    assert!(text.contains("there_is_no_such_library.so"), "{text}");
    assert!(text.contains("simulator"), "{text}");

    let output = without_driver(&["info", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let info = &objects(&output)[0];
    assert_eq!(info["driver"], Value::Null);
    assert!(!info["driver_error"].as_array().unwrap().is_empty());
    let device = &info["simulator"]["devices"][0];
    assert_eq!(device["total_memory_bytes"], 144u64 << 30);
    assert_eq!(device["virtual_memory_management"], true);
    assert_eq!(device["granularity_bytes"], 2 << 20);
}
