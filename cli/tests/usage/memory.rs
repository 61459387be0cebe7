//! The memory of the command does not grow with its options.
#![cfg(target_os = "linux")]

use crate::{cualloc, data, fed, file, refused, run, stderr};
use std::io::Read;
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;

/// The peak memory of a process so far.
fn most(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib * 1024
}

/// Returns by how much the peak memory of the command grows while it writes half a million rows more.
fn growth(arguments: &[&str]) -> u64 {
    let mut child = cualloc()
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut after = |bytes| {
        let read = std::io::copy(&mut stdout.by_ref().take(bytes), &mut std::io::sink());
        assert_eq!(read.unwrap(), bytes);
        // The pipe is full, so it still runs.
        most(&child)
    };
    let before = after(2 * MIB);
    let growth = after(8 * MIB) - before;
    drop(stdout);
    child.wait().unwrap();
    growth
}

#[test]
fn generated_programs_of_any_length_are_written_row_by_row() {
    let resnet = data("resnet50.csv.gz");
    let kinds = ["random", "churn", "sharded", "large"];
    let made = kinds.map(|kind| ["generate", kind, "--rows", "99999999999999", "--out", "-"]);
    let vary_rows = ["vary", &resnet, "--copies", "4294967295", "--out", "-"];
    for arguments in made.into_iter().chain([vary_rows]) {
        let growth = growth(&arguments);
        assert!(growth < MIB, "{arguments:?}: {growth}");
    }
}

/// The command with a limited address space.
fn within(bytes: u64, arguments: &[&str]) -> std::process::Output {
    let script = format!("ulimit -v {}; exec \"$@\"", bytes / 1024);
    Command::new("sh")
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_cualloc")])
        .args(arguments)
        .env_remove("CUALLOC_CONFIG")
        .output()
        .unwrap()
}

#[test]
fn many_replays_take_no_more_than_a_few() {
    let lf = data("lf.csv");
    let replay = |repeat: &str, bytes| {
        within(
            bytes,
            &["replay", "--device", "sim", "-q", "--repeat", repeat, &lf],
        )
    };
    // Each kept replay took 2.3 KB.
    let output = replay("100000", 192 * MIB);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = run(&["replay", "--device", "sim", "-q", "--repeat", "3", &lf]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_long_trace_needs_memory_for_its_rows_only() {
    let rows = 400_000;
    let path = file("long.csv", b"");
    let made = run(&[
        "generate",
        "sharded",
        "--rows",
        &rows.to_string(),
        "--out",
        path.to_str().unwrap(),
    ]);
    assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
    // Behind the trace it waits for another one, and so is still there when it has written the first line.
    let mut child = cualloc()
        .args(["replay", "--device", "sim", "--json", "-q"])
        .arg(&path)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut first = [0];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    let most = most(&child);
    child.wait().unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(most < 24 * MIB + rows * 140, "{most}");
}

#[test]
fn a_trace_without_an_end_is_refused_before_it_takes_all_memory() {
    let mut text = b"op,id,bytes,stream\n".to_vec();
    for id in 0..1000 {
        text.extend(format!("a,{id},512,0\n").bytes());
    }
    for (rows, code) in [("1000", 0), ("999", 1)] {
        let output = fed(
            &["replay", "--device", "sim", "--max-rows", rows, "-"],
            &text,
        );
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
    let output = fed(
        &["replay", "--device", "sim", "--max-rows", "10", "-"],
        &text,
    );
    let complaint = stderr(&output);
    assert!(
        complaint.contains("<stdin>:12: cannot be read: there are more than 10 rows"),
        "{complaint}"
    );
    assert!(complaint.contains("--max-rows"), "{complaint}");
    refused(
        &run(&["replay", "--max-rows", "many", "x.csv"]),
        "--max-rows",
    );
}

#[test]
fn a_snapshot_of_more_rows_than_wanted_is_refused() {
    let entry = |n: u64| {
        let address = n * 4096;
        format!(r#"{{"action":"alloc","addr":{address},"size":512,"stream":0}}"#)
    };
    let entries: Vec<String> = (1..=20).map(entry).collect();
    let text = format!(
        r#"{{"segments":[],"device_traces":[[{}]]}}"#,
        entries.join(",")
    );
    for (rows, code) in [("20", 0), ("19", 1)] {
        for words in [
            &["replay", "--device", "sim", "--max-rows", rows, "-"][..],
            &[
                "export",
                "--to",
                "csv",
                "--out",
                "-",
                "--max-rows",
                rows,
                "-",
            ],
        ] {
            let output = fed(words, text.as_bytes());
            let complaint = stderr(&output);
            assert_eq!(output.status.code(), Some(code), "{words:?}: {complaint}");
            let why =
                "<stdin>: cannot be read: there are more than 19 rows; --max-rows N takes more";
            assert_eq!(complaint.contains(why), code == 1, "{words:?}: {complaint}");
        }
    }
}
