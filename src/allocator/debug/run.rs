//! Debug modes: guards past the end of blocks, poison, quarantine of freed blocks, and the list of leaked blocks.
//!
//! An allocator with any mode on has no caches, so each allocation and each free goes through this module. The table of
//! [`Debug`] is locked briefly, never across a driver call or a log line. While a capture is known no memory is
//! touched: a block freed then is not checked, and one in quarantine stays there.

use std::collections::BTreeMap;

use crate::allocator::cache::grant::Grant;
use crate::allocator::calls::record;
use crate::allocator::debug::{Debug, Freed, MAX_FINDINGS, Watched, print};
use crate::allocator::engine::Engine;
use crate::allocator::engine::contexts;
use crate::allocator::engine::naming::Named;
use crate::allocator::graph::run::allocate;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::Suspect;
use crate::block::Tag;
use crate::driver::{DriverError, Entered, Stream, process};
use crate::error::{Error, Finding, Misuse};
use crate::event::names;

/// Fill value of new and freed blocks, and of the guard past a live block.
const POISON: u8 = 0xDD;
const GUARD: u8 = 0xFD;
/// Bytes that one copy to the host reads.
const PART: u64 = 1 << 20;
/// Maximum number of lines in the list of live blocks.
const MAX_LINES: usize = 20;
/// Reason why a block is not checked.
const UNTOUCHABLE: &str = "a capture is in progress, or its memory is suspended";

impl Debug {
    pub(crate) fn with_guard(&self, request: &Checked) -> Result<Checked, Error> {
        match self.modes.guard {
            true => request.with_guard(),
            false => Ok(*request),
        }
    }

    /// [`allocate_missed`](Engine::allocate_missed) for an allocator with debug modes.
    #[cold]
    pub(crate) fn allocate(
        &self,
        engine: &Engine,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        let wide = self.with_guard(request)?;
        let make = || match allocate::allocate(engine, named, request, false)? {
            Some(pooled) => Ok((pooled, true)),
            None => Ok((engine.allocate_in_heap(named, &wide)?, false)),
        };
        let (grant, pooled) = match make() {
            Err(Error::OutOfMemory(_)) if self.release_quarantine(engine, 0) => make(),
            made => made,
        }?;
        // Graphs use pool blocks without a call of the allocator.
        if !pooled {
            self.watch(engine, &grant, named, request.requested);
        }
        Ok(grant)
    }

    /// Fills or reads memory, unless that would invalidate a capture or the memory is suspended.
    fn touch<R>(
        &self,
        engine: &Engine,
        (ptr, bytes): (u64, u64),
        run: impl FnOnce() -> R,
    ) -> Option<R> {
        let _touching = self.begin_touch();
        let there = !process::is_watching() && {
            let heap = engine.lock();
            !heap.is_suspended && heap.suspended.is_present(ptr, bytes)
        };
        there.then(run)
    }

    /// Prepares for a suspension, which the heap already knows about: waits until no memory is being filled or read,
    /// and releases the quarantine.
    pub(crate) fn pause(&self, engine: &Engine) {
        self.await_touches();
        self.release_quarantine(engine, 0);
    }

    /// Fills a new block and adds it to the table.
    pub(crate) fn watch(&self, engine: &Engine, grant: &Grant, named: &Named<'_>, requested: u64) {
        let (ptr, bytes) = (grant.ptr(), grant.bytes());
        let filled = stream_of(engine, named).and_then(|stream| {
            // SAFETY: the block was just allocated on the stream, and no other work uses it yet.
            self.touch(engine, (ptr, bytes), || unsafe {
                if self.modes.poison {
                    stream.memset(ptr, POISON, requested as usize)?;
                }
                match self.modes.guard {
                    true => stream.memset(ptr + requested, GUARD, (bytes - requested) as usize),
                    false => Ok(()),
                }
            })
        });
        if let Some(Err(error)) = &filled {
            log::warn!("cannot fill a new block: {error}");
        }
        let mut table = self.table();
        let watched = Watched {
            life: table.next_life(),
            requested,
            bytes,
            tag: Tag::NONE,
            context: names::context(),
            handle: named.raw as usize,
            guarded: self.modes.guard && matches!(filled, Some(Ok(()))),
            filled: false,
            queued: false,
        };
        let old = table.live.insert(ptr, watched);
        debug_assert!(old.is_none(), "a live block is handed out again");
    }

