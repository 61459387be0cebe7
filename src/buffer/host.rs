//! Blocks of page-locked host memory, the work that may still use them, and the pool that keeps them.

use std::sync::Arc;

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Context, DriverError, HostAllocation, HostMemory, Stream, process};
use crate::error::{Error, InvalidArgument, RareLog};
use crate::locks::held::Mutex;
use crate::resource::Usage;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::{wait, wait_for};

/// Page-locked memory. Dropping it returns it to its pool; without a pool it is freed after the work that uses it.
pub(crate) struct HostBlock {
    /// None if there are no bytes.
    pub(super) memory: Option<HostAllocation>,
    /// The work not known to be complete.
    uses: Vec<Use>,
    /// Why the end of a use is unknown and cannot be waited for: the memory is never used again.
    lost: Option<DriverError>,
    events: EventPools,
    /// The pool that it returns to.
    pub home: Option<Arc<HostPool>>,
    /// The generation of the pool that created it; 0 without a pool.
    pub generation: u64,
}

struct Use {
    end: Pooled,
    stream: KeptStream,
}

impl HostBlock {
    /// Allocates uninitialised memory for all contexts.
    pub fn new(context: &Context, bytes: usize, events: EventPools) -> Result<Self, Error> {
        let how = HostMemory {
            portable: true,
            ..HostMemory::default()
        };
        let memory = match bytes {
            0 => None,
            bytes => Some(context.enter()?.host_allocation(bytes, how)?),
        };
        Ok(HostBlock {
            memory,
            uses: Vec::new(),
            lost: None,
            events,
            home: None,
            generation: 0,
        })
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, HostAllocation::bytes)
    }

    /// Returns the context that it was allocated in; none if there are no bytes.
    pub fn context(&self) -> Option<&Context> {
        self.memory.as_ref().map(HostAllocation::context)
    }

    /// Returns the events for ordering its uses.
    pub fn events(&self) -> &EventPools {
        &self.events
    }

    /// Whether work that is not known to be complete may use it.
    pub fn is_busy(&self) -> bool {
        self.is_lost() || !self.uses.is_empty()
    }

    /// Whether the end of its last use can never be determined.
    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    fn check_lost(&self) -> Result<(), Error> {
        match self.lost {
            None => Ok(()),
            Some(error) if error.is_fatal() => Err(error.into()),
            Some(error) => Err(Error::Unseen(error)),
        }
    }

    /// Removes completed work; returns whether all is complete. Does not wait.
    pub fn remove_completed(&mut self) -> Result<bool, Error> {
        self.check_lost()?;
        let mut failure = None;
        self.uses.retain(|work| match work.end.is_complete() {
            Ok(over) => !over,
            Err(error) => {
                failure = Some(error);
                true
            }
        });
        match failure {
            None => Ok(self.uses.is_empty()),
            Some(error) => {
                // After the loss of a context it is unknown what the device does. Any other failure concerns only this
                // query, which can be repeated.
                self.lost = Some(error).filter(DriverError::is_fatal);
                Err(error.into())
            }
        }
    }

    /// Whether all work is complete; removes none.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.check_lost()?;
        for work in &self.uses {
            if !work.end.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for all work, on the host.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.check_lost()?;
        for work in &self.uses {
            wait_for(&work.end, &work.stream)?;
        }
        self.uses.clear();
        Ok(())
    }

    /// Records that all work submitted to `stream` so far may use the memory. If its end cannot be marked, the host
    /// waits for it; if that fails, too, the memory is lost.
    ///
    /// # Errors
    /// Those of recording the marker.
    pub fn used_by(&mut self, stream: &Stream, events: &EventPools) -> Result<(), DriverError> {
        let marked = events.record(stream).map(|end| Use {
            end,
            stream: KeptStream::new(stream),
        });
        match marked {
            Ok(work) => self.uses.push(work),
            Err(error) => {
                self.lost = wait(stream, events).is_err().then_some(error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Marks the memory as lost: the end of work that uses it cannot be determined.
    pub fn lose(&mut self, error: DriverError) {
        self.lost = Some(error);
    }

    /// Removes all uses, whose end was observed elsewhere.
    pub fn end_use(&mut self) {
        self.uses.clear();
    }

    /// Iterates over the streams whose work may use it, each with the end of that work.
    pub fn uses(&self) -> impl Iterator<Item = (&Pooled, &Stream)> {
        self.uses
            .iter()
            .map(|work| (&work.end, work.stream.stream()))
    }

    /// Rejects memory of an earlier generation of its pool, and memory that other work may use.
    pub fn ready(&mut self) -> Result<(), Error> {
        let have = self.generation;
        match self.home.as_ref().map(|pool| pool.generation()) {
            Some(current) if current != have => Err(Error::Stale { have, current }),
            _ => self.free_to_write(),
        }
    }

    pub(super) fn free_to_write(&mut self) -> Result<(), Error> {
        match self.remove_completed()? {
            true => Ok(()),
            false => Err(Error::InFlight),
        }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(pool) = self.home.take() {
            return pool.take_back(HostBlock {
                memory: self.memory.take(),
                uses: std::mem::take(&mut self.uses),
                lost: self.lost,
                events: self.events.clone(),
                home: None,
                generation: self.generation,
            });
        }
        let Some(memory) = &self.memory else { return };
        if !self.is_busy() || memory.context().driver().forbids_destruction() {
            return;
        }
        if let Err(error) = self.wait() {
            // A logger has locks, which in a forked child a thread that does not exist there may hold.
            if !process::is_forked_child() {
                log::warn!("leaking page-locked memory: {error}");
            }
            std::mem::forget(self.memory.take());
        }
    }
}

const PAGE: usize = 4096;

/// Settings of a [`PinnedPool`](crate::pool::PinnedPool).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedConfig {
    pub(super) initial: usize,
    pub(super) maximum: usize,
    pub(super) buffer_bytes: usize,
    pub(super) oversize: bool,
}

impl PinnedConfig {
    /// 4 blocks initially, at most 32, of 4 MiB, oversize allowed.
    pub const fn new() -> Self {
        PinnedConfig {
            initial: 4,
            maximum: 32,
            buffer_bytes: 4 << 20,
            oversize: true,
        }
    }

    /// Sets how many blocks are allocated with the pool.
    pub const fn initial(mut self, blocks: usize) -> Self {
        self.initial = blocks;
        self
    }

    /// Sets the maximum number of blocks: in use, in flight and free.
    pub const fn maximum(mut self, blocks: usize) -> Self {
        self.maximum = blocks;
        self
    }

    /// Sets the size of a block in bytes.
    pub const fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Sets whether larger requests get a block of their own, which is not kept.
    pub const fn oversize(mut self, on: bool) -> Self {
        self.oversize = on;
        self
    }
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) struct HostPool {
    pub(super) context: Context,
    pub(super) config: PinnedConfig,
    pub(super) state: Mutex<State>,
    pub(super) events: EventPools,
    pub(super) log: RareLog,
}

/// The blocks that are not in use, and the figures of all.
#[derive(Default)]
pub(super) struct State {
    pub(super) generation: u64,
    /// Blocks that may be handed out, the last returned at the end.
    pub(super) free: Vec<HostBlock>,
    /// Blocks that work may still use.
    pub(super) waiting: Vec<HostBlock>,
    /// Waiting blocks that a call is querying: they may be free in a moment.
    pub(super) queried: usize,
    /// Of this generation: blocks in use and their bytes, the bytes of all blocks, hits and misses.
    pub(super) usage: Usage,
    /// The number of blocks of the pool's own size, including those being allocated.
    pub(super) pooled: usize,
}

impl State {
    /// Reserves a block of the pool's own size, if it is wanted and below the maximum; returns the generation.
    pub(super) fn begin(
        &mut self,
        config: &PinnedConfig,
        wanted: impl Fn(&State) -> bool,
    ) -> Option<u64> {
        let may = wanted(self) && self.pooled < config.maximum;
        self.pooled += usize::from(may);
        may.then_some(self.generation)
    }

    /// Counts a block as in use, unless it is of an earlier generation.
    fn lend(&mut self, block: &HostBlock) {
        if block.generation == self.generation {
            self.usage.blocks.add(1);
            self.usage.used.add(block.bytes() as u64);
        }
    }

    /// Takes back a block that was in use. Returns it if the caller must free it.
    fn returned(&mut self, block: HostBlock, own_size: usize) -> Option<HostBlock> {
        if block.generation == self.generation {
            self.usage.blocks.sub(1);
            self.usage.used.sub(block.bytes() as u64);
        }
        self.put_away(block, own_size)
    }

    /// Adds a block that is not in use to one of the lists. Returns it if the caller must free it.
    fn put_away(&mut self, mut block: HostBlock, own_size: usize) -> Option<HostBlock> {
        let busy = block.is_busy();
        if block.generation == self.generation {
            let pooled = block.bytes() == own_size;
            if pooled && !block.is_lost() {
                match busy {
                    true => self.waiting.push(block),
                    false => self.free.push(block),
                }
                return None;
            }
            self.usage.reserved.sub(block.bytes() as u64);
            self.pooled -= usize::from(pooled);
            block.generation = 0;
        }
        if busy {
            self.waiting.push(block);
            return None;
        }
        Some(block)
    }
}

/// Rounds up to whole pages, so that no two blocks share one.
pub(super) fn pages(bytes: usize) -> Result<usize, Error> {
    let whole = bytes.checked_next_multiple_of(PAGE);
    whole.ok_or(Error::Invalid(InvalidArgument::Size {
        bytes: bytes as u64,
    }))
}

impl HostPool {
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut process::lock(&self.state))
    }

    /// Returns a free block of the pool's own size, or else a new one.
    pub(super) fn free_or_new(&self) -> Result<HostBlock, Error> {
        loop {
            let (free, begun, queried) = self.change(|state| {
                let Some(block) = state.free.pop() else {
                    let begun = state.begin(&self.config, |_| true);
                    return (None, begun, state.queried);
                };
                state.lend(&block);
                state.usage.hits += 1;
                (Some(block), None, 0)
            });
            match (free, begun) {
                (Some(block), _) => return Ok(block),
                (None, Some(generation)) => return self.make(self.config.buffer_bytes, generation),
                // Another call is querying blocks, which may be free.
                (None, None) if queried > 0 => std::thread::yield_now(),
                (None, None) => {
                    let (what, maximum) = ("buffers", self.config.maximum);
                    return Err(Error::Exhausted { what, maximum });
                }
            }
        }
    }

    /// Allocates a block; one of the pool's own size was [reserved](State::begin).
    pub(super) fn make(&self, bytes: usize, generation: u64) -> Result<HostBlock, Error> {
        let made = HostBlock::new(&self.context, bytes, self.events.clone());
        self.change(|state| match made {
            Ok(mut block) => {
                block.generation = generation;
                if generation == state.generation {
                    state.usage.reserved.add(bytes as u64);
                    state.usage.misses += 1;
                }
                state.lend(&block);
                Ok(block)
            }
            Err(error) => {
                // Its reservation ends.
                if bytes == self.config.buffer_bytes && generation == state.generation {
                    state.pooled -= 1;
                }
                Err(error)
            }
        })
    }

    /// Queries which blocks can be reused or freed.
    pub(super) fn reap(&self) -> Result<(), Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        let waiting = self.change(|state| {
            state.queried += state.waiting.len();
            std::mem::take(&mut state.waiting)
        });
        for mut block in waiting {
            let before = block.is_lost();
            if let Err(error) = block.remove_completed()
                && block.is_lost() != before
                && let Some(count) = self.log.due()
            {
                log::warn!("leaking page-locked memory (occurrence {count}): {error}");
            }
            let gone = self.change(|state| {
                state.queried -= 1;
                state.put_away(block, self.config.buffer_bytes)
            });
            // Freed without the lock.
            drop(gone);
        }
        Ok(())
    }

    /// The generation whose blocks copies may use.
    pub(super) fn generation(&self) -> u64 {
        self.change(|state| state.generation)
    }

    /// Takes back a dropped block with the work that may still use it. Makes no driver call, except to free a block
    /// that is not kept.
    pub(super) fn take_back(&self, block: HostBlock) {
        if process::is_forked_child() {
            // A forked child has no pool to return it to.
            return std::mem::forget(block);
        }
        let gone = self.change(|state| state.returned(block, self.config.buffer_bytes));
        // Freed without the lock.
        drop(gone);
    }
}
