//! Files of other programs: what is read, which gaps are reported, and the texts of errors.

use crate::{data, fed, file, meta, object, packed, recorded, run, split, stderr, stdout};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::process::Output;

/// The commands that read files, with what else they need.
const COMMANDS: [&[&str]; 6] = [
    &["replay", "--device", "sim", "--json", "-"],
    &["capacity", "--device", "sim", "--json", "-"],
    &["advise", "--memory", "64GiB", "--json", "-"],
    &["view", "-o", "-", "-"],
    &["export", "--to", "csv", "--out", "-", "-"],
    &["vary", "--copies", "1", "--percent", "0", "--out", "-", "-"],
];

/// The warnings about a file in the output of a command, if there are any.
fn warnings(output: &Output) -> Option<Value> {
    let text = stdout(output);
    if text.starts_with("<!DOCTYPE html>") {
        return Some(meta(&text)["warnings"].clone());
    }
    let line: Value = serde_json::from_str(&text).ok()?;
    Some(line["warnings"].clone())
}

fn entry(action: &str, addr: u64, size: u64) -> Value {
    let address = if action == "oom" {
        "device_free"
    } else {
        "addr"
    };
    json!({"action": action, address: addr, "size": size, "stream": 0, "time_us": 1})
}

/// A program on one GPU that allocates and frees, and one on the second GPU that runs out of memory.
fn two_gpus() -> Value {
    let pair = |at| [entry("alloc", at, 4096), entry("free", at, 4096)];
    let busy: Vec<Value> = (1..=3).flat_map(|at| pair(at << 20)).collect();
    let failing = [
        entry("alloc", 1 << 30, 20 << 30),
        entry("oom", 3 << 30, 12 << 30),
    ];
    json!({"segments": [], "device_traces": [busy, failing, []]})
}

#[test]
fn one_of_several_gpus_is_shown_and_the_others_are_named() {
    let text = two_gpus().to_string();
    let note = "only GPU 0 is shown, which has the most rows; not shown: GPU 1 (2 rows, 1 failed request); \
                --gpu N selects another one";
    for command in COMMANDS {
        let output = fed(command, text.as_bytes());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let complaint = stderr(&output);
        assert!(
            complaint.contains(&format!("warning: <stdin>: {note}")),
            "{complaint}"
        );
        let printed = warnings(&output);
        assert!(
            printed.is_none_or(|printed| printed == json!([note])),
            "{command:?}"
        );
        for gpu in ["0", "1"] {
            let output = fed(&[command, &["--gpu", gpu]].concat(), text.as_bytes());
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
            let printed = warnings(&output);
            assert!(
                printed.is_none_or(|printed| printed == json!([])),
                "{command:?}"
            );
        }
        let none = fed(&[command, &["--gpu", "3"]].concat(), text.as_bytes());
        assert_eq!(none.status.code(), Some(1));
        let complaint = stderr(&none);
        assert!(
            complaint.contains("<stdin>: --gpu 3: the file has the GPUs 0, 1, 2\n"),
            "{complaint}"
        );
        // A trace is of no known GPU.
        let trace = fed(
            &[command, &["--gpu", "0"]].concat(),
            b"op,id,bytes,stream\na,0,512,0\n",
        );
        assert_eq!(trace.status.code(), Some(1));
        assert!(stderr(&trace).contains("a trace does not say which GPU it is of"));
    }
    let csv = |gpu: &str| {
        let output = fed(&[COMMANDS[4], &["--gpu", gpu]].concat(), text.as_bytes());
        stdout(&output)
    };
    assert_eq!(csv("0").lines().count(), 7);
    assert_eq!(
        csv("1"),
        "op,id,bytes,stream\na,0,21474836480,0\noom,0,12884901888,0\n"
    );
    // It was never used, which is said.
    let output = fed(&[COMMANDS[0], &["--gpu", "2"]].concat(), text.as_bytes());
    assert_eq!(
        object(&output)["warnings"],
        json!(["GPU 2 has neither blocks nor a history in this snapshot"])
    );
}

/// A recording with an allocator on each of two devices.
fn recording() -> Vec<u8> {
    let (allocate, source, second) = (1u64, 9u64, 1u64 << 32);
    let records = [
        [1, source, 0, 0],
        [2, source, 1, second],
        [3, 512 + allocate, 1000, 0],
        [4, 512 + allocate, 2000, second],
        [5, 1024 + allocate, 3000, second],
    ];
    recorded::recording(0, &[], records)
}

