//! The public interface of suspension.

use crate::allocator::api::Allocator;
use crate::allocator::api::graph::GraphPool;
use crate::allocator::api::range::Range;
use crate::allocator::engine::segment_hooks::SegmentHook;
use crate::allocator::suspend::Target;
use crate::allocator::suspend::contents::Keep;
use crate::allocator::suspend::run;
use crate::allocator::suspend::run::{Resumed, Selected, Suspended};
use crate::block::Tag;
use crate::error::{Error, GraphPoolError};

/// Selects memory of an allocator.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Select<'a> {
    /// All memory, including graph pools and ranges.
    Allocator,
    /// The memory of one graph pool.
    Pool(&'a GraphPool),
    /// The memory of one growable range.
    Range(&'a Range),
    /// The memory of all graph pools and ranges with a tag ([`Allocator::graph_pool_for`],
    /// [`GraphPool::set_tag`], [`RangeOptions::tag`](crate::allocator::RangeOptions::tag)).
    Tag(Tag),
}

impl Select<'_> {
    fn of(self, allocator: &Allocator) -> Result<Selected, Error> {
        Ok(match self {
            Select::Allocator => Selected::Allocator,
            // Pool ids are unique only within an allocator.
            Select::Pool(pool) if pool.allocator().id() != allocator.id() => {
                return Err(GraphPoolError::ForeignPool.into());
            }
            Select::Pool(pool) => Selected::One(Target::Pool(pool.id())),
            Select::Range(range) if range.allocator().id() != allocator.id() => {
                return Err(GraphPoolError::ForeignPool.into());
            }
            Select::Range(range) => Selected::One(Target::Range(range.id())),
            Select::Tag(tag) => Selected::Tag(tag),
        })
    }
}

impl Allocator {
    /// Creates a [`graph_pool`](Self::graph_pool) with a tag, by which several pools can be suspended together. Each
    /// pool has its own arena, so no handle holds memory of two tags.
    ///
    /// # Errors
    /// As [`graph_pool`](Self::graph_pool).
    pub fn graph_pool_for(&self, tag: impl Into<Tag>) -> Result<GraphPool, Error> {
        let pool = self.graph_pool()?;
        pool.set_tag(tag)?;
        Ok(pool)
    }

    /// Releases memory to the driver, handle by handle, and keeps its addresses reserved, so that other allocators and
    /// processes can use the memory until [`resume`](Self::resume). Blocks stay live, and may be freed meanwhile.
    /// [`Keep`] decides what happens to their contents; only live bytes are copied.
    ///
    /// Requests that would need suspended memory return [`Error::Suspended`], and so do [`trim`](Self::trim),
    /// [`guard`](Self::guard) and [`segments_of`](Self::segments_of) while memory outside graph pools is suspended.
    /// [`Select::Allocator`] suspends everything that is not yet suspended. The call waits for all work of the contexts
    /// involved. Page-locked memory of [`Contents::Pinned`](crate::allocator::Contents::Pinned) is kept for the next
    /// suspension until a trim, even one that is refused because of a suspension. Statistics count suspended memory
    /// outside graph pools as reserved.
    ///
    /// # Errors
    /// On an error nothing is suspended, and the call may be repeated: [`Error::Guarded`] while guards keep memory
    /// outside graph pools in place (for an export or a registration), [`Error::Capturing`], [`Error::InUse`] while
    /// another thread is in a call, [`Error::Suspended`] if everything selected is already suspended,
    /// [`GraphPoolError::UnknownTag`], [`GraphPoolError::ForeignPool`], [`Error::HostMemory`], [`Error::NotSupported`]
    /// under the classic policy, driver errors. If the driver refuses a call, all earlier steps are undone; if it
    /// refuses that as well, the memory is suspended, as [`is_suspended`](Self::is_suspended) reports, and can be
    /// resumed. Contents that were to be discarded may be lost even on an error.
    ///
    /// # Safety
    /// From this call until a [`resume`](Self::resume) has succeeded, no work that uses the memory is submitted to a
    /// device: neither through blocks, nor by launches of graphs ([`GraphPool::launching`]), nor by other processes.
    /// Contents that are not kept, including those of free memory, are undefined until they are written again.
    pub unsafe fn suspend(
        &self,
        select: Select<'_>,
        keep: impl Into<Keep>,
    ) -> Result<Suspended, Error> {
        run::suspend(self.engine(), select.of(self)?, &keep.into())
    }

    /// Restores suspended memory at its addresses, with access for the allocator's device and all its peers, and with
    /// the contents that were kept. Outside graph pools, only handles with a live block are restored. The memory is
    /// usable when the call returns.
    ///
    /// # Errors
    /// On an error the memory stays suspended, and the call may be repeated: [`Error::OutOfMemory`], whose
    /// [`requested`](crate::error::OutOfMemory::requested) is the number of missing bytes, [`Error::NotSuspended`],
    /// [`GraphPoolError::ForeignPool`], [`Error::InUse`] while another thread is in a call, driver errors.
    pub fn resume(&self, select: Select<'_>) -> Result<Resumed, Error> {
        run::resume(self.engine(), select.of(self)?)
    }

    /// Whether memory is suspended: with [`Select::Allocator`] any memory, also while a suspension or resume is in
    /// progress; with a tag the memory of any of its pools.
    ///
    /// # Errors
    /// [`Error::Closed`], [`GraphPoolError::UnknownTag`], [`GraphPoolError::ForeignPool`], a lost context.
    pub fn is_suspended(&self, select: Select<'_>) -> Result<bool, Error> {
        run::is_suspended(self.engine(), select.of(self)?)
    }

    /// Adds a hook that is called for memory that is mapped from now on, and before memory is unmapped. Replaces a hook
    /// of the same name, and returns whether it did.
    pub fn add_segment_hook(&self, hook: SegmentHook) -> bool {
        self.engine().segment_hooks.add(hook)
    }

    /// Removes a hook, and returns whether it existed.
    pub fn remove_segment_hook(&self, name: &str) -> bool {
        self.engine().segment_hooks.remove(name)
    }
}

impl GraphPool {
    /// Sets the pool's tag, in place of an earlier one ([`Allocator::graph_pool_for`]). Memory that the pool already has
    /// and that graphs already use is suspended by the tag, too.
    ///
    /// # Errors
    /// [`Error::Suspended`] while the pool is suspended; [`Error::NotSupported`] for a pool over segments of another
    /// allocator, which cannot be suspended; [`GraphPoolError::Released`], [`Error::Closed`].
    pub fn set_tag(&self, tag: impl Into<Tag>) -> Result<(), Error> {
        run::set_tag(self.allocator().engine(), self.id(), tag.into())
    }

    /// Checks that the pool is not suspended. Call it before launching a graph that uses the pool: a launch on a
    /// suspended pool would access addresses without memory.
    ///
    /// # Errors
    /// [`Error::Suspended`], [`Error::Closed`], a lost context.
    pub fn launching(&self) -> Result<(), Error> {
        run::refuse_launch(self.allocator().engine(), self.id())
    }
}
