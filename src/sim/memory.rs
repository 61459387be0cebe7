//! Physical allocations, mappings, plain device memory and host memory.

use super::args::Out;
use super::call::{R, fail};
use super::contents::Contents;
use super::physical::{Alloc, Mapping, Origin, Props};
use super::race::{Entry, History};
use super::reports::Report;
use super::state::State;
use crate::driver::sys::*;

fn bit(device: usize) -> u64 {
    1 << device
}

impl State {
    /// Physical bytes still free on a device.
    pub(super) fn free_bytes(&self, device: usize) -> u64 {
        let used = self.devices[device].used + self.devices[device].taken;
        self.config.devices[device].memory.saturating_sub(used)
    }

    /// Takes physical memory.
    pub(super) fn create(
        &mut self,
        device: usize,
        bytes: u64,
        handle: u64,
        props: Props,
    ) -> R<u32> {
        self.create_charged(device, bytes, bytes, (handle, props))
    }

    /// [`create`](State::create) for memory whose size differs from the bytes that it takes from the device.
    pub(super) fn create_charged(
        &mut self,
        device: usize,
        bytes: u64,
        charged: u64,
        (handle, props): (u64, Props),
    ) -> R<u32> {
        if charged > self.free_bytes(device) {
            return fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.devices[device].used += charged;
        let alloc = Alloc {
            device,
            bytes,
            references: u64::from(handle != 0),
            mappings: 0,
            handle,
            props,
            charged,
            block_id: self.next_block_id,
            contents: Contents::default(),
            history: History::default(),
        };
        self.next_block_id += 1;
        Ok(match self.free_allocs.pop() {
            Some(index) => {
                self.allocs[index as usize] = Some(alloc);
                index
            }
            None => {
                self.allocs.push(Some(alloc));
                (self.allocs.len() - 1) as u32
            }
        })
    }

    /// Frees physical memory once nothing refers to it.
    pub(super) fn drop_unreferenced(&mut self, index: u32) {
        let Some(alloc) = &self.allocs[index as usize] else {
            return;
        };
        if alloc.references == 0 && alloc.mappings == 0 {
            self.devices[alloc.device].used -= alloc.charged;
            self.history_entries = self
                .history_entries
                .saturating_sub(alloc.history.len() as u64);
            if self.handles.remove(&alloc.handle).is_some() {
                self.free_handles.push(alloc.handle);
            }
            if !self.shared.is_empty() {
                self.shared.retain(|_, shared| *shared != index);
            }
            self.allocs[index as usize] = None;
            self.free_allocs.push(index);
        }
    }

    /// The memory that a second mapping shows on a device without aliasing.
    pub(super) fn phantom_of(&mut self, alloc: u32) -> R<u32> {
        let Some(entry) = &self.allocs[alloc as usize] else {
            return Ok(alloc);
        };
        if !self.config.broken_aliasing || entry.mappings == 0 {
            return Ok(alloc);
        }
        let (device, bytes, props) = (entry.device, entry.bytes, entry.props);
        // It has no physical memory of its own.
        self.create_charged(device, bytes, 0, (0, props))
    }

    /// Shows an allocation at an address.
    pub(super) fn map(&mut self, address: u64, alloc: u32, origin: Origin, access: u64) {
        if let Some(entry) = &mut self.allocs[alloc as usize] {
            entry.mappings += 1;
            let mapping = Mapping {
                bytes: entry.bytes,
                alloc,
                origin,
                readers: access,
                writers: access,
                sync_memops: false,
                uses: Vec::new(),
            };
            self.mappings.insert(address, mapping);
        }
    }

    /// Removes a mapping; the caller has checked its users.
    pub(super) fn unmap(&mut self, address: u64) {
        if let Some(mapping) = self.mappings.remove(&address) {
            if let Some(alloc) = &mut self.allocs[mapping.alloc as usize] {
                alloc.mappings -= 1;
            }
            self.drop_unreferenced(mapping.alloc);
        }
    }

    /// The mapping that holds `address`, and its first address.
    pub(super) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then_some((start, mapping))
    }

