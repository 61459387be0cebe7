//! Scratch memory on lease.

use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::allocator::{Allocator, ReliefHook, Request, Trimmed, size};
use crate::block::{BlockId, BlockState};
use crate::buffer::DeviceBuffer;
use crate::driver::{Context, Stream, process};
use crate::error::{Error, InvalidArgument, Refused};
use crate::locks::lock::{Held, Lock};
use crate::resource::{
    DRIVER_ALIGNMENT, MemoryResource, RawBlock, Usage, UseTracking, check_request, forward,
    identity_of, next_source, same_device,
};
use crate::sync::capture;

use super::slabs::{PLACES, Slab, State};

/// The smallest class in bytes.
const SMALLEST: usize = 1024;
struct Inner {
    allocator: Allocator,
    /// The number of this pool as a source of blocks.
    source: u64,
    /// Whether a slab is the request rounded up to 512 bytes, instead of its size class.
    exact: bool,
    name: String,
    state: Lock<State>,
}

/// Scratch memory for kernels that need it for one launch, such as the workspace of a matrix product: one lease for
/// each, dropped when the launch is queued.
///
/// A slab belongs to the stream it was leased on: a lease that is dropped while its kernel is queued or running may be
/// leased again on that stream immediately, and on no other. The pool keeps up to four idle slabs of each size, or as
/// many as [`set_slab_cap`](Self::set_slab_cap) sets, the last returned first; the rest goes back to the allocator, and
/// all of them do when it runs out of memory.
///
/// A lease is a [`DeviceBuffer`] as long as its slab, with one owner; the [`state`](MemoryResource::state) of its
/// [`id`](DeviceBuffer::id) shows whether it was returned. A lease that a captured graph uses must live as long as the
/// graph. Handles share the pool. Idle slabs count as live blocks of the allocator: drop the pool, or
/// [`trim`](Self::trim) it, before [`Allocator::close`].
///
/// ```
/// # use cualloc::sim::{SimConfig, Simulator};
/// use cualloc::{Allocator, Config, pool::WorkspacePool, resource::MemoryResource};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// let allocator = Allocator::with_config(&context, Config::new())?;
/// let stream = allocator.create_stream()?;
/// let pool = WorkspacePool::new(&allocator);
/// for _ in 0..3 {
///     let lease = pool.lease(&stream, 3 << 20)?;
///     assert_eq!(lease.byte_len(), 4 << 20);
///     // Launch something with lease.as_device_ptr() on the stream here.
/// }
/// assert_eq!(pool.usage()?.misses, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct WorkspacePool(Arc<Inner>);

impl WorkspacePool {
    /// A pool over an allocator, with slabs by [`size_class`](Self::size_class): few sizes, so that a slab
    /// fits again, and up to twice the request.
    pub fn new(allocator: &Allocator) -> WorkspacePool {
        Self::make(allocator, false)
    }

    /// A pool over an allocator, with slabs of the requests rounded up to 512 bytes.
    pub fn exact(allocator: &Allocator) -> WorkspacePool {
        Self::make(allocator, true)
    }

    /// The size class of a request in bytes: the next power of two, at least 1024. `None` where there is none.
    ///
    /// ```
    /// # use cualloc::pool::WorkspacePool;
    /// let classes = [0, 1024, 1025].map(WorkspacePool::size_class);
    /// assert_eq!(classes, [Some(1024), Some(1024), Some(2048)]);
    /// assert_eq!(WorkspacePool::size_class((1 << 63) + 1), None);
    /// ```
    pub const fn size_class(bytes: usize) -> Option<usize> {
        let bytes = if bytes < SMALLEST { SMALLEST } else { bytes };
        bytes.checked_next_power_of_two()
    }

    /// Sets how many idle slabs of each size are kept; 0 counts as 1. Idle slabs above it stay until they are leased, or
    /// [trimmed](Self::trim).
    pub fn set_slab_cap(&self, slabs: usize) {
        self.0.lock().cap = Some(slabs.max(1));
    }

    fn make(allocator: &Allocator, exact: bool) -> WorkspacePool {
        let inner = Arc::new_cyclic(|weak: &std::sync::Weak<Inner>| {
            // Hooks need distinct names, and the address is the pool's as long as it lives.
            let name = format!("workspaces at {:p}", weak.as_ptr());
            Inner {
                allocator: allocator.clone(),
                exact,
                name,
                source: next_source(),
                state: Lock::default(),
            }
        });
        let weak = Arc::downgrade(&inner);
        allocator.add_relief_hook(ReliefHook::new(inner.name.clone(), move |missing| {
            weak.upgrade().map_or(0, |pool| pool.shrink_by(missing))
        }));
        WorkspacePool(inner)
    }

