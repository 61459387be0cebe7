//! Scratch memory on lease.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::allocator::{Allocator, Block, ReliefHook, size};
use crate::driver::{Stream, process, sys};
use crate::error::{Error, InvalidArgument};
use crate::locks::lock::Lock;
use crate::resource::Table;

use super::slabs::{Slab, Slabs};

/// The smallest class in bytes.
const SMALLEST: usize = 1024;
/// Idle slabs to keep of each size, unless another number is set.
const CAP: usize = 4;

/// Figures of a [`WorkspacePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WorkspaceStats {
    /// Idle slabs.
    pub free_slabs: usize,
    /// Their bytes.
    pub free_bytes: u64,
    /// Leases out.
    pub leases: usize,
    /// Bytes that they were asked for with.
    pub requested_bytes: u64,
    /// Bytes of their slabs.
    pub leased_bytes: u64,
    /// Leases served by an idle slab since the start.
    pub hits: u64,
    /// Leases that were not.
    pub misses: u64,
}

struct State {
    idle: Slabs,
    stats: WorkspaceStats,
    /// Idle slabs to keep of each size.
    cap: usize,
}

struct Inner {
    allocator: Allocator,
    /// Whether a slab is the request rounded up to 512 bytes, instead of its size class.
    exact: bool,
    name: String,
    state: Lock<State>,
    /// Leases that go by their keys.
    keyed: Table<Lease>,
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
/// Handles are cheap to clone and share the pool. Idle slabs count as live blocks of the allocator:
/// drop the pool, or [`trim`](Self::trim) it, before [`Allocator::close`].
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Context;
/// use cualloc::{Allocator, Config, pool::WorkspacePool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let allocator = Allocator::with_config(&context, Config::new())?;
/// let stream = allocator.create_stream()?;
/// let pool = WorkspacePool::new(&allocator);
/// for _ in 0..3 {
///     let lease = pool.lease(&stream, 3 << 20)?;
///     assert_eq!(lease.size(), 4 << 20);
///     // Launch something with lease.ptr() on the stream here.
/// }
/// assert_eq!(pool.stats().misses, 1);
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
                state: Lock::new(State {
                    idle: Slabs::default(),
                    stats: WorkspaceStats::default(),
                    cap: CAP,
                }),
                keyed: Table::default(),
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

    /// Leases at least `bytes` for use on a stream.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] for a request without a class, and those of [`Allocator::allocate`].
    pub fn lease(&self, stream: &Stream, bytes: usize) -> Result<Lease, Error> {
        let pool = &self.0;
        let slab_bytes = if pool.exact {
            size::round_size(bytes).map(|rounded| rounded as usize)
        } else {
            Self::size_class(bytes)
        };
        let Some(slab_bytes) = slab_bytes else {
            return Err(Error::Invalid(InvalidArgument::Size {
                bytes: bytes as u64,
            }));
        };
        super::admit(stream, pool.allocator.context())?;
        let id = stream.id()?;
        // Before a look at a slab, so that a retirement meanwhile is looked for the next time.
        let retirements = pool.allocator.engine().retirements();
        let slab = loop {
            let mut state = pool.state.lock();
            let Some(slab) = state.take(id, slab_bytes) else {
                drop(state);
                break self.slab(stream, bytes, (slab_bytes, retirements))?;
            };
            if slab.retirements != retirements {
                drop(state);
                pool.look_again(slab, id, retirements);
                continue;
            }
            state.stats.hits += 1;
            state.leased(bytes, slab_bytes);
            break slab;
        };
        Ok(Lease {
            slab: Some(slab),
            pool: Arc::clone(pool),
            stream: id,
            requested: bytes,
            shared: AtomicBool::new(false),
        })
    }

    /// A new slab, and a lease of it in the figures.
    #[inline(never)]
    fn slab(
        &self,
        stream: &Stream,
        bytes: usize,
        (slab_bytes, retirements): (usize, u64),
    ) -> Result<Box<Slab>, Error> {
        let pool = &self.0;
        let block = pool.allocator.allocate(slab_bytes, stream)?;
        pool.change(|state| {
            state.stats.misses += 1;
            state.leased(bytes, slab_bytes);
        });
        Ok(Box::new(Slab {
            block,
            bytes: slab_bytes,
            retirements,
        }))
    }

    /// Gives idle slabs back to the allocator until at most `keep` bytes of them are left, the largest
    /// first; returns their bytes. The memory stays with the allocator, for all to use;
    /// [`Allocator::trim`] gives it back to the driver.
    pub fn trim(&self, keep: u64) -> u64 {
        self.0.shrink_to(keep)
    }

    /// Leases that go by their keys.
    pub(crate) fn keyed(&self) -> &Table<Lease> {
        &self.0.keyed
    }

    /// The figures, all of one instant.
    pub fn stats(&self) -> WorkspaceStats {
        if process::is_forked_child() {
            return WorkspaceStats::default();
        }
        self.0.change(|state| state.stats)
    }
}

impl State {
    #[inline]
    fn take(&mut self, stream: u64, bytes: usize) -> Option<Box<Slab>> {
        let slab = self.idle.take(stream, bytes)?;
        self.stats.free_slabs -= 1;
        self.stats.free_bytes -= bytes as u64;
        Some(slab)
    }

