//! Recordings: how they begin and end, and what allocators write at their start.

use crate::allocator::cache::lives::clear_waiting_taps;
use crate::allocator::inspect::recording::record_state;
use crate::allocator::recording::unnumbered_handle;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::allocator::cache::grant::Grant;

use crate::allocator::config::Limit;
use crate::allocator::engine::Engine;
use crate::driver::process;
use crate::environment;
use crate::error::Error;
use crate::event::file::Start;
use crate::event::mapped::Mapped;
use crate::event::record::has_number;
use crate::event::sample;
use crate::event::session::{self, Session};
use crate::event::sink::Sink;
use crate::event::{Event, Kind};
use crate::locks::held::Mutex;

/// The environment variable that starts a recording of the program.
pub(crate) const RECORD_VARIABLE: &str = "CUALLOC_RECORD";

/// Capacity of a ring in records, in memory and in a file.
const RING: usize = 1 << 15;
const FILE_RING: usize = 1 << 14;

/// Allocators of the process that may be open.
static ENGINES: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

/// The recording started by the environment variable: it runs until the process ends.
static BEGUN: Mutex<Option<Running>> = Mutex::new(None);

/// Destination of a recording.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target<'a> {
    /// To rings in memory.
    Memory,
    /// To a file, written by a thread.
    File(&'a Path),
    /// To rings in a file that is mapped into memory.
    Mapped(&'a Path),
}

/// A recording in progress. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub session: Arc<Session>,
    sink: Option<Sink>,
}

/// Why a recording could not begin.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Another recording is in progress.
    Busy,
    Io(std::io::Error),
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Refusal {
        Refusal::Io(error)
    }
}

impl Running {
    /// Begins a recording of all allocators of the process, with about one stack per `sampling` requested bytes, or
    /// none if it is 0.
    pub(crate) fn begin(target: Target<'_>, sampling: u64) -> Result<Running, Refusal> {
        if Session::is_there() {
            return Err(Refusal::Busy);
        }
        let start = Start::now(sampling);
        let (capacity, mapped) = match target {
            Target::Mapped(path) => (FILE_RING, Some(Mapped::create(path, FILE_RING, &start)?)),
            _ => (RING, None),
        };
        let session = Session::begin(capacity, start, mapped);
        let session = session.ok_or(Refusal::Busy)?;
        // If the file cannot be opened, dropping this value ends the session.
        let mut running = Running {
            session,
            sink: None,
        };
        if let Target::File(path) = target {
            running.sink = Some(Sink::start(&running.session, path)?);
        }
        running.session.write_names();
        process::begin_recording(start.sampling > 0);
        sample::set_mean(start.sampling);
        for engine in engines() {
            if let Some(mut heap) = engine.readable() {
                record_state(&mut heap, start.ticks, engine.total_memory);
            }
        }
        Ok(running)
    }

    /// Ends the recording. Returns the number of records written to its file, if it has one, and the number lost
    /// before. A forked child has no recording to end.
    pub(crate) fn finish(mut self) -> std::io::Result<(u64, u64)> {
        if self.session.is_of_parent() {
            return Ok((0, 0));
        }
        self.stop();
        match self.sink.take() {
            Some(sink) => sink.finish(),
            None => Ok((0, 0)),
        }
    }

    fn stop(&self) {
        sample::set_mean(0);
        process::end_recording();
        self.session.end();
        // Rings live as long as any thread may write to them.
        session::clear();
        clear_waiting_taps();
        for engine in engines() {
            if let Some(heap) = engine.readable() {
                heap.caches.clear_taps();
            }
        }
        self.session.leave();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.session.is_of_parent() && self.session.is_current() {
            self.stop();
        }
    }
}

/// Returns the open allocators.
fn engines() -> Vec<Arc<Engine>> {
    let engines = ENGINES.lock();
    engines.iter().filter_map(Weak::upgrade).collect()
}

/// Called when a call of the program has its block and holds no lock, because it may record the stack.
#[inline(always)]
pub(crate) fn sample(engine: &Engine, made: &Result<Grant, Error>, bytes: usize) {
    if sample::is_on()
        && let Ok(grant) = made
    {
        let bytes = bytes as u64;
        sample::allocated(bytes, || sampled(engine, grant, bytes));
    }
}

