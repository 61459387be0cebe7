//! The formats of recordings: PyTorch's snapshots, profiles, metrics, and tables for people.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::Folder;
use crate::scene::{MIB, Scene, alone, memory, rows, scene};
use cualloc::allocator::Block;
use cualloc::record::{self, Context, Profile, Recording, Snapshot};
use cualloc::trace::Trace;

/// A program of two streams with contexts, growth, shrinking and blocks that are left. Its recording, and the requested
/// bytes that are live at its end and at its peak.
fn program(settings: &str) -> (Recording, u64, u64) {
    let scene = Scene::new(settings);
    let (allocator, streams) = (&scene.allocator, [scene.stream(), scene.stream()]);
    let recorder = memory();
    let live = |kept: &[Block]| kept.iter().map(|block| block.requested() as u64).sum();
    let (mut kept, mut peak) = (Vec::new(), 0);
    for round in 0..60usize {
        let context = Context::new(["train;forward", "train;backward", "data"][round % 3]);
        context.enter();
        let stream = &streams[round % 2];
        let bytes = [700, 5 * MIB + 3, 40_000, 3 * MIB][round % 4];
        let block = allocator.allocate(bytes, stream).unwrap();
        if round % 5 == 0 {
            block.record_stream(&streams[1 - round % 2]).unwrap();
        }
        kept.push(block);
        peak = peak.max(live(&kept));
        if round % 3 != 0 {
            kept.pop();
        }
        if round % 20 == 19 {
            kept.truncate(kept.len() / 2);
            allocator.synchronize().unwrap();
            allocator.trim(0).unwrap();
        }
    }
    Context::NONE.enter();
    let recording = recorder.read().unwrap();
    assert_eq!(recording.lost(), 0);
    (recording, live(&kept), peak)
}

/// Checks a snapshot as the viewer needs it, and prints what the test asks for. Reads pickle or JSON.
const CHECKER: &str = r#"
import json, pickle, sys
raw = open(sys.argv[1], 'rb').read()
snapshot = json.loads(raw) if raw[:1] == b'{' else pickle.loads(raw)
segments, traces = snapshot['segments'], snapshot['device_traces']
assert isinstance(snapshot['allocator_settings'], dict)
order = [(s['device'], s['address']) for s in segments]
assert order == sorted(order)
final, end = {}, {}
for segment in segments:
    assert segment['device'] < len(traces), 'V1'
    at = segment['address']
    assert at >= end.get(segment['device'], 0)
    for block in segment['blocks']:
        assert block['address'] == at and block['size'] > 0, 'V6'
        at += block['size']
        if block['state'] == 'active_allocated':
            final[segment['device'], block['address']] = block['requested_size']
    assert at == segment['address'] + segment['total_size'], 'V6'
    end[segment['device']] = at
    live = [b for b in segment['blocks'] if b['state'] == 'active_allocated']
    active = [b for b in segment['blocks'] if b['state'] != 'inactive']
    assert segment['allocated_size'] == sum(b['size'] for b in live), 'V7'
    assert segment['active_size'] == sum(b['size'] for b in active), 'V7'
    assert segment['allocated_size'] <= segment['active_size'] <= segment['total_size'], 'V7'
    assert segment['requested_size'] == sum(b['requested_size'] for b in active), 'V7'
    assert tuple(segment['segment_pool_id']) == (0, 0), 'V10'
def small(value):
    if isinstance(value, bool): return
    if isinstance(value, int): assert 0 <= value < 2**53, 'V12'
    elif isinstance(value, dict): [small(v) for v in value.values()]
    elif isinstance(value, (list, tuple)): [small(v) for v in value]
