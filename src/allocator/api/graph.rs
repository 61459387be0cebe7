//! The public type of graph pools.

use std::fmt;
use std::sync::Arc;

use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::scopes;
use crate::driver::{Stream, sys};

use crate::allocator::api::Allocator;
use crate::allocator::api::block::Block;
use crate::allocator::graph::Footprint;
use crate::allocator::graph::checkpoint::Layout;
use crate::allocator::graph::scope::Kind;
use crate::allocator::graph::source::{SegmentSource, Source};
use crate::allocator::graph::user::User;
use crate::allocator::report::SegmentInfo;
use crate::error::Error;
use crate::locks::thread_id::ThreadId;

impl Allocator {
    /// Creates a memory pool for stream captures ([`GraphPool`]).
    ///
    /// # Errors
    /// [`Error::NotSupported`] under the classic policy; [`Error::Closed`], a lost context.
    pub fn graph_pool(&self) -> Result<GraphPool, Error> {
        Ok(GraphPool {
            id: scopes::add_pool(&self.engine, None)?,
            allocator: self.clone(),
        })
    }

    /// Creates a pool whose segments come from another allocator. A segment is as large as the request that needs it,
    /// rounded up to 2 MiB. The pool divides segments into blocks, and frees them when it releases its memory. It
    /// creates no views, cannot be suspended, and gives peers no access to its segments ([`add_peer`](Self::add_peer)).
    /// Segments count as reserved bytes, so they leave less of the limit to other memory, but may exceed the limit.
    ///
    /// # Errors
    /// As [`graph_pool`](Self::graph_pool). A request for which the source has no memory fails with
    /// [`Error::OutOfMemory`].
    pub fn graph_pool_over(&self, source: Arc<dyn SegmentSource>) -> Result<GraphPool, Error> {
        Ok(GraphPool {
            id: scopes::add_pool(&self.engine, Some(Source(source)))?,
            allocator: self.clone(),
        })
    }
}

/// Memory for stream captures. A pool has its own arena, whose addresses stay valid as long as a graph may use them.
///
/// A [`Scope`] ([`enter`](Self::enter)) directs requests to the pool; they are ordinary calls of the [`Allocator`] and
/// return ordinary [`Block`]s. Inside a capture, freed memory is reused behind the nodes that used it last, also on
/// other streams of the capture. Memory of other requests is not affected, and other threads and streams continue as if
/// there were no capture.
///
/// # The promise
/// **Launches of graphs that share a pool are ordered one after another on the device**, and work outside captures that
/// uses blocks of the pool is ordered with them. A block that is live at the end of a capture keeps its contents until
/// its owner frees it, *or* until a graph that was captured in the pool earlier is launched again. Graphs that may run
/// concurrently need separate pools, and so do captures into one graph ([`Stream::begin_capture_into`]), because
/// nothing orders its branches. As long as a graph may be launched, requests outside captures receive no memory that a
/// capture allocated or recorded a use of.
///
/// # Life
/// The pool's addresses stay mapped as long as a graph that was captured with them exists, an executable graph
/// instantiated from it, or a launch of that; the driver reports the end. No call is required for that:
/// [`release`](Self::release), or dropping the pool, declares that no further capture follows, and the memory is
/// released after the last graph and the last block. A pool that is not released keeps its memory for the next capture,
/// until [`Allocator::trim`].
///
/// A pool may be used from any thread.
///
#[cfg_attr(feature = "sim", doc = "```")]
#[cfg_attr(not(feature = "sim"), doc = "```ignore")]
/// use cualloc::allocator::{Allocator, Config, Policy, Scope};
/// use cualloc::driver::{Context, sys};
/// use cualloc::sim::{SimConfig, Simulator};
///
/// # fn main() -> cualloc::Result {
/// let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// let context = Context::primary(&sim.driver()?.device(0)?)?;
/// let allocator = Allocator::with_config(&context, Config::new().policy(Policy::Packed))?;
/// let (pool, stream) = (allocator.graph_pool()?, allocator.create_stream()?);
///
/// let scope = pool.enter(Scope::NextCapture)?;
/// stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
/// let first = allocator.allocate(1 << 20, &stream)?;
/// // Kernels that use it are captured here.
/// let at = first.ptr();
/// drop(first);
/// let second = allocator.allocate(1 << 20, &stream)?;
/// assert_eq!(second.ptr(), at, "behind the nodes that used it");
/// let graph = stream.end_capture()?;
/// drop(scope);
///
/// assert_eq!(pool.footprint()?.leases, 1);
/// drop((second, graph));
/// # Ok(())
/// # }
/// ```
pub struct GraphPool {
    allocator: Allocator,
    id: u64,
}