    /// The allocator under the pool.
    pub fn allocator(&self) -> &Allocator {
        &self.0.allocator
    }

    /// Leases at least `bytes` for use on a stream: a buffer as long as the slab.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] for a request without a class, and those of [`Allocator::allocate`].
    pub fn lease(
        &self,
        stream: &Stream,
        bytes: usize,
    ) -> Result<DeviceBuffer<MaybeUninit<u8>>, Error> {
        let block = self.0.hand_out(&Request::new(bytes), stream)?;
        let len = block.size();
        Ok(DeviceBuffer::of_resource(self.shared(), block, stream, len))
    }
}

impl Inner {
    #[inline(always)]
    fn lock(&self) -> Held<'_, State> {
        process::hot_lock(&self.state)
    }

    /// Leases a slab.
    #[inline(always)]
    fn hand_out(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let requested = request.bytes();
        let bytes = match self.exact {
            true => size::round_size(requested).map(|rounded| rounded as usize),
            false => WorkspacePool::size_class(requested),
        };
        let invalid = requested as u64;
        let bytes = bytes.ok_or(InvalidArgument::Size { bytes: invalid })?;
        let engine = self.allocator.engine();
        let (home, ordinal) = (self.allocator.context(), engine.device.ordinal());
        same_device(Some(home), ordinal, stream)?;
        if engine.watchful() {
            capture::refuse_capture(stream)?;
        }
        let home = stream.own_id();
        // Before a slab is inspected, so that a retirement meanwhile is noticed the next time.
        let retirements = engine.retirements();
        let idle = self.idle(home, (bytes, requested), retirements);
        let (ptr, lease) = match idle {
            Some(lease) => lease,
            None => self.new_slab((stream, home), (bytes, requested), retirements)?,
        };
        let id = BlockId::new((self.source, lease), (ptr, requested), home, ordinal);
        // SAFETY: the pool has the slab, and leases it to no other caller before this name comes back.
        let mut block = unsafe { RawBlock::new(id, bytes, request) };
        block.set_retirements(retirements);
        Ok(block)
    }

    /// Leases an idle slab.
    #[inline(always)]
    fn idle(
        &self,
        home: u64,
        (bytes, requested): (usize, usize),
        retirements: u64,
    ) -> Option<(u64, u64)> {
        loop {
            let mut state = self.lock();
            let place = state.take(home, bytes)?;
            let slab = state.slabs.get_mut(place as usize)?.as_mut()?;
            if slab.retirements == retirements || !slab.block.stream_retired() {
                slab.retirements = retirements;
                return state.lease(place, requested);
            }
            // The allocator expects no more work of a retired stream. Its slab is freed without the lock.
            let gone = state.remove(place);
            drop(state);
            drop(gone);
        }
    }

    /// Leases a new slab.
    #[inline(never)]
    fn new_slab(
        &self,
        (stream, home): (&Stream, u64),
        (bytes, requested): (usize, usize),
        retirements: u64,
    ) -> Result<(u64, u64), Error> {
        let slab = Slab {
            block: self.allocator.allocate(bytes, stream)?,
            bytes,
            stream: home,
            retirements,
            lease: 0,
            requested: 0,
            shared: false,
        };
        let mut state = self.lock();
        if state.vacant.is_empty() && state.slabs.len() == PLACES {
            drop(state);
            let (what, maximum) = ("slabs of a workspace pool", PLACES);
            return Err(Error::Exhausted { what, maximum });
        }
        state.usage.misses += 1;
        let place = state.add(slab);
        state.lease(place, requested).ok_or(Error::ForkedChild)
    }

    /// Whether a block is a lease of this pool, with no resource above that keeps an order of its uses.
    fn owns(&self, block: &RawBlock) -> bool {
        block.keepers() == 0 && block.id().source() == self.source
    }

    /// After streams were retired since a lease was handed out: whether the slab's was among them.
    #[cold]
    fn may_be_retired(&self, block: &RawBlock) -> bool {
        let retired = |slab: &mut Slab| slab.block.stream_retired();
        let mut state = self.lock();
        self.owns(block) && state.leased(block.id().generation()).is_some_and(retired)
    }

    /// Ends a lease; false if there is none.
    #[inline(always)]
    fn end(&self, block: &RawBlock, keep: bool) -> bool {
        let ended = self.lock().give_back(block.id().generation(), keep);
        // A slab that is not kept is freed here, without the lock.
        ended.is_some()
    }

    /// The block of a lease as the allocator names it, for a use on a stream. A slab that is used by another stream than
    /// its own goes to the allocator at the end of the lease.
    fn used_by(&self, id: &BlockId, stream: &Stream) -> Result<BlockId, Error> {
        let mut state = self.lock();
        let slab = state.leased(id.generation());
        let slab = slab.filter(|_| id.source() == self.source);
        let slab = slab.ok_or_else(|| id.gone())?;
        slab.shared |= stream.own_id() != slab.stream;
        Ok(identity_of(&slab.block, slab.stream))
    }

    /// Frees idle slabs of at least this number of bytes, if there are; how many bytes were freed.
    fn shrink_by(&self, bytes: u64) -> u64 {
        let mut state = self.lock();
        let keep = state.cached_bytes().saturating_sub(bytes);
        let gone = state.shrink(keep);
        drop(state);
        // Freed without the lock.
        gone.into_iter().map(|slab| slab.bytes as u64).sum()
    }

    fn figures(&self) -> Usage {
        let state = self.lock();
        let requests = state.usage.blocks.total_allocated;
        Usage {
            cached_blocks: state.all_idle().count() as u64,
            requests,
            hits: requests - state.usage.misses,
            ..state.usage
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.allocator.remove_relief_hook(&self.name);
    }
}

