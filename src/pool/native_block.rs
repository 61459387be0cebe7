//! Blocks of the driver's own pools, and what they need of their pool.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Context, MemoryPool, Stream, process, sys};
use crate::locks::held::Locked;
use crate::resource::Table;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order;

use super::RareLog;
use crate::error::{Error, Refused};
use crate::sync::capture;

/// A pool of the driver, as its handles and blocks know it.
pub(super) struct Inner {
    pub(super) context: Context,
    pub(super) pool: MemoryPool,
    pub(super) max_bytes: Option<u64>,
    /// Blocks that are live and calls that are under way; [`DESTROYED`] once it is over.
    pub(super) users: AtomicU64,
    /// Bytes of live blocks, as they were asked for.
    pub(super) requested: AtomicU64,
    /// Blocks that go by their keys.
    pub(super) keyed: Table<NativeBlock>,
    /// Events that may be recorded again.
    pub(super) events: EventPools,
    pub(super) log: RareLog,
}

pub(super) const DESTROYED: u64 = u64::MAX;

/// Keeps the pool from being destroyed.
pub(super) struct Use<'a>(&'a Inner);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Inner {
    pub(super) fn enter(&self) -> Result<Use<'_>, Error> {
        let more = |users: u64| (users != DESTROYED).then(|| users + 1);
        match self
            .users
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, more)
        {
            Ok(_) => Ok(Use(self)),
            Err(_) => Err(Error::Closed),
        }
    }

    /// A block is gone.
    fn left(&self, requested: usize) {
        self.requested
            .fetch_sub(requested as u64, Ordering::Relaxed);
        self.users.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn get(&self, attribute: sys::CUmemPool_attribute) -> Result<u64, Error> {
        Ok(self.pool.get(attribute)?)
    }
}

/// A use of a block on a stream other than its own.
struct ForeignUse {
    stream: Stream,
    id: u64,
    /// Ticks of the block's clock before and after the mark was made: of two marks of a stream, one
    /// covers the other if that was done before it began.
    begin: u64,
    done: u64,
    /// Marks the last use; none if it may go on until the free.
    end: Option<Pooled>,
}

#[derive(Default)]
struct ForeignUses {
    list: Vec<ForeignUse>,
    clock: u64,
}

impl ForeignUses {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Enters a use; those that are covered come back.
    fn enter(&mut self, mut foreign: ForeignUse) -> Vec<ForeignUse> {
        foreign.done = self.tick();
        let same = |known: &ForeignUse| known.id == foreign.id;
        // "Until the free" covers every other use.
        if self
            .list
            .iter()
            .any(|known| same(known) && known.end.is_none())
        {
            return vec![foreign];
        }
        let whole = foreign.end.is_none();
        let covered = |known: &mut ForeignUse| {
            known.id == foreign.id && (whole || known.done < foreign.begin)
        };
        let replaced = self.list.extract_if(.., covered).collect();
        self.list.push(foreign);
        replaced
    }
}

/// A live allocation of a [`NativePool`](super::NativePool), with one owner. Dropping it gives the
/// memory back in the order of its stream: work queued before the drop may still use it. What cannot be given
/// back then, because the stream captures or the driver refuses, goes back at a later call: of its pool, when a
/// capture is ended through this crate, or when an allocator is made, trimmed, synchronised, closed or dropped.
/// Until then it is live, and keeps its pool and its streams. `Send` and `Sync`.
pub struct NativeBlock {
    pool: Arc<Inner>,
    ptr: sys::CUdeviceptr,
    requested: usize,
    home: (Stream, u64),
    uses: Mutex<ForeignUses>,
    freed: AtomicBool,
}

impl NativeBlock {
    pub(super) fn new(
        pool: Arc<Inner>,
        ptr: sys::CUdeviceptr,
        requested: usize,
        home: (Stream, u64),
    ) -> NativeBlock {
        NativeBlock {
            pool,
            ptr,
            requested,
            home,
            uses: Mutex::default(),
            freed: AtomicBool::new(false),
        }
    }

    /// The first byte's address.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Bytes as they were asked for.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// The driver's id of the stream that it was allocated on.
    pub(crate) fn stream_id(&self) -> u64 {
        self.home.1
    }