small(snapshot)
for device, trace in enumerate(traces):
    live, time, mapped = {a: n for (d, a), n in final.items() if d == device}, None, {}
    for index in reversed(range(len(trace))):
        entry = trace[index]
        assert time is None or entry['time_us'] <= time
        time, action = entry['time_us'], entry['action']
        if action == 'alloc':
            assert live.pop(entry['addr']) == entry['size'], 'V4'
        elif action == 'free_completed':
            before = trace[index - 1]
            assert before['action'] == 'free_requested' and before['addr'] == entry['addr'], 'V8'
            assert entry['addr'] not in live, 'V4'
            live[entry['addr']] = entry['size']
    assert not live, 'V3, V11'
    for entry in trace:
        action = entry['action']
        if action in ('segment_map', 'segment_alloc'):
            mapped[entry['addr']] = entry['size']
        elif action in ('segment_unmap', 'segment_free'):
            assert mapped.pop(entry['addr']) == entry['size'], 'V5'
        elif action == 'alloc':
            at, stop = entry['addr'], entry['addr'] + entry['size']
            while at < stop:
                base = max((b for b in mapped if b <= at), default=None)
                assert base is not None and base + mapped[base] > at, 'V2'
                at = base + mapped[base]
    held = sum(s['total_size'] for s in segments if s['device'] == device)
    assert held == sum(mapped.values()), 'V5, V13'
frames = sorted({';'.join(f['name'] for f in e['frames']) for t in traces for e in t})
print(sum(final.values()), sum(len(t) for t in traces), '|'.join(frames))
"#;