/// Returns the record of a block's stack, with the handle of a stream that has no number in records.
fn sampled(engine: &Engine, grant: &Grant, bytes: u64) -> (Event, Option<u64>) {
    let stream = match grant.place.record() {
        Some(id) => engine.lock().extents.records[id].stream,
        None => grant.place.home().lock().slot,
    };
    let handle = match has_number(stream) {
        true => None,
        false => unnumbered_handle(&engine.lock().streams, stream),
    };
    let event = Event {
        kind: Kind::Sample,
        at: grant.ptr(),
        bytes,
        stream,
        allocator: engine.id,
    };
    (event, handle)
}

/// Registers an allocator with recordings that begin later, and reports it to one in progress.
pub(crate) fn enrol(engine: &Arc<Engine>) {
    if process::is_forked_child() {
        return;
    }
    {
        let mut engines = ENGINES.lock();
        engines.retain(|engine| engine.strong_count() > 0);
        engines.push(Arc::downgrade(engine));
    }
    if process::is_recording() {
        let ticks = crate::event::clock::ticks();
        record_state(&mut engine.lock(), ticks, engine.total_memory);
    }
}

/// Begins the recording that the environment requests, when the first allocator is created.
pub(crate) fn begin_by_environment() {
    // Not a `Once`: the logger that receives the message about the recording may create an allocator too.
    static DONE: AtomicBool = AtomicBool::new(false);
    // Two processes cannot write one file, and the parent has already begun.
    if process::is_forked_child() || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let Some(value) = environment::variable(RECORD_VARIABLE).filter(|value| !value.is_empty())
    else {
        return;
    };
    let Some(text) = value.to_str() else {
        return log::warn!("{RECORD_VARIABLE} is not Unicode: nothing is recorded");
    };
    let text = text.replace("%p", &std::process::id().to_string());
    let Some((sampling, place)) = stacks(&text) else {
        return log::warn!(
            "{RECORD_VARIABLE}={text}: no size after `stacks:`; nothing is recorded"
        );
    };
    let (path, mapped) = match place.strip_prefix("ring:") {
        Some(path) => (PathBuf::from(path), true),
        None => (PathBuf::from(place), false),
    };
    let target = match mapped {
        true => Target::Mapped(&path),
        false => Target::File(&path),
    };
    match Running::begin(target, sampling) {
        Ok(running) => {
            log::info!("recording to {}", path.display());
            *BEGUN.lock() = Some(running);
            process::at_exit(write_last);
        }
        Err(Refusal::Busy) => {}
        Err(Refusal::Io(error)) => {
            log::warn!("cannot record to {}: {error}", path.display());
        }
    }
}

/// Parses the bytes between two sampled stacks, and the destination: `stacks:512K:run.rec`, or without the first part.
/// `None` if the size is missing.
fn stacks(text: &str) -> Option<(u64, &str)> {
    let Some(rest) = text.strip_prefix("stacks:") else {
        return Some((0, text));
    };
    let (size, place) = rest.split_once(':')?;
    match size.parse() {
        Ok(Limit::Bytes(bytes)) if !place.is_empty() => Some((bytes, place)),
        _ => None,
    }
}

/// Writes the rest of the recording that the environment requested.
extern "C" fn write_last() {
    // The lock may be held by a thread that the exit has stopped, or that a forked child lacks.
    if let Some(begun) = BEGUN.try_lock()
        && let Some(sink) = begun.as_ref().and_then(|running| running.sink.as_ref())
    {
        sink.write_last();
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
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
    fn a_variable_says_how_often_stacks_are_taken() {
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
        who_is_refused_has_replaced_no_file();
    }

    /// Streams whose slots have more than 16 bits. The test has its own process, because a recording covers the whole
    /// process.
    #[test]
    fn streams_without_a_number_are_told_apart() {
        const ALONE: &str = "TEST_IS_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = concat!(module_path!(), "::streams_without_a_number_are_told_apart");
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
            // These slots stand for streams with numbers, and none is used again.
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
    fn who_is_refused_has_replaced_no_file() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("refused-{}.rec", std::process::id()));
        let running = Running::begin(Target::Mapped(&path), 0).unwrap();
        let file = || std::fs::metadata(&path).unwrap().ino();
        let before = file();
        // The state that `stop` has reached when another thread begins.
        running.session.end();
        let refused = Running::begin(Target::Mapped(&path), 0);
        assert!(matches!(refused, Err(Refusal::Busy)));
        let after = file();
        running.stop();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(before, after, "the file of the recording that ends");
    }
}