    #[inline]
    fn leased(&mut self, requested: usize, bytes: usize) {
        self.stats.leases += 1;
        self.stats.requested_bytes += requested as u64;
        self.stats.leased_bytes += bytes as u64;
    }

    /// Takes a slab back; gives it again if it is too many.
    #[inline]
    fn give(&mut self, slab: Box<Slab>, stream: u64) -> Option<Box<Slab>> {
        let bytes = slab.bytes;
        let surplus = self.idle.give(slab, stream, self.cap);
        if surplus.is_none() {
            self.stats.free_slabs += 1;
            self.stats.free_bytes += bytes as u64;
        }
        surplus
    }
}

impl Inner {
    /// Some stream was retired since a slab was taken: if it was the slab's it goes to the allocator, which
    /// does not count on more work of such a stream, else it is idle again.
    #[cold]
    fn look_again(&self, mut slab: Box<Slab>, stream: u64, retirements: u64) {
        if slab.block.stream_retired() {
            return;
        }
        slab.retirements = retirements;
        let surplus = self.change(|state| state.give(slab, stream));
        drop(surplus);
    }

    #[inline]
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock())
    }

    fn shrink_by(&self, bytes: u64) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        let idle = self.change(|state| state.stats.free_bytes);
        self.shrink_to(idle.saturating_sub(bytes))
    }

    fn shrink_to(&self, keep: u64) -> u64 {
        if process::is_forked_child() {
            return 0;
        }
        let gone = self.change(|state| {
            let mut keys: Vec<_> = state.idle.keys().collect();
            // Of equal ones the streams in order, so that equal states shrink equally.
            keys.sort_unstable_by_key(|(stream, bytes)| (std::cmp::Reverse(*bytes), *stream));
            let mut gone = Vec::new();
            for (stream, bytes) in keys {
                while state.stats.free_bytes > keep
                    && let Some(slab) = state.take(stream, bytes)
                {
                    gone.push(slab);
                }
            }
            gone
        });
        // Freed without the lock.
        gone.into_iter().map(|slab| slab.bytes as u64).sum()
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
            .field("stats", &self.stats())
            .finish()
    }
}

/// Scratch memory until it is dropped. Work that was queued before on the stream of the lease, and on
/// recorded ones, may still use it then: nobody else gets it before that is done.
///
/// It has one owner and cannot be used after it is returned:
/// ```compile_fail,E0382
/// # use cualloc::pool::Lease;
/// fn use_after_return(lease: Lease) {
///     drop(lease);
///     lease.ptr();
/// }
/// ```
/// ```compile_fail,E0599
/// # use cualloc::pool::Lease;
/// fn second_owner(lease: Lease) -> Lease {
///     lease.clone()
/// }
/// ```
///
/// A lease that a captured graph uses must live as long as the graph. `Send` and `Sync`.
#[must_use = "a lease that is dropped at once is of no use"]
pub struct Lease {
    slab: Option<Box<Slab>>,
    pool: Arc<Inner>,
    stream: u64,
    requested: usize,
    /// Whether other streams were recorded on it.
    shared: AtomicBool,
}

impl Lease {
    /// The first byte's address. Using it is for `unsafe` code, which answers for doing so while the
    /// lease lives, or by work queued before its drop.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.slab.as_ref().map_or(0, |slab| slab.block.ptr())
    }

    /// Bytes: those of the class, or of the request rounded up.
    pub fn size(&self) -> u64 {
        self.slab.as_ref().map_or(0, |slab| slab.bytes as u64)
    }

    /// Bytes as they were asked for.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// Says that another stream uses the lease, until it is dropped. The slab then goes back to the
    /// allocator, which knows when that stream is done.
    ///
    /// # Errors
    /// As [`Block::record_stream`].
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.share(stream, |block| block.record_stream(stream))
    }

    /// Says that another stream used the lease and will not again.
    ///
    /// # Errors
    /// As [`Block::record_use`].
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        self.share(stream, |block| block.record_use(stream))
    }

    fn share(
        &self,
        stream: &Stream,
        record: impl FnOnce(&Block) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(slab) = &self.slab {
            if stream.id()? != self.stream {
                self.shared.store(true, Ordering::Relaxed);
            }
            record(&slab.block)?;
        }
        Ok(())
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        let Some(slab) = self.slab.take() else {
            return;
        };
        if process::is_forked_child() {
            // There is nothing to give back to, and the lock may be held by a thread of the parent.
            return std::mem::forget(slab);
        }
        let shared = *self.shared.get_mut();
        let surplus = {
            let mut state = self.pool.state.lock();
            state.stats.leases -= 1;
            state.stats.requested_bytes -= self.requested as u64;
            state.stats.leased_bytes -= slab.bytes as u64;
            if shared {
                Some(slab)
            } else {
                state.give(slab, self.stream)
            }
        };
        // Freed without the lock.
        drop(surplus);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("ptr", &format_args!("{:#x}", self.ptr()))
            .field("size", &self.size())
            .field("requested", &self.requested)
            .finish()
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
