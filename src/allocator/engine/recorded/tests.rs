use super::{Refusal, Running, Target, stacks};
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::allocator::{Allocator, Config};
use crate::event::record::UNNUMBERED;
use crate::event::sample;
use crate::event::session::Progress;
use crate::event::sink::Chunks;
use crate::record::{self, Action, Recording};
use crate::sim::{SimConfig, Simulator};

#[test]
fn a_variable_sets_how_often_stacks_are_sampled() {
    assert_eq!(stacks("run.rec"), Some((0, "run.rec")));
    assert_eq!(stacks("stacks:512K:ring:a"), Some((512 << 10, "ring:a")));
    for bad in [
        "stacks:512K",
        "stacks:512K:",
        "stacks:50%:a",
        "stacks:x:a",
        "stacks:0:a",
    ] {
        assert_eq!(stacks(bad), None, "{bad}");
    }
}

#[test]
fn rings_end_with_their_recording() {
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let context = simulator.driver().unwrap().context(0).unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    let running = Running::begin(Target::Memory, 0).unwrap();
    let stream = allocator.create_stream().unwrap();
    let left = allocator.create_stream().unwrap();
    for stream in [&stream, &left] {
        drop(allocator.allocate(1000, stream).unwrap());
        drop(allocator.allocate(3 << 20, stream).unwrap());
    }
    // Its stream cache and ring become available to another stream.
    allocator.retire(&left).unwrap();
    let rings = running.session.weak_rings();
    assert!(rings.len() >= 4, "two stream caches, and two shared ones");
    drop(running);
    assert!(rings.iter().all(|ring| ring.upgrade().is_none()));
    drop(allocator.allocate(1000, &stream).unwrap());

    // While rings of a finished recording may exist, no other test begins a recording or creates one.
    let running = Running::begin(Target::Memory, 0).unwrap();
    drop(allocator.allocate(1000, &stream).unwrap());
    let rings = running.session.weak_rings().len();
    running.session.end();
    assert!(matches!(
        Running::begin(Target::Memory, 0),
        Err(Refusal::Busy)
    ));
    let other = allocator.create_stream().unwrap();
    drop(allocator.allocate(1000, &other).unwrap());
    assert_eq!(running.session.weak_rings().len(), rings);
    running.stop();
    drop(Running::begin(Target::Memory, 0).unwrap());
    #[cfg(target_os = "linux")]
    a_refused_recording_replaces_no_file();
}

/// Streams whose slots have more than 16 bits. The test has its own process, because a recording covers the whole
/// process.
#[test]
fn streams_without_a_number_are_distinguished() {
    const ALONE: &str = "TEST_IS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = concat!(
            module_path!(),
            "::streams_without_a_number_are_distinguished"
        );
        let (_, name) = name.split_once("::").unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let ended = command.args(["--exact", name]).env(ALONE, "1").output();
        let ended = ended.unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        let ran = said.contains("1 passed");
        return assert!(ended.status.success() && ran, "{said}");
    }
    let simulator = Simulator::new(SimConfig::default()).unwrap();
    let context = simulator.driver().unwrap().context(0).unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    {
        // These slots use up the numbers of streams in records. No stream uses one of them later.
        let mut heap = allocator.engine().lock();
        let kept = Holder::Kept(crate::driver::Stream::legacy(&context));
        let (first, most) = (heap.streams.slots().end, u32::from(UNNUMBERED));
        for number in first..most {
            let key = StreamKey::Id(u64::MAX - u64::from(number));
            heap.streams.add(key, 0, context.clone(), kept.clone());
        }
    }
    let [beside, streams @ ..] = [(); 4].map(|()| allocator.create_stream().unwrap());
    let held = allocator.allocate(1000, &streams[1]).unwrap();
    // The context of a sample is recorded between its block and the sample, while other streams are recorded as
    // well.
    let (other, of_others) = (allocator.clone(), beside.raw() as u64);
    let source = move || other.allocate(512, &beside).map_or(0, |_| 1);
    sample::set_source(Some(std::sync::Arc::new(source)));
    let running = Running::begin(Target::Memory, 1).unwrap();
    let mut blocks = Vec::new();
    // A page, a large-block cache and the heap each write the record of their own blocks.
    for bytes in [60_000, 60_000, 3 << 20, 3 << 20] {
        let made = streams.iter().map(|s| allocator.allocate(bytes, s));
        let made: Vec<_> = made.map(Result::unwrap).collect();
        blocks.extend(streams.iter().zip(&made).map(|(s, b)| (b.ptr(), s.raw())));
        drop(made);
    }
    held.record_stream(&streams[2]).unwrap();
    assert!(allocator.allocate(1 << 40, &streams[1]).is_err());
    let mut bytes = Vec::new();
    let mut chunks = Chunks::begin(&running.session, &mut bytes).unwrap();
    let batches = running.session.read(&mut Progress::default());
    chunks.write(&batches).unwrap();
    chunks.end().unwrap();
    drop(running);
    sample::set_source(None);
    let recording = Recording::read(&bytes).unwrap();
    assert_eq!(recording.lost(), 0);
    let of = |event: &record::Event| recording.streams()[event.stream as usize].handle;
    for action in [Action::Allocate, Action::Sample, Action::Free] {
        let told = recording.events().iter().filter(|e| e.action == action);
        let told = told.map(|event| (event.address, of(event)));
        let told: Vec<_> = told.filter(|(_, stream)| *stream != of_others).collect();
        let made = blocks.iter();
        let made: Vec<_> = made.map(|(at, stream)| (*at, *stream as u64)).collect();
        assert_eq!(told, made, "{action:?}");
    }
    let first = |action| {
        let mut events = recording.events().iter();
        of(events.find(|event| event.action == action).unwrap())
    };
    assert_eq!(first(Action::Held), streams[1].raw() as u64);
    assert_eq!(first(Action::Use), streams[2].raw() as u64);
    let mut refused = recording.events().iter();
    let refused = refused.find(|e| matches!(e.action, Action::OutOfMemory { .. }));
    assert_eq!(of(refused.unwrap()), streams[1].raw() as u64);
    assert!(recording.failed_requests(None)[0].cause.is_some());
    // Dropping them would search all streams for each one.
    std::mem::forget((streams, held, allocator, simulator));
}

/// While a recording ends on another thread, beginning another one is refused and leaves its file untouched. This
/// is no separate test, because a process has only one recording.
#[cfg(target_os = "linux")]
fn a_refused_recording_replaces_no_file() {
    use std::os::unix::fs::MetadataExt;
    let path = std::env::temp_dir().join(format!("refused-{}.rec", std::process::id()));
    let running = Running::begin(Target::Mapped(&path), 0).unwrap();
    let file = || std::fs::metadata(&path).unwrap().ino();
    let before = file();
    // `stop` has come this far when another thread begins a recording.
    running.session.end();
    let refused = Running::begin(Target::Mapped(&path), 0);
    assert!(matches!(refused, Err(Refusal::Busy)));
    let after = file();
    running.stop();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(before, after, "the file of the recording that ends");
}
