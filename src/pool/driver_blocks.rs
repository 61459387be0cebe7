//! Blocks of the driver's own pools: who uses them, and when they go back.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::allocator::Counter;
use crate::block::BlockId;
use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, MemoryPool, Stream, process, sys};
use crate::error::{Error, RareLog};
use crate::locks::held::{Locked, Mutex};
use crate::resource::next_source;
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

/// A pool of the driver, as its handles and blocks know it.
pub(super) struct Inner {
    pub context: Context,
    pub pool: MemoryPool,
    pub maximum: Option<u64>,
    /// Blocks that are live and calls that are under way; [`DESTROYED`] once it is over.
    pub users: AtomicU64,
    /// Tells this pool's blocks from those of every other source.
    pub source: u64,
    blocks: Mutex<Blocks>,
    /// Events that may be recorded again.
    events: EventPools,
    log: RareLog,
}

/// The blocks that somebody holds.
#[derive(Default)]
struct Blocks {
    live: HashMap<u64, Block>,
    /// The number of live blocks, and of blocks that are kept until they can be freed.
    number: Counter,
    /// Their bytes, as they were asked for.
    requested: Counter,
}

/// A live allocation.
struct Block {
    ptr: sys::CUdeviceptr,
    requested: usize,
    /// The stream that it was allocated on, and its id.
    home: Stream,
    home_id: u64,
    /// Other streams that use it until it is freed.
    users: Vec<(KeptStream, u64)>,
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
    pub fn new(context: &Context, pool: MemoryPool, maximum: Option<u64>) -> Inner {
        Inner {
            context: context.clone(),
            pool,
            maximum,
            users: AtomicU64::new(0),
            source: next_source(),
            blocks: Mutex::default(),
            events: EventPools::of(context),
            log: RareLog::default(),
        }
    }

