//! Suspension as its users see it.

use crate::allocator::api::Allocator;
use crate::allocator::api::graph::GraphPool;
use crate::allocator::engine::segments::SegmentHook;
use crate::allocator::engine::suspend::{Resumed, Selected, Suspended};
use crate::allocator::suspend::contents::Keep;
use crate::block::Tag;
use crate::error::{Error, GraphPoolError};

/// Which memory of an allocator is meant.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Select<'a> {
    /// All of it, graph pools too.
    Allocator,
    /// That of a graph pool.
    Pool(&'a GraphPool),
    /// That of all graph pools with a tag ([`Allocator::graph_pool_for`]).
    Tag(Tag),
}

impl Select<'_> {
    fn of(self, allocator: &Allocator) -> Result<Selected, Error> {
        Ok(match self {
            Select::Allocator => Selected::Allocator,
            // Pools of several allocators have the same numbers.
            Select::Pool(pool) if pool.allocator().id() != allocator.id() => {
                return Err(GraphPoolError::ForeignPool.into());
            }
            Select::Pool(pool) => Selected::Pool(pool.id()),
            Select::Tag(tag) => Selected::Tag(tag),
        })
    }
}

impl Allocator {
    /// A [`graph_pool`](Self::graph_pool) with a tag, by which several can be suspended together. A pool is an arena
    /// of its own, so that no handle has memory of two tags.
    ///
    /// # Errors
    /// As [`graph_pool`](Self::graph_pool).
    pub fn graph_pool_for(&self, tag: impl Into<Tag>) -> Result<GraphPool, Error> {
        let pool = self.graph_pool()?;
        let mut guard = self.engine().open()?;
        let heap = &mut *guard;
        let pools = &heap.graphs.pools;
        heap.suspended.tags.retain(|id, _| pools.contains_key(id));
        heap.suspended.tags.insert(pool.id(), tag.into());
        drop(guard);
        Ok(pool)
    }

    /// Gives memory back to the driver, handle by handle, and keeps its addresses reserved, so that other allocators
    /// and processes can have it until [`resume`](Self::resume). Blocks stay live, and may be freed meanwhile; what
    /// [`Keep`] says happens to their contents, of which only live bytes are copied.
    ///
    /// Requests that would need suspended memory are [`Error::Suspended`], and so are [`trim`](Self::trim),
    /// [`guard`](Self::guard) and [`segments_of`](Self::segments_of) while it is that outside of graph pools.
    /// [`Select::Allocator`] suspends what is not suspended yet. Waits for all work of the contexts involved.
    /// Page-locked memory of [`Contents::Pinned`](crate::allocator::Contents::Pinned) is kept for the next time, until
    /// a trim, also one that is refused because of a suspension. Figures count what is suspended outside of graph pools as reserved.
    ///
    /// # Errors
    /// Nothing is suspended, and it may be tried again: [`Error::Guarded`] while guards keep memory outside of graph
    /// pools where it is (for an export or a registration), [`Error::Capturing`], [`Error::InUse`] while a call is
    /// under way on another thread, [`Error::Suspended`] if all of it is suspended already,
    /// [`GraphPoolError::UnknownTag`], [`GraphPoolError::ForeignPool`], [`Error::HostMemory`],
    /// [`Error::NotSupported`] under the classic policy, driver errors. If the driver refuses a call, everything that
    /// was done is undone; if it refuses that as well, the memory is suspended, as
    /// [`is_suspended`](Self::is_suspended) says, and can be resumed. Contents that were to be dropped may be lost all
    /// the same.
    ///
    /// # Safety
    /// From the call until a [`resume`](Self::resume) has succeeded nobody gives a device work that uses the memory:
    /// neither by blocks nor by launches of graphs ([`GraphPool::launching`]), nor by other processes. Contents that
    /// are not kept, those of free memory among them, are not read afterwards before they are written.
    pub unsafe fn suspend(
        &self,
        select: Select<'_>,
        keep: impl Into<Keep>,
    ) -> Result<Suspended, Error> {
        self.engine().suspend(select.of(self)?, &keep.into())
    }

    /// Brings suspended memory back to its addresses, with access for the allocator's device and all its peers, and
    /// with what was kept. Of memory outside of graph pools only handles come back on which a block is live.
    /// It is there when the call returns.
    ///
    /// # Errors
    /// It is suspended as before, and may be tried again: [`Error::OutOfMemory`], whose
    /// [`requested`](crate::error::OutOfMemory::requested) says how many bytes are missing,
    /// [`Error::NotSuspended`], [`GraphPoolError::ForeignPool`], [`Error::InUse`] while a call is under way on another
    /// thread, driver errors.
    pub fn resume(&self, select: Select<'_>) -> Result<Resumed, Error> {
        self.engine().resume(select.of(self)?)
    }

    /// Whether memory is suspended: with [`Select::Allocator`] any, also while a suspension or its end is under way; with
    /// a tag that of any of its pools.
    ///
    /// # Errors
    /// [`Error::Closed`], [`GraphPoolError::UnknownTag`], [`GraphPoolError::ForeignPool`], a lost context.
    pub fn is_suspended(&self, select: Select<'_>) -> Result<bool, Error> {
        self.engine().is_suspended(select.of(self)?)
    }

    /// Adds a hook that is told of segments which are suspended or come back. Replaces a hook of the same name;
    /// whether one was replaced.
    pub fn add_segment_hook(&self, hook: SegmentHook) -> bool {
        self.engine().suspender.add_hook(hook)
    }

    /// Removes a hook; whether it existed.
    pub fn remove_segment_hook(&self, name: &str) -> bool {
        self.engine().suspender.remove_hook(name)
    }
}

impl GraphPool {
    /// To be called before a graph is launched that uses the pool: refuses it while the pool is suspended, since the
    /// graph would touch addresses without memory.
    ///
    /// # Errors
    /// [`Error::Suspended`], [`Error::Closed`], a lost context.
    pub fn launching(&self) -> Result<(), Error> {
        self.allocator().engine().refuse_launch(self.id())
    }
}