/// What a script of Python says; none, with a word about it, where it or what it imports (exit code 77) is not
/// installed.
fn python(script: &str, arguments: &[&Path], input: &str) -> Option<String> {
    let mut python = Command::new("python3");
    python.args(["-c", script]).args(arguments);
    python.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = match python.stderr(Stdio::piped()).spawn() {
        Ok(python) => python,
        Err(error) => {
            eprintln!("SKIPPED: no python3 ({error})");
            return None;
        }
    };
    // It may end before it has read everything.
    let _ = python.stdin.take().unwrap().write_all(input.as_bytes());
    let output = python.wait_with_output().unwrap();
    if output.status.code() == Some(77) {
        eprintln!("SKIPPED: what the script imports is not installed");
        return None;
    }
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// The checker's output for a file.
fn checked(folder: &Folder, name: &str, bytes: &[u8]) -> Option<String> {
    let file = folder.file(name);
    std::fs::write(&file, bytes).unwrap();
    python(CHECKER, &[&file], "")
}

#[test]
fn snapshots_keep_what_viewers_rely_on() {
    let _alone = alone();
    let folder = Folder::new("record-snapshot");
    for settings in ["policy=packed", "policy=classic"] {
        let (recording, live, _) = program(settings);
        let snapshot = Snapshot::of(&recording);
        let (pickle, json) = (snapshot.to_pickle(), snapshot.to_json());
        let Some(said) = checked(&folder, "snapshot.pickle", &pickle) else {
            return;
        };
        assert_eq!(
            checked(&folder, "snapshot.json", json.as_bytes()),
            Some(said.clone())
        );
        let mut words = said.split_whitespace();
        assert_eq!(words.next(), Some(live.to_string().as_str()));
        assert!(words.next().unwrap().parse::<usize>().unwrap() > 150);
        assert!(said.contains("|forward;train"), "{said}");
    }
}

#[test]
fn a_snapshot_read_back_is_the_program() {
    let _alone = alone();
    let (recording, ..) = program("policy=packed");
    let written = Snapshot::of(&recording);
    let ours = recording.to_trace("ours", None).unwrap();
    let sizes = |trace: &Trace| -> Vec<_> {
        let rows = trace.rows().iter();
        rows.map(|row| (row.op, row.id, row.bytes)).collect()
    };
    let contexts = |trace: &Trace| -> Vec<_> {
        let blocks = 0..trace.allocations().len();
        let of = |id| Some(trace.contexts()[trace.context_of(id)?].clone());
        blocks.map(of).collect()
    };
    assert!(contexts(&ours).contains(&Some("train;forward".to_owned())));
    let json = format!("\n {}\n", written.to_json());
    for bytes in [&written.to_pickle()[..], json.as_bytes()] {
        let read = Snapshot::read(bytes).unwrap();
        assert_eq!(read.devices(), 1);
        let theirs = read.to_trace("ours", 0).unwrap();
        assert_eq!(ours.requested_peak(), theirs.requested_peak());
        assert_eq!(sizes(&ours), sizes(&theirs));
        assert_eq!(contexts(&ours), contexts(&theirs));
    }
}

/// Files of PyTorch's forms, written by hand in Python: protocols 2, 4 and 5, JSON, a bare list of segments, a block
/// with a history, and a trace that begins in the middle with a completion that comes late.
const GOLDEN: &str = r#"
import json, pickle, sys
frames = [{'filename': '/x/a.py', 'line': 1, 'name': 'f'}, {'filename': '', 'line': 0, 'name': 'outer;most'}]
def entry(action, addr, size, stream=0):
    return {'action': action, 'addr': addr, 'size': size, 'stream': stream, 'frames': frames,
            'time_us': 2**40, 'ratio': 0.5, 'big': 2**70, 'none': None, 'flag': True}
trace = [entry('free_completed', 512, 10), entry('alloc', 1024, 100), entry('alloc', 2048, 300, 2**46),
         entry('free_requested', 1024, 100), entry('segment_map', 0, 2**21), entry('unheard_of', 1, 1),
         entry('free_completed', 1024, 100), entry('free_requested', 2048, 300), entry('alloc', 4096, 70),
         entry('free_completed', 2048, 300), {'action': 'oom', 'device_free': 7, 'size': 1, 'stream': 0}]
blocks = [{'size': 512, 'state': 'active_awaiting_free', 'history': [{'real_size': 500, 'frames': frames}]},
          {'size': 1024, 'state': 'inactive'}]
segments = [{'device': 0, 'address': 4096, 'total_size': 1536, 'stream': 0, 'segment_type': 'small', 'blocks': blocks}]
whole = {'segments': segments, 'device_traces': [trace, []], 'later': (1, 2, (3,), ())}
for protocol in (2, 4, 5):
    pickle.dump(whole, open(f'{sys.argv[1]}/{protocol}.pickle', 'wb'), protocol)
    json.dump(whole, open(f'{sys.argv[1]}/whole.json', 'w'), indent=protocol)
pickle.dump(segments, open(f'{sys.argv[1]}/bare.pickle', 'wb'), 2)
json.dump(segments, open(f'{sys.argv[1]}/bare.json', 'w'))
class Evil:
    def __reduce__(self): return (print, ('executed',))
pickle.dump({'segments': Evil()}, open(f'{sys.argv[1]}/evil.pickle', 'wb'), 2)
"#;

#[test]
fn pickles_of_other_programs_are_read_and_never_executed() {
    let folder = Folder::new("record-golden");
    if python(GOLDEN, &[folder.path()], "").is_none() {
        return;
    }
    let read = |name: &str| Snapshot::read(&std::fs::read(folder.file(name)).unwrap());
    // Block 0 was there before: its free alone is known. The completion of block 1 follows its free but for events
    // that are no rows.
    let expected =
        "a,0,10,0 f,0,0,0 a,1,100,0 a,2,300,1 f,1,0,0 f,2,0,1 a,3,70,0 c,2,0,1 oom,0,1,0";
    for name in ["2.pickle", "4.pickle", "5.pickle", "whole.json"] {
        let snapshot = read(name).unwrap();
        assert_eq!(snapshot.devices(), 2);
        let trace = snapshot.to_trace("golden", 0).unwrap();
        assert_eq!(trace.contexts(), ["outer,most;a.py:1:f"]);
        assert_eq!(trace.context_of(0), None, "the context is unknown");
        assert!((1..4).all(|id| trace.context_of(id) == Some(0)));
        assert_eq!(rows(&trace), expected, "{name}");
        assert_eq!(snapshot.to_trace("golden", 1).unwrap().rows(), []);
    }
    let bare = read("bare.pickle").unwrap();
    assert_eq!(bare.devices(), 1);
    assert_eq!(read("bare.json").unwrap(), bare);
    // Without a trace there is what was live when it was made.
    let trace = bare.to_trace("bare", 0).unwrap();
    assert_eq!(rows(&trace), "a,0,500,0");
    assert_eq!(trace.contexts(), ["outer,most;a.py:1:f"]);
    let refused = read("evil.pickle").unwrap_err().to_string();
    assert!(
        refused.contains("opcode 0x63") && refused.contains("not executed"),
        "{refused}"
    );
}

/// PyTorch's own reader over a file, alone: what it sums up. It is of its package, or of the file that
/// `CUALLOC_MEMORY_VIZ` names.
const MEMORY_VIZ: &str = r#"
import contextlib, importlib.util, io, os, pathlib, pickle, sys
path = os.environ.get('CUALLOC_MEMORY_VIZ')
if path is None:
    torch = importlib.util.find_spec('torch')
    if torch is None or torch.origin is None:
        sys.exit(77)
    path = pathlib.Path(torch.origin).parent / 'cuda' / '_memory_viz.py'
spec = importlib.util.spec_from_file_location('_memory_viz', path)
viz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(viz)
load = lambda: pickle.load(open(sys.argv[1], 'rb'))
data = load()
plain = lambda lines: lines
live = reserved = 0
for line in viz.memory(data, format_flamegraph=plain).splitlines():
    prefix, size = line.rsplit(' ', 1)
    reserved += int(size)
    live += int(size) if ';active_allocated;' in prefix and '<gaps>' not in prefix else 0
assert reserved == sum(s['total_size'] for s in data['segments'])
assert viz.segments(data, format_flamegraph=plain).count('seg_') >= len(data['segments'])
assert 'total_reserved' in viz.segsum(data)
assert 'B]' in viz.trace(data)
with contextlib.redirect_stdout(io.StringIO()) as said:
    viz.compare(data['segments'], data['segments'], format_flamegraph=plain)
assert said.getvalue() == 'only_before = []\nonly_after = []\n', said.getvalue()
for plot in (viz.trace_plot, viz.segment_plot):
    assert '"base64"' in plot(load())
with contextlib.redirect_stdout(io.StringIO()) as said:
    left = viz.filter_alloc_free_pairs(load())
assert not said.getvalue(), said.getvalue()
kept = sum(e['size'] for t in left['device_traces'] for e in t if e['action'] == 'alloc')
print(live, kept)
"#;

#[test]
fn pytorchs_own_reader_opens_a_snapshot() {
    let _alone = alone();
    let folder = Folder::new("record-viz");
    for settings in ["policy=packed", "policy=classic"] {
        let (recording, live, _) = program(settings);
        let file = folder.file("snapshot.pickle");
        std::fs::write(&file, Snapshot::of(&recording).to_pickle()).unwrap();
        let Some(said) = python(MEMORY_VIZ, &[&file], "") else {
            return;
        };
        assert_eq!(said, format!("{live} {live}\n"));
    }
}

/// The fields of a protocol buffer: number, value or bytes.
fn fields(bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    let mut at = 0;
    let varint = |at: &mut usize| {
        let (mut number, mut shift) = (0u64, 0);
        loop {
            let byte = bytes[*at];
            *at += 1;
            number |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return number;
            }
        }
    };
    let mut fields = Vec::new();
    while at < bytes.len() {
        let key = varint(&mut at);
        let value = varint(&mut at);
        match key & 7 {
            0 => fields.push((key >> 3, value, Vec::new())),
            2 => {
                let end = at + value as usize;
                fields.push((key >> 3, 0, bytes[at..end].to_vec()));
                at = end;
            }
            other => panic!("wire type {other}"),
        }
    }
    fields
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    // Packed numbers are values without keys: each gets one.
    let mut keyed = Vec::new();
    let mut begins = true;
    for byte in bytes {
        if begins {
            keyed.push(8);
        }
        keyed.push(*byte);
        begins = byte & 0x80 == 0;
    }
    fields(&keyed)
        .into_iter()
        .map(|(_, number, _)| number)
        .collect()
}