    /// Checks a live block before it is freed. After an error the block is live.
    #[cold]
    pub(crate) fn check_freed(&self, engine: &Engine, ptr: u64) -> Result<Freed, Error> {
        let Some(watched) = self.table().begin_free(ptr)? else {
            return Ok(Freed::Now);
        };
        let freed = self.check_held(engine, ptr, &watched);
        match freed {
            Ok(Freed::Now) => self.table().end_free(ptr),
            Ok(Freed::Later) => {
                self.table().quarantine(ptr, false);
                self.release_quarantine(engine, self.modes.quarantine);
            }
            Err(_) => self.table().undo_free(ptr),
        }
        freed
    }

    /// [`check_freed`](Self::check_freed) for a block whose free has begun in the table.
    fn check_held(&self, engine: &Engine, ptr: u64, watched: &Watched) -> Result<Freed, Error> {
        let users = users_of(engine, ptr);
        refuse_captures_of(engine, &users)?;
        if self.table().is_read(ptr) {
            return Ok(Freed::Later);
        }
        let checked = match process::is_watching() {
            true => Ok(false),
            false => {
                let waited = wait_for_users(engine, &users);
                waited.and_then(|()| self.inspect_freed(engine, ptr, watched))
            }
        };
        match checked {
            Ok(true) if self.modes.quarantine > 0 && !engine.lock().orphaned => {
                return Ok(Freed::Later);
            }
            Ok(true) => {}
            Ok(false) => self.count_unchecked(&UNTOUCHABLE),
            Err(error @ (Error::ContextLost(_) | Error::Capturing { .. })) => return Err(error),
            Err(error) => self.count_unchecked(&error),
        }
        self.record_own_stream(engine, ptr)?;
        Ok(Freed::Now)
    }

    /// Checks the guard of a freed block that no stream uses any more, and fills the block. Returns false if its memory
    /// must not be touched now.
    fn inspect_freed(&self, engine: &Engine, ptr: u64, watched: &Watched) -> Result<bool, Error> {
        let whole = (ptr, watched.bytes);
        let looked = self.touch(engine, whole, || self.find_overrun(engine, ptr, watched));
        let Some(finding) = looked.transpose()? else {
            return Ok(false);
        };
        if let Some(finding) = finding {
            self.found(finding);
        }
        if !self.modes.poison && self.modes.quarantine == 0 {
            return Ok(true);
        }
        let filled = self.touch(engine, whole, || {
            self.run(engine, ptr, |stream| {
                // SAFETY: the heap counts the block as live until its free ends, and all known uses of it are complete.
                unsafe { stream.memset(ptr, POISON, watched.bytes as usize) }
            })
        });
        let filled = filled.transpose()?.is_some();
        if let Some(watched) = self.table().get_mut(ptr) {
            watched.filled = filled;
        }
        Ok(filled)
    }

    /// Returns the damage to the guard of a block that no stream uses now.
    fn find_overrun(
        &self,
        engine: &Engine,
        ptr: u64,
        watched: &Watched,
    ) -> Result<Option<Finding>, Error> {
        if !watched.guarded {
            return Ok(None);
        }
        let guard = (watched.requested, watched.bytes);
        let wrong = self.find_mismatch(engine, ptr, guard, GUARD)?;
        Ok(wrong.map(|offset| watched.finding(Misuse::Overrun, ptr, offset)))
    }

