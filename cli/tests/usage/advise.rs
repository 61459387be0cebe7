//! `advise`: its predictions equal what replays measure; and the arguments that it rejects.

use crate::{cualloc, data, fed, object, objects, refused, run, stderr, stdout};
use serde_json::Value;

const HEADER: &str = "op,id,bytes,stream\n";

fn advice(path: &str, memory: &str) -> Vec<Value> {
    let output = run(&["advise", "--json", "-q", path, "--memory", memory]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    objects(&output)
}

/// A choice against three replays under exactly its settings.
fn measure(path: &str, choice: &Value) {
    let settings = choice["settings"].as_str().unwrap();
    let output = cualloc()
        .env("CUALLOC_CONFIG", settings)
        .args(["replay", "--device", "sim", "--json", "-q"])
        .args(["--repeat", "3", path])
        .output()
        .unwrap();
    let line = object(&output);
    assert_eq!(line["completed"], choice["fits"], "{path}: {settings}");
    if choice["fits"] == true {
        let replays = line["replays"].as_array().unwrap().iter();
        let measured = replays.map(|replay| replay["reserved_peak_bytes"].as_f64().unwrap());
        let measured = measured.fold(0.0, f64::max);
        let predicted = choice["reserved_peak_bytes"].as_f64().unwrap();
        let off = (predicted - measured).abs() / measured;
        assert!(off <= 0.01, "{path}: {settings}: {predicted} {measured}");
    }
}

/// Three sizes: slightly more than the requested peak, one and a half times, and ten times as much.
fn predicted_and_measured(name: &str, peak: u64) {
    let path = data(&format!("{name}.csv.gz"));
    let sizes = [peak + peak / 200, peak + peak / 2, peak * 10];
    let text = sizes.map(|size| size.to_string()).join(",");
    let lines = advice(&path, &text);
    assert_eq!(lines.len(), sizes.len());
    for (line, size) in lines.iter().zip(sizes) {
        assert_eq!(line["requested_peak_bytes"], peak);
        assert_eq!(line["memory_bytes"], size);
        let choices = line["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 6);
        assert_eq!(line["fits"], choices[0]["fits"]);
        let fitting = choices.iter().filter(|choice| choice["fits"] == true);
        let nanos: Vec<u64> = fitting.map(|c| c["driver_ns"].as_u64().unwrap()).collect();
        assert!(nanos.is_sorted(), "{nanos:?}");
        for choice in choices {
            measure(&path, choice);
        }
        let bytes = |key: &str| line[key].as_u64();
        let needed = bytes("needed_bytes").unwrap();
        match line["fits"] == true {
            true => assert_eq!(bytes("spare_bytes"), Some(size - needed)),
            false => assert_eq!(bytes("missing_bytes"), Some(needed - size)),
        }
    }
    assert_eq!(lines[2]["fits"], true);
}

#[test]
fn dataframe_fits_as_predicted() {
    predicted_and_measured("dataframe", 5_679_826_971);
}

#[test]
fn gpt2_varlen_fits_as_predicted() {
    predicted_and_measured("gpt2_varlen", 11_358_326_376);
}

#[test]
fn resnet50_fits_as_predicted() {
    predicted_and_measured("resnet50", 3_124_434_960);
}

#[test]
fn serve_streams_fits_as_predicted() {
    predicted_and_measured("serve_streams", 682_294_760);
}

#[test]
fn settings_of_the_environment_are_tried_too() {
    let lf = data("lf.csv");
    let mut command = cualloc();
    command.env("CUALLOC_CONFIG", "tune.nvtx=off,limit=1M");
    command.args(["advise", "--json", "--memory", "1G", &lf]);
    let output = command.output().unwrap();
    assert!(stderr(&output).contains("limit of CUALLOC_CONFIG is not used"));
    let line = object(&output);
    let choices = line["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 7);
    let own = |choice: &&Value| choice["settings"] == "tune.nvtx=off,limit=1073741824";
    assert_eq!(choices.iter().filter(own).count(), 1);
}

#[test]
fn invalid_recordings_and_sizes_are_refused() {
    let lf = data("lf.csv");
    for (arguments, words) in [
        (&["advise"][..], "FILE"),
        (&["advise", &lf, "--memory", "0"], "--memory"),
        (&["advise", &lf, "--memory", "1G,50%"], "--memory"),
        (&["advise", "-", "-", "--memory", "1G"], "given twice"),
        (
            &["advise", &lf, "--memory", "1G", "--device", "cuda"],
            "not for advise",
        ),
        (
            &["advise", &lf, "--memory", "1G", "--sim-memory", "1G"],
            "not for advise",
        ),
    ] {
        refused(&run(arguments), words);
    }
    let one = |bytes: u64| format!("{HEADER}a,0,{bytes},0\nf,0,0,0\n");
    for (input, words) in [
        ("garbage".to_owned(), "text with the first line `garbage`"),
        (one(0), "at least 1 byte"),
        (one(1 << 63), "requires 8.00 EiB"),
        (one(u64::MAX), "expected a trace that requires at most"),
        ("\u{0}\u{80}\u{2}".to_owned(), "binary data"),
    ] {
        let arguments = ["advise", "-", "--json", "--memory", "1G,16777215TiB"];
        let output = fed(&arguments, input.as_bytes());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let line = object(&output);
        assert!(line["error"].as_str().unwrap().contains(words), "{line}");
    }
    // A pickle that is none.
    let output = fed(&["advise", "-", "--memory", "1G"], b"\x80\x02garbage");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: <stdin>: "));
}

#[test]
fn a_trace_that_does_not_fit_is_a_result() {
    let arguments = ["advise", "-", "--json", "--memory", "1,1M,2M"];
    let output = fed(&arguments, format!("{HEADER}a,0,100,0\n").as_bytes());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let lines = objects(&output);
    let fits: Vec<&Value> = lines.iter().map(|line| &line["fits"]).collect();
    assert_eq!(fits, [false, false, true]);
    assert_eq!(lines[1]["missing_bytes"], 1 << 20);
    assert_eq!(lines[0]["reasons"][0], "the program requires 100 B");
}

/// A size in which the program ran out of memory does not fit, whatever was live: for a trace, a snapshot and a
/// recording alike.
#[test]
fn a_request_that_failed_has_to_fit_too() {
    let trace = format!("{HEADER}a,0,{0},0\noom,0,{1},0\n", 80 << 20, 50 << 20);
    let snapshot = r#"{"segments":[],"device_traces":[[
        {"action":"alloc","addr":1048576,"size":83886080,"stream":0,"time_us":1},
        {"action":"oom","device_free":1000,"size":52428800,"stream":0,"time_us":2}]]}"#;
    for file in [trace.as_bytes(), snapshot.as_bytes()] {
        let output = fed(&["advise", "-", "--json", "--memory", "120M,140M"], file);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let lines = objects(&output);
        assert_eq!(
            (&lines[0]["fits"], &lines[1]["fits"]),
            (&false.into(), &true.into())
        );
        for line in &lines {
            assert_eq!(line["failed_requests"], 1);
            assert_eq!(line["requested_peak_bytes"], 80 << 20);
            assert_eq!(line["required_peak_bytes"], 130 << 20);
            assert!(line["needed_bytes"].as_u64().unwrap() >= 130 << 20);
        }
        let reason = "the program requires 130.00 MiB, including a request that failed";
        assert_eq!(lines[0]["reasons"][0], reason);
        let printed = stderr(&output);
        let note = "one request failed in the recorded program, of 50 MiB (line 3)";
        assert!(printed.contains(note), "{printed}");
        let output = fed(&["replay", "-", "--device", "sim", "--json"], file);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let line = object(&output);
        assert_eq!(
            (&line["failed_requests"], &line["completed"]),
            (&1.into(), &true.into())
        );
        let printed = stderr(&output);
        assert!(
            printed.contains(note) && printed.contains("does not repeat failed requests"),
            "{printed}"
        );
        let output = fed(&["capacity", "-", "--device", "sim", "--json"], file);
        let least = object(&output)["min_limit_bytes"].as_u64().unwrap();
        assert!(least >= 130 << 20, "{least}");
    }
}

#[test]
fn tables_of_advice_fit_the_terminal() {
    let lf = data("lf.csv");
    for columns in [60, 80, 120] {
        let mut command = cualloc();
        command.env("COLUMNS", columns.to_string());
        command.args(["advise", "--all", "--memory", "1M,24GiB", &lf]);
        let output = command.output().unwrap();
        let text = stdout(&output);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest.unwrap() <= columns, "{text}");
        assert!(text.contains("packed dense tune.views=off"), "{text}");
        assert!(stderr(&output).contains("does not fit into 1 MiB"));
    }
}