#[test]
fn a_profile_adds_up_to_what_is_live_at_the_peak() {
    let _alone = alone();
    let (recording, _, live) = program("policy=packed");
    let profile = Profile::of(&recording);
    let sum: u64 = profile.shares().map(|(_, share)| share.live_bytes).sum();
    assert_eq!(sum, live);
    let names: BTreeSet<&str> = profile.shares().map(|(name, _)| name).collect();
    assert!(
        names.contains("train;forward") && names.contains("data"),
        "{names:?}"
    );
    let mut collapsed = 0;
    for line in profile.to_collapsed().lines() {
        let (name, bytes) = line.rsplit_once(' ').unwrap();
        assert!(names.contains(name));
        collapsed += bytes.parse::<u64>().unwrap();
    }
    assert_eq!(collapsed, live);
    let fields = fields(&profile.to_pprof());
    let texts: Vec<String> = fields
        .iter()
        .filter(|(field, ..)| *field == 6)
        .map(|(.., text)| String::from_utf8(text.clone()).unwrap())
        .collect();
    assert_eq!(texts[0], "");
    let of = |wanted: u64| fields.iter().filter(move |(field, ..)| *field == wanted);
    let samples: Vec<Vec<(u64, u64, Vec<u8>)>> = of(2).map(|(.., m)| self::fields(m)).collect();
    let values = |sample: &[(u64, u64, Vec<u8>)]| numbers(&sample[1].2);
    let in_use: u64 = samples.iter().map(|sample| values(sample)[3]).sum();
    assert_eq!(in_use, live);
    // Every stack leads to names by locations and functions.
    let functions: BTreeMap<u64, &str> = of(5)
        .map(|(.., m)| {
            let parts = self::fields(m);
            (parts[0].1, texts[parts[1].1 as usize].as_str())
        })
        .collect();
    let stacks: BTreeSet<String> = samples
        .iter()
        .map(|sample| {
            let names = numbers(&sample[0].2)
                .into_iter()
                .rev()
                .map(|id| functions[&id]);
            names.collect::<Vec<_>>().join(";")
        })
        .collect();
    let stacks: BTreeSet<&str> = stacks.iter().map(String::as_str).collect();
    assert_eq!(stacks, names);
}

