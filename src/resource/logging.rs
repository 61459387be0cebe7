//! The logging adaptor and its sinks.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::allocator::Request;
use crate::driver::{Stream, process};
use crate::foreign::guarded;
use crate::locks::held::{Locked, Mutex};
use crate::locks::thread_id::ThreadId;

use super::block::RawBlock;
use super::traits::MemoryResource;
use crate::block::{BlockId, Tag};
use crate::clock::Clock;
use crate::error::{Error, Refused};

/// The number of bytes kept of a message.
const MESSAGE: usize = 256;

/// A method of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogAction {
    /// [`MemoryResource::allocate_block`].
    Allocate,
    /// [`MemoryResource::deallocate_block`].
    Deallocate,
    /// [`MemoryResource::reap`].
    Reap,
}

/// One call that went through a [`Logging`] adaptor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogRecord {
    /// The number of the record, which increases over all adaptors and threads of the process.
    pub order: u64,
    /// The call that was made.
    pub action: LogAction,
    /// The ordinal of the device.
    pub device: usize,
    /// The driver's id of the block's stream; 0 where there is none.
    pub stream: u64,
    /// The block's first byte; 0 where there is none.
    pub ptr: u64,
    /// Bytes requested, freed, or reaped.
    pub bytes: u64,
    /// The block's label.
    pub tag: Tag,
    /// The generation of the block's record; 0 where there is none.
    pub generation: u64,
    /// A number of the calling thread, from 1.
    pub thread: u64,
    /// The time of the call, by the adaptor's clock.
    pub time: Duration,
    /// The kind of error; none of a success.
    pub error: Option<&'static str>,
    /// The error's text, at most 256 bytes of it.
    pub message: String,
}

impl LogRecord {
    /// The columns of [`to_csv`](Self::to_csv): those of RMM's logs, followed by further ones.
    pub const CSV_HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream,Device,Tag,Error";

    /// Formats the record as a line of comma-separated values, without its end.
    pub fn to_csv(&self) -> String {
        let action = match (self.action, self.error) {
            (LogAction::Allocate, None) => "allocate",
            (LogAction::Allocate, Some(_)) => "allocate failure",
            (LogAction::Deallocate, None) => "free",
            (LogAction::Deallocate, Some(_)) => "free failure",
            (LogAction::Reap, _) => "reap",
        };
        format!(
            "{},{:.6},{action},{:#x},{},{},{},{},{}",
            self.thread,
            self.time.as_secs_f64(),
            self.ptr,
            self.bytes,
            self.stream,
            self.device,
            quoted(self.tag.as_str()),
            self.error.unwrap_or_default(),
        )
    }
}

/// Quotes a field of comma-separated values where necessary.
fn quoted(field: &str) -> Cow<'_, str> {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")).into(),
        false => field.into(),
    }
}

