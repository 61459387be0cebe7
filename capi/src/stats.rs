//! Statistics as C sees them.

use std::mem::size_of;
use std::ptr;

use cualloc::Allocator;
use cualloc::allocator::{Counter, PoolStats, Regime, Scarcity};

use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};

/// A quantity over time: bytes or a number, as the field that holds it says.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_counter_t {
    /// Now.
    pub current: u64,
    /// The largest value since the start, or since cualloc_reset_peaks.
    pub peak: u64,
    /// Everything that was ever added. What was taken away is this less current.
    pub total: u64,
}

/// Figures of the blocks of one kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_pool_stats_t {
    /// Bytes of live blocks, as they were asked for.
    pub requested: cualloc_counter_t,
    /// Bytes of live blocks, rounded up as they are handed out.
    pub allocated: cualloc_counter_t,
    /// Bytes held from the driver.
    pub reserved: cualloc_counter_t,
    /// Bytes of live blocks, and of freed ones that streams other than their own still use.
    pub active: cualloc_counter_t,
    /// Live blocks, a number.
    pub blocks: cualloc_counter_t,
    /// Pieces of memory held from the driver (segments or physical handles), a number.
    pub segments: cualloc_counter_t,
}

/// Figures of an allocator, all of one instant. The caller sets struct_size to sizeof(cualloc_stats_t) before the
/// call. Later versions of the library add fields at the end: a caller with a smaller structure gets the fields that
/// it has, and of a larger one the library leaves untouched what it does not know.
///
/// Peaks of requested, active and blocks can be upper bounds; those of allocated and reserved are exact.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_stats_t {
    /// Bytes of this structure as the caller knows it. Not changed.
    pub struct_size: usize,
    /// Bytes of live blocks, as they were asked for.
    pub requested: cualloc_counter_t,
    /// Bytes of live blocks, rounded up as they are handed out.
    pub allocated: cualloc_counter_t,
    /// Bytes held from the driver.
    pub reserved: cualloc_counter_t,
    /// Bytes of live blocks, and of freed ones that streams other than their own still use.
    pub active: cualloc_counter_t,
    /// Live blocks, a number.
    pub blocks: cualloc_counter_t,
    /// Pieces of memory held from the driver (segments or physical handles), a number.
    pub segments: cualloc_counter_t,
    /// Allocations that failed for lack of memory.
    pub ooms: u64,
    /// Driver allocations that failed for lack of memory and were tried again after room was made.
    pub retries: u64,
    /// Calls of the driver so far, by everything in the process that uses this library.
    pub driver_calls: u64,
    /// Allocations served from cached memory.
    pub hits: u64,
    /// Allocations that needed memory from the driver, or failed.
    pub misses: u64,
    /// The bound on bytes held from the driver, UINT64_MAX if there is none.
    pub limit: u64,
    /// Bytes of free memory, whatever work still uses it.
    pub free_bytes: u64,
    /// Bytes of the largest piece of it.
    pub largest_free: u64,
    /// Streams that the allocator knows now.
    pub streams: u64,
    /// The part of it all that small blocks have. Which blocks are small is the policy's business.
    pub small_pool: cualloc_pool_stats_t,
    /// The part of it all that other blocks have.
    pub large_pool: cualloc_pool_stats_t,
    /// Bytes that graph pools hold from the driver, those that were released and still have them among them. No other
    /// figure here counts them; the limit does.
    pub graph_pools: u64,
    /// Bytes of the device that growth leaves free.
    pub headroom: u64,
    /// Whether the packed policy saves driver calls or bytes, and why: CUALLOC_MEMORY_PLENTIFUL or one of
    /// CUALLOC_MEMORY_SCARCE_*.
    pub regime: u64,
}

/// Memory is plentiful: the allocator saves driver calls.
pub const CUALLOC_MEMORY_PLENTIFUL: u64 = 0;
/// Memory is scarce, because profile=dense says so: the allocator saves bytes.
pub const CUALLOC_MEMORY_SCARCE_PROFILE: u64 = 1;
/// Memory is scarce, because the limit is near.
pub const CUALLOC_MEMORY_SCARCE_LIMIT: u64 = 2;
/// Memory is scarce, because the device has little free beside the headroom.
pub const CUALLOC_MEMORY_SCARCE_DEVICE: u64 = 3;
/// Memory is scarce, because the driver refused some.
pub const CUALLOC_MEMORY_SCARCE_REFUSED: u64 = 4;

