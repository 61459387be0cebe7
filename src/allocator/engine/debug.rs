//! Debug modes: guards behind blocks, poison, quarantine of freed blocks, and the list of those that are left.
//!
//! An allocator with any mode on has no caches, so that each block and each free comes by here. No driver call is made
//! under the lock of [`Debug`], and none at all while a capture is known: blocks of that time are not checked.

use std::collections::BTreeMap;

use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::debug_table::{Debug, MOST_FINDINGS, Watched, say};
use crate::allocator::engine::naming::Named;
use crate::allocator::heap::request::Checked;
use crate::block::Tag;
use crate::driver::{Stream, StreamKind, process};
use crate::error::{Error, Finding, Misuse};
use crate::event::names;

/// What new and freed blocks are filled with, and what stands behind live ones.
const POISON: u8 = 0xDD;
const GUARD: u8 = 0xFD;
/// Bytes that are copied to the host at once.
const PART: u64 = 1 << 20;
/// Most lines of a list of live blocks.
const MOST_LINES: usize = 20;

/// What is left to do for a free.
pub(crate) enum Checkup {
    /// The block goes to the heap.
    Done,
    /// It is held back.
    Held,
}

impl Engine {
    /// The request, with room for a guard if there are any.
    pub(crate) fn with_guard(&self, request: &Checked) -> Result<Checked, Error> {
        match &self.debug {
            Some(debug) if debug.modes.guard => request.with_guard(),
            _ => Ok(*request),
        }
    }