/// The requests that a scope directs to a pool. If several scopes match, the one of the capture applies, else of the
/// stream, of the predicate, of the thread; among equals the one that was entered last.
#[non_exhaustive]
pub enum Scope<'a> {
    /// Requests of the capture with this id ([`Stream::capture_id`]), on all its streams.
    Capture(u64),
    /// Requests of the next capture for which this thread requests memory, on all its streams.
    NextCapture,
    /// Requests on a stream, inside captures and outside.
    Stream(&'a Stream),
    /// Requests on streams for whose handles this predicate returns true. It is called without any lock held: for each
    /// request outside captures, and in a capture once for each stream and thread, as long as the same scopes are
    /// open. It must not allocate from an allocator that has open scopes: such a request fails with
    /// [`GraphPoolError::InPredicate`](crate::error::GraphPoolError::InPredicate).
    When(Box<dyn Fn(sys::CUstream) -> bool + Send + Sync>),
    /// Requests of the thread that enters the scope, on all streams, inside captures and outside.
    Thread,
}

impl fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scope::Capture(_) => "Capture",
            Scope::NextCapture => "NextCapture",
            Scope::Stream(_) => "Stream",
            Scope::When(_) => "When",
            Scope::Thread => "Thread",
        })
    }
}

impl GraphPool {
    /// Returns the pool's number, unique in its allocator: reports and segment hooks name the pool by it. Starts at 1.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Directs requests to the pool until the returned scope is dropped. Captures that got memory through it should
    /// have ended by then: a stream that is still capturing gets no more memory of the pool.
    ///
    /// # Errors
    /// [`GraphPoolError::Released`](crate::error::GraphPoolError::Released), [`Error::Closed`]; for a stream those of
    /// [`Allocator::allocate`].
    pub fn enter(&self, scope: Scope<'_>) -> Result<PoolScope, Error> {
        let engine = self.allocator.engine();
        let thread = ThreadId::current();
        let kind = match scope {
            Scope::Capture(id) => Kind::Capture(id),
            Scope::NextCapture => Kind::NextCapture(thread),
            Scope::Stream(stream) => Kind::Stream(self.user(stream)?),
            Scope::When(filter) => Kind::When(Arc::from(filter)),
            Scope::Thread => Kind::Thread(thread),
        };
        Ok(PoolScope {
            scope: Some(scopes::enter(engine, self.id, kind)?),
            allocator: self.allocator.clone(),
        })
    }

    fn user(&self, stream: &Stream) -> Result<User, Error> {
        let named = self.allocator.engine().named(stream)?;
        Ok(User::new(named.key, named.raw as usize, None, None))
    }