#[test]
fn metrics_are_the_figures_in_the_form_of_openmetrics() {
    let (_alone, scene, stream) = scene("limit=1GiB");
    let _kept = scene.block(3 * MIB, &stream);
    drop(scene.block(512, &stream));
    let text = record::metrics([&scene.allocator]);
    let stats = scene.allocator.stats();
    assert!(text.ends_with("# EOF\n"));
    let (mut sums, mut family) = (BTreeMap::<&str, f64>::new(), "");
    let mut seen = BTreeSet::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(told) = line.strip_prefix("# ") {
            let mut words = told.split(' ');
            let kind = words.next().unwrap();
            let name = words.next().unwrap();
            if kind == "TYPE" {
                assert!(seen.insert(name), "{name} comes twice");
                family = name;
            }
            assert_eq!(name, family, "{line}");
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap();
        let (labels, value) = rest.split_once("} ").unwrap();
        assert!(labels.starts_with("device=\"0\",allocator=\""), "{line}");
        let plain = name.strip_suffix("_total").unwrap_or(name);
        assert_eq!(plain, family, "{line}");
        *sums.entry(name).or_default() += value.parse::<f64>().unwrap();
    }
    let figures = [
        ("cualloc_allocated_bytes", stats.all.allocated.current),
        ("cualloc_reserved_bytes", stats.all.reserved.current),
        ("cualloc_limit_bytes", 1 << 30),
        ("cualloc_blocks", 1),
        ("cualloc_allocations_total", 2),
        ("cualloc_frees_total", 1),
        ("cualloc_out_of_memory_total", 0),
    ];
    for (name, figure) in figures {
        assert_eq!(sums.get(name), Some(&(figure as f64)), "{name}");
    }
    assert!(sums["cualloc_driver_calls_total"] > 0.0);
}

/// The figures of a text as the parser of Prometheus' own package has them: a line for each name and its sum.
const OPENMETRICS: &str = r#"
import sys
try:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed
except ImportError:
    sys.exit(77)
for family in parsed(sys.stdin.read()):
    assert family.type in ('gauge', 'counter') and family.documentation, family
    assert family.unit in ('', 'bytes') and family.samples, family
    sums = {}
    for sample in family.samples:
        assert sample.labels['device'] == '0' and 'allocator' in sample.labels, sample
        sums[sample.name] = sums.get(sample.name, 0) + sample.value
    for name, total in sums.items():
        print(name, int(total))
"#;

