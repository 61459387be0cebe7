//! Debug modes: guards past the end of blocks, poison, quarantine of freed blocks, and the list of leaked blocks.
//!
//! An allocator with any mode on has no caches, so each allocation and each free goes through this module. The table of
//! [`Debug`] is locked briefly, never across a driver call or a log line. While a capture is known no memory is
//! touched: a block freed then is not checked, and one in quarantine stays there.

use std::collections::BTreeMap;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::debug_table::{Debug, MAX_FINDINGS, Watched, say};
use crate::allocator::engine::naming::Named;
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

/// Where a freed block goes.
pub(crate) enum Freed {
    /// To the heap.
    Now,
    /// To the quarantine, and later to the heap.
    Later,
}

impl Engine {
    /// Returns the request, enlarged by a guard if guards are on.
    pub(crate) fn with_guard(&self, request: &Checked) -> Result<Checked, Error> {
        match &self.debug {
            Some(debug) if debug.modes.guard => request.with_guard(),
            _ => Ok(*request),
        }
    }

    /// [`allocate_missed`](Self::allocate_missed) for an allocator with debug modes.
    #[cold]
    pub(crate) fn allocate_watched(
        &self,
        debug: &Debug,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        let wide = self.with_guard(request)?;
        let make = || match self.allocate_scoped(named, request)? {
            Some(pooled) => Ok((pooled, true)),
            None => Ok((self.allocate_in_heap(named, &wide, false)?, false)),
        };
        let (grant, pooled) = match make() {
            Err(Error::OutOfMemory(_)) if self.release_quarantine(0) => make(),
            made => made,
        }?;
        // Graphs use pool blocks without a call of the allocator.
        if !pooled {
            self.watch_block(debug, &grant, named, request.requested);
        }
        Ok(grant)
    }

    /// Fills or reads memory, unless that would invalidate a capture or the memory is suspended.
    fn touch<R>(
        &self,
        debug: &Debug,
        (ptr, bytes): (u64, u64),
        run: impl FnOnce() -> R,
    ) -> Option<R> {
        let _touching = debug.begin_touch();
        let there = !process::is_watching() && self.lock().suspended.leaves(ptr, bytes);
        there.then(run)
    }

    /// Prepares for a suspension, which the heap already knows about: waits until no memory is being filled or read,
    /// and releases the quarantine.
    pub(crate) fn stop_debugging(&self) {
        if let Some(debug) = &self.debug {
            debug.await_touches();
            self.release_quarantine(0);
        }
    }

    /// Records that the contents of suspended memory are lost.
    pub(crate) fn lose_guards(&self) {
        if let Some(debug) = &self.debug {
            debug.lose_guards();
        }
    }

    /// Fills a new block and adds it to the table.
    pub(crate) fn watch_block(
        &self,
        debug: &Debug,
        grant: &Grant,
        named: &Named<'_>,
        requested: u64,
    ) {
        let (ptr, bytes) = (grant.ptr(), grant.bytes());
        let filled = self.stream_of(named).and_then(|stream| {
            // SAFETY: the block was just allocated on the stream, and no other work uses it yet.
            self.touch(debug, (ptr, bytes), || unsafe {
                if debug.modes.poison {
                    stream.memset(ptr, POISON, requested as usize)?;
                }
                match debug.modes.guard {
                    true => stream.memset(ptr + requested, GUARD, (bytes - requested) as usize),
                    false => Ok(()),
                }
            })
        });
        if let Some(Err(error)) = &filled {
            log::warn!("a new block cannot be filled: {error}");
        }
        let mut table = debug.table();
        let watched = Watched {
            life: table.next_life(),
            requested,
            bytes,
            tag: Tag::NONE,
            context: names::context(),
            handle: named.raw as usize,
            guarded: debug.modes.guard && matches!(filled, Some(Ok(()))),
            filled: false,
            queued: false,
        };
        let old = table.live.insert(ptr, watched);
        debug_assert!(old.is_none(), "a live block is handed out again");
    }

    /// Returns the stream that a call names, for the duration of the call.
    fn stream_of(&self, named: &Named<'_>) -> Option<Stream> {
        if let Some(stream) = named.stream {
            return Some(stream.clone());
        }
        let context = self.context_of(named).ok()?;
        // SAFETY: the caller guarantees that the stream it named is valid for the call, and the result does not outlive
        // the call.
        unsafe { Stream::from_raw(&context, named.raw) }.ok()
    }

    /// Checks a live block before it is freed. After an error the block is live.
    #[cold]
    pub(crate) fn check_freed(&self, debug: &Debug, ptr: u64) -> Result<Freed, Error> {
        let Some(watched) = debug.table().begin_free(ptr)? else {
            return Ok(Freed::Now);
        };
        let freed = self.check_held(debug, ptr, &watched);
        match freed {
            Ok(Freed::Now) => debug.table().end_free(ptr),
            Ok(Freed::Later) => {
                debug.table().quarantine(ptr, false);
                self.release_quarantine(debug.modes.quarantine);
            }
            Err(_) => debug.table().undo_free(ptr),
        }
        freed
    }

