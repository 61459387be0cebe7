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
        if Session::is_active() {
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
pub(crate) fn register(engine: &Arc<Engine>) {
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
        return log::warn!("cannot record: {RECORD_VARIABLE} is not Unicode");
    };
    let text = text.replace("%p", &std::process::id().to_string());
    let Some((sampling, place)) = stacks(&text) else {
        return log::warn!(
            "cannot record: expected a size after `stacks:` in {RECORD_VARIABLE}={text}"
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
mod tests;
