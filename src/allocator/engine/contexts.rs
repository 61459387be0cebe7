//! Contexts: waits for all work of a context, which are refused while a stream of it is capturing, and driver errors
//! about a context other than the allocator's.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use log::Level;

use crate::allocator::engine::Engine;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::{Batch, Holder, Slot};
use crate::driver::sys::CUresult;
use crate::driver::{Context, DriverError, Stream};
use crate::error::Error;
use crate::locks::lines::{self, keep_lines};
use crate::locks::lock::pause;
use crate::nvtx::{self, Category};
use crate::sync::capture::is_capture_refusal;

impl Engine {
    /// Fails with [`Error::Capturing`] if a stream of one of the contexts is known to be capturing.
    ///
    /// The driver is queried for the streams that the allocator keeps alive, for the streams of this crate whose
    /// capture was begun through it (even those unknown to the allocator), for captures that use graph pools, and for
    /// adopted streams that were found capturing. The legacy stream represents all blocking streams of its context.
    ///
    /// For the caller's other streams the latest query counts. Its result may be outdated, but a stream that its owner
    /// may have destroyed cannot be queried again. Therefore, with `once`, such a result causes one error only; after
    /// that the driver has to report the capture.
    pub(crate) fn refuse_captures(&self, contexts: &[Context], once: bool) -> Result<(), Error> {
        let (mut found, adopted) = {
            let heap = self.lock();
            let found = self.found_capturing(&heap);
            let mut adopted = Vec::new();
            for (_, slot) in heap.streams.iter() {
                if let Holder::Adopted(token) = &slot.holder
                    && found.iter().any(|(stream, _)| *stream == slot.raw)
                {
                    adopted.push((slot.raw, Arc::clone(token)));
                }
            }
            (found, adopted)
        };
        // Their captures may have ended without any call that names the streams.
        for (raw, _token) in adopted {
            let handle = std::ptr::with_exposed_provenance_mut(raw);
            // SAFETY: an adopted stream lives until it is retired, and retirement waits for the token.
            if matches!(unsafe { self.driver().is_capturing(handle) }, Ok(false)) {
                found.retain(|(stream, _)| *stream != raw);
            }
        }
        let told = self.told.load(Ordering::Relaxed);
        if let Some((stream, _)) = found.iter().find(|(_, number)| *number > told || !once) {
            if once {
                let newest = found.iter().map(|(_, number)| *number).max();
                self.told.fetch_max(newest.unwrap_or(0), Ordering::Relaxed);
            }
            return Err(Error::Capturing { stream: *stream });
        }
        if let Some(user) = self.pool_capturing() {
            return Err(Error::Capturing { stream: user.raw });
        }
        for context in contexts {
            let legacy = std::ptr::null_mut();
            let asked = context.enter().and_then(|entered| {
                // SAFETY: the null handle is valid while a context is current.
                unsafe { entered.driver().is_capturing(legacy) }
            });
            match asked {
                Ok(false) => {}
                Ok(true) => return Err(Error::Capturing { stream: 0 }),
                Err(error) if is_capture_refusal(error.code()) => {
                    return Err(Error::Capturing { stream: 0 });
                }
                // A destroyed context has no captures, and a distrusted one is not used.
                Err(error) if self.is_unreachable(context, &error) => {
                    self.error_in(context, error);
                }
                Err(error) => return Err(self.error(error)),
            }
        }
        let kept: Vec<Stream> = self.lock().streams.kept().cloned().collect();
        for stream in kept {
            self.refuse_capture(&self.named(&stream)?)?;
        }
        let suspects = self.driver().own_suspects().into_iter();
        let there = |stream: &Stream| contexts.iter().any(|c| c.id() == stream.context().id());
        for stream in suspects.filter(there) {
            match stream.is_capturing() {
                Ok(false) => {}
                Err(error) if !is_capture_refusal(error.code()) => {
                    return Err(self.error_in(stream.context(), error));
                }
                _ => {
                    let stream = stream.raw() as usize;
                    return Err(Error::Capturing { stream });
                }
            }
        }
        Ok(())
    }

