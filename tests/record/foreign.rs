//! Snapshots of other programs: every form of a right value is read, and every wrong one is named.

use crate::pickler::{WIDTHS, Width, pickled, put_integer};
use cualloc::record::{Snapshot, SnapshotError};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// The beginning of a device's memory.
const BASE: u64 = 0x7f00_0000_0000;

fn entry(action: &str, addr: u64, size: u64) -> Value {
    let address = if action == "oom" {
        "device_free"
    } else {
        "addr"
    };
    json!({"action": action, address: addr, "size": size, "stream": 0, "time_us": 5,
           "frames": [{"filename": "/x/f.py", "line": 3, "name": "f"}], "user_metadata": "step"})
}

fn segment(device: u64, blocks: Value) -> Value {
    let sizes = blocks.as_array().unwrap().iter();
    let total: u64 = sizes.map(|block| block["size"].as_u64().unwrap()).sum();
    json!({"device": device, "address": BASE, "total_size": total, "stream": 0, "segment_type": "large",
           "is_expandable": false, "blocks": blocks})
}

/// A snapshot with everything that is read: two blocks of a segment, one of them live, and all of what happened.
fn whole() -> Value {
    let frames = json!([{"filename": "model.py", "line": 3, "name": "model"}]);
    let blocks = json!([
        {"address": BASE, "size": MIB, "requested_size": MIB - 9, "state": "active_allocated", "frames": frames},
        {"address": BASE + MIB, "size": 3 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]);
    let trace = [
        entry("segment_alloc", BASE, 4 * MIB),
        entry("alloc", BASE, MIB - 9),
        entry("alloc", BASE + MIB, MIB),
        entry("oom", 7 * MIB, 900 * MIB),
        entry("free_requested", BASE + MIB, MIB),
        entry("free_completed", BASE + MIB, MIB),
        entry("snapshot", 0, MIB),
    ];
    json!({"segments": [segment(0, blocks)], "device_traces": [trace]})
}

fn read(value: &Value) -> Result<Snapshot, SnapshotError> {
    Snapshot::read(value.to_string().as_bytes())
}

fn rows(snapshot: &Snapshot, device: usize) -> String {
    crate::scene::rows(&snapshot.to_trace("rows", device).unwrap())
}

/// The value at a path like `device_traces[0][2].addr`.
fn at<'a>(value: &'a mut Value, path: &str) -> &'a mut Value {
    let pointer = path.replace('[', "/").replace(']', "").replace('.', "/");
    value.pointer_mut(&format!("/{pointer}")).unwrap()
}

#[test]
fn every_form_of_an_integer_is_read() {
    let expected = "a,0,1048567,0 a,1,1048576,0 oom,0,943718400,0 f,1,0,0";
    // Addresses of a process, beyond the half of 64 bits, and the last ones: C++ writes these as negative numbers.
    for base in [
        4096,
        BASE,
        (1 << 62) + 512,
        1 << 63,
        0xffff_bf00_0000_0000,
        !0xff_ffff,
    ] {
        let mut text = whole().to_string();
        for offset in [0, MIB] {
            let [was, is] = [BASE + offset, base + offset].map(|at| at.to_string());
            assert!(text.contains(&was));
            text = text.replace(&was, &is);
        }
        let mut file: Value = serde_json::from_str(&text).unwrap();
        *at(&mut file, "segments[0].stream") = base.into();
        let signed: Value = {
            let mut signed = file.clone();
            for path in [
                "segments[0].address",
                "segments[0].blocks[0].address",
                "device_traces[0][1].addr",
            ] {
                *at(&mut signed, path) = (base as i64).into();
            }
            signed
        };
        let snapshot = read(&file).unwrap();
        assert_eq!(read(&signed).unwrap(), snapshot, "{base:#x}");
        assert_eq!(rows(&snapshot, 0), expected, "{base:#x}");
        assert_eq!(snapshot.gaps(0), [""; 0]);
        for protocol in 2..=5 {
            for width in WIDTHS {
                let pickle = Snapshot::read(&pickled(&file, protocol, width)).unwrap();
                assert_eq!(
                    pickle, snapshot,
                    "{base:#x}, protocol {protocol}, {width:?}"
                );
            }
        }
        // Written again it is the same.
        assert_eq!(Snapshot::read(&snapshot.to_pickle()).unwrap(), snapshot);
        assert_eq!(
            Snapshot::read(snapshot.to_json().as_bytes()).unwrap(),
            snapshot
        );
    }
}

