//! Blocks of the driver's own pools: the streams that use them, and their frees.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::BlockId;
use crate::driver::{Context, MemoryPool, Stream, process, sys};
use crate::error::{Error, RareLog};
use crate::locks::held::{Locked, Mutex};
use crate::resource::{Usage, next_source};
use crate::sync::event::EventPools;
use crate::sync::point::{Point, add_user, wait_unless_capturing};
use crate::sync::{capture, order};

/// A pool of the driver, as its handles and blocks know it.
pub(super) struct Inner {
    pub context: Context,
    pub pool: MemoryPool,
    pub maximum: Option<u64>,
    /// The number of live blocks and of calls in progress; [`DESTROYED`] after the destruction.
    pub users: AtomicU64,
    /// The number of this pool as a source of blocks.
    pub source: u64,
    blocks: Mutex<Blocks>,
    events: EventPools,
    log: RareLog,
}

#[derive(Default)]
struct Blocks {
    live: HashMap<BlockId, Block>,
    /// The figures of blocks that are live, or kept until they can be freed.
    usage: Usage,
}

pub(super) struct Block {
    id: BlockId,
    home: Stream,
    /// Other streams that use it until it is freed.
    users: Vec<Point>,
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
        let entered = (self.users).fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        entered.map(|_| Use(self)).map_err(|_| Error::Closed)
    }

    /// Removes the block of memory that was freed by its address.
    pub fn forget(&self, ptr: sys::CUdeviceptr) {
        let mut blocks = self.blocks();
        let gone: Vec<_> = (blocks.live).extract_if(|id, _| id.ptr() == ptr).collect();
        drop(blocks);
        gone.iter().for_each(|(id, _)| self.count_free(id));
    }

    fn blocks(&self) -> Locked<'_, Blocks> {
        process::lock(&self.blocks)
    }

    fn with<T>(&self, id: &BlockId, change: impl FnOnce(&mut Block) -> T) -> Result<T, Error> {
        let mut blocks = self.blocks();
        let block = blocks.live.get_mut(id);
        block.map(change).ok_or_else(|| id.gone())
    }

    pub fn usage(&self) -> Usage {
        self.blocks().usage
    }

    pub fn reset_peaks(&self) {
        self.blocks().usage.reset_peaks();
    }

    pub fn is_live(&self, id: &BlockId) -> bool {
        self.blocks().live.contains_key(id)
    }

    /// Adds a block of memory that the call allocated. The block replaces the call as a user of the pool.
    pub fn hand_out(
        &self,
        call: Use<'_>,
        memory: (sys::CUdeviceptr, usize),
        home: &Stream,
    ) -> BlockId {
        std::mem::forget(call);
        let ordinal = self.context.device().ordinal();
        let mut blocks = self.blocks();
        blocks.usage.add(memory.1 as u64);
        let life = (self.source, blocks.usage.blocks.total_allocated);
        let id = BlockId::new(life, memory, home.own_id(), ordinal);
        let (home, users) = (home.clone(), Vec::new());
        blocks.live.insert(id, Block { id, home, users });
        id
    }

    /// Frees a block by `free`. After an error it is still live.
    pub fn take_back(
        &self,
        id: &BlockId,
        free: impl FnOnce(&Self, &Block) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let taken = self.blocks().live.remove(id);
        let block = taken.ok_or_else(|| id.gone())?;
        free(self, &block).inspect_err(|_| drop(self.blocks().live.insert(*id, block)))
    }

    /// Makes the block's own stream wait for the work of another stream so far.
    pub fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let home = self.with(id, |block| block.home.clone())?;
        super::admit(stream, &self.context)?;
        if stream.own_id() == id.stream_id() {
            return Ok(());
        }
        if home.own_id() != id.stream_id() || capture::is_capturing(&home)? {
            // No wait can be queued on the block's own stream now.
            return self.record_stream(id, stream);
        }
        Ok(order::order(stream, &home, &self.events)?)
    }

    pub fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        super::admit(stream, &self.context)?;
        self.with(id, |block| {
            if stream.own_id() != id.stream_id() {
                add_user(&mut block.users, stream);
            }
        })
    }

    fn count_free(&self, id: &BlockId) {
        self.blocks().usage.sub(id.bytes() as u64);
        self.users.fetch_sub(1, Ordering::Release);
    }

    /// Frees a block after all its uses.
    pub fn free(&self, block: &Block) -> Result<(), Error> {
        let home = &block.home;
        capture::refuse_capture(home)?;
        if home.own_id() != block.id.stream_id() {
            // The default stream of another thread has no handle here, so the host waits for its context.
            wait_unless_capturing(home.context())?;
        }
        for user in &block.users {
            user.hold_back(home, home.own_id(), &self.events)?;
        }
        self.give_back(block)
    }

    /// Frees a block that only work on its own stream may still use.
    pub fn give_back(&self, block: &Block) -> Result<(), Error> {
        // SAFETY: the stream is alive by the contract under which it was made; all uses are ordered before this.
        unsafe { self.free_on(block.id.ptr(), &block.home) }?;
        self.count_free(&block.id);
        Ok(())
    }

    /// Frees memory in the order of a stream. After an error (the stream captures, or the context is lost) it is still
    /// live. After any other driver error it counts as freed, since the driver may have freed it.
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
                        "memory at {ptr:#x} of a driver pool may be lost (occurrence {count}): {error}"
                    );
                }
                Ok(())
            }
            freed => Ok(freed?),
        }
    }
}
