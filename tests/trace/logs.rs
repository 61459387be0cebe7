//! Logs of RMM and of this crate, in their forms, and what is wrong with others.

use cualloc::trace::{AllocationLog, Trace, TraceError, TraceFault};

const RMM: &str = "Thread,Time,Action,Pointer,Size,Stream";

const ROWS: &str = "\
101,10:00:00.000000,allocate,0x7f0000000000,1000,0x0
102,10:00:00.000001,allocate,0x7f0000000400,5000,0x55d0c0a0
101,10:00:00.000002,free,0x7f0000000000,1000,0x0
101,10:00:00.000003,allocate failure,0x0,11136000000,0x1
101,10:00:00.000004,allocate,0x7f0000000000,70,0x55d0c0a0
";

const EXPECTED: &str = "a,0,1000,0 a,1,5000,1 f,0,0,0 oom,0,11136000000,2 a,2,70,1";

fn read(rows: &str) -> Result<AllocationLog, TraceError> {
    AllocationLog::read(format!("{RMM}\n{rows}").as_bytes())
}

fn text(trace: &Trace) -> String {
    let rows: Vec<String> = trace.rows().iter().map(ToString::to_string).collect();
    rows.join(" ")
}

fn rows(log: &AllocationLog, device: usize) -> String {
    text(&log.to_trace("log", device).unwrap())
}

#[test]
fn all_forms_of_rmms_log_are_read() {
    let whole = format!("{RMM}\n{ROWS}");
    let replaced = |pairs: &[(&str, &str)]| {
        let mut text = whole.clone();
        for (from, to) in pairs {
            assert!(text.contains(from), "{from}");
            text = text.replace(from, to);
        }
        text
    };
    let forms = [
        whole.clone(),
        replaced(&[("\n", "\r\n")]),
        replaced(&[("Thread", "\u{FEFF}Thread")]),
        format!("{whole}\n\n"),
        whole.trim_end().to_owned(),
        // Times: before microseconds there was a colon once, and there may be none, or seconds since 1970.
        replaced(&[("00.0", "00:0")]),
        replaced(&[
            (".000000,", ","),
            (".000001,", ","),
            (".000002,", ","),
            (".000003,", ","),
            (".000004,", ","),
        ]),
        replaced(&[("10:00:00.", "1634567890.")]),
        // Null pointers, and the default stream.
        replaced(&[("0x0,11136000000", ",11136000000")]),
        replaced(&[("0x0,11136000000", "(nil),11136000000")]),
        replaced(&[("0x0,11136000000", "nullptr,11136000000")]),
        replaced(&[(",0x0\n", ",0\n")]),
        replaced(&[(",0x0\n", ",(nil)\n")]),
        // As other tools write it again.
        replaced(&[("0x7f", "0x7F"), ("0x55d0c0a0", "0x55D0C0A0")]),
        replaced(&[("allocate,", "\"allocate\","), ("Action", "\"Action\"")]),
        replaced(&[
            ("Thread,", ",Thread,"),
            ("101,1", "0,101,1"),
            ("102,1", "0,102,1"),
        ]),
    ];
    for form in forms {
        let log = AllocationLog::read(form.as_bytes()).unwrap();
        assert_eq!(rows(&log, 0), EXPECTED, "{form}");
        assert_eq!((log.devices(), log.gaps(0)), (vec![0], vec![]), "{form}");
    }
    assert!(AllocationLog::is_header(RMM.as_bytes()));
    for other in [
        "",
        "op,id,bytes,stream",
        "Thread,Time,Action,Pointer,Size",
        "Event Type,Device ID,Address,Stream",
    ] {
        assert!(!AllocationLog::is_header(other.as_bytes()));
    }
}

/// Blocks of no bytes have no address, and those that have one are no rows.
#[test]
fn requests_of_0_bytes_are_no_rows() {
    for pointer in ["0x0", "(nil)", "", "0x7f00"] {
        let text = format!(
            "1,1:0:0,allocate,{pointer},0,0x0\n1,1:0:0,free,{pointer},0,0x0\n1,1:0:0,allocate,0x7f00,5,0x0\n"
        );
        let log = read(&text).unwrap();
        assert_eq!(rows(&log, 0), "a,0,5,0", "{pointer}");
        assert_eq!(log.gaps(0), [""; 0]);
    }
}

/// The handle 2 is the default stream of its thread.
#[test]
fn a_threads_own_stream_is_one_for_each_thread() {
    let rows_of = |stream: &str| {
        let line = |thread, at| format!("{thread},1:0:0,allocate,{at:#x},5,{stream}\n");
        rows(
            &read(&[line(7, 512), line(8, 1024), line(7, 1536)].concat()).unwrap(),
            0,
        )
    };
    assert_eq!(rows_of("0x2"), "a,0,5,0 a,1,5,1 a,2,5,0");
    assert_eq!(rows_of("0x1"), "a,0,5,0 a,1,5,0 a,2,5,0");
}