/// The paths of all fields that are read, and what may be in their place.
const FIELDS: [(&str, &str); 26] = [
    ("segments", "list"),
    ("segments[0]", "element"),
    ("segments[0].device", "number"),
    ("segments[0].address", "number address"),
    ("segments[0].total_size", "number"),
    ("segments[0].stream", "number address"),
    ("segments[0].segment_type", "word"),
    ("segments[0].is_expandable", "optional flag"),
    ("segments[0].blocks", "list"),
    ("segments[0].blocks[1]", "element"),
    ("segments[0].blocks[1].address", "optional number address"),
    ("segments[0].blocks[0].size", "number"),
    ("segments[0].blocks[0].requested_size", "optional number"),
    ("segments[0].blocks[0].state", "word"),
    ("segments[0].blocks[0].frames", "optional list"),
    (
        "segments[0].blocks[0].frames[0].line",
        "optional number address",
    ),
    ("segments[0].blocks[0].frames[0].filename", "optional name"),
    ("device_traces", "list"),
    ("device_traces[0]", "element"),
    ("device_traces[0][2]", "element"),
    ("device_traces[0][2].action", "name"),
    ("device_traces[0][2].addr", "number address"),
    ("device_traces[0][3].device_free", "number"),
    ("device_traces[0][2].size", "number"),
    ("device_traces[0][4].stream", "number address"),
    ("device_traces[0][2].time_us", "optional number"),
];

#[test]
fn every_wrong_value_is_named() {
    // Values, and the only kind of field that they fit into.
    let values = [
        (json!(1099511627776.0), "none"),
        (json!(-0.5), "none"),
        (json!("0x7f0000000000"), "name"),
        (json!("12"), "name"),
        (json!(0), "number"),
        (json!(-1), "address"),
        (json!(1u64 << 63), "address"),
        (json!(true), "flag"),
        (json!(null), "optional"),
        (json!([1]), "none"),
        (json!({"a": 1}), "none"),
    ];
    for (path, kind) in FIELDS {
        for (value, fits) in &values {
            if kind.contains(fits) {
                continue;
            }
            let mut file = whole();
            *at(&mut file, path) = value.clone();
            let files = [2, 4].map(|protocol| pickled(&file, protocol, Width::Short));
            for bytes in files.into_iter().chain([file.to_string().into_bytes()]) {
                let error = Snapshot::read(&bytes)
                    .expect_err(&format!("{path} {value}"))
                    .to_string();
                // The field itself, or what is missing within it.
                let is_named = ["`", ".", "["].map(|end| format!("`{path}{end}"));
                let is_named = is_named.iter().any(|path| error.contains(path));
                let is_other =
                    path.starts_with("segments") && error.contains("whose `segments` are");
                assert!(is_named || is_other, "{path} {value}: {error}");
            }
        }
        if kind.contains("element") {
            continue;
        }
        let mut file = whole();
        let (inside, key) = path.rsplit_once('.').unwrap_or(("", path));
        let inside = if inside.is_empty() {
            &mut file
        } else {
            at(&mut file, inside)
        };
        inside.as_object_mut().unwrap().remove(key).unwrap();
        match (read(&file), kind.contains("optional")) {
            (Ok(_), true) => {}
            (Err(SnapshotError::Field { at, found, .. }), false) => {
                assert_eq!((at.as_str(), found.as_str()), (path, "nothing"))
            }
            (Err(SnapshotError::NotASnapshot { .. }), false) if path == "segments" => {}
            (other, _) => panic!("{path}: {other:?}"),
        }
    }
    let mut file = whole();
    *at(&mut file, "device_traces[0][2].addr") = json!(1099511627776.0);
    assert_eq!(
        read(&file).unwrap_err().to_string(),
        "`device_traces[0][2].addr`: expected an address, found the floating-point number 1099511627776"
    );
    // More than 64 bits, which JSON has no room for here.
    let huge = |number: i128| {
        let mut bytes = pickled(&whole(), 2, Width::Four);
        let mut was = vec![b'J'];
        was.extend((900 * MIB as u32).to_le_bytes());
        let place = bytes.windows(5).position(|part| part == was).unwrap();
        let mut long = Vec::new();
        put_integer(number, Width::Long, &mut long);
        bytes.splice(place..place + 5, long);
        Snapshot::read(&bytes).unwrap_err().to_string()
    };
    for number in [1 << 64, -(1 << 63) - 1, i128::MAX, i128::MIN] {
        assert_eq!(
            huge(number),
            "`device_traces[0][3].size`: expected a number of bytes, found an integer of more than 64 bits"
        );
    }
}

