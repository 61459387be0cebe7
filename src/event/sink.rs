//! Writes a recording to a file: a separate thread reads the rings and writes chunks.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::event::file::{self, END, NAME, RECORDS};
use crate::event::names;
use crate::event::session::{Batch, Progress, Session};
use crate::locks::held::Mutex;

/// The longest time that records stay in their rings, unless one becomes half full earlier.
const INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Chunks<W> {
    writer: W,
    names: usize,
    /// Numbers of records written, and overwritten before.
    pub records: u64,
    pub lost: u64,
}

impl<W: Write> Chunks<W> {
    pub(crate) fn begin(session: &Session, mut writer: W) -> io::Result<Chunks<W>> {
        writer.write_all(&session.start.header(None))?;
        Ok(Chunks {
            writer,
            names: 0,
            records: 0,
            lost: 0,
        })
    }

    /// Writes new records, and the names that they may need.
    pub(crate) fn write(&mut self, batches: &[Batch]) -> io::Result<()> {
        for batch in batches {
            let mut bytes = Vec::with_capacity(8 + batch.records.len() * file::RECORD);
            bytes.extend_from_slice(&batch.lost.to_le_bytes());
            let words = batch.records.iter().flatten();
            bytes.extend(words.flat_map(|word| word.to_le_bytes()));
            let header = file::chunk(RECORDS, batch.ring, bytes.len());
            self.writer.write_all(&header)?;
            self.writer.write_all(&bytes)?;
            self.records += batch.records.len() as u64;
            self.lost += batch.lost;
        }
        for (number, name) in names::since(self.names) {
            let header = file::chunk(NAME, number, name.len());
            self.writer.write_all(&header)?;
            self.writer.write_all(name.as_bytes())?;
            self.names += 1;
        }
        Ok(())
    }

    /// Writes the mark of a properly stopped recording.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        self.writer.write_all(&file::chunk(END, 0, 0))?;
        self.writer.flush()
    }
}

#[derive(Debug)]
struct Inner {
    session: Arc<Session>,
    stop: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    chunks: Chunks<File>,
    progress: Progress,
    failure: Option<io::ErrorKind>,
    ended: bool,
}

impl Inner {
    fn write(&self, end: bool) {
        // A forked child shares the file, and must not write to it. A thread that does not exist there may hold the
        // lock.
        if self.session.is_of_parent() {
            return;
        }
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        let batches = self.session.read(&mut state.progress);
        if state.failure.is_some() {
            return;
        }
        let mut written = state.chunks.write(&batches);
        if end {
            written = written.and_then(|()| state.chunks.end());
            state.ended = true;
        }
        if let Err(error) = written {
            state.failure = Some(error.kind());
            // The program's logger may run arbitrary code, and even stop the recording.
            drop(state);
            log::warn!("cannot continue writing the recording: {error}");
        }
    }
}

/// The thread that writes a recording to its file.
#[derive(Debug)]
pub(crate) struct Sink {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

impl Sink {
    /// Starts writing a recording to a file.
    pub(crate) fn start(session: &Arc<Session>, path: &Path) -> io::Result<Sink> {
        let (file, beside) = file::create_beside(path)?;
        let begun = Chunks::begin(session, file);
        // The file has its final name from here on: if the process dies, what was written is kept.
        let chunks = begun.and_then(|chunks| file::replace(&beside, path).map(|()| chunks));
        let chunks = chunks.inspect_err(|_| {
            let _ = std::fs::remove_file(&beside);
        })?;
        let inner = Arc::new(Inner {
            session: Arc::clone(session),
            stop: AtomicBool::new(false),
            state: Mutex::new(State {
                chunks,
                progress: Progress::default(),
                failure: None,
                ended: false,
            }),
        });
        let writer = Arc::clone(&inner);
        let thread = thread::Builder::new()
            .name("cualloc-record".to_owned())
            .spawn(move || {
                while !writer.stop.load(Ordering::Acquire) {
                    thread::park_timeout(INTERVAL);
                    writer.write(false);
                }
            })?;
        session.set_reader(thread.thread().clone());
        Ok(Sink {
            inner,
            thread: Some(thread),
        })
    }

    /// Writes what is left, and completes the file: returns the numbers of records written and lost.
    pub(crate) fn finish(mut self) -> io::Result<(u64, u64)> {
        self.stop();
        let state = &self.inner.state;
        let state = state.lock();
        match state.failure {
            Some(kind) => Err(kind.into()),
            None => Ok((state.chunks.records, state.chunks.lost)),
        }
    }

    fn stop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        let thread = self.thread.take();
        if self.inner.session.is_of_parent() {
            // This platform has no detached thread to release.
            return std::mem::forget(thread);
        }
        if let Some(thread) = thread {
            thread.thread().unpark();
            // The recording ends in any case, so a panic of that thread is not passed on.
            let _ = thread.join();
        }
        self.inner.write(true);
    }

    /// Writes what is left from an exit handler, where threads cannot be joined.
    pub(crate) fn write_last(&self) {
        self.inner.write(true);
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.stop();
    }
}