#[test]
fn recordings_and_logs_may_have_several_gpus() {
    let log = "Thread,Time,Action,Pointer,Size,Stream,Device,Tag,Error\n\
               1,0.1,allocate,0x200,1000,7,0,untagged,\n\
               1,0.2,allocate,0x200,2000,7,1,untagged,\n\
               1,0.3,allocate,0x400,3000,7,1,untagged,\n";
    for content in [recording(), log.as_bytes().to_vec()] {
        let peak = |options: &[&str]| {
            let output = fed(&[COMMANDS[0], options].concat(), &content);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            let line = object(&output);
            (
                line["requested_peak_bytes"].as_u64().unwrap(),
                line["warnings"].clone(),
            )
        };
        let (most, printed) = peak(&[]);
        assert_eq!(most, 5000);
        let note = "only GPU 1 is shown, which has the most rows; not shown: GPU 0 (1 row); --gpu N selects another one";
        assert_eq!(printed, json!([note]));
        assert_eq!(peak(&["--gpu", "0"]), (1000, json!([])));
        assert_eq!(peak(&["--gpu", "1"]), (5000, json!([])));
    }
    // Other formats have all GPUs, or one.
    for (options, devices) in [(&[][..], [true, true]), (&["--gpu", "1"], [false, true])] {
        let export = ["export", "-", "--to", "pytorch-json", "--out", "-"];
        let output = fed(&[&export, options].concat(), &recording());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let snapshot: Value = serde_json::from_slice(&output.stdout).unwrap();
        let traces = snapshot["device_traces"].as_array().unwrap();
        let printed = |device: usize| {
            traces
                .get(device)
                .is_some_and(|trace| !trace.as_array().unwrap().is_empty())
        };
        assert_eq!([0, 1].map(printed), devices);
    }
}

#[test]
fn a_missing_history_is_a_warning() {
    let block = json!({"address": 512, "size": 1048576, "requested_size": 1048576, "state": "active_allocated"});
    let whole = |trace: Vec<Value>| {
        let segment = json!({"device": 0, "address": 512, "total_size": 1048576, "stream": 0,
                             "segment_type": "large", "blocks": [block]});
        json!({"segments": [segment], "device_traces": [trace]}).to_string()
    };
    let alloc = entry("alloc", 512, 1 << 20);
    let other = entry("alloc", 4 << 20, 4096);
    let none = "the snapshot has no history of GPU 0, only what was live at its end: 1 block (1.00 MiB); the peak is \
                unknown";
    let late = "the history of GPU 0 lacks the allocation of 1 block (1.00 MiB): it begins late, or its beginning was \
                overwritten; an earlier peak is unknown";
    for (trace, expected) in [
        (vec![], json!([none])),
        (vec![other.clone()], json!([late])),
        (vec![other, alloc], json!([])),
    ] {
        for command in COMMANDS {
            let output = fed(command, whole(trace.clone()).as_bytes());
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            let printed = warnings(&output);
            assert!(
                printed.is_none_or(|printed| printed == expected),
                "{command:?}"
            );
            let complaint = stderr(&output);
            let lines = complaint
                .lines()
                .filter(|line| line.starts_with("warning: "));
            let lines: Vec<&str> = lines
                .filter_map(|line| line.strip_prefix("warning: <stdin>: "))
                .collect();
            assert_eq!(json!(lines), expected, "{command:?} {complaint}");
        }
    }
}

/// A program whose first request failed never held a block: its history is complete.
#[test]
fn a_history_of_failed_requests_alone_is_read() {
    let oom = entry("oom", 3 << 30, 12 << 30);
    let snapshot = json!({"segments": [], "device_traces": [[oom]]}).to_string();
    for command in COMMANDS {
        let output = fed(command, snapshot.as_bytes());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
        let printed = warnings(&output);
        assert!(
            printed.is_none_or(|printed| printed == json!([])),
            "{command:?}"
        );
    }
}

/// A page as PyTorch's trace_plot writes it, with these bytes inside: padded with zeros to a multiple of three.
fn page(snapshot: &[u8]) -> String {
    let mut bytes = snapshot.to_vec();
    bytes.resize(bytes.len() + 3 - bytes.len() % 3, 0);
    let inside = json!([{"name": "snapshot.pickle", "base64": BASE64_STANDARD.encode(bytes)}]);
    format!(
        "\n<!DOCTYPE html>\n<html>\n<head>\n</head>\n<body>\n<script type=\"module\">\n\
         import {{add_local_files}} from \"https://example.org/MemoryViz.js\"\n\
         const local_files = {inside}\nadd_local_files(local_files, 'Active Memory Timeline')\n</script>\n</body>\n"
    )
}

