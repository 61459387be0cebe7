//! Markers: recording, polling, waiting. Frees cause no other driver calls.

use std::sync::Arc;

use crate::allocator::engine::contexts;
use crate::driver::sys::{CUresult, CUstream};
use crate::driver::{Context, Current, DriverError, Event, process};
use crate::locks::lines::keep_lines;

use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::heap::Heap;
use crate::allocator::stream::poll::{Answer, Poll};
use crate::allocator::stream::slot::{
    Batch, EAGER_BATCHES, Holder, PendingWait, StreamKey, is_per_thread,
};
use crate::error::Error;
use crate::nvtx::{self, Category};
use crate::sync::capture::{is_of_capture, is_void_event};

/// Bytes that streams which may have been destroyed may keep from other streams, together with a share of all reserved
/// memory.
const LEFT_BEHIND: u64 = 32 << 20;
const LEFT_BEHIND_SHARE: u64 = 16;

/// The completion queries to make for a request before memory of other streams may serve it.
pub(crate) struct Questions {
    /// Whether the limit is near, so that the stream's own memory matters too.
    near: bool,
    /// Streams whose full batches have no marker yet.
    full: Vec<(u32, StreamKey)>,
    /// Markers that are due for a query, where no batch is full.
    due: Option<Poll>,
}

impl Questions {
    /// Returns the completion queries to make for a request of a stream, if there are any.
    pub(crate) fn of(heap: &mut Heap, stream: u32) -> Option<Questions> {
        let near = heap.is_near_limit();
        let full = heap.streams.full_batches(|other| near || other != stream);
        let due = match full.is_empty() {
            true => Some(heap.streams.due_markers(|_| true)?),
            false => None,
        };
        Some(Questions { near, full, due })
    }
}

impl Engine {
    /// Records a marker on a stream, if it is one on which this thread may record now.
    ///
    /// The key shows whether the slot still belongs to the stream: the caller has released the lock since it looked up
    /// the slot, and another stream, whose handle this call must not use, may have taken it.
    pub(crate) fn mark(&self, stream: u32, key: StreamKey) -> Result<(), Error> {
        cover_batch(self, stream, key, false)
    }

    /// [`mark`](Self::mark) for a stream that the allocator keeps alive, unless the stream is idle: then everything
    /// freed on it is complete, which is equivalent to a complete marker.
    pub(crate) fn mark_unless_idle(&self, stream: u32, key: StreamKey) -> Result<(), Error> {
        cover_batch(self, stream, key, true)
    }

    /// Returns an event of a context that no marker uses.
    pub(crate) fn event_of(&self, context: &Context) -> Result<Arc<Event>, Error> {
        let pooled = self.lock().streams.pooled_event(context.id());
        if let Some(event) = pooled {
            return Ok(event);
        }
        let made = context.enter().and_then(|entered| entered.create_event());
        made.map(Arc::new).map_err(|e| self.error_in(context, e))
    }

    /// Records the markers that a free left to its caller. A failure only delays reuse: the next marker covers the
    /// batch.
    pub(crate) fn mark_all(&self, streams: impl IntoIterator<Item = (u32, StreamKey)>) {
        for (stream, key) in streams {
            if let Err(error) = self.mark(stream, key) {
                self.log_marker_failure(&error);
            }
        }
    }

    /// Calls [`mark_unless_idle`](Self::mark_unless_idle) for each stream. A failure only delays reuse, as in
    /// [`mark_all`](Self::mark_all), unless the context is lost.
    pub(crate) fn cover_all(&self, streams: &[(u32, StreamKey)]) -> Result<(), Error> {
        for (stream, key) in streams {
            match self.mark_unless_idle(*stream, *key) {
                Ok(()) => {}
                Err(lost @ Error::ContextLost(_)) => return Err(lost),
                Err(error) => self.log_marker_failure(&error),
            }
        }
        Ok(())
    }

