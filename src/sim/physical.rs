//! Memory in the simulator: of devices, in address space, of the host.

use super::address::Addresses;
use super::contents::Contents;
use super::race::{Entry, History};
use crate::driver::sys::*;
use std::cell::UnsafeCell;

/// The properties that a handle was created with, as far as they can be queried later.
#[derive(Clone, Copy, Default)]
pub(super) struct Props {
    pub(super) handle_types: u32,
    pub(super) rdma: u8,
    pub(super) usage: u16,
    pub(super) compression: u8,
}

impl Props {
    pub(super) fn of(prop: &CUmemAllocationProp) -> Props {
        Props {
            handle_types: prop.requestedHandleTypes.0,
            rdma: prop.allocFlags.gpuDirectRDMACapable,
            usage: prop.allocFlags.usage,
            compression: prop.allocFlags.compressionType,
        }
    }

    pub(super) fn to_c(self, device: usize) -> CUmemAllocationProp {
        let mut prop = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType(self.handle_types),
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: device as CUdevice,
            },
            ..CUmemAllocationProp::default()
        };
        prop.allocFlags.gpuDirectRDMACapable = self.rdma;
        prop.allocFlags.usage = self.usage;
        prop.allocFlags.compressionType = self.compression;
        prop
    }
}

/// Physical memory of one allocation.
pub(super) struct Alloc {
    pub(super) device: usize,
    pub(super) bytes: u64,
    /// References by handles.
    pub(super) references: u64,
    /// Mappings that show it.
    pub(super) mappings: u64,
    /// Handle value, for memory made by `cuMemCreate`.
    pub(super) handle: u64,
    /// The properties that it was created with.
    pub(super) props: Props,
    /// Bytes that it takes from the device: more than its size where the device rounds up, none if they are already
    /// counted.
    pub(super) charged: u64,
    /// Unique over the life of the simulator.
    pub(super) block_id: u64,
    pub(super) contents: Contents,
    pub(super) history: History,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// `cuMemAlloc`, of this context.
    Plain(usize),
    /// `cuMemMap`.
    Vmm,
    /// A segment of a pool.
    Pool(u64),
    /// `cuIpcOpenMemHandle`, in this context.
    Ipc(usize),
}

/// A range of addresses that shows physical memory.
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) alloc: u32,
    pub(super) origin: Origin,
    /// One bit per device that may read, and that may write.
    pub(super) readers: u64,
    pub(super) writers: u64,
    pub(super) sync_memops: bool,
    /// The newest operation of each queue that used it.
    pub(super) uses: Vec<Entry>,
}

/// A unit of device memory that holds the small allocations of one context.
pub(super) struct Slab {
    pub(super) ctx: usize,
    pub(super) bytes: u64,
    pub(super) live: u64,
    pub(super) free: Addresses,
    /// Freed while something was pending.
    pub(super) quarantine: Vec<(u64, u64)>,
}

/// A page-locked block.
pub(super) struct HostBlock {
    /// Allocated by us and written through raw pointers while we own it; none if it was registered.
    pub(super) memory: Option<Box<[UnsafeCell<u128>]>>,
    pub(super) bytes: u64,
    /// Unique over the life of the simulator.
    pub(super) life: u64,
    /// The newest operation of each queue that used it.
    pub(super) uses: Vec<Entry>,
    pub(super) history: History,
}
