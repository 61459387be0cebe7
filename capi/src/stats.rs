//! Statistics for C.

use std::mem::size_of;
use std::ptr;

use cualloc::Allocator;
use cualloc::allocator::{Counter, PoolStats, Regime, Scarcity};

use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};

/// A quantity over time, in bytes or as a number, depending on the field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_counter_t {
    /// The current value.
    pub current: u64,
    /// The largest value since the start, or since cualloc_reset_peaks.
    pub peak: u64,
    /// The sum of everything ever added. The sum of everything removed is total minus current.
    pub total: u64,
}

/// Statistics of one kind of block.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_pool_stats_t {
    /// Requested bytes of live blocks.
    pub requested: cualloc_counter_t,
    /// Bytes of live blocks, after rounding.
    pub allocated: cualloc_counter_t,
    /// Bytes reserved from the driver.
    pub reserved: cualloc_counter_t,
    /// Bytes of live blocks, and of freed ones that streams other than their own still use.
    pub active: cualloc_counter_t,
    /// Number of live blocks.
    pub blocks: cualloc_counter_t,
    /// Number of pieces of memory reserved from the driver (segments or physical handles).
    pub segments: cualloc_counter_t,
}

/// Statistics of an allocator, a consistent snapshot. Set struct_size to sizeof(cualloc_stats_t) before the call. Later
/// versions of the library add fields at the end: a smaller structure of the caller gets the fields that it has, and in
/// a larger one the fields that the library does not know are left untouched.
///
/// Peaks of requested, active and blocks can be upper bounds; those of allocated and reserved are exact.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct cualloc_stats_t {
    /// Size of this structure in bytes, as the caller knows it. Not changed.
    pub struct_size: usize,
    /// Requested bytes of live blocks.
    pub requested: cualloc_counter_t,
    /// Bytes of live blocks, after rounding.
    pub allocated: cualloc_counter_t,
    /// Bytes reserved from the driver.
    pub reserved: cualloc_counter_t,
    /// Bytes of live blocks, and of freed ones that streams other than their own still use.
    pub active: cualloc_counter_t,
    /// Number of live blocks.
    pub blocks: cualloc_counter_t,
    /// Number of pieces of memory reserved from the driver (segments or physical handles).
    pub segments: cualloc_counter_t,
    /// Allocations that failed for lack of memory.
    pub ooms: u64,
    /// Driver allocations that failed for lack of memory and were tried again after memory was released.
    pub retries: u64,
    /// Driver calls so far, by all users of this library in the process.
    pub driver_calls: u64,
    /// Allocations served from cached memory.
    pub hits: u64,
    /// Allocations that needed memory from the driver, or failed.
    pub misses: u64,
    /// The limit on bytes reserved from the driver, UINT64_MAX if there is none.
    pub limit: u64,
    /// Bytes of free memory, including memory that pending work still uses.
    pub free_bytes: u64,
    /// Size of the largest free piece, in bytes.
    pub largest_free: u64,
    /// Number of streams that the allocator currently knows.
    pub streams: u64,
    /// The figures of small blocks. Which blocks count as small depends on the policy.
    pub small_pool: cualloc_pool_stats_t,
    /// The figures of all other blocks.
    pub large_pool: cualloc_pool_stats_t,
    /// Bytes that graph pools reserve from the driver, including released pools that still have memory. No other figure
    /// here includes them, but they count against the limit.
    pub graph_pools: u64,
    /// Bytes of the device that growth leaves free.
    pub headroom: u64,
    /// Whether the packed policy currently saves driver calls or bytes, and why: CUALLOC_MEMORY_PLENTIFUL or one of
    /// CUALLOC_MEMORY_SCARCE_*.
    pub regime: u64,
    /// Bytes that growable ranges reserve from the driver, including decommitted ones. No other figure here includes
    /// them, but they count against the limit.
    pub ranges: u64,
    /// The part of ranges that is decommitted.
    pub ranges_leaving: u64,
}

/// Memory is plentiful: the allocator saves driver calls.
pub const CUALLOC_MEMORY_PLENTIFUL: u64 = 0;
/// Memory counts as scarce because of profile=dense: the allocator saves bytes.
pub const CUALLOC_MEMORY_SCARCE_PROFILE: u64 = 1;
/// Memory is scarce because the limit is near.
pub const CUALLOC_MEMORY_SCARCE_LIMIT: u64 = 2;
/// Memory is scarce because the device has little free memory beyond the headroom.
pub const CUALLOC_MEMORY_SCARCE_DEVICE: u64 = 3;
/// Memory is scarce because the driver refused an allocation.
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

/// Returns an allocator's current statistics.
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
        ranges: stats.ranges,
        ranges_leaving: stats.ranges_leaving,
    }
}

/// Returns the number of bytes after `struct_size` in the caller's structure, in whole fields of 8 bytes.
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
        let why = "struct_size is not set: it is smaller than the field itself";
        return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
    }
    let bytes = size.min(size_of::<T>()) - first;
    Ok(bytes - bytes % size_of::<u64>())
}

/// Writes the first `room` bytes of the figures after the caller's `struct_size`.
///
/// # Safety
/// `room` is the result of [`room`] for `out`.
pub(crate) unsafe fn write<T>(figures: &T, out: *mut T, room: usize) {
    let first = size_of::<usize>();
    // SAFETY: both structures have these bytes, and they do not overlap.
    unsafe {
        let from = ptr::from_ref(figures).cast::<u8>().add(first);
        ptr::copy_nonoverlapping(from, out.cast::<u8>().add(first), room);
    }
}

/// Reads a structure of the caller that begins with its size, of this version or a later one.
///
/// # Safety
/// `from` is null, or points to as many bytes as its size field states.
pub(crate) unsafe fn read_struct<T: Copy>(from: *const T) -> Result<T, Failure> {
    // SAFETY: the caller's contract.
    let room = unsafe { room(from) }?;
    if room < size_of::<T>() - size_of::<usize>() {
        let why = "struct_size is smaller than the first version of the structure";
        return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
    }
    // SAFETY: it has all bytes of this version.
    Ok(unsafe { from.read() })
}