/// Frames are shown as far as they are known: Python has no line for some, and writes -1.
#[test]
fn frames_without_a_line_have_none() {
    for (frame, shown) in [
        (r#"{"filename":"/x/f.py","line":3,"name":"f"}"#, "f.py:3:f"),
        (r#"{"filename":"/x/f.py","line":0,"name":"f"}"#, "f.py:0:f"),
        (r#"{"filename":"/x/f.py","line":-1,"name":"f"}"#, "f.py:f"),
        (r#"{"filename":"/x/f.py","line":null,"name":"f"}"#, "f.py:f"),
        (r#"{"filename":"/x/f.py","name":"f"}"#, "f.py:f"),
        (r#"{"filename":"","line":3,"name":"f"}"#, "f"),
        (r#"{"line":3,"name":"f"}"#, "f"),
        (r#"{"filename":"/x/f.py","line":3}"#, "f.py:3:?"),
        ("{}", "?"),
    ] {
        let mut file = whole();
        let frame: Value = serde_json::from_str(frame).unwrap();
        *at(&mut file, "device_traces[0][1].frames") = json!([frame]);
        let trace = read(&file).unwrap().to_trace("frames", 0).unwrap();
        assert_eq!(trace.contexts()[trace.context_of(0).unwrap()], shown);
    }
}

/// Optional fields are derived or unknown, never 0.
#[test]
fn fields_missing_in_older_files_are_derived_or_unknown() {
    let mut file = whole();
    let blocks = at(&mut file, "segments[0].blocks").as_array_mut().unwrap();
    for block in blocks {
        let block = block.as_object_mut().unwrap();
        block.remove("address").unwrap();
        block.remove("frames").unwrap();
    }
    let derived = read(&file).unwrap();
    // The second block begins where the first one ends.
    assert!(
        derived
            .to_json()
            .contains(&format!("\"address\":{}", BASE + MIB))
    );
    assert_eq!(derived.gaps(0), [""; 0]);
    *at(&mut file, "segments[0].blocks[0]") =
        json!({"size": MIB, "state": "active_allocated", "history": [{"real_size": 77}]});
    let older = read(&file).unwrap();
    assert!(older.to_json().contains("\"requested_size\":77"));
    for unknown in [
        json!({"size": MIB, "state": "active_allocated"}),
        json!({"size": MIB, "state": "active_pending_free", "requested_size": 0}),
    ] {
        *at(&mut file, "segments[0].blocks[0]") = unknown;
        let unknown = read(&file).unwrap();
        assert!(
            unknown
                .to_json()
                .contains(&format!("\"requested_size\":{MIB}"))
        );
        assert_eq!(
            unknown.gaps(0),
            ["the requested size of 1 block is unknown; the rounded size counts"]
        );
    }
    let mut timeless = whole();
    for index in 0..7 {
        let entry = at(&mut timeless, &format!("device_traces[0][{index}]"));
        entry.as_object_mut().unwrap().remove("time_us").unwrap();
    }
    let timeless = read(&timeless).unwrap();
    assert!(!timeless.to_json().contains("time_us"));
    assert_eq!(rows(&timeless, 0), rows(&read(&whole()).unwrap(), 0));
    let mut later = whole();
    *at(&mut later, "device_traces[0][0].action") = "workspace".into();
    let gaps = read(&later).unwrap().gaps(0);
    assert_eq!(
        gaps,
        ["the history has the unknown action `workspace` 1 time, which is ignored"]
    );
}

#[test]
fn another_pickle_is_not_an_empty_snapshot() {
    let others = [
        (
            json!([[0, 10, 20], [[0, 0, 0], [1024, 0, 0]]]),
            "a list of lists, as memory timelines of torch.profiler are",
        ),
        (json!([]), "an empty list"),
        (json!([1, 2, 3]), "a list that begins with 1"),
        (json!(["a"]), "a list that begins with `a`"),
        (json!([null]), "a list that begins with null"),
        (json!([{}]), "a list of dictionaries without keys"),
        (
            json!([{"name": "loss", "value": 0.5}]),
            "a list of dictionaries with the keys `name`, `value`",
        ),
        (json!({}), "a dictionary without keys"),
        (
            json!({"loss": [1, 2], "step": 3}),
            "a dictionary with the keys `loss`, `step`",
        ),
        (
            json!({"traceEvents": [], "schemaVersion": 1}),
            "a trace of torch.profiler",
        ),
        (
            json!({"segments": 5}),
            "a dictionary whose `segments` are 5",
        ),
        (
            json!({"segments": {}}),
            "a dictionary whose `segments` are a dictionary",
        ),
        (
            json!({"segments": [1]}),
            "a dictionary whose `segments` are a list that begins with 1",
        ),
        (
            json!({"text": "a", "segments": [{"id": 0, "start": 0.5}], "device_traces": []}),
            "a dictionary whose `segments` are dictionaries with the keys `id`, `start`",
        ),
    ];
    for (value, found) in others {
        let expected = format!("expected a memory snapshot, found {found}");
        for bytes in [
            value.to_string().into_bytes(),
            pickled(&value, 2, Width::Short),
            pickled(&value, 5, Width::Long),
        ] {
            assert_eq!(Snapshot::read(&bytes).unwrap_err().to_string(), expected);
        }
    }
    for value in [json!(7), json!("text"), json!(null), json!(0.5)] {
        assert!(
            Snapshot::read(&pickled(&value, 2, Width::Short)).is_err(),
            "{value}"
        );
    }
    for text in [
        "[1,]",
        "{\"segments\":[]}{}",
        "[1 2]",
        "{\"a\":1}\n{\"a\":2}\n",
        "[NaN]",
        "{'segments': []}",
    ] {
        let error = Snapshot::read(text.as_bytes()).unwrap_err().to_string();
        assert!(
            error.starts_with("invalid JSON: ") && error.contains(" at line "),
            "{error}"
        );
    }
}

/// Empty lists are what a program without memory has, but an empty list alone may be anything.
#[test]
fn an_empty_snapshot_is_valid() {
    for value in [
        json!({"segments": [], "device_traces": []}),
        json!({"segments": [], "device_traces": [[], []]}),
    ] {
        for bytes in [
            value.to_string().into_bytes(),
            pickled(&value, 4, Width::Short),
        ] {
            let snapshot = Snapshot::read(&bytes).unwrap();
            assert_eq!(rows(&snapshot, 0), "");
            assert_eq!(
                snapshot.gaps(0),
                ["GPU 0 has neither blocks nor a history in this snapshot"]
            );
        }
    }
    let none = read(&json!({"segments": []})).unwrap_err().to_string();
    assert_eq!(none, "`device_traces`: expected a list, found nothing");
}

#[test]
fn a_missing_or_late_history_is_reported() {
    let gaps = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut file = whole();
        change(at(&mut file, "device_traces[0]").as_array_mut().unwrap());
        read(&file).unwrap().gaps(0).join("; ")
    };
    assert_eq!(gaps(&|_| {}), "");
    let none = "the snapshot has no history of GPU 0, only what was live at its end: 1 block (1023.99 KiB); the peak is \
                unknown";
    assert_eq!(gaps(&|trace| trace.clear()), none);
    // Driver allocations and failed requests are not part of the history of blocks.
    assert_eq!(
        gaps(&|trace| trace.retain(|entry| entry["action"] == "oom")),
        none
    );
    assert_eq!(gaps(&|trace| trace.truncate(1)), none);
    let late = |older: &str| {
        format!(
            "the history of GPU 0 lacks the allocation of {older}: it begins late, or its beginning was overwritten; an \
             earlier peak is unknown"
        )
    };
    // The live block is older, or the one that the history frees.
    for (lost, size) in [(1, "1023.99 KiB"), (2, "1.00 MiB")] {
        assert_eq!(
            gaps(&|trace| drop(trace.remove(lost))),
            late(&format!("1 block ({size})"))
        );
    }
    assert!(gaps(&|trace| drop(trace.drain(..4))).contains("2 blocks (2.00 MiB)"));
    // All blocks are of the history, and the memory that they are in is older.
    let segments = gaps(&|trace| {
        trace.remove(0);
        trace.insert(0, entry("segment_map", BASE, MIB));
    });
    assert_eq!(segments, late("3.00 MiB of segments"));
    // Without any of these entries it was written by something that does not have them.
    assert_eq!(gaps(&|trace| drop(trace.remove(0))), "");
    let mut file = whole();
    *at(&mut file, "segments[0].total_size") = (5 * MIB).into();
    let gaps = read(&file).unwrap().gaps(0);
    assert!(
        gaps.iter()
            .any(|gap| gap.contains("have another size than all their blocks together")),
        "{gaps:?}"
    );
}

/// The requested bytes of a segment are those of all blocks that are in use.
#[test]
fn a_pending_block_counts_as_requested() {
    let blocks = json!([
        {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
        {"size": 4096, "requested_size": 4000, "state": "active_pending_free"},
        {"size": 2048, "requested_size": 2000, "state": "inactive"},
    ]);
    let snapshot = read(&json!([segment(0, blocks)])).unwrap();
    let json: Value = serde_json::from_str(&snapshot.to_json()).unwrap();
    let segment = &json["segments"][0];
    let sums = [
        "allocated_size",
        "active_size",
        "requested_size",
        "total_size",
    ];
    assert_eq!(
        sums.map(|key| segment[key].as_u64().unwrap()),
        [1024, 5120, 5000, 7168]
    );
}

/// A block at an address where another one waits for its completion: the completion that comes then is that of the new
/// block, whose free was lost.
#[test]
fn a_completion_belongs_to_the_last_block_at_its_address() {
    let trace = [
        entry("alloc", 512, 100),
        entry("free_requested", 512, 100),
        entry("alloc", 512, 200),
        entry("free_completed", 512, 200),
        entry("alloc", 512, 300),
    ];
    let snapshot = read(&json!({"segments": [], "device_traces": [trace]})).unwrap();
    assert_eq!(
        rows(&snapshot, 0),
        "a,0,100,0 f,0,0,0 a,1,200,0 f,1,0,0 a,2,300,0"
    );
}

/// A file of any length that is cut off anywhere is an error, and none of its values is taken for another.
#[test]
fn files_that_are_cut_off_are_refused() {
    let pickle = pickled(&whole(), 4, Width::Short);
    let json = whole().to_string().into_bytes();
    for whole in [pickle, json] {
        for end in 0..whole.len() {
            assert!(Snapshot::read(&whole[..end]).is_err(), "{end}");
        }
        assert!(Snapshot::read(&whole).is_ok());
    }
    let short = Snapshot::read(b"{\"segments\": [").unwrap_err();
    assert_eq!(short, SnapshotError::Short { at: 14 });
}
