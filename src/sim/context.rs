//! Start, devices, contexts.

use super::args::Out;
use super::call::{R, fail};
use super::reports::Report;
use super::state::{CONTEXT_BASE, Ctx, HANDLE_STEP, State};
use crate::driver::sys::*;
use std::ffi::{c_char, c_int, c_uint};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Name and text of every error code that the bindings know.
fn error_name(code: CUresult) -> Option<&'static std::ffi::CStr> {
    macro_rules! names {
        ($($name:ident)*) => {
            match code {
                $(CUresult::$name => {
                    std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).ok()
                })*
                _ => None,
            }
        };
    }
    names!(CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_DEINITIALIZED CUDA_ERROR_STUB_LIBRARY
        CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER CUDA_ERROR_DEVICE_UNAVAILABLE CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_DEVICE CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_MAP_FAILED CUDA_ERROR_UNMAP_FAILED CUDA_ERROR_ALREADY_MAPPED
        CUDA_ERROR_NOT_MAPPED CUDA_ERROR_ECC_UNCORRECTABLE CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        CUDA_ERROR_INVALID_PTX CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_ILLEGAL_STATE CUDA_ERROR_LOSSY_QUERY CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES CUDA_ERROR_LAUNCH_TIMEOUT
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
        CUDA_ERROR_CONTEXT_IS_DESTROYED CUDA_ERROR_ASSERT CUDA_ERROR_HARDWARE_STACK_ERROR
        CUDA_ERROR_ILLEGAL_INSTRUCTION CUDA_ERROR_MISALIGNED_ADDRESS
        CUDA_ERROR_INVALID_ADDRESS_SPACE CUDA_ERROR_INVALID_PC CUDA_ERROR_LAUNCH_FAILED
        CUDA_ERROR_NOT_PERMITTED CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_SYSTEM_NOT_READY
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED CUDA_ERROR_STREAM_CAPTURE_MERGE
        CUDA_ERROR_STREAM_CAPTURE_UNMATCHED CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        CUDA_ERROR_CAPTURED_EVENT CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD CUDA_ERROR_TIMEOUT
        CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        CUDA_ERROR_EXTERNAL_DEVICE CUDA_ERROR_UNKNOWN)
}