    /// Reports uses of the mapping at `address` that the host has not observed complete.
    pub(super) fn check_unused(&mut self, address: u64, strict: bool) {
        let Some(mapping) = self.mappings.get(&address) else {
            return;
        };
        let bytes = mapping.bytes;
        let open = |entry: &&Entry| strict && !self.host.covers(entry.queue, entry.seq);
        let mut user = mapping.uses.iter().find(open).copied();
        if user.is_none()
            && self
                .active
                .iter()
                .any(|&queue| !self.queues[queue as usize].ops.is_empty())
        {
            user = self.pending_user(address, bytes);
        }
        if let Some(user) = user {
            let report = Report::InUse {
                call: self.now.name(),
                address,
                bytes,
                user: self.site(&user),
            };
            self.report(report);
        }
    }

    /// A pending operation that will touch the range.
    fn pending_user(&self, address: u64, bytes: u64) -> Option<Entry> {
        self.active.iter().find_map(|&queue| {
            self.queues[queue as usize].ops.iter().find_map(|op| {
                let hit = op.ranges().into_iter().find(|&(start, len)| {
                    len > 0 && start < address + bytes && address < start.saturating_add(len)
                });
                hit.map(|(start, len)| self.entry(queue, op, start, len))
            })
        })
    }

    /// The devices that may use plain memory of `device`: itself, and contexts that enabled it.
    pub(super) fn plain_access(&self, device: usize) -> u64 {
        let peers = self.ctxs.iter().filter(|ctx| ctx.peers & bit(device) != 0);
        peers.fold(bit(device), |mask, ctx| mask | bit(ctx.device))
    }

    /// Whether the address is one of the device's, mapped or not.
    pub(super) fn is_device_address(&self, address: u64) -> bool {
        let reserved = self.reservations.range(..=address).next_back();
        self.mapping_at(address).is_some()
            || reserved.is_some_and(|(&start, &bytes)| address < start + bytes)
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemAlloc_v2(&mut self, dptr: Out<CUdeviceptr>, bytes: usize) -> R {
        dptr.check()?;
        let ctx = self.current()?;
        self.refuse_during_capture()?;
        if bytes == 0 {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let address = self.new_plain(ctx, bytes as u64)?;
        dptr.set(address)
    }

    pub(super) fn cuMemFree_v2(&mut self, dptr: CUdeviceptr) -> R {
        self.current()?;
        self.refuse_during_capture()?;
        if dptr == 0 {
            return Ok(());
        }
        if self.pool_blocks.contains_key(&dptr) {
            return self.free_pool_block_now(dptr);
        }
        let origin = self
            .mappings
            .get(&dptr)
            .map(|mapping| (mapping.origin, mapping.bytes));
        let Some((Origin::Plain(ctx), bytes)) = origin else {
            let existed = self.plain_was_used(dptr);
            self.dead("allocation", dptr, existed);
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        self.begin_wait()?;
        if self.config.strict_free {
            self.note_blocked(ctx);
            self.check_unused(dptr, true);
        } else {
            self.host_wait_ctx(ctx)?;
            // Work of other contexts is not waited for.
            self.check_unused(dptr, false);
        }
        self.unmap(dptr);
        self.give_plain_range(dptr, bytes);
        Ok(())
    }

    pub(super) fn cuMemGetInfo_v2(&mut self, free: Out<usize>, total: Out<usize>) -> R {
        let ctx = self.current()?;
        let device = self.ctxs[ctx].device;
        free.set(self.free_bytes(device) as usize)?;
        total.set(self.config.devices[device].memory as usize)
    }

    pub(super) fn cuMemGetAddressRange_v2(
        &mut self,
        base: Out<CUdeviceptr>,
        size: Out<usize>,
        dptr: CUdeviceptr,
    ) -> R {
        let live = self.pool_blocks.range(..=dptr).next_back();
        let block = live.filter(|(start, live)| dptr < **start + live.bytes);
        let found = match block {
            Some((&start, live)) => Some((start, live.bytes)),
            None => self
                .mapping_at(dptr)
                .map(|(start, mapping)| (start, mapping.bytes)),
        };
        let Some((start, bytes)) = found else {
            return fail(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        base.set_if(start);
        size.set_if(bytes as usize);
        Ok(())
    }

    /// Whether an address lies in the range of plain allocations but in no live one, so it may have been freed.
    fn plain_was_used(&self, address: u64) -> bool {
        (super::state::PLAIN.0..super::state::PLAIN.1).contains(&address)
            && self.mapping_at(address).is_none()
    }
}