    /// [`allocate_missed`](Self::allocate_missed) of an allocator with debug modes.
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
        // Graphs use blocks of pools when nobody looks.
        if !pooled {
            self.watch_block(debug, &grant, named, request.requested);
        }
        Ok(grant)
    }

    /// Fills or reads memory, unless that would spoil a capture or the memory is suspended.
    fn touch<R>(
        &self,
        debug: &Debug,
        (ptr, bytes): (u64, u64),
        run: impl FnOnce() -> R,
    ) -> Option<R> {
        let _touching = debug.touching();
        let there = !process::is_watching() && self.lock().suspended.leaves(ptr, bytes);
        there.then(run)
    }

    /// Memory is about to be suspended: nothing is filled or read any more, nor held back.
    pub(crate) fn stop_debugging(&self) {
        if let Some(debug) = &self.debug {
            drop(debug.untouched());
            self.release_quarantine(0);
        }
    }

    /// The contents of suspended memory are lost: of one stream's, or of all.
    pub(crate) fn lose_guards(&self, stream: Option<u64>) {
        if let Some(debug) = &self.debug {
            debug.lose_guards(stream);
        }
    }

    /// A block was made: fills it, and enters it in the table.
    pub(crate) fn watch_block(
        &self,
        debug: &Debug,
        grant: &Grant,
        named: &Named<'_>,
        requested: u64,
    ) {
        let (ptr, bytes) = (grant.ptr(), grant.bytes());
        // A block without a way to wait for its stream waits for everything.
        let stream = self.stream_of(named);
        let filled = stream.as_ref().and_then(|stream| {
            // SAFETY: the block was just given to the stream, and nobody has it yet.
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
        let guarded = debug.modes.guard && matches!(filled, Some(Ok(())));
        let mine = stream.filter(|stream| self.lasts(stream));
        let mut table = debug.table();
        let watched = Watched {
            life: table.next_life(),
            requested,
            bytes,
            tag: Tag::NONE,
            context: names::context(),
            handle: named.raw as usize,
            everything: mine.is_none(),
            users: mine.map(|stream| (named.key, stream)).into_iter().collect(),
            guarded,
        };
        let old = table.live.insert(ptr, watched);
        drop(table);
        debug_assert!(old.is_none(), "a live block is handed out again");
        // What goes with it is dropped outside the lock.
        drop(old);
    }

    /// Another stream uses the block around an address.
    #[cold]
    pub(crate) fn watch_use(&self, debug: &Debug, ptr: u64, named: &Named<'_>) {
        let stream = self.stream_of(named);
        let stream = stream.filter(|stream| self.lasts(stream));
        let mut table = debug.table();
        let Some((at, watched)) = table.live.range_mut(..=ptr).next_back() else {
            return;
        };
        if ptr - at >= watched.bytes || watched.users.iter().any(|(key, _)| *key == named.key) {
            return;
        }
        watched.everything |= stream.is_none();
        watched
            .users
            .extend(stream.map(|stream| (named.key, stream)));
    }

    /// The stream that a call names, for the time of the call.
    fn stream_of(&self, named: &Named<'_>) -> Option<Stream> {
        if let Some(stream) = named.stream {
            return Some(stream.clone());
        }
        let context = self.context_of(named).ok()?;
        // SAFETY: whoever made the name vouched for the stream, which is alive until it is retired, and given away with
        // the call where nobody promises that.
        unsafe { Stream::from_raw(&context, named.raw) }.ok()
    }

    /// Whether a stream's handle means that stream until it is retired.
    fn lasts(&self, stream: &Stream) -> bool {
        match stream.kind() {
            StreamKind::Owned | StreamKind::LegacyDefault => true,
            StreamKind::PerThreadDefault => false,
            StreamKind::Borrowed => !self.unretired,
        }
    }

    /// Looks at a live block that is about to be freed. After an error the block is live.
    #[cold]
    pub(crate) fn check_up(&self, debug: &Debug, ptr: u64) -> Result<Checkup, Error> {
        // One of two threads that free it has it.
        let Some(watched) = debug.take_live(ptr) else {
            return Ok(Checkup::Done);
        };
        if let Err(error) = self.refuse_captures_of(&watched) {
            debug.table().live.insert(ptr, watched);
            return Err(error);
        }
        if process::is_watching() {
            return Ok(Checkup::Done);
        }
        match self.retire_block(debug, ptr, &watched) {
            Ok(true) => {}
            Ok(false) => return Ok(Checkup::Done),
            Err(error @ (Error::ContextLost(_) | Error::Capturing { .. })) => {
                debug.table().live.insert(ptr, watched);
                return Err(error);
            }
            Err(error) => {
                log::warn!("a freed block cannot be checked: {error}");
                return Ok(Checkup::Done);
            }
        }
        if debug.modes.quarantine == 0 || self.lock().orphaned {
            return Ok(Checkup::Done);
        }
        debug.table().hold(ptr, watched);
        self.release_quarantine(debug.modes.quarantine);
        Ok(Checkup::Held)
    }

    fn refuse_captures_of(&self, watched: &Watched) -> Result<(), Error> {
        watched.users.iter().try_for_each(|(key, stream)| {
            self.refuse_capture(&Named {
                key: *key,
                raw: stream.raw(),
                stream: Some(stream),
            })
        })
    }

    /// Waits for the uses that are known.
    fn wait_for_users(&self, watched: &Watched) -> Result<(), Error> {
        if watched.everything {
            self.synchronise(true)?;
        }
        let mut users = watched.users.iter();
        users
            .try_for_each(|(_, stream)| stream.synchronize())
            .map_err(|error| self.error(error))
    }

    /// Checks what is behind a block that nobody uses any more, and fills it. False if it cannot be touched now.
    fn retire_block(&self, debug: &Debug, ptr: u64, watched: &Watched) -> Result<bool, Error> {
        self.wait_for_users(watched)?;
        let looked = self.touch(debug, (ptr, watched.bytes), || -> Result<_, Error> {
            let finding = self.overrun(debug, ptr, watched)?;
            if debug.modes.poison || debug.modes.quarantine > 0 {
                let stream = self.debug_stream(debug)?;
                // SAFETY: the block is live, and all known uses of it are over.
                unsafe { stream.memset(ptr, POISON, watched.bytes as usize) }
                    .and_then(|()| stream.synchronize())
                    .map_err(|error| self.error(error))?;
            }
            Ok(finding)
        });
        let Some(finding) = looked.transpose()? else {
            return Ok(false);
        };
        if let Some(finding) = finding {
            debug.found(finding);
        }
        Ok(true)
    }

    /// What is wrong behind a block, all uses of which are over.
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

    /// The first of these bytes of a block that is not the one that was filled in.
    fn first_unlike(
        &self,
        debug: &Debug,
        ptr: u64,
        (from, to): (u64, u64),
        byte: u8,
    ) -> Result<Option<u64>, Error> {
        let stream = self.debug_stream(debug)?;
        let entered = self.context.enter().map_err(|error| self.error(error))?;
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(PART) as usize;
            let mut copy = vec![0; bytes];
            // SAFETY: the block is live, and the host's memory is kept until the copy is over.
            let copied = unsafe {
                entered.copy_device_to_host(copy.as_mut_ptr().cast(), ptr + at, bytes, stream.raw())
            };
            if let Err(error) = copied.and(stream.synchronize()) {
                // The copy may still be under way.
                std::mem::forget(copy);
                return Err(self.error(error));
            }
            if let Some(wrong) = copy.iter().position(|found| *found != byte) {
                return Ok(Some(at + wrong as u64));
            }
            at += bytes as u64;
        }
        Ok(None)
    }

    fn debug_stream<'a>(&self, debug: &'a Debug) -> Result<&'a Stream, Error> {
        if let Some(stream) = debug.stream.get() {
            return Ok(stream);
        }
        let made = Stream::new(&self.context).map_err(|error| self.error(error))?;
        Ok(debug.stream.get_or_init(|| made))
    }

    /// Lets blocks go, the oldest first, until no more than so many bytes are held back; whether any went.
    pub(crate) fn release_quarantine(&self, keep: u64) -> bool {
        let Some(debug) = self.debug.as_ref().filter(|_| self.usable().is_ok()) else {
            return false;
        };
        let out: Vec<_> = {
            let mut table = debug.table();
            std::iter::from_fn(|| table.let_go(keep)).collect()
        };
        let mut any = false;
        for (ptr, watched) in out {
            let whole = (0, watched.bytes);
            let looked = self.touch(debug, (ptr, watched.bytes), || {
                self.first_unlike(debug, ptr, whole, POISON)
            });
            match looked {
                None | Some(Ok(None)) => {}
                Some(Ok(Some(offset))) => {
                    debug.found(watched.finding(Misuse::UseAfterFree, ptr, offset));
                }
                Some(Err(error)) => log::warn!("a freed block cannot be checked: {error}"),
            }
            match self.free_at(ptr) {
                Ok(()) => any = true,
                Err(error) => {
                    log::warn!("a block that was held back is not freed: {error}");
                    if !matches!(error, Error::NotLive { .. }) {
                        // Nobody else knows of it: it is tried again.
                        debug.table().hold(ptr, watched);
                    }
                }
            }
        }
        any
    }

    /// Checks what is behind all live blocks.
    pub(crate) fn check_guards(&self) -> Result<(), Error> {
        let Some(debug) = self.debug.as_ref().filter(|_| self.usable().is_ok()) else {
            return Ok(());
        };
        if !debug.modes.guard || process::is_watching() {
            return Ok(());
        }
        let mut next = 0;
        loop {
            // A copy of the entry: a free meanwhile does not wait for the block's streams.
            let (ptr, watched) = {
                let table = debug.table();
                let Some((ptr, watched)) = table.live.range(next..).next() else {
                    return Ok(());
                };
                (*ptr, watched.clone())
            };
            next = ptr + 1;
            self.refuse_captures_of(&watched)?;
            self.wait_for_users(&watched)?;
            let looked = self.touch(debug, (ptr, watched.bytes), || {
                let life = debug.table().live.get(&ptr).map(|block| block.life);
                // It may have been freed meanwhile, and another lie there.
                match life == Some(watched.life) {
                    true => self.overrun(debug, ptr, &watched),
                    false => Ok(None),
                }
            });
            if let Some(finding) = looked.transpose()?.flatten() {
                debug.found(finding.clone());
                return Err(Error::Misused(Box::new(finding)));
            }
        }
    }

    /// Lists the blocks that are live at the end.
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
        for ((tag, context), (blocks, bytes)) in lines.iter().take(MOST_LINES) {
            let context = context.as_deref().unwrap_or("none");
            text += &format!("\n  {blocks} blocks, {bytes} bytes: tag {tag}, context {context}");
        }
        if lines.len() > MOST_LINES {
            text += &format!(
                "\n  and {} other tags and contexts",
                lines.len() - MOST_LINES
            );
        }
        say(&text);
        let mut table = debug.table();
        // Those of an earlier try to close are told again.
        table
            .findings
            .retain(|finding| finding.misuse != Misuse::Leak);
        let room = MOST_FINDINGS.saturating_sub(table.findings.len());
        table.findings.extend(leaks.into_iter().take(room));
    }
}