#[test]
fn missing_parts_of_a_log_are_reported() {
    let gaps = |rows: &str| read(rows).unwrap().gaps(0);
    let (a, f) = (
        "1,1:0:0,allocate,0x200,5,0x0\n",
        "1,1:0:0,free,0x200,5,0x0\n",
    );
    assert_eq!(gaps(&[a, f, a, f].concat()), [""; 0]);
    let early = "of blocks that the log does not allocate: it begins late, an earlier peak is unknown; left out, the first \
                 in line";
    assert_eq!(gaps(&[f, a, f, f].concat()), [format!("2 frees {early} 2")]);
    assert_eq!(
        gaps(&[a, &f.replace(",5,", ",6,")].concat()),
        ["1 free with another size than the allocation, the first in line 3"]
    );
    let lost = read(&[a, a, f].concat()).unwrap();
    assert_eq!(rows(&lost, 0), "a,0,5,0 f,0,0,0 a,1,5,0 f,1,0,0");
    assert_eq!(
        lost.gaps(0),
        ["1 free missing before another block has the same address, the first in line 3"]
    );
    assert_eq!(gaps(""), ["the log has no allocations"]);
}

/// A program that crashes leaves half a line at most, which is left out.
#[test]
fn a_log_that_breaks_off_is_read_up_to_there() {
    let whole = format!("{RMM}\n{ROWS}");
    for end in RMM.len() + 1..whole.len() {
        let log = AllocationLog::read(&whole.as_bytes()[..end]).unwrap();
        let read = rows(&log, 0);
        assert!(
            EXPECTED.starts_with(read.trim_end_matches(|c: char| c.is_ascii_digit())),
            "{read}"
        );
        let torn = !whole[..end].ends_with('\n')
            && log.gaps(0).iter().any(|gap| gap.contains("breaks off"));
        let count = read.split_whitespace().count();
        let complete = whole[..end].matches('\n').count() - 1;
        assert!(
            count == complete || count == complete + 1 && !torn,
            "{end} {read}"
        );
    }
}

#[test]
fn every_wrong_field_is_named_with_its_line() {
    let line = "7,10:00:00.000001,allocate,0x7f00,1000,0x0";
    for (column, wrong) in [
        ("Thread", &["", "x", "-1", "0x7"][..]),
        ("Time", &["", "now", "-1"]),
        ("Action", &["", "alloc", "Allocate", "5"]),
        (
            "Pointer",
            &[
                "x",
                "-512",
                "0x",
                "0x+5",
                "0x1ffffffffffffffff",
                "",
                "(nil)",
                "0x0",
            ],
        ),
        (
            "Size",
            &["", "-1", "1.5", "0x10", "1e3", "18446744073709551616"],
        ),
        ("Stream", &["x", "-1", "0x"]),
    ] {
        let index = RMM.split(',').position(|name| name == column).unwrap();
        for wrong in wrong {
            let mut fields: Vec<&str> = line.split(',').collect();
            fields[index] = wrong;
            let error = read(&format!("{line}\n{}\n", fields.join(","))).unwrap_err();
            assert_eq!(error.line(), 3, "{column} {wrong}");
            let told = error.to_string();
            assert!(
                told.starts_with(&format!("line 3: `{column}`: expected ")),
                "{told}"
            );
            assert!(told.ends_with(&format!(", found `{wrong}`")), "{told}");
        }
    }
    let short = read("7,10:00:00.000001,free,0x7f00,5\n").unwrap_err();
    assert_eq!(short.to_string(), "line 2: the field `Stream` is missing");
    let long = read(&format!("{line},{line}\n")).unwrap_err();
    assert!(matches!(long.fault(), TraceFault::FieldsLeftOver), "{long}");
    let header = AllocationLog::read(&b"Thread,Time,Action,Pointer,Size\n"[..]).unwrap_err();
    assert_eq!(header.to_string(), "line 1: the field `Stream` is missing");
    let endless = read(&"7".repeat(5000)).unwrap_err();
    assert!(
        matches!(endless.fault(), TraceFault::LineTooLong),
        "{endless}"
    );
    assert_eq!((long.line(), endless.line()), (2, 2));
    let huge = format!(
        "1,1:0:0,allocate,0x1,{0},0x0\n1,1:0:0,allocate,0x2,{0},0x0\n",
        u64::MAX
    );
    let huge = read(&huge).unwrap().to_trace("huge", 0).unwrap_err();
    assert!(
        matches!(huge.fault(), TraceFault::LiveBytesOverflow),
        "{huge}"
    );
}

/// Files that are changed at random are refused, or are valid traces.
#[test]
fn damaged_logs_are_refused_or_consistent() {
    let whole = format!("{RMM}\n{ROWS}").into_bytes();
    let (mut state, mut read) = (1u64, 0);
    let mut draw = |limit: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % limit
    };
    for _ in 0..4000 {
        let mut bytes = whole.clone();
        for _ in 0..=draw(3) {
            let at = draw(bytes.len());
            bytes[at] = [b',', b'\n', b'"', b'0', b'x', 0xff, b'-'][draw(7)];
        }
        if let Ok(log) = AllocationLog::read(&bytes[..]) {
            read += 1;
            assert!(log.to_trace("spoilt", 0).unwrap().rows().len() <= 10);
        }
    }
    assert!(read > 100, "{read}");
}

