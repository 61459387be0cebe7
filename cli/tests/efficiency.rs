//! How dense recorded work is packed, on the simulator: bounds on what `replay` and `capacity` say
//! of the recordings in `tests/data`. Placement reads no clock, so the figures are exact.

use serde_json::Value;
use std::process::Command;

const ONE_STREAM: [&str; 3] = ["dataframe", "gpt2_varlen", "resnet50"];

/// The objects that a command writes for recordings.
fn figures(arguments: &[&str], traces: &[&str]) -> Vec<Value> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");
    let files = traces.iter().map(|name| format!("{root}/{name}.csv.gz"));
    let output = Command::new(env!("CARGO_BIN_EXE_cualloc"))
        .args(arguments)
        .args(["--device", "sim", "--json"])
        .args(files)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let objects: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(objects.len(), traces.len());
    objects
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap()
}

/// Driver calls of each replay.
fn calls(value: &Value) -> Vec<u64> {
    let replays = value["replays"].as_array().unwrap().iter();
    replays
        .map(|replay| {
            let calls = replay["driver_calls"].as_object().unwrap();
            calls.values().map(|count| count.as_u64().unwrap()).sum()
        })
        .collect()
}

fn handle_ops(value: &Value) -> Vec<u64> {
    let replays = value["replays"].as_array().unwrap().iter();
    replays
        .map(|replay| replay["handle_ops"].as_u64().unwrap())
        .collect()
}

#[test]
fn packed_without_views_needs_what_one_shared_pool_with_best_fit_needs() {
    let arguments = [
        "replay",
        "--policy",
        "packed",
        "--no-views",
        "--repeat",
        "5",
    ];
    let bounds = [1.206, 1.063, 1.014];
    for (value, bound) in figures(&arguments, &ONE_STREAM).iter().zip(bounds) {
        let trace = &value["trace"];
        assert!(
            number(value, "ratio") <= bound,
            "{trace}: {}",
            value["ratio"]
        );
        assert!(
            calls(value)[2..].iter().all(|c| *c == 0),
            "{trace}: {:?}",
            calls(value)
        );
    }
}

#[test]
fn packed_on_one_stream_holds_at_most_two_percent_more_than_is_asked_for() {
    let arguments = ["replay", "--policy", "packed", "--repeat", "6"];
    for value in figures(&arguments, &ONE_STREAM) {
        let trace = &value["trace"];
        assert!(
            number(&value, "ratio") <= 1.02,
            "{trace}: {}",
            value["ratio"]
        );
        assert!(
            number(&value, "ratio_max") <= 1.03,
            "{trace}: {}",
            value["ratio_max"]
        );
        assert!(
            calls(&value)[4..].iter().all(|c| *c == 0),
            "{trace}: {:?}",
            calls(&value)
        );
    }
}

#[test]
fn packed_on_several_streams_shares_what_is_complete() {
    let instant = figures(
        &["replay", "--policy", "packed", "--repeat", "6"],
        &["serve_streams"],
    );
    assert!(
        number(&instant[0], "ratio_max") <= 1.03,
        "{}",
        instant[0]["ratio_max"]
    );
    assert!(handle_ops(&instant[0])[4..].iter().all(|ops| *ops == 0));
    let late = [
        "replay", "--policy", "packed", "--repeat", "6", "--lag", "200",
    ];
    let late = figures(&late, &["serve_streams"]);
    assert!(
        number(&late[0], "ratio_max") <= 1.05,
        "{}",
        late[0]["ratio_max"]
    );
}

#[test]
fn packed_fits_into_little_more_than_is_asked_for() {
    let traces = ["dataframe", "gpt2_varlen", "resnet50", "serve_streams"];
    let bounds = [1.02, 1.015, 1.015, 1.025];
    let values = figures(&["capacity", "--policy", "packed"], &traces);
    for (value, bound) in values.iter().zip(bounds) {
        let ratio = number(value, "min_limit_ratio");
        assert!(ratio <= bound, "{}: {ratio}", value["trace"]);
    }
}

#[test]
fn classic_holds_what_its_constants_say() {
    let values = figures(&["replay", "--policy", "classic"], &["dataframe"]);
    let ratio = number(&values[0], "ratio");
    // Of the whole recording it is 1.776, as measured of PyTorch's allocator, whose constants these
    // are; of the rows that are kept here, this.
    assert!((ratio - 1.570).abs() < 0.001, "{ratio}");
}
