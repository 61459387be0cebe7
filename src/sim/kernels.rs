//! Copies, fills, and the kernels that the simulator knows by name.

use super::args::{Host, In, Out, Params};
use super::call::{R, fail};
use super::contents::Content;
use super::graph::Task;
use super::objects::Kernel;
use super::state::State;
use super::work::Work;
use crate::driver::sys::*;
use std::ffi::{c_char, c_uchar, c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn fill(word: u32, step: u32) -> Content {
    Content::Words {
        first: word,
        step,
        phase: 0,
    }
}

impl State {
    /// The device whose memory contains an address, else the current one.
    fn owner(&self, address: u64, otherwise: usize) -> usize {
        let alloc = self.mapping_at(address).map(|(_, mapping)| mapping.alloc);
        let alloc = alloc.and_then(|alloc| self.allocs[alloc as usize].as_ref());
        alloc.map_or(otherwise, |alloc| alloc.device)
    }

    /// The effect of launching a function.
    pub(super) fn kernel(
        &mut self,
        function: CUfunction,
        sizes: [c_uint; 6],
        params: &Params,
    ) -> R<Task> {
        let Some(&(ctx, kernel)) = self.functions.get(&(function as u64)) else {
            self.dead("function", function as u64, false);
            return fail(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        let threads = sizes[3..].iter().map(|size| u64::from(*size));
        if sizes.contains(&0) || threads.product::<u64>() > 1024 {
            return fail(INVALID);
        }
        let (work, nanos, name) = match kernel {
            Kernel::Fill => {
                let (address, words): (u64, u64) = (params.get(0)?, params.get(1)?);
                let bytes = words.checked_mul(4).ok_or(INVALID)?;
                let content = fill(params.get(2)?, 1);
                let work = Work::Fill {
                    address,
                    bytes,
                    content,
                };
                (work, 0, "cualloc_fill")
            }
            Kernel::Check => {
                let (address, words): (u64, u64) = (params.get(0)?, params.get(1)?);
                words.checked_mul(4).ok_or(INVALID)?;
                let work = Work::Check {
                    address,
                    words,
                    seed: params.get(2)?,
                    bad: params.get(3)?,
                };
                (work, 0, "cualloc_check")
            }
            Kernel::Spin => (Work::Spin, params.get(0)?, "cualloc_spin"),
        };
        Ok(Task {
            work,
            name,
            nanos,
            label: self.threads[self.thread].label,
            ctx,
        })
    }
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemsetD8Async(
        &mut self,
        address: CUdeviceptr,
        value: c_uchar,
        count: usize,
        stream: CUstream,
    ) -> R {
        let content = fill(u32::from_ne_bytes([value; 4]), 0);
        self.enqueue(
            stream,
            Work::Fill {
                address,
                bytes: count as u64,
                content,
            },
            0,
        )
    }

    pub(super) fn cuMemsetD32Async(
        &mut self,
        address: CUdeviceptr,
        value: c_uint,
        count: usize,
        stream: CUstream,
    ) -> R {
        let bytes = (count as u64).checked_mul(4).ok_or(INVALID)?;
        if !address.is_multiple_of(4) {
            return fail(INVALID);
        }
        self.enqueue(
            stream,
            Work::Fill {
                address,
                bytes,
                content: fill(value, 0),
            },
            0,
        )
    }

    pub(super) fn cuMemcpyAsync(
        &mut self,
        target: CUdeviceptr,
        source: CUdeviceptr,
        count: usize,
        stream: CUstream,
    ) -> R {
        let bytes = count as u64;
        let work = match (
            self.is_device_address(target),
            self.is_device_address(source),
        ) {
            (true, true) => return self.cuMemcpyDtoDAsync_v2(target, source, count, stream),
            (true, false) => Work::Upload {
                target,
                source: Host::new(source as usize),
                bytes,
            },
            (false, true) => Work::Download {
                target: Host::new(target as usize),
                source,
                bytes,
            },
            (false, false) => {
                let (target, source) = (Host::new(target as usize), Host::new(source as usize));
                Work::HostCopy {
                    target,
                    source,
                    bytes,
                }
            }
        };
        self.enqueue(stream, work, 0)
    }

    pub(super) fn cuMemcpyHtoDAsync_v2(
        &mut self,
        target: CUdeviceptr,
        source: Host,
        count: usize,
        stream: CUstream,
    ) -> R {
        self.enqueue(
            stream,
            Work::Upload {
                target,
                source,
                bytes: count as u64,
            },
            0,
        )
    }

    pub(super) fn cuMemcpyDtoHAsync_v2(
        &mut self,
        target: Host,
        source: CUdeviceptr,
        count: usize,
        stream: CUstream,
    ) -> R {
        self.enqueue(
            stream,
            Work::Download {
                target,
                source,
                bytes: count as u64,
            },
            0,
        )
    }

    pub(super) fn cuMemcpyDtoDAsync_v2(
        &mut self,
        target: CUdeviceptr,
        source: CUdeviceptr,
        count: usize,
        stream: CUstream,
    ) -> R {
        let queue = self.queue(stream)?;
        let own = self.ctxs[self.queues[queue as usize].ctx].device;
        // Plain memory is copied between devices by staging; mapped memory needs access.
        let plain = |state: &State, address| match state.mapping_at(address) {
            Some((_, mapping)) if mapping.origin != super::physical::Origin::Vmm => {
                state.owner(address, own)
            }
            _ => own,
        };
        let devices = (plain(self, target), plain(self, source));
        let bytes = count as u64;
        self.enqueue_on(
            queue,
            Work::Copy {
                target,
                source,
                bytes,
                devices,
            },
            0,
        )
    }

    pub(super) fn cuMemcpyPeerAsync(
        &mut self,
        target: CUdeviceptr,
        target_ctx: CUcontext,
        source: CUdeviceptr,
        source_ctx: CUcontext,
        count: usize,
        stream: CUstream,
    ) -> R {
        let to = self.ctx(target_ctx)?;
        let from = self.ctx(source_ctx)?;
        let devices = (self.ctxs[to].device, self.ctxs[from].device);
        self.enqueue(
            stream,
            Work::Copy {
                target,
                source,
                bytes: count as u64,
                devices,
            },
            0,
        )
    }

    pub(super) fn cuModuleLoadData(&mut self, module: Out<CUmodule>, image: In<c_void>) -> R {
        module.check()?;
        let ctx = self.current()?;
        self.refuse_during_capture()?;
        image.cast::<u8>().get()?;
        let value = self.free_modules.pop().unwrap_or_else(|| {
            self.next_module += 1;
            self.next_module - 1
        });
        self.modules.insert(value, ctx);
        module.set(value as CUmodule)
    }

    pub(super) fn cuModuleUnload(&mut self, module: CUmodule) -> R {
        self.refuse_during_capture()?;
        match self.modules.remove(&(module as u64)) {
            Some(_) => {
                let first = (module as u64) << 8;
                self.functions.retain(|handle, _| handle & !0xff != first);
                self.free_modules.push(module as u64);
                Ok(())
            }
            None => {
                let existed = (module as u64) < self.next_module;
                self.dead("module", module as u64, existed);
                fail(CUresult::CUDA_ERROR_INVALID_HANDLE)
            }
        }
    }

    pub(super) fn cuModuleGetFunction(
        &mut self,
        function: Out<CUfunction>,
        module: CUmodule,
        name: In<c_char>,
    ) -> R {
        function.check()?;
        let Some(&ctx) = self.modules.get(&(module as u64)) else {
            self.dead("module", module as u64, false);
            return fail(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        let (number, kernel) = match name.text()?.as_str() {
            "cualloc_fill" => (0, Kernel::Fill),
            "cualloc_check" => (1, Kernel::Check),
            "cualloc_spin" => (2, Kernel::Spin),
            _ => return fail(CUresult::CUDA_ERROR_NOT_FOUND),
        };
        let value = (module as u64) << 8 | number;
        self.functions.insert(value, (ctx, kernel));
        function.set(value as CUfunction)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the signature is the driver's own"
    )]
    pub(super) fn cuLaunchKernel(
        &mut self,
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        _shared: c_uint,
        stream: CUstream,
        params: Params,
        _extra: *mut *mut c_void,
    ) -> R {
        let queue = self.queue(stream)?;
        let sizes = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
        let task = self.kernel(function, sizes, &params)?;
        if self.queues[queue as usize].ctx != task.ctx {
            return self.wrong_context(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        // Reports name the kernel, not the call that launched it.
        if !self.captured(queue, &task.work, task.name, task.nanos)? {
            self.submit_as(queue, task.work, task.name, task.nanos);
        }
        Ok(())
    }

    pub(super) fn cuLaunchHostFunc(
        &mut self,
        stream: CUstream,
        function: CUhostFn,
        data: *mut c_void,
    ) -> R {
        if function.is_none() {
            return fail(INVALID);
        }
        self.enqueue(
            stream,
            Work::Callback {
                function,
                data: data as usize,
            },
            0,
        )
    }
}