    pub fn enter(&self) -> Result<Use<'_>, Error> {
        let more = |users: u64| (users != DESTROYED).then(|| users + 1);
        match self
            .users
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, more)
        {
            Ok(_) => Ok(Use(self)),
            Err(_) => Err(Error::Closed),
        }
    }

    pub fn get(&self, attribute: sys::CUmemPool_attribute) -> Result<u64, Error> {
        Ok(self.pool.get(attribute)?)
    }

    /// The memory at an address is not the pool's to free any more.
    pub fn forget(&self, ptr: sys::CUdeviceptr) {
        let mut blocks = self.blocks();
        let gone: Vec<Block> = (blocks.live)
            .extract_if(|_, block| block.ptr == ptr)
            .map(|(_, block)| block)
            .collect();
        drop(blocks);
        gone.iter().for_each(|block| self.left(block));
    }

    fn blocks(&self) -> Locked<'_, Blocks> {
        process::lock(&self.blocks)
    }

    /// Changes what is known of a live block.
    fn with<T>(&self, id: &BlockId, change: impl FnOnce(&mut Block) -> T) -> Result<T, Error> {
        let mut blocks = self.blocks();
        match blocks.live.get_mut(&id.generation()) {
            Some(block) if id.source() == self.source => Ok(change(block)),
            _ => Err(id.gone()),
        }
    }

    /// Numbers of live blocks, and their bytes as they were asked for.
    pub fn counts(&self) -> (Counter, Counter) {
        let blocks = self.blocks();
        (blocks.number, blocks.requested)
    }

    pub fn reset_peaks(&self) {
        let mut blocks = self.blocks();
        blocks.number.reset_peak();
        blocks.requested.reset_peak();
    }

    pub fn is_live(&self, id: &BlockId) -> bool {
        self.with(id, |_| ()).is_ok()
    }

    /// Enters memory that was allocated by a call under way, in the order of a stream with that id; the
    /// generation of its block, which is a user of the pool from then on.
    ///
    /// # Errors
    /// A stream that is capturing by now: then it may be memory of the graph's, which is freed in there; any other
    /// is freed after the capture.
    pub fn hand_out(
        self: &Arc<Self>,
        call: Use<'_>,
        (ptr, requested): (sys::CUdeviceptr, usize),
        (home, home_id): (&Stream, u64),
    ) -> Result<u64, Error> {
        std::mem::forget(call);
        let mut blocks = self.blocks();
        blocks.number.add(1);
        blocks.requested.add(requested as u64);
        let generation = blocks.number.total_allocated;
        drop(blocks);
        let block = Block {
            ptr,
            requested,
            home: home.clone(),
            home_id,
            users: Vec::new(),
        };
        if let Err(error) = capture::refuse_capture(home) {
            if self.give_back(&block).is_err() {
                keep(self, block);
            }
            return Err(error);
        }
        self.blocks().live.insert(generation, block);
        Ok(generation)
    }

    /// Takes a block back. One that nobody can name any more is kept if it cannot go yet.
    pub fn take_back(self: &Arc<Self>, id: &BlockId, abandoned: bool) -> Result<(), Error> {
        let ours = id.source() == self.source;
        let taken = ours.then(|| self.blocks().live.remove(&id.generation()));
        let block = taken.flatten().ok_or_else(|| id.gone())?;
        let Err(error) = self.free(&block) else {
            return Ok(());
        };
        if !abandoned {
            self.blocks().live.insert(id.generation(), block);
            return Err(error);
        }
        keep(self, block);
        if !matches!(error, Error::Capturing { .. })
            && let Some(count) = self.log.due()
        {
            let ptr = id.ptr();
            log::warn!(
                "deferring the free of the block at {ptr:#x} of a driver pool (occurrence {count}): {error}"
            );
        }
        Ok(())
    }

    /// Lets the block's own stream wait for what another was given so far.
    pub fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let (home, home_id) = self.with(id, |block| (block.home.clone(), block.home_id))?;
        super::admit(stream, &self.context)?;
        if stream.id()? == home_id {
            return Ok(());
        }
        if home.id()? != home_id || capture::is_capturing(&home)? {
            // Its own stream cannot be told now.
            return self.record_stream(id, stream);
        }
        Ok(order::order(stream, &home, &self.events)?)
    }

    /// Another stream uses the block until it is freed.
    pub fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        super::admit(stream, &self.context)?;
        let user = stream.id()?;
        self.with(id, |block| {
            if user != block.home_id && block.users.iter().all(|(_, known)| *known != user) {
                block.users.push((KeptStream::new(stream), user));
            }
        })
    }

    /// A block is gone.
    fn left(&self, block: &Block) {
        let mut blocks = self.blocks();
        blocks.number.sub(1);
        blocks.requested.sub(block.requested as u64);
        drop(blocks);
        self.users.fetch_sub(1, Ordering::Release);
    }

    /// Frees a block behind all who use it.
    fn free(&self, block: &Block) -> Result<(), Error> {
        let home = &block.home;
        capture::refuse_capture(home)?;
        if home.id()? != block.home_id {
            // Another thread's default stream cannot be named here: what it may still do is waited
            // for instead.
            super::wait_for(home.context())?;
        }
        for (user, id) in &block.users {
            user.with(|stream| match stream {
                Some(stream) if stream.own_id() == *id => {
                    capture::refuse_capture(stream)?;
                    Ok(order::order(stream, home, &self.events)?)
                }
                // As above, or it was retired.
                _ => super::wait_for(user.stream().context()),
            })?;
        }
        self.give_back(block)
    }

    fn give_back(&self, block: &Block) -> Result<(), Error> {
        // SAFETY: the stream is alive by the contract under which it was made; all other uses of the
        // memory come before this, on it or by the waits of `free`.
        unsafe { self.free_on(block.ptr, &block.home) }?;
        self.left(block);
        Ok(())
    }

    /// Frees memory in the order of a stream. It is live still after an error, since the stream captures or the
    /// context is lost. After any other one the driver may have freed it, so that it counts as freed.
    ///
    /// # Safety
    /// The stream is live; the memory is, too, and other uses of it come before on that stream.
    pub unsafe fn free_on(&self, ptr: sys::CUdeviceptr, stream: &Stream) -> Result<(), Error> {
        let entered = stream.context().enter()?;
        // SAFETY: the caller's contract.
        match unsafe { entered.mem_free_async(ptr, stream.raw()) } {
            Err(error)
                if !error.is_fatal()
                    && !capture::is_of_capture(error.code())
                    && matches!(capture::is_capturing(stream), Ok(false)) =>
            {
                if let Some(count) = self.log.due() {
                    log::warn!(
                        "memory at {ptr:#x} of a driver's pool may be lost ({count} such events): {error}"
                    );
                }
                Ok(())
            }
            freed => Ok(freed?),
        }
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
    blocks: Vec<(Arc<Inner>, Block)>,
    /// Threads that try to free some, which are not among those that wait meanwhile.
    tries: usize,
    /// How often somebody asked to have it tried.
    asked: u64,
}

fn all_kept() -> Locked<'static, Kept> {
    process::lock(&KEPT)
}

/// Keeps a block that nobody can name any more.
fn keep(pool: &Arc<Inner>, block: Block) {
    if pool.context.driver().drops_nothing() {
        return std::mem::forget(block);
    }
    let mut kept = all_kept();
    kept.blocks.push((Arc::clone(pool), block));
    ANY.store(true, Ordering::Release);
    process::BLOCKS.postpone(free_all);
}

/// Tries to free those of a pool.
#[inline]
pub(super) fn free_those_of(pool: &Arc<Inner>) {
    if ANY.load(Ordering::Acquire) && !process::is_gone() {
        free_kept(|of| Arc::ptr_eq(of, pool));
    }
}

fn free_all() {
    free_kept(|_| true);
}

#[cold]
fn free_kept(which: impl Fn(&Arc<Inner>) -> bool) {
    let mut all = all_kept();
    all.asked += 1;
    loop {
        let asked = all.asked;
        let tried: Vec<_> = all.blocks.extract_if(.., |(pool, _)| which(pool)).collect();
        if tried.is_empty() {
            break;
        }
        all.tries += 1;
        drop(all);
        // With the last of them a pool may go.
        let waits = |(pool, block): &(Arc<Inner>, Block)| {
            !pool.context.driver().drops_nothing() && pool.free(block).is_err()
        };
        let still: Vec<_> = tried.into_iter().filter(waits).collect();
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