    /// Returns the first byte of a range of a block that differs from the fill value.
    fn find_mismatch(
        &self,
        engine: &Engine,
        ptr: u64,
        (from, to): (u64, u64),
        byte: u8,
    ) -> Result<Option<u64>, Error> {
        let entered = engine
            .context
            .enter()
            .map_err(|error| engine.error(error))?;
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(PART) as usize;
            let mut copy = vec![0; bytes];
            let into = copy.as_mut_ptr();
            let read = self.run(engine, ptr, |stream| {
                // SAFETY: the heap counts the block as live, and the host memory is kept until the copy is complete.
                unsafe { entered.copy_device_to_host(into.cast(), ptr + at, bytes, stream.raw()) }
            });
            if let Err(error) = read {
                // The copy may still be running.
                std::mem::forget(copy);
                return Err(error);
            }
            if let Some(wrong) = copy.iter().position(|found| *found != byte) {
                return Ok(Some(at + wrong as u64));
            }
            at += bytes as u64;
        }
        Ok(None)
    }

    /// Submits work on a block to the debug stream and waits for it. If the wait fails, the work may still be queued,
    /// so the block counts as used by the debug stream from then on.
    fn run(
        &self,
        engine: &Engine,
        ptr: u64,
        submit: impl FnOnce(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let stream = self.own_stream(engine)?;
        submit(stream)
            .and_then(|()| stream.synchronize())
            .map_err(|error| {
                if let Some(watched) = self.table().get_mut(ptr) {
                    watched.queued = true;
                }
                engine.error(error)
            })
    }

    fn own_stream(&self, engine: &Engine) -> Result<&Stream, Error> {
        if let Some(stream) = self.stream.get() {
            return Ok(stream);
        }
        let made = Stream::new(&engine.context).map_err(|error| engine.error(error))?;
        Ok(self.stream.get_or_init(|| made))
    }

    /// Records the debug stream on a block before the block returns to the heap, if work of that stream may still be
    /// queued.
    fn record_own_stream(&self, engine: &Engine, ptr: u64) -> Result<(), Error> {
        let queued = self.table().get_mut(ptr).is_some_and(|block| block.queued);
        match self.stream.get() {
            Some(stream) if queued => record::use_by(engine, ptr, &engine.named(stream)?, false),
            _ => Ok(()),
        }
    }

    /// Checks and frees the oldest blocks in quarantine until at most `keep` bytes are in it. Returns whether any was
    /// freed.
    ///
    /// A block that must not be read now stays, unless all blocks must leave (`keep` is 0): then it counts as
    /// unchecked.
    pub(crate) fn release_quarantine(&self, engine: &Engine, keep: u64) -> bool {
        if engine.usable().is_err() {
            return false;
        }
        let mut any = false;
        // Visits each block once: a block that cannot be freed now is put back.
        let count = self.table().quarantined();
        for _ in 0..count {
            let Some((ptr, watched)) = self.table().take_from_quarantine(keep) else {
                break;
            };
            let whole = (0, watched.bytes);
            let looked = self.touch(engine, (ptr, watched.bytes), || match watched.filled {
                true => self.find_mismatch(engine, ptr, whole, POISON).map(Some),
                false => Ok(None),
            });
            match looked {
                None if keep > 0 => {
                    self.table().quarantine(ptr, true);
                    break;
                }
                None => self.count_unchecked(&UNTOUCHABLE),
                Some(Ok(None)) => self.count_unchecked(&"it was freed while `check` read it"),
                Some(Ok(Some(None))) => {}
                Some(Ok(Some(Some(offset)))) => {
                    self.found(watched.finding(Misuse::UseAfterFree, ptr, offset));
                }
                Some(Err(error)) => self.count_unchecked(&error),
            }
            let freed = self.record_own_stream(engine, ptr).and_then(|()| {
                self.table().end_free(ptr);
                engine.free(ptr, None)
            });
            match freed {
                Ok(()) => any = true,
                Err(Error::NotLive { .. }) => {}
                Err(error) => {
                    log::warn!("cannot free a block from the quarantine, retrying later: {error}");
                    // The program has no handle to the block any more, so a later call tries again.
                    self.table().return_held(ptr, watched);
                }
            }
        }
        any
    }

    /// Checks the guards of all live blocks.
    pub(crate) fn check_guards(&self, engine: &Engine) -> Result<(), Error> {
        if engine.usable().is_err() {
            return Ok(());
        }
        if !self.modes.guard || process::is_watching() {
            return Ok(());
        }
        let mut next = 0;
        loop {
            let (ptr, watched) = {
                let table = self.table();
                let Some((ptr, watched)) = table.live.range(next..).next() else {
                    return Ok(());
                };
                (*ptr, *watched)
            };
            next = ptr + 1;
            let users = users_of(engine, ptr);
            refuse_captures_of(engine, &users)?;
            wait_for_users(engine, &users)?;
            // The block may have been freed meanwhile, and another block may have its address.
            if !self.table().begin_read(ptr, watched.life) {
                continue;
            }
            let looked = self.touch(engine, (ptr, watched.bytes), || {
                self.find_overrun(engine, ptr, &watched)
            });
            let freed = self.table().end_read(ptr);
            if freed {
                self.release_quarantine(engine, self.modes.quarantine);
            }
            if let Some(finding) = looked.transpose()?.flatten() {
                self.found(finding.clone());
                return Err(Error::Misused(Box::new(finding)));
            }
        }
    }

    /// Lists the blocks that are live when the allocator ends.
    pub(crate) fn report_leaks(&self, engine: &Engine) {
        if !self.modes.leaks {
            return;
        }
        let mut sums: BTreeMap<(&'static str, Option<String>), (u64, u64)> = BTreeMap::new();
        let leaks: Vec<Finding> = {
            let table = self.table();
            let live = table.live.iter();
            live.map(|(ptr, watched)| watched.finding(Misuse::Leak, *ptr, 0))
                .collect()
        };
        if leaks.is_empty() {
            return;
        }
        for leak in &leaks {
            let sum = sums.entry((leak.tag, leak.context.clone())).or_default();
            *sum = (sum.0 + 1, sum.1 + leak.requested);
        }
        let mut lines: Vec<_> = sums.into_iter().collect();
        lines.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
        let bytes: u64 = leaks.iter().map(|leak| leak.requested).sum();
        let mut text = format!(
            "allocator {}: {} blocks of {bytes} bytes are live at its end",
            engine.id,
            leaks.len()
        );
        for ((tag, context), (blocks, bytes)) in lines.iter().take(MAX_LINES) {
            let context = context.as_deref().unwrap_or("none");
            text += &format!("\n  {blocks} blocks, {bytes} bytes: tag {tag}, context {context}");
        }
        if lines.len() > MAX_LINES {
            text += &format!(
                "\n  and {} other tags and contexts",
                lines.len() - MAX_LINES
            );
        }
        print(&text);
        let mut table = self.table();
        // The list of an earlier `close` is outdated.
        table
            .findings
            .retain(|finding| finding.misuse != Misuse::Leak);
        let room = MAX_FINDINGS.saturating_sub(table.findings.len());
        table.findings.extend(leaks.into_iter().take(room));
    }
}

/// Returns the stream that a call names, for the duration of the call.
fn stream_of(engine: &Engine, named: &Named<'_>) -> Option<Stream> {
    if let Some(stream) = named.stream {
        return Some(stream.clone());
    }
    let context = engine.context_of(named).ok()?;
    // SAFETY: the caller guarantees that the stream it named is valid for the call, and the result does not outlive
    // the call.
    unsafe { Stream::from_raw(&context, named.raw) }.ok()
}

/// Returns the streams that use a live block, its own first.
fn users_of(engine: &Engine, ptr: u64) -> Vec<u32> {
    let heap = engine.lock();
    let Some(id) = heap.extents.lookup.exact(ptr) else {
        return Vec::new();
    };
    let recorded = heap.extents.records.cold(id).recorded().iter();
    let own = std::iter::once(heap.extents.records[id].stream);
    own.chain(recorded.map(|used| used.stream)).collect()
}

/// Returns a stream's handle, valid while the result is held, because the stream cannot be retired meanwhile. Hold
/// it across single driver calls only. `None` if this thread cannot name the stream, or the stream was retired.
fn hold_stream(engine: &Engine, stream: u32) -> Option<Suspect> {
    engine.lock().streams[stream].suspect()
}

fn refuse_captures_of(engine: &Engine, users: &[u32]) -> Result<(), Error> {
    let mut held = users
        .iter()
        .filter_map(|stream| hold_stream(engine, *stream));
    held.try_for_each(|stream| engine.refuse_if_capturing(&stream))
}

/// Waits for the streams that use a block, and for whole contexts if one of the streams can no longer be named.
fn wait_for_users(engine: &Engine, users: &[u32]) -> Result<(), Error> {
    let mut unnamed = false;
    for stream in users {
        let Some(held) = hold_stream(engine, *stream) else {
            unnamed = true;
            continue;
        };
        let context = held.context.clone();
        let handle = std::ptr::with_exposed_provenance_mut(held.raw);
        // SAFETY: the stream is alive while it is held; a default stream is named in its context.
        let wait = |entered: Entered<'_>| unsafe { entered.stream_synchronize(handle) };
        let waited = context.enter().and_then(wait);
        drop(held);
        waited.map_err(|error| engine.error_in(&context, error))?;
    }
    match unnamed {
        true => contexts::synchronise(engine, true),
        false => Ok(()),
    }
}