#[cfg(feature = "sim")]
mod ours {
    use super::{rows, text};
    use cualloc::Request;
    use cualloc::allocator::{Allocator, Config};
    use cualloc::resource::{LogRecord, Logging, MemoryResource};
    use cualloc::sim::{SimConfig, Simulator};
    use cualloc::trace::{AllocationLog, Replay};
    use std::sync::Mutex;

    /// Logs of the logging adaptor are read back: two devices, tags with all that CSV must quote, a request that
    /// fails, an address that is used again.
    #[test]
    fn a_log_of_this_crate_is_the_program() {
        let simulator = Simulator::new(SimConfig::with_devices(2, 1 << 30)).unwrap();
        let lines = Mutex::new(format!("{}\n", LogRecord::CSV_HEADER));
        for device in 0..2 {
            let context = simulator.context(device).unwrap();
            let allocator = Allocator::with_config(&context, Config::new()).unwrap();
            let streams = [0, 1].map(|_| allocator.create_stream().unwrap());
            let log = Logging::new(allocator, |record: &LogRecord| {
                let mut lines = lines.lock().unwrap();
                lines.push_str(&record.to_csv());
                lines.push('\n');
                Ok(())
            });
            let tags = ["kv cache", "a, \"b\"\nc", "untagged"];
            let mut kept = Vec::new();
            for (index, tag) in tags.into_iter().enumerate() {
                let request = Request::new(1000 * (index + 1 + 3 * device)).tag(tag);
                let block = log.allocate_block(&request, &streams[index % 2]).unwrap();
                kept.push(block);
            }
            log.allocate_block(&Request::new(2 << 30), &streams[0])
                .unwrap_err();
            log.deallocate_block(kept.remove(0)).unwrap();
            let again = log.allocate_block(&Request::new(900), &streams[0]).unwrap();
            log.reap().unwrap();
            for block in kept.into_iter().chain([again]) {
                log.deallocate_block(block).unwrap();
            }
        }
        let lines = lines.into_inner().unwrap();
        let log = AllocationLog::read(lines.as_bytes()).unwrap();
        assert_eq!(log.devices(), [0, 1]);
        for (device, bytes) in [(0, [1000, 2000, 3000]), (1, [4000, 5000, 6000])] {
            let trace = log.to_trace("ours", device).unwrap();
            let [a, b, c] = bytes;
            assert_eq!(
                text(&trace),
                format!(
                    "a,0,{a},0 a,1,{b},1 a,2,{c},0 oom,0,2147483648,0 f,0,0,0 a,3,900,0 f,1,0,1 f,2,0,0 f,3,0,0"
                ),
                "{lines}"
            );
            let tag = |id| {
                trace
                    .context_of(id)
                    .map(|tag| trace.contexts()[tag].as_str())
            };
            assert_eq!(
                [0, 1, 2, 3].map(tag),
                [Some("kv cache"), Some("a, \"b\"\nc"), None, None]
            );
            assert_eq!(log.gaps(device), [""; 0]);
            let report = Replay::new(&trace)
                .run(&simulator.context(0).unwrap())
                .unwrap();
            assert!(report.is_clean(), "{report:?}");
        }
    }

    /// A free is written when it is over: another thread may have the address before.
    #[test]
    fn a_free_that_is_written_late_frees_the_older_block() {
        let line =
            |action: &str, bytes: u64| format!("1,0.5,{action},0x200,{bytes},7,0,untagged,\n");
        let file = |lines: &[String]| format!("{}\n{}", LogRecord::CSV_HEADER, lines.concat());
        let late = [
            line("allocate", 5),
            line("allocate", 6),
            line("free", 5),
            line("free", 6),
        ];
        let log = AllocationLog::read(file(&late).as_bytes()).unwrap();
        assert_eq!(rows(&log, 0), "a,0,5,0 f,0,0,0 a,1,6,0 f,1,0,0");
        assert_eq!(log.gaps(0), [""; 0]);
        let missing = AllocationLog::read(file(&late[..3]).as_bytes()).unwrap();
        assert_eq!(rows(&missing, 0), "a,0,5,0 f,0,0,0 a,1,6,0");
        let none = AllocationLog::read(file(&late[..2]).as_bytes()).unwrap();
        let lost = "1 free missing before another block has the same address, the first in line 3";
        assert_eq!(none.gaps(0), [lost]);
        // A free that was refused frees nothing.
        let refused = [line("allocate", 5), line("free failure", 5)];
        let refused = AllocationLog::read(file(&refused).as_bytes()).unwrap();
        assert_eq!(rows(&refused, 0), "a,0,5,0");
    }
}
