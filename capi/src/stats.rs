//! Statistics for C.

use std::mem::size_of;
use std::ptr;

use cualloc::Allocator;
use cualloc::allocator::{Counter, PoolStats, Regime, Scarcity};

use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::{cualloc_t, handles};

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
    /// Bytes that graph pools reserve from the driver, including released pools that still have memory. They count
    /// against the limit and in held, but not in reserved.
    pub graph_pools: u64,
    /// Bytes of the device that growth leaves free.
    pub headroom: u64,
    /// Whether the packed policy currently saves driver calls or bytes, and why: CUALLOC_MEMORY_PLENTIFUL or one of
    /// CUALLOC_MEMORY_SCARCE_*.
    pub regime: u64,
    /// Bytes that growable ranges reserve from the driver, including decommitted ones. They count against the limit and
    /// in held, but not in reserved.
    pub ranges: u64,
    /// The part of ranges that is decommitted.
    pub ranges_leaving: u64,
    /// The figures of graph pools, which no figure above except graph_pools includes.
    pub pooled: cualloc_pool_stats_t,
    /// Bytes held from the driver for any purpose: reserved, graph_pools and ranges.
    pub held: cualloc_counter_t,
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

/// Adds the blocks and the memory of graph pools to the figures of all blocks and of large ones, and makes `reserved`
/// all that is held. The peaks of two summands may belong to different times: their sum is an upper bound of the peak of
/// the sum, and for bytes so is the peak of all that is held.
pub(crate) fn with_graph_pools(mut stats: cualloc_stats_t) -> cualloc_stats_t {
    let (pooled, held) = (stats.pooled, stats.held);
    let add = |to: &mut cualloc_counter_t, from: &cualloc_counter_t, most: u64| {
        to.current += from.current;
        to.peak = (to.peak + from.peak).min(most);
        to.total += from.total;
    };
    let large = &mut stats.large_pool;
    for (bytes, pooled) in [
        (&mut stats.requested, &pooled.requested),
        (&mut stats.allocated, &pooled.allocated),
        (&mut stats.active, &pooled.active),
        (&mut large.requested, &pooled.requested),
        (&mut large.allocated, &pooled.allocated),
        (&mut large.active, &pooled.active),
        (&mut large.reserved, &pooled.reserved),
    ] {
        add(bytes, pooled, held.peak);
    }
    for (number, pooled) in [
        (&mut stats.blocks, &pooled.blocks),
        (&mut stats.segments, &pooled.segments),
        (&mut large.blocks, &pooled.blocks),
        (&mut large.segments, &pooled.segments),
    ] {
        add(number, pooled, u64::MAX);
    }
    stats.reserved = held;
    stats
}

/// Writes an allocator's statistics to the caller's structure, after `change`; zeros if the call fails.
///
/// # Safety
/// `out` is null or points to a structure of `struct_size` bytes.
pub(crate) unsafe fn report(
    allocator: *mut cualloc_t,
    out: *mut cualloc_stats_t,
    change: fn(cualloc_stats_t) -> cualloc_stats_t,
) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    let room = unsafe { room(out) }?;
    // SAFETY: the caller's contract.
    let write = |stats: &cualloc_stats_t| unsafe { write(stats, out, room) };
    write(&cualloc_stats_t::default());
    write(&handles::with(allocator, |allocator| {
        Ok(change(of(allocator)))
    })?);
    Ok(())
}

/// Returns an allocator's current statistics.
fn of(allocator: &Allocator) -> cualloc_stats_t {
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
        pooled: (&stats.pooled).into(),
        held: (&stats.held).into(),
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

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::ptr::null_mut;

    use crate::pool_tests::{Asked, allocator, enter, pool_of, scope};
    use crate::tests::world;
    use crate::*;

    use super::cualloc_counter_t;

    const MIB: u64 = 1 << 20;

    fn figures(
        allocator: *mut cualloc_t,
        of: unsafe extern "C" fn(*mut cualloc_t, *mut cualloc_stats_t) -> i32,
    ) -> cualloc_stats_t {
        let struct_size = size_of::<cualloc_stats_t>();
        let mut stats = cualloc_stats_t {
            struct_size,
            ..Default::default()
        };
        // SAFETY: the structure has the size that it states.
        assert_eq!(unsafe { of(allocator, &mut stats) }, CUALLOC_OK);
        stats
    }

    fn block(allocator: *mut cualloc_t, bytes: u64) -> u64 {
        let mut out = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { cualloc_alloc(allocator, bytes as usize, null_mut(), &mut out) };
        assert_eq!(code, CUALLOC_OK);
        out
    }

    fn free(allocator: *mut cualloc_t, block: u64) {
        // SAFETY: nothing uses the block.
        assert_eq!(unsafe { cualloc_free(allocator, block) }, CUALLOC_OK);
    }

    /// 32 MiB of ordinary memory come and go, then 12 and 8 MiB in a pool, while 4 MiB of ordinary memory are live.
    #[test]
    fn statistics_of_pytorch_include_graph_pools() {
        let _one = world();
        let (allocator, asked) = (allocator(), Asked::default());
        free(allocator, block(allocator, 32 * MIB));
        // SAFETY: the pointer to the result may be null.
        let trimmed = unsafe { cualloc_trim(allocator, 0, null_mut(), null_mut()) };
        assert_eq!(trimmed, CUALLOC_OK);
        let ordinary = block(allocator, 4 * MIB);
        let pool = pool_of(allocator);
        let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
        assert_eq!(code, CUALLOC_OK);
        let pooled = [12 * MIB, 8 * MIB].map(|bytes| block(allocator, bytes));
        assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);

        let (own, all) = (
            figures(allocator, cualloc_stats),
            figures(allocator, cualloc_torch_stats),
        );
        let now = |of: cualloc_counter_t| (of.current, of.peak);
        assert_eq!(now(own.allocated), (4 * MIB, 32 * MIB));
        assert_eq!(now(own.pooled.allocated), (20 * MIB, 20 * MIB));
        assert_eq!(own.pooled.reserved.current, own.graph_pools);
        assert_eq!(own.held.current, own.reserved.current + own.graph_pools);
        assert!((32 * MIB..52 * MIB).contains(&own.held.peak), "{own:?}");
        // The peak of the sum is at most that of the memory held.
        assert_eq!(now(all.allocated), (24 * MIB, own.held.peak));
        assert_eq!(now(all.large_pool.allocated), (24 * MIB, own.held.peak));
        assert_eq!(all.allocated.total, 56 * MIB);
        assert_eq!((all.blocks.current, all.blocks.peak), (3, 3));
        assert_eq!((all.reserved, all.pooled), (own.held, own.pooled));
        assert_eq!(cualloc_reset_peaks(allocator), CUALLOC_OK);
        let all = figures(allocator, cualloc_torch_stats);
        assert_eq!(now(all.allocated), (24 * MIB, 24 * MIB));
        assert_eq!(all.held.peak, all.held.current);

        pooled.into_iter().for_each(|block| free(allocator, block));
        free(allocator, ordinary);
        let all = figures(allocator, cualloc_torch_stats);
        assert_eq!((all.allocated.current, all.active.current), (0, 0));
        assert_eq!(all.pooled.allocated.total, 20 * MIB);
        assert_eq!(cualloc_pool_release(pool), CUALLOC_OK);
        assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    }
}