debug_fields!(WorkspacePool, self => exact: self.0.exact, usage: self.0.figures());

/// Each block is a lease; idle slabs count as cached.
// SAFETY: each block stands for a slab that is leased once, to its stream or by the allocator, which
// waits for recorded uses.
unsafe impl MemoryResource for Inner {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        check_request(request, DRIVER_ALIGNMENT)?;
        self.hand_out(request, stream)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let why = match block.returned() {
            _ if process::is_forked_child() => Error::ForkedChild,
            Err(kept) => kept,
            Ok(()) if self.owns(&block) && self.end(&block, !self.has_retired_stream(&block)) => {
                return Ok(());
            }
            Ok(()) => block.id().gone(),
        };
        Err(Refused::new(block, why))
    }

    fn try_take_back(&self, block: &mut RawBlock) -> bool {
        // The owner of a lease of a retired stream has to record before that the stream may have got more work.
        self.owns(block) && !self.has_retired_stream(block) && self.end(block, true)
    }

    #[inline]
    fn allocator_under(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn has_retired_stream(&self, block: &RawBlock) -> bool {
        self.allocator.engine().retirements() != block.retirements() && self.may_be_retired(block)
    }

    fn context(&self) -> Option<&Context> {
        Some(self.allocator.context())
    }

    fn id(&self) -> u64 {
        self.source
    }

    /// Of leases and slabs: used are the bytes of leased slabs, reserved those of all slabs, and idle slabs the
    /// blocks that are cached.
    fn usage(&self) -> Result<Usage, Error> {
        Ok(self.figures())
    }

    /// Idle slabs first, the largest first, then the allocator's unused memory, which others may use as well.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let held = self.allocator.stats().all.reserved.current;
        self.shrink_by(held.saturating_sub(keep));
        self.allocator.trim(keep)
    }

    fn reset_peak_stats(&self) {
        self.lock().usage.reset_peaks();
    }

    fn state(&self, id: &BlockId) -> BlockState {
        let leased = self.lock().leased(id.generation()).is_some();
        BlockState::live_if(id.source() == self.source && leased)
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Reuse
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let below = self.used_by(id, stream)?;
        self.allocator.record_use(&below, stream)
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let below = self.used_by(id, stream)?;
        self.allocator.record_stream(&below, stream)
    }
}

forward! {
    [] WorkspacePool, self => (*self.0), Arc::<Inner>::clone(&self.0);
}

#[cfg(all(test, unix, feature = "sim"))]
mod tests {
    use super::*;

    /// D9: a forked child does not wait for a pool that a thread of its parent changed.
    #[test]
    fn d9_nothing_waits_for_workspaces_in_a_forked_child() -> Result<(), Box<dyn std::error::Error>>
    {
        let sim = crate::sim::Simulator::new(crate::sim::SimConfig::default())?;
        let driver = sim.driver()?;
        let context = driver.context(0)?;
        let allocator = Allocator::with_config(&context, crate::allocator::Config::new())?;
        let stream = allocator.create_stream()?;
        let pool = WorkspacePool::new(&allocator);
        let mut lease = Some(pool.lease(&stream, 100)?);
        let locked = pool.0.lock();
        let answered = process::child_says(|| {
            drop(lease.take());
            let refused = pool.lease(&stream, 100).is_err();
            refused && pool.trim(0).is_err() && pool.usage().is_ok_and(|it| it == Usage::default())
        });
        drop(locked);
        assert!(answered);
        Ok(())
    }
}
