//! Files of strangers: whatever they hold, a reader says what is wrong or gives something that makes sense.
//!
//! The loops are short; `fuzz/` has the long form.

use crate::common::rng::Rng;
use crate::scene::{MIB, Scene, alone, memory};
use cualloc::allocator::Config;
use cualloc::record::{Profile, ReadError, Recording, Snapshot};
use cualloc::trace::Trace;

/// Changes some bytes of a good file: one after another, a cut, a doubled part, or interesting numbers.
fn spoilt(good: &[u8], draw: &mut Rng) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..1 + draw.index(4) {
        let at = draw.index(bytes.len());
        match draw.index(6) {
            0 => bytes.truncate(at),
            1 => {
                let part = bytes[at..(at + draw.index(64)).min(bytes.len())].to_vec();
                let to = draw.index(bytes.len());
                bytes.splice(to..to, part);
            }
            2 => {
                let value = [0, 1, 0x7f, 0xff, u64::MAX, 1 << 63][draw.index(6)].to_le_bytes();
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&value[..end - at]);
            }
            _ if at < bytes.len() => bytes[at] = draw.index(256) as u8,
            _ => {}
        }
    }
    bytes
}

/// The file of a recording that was written while a block was live.
fn good() -> Vec<u8> {
    let scene = Scene::new("");
    let stream = scene.stream();
    let recorder = memory();
    let kept = scene.block(3 * MIB, &stream);
    for bytes in [512, 70_000, 5 * MIB] {
        drop(scene.block(bytes, &stream));
    }
    let mut bytes = Vec::new();
    recorder.write(&mut bytes).unwrap();
    drop(kept);
    bytes
}

/// Everything that can be made of a recording is made.
fn use_up(recording: &Recording) {
    if let Ok(trace) = recording.to_trace("spoilt", None) {
        assert!(trace.rows().len() <= 2 * recording.events().len());
    }
    let snapshot = Snapshot::of(recording);
    let again = Snapshot::read(&snapshot.to_pickle()).unwrap();
    assert_eq!(again.devices(), snapshot.devices());
    assert!(snapshot.to_json().starts_with('{'));
    let profile = Profile::of(recording);
    assert!(!profile.to_pprof().is_empty());
    assert_eq!(
        profile.to_collapsed().lines().count(),
        profile.shares().filter(|s| s.1.live_bytes > 0).count()
    );
}

#[test]
fn damaged_recordings_are_refused_or_consistent() {
    let _alone = alone();
    let good = good();
    use_up(&Recording::read(&good).unwrap());
    let mut draw = Rng::new(1);
    let mut read = 0;
    for _ in 0..2000 {
        let bytes = spoilt(&good, &mut draw);
        if let Ok(recording) = Recording::read(&bytes) {
            read += 1;
            use_up(&recording);
        }
    }
    assert!(read > 0);
}

#[test]
fn a_recording_is_read_to_its_end_or_to_the_given_limit() {
    let _alone = alone();
    let good = good();
    let whole = Recording::read(&good).unwrap();
    assert!(whole.is_complete());
    let mut most = 0;
    for end in 64..good.len() {
        let part = Recording::read(&good[..end]).unwrap();
        assert!(part.events().len() >= most);
        most = part.events().len();
        assert!(!part.is_complete());
    }
    assert_eq!(most, whole.events().len());
    assert_eq!(
        Recording::read_at_most(&good, 2),
        Err(ReadError::TooManyEvents { limit: 2 })
    );
    assert_eq!(
        Recording::read(b"op,id,bytes,stream\n"),
        Err(ReadError::NotARecording)
    );
    let mut newer = good.clone();
    newer[8] = 3;
    assert_eq!(
        Recording::read(&newer),
        Err(ReadError::Version { found: 3 })
    );
}

/// A recording has streams without a number in its records as often as their handles are told, also more than 16 bits can
/// number.
#[test]
fn every_stream_of_a_recording_appears_in_its_trace() {
    const STREAMS: u64 = (1 << 16) + 2;
    let (unnumbered, allocator) = (0xffff_u64 << 16, 3_u64 << 32);
    let records = (0..STREAMS).flat_map(|number| {
        let stream = [number, 8, 4096 + number, unnumbered | allocator];
        [
            stream,
            [number, 512 * (number + 1) + 1, 512, unnumbered | allocator],
        ]
    });
    let bytes = crate::recorded::recording(0, &[], records);
    let recording = Recording::read(&bytes).unwrap();
    assert_eq!(recording.streams().len() as u64, STREAMS);
    for (number, event) in (0..).zip(recording.events()) {
        let stream = recording.streams()[event.stream as usize];
        assert_eq!((stream.allocator, stream.handle), (3, 4096 + number));
    }
    let trace = recording.to_trace("many", None).unwrap();
    assert_eq!(trace.streams().len() as u64, STREAMS);
}

#[test]
fn damaged_snapshots_are_refused_or_consistent() {
    let _alone = alone();
    let good = Snapshot::of(&Recording::read(&good()).unwrap());
    let (pickle, json) = (good.to_pickle(), good.to_json());
    for (good, seed) in [(&pickle[..], 2), (json.as_bytes(), 4)] {
        let mut draw = Rng::new(seed);
        let mut read = 0;
        for _ in 0..4000 {
            if let Ok(snapshot) = Snapshot::read(&spoilt(good, &mut draw)) {
                read += 1;
                for device in 0..snapshot.devices() {
                    let trace = snapshot.to_trace("spoilt", device);
                    assert!(trace.is_err() || trace.unwrap().name() == "spoilt");
                }
            }
        }
        assert!(read > 0);
    }
}