    /// Declares that a graph which was not captured with the pool uses its memory. The pool's addresses stay valid as
    /// long as the graph, an executable graph instantiated from it, or a launch of that exists. The present memory of
    /// the pool then serves only captures.
    ///
    /// # Errors
    /// [`GraphPoolError::Released`](crate::error::GraphPoolError::Released); driver errors, among them
    /// `CUDA_ERROR_NOT_FOUND` if the driver does not report the end of a graph.
    ///
    /// # Safety
    /// `graph` must be a live graph, which no other thread uses during the call.
    pub unsafe fn retain(&self, graph: sys::CUgraph) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { scopes::retain(self.allocator.engine(), self.id, graph) }
    }

    /// Returns the memory that the pool holds now.
    ///
    /// # Errors
    /// [`GraphPoolError::Released`](crate::error::GraphPoolError::Released), [`Error::Closed`].
    pub fn footprint(&self) -> Result<Footprint, Error> {
        pools::footprint(self.allocator.engine(), self.id)
    }

    /// Returns the pool's segments and blocks, by ascending address, for diagnosis. Bytes that are free or part of a
    /// live block of a view are blocks of their segment, so that the blocks of a segment that is no view have no gaps.
    ///
    /// # Errors
    /// As [`footprint`](Self::footprint), and driver errors.
    pub fn snapshot(&self) -> Result<Vec<SegmentInfo>, Error> {
        pools::snapshot(self.allocator.engine(), self.id)
    }

    /// Returns a checkpoint of the live blocks, for [`restore`](Self::restore).
    ///
    /// # Errors
    /// As [`footprint`](Self::footprint).
    pub fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let layout = pools::checkpoint(self.allocator.engine(), self.id)?;
        Ok(Checkpoint {
            pool: (self.allocator.id(), self.id),
            layout,
        })
    }

    /// Makes exactly the blocks of a checkpoint live, each at its address. Freeing a block that is no longer live
    /// afterwards is an error that changes nothing. Blocks that become live again are returned, with a new owner.
    ///
    /// Does not wait for work in flight: memory of blocks that cease to be live is reused after the work that uses it
    /// has ended, as after a free. Graphs of the pool, and earlier work outside captures, may still use a block that
    /// becomes live again; the promise of a [`GraphPool`] orders that work before the block's next use.
    ///
    /// # Errors
    /// [`GraphPoolError::NotComplete`](crate::error::GraphPoolError::NotComplete) while a capture in progress or
    /// another call uses the pool,
    /// [`GraphPoolError::ForeignCheckpoint`](crate::error::GraphPoolError::ForeignCheckpoint), [`Error::Suspended`],
    /// driver errors, and as [`footprint`](Self::footprint).
    ///
    /// # Safety
    /// Blocks that are live now but not in the checkpoint are used only by graphs that were captured with them. Their
    /// owners do nothing with them except free them.
    pub unsafe fn restore(&self, to: &Checkpoint) -> Result<Restored, Error> {
        if to.pool != (self.allocator.id(), self.id) {
            return Err(crate::error::GraphPoolError::ForeignCheckpoint.into());
        }
        let engine = self.allocator.engine();
        let restored = pools::restore(engine, self.id, &to.layout)?;
        let revived = restored.revived.into_iter();
        Ok(Restored {
            ceased: restored.ceased,
            revived: revived
                .map(|(grant, requested)| Block::new(engine, grant, requested as usize))
                .collect(),
        })
    }

    /// Permits requests outside of captures to get free memory that graphs of the pool write, from now on. Without the
    /// permission, a pool in which new work is warmed up before each capture holds the memory of all warm-ups.
    ///
    /// # Errors
    /// As [`footprint`](Self::footprint).
    ///
    /// # Safety
    /// If a block is allocated from the pool outside of captures after this call, no graph of the pool is launched while
    /// its contents are needed.
    pub unsafe fn reuse_graph_memory(&self) -> Result<(), Error> {
        pools::reuse_graph_memory(self.allocator.engine(), self.id)
    }

    /// Releases free memory of the pool to the driver, as far as whole handles are free, after waiting for the work that
    /// uses them. Returns the bytes. A pool with a lease of a graph, or that a capture in progress uses, keeps its memory.
    ///
    /// # Errors
    /// [`Error::Suspended`], driver errors, and as [`footprint`](Self::footprint).
    pub fn empty_cache(&self) -> Result<u64, Error> {
        pools::empty_cache(self.allocator.engine(), self.id)
    }

    /// Declares that no further capture uses the pool: its memory is released to the driver as soon as no graph and no
    /// block uses it. Open scopes have no effect from here on.
    ///
    /// # Errors [`GraphPoolError::Released`](crate::error::GraphPoolError::Released) if it was already released,
    /// [`Error::Closed`].
    pub fn release(&self) -> Result<(), Error> {
        scopes::release_pool(self.allocator.engine(), self.id)
    }
}

impl Drop for GraphPool {
    fn drop(&mut self) {
        // Fails if the pool was already released, or nothing can be released any more.
        let _released = self.release();
    }
}

impl fmt::Debug for GraphPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphPool")
            .field("id", &self.id)
            .field("footprint", &self.footprint().ok())
            .finish_non_exhaustive()
    }
}

/// Directs requests to a [`GraphPool`] while it lives. May be dropped on any thread.
#[must_use = "requests go to the pool until this is dropped"]
pub struct PoolScope {
    allocator: Allocator,
    /// `None` once it was left.
    scope: Option<u64>,
}

impl PoolScope {
    /// Leaves the scope. Unlike a drop, it reports failures.
    ///
    /// # Errors
    /// [`Error::ForkedChild`].
    pub fn leave(mut self) -> Result<(), Error> {
        match self.scope.take() {
            Some(scope) => scopes::leave(self.allocator.engine(), scope),
            None => Ok(()),
        }
    }
}

impl Drop for PoolScope {
    fn drop(&mut self) {
        if let Some(scope) = self.scope.take() {
            // Leaving fails only in a forked child, which has no scope.
            let _left = scopes::leave(self.allocator.engine(), scope);
        }
    }
}

impl fmt::Debug for PoolScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolScope")
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// The live blocks of a [`GraphPool`] at some time.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pool: (u64, u64),
    layout: Layout,
}

impl Checkpoint {
    /// Iterates over the address and size of each block, by address.
    pub fn blocks(&self) -> impl Iterator<Item = (sys::CUdeviceptr, u64)> {
        let live = self.layout.live.iter();
        live.map(|(addr, live)| (*addr, live.bytes()))
    }
}

/// Changes made by [`GraphPool::restore`].
#[derive(Debug)]
#[must_use = "dropping it frees the blocks that are live again"]
#[non_exhaustive]
pub struct Restored {
    /// Addresses of blocks that are no longer live.
    pub ceased: Vec<sys::CUdeviceptr>,
    /// Blocks that are live again.
    pub revived: Vec<Block>,
}
