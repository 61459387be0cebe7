//! Waits for all work of a context, which are refused while a stream of it is capturing, and driver errors that concern
//! a context other than the allocator's.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::allocator::engine::Engine;
use crate::allocator::graph::user::User;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::StreamKey;
use crate::allocator::stream::slot::{Batch, Holder, Slot};
use crate::driver::sys::CUresult;
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::locks::lines::keep_lines;
use crate::locks::lock::pause;
use crate::nvtx::{self, Category};
use crate::sync::capture::is_capture_refusal;

/// Fails with [`Error::Capturing`] if a stream of one of the contexts is known to be capturing.
///
/// The driver is queried for the streams that the allocator keeps alive, for the streams of this crate whose
/// capture was begun through it (even those unknown to the allocator), for captures that use graph pools, and for
/// adopted streams that were found capturing. The legacy stream represents all blocking streams of its context.
///
/// For the caller's other streams the latest query counts. Its result may be outdated, but a stream that its owner
/// may have destroyed cannot be queried again. Therefore, with `once`, such a result causes one error only; after
/// that the driver has to report the capture.
pub(crate) fn refuse_captures(
    engine: &Engine,
    contexts: &[Context],
    once: bool,
) -> Result<(), Error> {
    let (mut found, adopted) = {
        let heap = engine.lock();
        let found = found_capturing(engine, &heap);
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
        if matches!(unsafe { engine.driver().is_capturing(handle) }, Ok(false)) {
            found.retain(|(stream, _)| *stream != raw);
        }
    }
    let refused_finding = engine.refused_finding.load(Ordering::Relaxed);
    if let Some((stream, _)) = found
        .iter()
        .find(|(_, number)| *number > refused_finding || !once)
    {
        if once {
            let newest = found.iter().map(|(_, number)| *number).max();
            engine
                .refused_finding
                .fetch_max(newest.unwrap_or(0), Ordering::Relaxed);
        }
        return Err(Error::Capturing { stream: *stream });
    }
    if let Some(user) = pool_capturing(engine) {
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
            Err(error) if engine.is_unreachable(context, &error) => {
                engine.error_in(context, error);
            }
            Err(error) => return Err(engine.error(error)),
        }
    }
    let kept: Vec<Stream> = engine.lock().streams.kept().cloned().collect();
    for stream in kept {
        engine.refuse_capture(&engine.named(&stream)?)?;
    }
    let suspects = engine.driver().list_suspects().into_iter();
    let there = |stream: &Stream| contexts.iter().any(|c| c.id() == stream.context().id());
    for stream in suspects.filter(there) {
        match stream.is_capturing() {
            Ok(false) => {}
            Err(error) if !is_capture_refusal(error.code()) => {
                return Err(engine.error_in(stream.context(), error));
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
pub(crate) fn found_capturing(engine: &Engine, heap: &Heap) -> Vec<(usize, u64)> {
    let mut found = engine.driver().found_capturing();
    found.retain(|(stream, _)| {
        let mut slots = heap.streams.iter();
        slots.any(|(_, s)| s.raw == *stream && s.holder.is_callers())
            || heap.graphs.captures_on(*stream)
    });
    found
}

/// Waits until all work submitted so far to the streams' contexts is complete. The call is refused while a stream
/// there is capturing, because the wait would invalidate the capture. `once` is as for
/// [`refuse_captures`]; with it the call also fails if a distrusted context prevented it
/// from waiting for everything.
pub(crate) fn synchronise(engine: &Engine, once: bool) -> Result<(), Error> {
    let _lines = keep_lines();
    // While these holders exist, no retirement ends that would allow an owner to destroy one of the contexts.
    let (mut contexts, touched) = all_contexts(engine);
    refuse_captures(engine, &contexts, once)?;
    let refuted = found_capturing(engine, &engine.lock());
    let mut retired = Vec::new();
    let mut unqueried = Vec::new();
    let bounds: Vec<(Batch, u64)> = {
        let mut heap = engine.lock();
        // The capture queries may have found a context destroyed, or made one distrusted.
        contexts.retain(|context| {
            let mut slots = heap.streams.iter().map(|(_, slot)| slot);
            let reachable = |slot: &Slot| heap.closed || slot.distrusted.is_none();
            context.id() == engine.context.id()
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
        unqueried.extend(&heap.graphs.unqueried);
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
            Err(error) if is_capture_refusal(error.code()) => Err(Error::Capturing { stream: 0 }),
            Err(error) if engine.is_unreachable(context, &error) => {
                if error.code() == CUresult::CUDA_ERROR_INVALID_HANDLE {
                    unanswered.push(context.id());
                }
                engine.error_in(context, error);
                Ok(())
            }
            Err(error) => Err(engine.error(error)),
        }
    });
    drop(span);
    drop(touched);
    let mut heap = engine.lock();
    for (batch, of) in &bounds {
        if waited.is_err() || unanswered.contains(of) {
            heap.streams.reopen_batch(batch);
        } else {
            heap.streams.mark_complete(batch.stream, batch.bound, &[]);
        }
    }
    waited?;
    for (stream, bound) in retired {
        heap.streams.mark_complete(stream, bound, &[]);
    }
    heap.streams.pool_unused_events();
    heap.complete_uses();
    let distrusted = heap.streams.iter().find_map(|(_, slot)| {
        let left_out = !heap.closed || unanswered.contains(&slot.context.id());
        slot.distrusted.filter(|_| left_out)
    });
    let done = match unqueried.is_empty() || distrusted.is_some() {
        true => Vec::new(),
        false => heap.graphs.completed(&unqueried),
    };
    drop(heap);
    drop(done);
    // The driver refuses to wait for a context with a capture, so these findings are outdated.
    for (_, number) in refuted {
        engine.driver().not_capturing(number);
    }
    match distrusted {
        Some(error) if once => Err(Error::Driver(error)),
        _ => Ok(()),
    }
}

/// Returns the contexts that a wait for everything includes: the allocator's own, and those of all streams that may
/// have work; distrusted ones only while the allocator is being closed. The owner of a stream of another context
/// may destroy that context after retiring the stream; the retirement waits until the returned holders are dropped.
fn all_contexts(engine: &Engine) -> (Vec<Context>, Vec<Holder>) {
    let mut contexts = vec![engine.context.clone()];
    let mut touched = Vec::new();
    let heap = engine.lock();
    for (_, slot) in heap.streams.iter() {
        let context = slot.context.id();
        if context == engine.context.id() || (slot.distrusted.is_some() && !heap.closed) {
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

/// Destroys the events of another context once its last stream has been retired.
pub(crate) fn destroy_events(engine: &Engine, context: &Context) {
    let key = context.id();
    let mut events = {
        let mut heap = engine.lock();
        let of_it = |(_, slot): (u32, &Slot)| slot.context.id() == key;
        let needed = key == engine.context.id() || heap.streams.iter().any(of_it);
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

/// Queries whether streams owned by this crate with captures in pools are still capturing.
pub(crate) fn review_captures(engine: &Engine) {
    let streams = engine.lock().graphs.capturing();
    for (capture, user) in streams {
        let StreamKey::Id(id) = user.key else {
            continue;
        };
        let own = engine.driver().owned_stream(id);
        if own.is_some_and(|own| matches!(own.is_capturing(), Ok(false))) {
            engine.lock().graphs.ended(capture);
        }
    }
}

/// Returns a stream of this crate whose capture uses pools, if there is one.
fn pool_capturing(engine: &Engine) -> Option<User> {
    review_captures(engine);
    let known = engine.lock().graphs.capturing();
    let mut known = known.into_iter().map(|(_, user)| user);
    known.find(|user| match user.key {
        StreamKey::Id(id) => engine.driver().owned_stream(id).is_some(),
        StreamKey::Handle(_) => false,
    })
}