    /// Records the marker that frees left out because the stream might have been destroyed; now the current call names
    /// the stream.
    #[cold]
    pub(crate) fn mark_while_named(&self, named: &Named<'_>) {
        let due = {
            let heap = self.lock();
            let stream = heap.streams.find(named.key);
            stream.filter(|stream| heap.streams[*stream].was_left())
        };
        self.mark_all(due.map(|stream| (stream, named.key)));
    }

    /// Waits for the context before streams that may have been destroyed keep more than a share of the memory from
    /// other streams.
    #[cold]
    pub(crate) fn wait_for_unretired(&self) -> Result<(), Error> {
        // The wait would invalidate a capture that the allocator does not know about.
        if process::has_captured() || self.is_scoped() {
            return Ok(());
        }
        let much = {
            let heap = self.lock();
            let most = (heap.held() / LEFT_BEHIND_SHARE).max(LEFT_BEHIND);
            heap.streams.left_behind() >= most
        };
        if !much {
            return Ok(());
        }
        match contexts::synchronise(self, false) {
            // A later request retries.
            Err(Error::Capturing { .. }) => Ok(()),
            done => done,
        }
    }

    /// Makes these completion queries for a request of a stream. The stream can reuse its own memory without them; near
    /// the limit it is polled as well, because complete memory can be placed in more ways.
    pub(crate) fn poll_with(&self, stream: u32, questions: Questions) -> Result<(), Error> {
        if !questions.full.is_empty() {
            self.cover_all(&questions.full)?;
        }
        let void = match questions.due {
            Some(due) => self.poll_due(due, |_| true)?,
            None => self.poll_some(|_| true)?,
        };
        if void {
            // Batches whose markers fell into a capture get new markers immediately where that is allowed.
            let full = self
                .lock()
                .streams
                .full_batches(|other| questions.near || other != stream);
            self.cover_all(&full)?;
            self.poll()?;
        }
        Ok(())
    }

    /// Queries which markers of each stream are complete.
    pub(crate) fn poll(&self) -> Result<(), Error> {
        self.poll_some(|_| true).map(drop)
    }

    /// [`poll`](Self::poll) for the wanted streams. Returns whether a marker was invalid.
    pub(crate) fn poll_some(&self, wanted: impl Fn(u32) -> bool) -> Result<bool, Error> {
        let due = self.lock().streams.due_markers(&wanted);
        due.map_or(Ok(false), |due| self.poll_due(due, wanted))
    }

    /// [`poll_some`](Self::poll_some), starting with the markers that are due first.
    pub(crate) fn poll_due(
        &self,
        mut due: Poll,
        wanted: impl Fn(u32) -> bool,
    ) -> Result<bool, Error> {
        let mut voided = false;
        loop {
            let mut queries = 0;
            let asked = query(self, &mut due, &mut queries);
            due.drop_events();
            let mut heap = self.lock();
            heap.stats.queries += queries;
            let mut progress = false;
            for outcome in due.outcomes() {
                progress |= outcome.newest.is_some();
                heap.streams.apply_outcome(outcome);
            }
            let void = due.take_void();
            // Markers after an invalid one were not queried.
            let goes_on = due.has_more() || !void.is_empty();
            due.clear();
            heap.streams.poll = due;
            if progress {
                heap.complete_advanced();
            }
            drop(heap);
            voided |= drop_void(self, &void);
            asked?;
            if !goes_on {
                return Ok(voided);
            }
            match self.lock().streams.due_markers(&wanted) {
                Some(more) => due = more,
                None => return Ok(voided),
            }
        }
    }