    /// [`check_freed`](Self::check_freed) for a block whose free has begun in the table.
    fn check_held(&self, debug: &Debug, ptr: u64, watched: &Watched) -> Result<Freed, Error> {
        let users = self.users_of(ptr);
        self.refuse_captures_of(&users)?;
        if debug.table().is_read(ptr) {
            return Ok(Freed::Later);
        }
        let checked = match process::is_watching() {
            true => Ok(false),
            false => {
                let waited = self.wait_for_users(&users);
                waited.and_then(|()| self.inspect_freed(debug, ptr, watched))
            }
        };
        match checked {
            Ok(true) if debug.modes.quarantine > 0 && !self.lock().orphaned => {
                return Ok(Freed::Later);
            }
            Ok(true) => {}
            Ok(false) => debug.count_unchecked(&UNTOUCHABLE),
            Err(error @ (Error::ContextLost(_) | Error::Capturing { .. })) => return Err(error),
            Err(error) => debug.count_unchecked(&error),
        }
        self.record_debug_stream(debug, ptr)?;
        Ok(Freed::Now)
    }

    /// Returns the streams that use a live block, its own first.
    fn users_of(&self, ptr: u64) -> Vec<u32> {
        let heap = self.lock();
        let Some(id) = heap.extents.lookup.exact(ptr) else {
            return Vec::new();
        };
        let recorded = heap.extents.records.cold(id).recorded().iter();
        let own = std::iter::once(heap.extents.records[id].stream);
        own.chain(recorded.map(|used| used.stream)).collect()
    }

    /// Returns a stream's handle, valid while the result is held, because the stream cannot be retired meanwhile. Hold
    /// it across single driver calls only. `None` if this thread cannot name the stream, or the stream was retired.
    fn hold_stream(&self, stream: u32) -> Option<Suspect> {
        self.lock().streams[stream].suspect()
    }

    fn refuse_captures_of(&self, users: &[u32]) -> Result<(), Error> {
        let mut held = users.iter().filter_map(|stream| self.hold_stream(*stream));
        held.try_for_each(|stream| self.refuse_if_capturing(&stream))
    }

    /// Waits for the streams that use a block, and for whole contexts if one of the streams can no longer be named.
    fn wait_for_users(&self, users: &[u32]) -> Result<(), Error> {
        let mut unnamed = false;
        for stream in users {
            let Some(held) = self.hold_stream(*stream) else {
                unnamed = true;
                continue;
            };
            let context = held.context.clone();
            let handle = std::ptr::with_exposed_provenance_mut(held.raw);
            // SAFETY: the stream is alive while it is held; a default stream is named in its context.
            let wait = |entered: Entered<'_>| unsafe { entered.stream_synchronize(handle) };
            let waited = context.enter().and_then(wait);
            drop(held);
            waited.map_err(|error| self.error_in(&context, error))?;
        }
        match unnamed {
            true => self.synchronise(true),
            false => Ok(()),
        }
    }

    /// Checks the guard of a freed block that no stream uses any more, and fills the block. Returns false if its memory
    /// must not be touched now.
    fn inspect_freed(&self, debug: &Debug, ptr: u64, watched: &Watched) -> Result<bool, Error> {
        let whole = (ptr, watched.bytes);
        let looked = self.touch(debug, whole, || self.overrun(debug, ptr, watched));
        let Some(finding) = looked.transpose()? else {
            return Ok(false);
        };
        if let Some(finding) = finding {
            debug.found(finding);
        }
        if !debug.modes.poison && debug.modes.quarantine == 0 {
            return Ok(true);
        }
        let filled = self.touch(debug, whole, || {
            self.run_on_debug_stream(debug, ptr, |stream| {
                // SAFETY: the heap counts the block as live until its free ends, and all known uses of it are complete.
                unsafe { stream.memset(ptr, POISON, watched.bytes as usize) }
            })
        });
        let filled = filled.transpose()?.is_some();
        if let Some(watched) = debug.table().get_mut(ptr) {
            watched.filled = filled;
        }
        Ok(filled)
    }

    /// Returns the damage to the guard of a block that no stream uses now.
    fn overrun(
        &self,
        debug: &Debug,
        ptr: u64,
        watched: &Watched,
    ) -> Result<Option<Finding>, Error> {
        if !watched.guarded {
            return Ok(None);
        }
        let guard = (watched.requested, watched.bytes);
        let wrong = self.first_unlike(debug, ptr, guard, GUARD)?;
        Ok(wrong.map(|offset| watched.finding(Misuse::Overrun, ptr, offset)))
    }

