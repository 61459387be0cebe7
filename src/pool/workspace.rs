//! Scratch memory on lease.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::allocator::{Allocator, Block, Counter, Gauge, ReliefHook, Request, Trimmed, size};
use crate::block::{BlockId, BlockState};
use crate::buffer::DeviceBuffer;
use crate::driver::{Context, Stream, process, sys};
use crate::error::{Error, InvalidArgument, Refused};
use crate::locks::lock::Lock;
use crate::resource::{
    MemoryResource, RawBlock, Usage, UseTracking, is_of_retired_stream, next_source,
};
use crate::sync::capture;

use super::slabs::Slabs;

/// The smallest class in bytes.
const SMALLEST: usize = 1024;
/// Idle slabs to keep of each size, unless another number is set.
const CAP: usize = 4;

#[derive(Default)]
struct State {
    slabs: Slabs,
    /// Leases, and the bytes of their requests and of their slabs.
    leases: Gauge,
    requested: Gauge,
    used: Gauge,
    /// Bytes of all slabs.
    reserved: Counter,
    /// Leases that needed a new slab.
    misses: u64,
    /// Idle slabs to keep of each size.
    cap: usize,
}

struct Inner {
    allocator: Allocator,
    /// Tells this pool's blocks from those of every other source.
    source: u64,
    /// Whether a slab is the request rounded up to 512 bytes, instead of its size class.
    exact: bool,
    name: String,
    state: Lock<State>,
}