    /// Queues waits on a stream.
    pub(crate) fn queue_waits(&self, stream: u32, waits: &[PendingWait]) -> Result<(), Error> {
        if waits.is_empty() {
            return Ok(());
        }
        let (raw, context) = {
            let heap = self.lock();
            (
                heap.streams[stream].raw,
                heap.streams[stream].context.clone(),
            )
        };
        let handle = std::ptr::with_exposed_provenance_mut(raw);
        let current = context
            .make_current()
            .map_err(|e| self.error_in(&context, e))?;
        for wait in waits {
            // SAFETY: the stream is the one that the current call names; the event is recorded, and the wait keeps it
            // alive.
            let queued = unsafe { current.stream_wait(handle, &wait.event) };
            // A wait that became part of a graph, or was refused because of a capture, orders nothing.
            let doubtful = queued
                .as_ref()
                .map_or_else(|e| is_void_event(e.code()), |()| true);
            if doubtful {
                // SAFETY: as above; the context of a special handle is current.
                let captures = unsafe { captures_now(self, handle, &context) }?;
                if captures {
                    return Err(Error::Capturing { stream: raw });
                }
            }
            if let Err(error) = queued {
                let of = wait.event.context();
                if is_void_event(error.code()) {
                    drop_void(self, &[(wait.stream, wait.bound)]);
                } else if of.id() != context.id() && self.is_unreachable(of, &error) {
                    let waited_for = self.error_in(of, error);
                    if error.code() != CUresult::CUDA_ERROR_INVALID_HANDLE {
                        return Err(waited_for);
                    }
                }
                // The invalid handle may also be that of the stream.
                return Err(self.error_in(&context, error));
            }
            let mut heap = self.lock();
            heap.stats.stream_waits += 1;
            heap.streams
                .record_order(stream, wait.stream, wait.bound, &wait.row);
        }
        Ok(())
    }

    /// Waits on the host for one marker.
    ///
    /// # Errors
    /// The driver's error if the marker was invalid ([`is_void_wait`](crate::sync::capture::is_void_wait)); then it has
    /// been removed.
    pub(crate) fn host_wait(
        &self,
        stream: u32,
        bound: u64,
        event: Arc<Event>,
    ) -> Result<(), Error> {
        let entered = self.context.enter().map_err(|e| self.error(e))?;
        let waited = {
            let _span = nvtx::span(Category::Wait, || "for a stream".to_owned());
            entered.wait(&event)
        };
        if let Err(error) = &waited
            && self.is_unreachable(event.context(), error)
        {
            self.error_in(event.context(), *error);
            return Ok(());
        }
        drop(event);
        match waited {
            Ok(()) => {}
            Err(error) => {
                if is_void_event(error.code()) {
                    drop_void(self, &[(stream, bound)]);
                }
                return Err(self.error(error));
            }
        }
        let mut heap = self.lock();
        heap.streams.observe(stream, bound);
        heap.complete_advanced();
        Ok(())
    }
}

fn cover_batch(engine: &Engine, stream: u32, key: StreamKey, ask: bool) -> Result<(), Error> {
    let _lines = keep_lines();
    let (batch, raw, context, holder) = {
        let mut heap = engine.lock();
        let slot = &heap.streams[stream];
        let other = !slot.in_use || slot.key != key || slot.is_unusable();
        if other || matches!(slot.holder, Holder::Retired) || slot.covered() {
            return Ok(());
        }
        let (raw, context) = (slot.raw, slot.context.clone());
        // Another thread may retire the stream while its marker is recorded.
        let holder = slot.holder.clone();
        // The bound is taken before the event is recorded, and later frees get a later ticket, so the event covers
        // every ticket up to the bound.
        let heap = &mut *heap;
        let batch = heap.caches.close_batch(&mut heap.streams, stream);
        (batch, raw, context, holder)
    };
    // Nothing is recorded into a graph; the next marker covers this batch.
    let current = context.make_current();
    let current = current.map_err(|e| engine.error_in(&context, e));
    let covered = current.and_then(|current| {
        if !may_mark(engine, raw, &context, key)? {
            return Ok(false);
        }
        // An idleness query would invalidate a capture that begins during it, so streams that may capture are not
        // queried.
        let asks = ask && may_query(engine, &holder);
        if asks && query_idle(engine, (raw, &context), key, &batch)? {
            return Ok(true);
        }
        record_batch(engine, batch, raw, (&context, &current))
    });
    drop(holder);
    let waits_on = match covered {
        Ok(true) => false,
        // A batch whose marker a capture prevented gets one as soon as the capture has ended.
        Ok(false) => ask || !is_per_thread(raw),
        Err(_) => ask,
    };
    if waits_on {
        let mut heap = engine.lock();
        let slot = &heap.streams[stream];
        // A retirement in the meantime has covered the batch, and nothing else marks a retired stream.
        if slot.in_use && slot.key == key && !matches!(slot.holder, Holder::Retired) {
            heap.streams.relist_batch(stream);
        }
    }
    covered.map(drop)
}