fn regime_number(regime: Regime) -> u64 {
    match regime {
        Regime::Scarce(Scarcity::Profile) => CUALLOC_MEMORY_SCARCE_PROFILE,
        Regime::Scarce(Scarcity::Limit) => CUALLOC_MEMORY_SCARCE_LIMIT,
        Regime::Scarce(Scarcity::Device) => CUALLOC_MEMORY_SCARCE_DEVICE,
        Regime::Scarce(Scarcity::Refused) => CUALLOC_MEMORY_SCARCE_REFUSED,
        _ => CUALLOC_MEMORY_PLENTIFUL,
    }
}

impl From<&Counter> for cualloc_counter_t {
    fn from(counter: &Counter) -> Self {
        cualloc_counter_t {
            current: counter.current,
            peak: counter.peak,
            total: counter.total_allocated,
        }
    }
}

impl From<&PoolStats> for cualloc_pool_stats_t {
    fn from(pool: &PoolStats) -> Self {
        cualloc_pool_stats_t {
            requested: (&pool.requested).into(),
            allocated: (&pool.allocated).into(),
            reserved: (&pool.reserved).into(),
            active: (&pool.active).into(),
            blocks: (&pool.allocations).into(),
            segments: (&pool.segments).into(),
        }
    }
}

/// An allocator's figures now.
pub(crate) fn of(allocator: &Allocator) -> cualloc_stats_t {
    let stats = allocator.stats();
    let all = cualloc_pool_stats_t::from(&stats.all);
    cualloc_stats_t {
        struct_size: size_of::<cualloc_stats_t>(),
        requested: all.requested,
        allocated: all.allocated,
        reserved: all.reserved,
        active: all.active,
        blocks: all.blocks,
        segments: all.segments,
        ooms: stats.ooms,
        retries: stats.retries,
        driver_calls: allocator.driver_calls().total(),
        hits: stats.hits,
        misses: stats.misses,
        limit: stats.limit.unwrap_or(u64::MAX),
        free_bytes: stats.free,
        largest_free: stats.largest_free,
        streams: stats.streams,
        small_pool: (&stats.small).into(),
        large_pool: (&stats.large).into(),
        graph_pools: stats.graph_pools,
        headroom: stats.headroom,
        regime: regime_number(stats.packing.regime),
    }
}

/// How many bytes after `struct_size` the caller's structure takes, whole fields of 8 bytes.
///
/// # Safety
/// `out` is null, or points to the caller's structure, which begins with its size.
pub(crate) unsafe fn room<T>(out: *const T) -> Result<usize, Failure> {
    if out.is_null() {
        return Err(NULL);
    }
    let first = size_of::<usize>();
    // SAFETY: every version of the structure begins with its size.
    let size = unsafe { out.cast::<usize>().read() };
    if size < first {
        let why = "struct_size is not set: it is smaller than itself";
        return Err(Failure::Said(CUALLOC_INVALID_ARGUMENT, why));
    }
    let bytes = size.min(size_of::<T>()) - first;
    Ok(bytes - bytes % size_of::<u64>())
}

/// Writes so many bytes of the figures behind the caller's `struct_size`.
///
/// # Safety
/// `room` is what [`room`] says of `out`.
pub(crate) unsafe fn write<T>(figures: &T, out: *mut T, room: usize) {
    let first = size_of::<usize>();
    // SAFETY: both structures have these bytes, and they are different ones.
    unsafe {
        let from = ptr::from_ref(figures).cast::<u8>().add(first);
        ptr::copy_nonoverlapping(from, out.cast::<u8>().add(first), room);
    }
}

/// What the caller says by a structure that begins with its size, of this version or a later one.
///
/// # Safety
/// `from` is null, or points to as many bytes as its size says.
pub(crate) unsafe fn given<T: Copy>(from: *const T) -> Result<T, Failure> {
    // SAFETY: the caller's contract.
    let room = unsafe { room(from) }?;
    if room < size_of::<T>() - size_of::<usize>() {
        let why = "struct_size is that of no version of the structure";
        return Err(Failure::Said(CUALLOC_INVALID_ARGUMENT, why));
    }
    // SAFETY: it has all bytes of this version.
    Ok(unsafe { from.read() })
}