impl State {
    pub(super) fn device_index(&self, device: CUdevice) -> R<usize> {
        usize::try_from(device)
            .ok()
            .filter(|&index| index < self.config.devices.len())
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// Whether `device` can reach memory of `owner`.
    pub(super) fn reaches(&self, device: usize, owner: usize) -> bool {
        device == owner || (self.config.devices[device].peers && self.config.devices[owner].peers)
    }

    /// The context of a handle, which has to be alive.
    pub(super) fn ctx(&mut self, handle: CUcontext) -> R<usize> {
        let value = handle as u64;
        let index = value
            .checked_sub(CONTEXT_BASE)
            .filter(|offset| offset % HANDLE_STEP == 0)
            .map(|offset| (offset / HANDLE_STEP) as usize)
            .filter(|&index| index < self.ctxs.len());
        match index {
            Some(index) if self.ctxs[index].alive => Ok(index),
            _ => {
                self.dead("context", value, index.is_some());
                fail(CUresult::CUDA_ERROR_INVALID_CONTEXT)
            }
        }
    }

    pub(super) fn ctx_handle(ctx: usize) -> CUcontext {
        (CONTEXT_BASE + ctx as u64 * HANDLE_STEP) as CUcontext
    }

    /// Begins a new life of a context.
    fn begin_ctx(&mut self, ctx: usize) {
        self.ctxs[ctx].alive = true;
        self.ctxs[ctx].id = self.next_ctx_id;
        self.next_ctx_id += 1;
    }

    /// Creates another context on a device, as `cuCtxCreate` does.
    pub(super) fn create_ctx(&mut self, device: usize) -> CUcontext {
        let ctx = Ctx::new(device);
        let index = match self.free_ctxs.pop() {
            Some(index) => {
                self.ctxs[index] = ctx;
                index
            }
            None => {
                self.ctxs.push(ctx);
                self.ctxs.len() - 1
            }
        };
        self.begin_ctx(index);
        State::ctx_handle(index)
    }

    /// Destroys a context with its memory, streams and events. Work in progress is cut off; it is modelled as completed
    /// without the host observing it.
    pub(super) fn destroy_ctx(&mut self, ctx: usize) -> R {
        for queue in 0..self.queues.len() {
            if self.queues[queue].ctx != ctx {
                continue;
            }
            if !self.queues[queue].ops.is_empty() {
                self.misuse("work of the context is under way", ctx as u64);
            }
            self.finish(queue as u32, self.queues[queue].submitted)?;
        }
        self.free_plain_of(ctx);
        self.destroy_execs_of(ctx);
        for slot in 0..self.streams.len() {
            if let Some(queue) = self.streams[slot]
                && self.queues[queue as usize].ctx == ctx
            {
                self.retire_queue(queue);
                self.streams[slot] = None;
                self.free_streams.push(slot);
            }
        }
        for slot in 0..self.events.len() {
            if self.events[slot]
                .as_ref()
                .is_some_and(|event| event.ctx == ctx)
            {
                self.events[slot] = None;
                self.free_events.push(slot);
            }
        }
        let old = &mut self.ctxs[ctx];
        let queues: Vec<u32> = old
            .legacy
            .take()
            .into_iter()
            .chain(std::mem::take(&mut old.per_thread).into_values())
            .collect();
        old.alive = false;
        old.peers = 0;
        for queue in queues {
            self.retire_queue(queue);
        }
        self.functions.retain(|_, (owner, _)| *owner != ctx);
        let modules = &mut self.free_modules;
        self.modules.retain(|&module, owner| {
            let stays = *owner != ctx;
            if !stays {
                modules.push(module);
            }
            stays
        });
        // Each device's primary context has a fixed place.
        if ctx >= self.config.devices.len() {
            self.free_ctxs.push(ctx);
        }
        for thread in &mut self.threads {
            if thread.current == Some(ctx) {
                thread.current = None;
            }
        }
        Ok(())
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuInit(&mut self, flags: c_uint) -> R {
        if flags != 0 {
            return fail(INVALID);
        }
        if self.config.devices.is_empty() {
            return fail(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        self.initialised = true;
        Ok(())
    }

    pub(super) fn cuDriverGetVersion(&mut self, version: Out<c_int>) -> R {
        version.set(self.config.driver_version)
    }

    pub(super) fn cuGetErrorName(&mut self, error: CUresult, text: Out<*const c_char>) -> R {
        match error_name(error) {
            Some(name) => text.set(name.as_ptr()),
            None => {
                text.set(std::ptr::null())?;
                fail(INVALID)
            }
        }
    }

    pub(super) fn cuGetErrorString(&mut self, error: CUresult, text: Out<*const c_char>) -> R {
        self.cuGetErrorName(error, text)
    }

    pub(super) fn cuDeviceGetCount(&mut self, count: Out<c_int>) -> R {
        count.set(self.config.devices.len() as c_int)
    }

    pub(super) fn cuDeviceGet(&mut self, device: Out<CUdevice>, ordinal: c_int) -> R {
        self.device_index(ordinal)?;
        device.set(ordinal)
    }

    pub(super) fn cuDeviceGetName(&mut self, name: Out<c_char>, len: c_int, dev: CUdevice) -> R {
        let device = self.device_index(dev)?;
        name.set_text(&self.config.devices[device].name, len)
    }

    pub(super) fn cuDeviceGetAttribute(
        &mut self,
        value: Out<c_int>,
        attribute: CUdevice_attribute,
        dev: CUdevice,
    ) -> R {
        type A = CUdevice_attribute;
        let config = &self.config.devices[self.device_index(dev)?];
        let fd = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 as c_int;
        let number = match attribute {
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
            A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING => 1,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => config.vmm.into(),
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => 1,
            A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => config.pools.into(),
            A::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => {
                if config.pools {
                    fd
                } else {
                    0
                }
            }
            A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => config.dma_buf.into(),
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => config.fabric.into(),
            A::CU_DEVICE_ATTRIBUTE_INTEGRATED
            | A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED => 0,
            _ => return fail(INVALID),
        };
        value.set(number)
    }

    pub(super) fn cuDeviceTotalMem_v2(&mut self, bytes: Out<usize>, dev: CUdevice) -> R {
        let device = self.device_index(dev)?;
        bytes.set(self.config.devices[device].memory as usize)
    }

    pub(super) fn cuDeviceGetUuid_v2(&mut self, uuid: Out<CUuuid>, dev: CUdevice) -> R {
        let device = self.device_index(dev)?;
        let mut bytes = [0; 16];
        for (byte, letter) in bytes.iter_mut().zip(*b"simulated device") {
            *byte = letter as c_char;
        }
        bytes[15] = device as c_char;
        uuid.set(CUuuid { bytes })
    }

    pub(super) fn cuDeviceGetPCIBusId(&mut self, id: Out<c_char>, len: c_int, dev: CUdevice) -> R {
        let device = self.device_index(dev)?;
        id.set_text(&format!("0000:{:02x}:00.0", device + 1), len)
    }

    pub(super) fn cuDeviceCanAccessPeer(
        &mut self,
        can: Out<c_int>,
        dev: CUdevice,
        peer: CUdevice,
    ) -> R {
        let (device, peer) = (self.device_index(dev)?, self.device_index(peer)?);
        can.set((device != peer && self.reaches(device, peer)).into())
    }

    pub(super) fn cuDevicePrimaryCtxRetain(&mut self, ctx: Out<CUcontext>, dev: CUdevice) -> R {
        ctx.check()?;
        let device = self.device_index(dev)?;
        if let Some(code) = self.ctxs[device].lost {
            return fail(code);
        }
        self.ctxs[device].retains += 1;
        if !self.ctxs[device].alive {
            self.begin_ctx(device);
        }
        ctx.set(State::ctx_handle(device))
    }

    pub(super) fn cuDevicePrimaryCtxRelease_v2(&mut self, dev: CUdevice) -> R {
        let device = self.device_index(dev)?;
        match self.ctxs[device].retains {
            0 => {
                self.misuse("primary context is not retained", device as u64);
                fail(CUresult::CUDA_ERROR_INVALID_CONTEXT)
            }
            1 => {
                self.destroy_ctx(device)?;
                self.ctxs[device].retains = 0;
                Ok(())
            }
            _ => {
                self.ctxs[device].retains -= 1;
                Ok(())
            }
        }
    }

    pub(super) fn cuCtxGetCurrent(&mut self, ctx: Out<CUcontext>) -> R {
        let current = self.threads[self.thread].current;
        ctx.set(current.map_or(std::ptr::null_mut(), State::ctx_handle))
    }

    pub(super) fn cuCtxSetCurrent(&mut self, ctx: CUcontext) -> R {
        let current = if ctx.is_null() {
            None
        } else {
            Some(self.ctx(ctx)?)
        };
        self.threads[self.thread].current = current;
        Ok(())
    }

    pub(super) fn cuCtxGetDevice(&mut self, device: Out<CUdevice>) -> R {
        let ctx = self.current()?;
        device.set(self.ctxs[ctx].device as CUdevice)
    }

    pub(super) fn cuCtxGetId(&mut self, ctx: CUcontext, id: Out<u64>) -> R {
        let ctx = if ctx.is_null() {
            self.current()?
        } else {
            self.ctx(ctx)?
        };
        id.set(self.ctxs[ctx].id)
    }

    pub(super) fn cuCtxSynchronize(&mut self) -> R {
        let ctx = self.current()?;
        self.refuse_ctx_during_capture(ctx)?;
        self.refuse_during_capture()?;
        self.begin_wait()?;
        self.host_wait_ctx(ctx)?;
        self.pools_synchronised();
        Ok(())
    }

    pub(super) fn cuCtxEnablePeerAccess(&mut self, peer: CUcontext, flags: c_uint) -> R {
        let ctx = self.current()?;
        let peer = self.ctx(peer)?;
        let (device, owner) = (self.ctxs[ctx].device, self.ctxs[peer].device);
        if flags != 0 || device == owner {
            return fail(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        if !self.reaches(device, owner) {
            return fail(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        if self.ctxs[ctx].peers & (1 << owner) != 0 {
            return fail(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        self.ctxs[ctx].peers |= 1 << owner;
        let plain: Vec<u64> = self.mappings.iter().filter(|(_, mapping)| {
            matches!(mapping.origin, super::physical::Origin::Plain(of) if self.ctxs[of].device == owner)
        }).map(|(&start, _)| start).collect();
        for start in plain {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                mapping.readers |= 1 << device;
                mapping.writers |= 1 << device;
            }
        }
        Ok(())
    }
}

impl State {
    /// Reports that objects of different contexts were mixed.
    pub(super) fn wrong_context<T>(&mut self, code: CUresult) -> R<T> {
        let call = self.now.name();
        self.report(Report::WrongContext { call });
        fail(code)
    }
}