    /// Returns the caller's streams that were capturing when last queried, with the numbers of the findings.
    pub(crate) fn found_capturing(&self, heap: &Heap) -> Vec<(usize, u64)> {
        let mut found = self.driver().found_capturing();
        found.retain(|(stream, _)| {
            let mut slots = heap.streams.iter();
            slots.any(|(_, s)| s.raw == *stream && s.holder.is_callers())
                || heap.graphs.captures_on(*stream)
        });
        found
    }

    /// Waits until all work submitted so far to the streams' contexts is complete. The call is refused while a stream
    /// there is capturing, because the wait would invalidate the capture. `once` is as for
    /// [`refuse_captures`](Self::refuse_captures); with it the call also fails if a distrusted context prevented it
    /// from waiting for everything.
    pub(crate) fn synchronise(&self, once: bool) -> Result<(), Error> {
        let _lines = keep_lines();
        // While these holders exist, no retirement ends that would allow an owner to destroy one of the contexts.
        let (mut contexts, touched) = self.contexts();
        self.refuse_captures(&contexts, once)?;
        let refuted = self.found_capturing(&self.lock());
        let mut retired = Vec::new();
        let mut unasked = Vec::new();
        let bounds: Vec<(Batch, u64)> = {
            let mut heap = self.lock();
            // The capture queries may have found a context destroyed, or made one distrusted.
            contexts.retain(|context| {
                let mut slots = heap.streams.iter().map(|(_, slot)| slot);
                let reachable = |slot: &Slot| heap.closed || slot.distrusted.is_none();
                context.id() == self.context.id()
                    || slots.any(|s| s.context.id() == context.id() && reachable(s))
            });
            let streams = heap.streams.iter();
            // Only streams of the contexts waited for below: a stream of another context may have appeared since.
            let waited =
                streams.filter(|(_, slot)| contexts.iter().any(|c| c.id() == slot.context.id()));
            let mut working: Vec<(u32, u64)> = Vec::new();
            for (stream, slot) in waited {
                if matches!(slot.holder, Holder::Retired) {
                    // The stream's work is covered by tickets before the open one, even if it is freed later.
                    retired.push((stream, slot.open - 1));
                } else {
                    working.push((stream, slot.context.id()));
                }
            }
            unasked.extend(&heap.graphs.unasked);
            let batches = working.iter();
            let heap = &mut *heap;
            let mut close = |stream| heap.caches.close_batch(&mut heap.streams, stream);
            batches.map(|(s, of)| (close(*s), *of)).collect()
        };
        let mut unanswered = Vec::new();
        let span = nvtx::span(Category::Wait, || "for everything".to_owned());
        let waited = contexts.iter().try_for_each(|context| {
            match context.enter().and_then(|entered| entered.synchronize()) {
                Ok(()) => Ok(()),
                Err(error) if is_capture_refusal(error.code()) => {
                    Err(Error::Capturing { stream: 0 })
                }
                Err(error) if self.is_unreachable(context, &error) => {
                    if error.code() == CUresult::CUDA_ERROR_INVALID_HANDLE {
                        unanswered.push(context.id());
                    }
                    self.error_in(context, error);
                    Ok(())
                }
                Err(error) => Err(self.error(error)),
            }
        });
        drop(span);
        drop(touched);
        let mut heap = self.lock();
        for (batch, of) in &bounds {
            if waited.is_err() || unanswered.contains(of) {
                heap.streams.reopen_batch(batch);
            } else {
                heap.streams.completed(batch.stream, batch.bound, &[]);
            }
        }
        waited?;
        for (stream, bound) in retired {
            heap.streams.completed(stream, bound, &[]);
        }
        heap.streams.pool_unused_events();
        heap.complete_uses();
        let distrusted = heap.streams.iter().find_map(|(_, slot)| {
            let left_out = !heap.closed || unanswered.contains(&slot.context.id());
            slot.distrusted.filter(|_| left_out)
        });
        let done = match unasked.is_empty() || distrusted.is_some() {
            true => Vec::new(),
            false => heap.graphs.completed(&unasked),
        };
        drop(heap);
        drop(done);
        // The driver refuses to wait for a context with a capture, so these findings are outdated.
        for (_, number) in refuted {
            self.driver().not_capturing(number);
        }
        match distrusted {
            Some(error) if once => Err(Error::Driver(error)),
            _ => Ok(()),
        }
    }