#[test]
fn a_page_of_pytorchs_viewer_is_read() {
    let empty = b"\x80\x02}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](](}(X\x06\0\0\0actionX\x05\0\0\0alloc\
                  X\x04\0\0\0sizeK\x40X\x04\0\0\0addrK\x01X\x06\0\0\0streamK\0uee";
    for length in 0..3 {
        // Keys that are not known make it longer.
        let mut pickle = empty.to_vec();
        pickle.extend(b"X");
        pickle.extend((length as u32).to_le_bytes());
        pickle.extend(vec![b'x'; length]);
        pickle.extend(b"Nu.");
        for content in [page(&pickle).into_bytes(), packed(page(&pickle).as_bytes())] {
            let path = file("plot.html", &content);
            let output = run(&[
                "replay",
                "--device",
                "sim",
                "--json",
                path.to_str().unwrap(),
            ]);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            let line = object(&output);
            assert_eq!((&line["trace"], &line["rows"]), (&json!("plot"), &json!(1)));
        }
    }
    let whole = page(b"\x80\x02}.");
    for (broken, words) in [
        (whole.clone(), "a dictionary without keys"),
        (
            whole.replace("base64", "other"),
            "an HTML or XML file without the snapshot of a trace_plot",
        ),
        (format!("{whole}{whole}"), "a page of several snapshots"),
        (
            whole.replace("gAJ9", "g~J9"),
            "a page whose snapshot is damaged (Invalid symbol",
        ),
        (
            whole.replace("\"base64\":", "\"base64\" "),
            "a page whose snapshot is damaged",
        ),
        (
            whole.replace("\"base64\":\"", "\"base64\":[\""),
            "a page whose snapshot is damaged",
        ),
    ] {
        let output = fed(COMMANDS[0], broken.as_bytes());
        assert_eq!(output.status.code(), Some(1), "{broken}");
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    // Cut off anywhere it is no snapshot.
    let whole = page(&[&empty[..], b"u."].concat());
    let end = whole.find("\",\"name").unwrap();
    for end in (1..end).step_by(7) {
        let output = fed(COMMANDS[4], &whole.as_bytes()[..end]);
        assert_eq!(output.status.code(), Some(1), "{end}: {}", stdout(&output));
    }
}

const LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
                   101,10:00:00.000000,allocate,0x7f0000000000,1000,0x0\n\
                   102,10:00:00,allocate,0x7f0000000400,5000,0x55d0c0a0\n\
                   101,10:00:00:000002,free,0x7f0000000000,1000,0x0\n\
                   101,10:00:00.000003,allocate failure,(nil),11136000000,0x1\n";

#[test]
fn logs_of_rmm_are_read_by_all_commands() {
    for content in [LOG.as_bytes().to_vec(), packed(LOG.as_bytes())] {
        for command in COMMANDS {
            let output = fed(command, &content);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
        }
        let line = object(&fed(COMMANDS[0], &content));
        assert_eq!(
            (&line["rows"], &line["allocations"]),
            (&json!(4), &json!(2))
        );
        let csv = stdout(&fed(COMMANDS[4], &content));
        assert_eq!(
            csv,
            "op,id,bytes,stream\na,0,1000,0\na,1,5000,1\nf,0,0,0\noom,0,11136000000,2\n"
        );
    }
    for (broken, words) in [
        (
            LOG.replace(",5000,", ",5e3,"),
            "<stdin>:3: `Size`: expected a number of bytes, found `5e3`",
        ),
        (
            LOG.replace("free,", "release,"),
            "<stdin>:4: `Action`: expected",
        ),
        (
            LOG.replace("1000,0x0\n102", "1000\n102"),
            "<stdin>:2: the field `Stream` is missing",
        ),
    ] {
        let output = fed(COMMANDS[0], broken.as_bytes());
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    let late = LOG.replace("101,10:00:00.000000,allocate,0x7f0000000000,1000,0x0\n", "");
    let printed = object(&fed(COMMANDS[0], late.as_bytes()))["warnings"].clone();
    assert!(
        printed[0]
            .as_str()
            .unwrap()
            .starts_with("1 free of blocks that the log does not allocate"),
        "{printed}"
    );
    let torn = object(&fed(COMMANDS[0], &LOG.as_bytes()[..LOG.len() - 15]))["warnings"].clone();
    assert_eq!(
        torn,
        json!(["the last line of the log breaks off and is left out"])
    );
    let many = fed(
        &[COMMANDS[0], &["--max-rows", "3"]].concat(),
        LOG.as_bytes(),
    );
    assert!(
        stderr(&many).contains("more than 3 rows"),
        "{}",
        stderr(&many)
    );
}

#[test]
fn an_error_describes_the_file_and_the_formats_that_are_read() {
    let mut torch = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.".to_vec();
    torch.extend([0; 9]);
    let timeline = json!([[0, 10, 20], [[0, 0, 0], [1024, 0, 0]]]).to_string();
    let profiler =
        json!({"schemaVersion": 1, "traceEvents": [{"ph": "i", "name": "[memory]"}]}).to_string();
    let mut tar = vec![b'x'; 300];
    tar[257..262].copy_from_slice(b"ustar");
    let others: [(&[u8], &str); 25] = [
        (b"", "an empty file"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"\xff\xfeo\0p\0", "text in UTF-16"),
        (b"(dp0\nVsegments", "a pickle of protocol 0"),
        (b"}q\x01(U\x08segments", "a pickle of protocol 1"),
        (b"\xc3\x28\xa0", "binary data"),
        (&tar, "a tar archive"),
        (b"[4242][09:13:00.5][error ] [A]", "a debug log of RMM"),
        (
            b"op, id, bytes, stream\n",
            "CSV with the first line `op, id, bytes, stream`",
        ),
        (
            b"hello\x1b[31m\nworld",
            "text with the first line `hello\\u{1b}[31m`",
        ),
        // A character that is cut off by the part that was read.
        (b"gr\xc3", "text with the first line `gr\u{FFFD}`"),
        (
            b"PK\x03\x04\x14\0archive/data.pkl",
            "a zip archive, as torch.save and numpy.savez write",
        ),
        (&torch, "a file of torch.save"),
        (
            b"\x80\x02cnumpy\nndarray\n.",
            "a pickle of other objects (byte 2: unsupported opcode 0x63",
        ),
        (b"\x80\x04]\x94(K\x01e.", "a list that begins with 1"),
        (profiler.as_bytes(), "a trace of torch.profiler"),
        (
            timeline.as_bytes(),
            "a list of lists, as memory timelines of torch.profiler are",
        ),
        (b"[]", "an empty list"),
        (
            b"{\"step\": 1, \"loss\": 0.5}",
            "a dictionary with the keys `step`, `loss`",
        ),
        (
            b"{\"step\": 1}\n{\"step\": 2}\n",
            "JSON with an error (trailing characters at line 2 column 1)",
        ),
        (
            b"<!DOCTYPE html><html></html>",
            "an HTML or XML file without the snapshot of a trace_plot",
        ),
        (
            b"[  101][10:00:00:000100][info  ] RMM LOG",
            "a debug log of RMM",
        ),
        (b"time,bytes\n1,2\n", "CSV with the first line `time,bytes`"),
        (b"\x7fELF\x02\x01\x01\0", "binary data"),
        (b"hello world\n", "text with the first line `hello world`"),
    ];
    for (content, found) in others {
        for (content, found) in [
            (content.to_vec(), found.to_owned()),
            (packed(content), found.to_owned()),
        ] {
            let output = fed(COMMANDS[0], &content);
            assert_eq!(output.status.code(), Some(1), "{found}");
            let line = object(&output);
            let error = line["error"].as_str().unwrap();
            assert!(error.contains(&found), "{error}");
            for format in split("op,id,bytes,stream recordings PyTorch trace_plot RMM gzip") {
                assert!(error.contains(format), "{error}");
            }
            assert_eq!(stderr(&output), format!("error: {error}\n"));
        }
    }
    let twice = fed(COMMANDS[0], &packed(&packed(b"a,0")));
    assert!(
        stderr(&twice).contains("gzip data within gzip data"),
        "{twice:?}"
    );
    let lf = data("lf.csv");
    for to in ["pytorch", "pytorch-json", "pprof", "collapsed"] {
        let output = run(&["export", &lf, "--to", to, "--out", "-"]);
        assert_eq!(output.status.code(), Some(1));
        let why = "lf.csv: expected a recording of cualloc, found a trace: only `--to csv` reads other formats\n";
        assert!(stderr(&output).ends_with(why), "{}", stderr(&output));
    }
}
