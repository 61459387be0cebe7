//! How dense recorded work is packed, on the simulator: bounds on what `replay` and `capacity` say
//! of the recordings in `tests/data`. Placement reads no clock, so the figures are exact.

use crate::{cualloc, data, objects, run, scratch, split, stderr};
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};

const ONE_STREAM: [&str; 3] = ["dataframe", "gpt2_varlen", "resnet50"];

/// The objects that a command writes for recordings.
fn figures(arguments: &[&str], traces: &[&str]) -> Vec<Value> {
    figures_with("", arguments, traces)
}

/// [`figures`] with settings of the allocator.
fn figures_with(config: &str, arguments: &[&str], traces: &[&str]) -> Vec<Value> {
    let files = traces.iter().map(|name| data(&format!("{name}.csv.gz")));
    figures_of(arguments, files.collect(), config)
}

/// The object that a command writes for a generated program.
fn made_up(kind: &[&str], rows: usize, arguments: &[&str]) -> Value {
    // Tests run at the same time, and may make up the same program.
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = scratch().join(format!("made_up_{number}.csv"));
    let (file, rows) = (file.to_str().unwrap(), rows.to_string());
    let out = ["--rows", &rows, "--out", file];
    let made = run(&[&["generate"], kind, &out].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    let value = figures_of(arguments, vec![file.to_owned()], "").remove(0);
    std::fs::remove_file(file).unwrap();
    value
}

fn figures_of(arguments: &[&str], files: Vec<String>, config: &str) -> Vec<Value> {
    let traces = files.len();
    let output = cualloc()
        .args(arguments)
        .args(["--device", "sim", "--json"])
        .args(files)
        .env("CUALLOC_CONFIG", config)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let objects = objects(&output);
    assert_eq!(objects.len(), traces);
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
    let arguments = split("replay --policy packed --no-views --repeat 5");
    let bounds = [1.206, 1.063, 1.014];
    let values = figures_with("profile=dense", &arguments, &ONE_STREAM);
    for (value, bound) in values.iter().zip(bounds) {
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
fn packed_on_one_stream_holds_at_most_two_percent_more_than_is_requested() {
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
fn packed_on_several_streams_shares_complete_memory() {
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
    for lag in ["50", "200", "1000"] {
        let late = [
            "replay", "--policy", "packed", "--repeat", "10", "--lag", lag,
        ];
        // Of 6000 rows: a part of a recording repeats less well than the whole.
        let last: u64 = {
            let late = &figures(&late, &["serve_streams"])[0];
            handle_ops(late)[5..].iter().sum()
        };
        assert!(last <= 5 * 100, "lag {lag}: {last}");
        if lag != "1000" {
            let late = &figures_with("profile=dense", &late, &["serve_streams"])[0];
            assert!(number(late, "ratio_max") <= 1.05, "{}", late["ratio_max"]);
        }
    }
}

/// Handle operations of each part of the first replay.
fn ops_by_part(value: &Value) -> Vec<u64> {
    let parts = value["replays"][0]["parts"].as_array().unwrap().iter();
    parts
        .map(|part| part["handle_ops"].as_u64().unwrap())
        .collect()
}

#[test]
fn packed_serves_large_blocks_that_never_repeat() {
    for seed in ["1", "2"] {
        let kind = ["large", "--seed", seed];
        let value = made_up(&kind, 8000, &["replay", "--parts", "2"]);
        assert!(number(&value, "ratio") <= 1.05, "{}", value["ratio"]);
        let ops = ops_by_part(&value);
        assert!(ops[1] <= 4 * 150, "seed {seed}: {ops:?}");
        let limited = made_up(&kind, 4000, &["replay", "--limit", "1.05x"]);
        assert_eq!(limited["completed"], true);
    }
}

/// R36: a pipeline over three streams.
#[test]
fn r36_packed_settles_in_sharded_training() {
    let kind = ["sharded", "--seed", "2"];
    let instant = made_up(&kind, 2428, &["replay", "--repeat", "6"]);
    let (ratio, ops) = (number(&instant, "ratio_max"), handle_ops(&instant));
    assert!(ratio <= 1.07, "{ratio}");
    assert!(ops[4..].iter().all(|ops| *ops == 0), "{ops:?}");
    let late = made_up(&kind, 2428, &["replay", "--repeat", "6", "--lag", "200"]);
    let (ratio, ops) = (number(&late, "ratio_max"), handle_ops(&late));
    assert!(ratio <= 1.07, "{ratio}");
    assert!(ops[5] * 1000 <= 10 * 2428, "{ops:?}");
}

#[test]
fn packed_serves_random_programs() {
    for (seed, streams) in [("1", "1"), ("2", "4")] {
        let kind = ["random", "--seed", seed, "--streams", streams];
        let value = made_up(&kind, 20_000, &["replay", "--check-every", "1000"]);
        assert!(number(&value, "ratio") <= 1.07, "{}", value["ratio"]);
        let limited = made_up(&kind, 20_000, &["replay", "--limit", "1.05x"]);
        assert_eq!(limited["completed"], true);
    }
}

#[test]
fn packed_fits_into_little_more_than_is_requested() {
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