/// Returns the text of an error, truncated at a character boundary.
fn message(mut text: String) -> String {
    let mut end = text.len().min(MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// The destination of records. Called by many threads, without a lock of the adaptor. A closure is a sink; with `()`
/// no record is created and no memory allocated.
pub trait LogSink: Send + Sync {
    /// Whether records are created.
    #[doc(hidden)]
    fn is_enabled(&self) -> bool {
        true
    }

    /// Takes a record.
    ///
    /// # Errors
    /// Any: the adaptor counts the record as dropped.
    fn log(&self, record: &LogRecord) -> io::Result<()>;
}

impl<S: LogSink + ?Sized> LogSink for Arc<S> {
    fn is_enabled(&self) -> bool {
        (**self).is_enabled()
    }

    fn log(&self, record: &LogRecord) -> io::Result<()> {
        (**self).log(record)
    }
}

impl<F: Fn(&LogRecord) -> io::Result<()> + Send + Sync> LogSink for F {
    fn log(&self, record: &LogRecord) -> io::Result<()> {
        self(record)
    }
}

impl LogSink for () {
    #[inline]
    fn is_enabled(&self) -> bool {
        false
    }

    fn log(&self, _record: &LogRecord) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps the newest records in memory; older ones are dropped and counted.
///
/// ```
/// use cualloc::{Request, resource::{Logging, MemoryResource, RingSink}};
/// use std::sync::Arc;
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let allocator = Allocator::with_config(&sim.driver()?.context(0)?, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let ring = Arc::new(RingSink::default());
/// let logged = Logging::new(allocator, ring.clone());
/// let block = logged.allocate_block(&Request::new(1000).tag("x"), &stream)?;
/// logged.deallocate_block(block)?;
/// assert_eq!(ring.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RingSink {
    capacity: usize,
    /// The records, and the number of those that were dropped.
    ring: Mutex<(VecDeque<LogRecord>, u64)>,
}

impl Default for RingSink {
    fn default() -> RingSink {
        RingSink::new(4096)
    }
}

impl RingSink {
    /// Keeps at most `capacity` records, at least 1.
    pub fn new(capacity: usize) -> RingSink {
        RingSink {
            capacity: capacity.max(1),
            ring: Mutex::default(),
        }
    }

    fn ring(&self) -> Locked<'_, (VecDeque<LogRecord>, u64)> {
        process::lock(&self.ring)
    }

    /// A copy of the records, oldest first.
    pub fn snapshot(&self) -> Vec<LogRecord> {
        self.ring().0.iter().cloned().collect()
    }

    /// The number of records kept.
    pub fn len(&self) -> usize {
        self.ring().0.len()
    }

    /// Whether no record is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all records.
    pub fn clear(&self) {
        self.ring().0.clear();
    }

    /// The number of records that newer ones replaced.
    pub fn dropped(&self) -> u64 {
        self.ring().1
    }
}

impl LogSink for RingSink {
    fn log(&self, record: &LogRecord) -> io::Result<()> {
        let record = record.clone();
        let (records, dropped) = &mut *self.ring();
        if records.len() == self.capacity {
            records.pop_front();
            *dropped += 1;
        }
        records.push_back(record);
        Ok(())
    }
}

/// Writes one record per allocation, deallocation and reap to a sink. See [`RingSink`].
pub struct Logging<R, S> {
    inner: R,
    sink: S,
    clock: Clock,
    dropped: AtomicU64,
}

impl<R: MemoryResource, S: LogSink> Logging<R, S> {
    /// Creates a logging adaptor over another resource.
    pub fn new(inner: R, sink: S) -> Self {
        Logging {
            inner,
            sink,
            clock: Clock::default(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Replaces the clock of the records' times: for tests.
    #[doc(hidden)]
    pub fn with_clock(mut self, clock: &Clock) -> Self {
        self.clock = clock.clone();
        self
    }

    /// Returns the number of records that the sink did not take.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Returns the resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// A record of a block, if there is one, without bytes and tag.
    fn record(&self, action: LogAction, id: Option<&BlockId>, error: Option<&Error>) -> LogRecord {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        LogRecord {
            order: NEXT.fetch_add(1, Ordering::Relaxed),
            action,
            device: self.inner.ordinal(),
            stream: id.map_or(0, BlockId::stream_id),
            ptr: id.map_or(0, BlockId::ptr),
            bytes: 0,
            tag: Tag::default(),
            generation: id.map_or(0, BlockId::generation),
            thread: ThreadId::current().number(),
            time: self.clock.now(),
            error: error.map(Error::kind),
            message: error.map_or_else(String::new, |error| message(error.to_string())),
        }
    }

    #[inline(never)]
    fn log_allocation(&self, result: &Result<RawBlock, Error>, request: &Request, stream: &Stream) {
        let id = result.as_ref().map(RawBlock::id).ok();
        self.write(&LogRecord {
            bytes: request.bytes() as u64,
            tag: request.tag,
            stream: stream.own_id(),
            ..self.record(LogAction::Allocate, id.as_ref(), result.as_ref().err())
        });
    }

    #[inline(never)]
    fn deallocate_logged(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let (id, tag) = (block.id(), block.tag());
        let result = self.inner.deallocate_block(block);
        let error = result.as_ref().err().map(|failure| &failure.error);
        self.write(&LogRecord {
            bytes: id.bytes() as u64,
            tag,
            ..self.record(LogAction::Deallocate, Some(&id), error)
        });
        result
    }

    fn write(&self, record: &LogRecord) {
        // A panic counts as a record that was dropped.
        let logged = guarded("a log sink", || self.sink.log(record));
        if !matches!(logged, Some(Ok(_))) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource, S: LogSink> MemoryResource for Logging<R, S> {
    #[inline]
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let result = self.inner.allocate_block(request, stream);
        if self.sink.is_enabled() {
            self.log_allocation(&result, request, stream);
        }
        result
    }

    #[inline]
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if self.sink.is_enabled() {
            return self.deallocate_logged(block);
        }
        self.inner.deallocate_block(block)
    }

    fn reap(&self) -> Result<u64, Error> {
        let result = self.inner.reap();
        if self.sink.is_enabled() {
            self.write(&LogRecord {
                bytes: *result.as_ref().unwrap_or(&0),
                ..self.record(LogAction::Reap, None, result.as_ref().err())
            });
        }
        result
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}

debug_fields!([R: std::fmt::Debug, S] Logging<R, S>, self => inner: self.inner);

#[cfg(test)]
mod tests {
    use super::*;

    /// S5.31: the message is cut at a character's border, at 256 bytes at most.
    #[test]
    fn s5_31_messages_are_cut_at_a_character() {
        let text = format!("{}é{}", "a".repeat(MESSAGE - 1), "b".repeat(9));
        assert_eq!(message(text), "a".repeat(MESSAGE - 1));
        assert_eq!(message("é".repeat(128)), "é".repeat(128));
        assert_eq!(message("short".into()), "short");
    }
}