/// Scratch memory for kernels that need it for one launch, such as a matrix product's workspace: one
/// lease for each, dropped when the launch is queued.
///
/// A slab belongs to the stream it was leased on, so a lease that is dropped while its kernel is queued or
/// running may be leased again on that stream at once, and on no other one: there the allocator decides, as
/// with all memory. Four slabs of each size are kept, or as many as [`set_slab_cap`](Self::set_slab_cap) says
/// (4, 32 and 256 MiB are common sizes); what is beyond the cap goes back to the allocator, and all of them do
/// when it runs out of memory.
///
/// A lease is a [`DeviceBuffer`] as long as its slab. It has one owner and cannot be used after it is returned;
/// its [`id`](DeviceBuffer::id) is a name whose [`state`](MemoryResource::state) says whether it is. One that a
/// captured graph uses must live as long as the graph.
///
/// Handles are cheap to clone and share the pool. Idle slabs count as live blocks of the allocator:
/// drop the pool, or [`trim`](Self::trim) it, before [`Allocator::close`].
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Context;
/// use cualloc::{Allocator, Config, pool::WorkspacePool, resource::MemoryResource};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let allocator = Allocator::with_config(&context, Config::new())?;
/// let stream = allocator.create_stream()?;
/// let pool = WorkspacePool::new(&allocator);
/// for _ in 0..3 {
///     let lease = pool.lease(&stream, 3 << 20)?;
///     assert_eq!(lease.byte_len(), 4 << 20);
///     // Launch something with lease.as_device_ptr() on the stream here.
/// }
/// assert_eq!(pool.usage()?.misses, 1);
/// # }
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

    /// The size class of a request in bytes: the next power of two, at least 1024. `None` where there is
    /// none.
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

    /// Sets how many idle slabs of each size are kept; 0 counts as 1. Those that are idle above it stay
    /// until they are leased, or [trimmed](Self::trim).
    pub fn set_slab_cap(&self, slabs: usize) {
        if !process::is_forked_child() {
            self.0.change(|state| state.cap = slabs.max(1));
        }
    }

    fn make(allocator: &Allocator, exact: bool) -> WorkspacePool {
        let inner = Arc::new_cyclic(|weak: &std::sync::Weak<Inner>| {
            // Names of hooks tell them apart, and an address does for as long as the pool lives.
            let name = format!("workspaces at {:p}", weak.as_ptr());
            Inner {
                allocator: allocator.clone(),
                exact,
                name,
                source: next_source(),
                state: Lock::new(State {
                    cap: CAP,
                    ..State::default()
                }),
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

impl State {
    /// Takes the slab of a size that was returned last on a stream.
    #[inline(always)]
    fn take(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        self.slabs.take(stream, bytes)
    }

    /// Hands out a slab: its address, and the generation of its block.
    #[inline(always)]
    fn lend(&mut self, place: u32, requested: usize, bytes: usize) -> (sys::CUdeviceptr, u64) {
        self.leases.add(1);
        self.requested.add(requested as u64);
        self.used.add(bytes as u64);
        self.slabs.hand_out(place, requested)
    }

    /// Enters a slab that is new to the pool.
    fn add(&mut self, block: Block, of: (u64, usize), retirements: u64) -> u32 {
        self.reserved.add(of.1 as u64);
        self.slabs.add(block, of, retirements)
    }

    /// Removes a slab that is neither idle nor handed out, for its block to be freed without the lock.
    #[cold]
    #[inline(never)]
    fn remove(&mut self, place: u32) -> Option<(Block, (u64, usize))> {
        let removed = self.slabs.remove(place);
        let bytes = removed.as_ref().map_or(0, |(_, (_, bytes))| *bytes);
        self.reserved.sub(bytes as u64);
        removed
    }

    /// Takes a slab back; its block if it is too many.
    fn give(&mut self, place: u32) -> Option<Block> {
        if self.slabs.give(place, self.cap) {
            return None;
        }
        self.remove(place).map(|(block, _)| block)
    }

    /// Counts the end of a lease.
    #[inline(always)]
    fn count_returned(&mut self, requested: usize, bytes: usize) {
        self.leases.sub(1);
        self.requested.sub(requested as u64);
        self.used.sub(bytes as u64);
    }

    /// Ends a lease whose slab is kept, if that takes no look at anything else.
    #[inline(always)]
    fn take_back_at_once(&mut self, generation: u64) -> bool {
        let Some((requested, bytes)) = self.slabs.returned_at_once(generation, self.cap) else {
            return false;
        };
        self.count_returned(requested, bytes);
        true
    }

    /// Bytes of idle slabs.
    fn cached_bytes(&self) -> u64 {
        self.reserved.current - self.used.current()
    }

    fn usage(&self) -> Usage {
        let requests = self.leases.total();
        Usage {
            requested: self.requested.counter(),
            used: self.used.counter(),
            reserved: self.reserved,
            blocks: self.leases.counter(),
            cached_blocks: self.slabs.idle() as u64,
            requests,
            hits: requests - self.misses,
            misses: self.misses,
            ..Usage::default()
        }
    }
}

impl Inner {
    /// Hands out a slab, by name.
    #[inline(always)]
    fn hand_out(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let bytes = request.bytes();
        let slab_bytes = if self.exact {
            size::round_size(bytes).map(|rounded| rounded as usize)
        } else {
            WorkspacePool::size_class(bytes)
        };
        let Some(slab_bytes) = slab_bytes else {
            return Err(Error::Invalid(InvalidArgument::Size {
                bytes: bytes as u64,
            }));
        };
        super::same_device(stream, self.allocator.context())?;
        if self.allocator.engine().watchful() {
            capture::refuse_capture(stream)?;
        }
        let id = stream.id()?;
        // Before a look at a slab, so that a retirement meanwhile is looked for the next time.
        let retirements = self.allocator.engine().retirements();
        let (ptr, generation) = loop {
            let mut state = self.state.lock();
            let Some(place) = state.take(id, slab_bytes) else {
                drop(state);
                break self.slab((stream, id), bytes, (slab_bytes, retirements))?;
            };
            if state.slabs.at(place).retirements != retirements {
                drop(state);
                self.look_again(place, retirements);
                continue;
            }
            break state.lend(place, bytes, slab_bytes);
        };
        let ordinal = self.allocator.engine().device.ordinal();
        let id = BlockId::new((self.source, generation), (ptr, bytes), id, ordinal);
        // SAFETY: the pool has the slab, and gives it to nobody before this name is brought back.
        let mut block = unsafe { RawBlock::new(id, slab_bytes, request) };
        block.set_retirements(retirements);
        Ok(block)
    }

    /// A new slab, handed out.
    #[inline(never)]
    fn slab(
        &self,
        (stream, id): (&Stream, u64),
        bytes: usize,
        (slab_bytes, retirements): (usize, u64),
    ) -> Result<(sys::CUdeviceptr, u64), Error> {
        let block = self.allocator.allocate(slab_bytes, stream)?;
        let mut state = self.state.lock();
        if !state.slabs.has_room() {
            drop(state);
            let what = "slabs of a workspace pool";
            let maximum = Slabs::MAXIMUM;
            return Err(Error::Exhausted { what, maximum });
        }
        state.misses += 1;
        let place = state.add(block, (id, slab_bytes), retirements);
        Ok(state.lend(place, bytes, slab_bytes))
    }

    /// Takes back a lease, whose slab goes to the allocator at once if its stream was retired: what was said of
    /// that stream's work since holds for now. False if there is no such lease.
    #[inline(never)]
    fn take_back(&self, generation: u64, retired: bool) -> bool {
        let mut state = self.state.lock();
        let Some((place, back)) = state.slabs.returned(generation) else {
            return false;
        };
        state.count_returned(back.requested, back.bytes);
        let surplus = if back.shared || retired {
            state.remove(place).map(|(block, _)| block)
        } else {
            state.give(place)
        };
        drop(state);
        // Freed without the lock.
        drop(surplus);
        true
    }

    /// Whether a block is a lease that the pool may take back now.
    #[inline(always)]
    fn may_take_back(&self, block: &RawBlock) -> bool {
        // In a forked child there is nothing to give back to, and the lock may be held by a thread of the parent.
        !process::is_forked_child() && block.keepers() == 0 && block.id().source() == self.source
    }

    /// Some stream was retired since a lease was handed out: whether it was the slab's.
    #[cold]
    fn may_be_retired(&self, block: &RawBlock) -> bool {
        if !self.may_take_back(block) {
            return false;
        }
        let generation = block.id().generation();
        let slab = self.change(|state| state.slabs.leased(generation)?.identity());
        slab.is_some_and(|slab| is_of_retired_stream(&self.allocator, &slab))
    }

    /// Some stream was retired since a slab was taken: if it was the slab's it goes to the allocator, which
    /// does not count on more work of such a stream, else it is idle again.
    #[cold]
    fn look_again(&self, place: u32, retirements: u64) {
        let block = self.change(|state| state.remove(place));
        let Some((block, owner)) = block else { return };
        if block.stream_retired() {
            return;
        }
        let surplus = self.change(|state| {
            let place = state.add(block, owner, retirements);
            state.give(place)
        });
        drop(surplus);
    }

    /// The block of a lease, as the allocator names it; from now on it is not for the pool to reuse.
    fn shared(&self, id: &BlockId, stream: u64) -> Result<BlockId, Error> {
        self.change(|state| {
            let slab = match id.source() == self.source {
                true => state.slabs.leased(id.generation()),
                false => None,
            };
            let slab = slab.ok_or_else(|| id.gone())?;
            slab.shared |= stream != slab.stream;
            slab.identity().ok_or_else(|| id.gone())
        })
    }

    #[inline]
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock())
    }

    fn figures(&self) -> Usage {
        if process::is_forked_child() {
            return Usage::default();
        }
        self.change(|state| state.usage())
    }

    fn shrink_by(&self, bytes: u64) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        let idle = self.change(|state| state.cached_bytes());
        self.shrink_to(idle.saturating_sub(bytes))
    }

    fn shrink_to(&self, keep: u64) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        let gone = self.change(|state| {
            let mut keys: Vec<_> = state.slabs.keys().collect();
            // Of equal ones the streams in order, so that equal states shrink equally.
            keys.sort_unstable_by_key(|(stream, bytes)| (std::cmp::Reverse(*bytes), *stream));
            let mut gone = Vec::new();
            for (stream, bytes) in keys {
                while state.cached_bytes() > keep
                    && let Some(place) = state.take(stream, bytes)
                {
                    gone.extend(state.remove(place));
                }
            }
            gone
        });
        // Freed without the lock.
        gone.into_iter().map(|(_, (_, bytes))| bytes as u64).sum()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.allocator.remove_relief_hook(&self.name);
    }
}