#[test]
fn hostile_pickles_take_no_more_than_their_bytes() {
    // Lists within lists, each twice in the next: 2^60 values, if they were copied.
    let mut bytes = vec![0x80, 2, b']', b'q', 0];
    for level in 0..60u8 {
        bytes.extend([b'h', level, b'h', level, 0x86, b'q', level + 1]);
    }
    bytes.push(b'.');
    let refused = Snapshot::read(&bytes).unwrap_err().to_string();
    assert_eq!(
        refused,
        "expected a memory snapshot, found a list of lists, as memory timelines of torch.profiler are"
    );
    let deep = [vec![0x80, 2, b']'], vec![0x85; 100], vec![b'.']].concat();
    assert!(
        Snapshot::read(&deep)
            .unwrap_err()
            .to_string()
            .contains("too deep")
    );
    let long = [0x80, 2, 0x8d, 255, 255, 255, 255, 255, 255, 255, 127, b'.'];
    assert!(
        Snapshot::read(&long)
            .unwrap_err()
            .to_string()
            .contains("cut off")
    );
    // A list that holds itself.
    let circle = [0x80, 2, b'}', b'(', b'X', 8, 0, 0, 0];
    let circle = [
        &circle[..],
        b"segments",
        &[b']', b'q', 0, b'h', 0, b'a', b'u', b'.'],
    ]
    .concat();
    let refused = Snapshot::read(&circle).unwrap_err().to_string();
    assert!(
        refused.contains("`segments` are a list of lists"),
        "{refused}"
    );
}

#[test]
fn a_pickle_that_shares_its_values_is_refused() {
    const TIMES: usize = 1000;
    let text = |text: &str| [&[b'X', text.len() as u8, 0, 0, 0], text.as_bytes()].concat();
    let number = |number: u8| vec![b'K', number];
    // A list that contains one value a number of times, by its memo index.
    let list = |value: Vec<u8>, place: u8| {
        let again = [b'h', place].repeat(TIMES - 1);
        [&b"]("[..], &value, &[b'q', place], &again, b"e"].concat()
    };
    let dict = |entries: Vec<Vec<u8>>| [&b"}("[..], &entries.concat(), b"u"].concat();
    let whole = |entries| [&[0x80, 2][..], &dict(entries), b"."].concat();
    let sized = [text("size"), number(1)].concat();
    let stream = [text("stream"), number(0)].concat();
    let block = dict(vec![sized.clone(), text("state"), text("inactive")]);
    let segment = dict(vec![
        stream.clone(),
        [text("address"), number(1), text("device"), number(0)].concat(),
        [
            text("total_size"),
            number(1),
            text("segment_type"),
            text("small"),
        ]
        .concat(),
        [text("blocks"), list(block, 0)].concat(),
    ]);
    let alloc = [text("action"), text("alloc"), text("addr"), number(1)].concat();
    let trace = list(dict(vec![alloc, sized, stream]), 0);
    let none = vec![b']'];
    for bytes in [
        whole(vec![text("segments"), list(segment, 1)]),
        whole(vec![
            text("segments"),
            none,
            text("device_traces"),
            list(trace, 1),
        ]),
    ] {
        let error = Snapshot::read(&bytes).unwrap_err().to_string();
        assert!(error.contains("uses the same values many times"), "{error}");
    }
}

#[test]
fn a_stack_of_many_long_frames_is_a_short_name() {
    let frame = format!(
        r#"{{"filename":"{0}/{0}.py","line":1,"name":"{0}"}}"#,
        "x".repeat(9000)
    );
    let frames = [frame.as_str(); 40].join(",");
    let json = format!(
        r#"{{"segments":[],"device_traces":[[{{"action":"alloc","addr":512,"size":1,"stream":0,"frames":[{frames}]}}]]}}"#
    );
    let trace = Snapshot::read(json.as_bytes()).unwrap();
    let trace = trace.to_trace("long", 0).unwrap();
    let name = &trace.contexts()[trace.context_of(0).unwrap()];
    assert_eq!(name.matches(';').count(), 31);
    assert!(name.len() < 32 * 410, "{}", name.len());
}

#[test]
fn damaged_traces_and_settings_are_refused_or_consistent() {
    let trace = "op,id,bytes,stream\na,0,512,0\na,1,18446744073709551615,3\nf,0,0,0\nc,0,0,0\n";
    let settings = "policy=packed,limit=90%,tune.views=on,tune.handle=8MiB,captures=never,decay=10s,keep=20%,\
                    debug=guard+quarantine:64MiB+poison+leaks,tune.nvtx=off";
    assert!(settings.parse::<Config>().unwrap().validate().is_ok());
    let (mut draw, mut read) = (Rng::new(3), 0);
    for _ in 0..4000 {
        let bytes = spoilt(trace.as_bytes(), &mut draw);
        if let Ok(trace) = Trace::read("spoilt", &bytes[..]) {
            read += 1;
            let mut text = Vec::new();
            trace.write(&mut text).unwrap();
            assert_eq!(
                Trace::read("again", &text[..]).unwrap().rows(),
                trace.rows()
            );
        }
        let bytes = spoilt(settings.as_bytes(), &mut draw);
        if let Ok(config) = String::from_utf8_lossy(&bytes).parse::<Config>() {
            read += 1;
            let _ = config.validate();
        }
    }
    assert!(read > 0);
}
