//! Virtual memory management: reservations, handles, mappings, access.

use super::args::{In, Out};
use super::call::{Call, R, fail};
use super::costs::cost;
use super::physical::{Origin, Props};
use super::state::State;
use crate::driver::sys::*;

/// The unit of reserved addresses.
const PAGE: u64 = 4096;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    /// The device of a location, which has to support virtual memory management.
    fn vmm_device(&self, location: &CUmemLocation) -> R<usize> {
        if location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = self.device_index(location.id)?;
        if !self.config.devices[device].vmm {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok(device)
    }

    fn check_props(&self, prop: &CUmemAllocationProp) -> R<usize> {
        if prop.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED {
            return fail(INVALID);
        }
        let device = self.vmm_device(&prop.location)?;
        let config = &self.config.devices[device];
        let kinds = prop.requestedHandleTypes.0;
        let fd = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
        let fabric = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
        if kinds & !(fd | fabric) != 0 {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        if kinds & fabric != 0 && !config.fabric {
            return fail(CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        Ok(device)
    }

    /// The allocation behind a handle; reports one that does not live.
    pub(super) fn handle(&mut self, handle: u64) -> R<u32> {
        match self.handles.get(&handle) {
            Some(&alloc) if self.references(alloc) > 0 => Ok(alloc),
            _ => {
                let existed = handle != 0 && handle < self.next_handle;
                self.dead("handle", handle, existed);
                fail(INVALID)
            }
        }
    }

    fn references(&self, alloc: u32) -> u64 {
        self.allocs[alloc as usize]
            .as_ref()
            .map_or(0, |alloc| alloc.references)
    }

    /// Returns the value for a new handle: like a driver, that of the handle destroyed last.
    pub(super) fn new_handle(&mut self) -> u64 {
        self.free_handles.pop().unwrap_or_else(|| {
            self.next_handle += 1;
            self.next_handle - 1
        })
    }

    /// The first addresses of the mappings in the range, if they fill it exactly, none partly.
    fn whole_mappings(&self, ptr: u64, size: u64) -> R<Vec<u64>> {
        let end = ptr.checked_add(size).filter(|_| size > 0).ok_or(INVALID)?;
        let mut at = ptr;
        let mut list = Vec::new();
        if self.mapping_at(ptr).is_some_and(|(start, _)| start < ptr) {
            return fail(INVALID);
        }
        for (&start, mapping) in self.mappings.range(ptr..end) {
            let hole = start != at;
            if hole || mapping.origin != Origin::Vmm || start + mapping.bytes > end {
                return fail(INVALID);
            }
            list.push(start);
            at = start + mapping.bytes;
        }
        if at != end || list.is_empty() {
            return fail(INVALID);
        }
        Ok(list)
    }

    fn charge(&mut self, call: Call, handles: usize) {
        let nanos = cost(call).saturating_mul(handles as u64);
        self.counters.nanos = self.counters.nanos.saturating_add(nanos);
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemAddressReserve(
        &mut self,
        ptr: Out<CUdeviceptr>,
        size: usize,
        alignment: usize,
        addr: CUdeviceptr,
        flags: u64,
    ) -> R {
        ptr.check()?;
        let size = size as u64;
        let align = (alignment as u64).max(PAGE);
        if size == 0 || !size.is_multiple_of(PAGE) || !align.is_power_of_two() || flags != 0 {
            return fail(INVALID);
        }
        // Handles are mapped at multiples of the granule, so a reservation begins at such a multiple.
        let granules = self.config.devices.iter().map(|device| device.granularity);
        let align = align.max(granules.max().unwrap_or(PAGE));
        if size > self.config.longest_reservation {
            return fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let hinted = addr != 0 && addr.is_multiple_of(align) && self.reserve.take_at(addr, size);
        let start = match hinted {
            true => addr,
            false => self
                .reserve
                .take(size, align)
                .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?,
        };
        self.reservations.insert(start, size);
        ptr.set(start)
    }

    pub(super) fn cuMemAddressFree(&mut self, ptr: CUdeviceptr, size: usize) -> R {
        let size = size as u64;
        match self.reservations.get(&ptr) {
            None => {
                self.dead("reservation", ptr, false);
                fail(INVALID)
            }
            Some(&bytes) if bytes != size => {
                self.misuse("not the size of the reservation", ptr);
                fail(INVALID)
            }
            Some(_) if self.mappings.range(ptr..ptr + size).next().is_some() => {
                self.misuse("reservation still has mappings", ptr);
                fail(INVALID)
            }
            Some(_) => {
                self.reservations.remove(&ptr);
                self.reserve.give(ptr, size);
                Ok(())
            }
        }
    }

    pub(super) fn cuMemCreate(
        &mut self,
        handle: Out<CUmemGenericAllocationHandle>,
        size: usize,
        prop: In<CUmemAllocationProp>,
        flags: u64,
    ) -> R {
        handle.check()?;
        let prop = prop.get()?;
        let device = self.check_props(&prop)?;
        let granularity = self.config.devices[device].granularity;
        if size == 0 || !(size as u64).is_multiple_of(granularity) || flags != 0 {
            return fail(INVALID);
        }
        if size as u64 > self.free_bytes(device) {
            return fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let value = self.new_handle();
        let alloc = self.create(device, size as u64, value, Props::of(&prop))?;
        self.handles.insert(value, alloc);
        handle.set(value)
    }

    pub(super) fn cuMemRelease(&mut self, handle: CUmemGenericAllocationHandle) -> R {
        let alloc = self.handle(handle)?;
        if let Some(entry) = &mut self.allocs[alloc as usize] {
            entry.references -= 1;
        }
        self.drop_unreferenced(alloc);
        Ok(())
    }

    pub(super) fn cuMemMap(
        &mut self,
        ptr: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) -> R {
        if offset != 0 {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let alloc = self.handle(handle)?;
        let Some(entry) = &self.allocs[alloc as usize] else {
            return fail(INVALID);
        };
        let bytes = entry.bytes;
        let granularity = self.config.devices[entry.device].granularity;
        if size as u64 != bytes || flags != 0 || !ptr.is_multiple_of(granularity) {
            return fail(INVALID);
        }
        let inside = self
            .reservations
            .range(..=ptr)
            .next_back()
            .is_some_and(|(start, len)| ptr - start <= *len && bytes <= len - (ptr - start));
        if !inside {
            self.misuse("target is not reserved", ptr);
            return fail(INVALID);
        }
        let taken = self.mapping_at(ptr).is_some()
            || self.mappings.range(ptr..ptr + bytes).next().is_some();
        if taken {
            self.misuse("target is already mapped", ptr);
            return fail(CUresult::CUDA_ERROR_ALREADY_MAPPED);
        }
        let shown = self.phantom_of(alloc)?;
        self.map(ptr, shown, Origin::Vmm, 0);
        Ok(())
    }

    pub(super) fn cuMemUnmap(&mut self, ptr: CUdeviceptr, size: usize) -> R {
        let list = match self.whole_mappings(ptr, size as u64) {
            Ok(list) => list,
            Err(code) => {
                self.misuse("range does not hold whole mappings", ptr);
                return fail(code);
            }
        };
        self.charge(Call::cuMemUnmap, list.len());
        for start in list {
            self.check_unused(start, true);
            self.unmap(start);
        }
        Ok(())
    }

    pub(super) fn cuMemSetAccess(
        &mut self,
        ptr: CUdeviceptr,
        size: usize,
        desc: In<CUmemAccessDesc>,
        count: usize,
    ) -> R {
        let list = match self.whole_mappings(ptr, size as u64) {
            Ok(list) => list,
            Err(code) => {
                // Where nothing is mapped the call changes nothing: memory may be unmapped while a device is added.
                let end = ptr.saturating_add(size as u64);
                let empty = self.mapping_at(ptr).is_none()
                    && self.mappings.range(ptr..end).next().is_none();
                if !empty {
                    self.misuse("range is not filled by whole mappings", ptr);
                }
                return fail(code);
            }
        };
        let mut grants = Vec::new();
        for desc in desc.read(count)? {
            grants.push((self.vmm_device(&desc.location)?, desc.flags));
        }
        for start in &list {
            let owner = self.mappings[start].alloc;
            let owner = self.allocs[owner as usize]
                .as_ref()
                .map_or(0, |alloc| alloc.device);
            let apart = |(device, _): &(usize, _)| !self.reaches(*device, owner);
            if grants.iter().any(apart) {
                return fail(CUresult::CUDA_ERROR_INVALID_DEVICE);
            }
        }
        self.charge(Call::cuMemSetAccess, list.len());
        for start in list {
            let Some(mapping) = self.mappings.get_mut(&start) else {
                continue;
            };
            for (device, flags) in &grants {
                let bit = 1 << device;
                let reads = flags.0 & 1 != 0;
                let writes = flags.0 & 2 != 0;
                mapping.readers = if reads {
                    mapping.readers | bit
                } else {
                    mapping.readers & !bit
                };
                mapping.writers = if writes {
                    mapping.writers | bit
                } else {
                    mapping.writers & !bit
                };
            }
        }
        Ok(())
    }

    pub(super) fn cuMemGetAccess(
        &mut self,
        flags: Out<u64>,
        location: In<CUmemLocation>,
        ptr: CUdeviceptr,
    ) -> R {
        let device = self.vmm_device(&location.get()?)?;
        let Some((_, mapping)) = self.mapping_at(ptr) else {
            return fail(INVALID);
        };
        let reads = mapping.readers >> device & 1;
        let writes = mapping.writers >> device & 1;
        flags.set(reads | writes << 1)
    }

    pub(super) fn cuMemGetAllocationGranularity(
        &mut self,
        granularity: Out<usize>,
        prop: In<CUmemAllocationProp>,
        _option: CUmemAllocationGranularity_flags,
    ) -> R {
        let device = self.check_props(&prop.get()?)?;
        granularity.set(self.config.devices[device].granularity as usize)
    }

    pub(super) fn cuMemGetAllocationPropertiesFromHandle(
        &mut self,
        prop: Out<CUmemAllocationProp>,
        handle: CUmemGenericAllocationHandle,
    ) -> R {
        let alloc = self.handle(handle)?;
        match &self.allocs[alloc as usize] {
            Some(entry) => prop.set(entry.props.to_c(entry.device)),
            None => fail(INVALID),
        }
    }
}