    /// Says that another stream uses the block: after the free it is reused only behind everything
    /// which that stream was given until the free.
    ///
    /// # Errors
    /// A stream that is capturing, and driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.record(stream, false)
    }

    /// Says that another stream used the block and will not again: reuse waits only for what that
    /// stream was given so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        self.record(stream, true)
    }

    /// Frees the block; unlike a drop it reports failures, and gives the block back with them.
    ///
    /// # Errors
    /// A stream that is capturing, and driver errors.
    pub fn free(self) -> Result<(), Refused<NativeBlock>> {
        match self.release() {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused::new(self, error)),
        }
    }

    /// Gives the block up without freeing it; the address is for
    /// [`NativePool::free_raw_on`](super::NativePool::free_raw_on). The pool does not count the block any more,
    /// and recorded uses are forgotten.
    #[must_use = "the address is all that is left of the block"]
    pub fn into_raw(self) -> sys::CUdeviceptr {
        self.gone();
        self.ptr
    }

    pub(super) fn is_of(&self, pool: &Arc<Inner>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Frees a block that was dropped before; it comes back if it cannot go yet.
    pub(super) fn try_again(self) -> Option<NativeBlock> {
        let over = self.pool.context.driver().drops_nothing() || self.release().is_ok();
        (!over).then_some(self)
    }

    fn record(&self, stream: &Stream, over: bool) -> Result<(), Error> {
        capture::refuse_capture(stream)?;
        let id = stream.id()?;
        if id == self.home.1 {
            return Ok(());
        }
        let begin = self.uses().tick();
        let end = match over {
            true => Some(self.pool.events.record(stream)?),
            false => None,
        };
        let replaced = self.uses().enter(ForeignUse {
            stream: stream.clone(),
            id,
            begin,
            done: 0,
            end,
        });
        // Events that do not go back to the pool are destroyed, outside the lock.
        drop(replaced);
        Ok(())
    }

    /// Gives the memory back. Called once: by the owner, or by who took the block out of its table.
    pub(crate) fn release(&self) -> Result<(), Error> {
        let (stream, id) = &self.home;
        capture::refuse_capture(stream)?;
        if stream.id()? != *id {
            // Another thread's default stream cannot be named here: what it may still do is waited
            // for instead.
            super::wait_for(stream.context())?;
        }
        let uses = std::mem::take(&mut self.uses().list);
        if let Err(error) = self.order_uses(&uses).and_then(|()| self.give_back()) {
            // The block is live still, and those who use it until its free do so.
            self.uses().list.extend(uses);
            return Err(error);
        }
        drop(uses);
        self.gone();
        Ok(())
    }

    /// Nobody was told of the block, whose stream captures by now.
    pub(super) fn undo(self) {
        // Refused where the memory is not the graph's: then it is kept by the drop.
        if self.give_back().is_ok() {
            self.gone();
        }
    }

    /// The driver has the memory.
    fn gone(&self) {
        self.freed.store(true, Ordering::Relaxed);
        self.pool.left(self.requested);
    }

    fn give_back(&self) -> Result<(), Error> {
        let stream = &self.home.0;
        let entered = stream.context().enter()?;
        // SAFETY: the stream is alive by the contract under which it was made; all other uses of the
        // memory come before this, on it or by the waits of `order_uses`.
        Ok(unsafe { entered.mem_free_async(self.ptr, stream.raw()) }?)
    }

    /// Makes the block's stream wait for all uses on others.
    fn order_uses(&self, uses: &[ForeignUse]) -> Result<(), Error> {
        let home = &self.home.0;
        for foreign in uses {
            if let Some(end) = &foreign.end {
                end.hold_back(home)?;
                continue;
            }
            if foreign.stream.id()? != foreign.id {
                // As in `release`.
                super::wait_for(foreign.stream.context())?;
                continue;
            }
            capture::refuse_capture(&foreign.stream)?;
            order::order(&foreign.stream, home, &self.pool.events)?;
        }
        Ok(())
    }

    fn uses(&self) -> Locked<'_, ForeignUses> {
        process::lock(&self.uses)
    }
}

impl Drop for NativeBlock {
    fn drop(&mut self) {
        if *self.freed.get_mut() || self.pool.context.driver().drops_nothing() {
            return;
        }
        let Err(error) = self.release() else {
            return;
        };
        // It is another one's from here on, who is as live.
        *self.freed.get_mut() = true;
        let uses = std::mem::take(&mut *self.uses());
        keep(NativeBlock {
            pool: Arc::clone(&self.pool),
            ptr: self.ptr,
            requested: self.requested,
            home: self.home.clone(),
            uses: Mutex::new(uses),
            freed: AtomicBool::new(false),
        });
        if !matches!(error, Error::Capturing { .. })
            && let Some(count) = self.pool.log.due()
        {
            log::warn!(
                "the block at {:#x} of a driver's pool is freed later ({count} such events): {error}",
                self.ptr
            );
        }
    }
}

impl fmt::Debug for NativeBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NativeBlock")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("requested", &self.requested)
            .finish_non_exhaustive()
    }
}

// ---- blocks that could not go yet ------------------------------------------------------------------

/// Each is freed by a later call that may find the capture ended, or the driver willing: one of its pool, or what
/// does the postponed work of the process. Meanwhile it keeps its pool.
static KEPT: Mutex<Kept> = Mutex::new(Kept {
    blocks: Vec::new(),
    tries: 0,
    asked: 0,
});

/// Whether there is any.
static ANY: AtomicBool = AtomicBool::new(false);

#[derive(Default)]
struct Kept {
    blocks: Vec<NativeBlock>,
    /// Threads that try to free some, which are not among those that wait meanwhile.
    tries: usize,
    /// How often somebody asked to have it tried.
    asked: u64,
}

fn all_kept() -> Locked<'static, Kept> {
    process::lock(&KEPT)
}

/// Keeps a block that nobody can name any more.
fn keep(block: NativeBlock) {
    let mut kept = all_kept();
    kept.blocks.push(block);
    ANY.store(true, Ordering::Release);
    process::BLOCKS.postpone(free_all);
}

/// Tries to free those of a pool.
#[inline]
pub(super) fn free_those_of(pool: &Arc<Inner>) {
    if ANY.load(Ordering::Acquire) && !process::is_gone() {
        free_kept(|block| block.is_of(pool));
    }
}

fn free_all() {
    free_kept(|_| true);
}

#[cold]
fn free_kept(which: impl Fn(&NativeBlock) -> bool) {
    let mut all = all_kept();
    all.asked += 1;
    loop {
        let asked = all.asked;
        let tried: Vec<NativeBlock> = all.blocks.extract_if(.., |block| which(block)).collect();
        if tried.is_empty() {
            break;
        }
        all.tries += 1;
        drop(all);
        // With the last of them a pool may go.
        let still = tried.into_iter().filter_map(NativeBlock::try_again);
        let still: Vec<NativeBlock> = still.collect();
        all = all_kept();
        all.tries -= 1;
        all.blocks.extend(still);
        // Another thread that asked meanwhile found none of these.
        if all.asked == asked {
            break;
        }
    }
    if all.blocks.is_empty() && all.tries == 0 {
        ANY.store(false, Ordering::Release);
        process::BLOCKS.nothing_waits();
    }
}