/// Whether this thread may record a marker on a stream of the current context now: not into a graph, and not on the
/// per-thread stream of another thread.
fn may_mark(engine: &Engine, raw: usize, context: &Context, key: StreamKey) -> Result<bool, Error> {
    let stream = std::ptr::with_exposed_provenance_mut(raw);
    // SAFETY: the stream is alive: the allocator holds it, or the current call names it or frees a block of it, and
    // its owner may not destroy it before that call returns.
    if unsafe { captures_now(engine, stream, context) }? {
        return Ok(false);
    }
    Ok(!is_per_thread(raw) || StreamKey::Id(context.per_thread_id()) == key)
}

/// Whether a stream is capturing, or is the legacy stream while a blocking stream of its context is.
///
/// # Safety
/// The stream is alive, or special with its context current.
unsafe fn captures_now(
    engine: &Engine,
    stream: CUstream,
    context: &Context,
) -> Result<bool, Error> {
    if engine.no_captures {
        return Ok(false);
    }
    // SAFETY: the caller's contract.
    match unsafe { engine.driver().is_capturing(stream) } {
        Ok(capturing) => Ok(capturing),
        Err(error) if is_of_capture(error.code()) => Ok(true),
        Err(error) => Err(engine.error_in(context, error)),
    }
}

/// Whether a call that does not name a stream may query if it is idle. A stream that its owner may begin to capture
/// concurrently is not queried, because the query would invalidate the capture.
fn may_query(engine: &Engine, holder: &Holder) -> bool {
    match holder {
        Holder::Kept(_) => !engine.may_capture(),
        Holder::Adopted(_) => engine.no_captures,
        Holder::Foreign(_) | Holder::Retired => false,
    }
}

/// Whether a stream is idle. Then everything freed on it up to the batch is complete, and becomes available to all
/// streams in one step.
fn query_idle(
    engine: &Engine,
    (raw, context): (usize, &Context),
    key: StreamKey,
    batch: &Batch,
) -> Result<bool, Error> {
    let stream = std::ptr::with_exposed_provenance_mut(raw);
    let idle = context.enter().and_then(|entered| {
        // SAFETY: the stream is alive, as in `may_mark`.
        unsafe { entered.is_idle(stream) }
    });
    engine.lock().stats.queries += 1;
    let idle = match idle {
        // The stream has begun a capture since the check. The record below would fail with the same result.
        Err(error) if is_of_capture(error.code()) => {
            engine.driver().suspect_capture(stream);
            return Ok(false);
        }
        idle => idle.map_err(|e| engine.error_in(context, e))?,
    };
    let mut heap = engine.lock();
    let slot = &mut heap.streams[batch.stream];
    if slot.key == key && !idle {
        slot.eager_batches = EAGER_BATCHES;
    }
    if idle {
        heap.streams.mark_batch_complete(batch);
        heap.streams.pool_unused_events();
        heap.complete_advanced();
    }
    Ok(idle)
}