    /// Returns the first byte of a range of a block that differs from the fill value.
    fn first_unlike(
        &self,
        debug: &Debug,
        ptr: u64,
        (from, to): (u64, u64),
        byte: u8,
    ) -> Result<Option<u64>, Error> {
        let entered = self.context.enter().map_err(|error| self.error(error))?;
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(PART) as usize;
            let mut copy = vec![0; bytes];
            let into = copy.as_mut_ptr();
            let read = self.run_on_debug_stream(debug, ptr, |stream| {
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
    fn run_on_debug_stream(
        &self,
        debug: &Debug,
        ptr: u64,
        submit: impl FnOnce(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let stream = self.debug_stream(debug)?;
        submit(stream)
            .and_then(|()| stream.synchronize())
            .map_err(|error| {
                if let Some(watched) = debug.table().get_mut(ptr) {
                    watched.queued = true;
                }
                self.error(error)
            })
    }

    fn debug_stream<'a>(&self, debug: &'a Debug) -> Result<&'a Stream, Error> {
        if let Some(stream) = debug.stream.get() {
            return Ok(stream);
        }
        let made = Stream::new(&self.context).map_err(|error| self.error(error))?;
        Ok(debug.stream.get_or_init(|| made))
    }

    /// Records the debug stream on a block before the block returns to the heap, if work of that stream may still be
    /// queued.
    fn record_debug_stream(&self, debug: &Debug, ptr: u64) -> Result<(), Error> {
        let queued = debug.table().get_mut(ptr).is_some_and(|block| block.queued);
        match debug.stream.get() {
            Some(stream) if queued => self.record(ptr, &self.named(stream)?, false),
            _ => Ok(()),
        }
    }

    /// Checks and frees the oldest blocks in quarantine until at most `keep` bytes are in it. Returns whether any was
    /// freed.
    ///
    /// A block that must not be read now stays, unless all blocks must leave (`keep` is 0): then it counts as
    /// unchecked.
    pub(crate) fn release_quarantine(&self, keep: u64) -> bool {
        let Some(debug) = self.debug.as_ref().filter(|_| self.usable().is_ok()) else {
            return false;
        };
        let mut any = false;
        // Visits each block once: a block that cannot be freed now is put back.
        let count = debug.table().quarantined();
        for _ in 0..count {
            let Some((ptr, watched)) = debug.table().leave_quarantine(keep) else {
                break;
            };
            let whole = (0, watched.bytes);
            let looked = self.touch(debug, (ptr, watched.bytes), || match watched.filled {
                true => self.first_unlike(debug, ptr, whole, POISON).map(Some),
                false => Ok(None),
            });
            match looked {
                None if keep > 0 => {
                    debug.table().quarantine(ptr, true);
                    break;
                }
                None => debug.count_unchecked(&UNTOUCHABLE),
                Some(Ok(None)) => debug.count_unchecked(&"it was freed while `check` read it"),
                Some(Ok(Some(None))) => {}
                Some(Ok(Some(Some(offset)))) => {
                    debug.found(watched.finding(Misuse::UseAfterFree, ptr, offset));
                }
                Some(Err(error)) => debug.count_unchecked(&error),
            }
            let freed = self.record_debug_stream(debug, ptr).and_then(|()| {
                debug.table().end_free(ptr);
                self.free_at(ptr)
            });
            match freed {
                Ok(()) => any = true,
                Err(Error::NotLive { .. }) => {}
                Err(error) => {
                    log::warn!("a block that was held back is not freed: {error}");
                    // The program has no handle to the block any more, so a later call tries again.
                    debug.table().hold_again(ptr, watched);
                }
            }
        }
        any
    }

    /// Checks the guards of all live blocks.
    pub(crate) fn check_guards(&self) -> Result<(), Error> {
        let Some(debug) = self.debug.as_ref().filter(|_| self.usable().is_ok()) else {
            return Ok(());
        };
        if !debug.modes.guard || process::is_watching() {
            return Ok(());
        }
        let mut next = 0;
        loop {
            let (ptr, watched) = {
                let table = debug.table();
                let Some((ptr, watched)) = table.live.range(next..).next() else {
                    return Ok(());
                };
                (*ptr, *watched)
            };
            next = ptr + 1;
            let users = self.users_of(ptr);
            self.refuse_captures_of(&users)?;
            self.wait_for_users(&users)?;
            // The block may have been freed meanwhile, and another block may have its address.
            if !debug.table().begin_read(ptr, watched.life) {
                continue;
            }
            let looked = self.touch(debug, (ptr, watched.bytes), || {
                self.overrun(debug, ptr, &watched)
            });
            let freed = debug.table().end_read(ptr);
            if freed {
                self.release_quarantine(debug.modes.quarantine);
            }
            if let Some(finding) = looked.transpose()?.flatten() {
                debug.found(finding.clone());
                return Err(Error::Misused(Box::new(finding)));
            }
        }
    }

    /// Lists the blocks that are live when the allocator ends.
    pub(crate) fn report_leaks(&self) {
        let Some(debug) = self.debug.as_ref().filter(|debug| debug.modes.leaks) else {
            return;
        };
        let mut sums: BTreeMap<(&'static str, Option<String>), (u64, u64)> = BTreeMap::new();
        let leaks: Vec<Finding> = {
            let table = debug.table();
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
            self.id,
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
        say(&text);
        let mut table = debug.table();
        // The list of an earlier `close` is outdated.
        table
            .findings
            .retain(|finding| finding.misuse != Misuse::Leak);
        let room = MAX_FINDINGS.saturating_sub(table.findings.len());
        table.findings.extend(leaks.into_iter().take(room));
    }
}
