//! Stream-ordered memory pools.

use super::args::{In, Out};
use super::call::{R, fail};
use super::objects::{Free, Live, Pool};
use super::physical::Origin;
use super::state::State;
use super::work::Work;
use crate::driver::sys::*;
use std::ffi::{c_int, c_void};

/// Pools take memory from the device in units of this.
const UNIT: u64 = 32 << 20;
const ALIGN: u64 = 512;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    /// The number of a pool, which has to be alive.
    pub(super) fn pool(&mut self, pool: CUmemoryPool) -> R<u64> {
        let value = pool as u64;
        match self.pools.get(&value) {
            Some(entry) if !entry.destroyed => Ok(value),
            _ => {
                let existed = value != 0 && value < self.next_pool;
                self.dead("pool", value, existed);
                fail(INVALID)
            }
        }
    }

    fn add_pool(&mut self, pool: Pool) -> u64 {
        let value = self.next_pool;
        self.next_pool += 1;
        self.pools.insert(value, pool);
        value
    }

    fn default_pool(&mut self, device: CUdevice) -> R<u64> {
        let device = self.device_index(device)?;
        if !self.config.devices[device].pools {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        if let Some(pool) = self.devices[device].default_pool {
            return Ok(pool);
        }
        let none = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
        let pool = self.add_pool(Pool::new(device, true, 0, none));
        self.devices[device].default_pool = Some(pool);
        Ok(pool)
    }

    fn current_pool(&mut self, device: CUdevice) -> R<u64> {
        let default = self.default_pool(device)?;
        Ok(self.devices[self.device_index(device)?]
            .pool
            .unwrap_or(default))
    }

    /// Takes a block for a queue: reuse in the documented order of preference, then growth.
    fn pool_take(&mut self, value: u64, bytes: u64, queue: u32) -> R<u64> {
        let bytes = bytes
            .checked_next_multiple_of(ALIGN)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        self.follow_host(queue);
        let Some(pool) = self.pools.get(&value) else {
            return fail(INVALID);
        };
        let known = &self.queues[queue as usize].clock;
        let rank = |free: &Free| {
            let done = self.queues[free.queue as usize].done >= free.seq;
            if free.queue == queue || self.host.covers(free.queue, free.seq) {
                Some(0)
            } else if pool.follow_events && known.covers(free.queue, free.seq) {
                Some(1)
            } else if pool.opportunistic && done {
                Some(2)
            } else {
                pool.internal.then_some(3)
            }
        };
        let best = pool
            .free
            .iter()
            .filter(|(_, free)| free.bytes >= bytes)
            .filter_map(|(&start, free)| Some((rank(free)?, free.bytes, start)))
            .min();
        let start = match best {
            Some((_, _, start)) => start,
            None => self.pool_grow(value, bytes, queue)?,
        };
        let Some(pool) = self.pools.get_mut(&value) else {
            return fail(INVALID);
        };
        let Some(free) = pool.free.remove(&start) else {
            return fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        };
        let rest = free.bytes - bytes;
        pool.used += bytes;
        pool.used_high = pool.used_high.max(pool.used);
        let (other, seq, clock) = (free.queue, free.seq, free.clock.clone());
        if rest > 0 {
            pool.free.insert(
                start + bytes,
                Free {
                    bytes: rest,
                    ..free
                },
            );
        }
        self.pool_blocks.insert(start, Live { bytes, pool: value });
        self.submit_wait(queue, other, seq, &clock);
        // Opportunistic reuse has observed the free complete, so it precedes this allocation.
        self.order_after(queue, other, seq, &clock);
        self.submit_turn(queue, value, start, bytes);
        Ok(start)
    }

    /// Orders uses of pool memory after its allocation and before its free, by streams or events.
    fn submit_turn(&mut self, queue: u32, pool: u64, address: u64, bytes: u64) -> u64 {
        let device = match self.pools.get(&pool) {
            Some(pool) => pool.device,
            None => return self.submit(queue, Work::Record, 0),
        };
        let turn = Work::Turn {
            address,
            bytes,
            device,
        };
        self.submit(queue, turn, 0)
    }

    fn pool_grow(&mut self, value: u64, bytes: u64, queue: u32) -> R<u64> {
        let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let size = bytes.checked_next_multiple_of(UNIT).ok_or(out_of_memory)?;
        let Some(pool) = self.pools.get(&value) else {
            return fail(INVALID);
        };
        let (device, access) = (pool.device, pool.access);
        if pool.max != 0
            && pool.reserved().saturating_add(size) > pool.max.div_ceil(UNIT).saturating_mul(UNIT)
        {
            return fail(out_of_memory);
        }
        if size > self.free_bytes(device) {
            self.release_pool_segments(value, 0);
        }
        if size > self.free_bytes(device) {
            return fail(out_of_memory);
        }
        let start = self.plain_range(size, UNIT)?;
        let alloc = self.create(device, size, 0, super::physical::Props::default())?;
        self.map(start, alloc, Origin::Pool(value), access);
        let clock = self.queues[queue as usize].clock.clone();
        if let Some(pool) = self.pools.get_mut(&value) {
            pool.segments.insert(start, size);
            pool.reserved_high = pool.reserved_high.max(pool.reserved());
            pool.free.insert(
                start,
                Free {
                    bytes: size,
                    queue,
                    seq: 0,
                    clock,
                },
            );
        }
        Ok(start)
    }

    fn pool_give(&mut self, start: u64, queue: u32) -> R {
        let Some(block) = self.pool_blocks.remove(&start) else {
            self.dead("pool allocation", start, false);
            return fail(INVALID);
        };
        let seq = self.submit_turn(queue, block.pool, start, block.bytes);
        let clock = self.queues[queue as usize].clock.clone();
        let Some(pool) = self.pools.get_mut(&block.pool) else {
            return Ok(());
        };
        pool.used -= block.bytes;
        let mut free = Free {
            bytes: block.bytes,
            queue,
            seq,
            clock,
        };
        let mut start = start;
        // Neighbours freed by the same queue merge; the newer free covers the older one.
        if let Some((&before, left)) = pool.free.range(..start).next_back()
            && before + left.bytes == start
            && (left.queue == queue || left.seq == 0)
            && !pool.segments.contains_key(&start)
        {
            free.bytes += left.bytes;
            pool.free.remove(&before);
            start = before;
        }
        let end = start + free.bytes;
        if let Some(right) = pool.free.get(&end)
            && (right.queue == queue || right.seq == 0)
            && !pool.segments.contains_key(&end)
        {
            free.bytes += right.bytes;
            pool.free.remove(&end);
        }
        pool.free.insert(start, free);
        if pool.destroyed && pool.used == 0 {
            self.release_pool_segments(block.pool, 0);
        }
        Ok(())
    }

    /// `cuMemFree` of a pool pointer: does not wait, the caller has.
    pub(super) fn free_pool_block_now(&mut self, start: u64) -> R {
        let ctx = self.current()?;
        let queue = self.queue(std::ptr::null_mut())?;
        debug_assert_eq!(self.queues[queue as usize].ctx, ctx);
        self.pool_give(start, queue)
    }

    /// Releases whole free segments until `keep` bytes are left, if the host has observed their frees complete.
    fn release_pool_segments(&mut self, value: u64, keep: u64) {
        let Some(pool) = self.pools.get_mut(&value) else {
            return;
        };
        let mut reserved = pool.reserved();
        let mut gone = Vec::new();
        for (&start, &size) in pool.segments.iter().rev() {
            if reserved <= keep || reserved - size < keep {
                break;
            }
            let parts = pool.free.range(start..start + size);
            let total: u64 = parts.clone().map(|(_, free)| free.bytes).sum();
            let done = parts
                .clone()
                .all(|(_, free)| self.host.covers(free.queue, free.seq));
            if total == size && done {
                gone.push((start, size));
                reserved -= size;
            }
        }
        for &(start, size) in &gone {
            pool.segments.remove(&start);
            pool.free
                .retain(|at, _| !(start..start + size).contains(at));
        }
        let empty = pool.destroyed && pool.segments.is_empty();
        // The addresses are never reused, so that a stale one is recognised.
        for (start, _) in gone {
            self.unmap(start);
        }
        if empty {
            self.pools.remove(&value);
        }
    }

    /// Releases the memory of pools above their thresholds, after the host has synchronised.
    pub(super) fn pools_synchronised(&mut self) {
        if self.pools.is_empty() {
            return;
        }
        let list: Vec<(u64, u64)> = self
            .pools
            .iter()
            .map(|(&value, pool)| (value, pool.threshold))
            .collect();
        for (value, threshold) in list {
            self.release_pool_segments(value, threshold);
        }
    }

    /// Pools made by the user and not destroyed.
    pub(super) fn user_pools(&self) -> usize {
        self.pools
            .values()
            .filter(|pool| !pool.default && !pool.destroyed)
            .count()
    }

    fn alloc_async(&mut self, out: &Out<CUdeviceptr>, bytes: usize, pool: u64, queue: u32) -> R {
        out.check()?;
        if bytes == 0 {
            return fail(INVALID);
        }
        if self.captured_links(queue)?.is_some() {
            // Graph memory is not modelled.
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        self.refuse_during_capture()?;
        let start = self.pool_take(pool, bytes as u64, queue)?;
        out.set(start)
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemAllocAsync(
        &mut self,
        out: Out<CUdeviceptr>,
        bytes: usize,
        stream: CUstream,
    ) -> R {
        let queue = self.queue(stream)?;
        let device = self.ctxs[self.queues[queue as usize].ctx].device;
        let pool = self.current_pool(device as CUdevice)?;
        self.alloc_async(&out, bytes, pool, queue)
    }

    pub(super) fn cuMemAllocFromPoolAsync(
        &mut self,
        out: Out<CUdeviceptr>,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) -> R {
        let queue = self.queue(stream)?;
        let pool = self.pool(pool)?;
        self.alloc_async(&out, bytes, pool, queue)
    }

    pub(super) fn cuMemFreeAsync(&mut self, dptr: CUdeviceptr, stream: CUstream) -> R {
        let queue = self.queue(stream)?;
        if dptr == 0 {
            return fail(INVALID);
        }
        if self.captured_links(queue)?.is_some() {
            return fail(INVALID);
        }
        self.pool_give(dptr, queue)
    }

    pub(super) fn cuMemPoolCreate(
        &mut self,
        out: Out<CUmemoryPool>,
        props: In<CUmemPoolProps>,
    ) -> R {
        out.check()?;
        let props = props.get()?;
        if props.allocType != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
            || props.reserved.iter().any(|&byte| byte != 0)
            || props.location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
        {
            return fail(INVALID);
        }
        let device = self.device_index(props.location.id)?;
        if !self.config.devices[device].pools {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let pool = Pool::new(device, false, props.maxSize as u64, props.handleTypes);
        let value = self.add_pool(pool);
        out.set(value as CUmemoryPool)
    }

    pub(super) fn cuMemPoolDestroy(&mut self, pool: CUmemoryPool) -> R {
        let value = self.pool(pool)?;
        if let Some(pool) = self.pools.get_mut(&value) {
            if pool.default {
                return fail(INVALID);
            }
            if pool.imports > 0 {
                pool.imports -= 1;
                return Ok(());
            }
            pool.destroyed = true;
            pool.threshold = 0;
            // The pool may be destroyed immediately, although its queued frees are not complete: the driver holds the
            // memory until they are.
        }
        for device in &mut self.devices {
            device.pool = device.pool.filter(|&current| current != value);
        }
        self.release_pool_segments(value, 0);
        Ok(())
    }

    pub(super) fn cuMemPoolTrimTo(&mut self, pool: CUmemoryPool, keep: usize) -> R {
        let value = self.pool(pool)?;
        self.release_pool_segments(value, keep as u64);
        Ok(())
    }

    pub(super) fn cuMemPoolSetAttribute(
        &mut self,
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: Out<c_void>,
    ) -> R {
        type A = CUmemPool_attribute;
        let handle = self.pool(pool)?;
        let Some(pool) = self.pools.get_mut(&handle) else {
            return fail(INVALID);
        };
        match attribute {
            A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => {
                pool.follow_events = value.cast::<c_int>().get()? != 0;
            }
            A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => {
                pool.opportunistic = value.cast::<c_int>().get()? != 0;
            }
            A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                pool.internal = value.cast::<c_int>().get()? != 0;
            }
            A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold = value.cast::<u64>().get()?,
            A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if value.cast::<u64>().get()? == 0 => {
                pool.reserved_high = pool.reserved();
            }
            A::CU_MEMPOOL_ATTR_USED_MEM_HIGH if value.cast::<u64>().get()? == 0 => {
                pool.used_high = pool.used;
            }
            _ => return fail(INVALID),
        }
        Ok(())
    }

    pub(super) fn cuMemPoolGetAttribute(
        &mut self,
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: Out<c_void>,
    ) -> R {
        type A = CUmemPool_attribute;
        let handle = self.pool(pool)?;
        let Some(pool) = self.pools.get(&handle) else {
            return fail(INVALID);
        };
        let number = match attribute {
            A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => {
                return value.cast().set(c_int::from(pool.follow_events));
            }
            A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => {
                return value.cast().set(c_int::from(pool.opportunistic));
            }
            A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                return value.cast().set(c_int::from(pool.internal));
            }
            A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold,
            A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => pool.reserved(),
            A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => pool.reserved_high,
            A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT => pool.used,
            A::CU_MEMPOOL_ATTR_USED_MEM_HIGH => pool.used_high,
            _ => return fail(INVALID),
        };
        value.cast().set(number)
    }

    pub(super) fn cuMemPoolSetAccess(
        &mut self,
        pool: CUmemoryPool,
        list: In<CUmemAccessDesc>,
        count: usize,
    ) -> R {
        let handle = self.pool(pool)?;
        for desc in list.read(count)? {
            let device = self.device_index(desc.location.id)?;
            let Some(pool) = self.pools.get_mut(&handle) else {
                return fail(INVALID);
            };
            let owner = pool.device;
            let on = desc.flags.0 != 0;
            if device == owner && !on {
                return fail(INVALID);
            }
            pool.access = if on {
                pool.access | 1 << device
            } else {
                pool.access & !(1 << device)
            };
            let (access, starts) = (
                pool.access,
                pool.segments.keys().copied().collect::<Vec<_>>(),
            );
            if !self.reaches(device, owner) {
                return fail(CUresult::CUDA_ERROR_INVALID_DEVICE);
            }
            for start in starts {
                if let Some(mapping) = self.mappings.get_mut(&start) {
                    mapping.readers = access;
                    mapping.writers = access;
                }
            }
        }
        Ok(())
    }

    pub(super) fn cuMemPoolGetAccess(
        &mut self,
        flags: Out<CUmemAccess_flags>,
        pool: CUmemoryPool,
        location: Out<CUmemLocation>,
    ) -> R {
        let handle = self.pool(pool)?;
        let device = self.device_index(location.get()?.id)?;
        let on = self
            .pools
            .get(&handle)
            .is_some_and(|pool| pool.access & (1 << device) != 0);
        flags.set(match on {
            true => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            false => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        })
    }

    pub(super) fn cuDeviceGetDefaultMemPool(&mut self, out: Out<CUmemoryPool>, dev: CUdevice) -> R {
        let pool = self.default_pool(dev)?;
        out.set(pool as CUmemoryPool)
    }

    pub(super) fn cuDeviceGetMemPool(&mut self, out: Out<CUmemoryPool>, dev: CUdevice) -> R {
        let pool = self.current_pool(dev)?;
        out.set(pool as CUmemoryPool)
    }

    pub(super) fn cuDeviceSetMemPool(&mut self, dev: CUdevice, pool: CUmemoryPool) -> R {
        let device = self.device_index(dev)?;
        let value = self.pool(pool)?;
        if self
            .pools
            .get(&value)
            .is_none_or(|pool| pool.device != device)
        {
            return fail(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        self.devices[device].pool = Some(value);
        Ok(())
    }
}