/// Records the marker of a batch. Returns false if the stream is capturing by now: an event recorded within a
/// capture marks no work.
fn record_batch(
    engine: &Engine,
    batch: Batch,
    raw: usize,
    (context, current): (&Context, &Current<'_>),
) -> Result<bool, Error> {
    let event = engine.event_of(context)?;
    let stream = std::ptr::with_exposed_provenance_mut(raw);
    // SAFETY: the stream is alive, as in `may_mark`; the event belongs to the stream's context and to no marker.
    let recorded = unsafe { current.record(&event, stream) };
    let captured = match &recorded {
        // Another thread may have begun a capture since the check.
        // SAFETY: as above; the context of a special handle is current.
        Ok(()) => unsafe { captures_now(engine, stream, context) },
        Err(error) if is_of_capture(error.code()) => {
            engine.driver().suspect_capture(stream);
            Ok(true)
        }
        Err(_) => Ok(false),
    };
    let mut heap = engine.lock();
    let unneeded = match (&captured, &recorded) {
        (Ok(false), Ok(())) => {
            heap.stats.markers += 1;
            heap.streams.publish(batch, event)
        }
        // The next record of the event replaces its present meaning, even if that belongs to a capture.
        _ => {
            heap.stats.failed_markers += 1;
            Some(event)
        }
    };
    heap.streams.pool_events(unneeded);
    drop(heap);
    match captured {
        Ok(false) => recorded
            .map(|()| true)
            .map_err(|e| engine.error_in(context, e)),
        captured => captured.map(|_| false),
    }
}

fn query(engine: &Engine, due: &mut Poll, queries: &mut u64) -> Result<(), Error> {
    let entered = engine.context.enter().map_err(|e| engine.error(e))?;
    let mut unreachable: Vec<(Context, DriverError)> = Vec::new();
    let asked = due.query(|event| {
        let context = event.context();
        if unreachable.iter().any(|(c, _)| c.id() == context.id()) {
            return Ok(Answer::Late);
        }
        *queries += 1;
        match entered.query(event) {
            Ok(true) => Ok(Answer::Complete),
            Ok(false) => Ok(Answer::Late),
            Err(error) if is_void_event(error.code()) => Ok(Answer::Void),
            Err(error) if engine.is_unreachable(context, &error) => {
                unreachable.push((context.clone(), error));
                Ok(Answer::Late)
            }
            Err(error) => Err(engine.error(error)),
        }
    });
    for (context, error) in unreachable {
        engine.error_in(&context, error);
    }
    asked
}

/// Removes invalid markers, each given by its stream and bound: their events fell into a capture that began between
/// the check and the record. The frees that they covered get a new marker. Returns whether there were any.
fn drop_void(engine: &Engine, void: &[(u32, u64)]) -> bool {
    if void.is_empty() {
        return false;
    }
    let (mut gone, mut captured) = (Vec::new(), Vec::new());
    let mut heap = engine.lock();
    for (stream, bound) in void {
        captured.push(heap.streams[*stream].raw);
        if let Some(marker) = heap.streams.void(*stream, *bound) {
            heap.stats.failed_markers += 1;
            gone.push(marker);
        }
    }
    drop(heap);
    for raw in captured {
        let stream = std::ptr::with_exposed_provenance_mut(raw);
        engine.driver().suspect_capture(stream);
    }
    // The events are destroyed here, unless another thread is querying them.
    !gone.is_empty()
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::Config;
    use crate::allocator::stream::slot::StreamKey;
    use crate::allocator::tests::{Outcome, Rig};

    /// R25: between the lookup of a slot and its marker, another stream may have taken the slot.
    #[test]
    fn r25_a_slot_reused_by_another_stream_gets_no_marker() -> Outcome {
        let rig = Rig::new(Config::new())?;
        let [a, b] = rig.streams()?;
        let allocator = &rig.allocator;
        for stream in [&a, &b] {
            drop(allocator.allocate(512 << 10, stream)?);
        }
        let engine = allocator.engine();
        let (key_a, key_b) = (StreamKey::Id(a.id()?), StreamKey::Id(b.id()?));
        let slot = engine.lock().streams.find(key_a).ok_or("no slot")?;
        let markers = allocator.stats().markers;
        engine.mark(slot, key_b)?;
        assert_eq!(allocator.stats().markers, markers);
        engine.mark(slot, key_a)?;
        assert_eq!(allocator.stats().markers, markers + 1);
        Ok(())
    }
}
