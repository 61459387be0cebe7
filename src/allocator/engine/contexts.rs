//! Waiting for whole contexts, and refusing to while something in them captures.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::allocator::engine::Engine;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::{Batch, Holder};
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::locks::lines::keep_lines;
use crate::nvtx::{self, Category};
use crate::sync::capture::is_capture_refusal;

impl Engine {
    /// Refuses while a stream of one of the contexts is being captured, as far as can be known: the streams that we
    /// keep alive are asked, and this crate's own whose capture was begun here, also where they are strangers to the
    /// allocator, and those of captures that use graph pools, and adopted ones that were found capturing; the
    /// legacy stream answers for all blocking streams of its context; and of the caller's other streams it counts what
    /// was found when one was asked last. That can be out of date, and nobody may ask a stream that its owner may have
    /// destroyed. So with `once` it is told once, and the next time the driver has to say it.
    pub(crate) fn refuse_captures(&self, contexts: &[Context], once: bool) -> Result<(), Error> {
        let (kept, mut found, adopted) = {
            let heap = self.lock();
            let kept: Vec<Stream> = heap.streams.kept().cloned().collect();
            let found = self.found_capturing(&heap);
            let mut adopted = Vec::new();
            for (_, slot) in heap.streams.iter() {
                if let Holder::Adopted(token) = &slot.holder
                    && found.iter().any(|(stream, _)| *stream == slot.raw)
                {
                    adopted.push((slot.raw, Arc::clone(token)));
                }
            }
            (kept, found, adopted)
        };
        // They may be captured no more, and nothing has named them since.
        for (raw, _token) in adopted {
            let handle = std::ptr::with_exposed_provenance_mut(raw);
            // SAFETY: an adopted stream lives until it is retired, which waits for the token.
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
        for stream in kept {
            self.refuse_capture(&self.named(&stream)?)?;
        }
        let suspects = self.driver().own_suspects().into_iter();
        let there = |stream: &Stream| contexts.iter().any(|c| c.id() == stream.context().id());
        for stream in suspects.filter(there) {
            match stream.is_capturing() {
                Ok(false) => {}
                Err(error) if !is_capture_refusal(error.code()) => return Err(self.error(error)),
                _ => {
                    let stream = stream.raw() as usize;
                    return Err(Error::Capturing { stream });
                }
            }
        }
        for context in contexts {
            let entered = context.enter().map_err(|e| self.error(e))?;
            let legacy = std::ptr::null_mut();
            // SAFETY: the null handle is valid while a context is current.
            match unsafe { entered.driver().is_capturing(legacy) } {
                Ok(false) => {}
                Ok(true) => return Err(Error::Capturing { stream: 0 }),
                Err(error) if is_capture_refusal(error.code()) => {
                    return Err(Error::Capturing { stream: 0 });
                }
                Err(error) => return Err(self.error(error)),
            }
        }
        Ok(())
    }

    /// The caller's streams that were capturing when they were asked last, with the numbers of the findings.
    pub(crate) fn found_capturing(&self, heap: &Heap) -> Vec<(usize, u64)> {
        let mut found = self.driver().found_capturing();
        found.retain(|(stream, _)| {
            let mut slots = heap.streams.iter();
            slots.any(|(_, s)| s.raw == *stream && s.holder.is_callers())
                || heap.graphs.captures_on(*stream)
        });
        found
    }

    /// Waits until everything that was submitted to the streams' contexts so far is complete; an
    /// error, with nothing changed, while something captures there, because that would suffer. `once` as
    /// for [`refuse_captures`](Self::refuse_captures).
    pub(crate) fn synchronise(&self, once: bool) -> Result<(), Error> {
        let _lines = keep_lines();
        // Nobody may destroy one of them meanwhile.
        let (contexts, touched) = self.contexts()?;
        self.refuse_captures(&contexts, once)?;
        let refuted = self.found_capturing(&self.lock());
        let mut retired = Vec::new();
        let mut unasked = Vec::new();
        let bounds: Vec<Batch> = {
            let mut heap = self.lock();
            let streams = heap.streams.iter();
            // Only what is waited for below: a stream of yet another context may have come since.
            let waited =
                streams.filter(|(_, slot)| contexts.iter().any(|c| c.id() == slot.context.id()));
            let mut working: Vec<u32> = Vec::new();
            for (stream, slot) in waited {
                if matches!(slot.holder, Holder::Retired) {
                    // What it was given is under tickets before the open one, also what is freed later.
                    retired.push((stream, slot.open - 1));
                } else {
                    working.push(stream);
                }
            }
            unasked.extend(&heap.graphs.unasked);
            let batches = working.iter().map(|s| heap.close_batch(*s));
            batches.collect()
        };
        let span = nvtx::span(Category::Wait, || "for everything".to_owned());
        let waited = contexts.iter().try_for_each(|context| {
            match context.enter().and_then(|entered| entered.synchronize()) {
                Ok(()) => Ok(()),
                Err(error) if is_capture_refusal(error.code()) => {
                    Err(Error::Capturing { stream: 0 })
                }
                Err(error) if self.is_gone(context, &error) => {
                    self.context_gone(context);
                    Ok(())
                }
                Err(error) => Err(self.error(error)),
            }
        });
        drop(span);
        drop(touched);
        let mut heap = self.lock();
        if let Err(error) = waited {
            for batch in &bounds {
                heap.streams.reopen_batch(batch);
            }
            return Err(error);
        }
        let bounds = bounds.iter().map(|batch| (batch.stream, batch.bound));
        for (stream, bound) in bounds.chain(retired) {
            heap.streams.completed(stream, bound, &[]);
        }
        heap.streams.pool_spent();
        heap.complete_uses();
        let done = match unasked.is_empty() {
            true => Vec::new(),
            false => heap.graphs.completed(&unasked),
        };
        drop(heap);
        drop(done);
        // The driver waits for no context in which something captures.
        for (_, number) in refuted {
            self.driver().not_capturing(number);
        }
        Ok(())
    }
}
