//! Scratch memory that is leased.

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
    source: u64,
    /// Whether slabs have the requested size, rounded up to 512 bytes, instead of that of the size class.
    exact: bool,
    name: String,
    state: Lock<State>,
}

/// Scratch memory for kernels, such as the workspace of a matrix product: a lease per launch, dropped when the launch is
/// queued.
///
/// A slab belongs to the stream that it was leased on: after its lease is dropped it may be leased again immediately on
/// that stream, and on no other. The pool keeps up to four idle slabs of each size
/// ([`set_slab_cap`](Self::set_slab_cap)), the last returned first; it frees them when the allocator runs out of memory.
///
/// A lease is a [`DeviceBuffer`] as long as its slab; one that a captured graph uses must live as long as the graph.
/// Clones are handles to the same pool. Idle slabs count as live blocks of the allocator: drop or
/// [`trim`](Self::trim) the pool before [`Allocator::close`].
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
    /// Creates a pool over an allocator, with slabs by [`size_class`](Self::size_class).
    pub fn new(allocator: &Allocator) -> WorkspacePool {
        Self::make(allocator, false)
    }

    /// Creates a pool over an allocator, with slabs of the requested size rounded up to 512 bytes.
    pub fn exact(allocator: &Allocator) -> WorkspacePool {
        Self::make(allocator, true)
    }

    /// Returns the size class of a request in bytes: the next power of two, at least 1024. `None` if it overflows.
    pub const fn size_class(bytes: usize) -> Option<usize> {
        let bytes = if bytes < SMALLEST { SMALLEST } else { bytes };
        bytes.checked_next_power_of_two()
    }

    /// Sets how many idle slabs of each size are kept, at least 1. Existing ones stay until they are leased or trimmed.
    pub fn set_slab_cap(&self, slabs: usize) {
        self.0.lock().cap = Some(slabs.max(1));
    }

    fn make(allocator: &Allocator, exact: bool) -> WorkspacePool {
        let inner = Arc::new_cyclic(|weak: &std::sync::Weak<Inner>| {
            // Hooks need distinct names, and the address is unique while the pool lives.
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

    /// Leases at least `bytes` bytes for use on a stream: a buffer as long as the slab.
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
        if engine.needs_checks() {
            capture::refuse_capture(stream)?;
        }
        let home = stream.own_id();
        // Read before a slab is inspected, so that a retirement meanwhile is noticed the next time.
        let retirements = engine.retirements();
        let idle = self.idle(home, (bytes, requested), retirements);
        let (ptr, lease) = match idle {
            Some(lease) => lease,
            None => self.new_slab((stream, home), (bytes, requested), retirements)?,
        };
        let id = BlockId::new((self.source, lease), (ptr, requested), home, ordinal);
        // SAFETY: the slab is leased to one caller until the lease is returned.
        let mut block = unsafe { RawBlock::new(id, bytes, request) };
        block.set_retirements(retirements);
        Ok(block)
    }

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
            // The allocator expects no more work on a retired stream. The slab is freed without the lock.
            let gone = state.remove(place);
            drop(state);
            drop(gone);
        }
    }

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

    /// Whether a block is a lease of this pool whose uses no resource above orders.
    fn owns(&self, block: &RawBlock) -> bool {
        block.keepers() == 0 && block.id().source() == self.source
    }

    /// Whether the stream of a slab was retired.
    #[cold]
    fn may_be_retired(&self, block: &RawBlock) -> bool {
        let retired = |slab: &mut Slab| slab.block.stream_retired();
        let mut state = self.lock();
        self.owns(block) && state.leased(block.id().generation()).is_some_and(retired)
    }

    /// Ends a lease; false if it is not current.
    #[inline(always)]
    fn end(&self, block: &RawBlock, keep: bool) -> bool {
        let ended = self.lock().give_back(block.id().generation(), keep);
        // A slab that is not kept is dropped here, without the lock.
        ended.is_some()
    }

    /// Returns the allocator's block of a lease, for a use on a stream. A slab used on another stream is freed at the end
    /// of the lease.
    fn used_by(&self, id: &BlockId, stream: &Stream) -> Result<BlockId, Error> {
        let mut state = self.lock();
        let slab = state.leased(id.generation());
        let slab = slab.filter(|_| id.source() == self.source);
        let slab = slab.ok_or_else(|| id.gone())?;
        slab.shared |= stream.own_id() != slab.stream;
        Ok(identity_of(&slab.block, slab.stream))
    }

    /// Frees idle slabs of at least this number of bytes, if possible, and returns the freed bytes.
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

// SAFETY: a block is a lease of a slab, which is leased again only on its stream, or freed after recorded uses.
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
        // If the stream was retired, its later work must be recorded first.
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

    /// Used are the bytes of leased slabs, reserved those of all slabs; cached blocks are idle slabs.
    fn usage(&self) -> Result<Usage, Error> {
        Ok(self.figures())
    }

    /// Frees idle slabs, the largest first, then trims the allocator.
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
