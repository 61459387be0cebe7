//! Files that are read and written.

use crate::{
    cualloc, data, fed, file, object, packed, recorded, refused, replayed, run, scratch, split,
    stderr, stdout,
};
use std::io::Write;
use std::path::{Path, PathBuf};

pub fn text(name: &str) -> Vec<u8> {
    std::fs::read(data(name)).unwrap()
}

#[test]
fn a_dash_is_stdin_plain_or_compressed() {
    for command in ["replay", "capacity"] {
        for content in [text("lf.csv"), packed(&text("lf.csv"))] {
            let output = fed(&[command, "--device", "sim", "--json", "-"], &content);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            assert_eq!(object(&output)["trace"], "stdin");
        }
        let output = fed(
            &[command, "--device", "sim", "-"],
            b"op,id,bytes,stream\nx,0,1,0\n",
        );
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(stderr(&output), "error: <stdin>:2: unknown op `x`\n");
        refused(
            &run(&[command, "-", data("lf.csv").as_str(), "-"]),
            "stdin can be read once",
        );
    }
}

#[test]
fn a_dash_is_stdout_and_a_file_of_that_name_can_still_be_meant() {
    let made = run(&["generate", "random", "--rows", "100", "--out", "-"]);
    assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
    assert_eq!(stdout(&made).lines().count(), 101);
    assert!(stderr(&made).contains("100 rows"));
    assert!(!scratch().join("-").exists());
    let vary_rows = fed(&["vary", "-", "--copies", "2", "--out", "-"], &made.stdout);
    assert_eq!(vary_rows.status.code(), Some(0), "{}", stderr(&vary_rows));
    let replayed = fed(
        &["replay", "--device", "sim", "--json", "-"],
        &vary_rows.stdout,
    );
    assert_eq!(replayed.status.code(), Some(0), "{}", stderr(&replayed));

    let named = run(&["generate", "large", "--rows", "3", "--out", "./-"]);
    assert_eq!(named.status.code(), Some(0), "{}", stderr(&named));
    assert!(named.stdout.is_empty());
    std::fs::remove_file(scratch().join("-")).unwrap();
    refused(
        &run(&["generate", "large", "--json", "--out", "-"]),
        "stdout",
    );
}

#[test]
fn a_trace_is_not_written_over_itself() {
    let path = file("own_copy.csv", &text("lf.csv"));
    for out in ["own_copy.csv", "./own_copy.csv", "../usage/own_copy.csv"] {
        refused(
            &run(&["vary", "own_copy.csv", "--out", out]),
            "cannot be its own copy",
        );
    }
    assert_eq!(std::fs::read(path).unwrap(), text("lf.csv"));
}

/// A folder of a test's own, below that in which the command runs, with one file in it.
pub fn folder(name: &str, file: &str, content: &[u8]) -> PathBuf {
    let folder = scratch().join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join(file), content).unwrap();
    folder
}

