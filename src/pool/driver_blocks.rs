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
    /// Blocks that are live and calls that are under way; [`DESTROYED`] once it is over.
    pub users: AtomicU64,
    /// The number of this pool as a source of blocks.
    pub source: u64,
    blocks: Mutex<Blocks>,
    /// Events that may be recorded again.
    events: EventPools,
    log: RareLog,
}

#[derive(Default)]
struct Blocks {
    live: HashMap<BlockId, Block>,
    /// Of live blocks, and of blocks that are kept until they can be freed.
    usage: Usage,
}

/// A live allocation.
pub(super) struct Block {
    id: BlockId,
    /// The stream that it was allocated on.
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

    pub fn get(&self, attribute: sys::CUmemPool_attribute) -> Result<u64, Error> {
        Ok(self.pool.get(attribute)?)
    }

    /// The memory at an address was freed by other means than its block.
    pub fn forget(&self, ptr: sys::CUdeviceptr) {
        let gone = (self.blocks().live)
            .extract_if(|id, _| id.ptr() == ptr)
            .collect::<Vec<_>>();
        gone.iter().for_each(|(id, _)| self.left(id));
    }

    fn blocks(&self) -> Locked<'_, Blocks> {
        process::lock(&self.blocks)
    }

    /// Changes what is known of a live block.
    fn with<T>(&self, id: &BlockId, change: impl FnOnce(&mut Block) -> T) -> Result<T, Error> {
        let mut blocks = self.blocks();
        let block = blocks.live.get_mut(id);
        block.map(change).ok_or_else(|| id.gone())
    }

    /// The number of blocks and their requested bytes.
    pub fn usage(&self) -> Usage {
        self.blocks().usage
    }

    pub fn reset_peaks(&self) {
        self.blocks().usage.reset_peaks();
    }

    pub fn is_live(&self, id: &BlockId) -> bool {
        self.blocks().live.contains_key(id)
    }

    /// Enters memory that was allocated by a call under way, in the order of a stream. The block is a user of the pool
    /// from then on.
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

    /// Takes a block back, and frees it by `free`. After an error it is live still.
    pub fn take_back(
        &self,
        id: &BlockId,
        free: impl FnOnce(&Self, &Block) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let taken = self.blocks().live.remove(id);
        let block = taken.ok_or_else(|| id.gone())?;
        free(self, &block).inspect_err(|_| drop(self.blocks().live.insert(*id, block)))
    }

    /// Makes the block's own stream wait for the work of another one so far.
    pub fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let home = self.with(id, |block| block.home.clone())?;
        super::admit(stream, &self.context)?;
        if stream.own_id() == id.stream_id() {
            return Ok(());
        }
        if home.own_id() != id.stream_id() || capture::is_capturing(&home)? {
            // No wait can be queued on its own stream now.
            return self.record_stream(id, stream);
        }
        Ok(order::order(stream, &home, &self.events)?)
    }

    /// Another stream uses the block until it is freed.
    pub fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        super::admit(stream, &self.context)?;
        self.with(id, |block| {
            if stream.own_id() != id.stream_id() {
                add_user(&mut block.users, stream);
            }
        })
    }

    /// A block is gone.
    fn left(&self, id: &BlockId) {
        self.blocks().usage.sub(id.bytes() as u64);
        self.users.fetch_sub(1, Ordering::Release);
    }

    /// Frees a block behind all uses of it.
    pub fn free(&self, block: &Block) -> Result<(), Error> {
        let home = &block.home;
        capture::refuse_capture(home)?;
        if home.own_id() != block.id.stream_id() {
            // Another thread's default stream has no name here: this thread waits for its context.
            wait_unless_capturing(home.context())?;
        }
        for user in &block.users {
            user.hold_back(home, home.own_id(), &self.events)?;
        }
        self.give_back(block)
    }

    /// Frees a block of which nothing but its own stream may still use the memory.
    pub fn give_back(&self, block: &Block) -> Result<(), Error> {
        // SAFETY: the stream is alive by the contract under which it was made; all other uses of the
        // memory come before this, on it or by the waits of `free`.
        unsafe { self.free_on(block.id.ptr(), &block.home) }?;
        self.left(&block.id);
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