#[test]
fn metrics_are_parsed_by_prometheus_client() {
    let (_alone, scene, stream) = scene("limit=1GiB");
    let _kept = scene.block(3 * MIB, &stream);
    drop(scene.block(512, &stream));
    let text = record::metrics([&scene.allocator]);
    let Some(said) = python(OPENMETRICS, &[], &text) else {
        return;
    };
    let all = scene.allocator.stats().all;
    let figures = [
        ("cualloc_requested_bytes", all.requested.current),
        ("cualloc_allocated_bytes", all.allocated.current),
        ("cualloc_reserved_bytes", all.reserved.current),
        ("cualloc_limit_bytes", 1 << 30),
        ("cualloc_allocations_total", 2),
        ("cualloc_frees_total", 1),
    ];
    for (name, figure) in figures {
        let line = format!("{name} {figure}");
        assert!(said.lines().any(|said| said == line), "{line}\n{said}");
    }
}

#[test]
fn metrics_of_several_allocators_are_one_text() {
    let _alone = alone();
    let scenes = [Scene::new(""), Scene::new("policy=classic,limit=1GiB")];
    let stream = scenes[1].stream();
    let _kept = scenes[1].allocator.allocate(3 * MIB, &stream).unwrap();
    let text = record::metrics(scenes.iter().map(|scene| &scene.allocator));
    assert_eq!(text.matches("# EOF").count(), 1);
    let mut families = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        assert!(families.insert(line), "{line} comes twice");
    }
    let of = |name: &str, allocator: u64| {
        let start = format!("cualloc_{name}{{device=\"0\",allocator=\"{allocator}\"");
        let lines = text.lines().filter(|line| line.starts_with(&start));
        let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        values.collect::<Vec<f64>>()
    };
    let [first, second] = [&scenes[0], &scenes[1]].map(|scene| scene.allocator.id());
    assert_eq!(of("blocks", first).iter().sum::<f64>(), 0.0);
    assert_eq!(of("blocks", second).iter().sum::<f64>(), 1.0);
    assert!(of("limit_bytes", first).is_empty());
    assert_eq!(of("limit_bytes", second), [(1u64 << 30) as f64]);
    // The samples of a family stand together.
    let lines: Vec<&str> = text.lines().collect();
    let streams = lines
        .iter()
        .position(|line| line.starts_with("cualloc_streams{"));
    assert!(lines[streams.unwrap() + 1].starts_with("cualloc_streams{"));
    assert_eq!(record::metrics([]), "# EOF\n");
}

#[test]
fn a_long_context_costs_a_pickle_little_for_each_event() {
    let (_alone, scene, stream) = scene("policy=packed");
    let recorder = memory();
    let parts: Vec<String> = (0..100)
        .map(|part| format!("frame number {part:04}"))
        .collect();
    let before = Context::new(&parts.join(";")).enter();
    let one = |count: usize| {
        for _ in 0..count {
            drop(scene.block(1000, &stream));
        }
        let snapshot = Snapshot::of(&recorder.read().unwrap());
        (snapshot.to_pickle(), snapshot.to_json())
    };
    let (few, _) = one(10);
    let (many, json) = one(1000);
    before.enter();
    // Both events of a pair have a stack of a dozen frames, which JSON repeats for each.
    let each = (many.len() - few.len()) / 2000;
    assert!(each <= 130, "{each} bytes an event");
    // The innermost frames are kept, as far as 256 bytes go.
    assert!(json.contains("frame number 0099") && json.contains("frame number 0086"));
    assert!(!json.contains("frame number 0080"));
    assert!(Snapshot::read(&many).is_ok());
}

#[test]
fn the_summary_has_a_row_for_each_figure() {
    let (_alone, scene, stream) = scene("");
    let kept = scene.block(3 * MIB, &stream);
    let text = record::summary(0, &scene.allocator.stats());
    let row = |name: &str| {
        let found = text.lines().find(|line| line.starts_with(name));
        found
            .unwrap_or_else(|| panic!("no {name} in\n{text}"))
            .to_owned()
    };
    assert!(row("Allocated memory").contains("3.00 MiB"), "{text}");
    let blocks: Vec<String> = row("Blocks")
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    assert_eq!(blocks, ["Blocks", "1", "1", "1", "0"]);
    assert!(row("Limit").ends_with("none"));
    assert!(text.lines().all(|line| line.chars().count() <= 76));
    drop(kept);
}