/// How many files there are.
fn count(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_file_is_written_whole_or_stays_as_it_was() {
    let folder = folder("whole", "stays.csv", b"before");
    let path = folder.join("stays.csv");
    // Twice these sizes do not fit into 64 bits, which is seen when the first of them are written.
    let huge = format!("op,id,bytes,stream\na,0,{0},0\na,1,{0},0\n", u64::MAX / 2);
    let output = fed(
        &split("vary - --copies 200 --percent 99 --out whole/stays.csv"),
        huge.as_bytes(),
    );
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let complaint = stderr(&output);
    assert!(
        complaint.starts_with("error: whole/stays.csv: "),
        "{complaint}"
    );
    assert!(
        complaint.contains("more bytes than 64 bits can count"),
        "{complaint}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    assert_eq!(count(&folder), 1);

    let output = run(&split("generate large --rows 10 --out whole/stays.csv"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(std::fs::read(&path).unwrap().starts_with(b"op,id,"));
    assert_eq!(count(&folder), 1);

    // As long as names may be.
    let long = format!("whole/{}.csv", "n".repeat(251));
    let output = run(&["generate", "large", "--rows", "10", "--out", &long]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(count(&folder), 2);

    let output = run(&["generate", "large", "--out", "no_such_folder/x.csv"]);
    assert_eq!(output.status.code(), Some(1));
    let complaint = stderr(&output);
    assert!(
        complaint.starts_with("error: no_such_folder/x.csv: cannot be written: "),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn a_program_that_is_killed_leaves_the_old_file() {
    let folder = folder("killed", "kept.csv", b"before");
    let mut child = cualloc()
        .args(split(
            "generate churn --rows 99999999999999 --out killed/kept.csv",
        ))
        .spawn()
        .unwrap();
    // It is written from the moment on at which the process has it open, and never whole.
    let seen = folder.canonicalize().unwrap();
    let opened = || {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
        let targets = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        targets.into_iter().find(|path| path.starts_with(&seen))
    };
    let written = loop {
        if let Some(path) = opened() {
            break path;
        }
        std::thread::yield_now();
    };
    child.kill().unwrap();
    child.wait().unwrap();
    // The part that was written stays beside it.
    std::fs::remove_file(&written).unwrap();
    assert_eq!(count(&folder), 1);
    assert_eq!(std::fs::read(folder.join("kept.csv")).unwrap(), b"before");
}

#[cfg(unix)]
#[test]
fn links_and_devices_are_not_replaced() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let target = file("linked_to.csv", b"before");
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o640)).unwrap();
    let link = scratch().join("link.csv");
    let _ = std::fs::remove_file(&link);
    symlink("linked_to.csv", &link).unwrap();
    for (name, code) in [("link.csv", 0), ("/dev/null", 0), ("/dev/full", 1)] {
        let output = run(&["generate", "large", "--rows", "10", "--out", name]);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    }
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::read(&target).unwrap().starts_with(b"op,id,"));
    let mode = std::fs::metadata(&target).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

/// Runs the command without a reader of its results: it ends with exit code 1 and prints nothing.
fn left_by_its_reader(arguments: &[&str]) {
    let mut child = cualloc()
        .args(arguments)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_reader_that_leaves_is_no_panic() {
    let trace = data("resnet50.csv.gz");
    left_by_its_reader(&["replay", "--device", "sim", "--json", &trace]);
}

#[test]
fn a_reader_that_leaves_stops_the_generation_of_a_program() {
    left_by_its_reader(&split("generate churn --rows 99999999999999 --out -"));
}

#[test]
fn damaged_compression_is_reported() {
    let whole = text("resnet50.csv.gz");
    let mut sum = whole.clone();
    let at = sum.len() - 6;
    sum[at] ^= 1;
    let path = file("wrong_sum.csv.gz", &sum);
    let output = run(&["replay", "--device", "sim", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("the compressed data is damaged: corrupt gzip stream"),
        "{}",
        stderr(&output)
    );

    // Stored as it is, so that one changed byte is one changed letter: nothing but the checksum can tell.
    let mut stored = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    stored
        .write_all(b"op,id,bytes,stream\na,0,512,0\nf,0,0,0\n")
        .unwrap();
    let mut stored = stored.finish().unwrap();
    let at = stored.windows(4).position(|part| part == b"512,").unwrap();
    stored[at] = b'x';
    let path = file("wrong_letter.csv.gz", &stored);
    let output = replayed(&path);
    assert_eq!(output.status.code(), Some(1));
    let error = object(&output);
    assert_eq!(error["line"], 2);
    let error = error["error"].as_str().unwrap();
    assert!(
        error.contains("damaged") && error.contains("checksum") && error.contains("x12"),
        "{error}"
    );

    // A wrong field of sound data is the fault of the field.
    let path = file(
        "sound.csv.gz",
        &packed(b"op,id,bytes,stream\na,0,x12,0\nf,0,0,0\n"),
    );
    let output = run(&["replay", "--device", "sim", path.to_str().unwrap()]);
    assert!(!stderr(&output).contains("damaged"), "{}", stderr(&output));
    let path = file("torn.csv.gz", &whole[..whole.len() / 2]);
    let output = run(&["replay", "--device", "sim", path.to_str().unwrap()]);
    assert!(
        stderr(&output).contains("the compressed data is damaged: it ends too early"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_byte_order_mark_is_no_fault() {
    let marked = [b"\xEF\xBB\xBF".as_slice(), &text("crlf.csv")].concat();
    let output = fed(&["replay", "--device", "sim", "-"], &marked);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_failed_file_is_an_object_with_its_reason() {
    for command in ["replay", "capacity"] {
        let output = run(&[
            command,
            "--device",
            "sim",
            "--json",
            "there_is_no_such_file.csv",
        ]);
        assert_eq!(output.status.code(), Some(1));
        let line = object(&output);
        assert_eq!(line["schema"], 1);
        assert_eq!(line["trace"], "there_is_no_such_file");
        assert_eq!(line["completed"], false);
        let error = line["error"].as_str().unwrap();
        assert!(error.contains("cannot be opened"), "{error}");
        assert_eq!(line["reasons"].as_array().unwrap().len(), 2);
        assert_eq!(stderr(&output), format!("error: {error}\n"));
    }
}

#[test]
fn recordings_are_read_like_traces_and_exported() {
    use cualloc::record::{Context, Recorder, Target};
    use cualloc::sim::{SimConfig, Simulator};
    let folder = folder("recordings", "run.rec", b"");
    let path = folder.join("run.rec");
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let context = simulator.context(0).unwrap();
    let allocator = cualloc::Allocator::with_config(&context, cualloc::Config::new()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let recorder = Recorder::start(Target::File(&path)).unwrap();
    Context::new("train;forward").enter();
    let kept = allocator.allocate(3 << 20, &stream).unwrap();
    drop(allocator.allocate(512, &stream).unwrap());
    recorder.finish().unwrap();
    drop(kept);
    let file = path.to_str().unwrap();
    let recording = std::fs::read(&path).unwrap();
    let trace = "op,id,bytes,stream\na,0,3145728,0\na,1,512,0\nf,1,0,0\n";
    let export = |input: &[u8], to: &str| -> Vec<u8> {
        let output = fed(&["export", "-", "--to", to, "--out", "-"], input);
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    assert_eq!(String::from_utf8(export(&recording, "csv")).unwrap(), trace);
    assert_eq!(export(&packed(&recording), "csv"), trace.as_bytes());
    assert_eq!(export(&recording, "collapsed"), b"train;forward 3146240\n");
    let snapshot = export(&recording, "pytorch");
    assert_eq!(export(&snapshot, "csv"), trace.as_bytes());
    assert!(export(&recording, "pytorch-json").starts_with(b"{\"segments\":"));
    let profile = export(&recording, "pprof");
    let mut unpacked = Vec::new();
    let mut reader = flate2::read::GzDecoder::new(&profile[..]);
    std::io::Read::read_to_end(&mut reader, &mut unpacked).unwrap();
    let read = cualloc::record::Recording::read(&recording).unwrap();
    let expected = cualloc::record::Profile::of(&read).to_pprof();
    assert_eq!(unpacked, expected);
    let replayed = run(&["replay", file, "--device", "sim", "--json"]);
    assert!(replayed.status.success(), "{replayed:?}");
    assert!(String::from_utf8_lossy(&replayed.stdout).contains("3146240"));
    // A part of it is no answer to what all of it needs.
    let part = &recording[..recording.len() - 30];
    let why = "the recording breaks off: what came later is not in it";
    for command in [
        &["replay", "-", "--json"][..],
        &["capacity", "-", "--json"],
        &["advise", "-", "--json", "--memory", "1G"],
    ] {
        let output = fed(command, part);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            printed.contains(&format!("warning: <stdin>: {why}")),
            "{printed}"
        );
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(line["warnings"], serde_json::json!([why]), "{line}");
        let whole = fed(command, &recording);
        let line: serde_json::Value = serde_json::from_slice(&whole.stdout).unwrap();
        assert_eq!(line["warnings"], serde_json::json!([]), "{line}");
    }
    for command in [
        &["export", "-", "--to", "pprof", "--out", "/dev/null"][..],
        &["export", "-", "--to", "csv", "--out", "/dev/null"],
        &["view", "-", "-o", "/dev/null"],
    ] {
        let printed = fed(command, part).stderr;
        let printed = String::from_utf8_lossy(&printed);
        assert!(printed.contains(why), "{printed}");
    }
    let page = fed(&["view", "-", "-q", "-o", "-"], part).stdout;
    let page = String::from_utf8(page).unwrap();
    assert!(page.contains(&format!("\"warnings\":[\"{why}\"]")));
    for (wrong, why) in [
        (&recording[..40], "cut off"),
        (b"\x80\x02cos\nsystem\n".as_slice(), "is not executed"),
    ] {
        let output = fed(&["export", "-", "--to", "csv", "--out", "-"], wrong);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            String::from_utf8_lossy(&output.stderr).contains(why),
            "{output:?}"
        );
    }
    let output = fed(&["export", "-", "--to", "pprof", "--out", "-"], &snapshot);
    assert!(
        stderr(&output).contains("expected a recording of cualloc, found a pickle or JSON"),
        "{output:?}"
    );
}

/// A recording with records of kind, address and bytes, one each millisecond.
fn recording(sampling: u32, records: &[(u64, u64, u64)]) -> Vec<u8> {
    let records = (1..).zip(records);
    let records = records.map(|(at, (kind, address, size))| [at, address << 9 | kind, *size, 0]);
    recorded::recording(sampling, &[], records)
}

#[test]
fn an_export_reports_its_instant_and_why_it_is_empty() {
    const ALLOCATE: u64 = 1;
    const FREE: u64 = 2;
    const FAILURE: u64 = 6;
    let freed = [(ALLOCATE, 8, 1 << 20), (FREE, 8, 1 << 20)];
    let failed = [freed[0], freed[1], (FAILURE, 0, 3 << 20)];
    let (peak, failure) = (
        "at the peak, 0.001 s after the recording began, with 1.00 MiB live",
        "when a request of 3.00 MiB ran out of memory, 0.003 s after the recording began, with 0 B live",
    );
    let nothing = Some("the recording has no allocation");
    let not_sampled =
        Some("no block that was live then has a stack: one is recorded per 512 KiB requested");
    let out = scratch().join("export");
    let path = out.to_str().unwrap();
    for (sampling, records, format, sums_at, empty) in [
        (0, &freed[..], "collapsed", Some(peak), None),
        (0, &freed, "pprof", Some(peak), None),
        (0, &freed, "pytorch", None, None),
        (0, &freed, "csv", None, None),
        (
            0,
            &failed,
            "collapsed",
            Some(failure),
            Some("no block was live then"),
        ),
        (1024, &freed, "collapsed", Some(peak), not_sampled),
        (1024, &freed, "pprof", Some(peak), not_sampled),
        (1024, &freed, "pytorch-json", None, None),
        (0, &[], "collapsed", None, nothing),
        (1024, &[], "pprof", None, nothing),
        (0, &[], "pytorch", None, nothing),
        (0, &[], "csv", None, Some("the file has no allocation")),
    ] {
        let file = recording(sampling, records);
        let output = fed(
            &["export", "-", "--to", format, "--out", path, "--json"],
            &file,
        );
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let line = object(&output);
        assert_eq!(line["sums_at"], serde_json::json!(sums_at), "{line}");
        let warnings: Vec<String> = empty
            .map(|why| format!("the export is empty: {why}"))
            .into_iter()
            .collect();
        assert_eq!(line["warnings"], serde_json::json!(warnings), "{line}");
        let written = std::fs::read(&out).unwrap();
        assert_eq!(line["bytes"], written.len());
        let notes = sums_at.map(|at| format!("note: <stdin>: the export shows memory {at}\n"));
        let warned = warnings
            .iter()
            .map(|why| format!("warning: <stdin>: {why}\n"));
        let expected: String = notes.into_iter().chain(warned).collect();
        assert_eq!(stderr(&output), expected);
        // The result is on stderr if the export is on stdout.
        let output = fed(
            &["export", "-", "--to", format, "--out", "-", "-q", "--json"],
            &file,
        );
        assert_eq!(output.stdout, written);
        let said: serde_json::Value = serde_json::from_str(&stderr(&output)).unwrap();
        assert_eq!(said, line);
    }
}