impl fmt::Debug for WorkspacePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkspacePool")
            .field("exact", &self.0.exact)
            .field("usage", &self.0.figures())
            .finish()
    }
}

/// Each block is a lease; idle slabs count as used.
// SAFETY: each block stands for a slab that is handed out once, to its stream or with the allocator's word, which
// waits for recorded uses.
unsafe impl MemoryResource for Inner {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        if request.bytes() == 0 {
            return Err(InvalidArgument::Size { bytes: 0 }.into());
        }
        super::check_alignment(request.alignment())?;
        self.hand_out(request, stream)
    }

    fn deallocate_block(&self, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if self.take_back_at_once(&mut block) {
            return Ok(());
        }
        let generation = block.id().generation();
        // To be taken back with a look at more than the lease.
        if self.may_take_back(&block) && self.take_back(generation, self.has_retired_stream(&block))
        {
            return Ok(());
        }
        let why = match block.returned() {
            _ if process::is_forked_child() => Error::ForkedChild,
            Err(kept) => kept,
            Ok(()) => block.id().gone(),
        };
        Err(Refused::new(block, why))
    }

    fn take_back_at_once(&self, block: &mut RawBlock) -> bool {
        // Who gives back a lease of a retired stream has to say before that the stream may have got more work.
        if !self.may_take_back(block) || self.has_retired_stream(block) {
            return false;
        }
        let id = block.id();
        if let Some(mut state) = self.state.try_lock()
            && state.take_back_at_once(id.generation())
        {
            return true;
        }
        self.take_back(id.generation(), false)
    }

    #[inline]
    fn allocator_under(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn has_retired_stream(&self, block: &RawBlock) -> bool {
        self.allocator.engine().retirements() != block.retirements() && self.may_be_retired(block)
    }

    fn ordinal(&self) -> usize {
        self.allocator.engine().device.ordinal()
    }

    fn context(&self) -> Option<&Context> {
        Some(self.allocator.context())
    }

    fn id(&self) -> u64 {
        self.source
    }

    /// Of leases and slabs: used are the bytes of slabs on lease, reserved those of all slabs, and idle slabs the
    /// blocks that are cached.
    fn usage(&self) -> Result<Usage, Error> {
        Ok(self.figures())
    }

    /// Idle slabs first, the largest first, then the allocator's unused memory, which others may use as well.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let held = self.allocator.stats().all.reserved.current;
        let surplus = held.saturating_sub(keep);
        self.shrink_by(surplus);
        self.allocator.trim(keep)
    }

    fn reset_peak_stats(&self) {
        if !process::is_forked_child() {
            self.change(|state| {
                state.leases.reset_peak();
                state.requested.reset_peak();
                state.used.reset_peak();
                state.reserved.reset_peak();
            });
        }
    }

    fn state(&self, id: &BlockId) -> BlockState {
        if process::is_forked_child() || id.source() != self.source {
            return BlockState::Free;
        }
        match self.change(|state| state.slabs.leased(id.generation()).is_some()) {
            true => BlockState::Live,
            false => BlockState::Free,
        }
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Reuse
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let below = self.shared(id, stream.id()?)?;
        self.allocator.record_use(&below, stream)
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let below = self.shared(id, stream.id()?)?;
        self.allocator.record_stream(&below, stream)
    }
}

// SAFETY: passes everything on.
unsafe impl MemoryResource for WorkspacePool {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        self.0.allocate_block(request, stream)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.0.deallocate_block(block)
    }

    fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&*self.0)
    }

    #[inline]
    fn shared(&self) -> Arc<dyn MemoryResource> {
        Arc::clone(&self.0) as Arc<dyn MemoryResource>
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S4.1, S4.16
    #[test]
    fn s4_1_s4_16_classes_are_powers_of_two_and_do_not_overflow() {
        for (bytes, class) in [
            (0, 1024),
            (1, 1024),
            (1024, 1024),
            (1025, 2048),
            (4 << 20, 4 << 20),
            ((4 << 20) + 1, 8 << 20),
            (1 << 63, 1 << 63),
        ] {
            assert_eq!(WorkspacePool::size_class(bytes), Some(class), "{bytes}");
        }
        for bytes in [(1 << 63) + 1, usize::MAX] {
            assert_eq!(WorkspacePool::size_class(bytes), None);
        }
    }
}

#[cfg(all(test, unix, feature = "sim"))]
#[path = "forked.rs"]
mod forked;