    /// Returns the contexts that a wait for everything includes: the allocator's own, and those of all streams that may
    /// have work; distrusted ones only while the allocator is being closed. The owner of a stream of another context
    /// may destroy that context after retiring the stream; the retirement waits until the returned holders are dropped.
    fn contexts(&self) -> (Vec<Context>, Vec<Holder>) {
        let mut contexts = vec![self.context.clone()];
        let mut touched = Vec::new();
        let heap = self.lock();
        for (_, slot) in heap.streams.iter() {
            let context = slot.context.id();
            if context == self.context.id() || (slot.distrusted.is_some() && !heap.closed) {
                continue;
            }
            if let Holder::Foreign(_) = &slot.holder {
                touched.push(slot.holder.clone());
            }
            if !contexts.iter().any(|c| c.id() == context) {
                contexts.push(slot.context.clone());
            }
        }
        drop(heap);
        (contexts, touched)
    }

    // ---- errors about other contexts ---------------------------------------------------------

    /// Whether an error of a driver call concerns only the context of the stream or event that the call used, and not
    /// the allocator's: that context was destroyed, or its handles cannot be trusted.
    pub(crate) fn is_unreachable(&self, context: &Context, error: &DriverError) -> bool {
        context.id() != self.context.id()
            && matches!(
                error.code(),
                CUresult::CUDA_ERROR_INVALID_CONTEXT
                    | CUresult::CUDA_ERROR_INVALID_HANDLE
                    | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            )
    }

    /// Converts the error of a driver call that used an object of a context. If that context is
    /// [unreachable](Self::is_unreachable), the heap records this, and the allocator stays usable.
    pub(crate) fn error_in(&self, context: &Context, error: DriverError) -> Error {
        if !self.is_unreachable(context, &error) {
            return self.error(error);
        }
        let device = context.device().ordinal();
        if error.code() == CUresult::CUDA_ERROR_INVALID_HANDLE {
            let news = {
                let heap = &mut *self.lock();
                let known = heap.streams.distrust_of(context.id()).is_some();
                let streams = heap.streams.distrust(context.id(), error);
                for stream in &streams {
                    heap.caches.stop_queries(*stream);
                }
                !known && !streams.is_empty()
            };
            if news {
                lines::say(
                    Level::Warn,
                    module_path!(),
                    format_args!(
                        "allocator {}: a context on device {device} is not used until its streams are retired: {error}",
                        self.id
                    ),
                );
            }
        } else {
            self.end_context(context);
        }
        Error::Driver(error)
    }

    /// Records that another context was destroyed with all its objects.
    pub(crate) fn end_context(&self, context: &Context) {
        lines::say(
            Level::Warn,
            module_path!(),
            format_args!(
                "allocator {}: a context on device {} is gone, but its streams were not retired",
                self.id,
                context.device().ordinal()
            ),
        );
        let held = self.lock().end_context(context.id(), &self.context);
        drop(held);
    }

    /// Destroys the events of another context once its last stream has been retired.
    pub(crate) fn let_go_of_context(&self, context: &Context) {
        let key = context.id();
        let mut events = {
            let mut heap = self.lock();
            let of_it = |(_, slot): (u32, &Slot)| slot.context.id() == key;
            let needed = key == self.context.id() || heap.streams.iter().any(of_it);
            match needed {
                true => None,
                false => heap.streams.events.remove(&key),
            }
        };
        // Queries and waits that use one of the events end shortly, and the heap does not hand the events out any more.
        for event in events.iter_mut().flatten() {
            let mut round = 0;
            while Arc::get_mut(event).is_none() {
                pause(round);
                round += 1;
            }
        }
    }
}
