//! Pointer attributes, and memory shared between processes: handles, descriptors, IPC.
//!
//! What travels between the users of one simulator is a number, or a file with one. In another process the file stands
//! for memory of the same size, and has its contents from the first export on. Each process keeps a descriptor of it open
//! for as long as the memory exists.

use super::args::{Host, In, Out};
use super::call::{R, fail};
use super::physical::{Origin, Props};
#[cfg(unix)]
use super::shared_contents::SharedContents;
use super::state::State;
use crate::driver::sys::*;
use std::ffi::{c_int, c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// Shared numbers begin here, far from real file descriptors.
const TOKEN_BASE: u64 = 1 << 20;

/// What files of simulators begin with.
#[cfg(unix)]
const MAGIC: u64 = u64::from_le_bytes(*b"cuallocs");

/// Marks a shared number of a pool; without it, it is an allocation's.
const POOL: u32 = 1 << 31;

impl State {
    /// Returns a number that stands for shared memory.
    fn share_token(&mut self, what: u32) -> u64 {
        let token = TOKEN_BASE + self.next_share;
        self.next_share += 1;
        self.shared.insert(token, what);
        token
    }

    fn shared_token(&self, token: u64) -> R<u32> {
        self.shared.get(&token).copied().ok_or(INVALID)
    }

    /// A file descriptor to send to other users: a real one, which may be duplicated and closed.
    #[cfg(unix)]
    fn share_fd(&mut self, what: u32) -> R<c_int> {
        use std::os::fd::IntoRawFd;
        let out = |_| CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let alloc = (what & POOL == 0).then(|| self.allocs[what as usize].as_ref());
        let alloc = alloc.flatten();
        if let Some(shared) = alloc.and_then(|alloc| alloc.contents.shared.as_ref()) {
            return Ok(shared.descriptor().map_err(out)?.into_raw_fd());
        }
        let (bytes, device, id, kinds) = alloc.map_or((0, 0, 0, 0), |alloc| {
            let device = alloc.device as u64;
            (
                alloc.bytes,
                device,
                alloc.block_id,
                alloc.props.handle_types,
            )
        });
        let words = [
            MAGIC,
            self.identity(),
            what.into(),
            id,
            bytes,
            device,
            kinds.into(),
        ];
        let shared = SharedContents::new(file_of(&words).map_err(out)?);
        let descriptor = shared.descriptor().map_err(out)?;
        if let Some(Some(alloc)) = self.allocs.get_mut(what as usize) {
            alloc.contents.share(shared);
        }
        Ok(descriptor.into_raw_fd())
    }

    /// Returns a number that no other simulator of any running process has.
    #[cfg(unix)]
    fn identity(&self) -> u64 {
        u64::from(std::process::id()) << 32 | self.number & u64::from(u32::MAX)
    }

    /// A number in place of a file descriptor.
    #[cfg(not(unix))]
    fn share_fd(&mut self, what: u32) -> R<c_int> {
        Ok(self.share_token(what) as c_int)
    }

    /// Returns the shared object behind a file descriptor. Memory of another simulator is represented by new memory with
    /// the same contents.
    #[cfg(unix)]
    fn shared_fd(&mut self, fd: usize) -> R<u32> {
        let fd = c_int::try_from(fd)
            .ok()
            .filter(|&fd| fd >= 0)
            .ok_or(INVALID)?;
        // SAFETY: the caller of an import passes an open descriptor, and closes it after the call at the earliest.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        let words = words_of(fd).ok_or(INVALID)?;
        let [MAGIC, simulator, what, id, bytes, device, kinds] = words else {
            return fail(INVALID);
        };
        let (what, own) = (what as u32, simulator == self.identity());
        if own && what & POOL != 0 {
            return Ok(what);
        }
        let alloc = self.allocs.get(what as usize).and_then(Option::as_ref);
        match own {
            true if alloc.is_some_and(|alloc| alloc.block_id == id) => Ok(what),
            false if bytes > 0 && device < self.config.devices.len() as u64 => {
                let value = self.new_handle();
                let props = Props {
                    handle_types: kinds as u32,
                    ..Props::default()
                };
                let shared =
                    SharedContents::of(fd).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
                // An imported handle is charged only to the process that exported it.
                let alloc = self.create_charged(device as usize, bytes, 0, (value, props))?;
                if let Some(entry) = &mut self.allocs[alloc as usize] {
                    // The caller counts the import.
                    entry.references = 0;
                    entry.contents.shared = Some(shared);
                }
                self.handles.insert(value, alloc);
                Ok(alloc)
            }
            _ => fail(INVALID),
        }
    }

    /// Returns the shared object behind a number that replaces a file descriptor.
    #[cfg(not(unix))]
    fn shared_fd(&self, fd: usize) -> R<u32> {
        self.shared.get(&(fd as u64)).copied().ok_or(INVALID)
    }
}

/// Creates a file without a name that contains these words.
#[cfg(unix)]
fn file_of(words: &[u64; 7]) -> std::io::Result<std::fs::File> {
    use std::io::Write;
    use std::sync::atomic::{AtomicU64, Ordering};
    static FILES: AtomicU64 = AtomicU64::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("cualloc-sim-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut options = std::fs::OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(&words.map(u64::to_le_bytes).concat())?;
    Ok(file)
}

#[cfg(unix)]
fn words_of(fd: std::os::fd::BorrowedFd<'_>) -> Option<[u64; 7]> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(fd.try_clone_to_owned().ok()?);
    let mut bytes = [0; 56];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let (words, _) = bytes.as_chunks::<8>();
    words
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect::<Vec<_>>()
        .try_into()
        .ok()
}

#[allow(non_snake_case)]
impl State {
    pub(super) fn cuMemExportToShareableHandle(
        &mut self,
        out: Out<c_void>,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: u64,
    ) -> R {
        let alloc = self.handle(handle)?;
        let props = self.allocs[alloc as usize]
            .as_ref()
            .map(|alloc| alloc.props);
        let allowed = props.map_or(0, |props| props.handle_types);
        if flags != 0 || kind.0 == 0 || allowed & kind.0 == 0 {
            return fail(INVALID);
        }
        if kind == CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC {
            let token = self.share_token(alloc);
            let mut data = [0; 64];
            data[..8].copy_from_slice(&token.to_le_bytes());
            return out.cast().set(CUmemFabricHandle { data });
        }
        let fd = self.share_fd(alloc)?;
        out.cast().set(fd)
    }

    pub(super) fn cuMemImportFromShareableHandle(
        &mut self,
        handle: Out<CUmemGenericAllocationHandle>,
        os_handle: Host,
        kind: CUmemAllocationHandleType,
    ) -> R {
        type K = CUmemAllocationHandleType;
        handle.check()?;
        // A descriptor is passed as the pointer's value; for a fabric handle the pointer refers to it.
        let alloc = match kind {
            K::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => self.shared_fd(os_handle.address())?,
            K::CU_MEM_HANDLE_TYPE_FABRIC if os_handle.address() != 0 => {
                let mut token = [0; 8];
                token.copy_from_slice(&os_handle.read(0, 8));
                self.shared_token(u64::from_le_bytes(token))?
            }
            _ => return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        let Some(entry) = &mut self.allocs[alloc as usize] else {
            return fail(INVALID);
        };
        entry.references += 1;
        handle.set(entry.handle)
    }

    pub(super) fn cuMemRetainAllocationHandle(
        &mut self,
        handle: Out<CUmemGenericAllocationHandle>,
        address: *mut c_void,
    ) -> R {
        handle.check()?;
        let alloc = match self.mapping_at(address as u64) {
            Some((_, mapping)) if mapping.origin == Origin::Vmm => mapping.alloc,
            _ => return fail(INVALID),
        };
        match &mut self.allocs[alloc as usize] {
            // The other memory that a broken second mapping shows has no handle.
            Some(entry) if entry.handle != 0 => {
                entry.references += 1;
                handle.set(entry.handle)
            }
            _ => fail(INVALID),
        }
    }

    pub(super) fn cuMemGetHandleForAddressRange(
        &mut self,
        out: Out<c_void>,
        dptr: CUdeviceptr,
        size: usize,
        kind: CUmemRangeHandleType,
        _flags: u64,
    ) -> R {
        let end = dptr.checked_add(size as u64).ok_or(INVALID)?;
        if size == 0 || !dptr.is_multiple_of(4096) || !size.is_multiple_of(4096) {
            return fail(INVALID);
        }
        let mut at = dptr;
        let mut first = None;
        while at < end {
            let Some((start, mapping)) = self.mapping_at(at) else {
                return fail(INVALID);
            };
            first = first.or(Some(mapping.alloc));
            at = start + mapping.bytes;
        }
        let Some(alloc) = first else {
            return fail(INVALID);
        };
        let device = self.allocs[alloc as usize]
            .as_ref()
            .map_or(0, |alloc| alloc.device);
        let dma = kind == CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        if !dma || !self.config.devices[device].dma_buf {
            return fail(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let fd = self.share_fd(alloc)?;
        out.cast().set(fd)
    }

    pub(super) fn cuIpcGetMemHandle(&mut self, out: Out<CUipcMemHandle>, dptr: CUdeviceptr) -> R {
        let alloc = match self.mapping_at(dptr) {
            Some((_, mapping)) if matches!(mapping.origin, Origin::Plain(_)) => mapping.alloc,
            _ => return fail(INVALID),
        };
        let token = self.share_token(alloc);
        let mut reserved = [0; 64];
        for (place, byte) in reserved.iter_mut().zip(token.to_le_bytes()) {
            *place = byte as std::ffi::c_char;
        }
        out.set(CUipcMemHandle { reserved })
    }

    pub(super) fn cuIpcOpenMemHandle_v2(
        &mut self,
        out: Out<CUdeviceptr>,
        handle: CUipcMemHandle,
        _flags: c_uint,
    ) -> R {
        out.check()?;
        let ctx = self.current()?;
        let mut token = [0; 8];
        for (place, byte) in token.iter_mut().zip(handle.reserved) {
            *place = byte as u8;
        }
        let alloc = self.shared_token(u64::from_le_bytes(token))?;
        let Some(entry) = &self.allocs[alloc as usize] else {
            return fail(INVALID);
        };
        let (bytes, device) = (entry.bytes, self.ctxs[ctx].device);
        let address = self.plain_range(bytes, 512)?;
        self.map(address, alloc, Origin::Ipc(ctx), 1 << device);
        out.set(address)
    }

    pub(super) fn cuIpcCloseMemHandle(&mut self, dptr: CUdeviceptr) -> R {
        let bytes = match self.mappings.get(&dptr) {
            Some(mapping) if matches!(mapping.origin, Origin::Ipc(_)) => mapping.bytes,
            _ => {
                self.dead("IPC mapping", dptr, false);
                return fail(INVALID);
            }
        };
        self.check_unused(dptr, true);
        self.unmap(dptr);
        self.give_plain_range(dptr, bytes);
        Ok(())
    }

    pub(super) fn cuPointerGetAttribute(
        &mut self,
        data: Out<c_void>,
        attribute: CUpointer_attribute,
        ptr: CUdeviceptr,
    ) -> R {
        type A = CUpointer_attribute;
        data.check()?;
        let host = self
            .host_block_at(ptr)
            .map(|(start, block)| (start, block.bytes));
        if let Some((start, bytes)) = host {
            return match attribute {
                A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => data.cast().set(1u32),
                A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER | A::CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                    data.cast().set(ptr)
                }
                A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => data.cast().set(start),
                A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => data.cast().set(bytes as usize),
                A::CU_POINTER_ATTRIBUTE_MAPPED => data.cast().set(1u8),
                _ => fail(INVALID),
            };
        }
        let Some((start, mapping)) = self.mapping_at(ptr) else {
            return fail(INVALID);
        };
        let Some(alloc) = &self.allocs[mapping.alloc as usize] else {
            return fail(INVALID);
        };
        let ctx = match mapping.origin {
            Origin::Plain(ctx) | Origin::Ipc(ctx) => State::ctx_handle(ctx),
            Origin::Vmm | Origin::Pool(_) => std::ptr::null_mut(),
        };
        let plain = matches!(mapping.origin, Origin::Plain(_));
        match attribute {
            A::CU_POINTER_ATTRIBUTE_CONTEXT => data.cast().set(ctx),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => data.cast().set(2u32),
            A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => data.cast().set(ptr),
            A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => data.cast().set(u8::from(mapping.sync_memops)),
            A::CU_POINTER_ATTRIBUTE_BUFFER_ID | A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
                data.cast().set(alloc.block_id)
            }
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED => data.cast().set(0u8),
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => data.cast().set(alloc.device as c_int),
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => data.cast().set(u8::from(plain)),
            A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => data.cast().set(start),
            A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => data.cast().set(mapping.bytes as usize),
            A::CU_POINTER_ATTRIBUTE_MAPPED => data.cast().set(1u8),
            A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
                data.cast().set(u64::from(alloc.props.handle_types))
            }
            A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                data.cast().set(u8::from(plain || alloc.props.rdma != 0))
            }
            A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
                let pool = match mapping.origin {
                    Origin::Pool(pool) => pool,
                    _ => 0,
                };
                data.cast().set(pool as CUmemoryPool)
            }
            A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => data.cast().set(mapping.bytes as usize),
            A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => data.cast().set(start),
            _ => fail(INVALID),
        }
    }

    pub(super) fn cuPointerGetAttributes(
        &mut self,
        count: c_uint,
        attributes: Out<CUpointer_attribute>,
        data: Out<*mut c_void>,
        ptr: CUdeviceptr,
    ) -> R {
        let attributes = attributes.read(count as usize)?;
        let data = data.read(count as usize)?;
        for (attribute, place) in attributes.into_iter().zip(data) {
            // SAFETY: the caller of the driver function gives one place per attribute.
            let out: Out<c_void> = unsafe { super::args::arg(place) };
            // The plural form writes zero where an attribute does not apply, and succeeds.
            if self
                .cuPointerGetAttribute(Out::same(&out), attribute, ptr)
                .is_err()
            {
                type A = CUpointer_attribute;
                match attribute {
                    A::CU_POINTER_ATTRIBUTE_IS_MANAGED
                    | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
                    | A::CU_POINTER_ATTRIBUTE_MAPPED
                    | A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
                    | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                        out.cast().set(0u8)?;
                    }
                    A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => out.cast().set(0u32)?,
                    A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => out.cast().set(-2i32)?,
                    _ => out.cast().set(0u64)?,
                }
            }
        }
        Ok(())
    }

    pub(super) fn cuPointerSetAttribute(
        &mut self,
        value: In<c_void>,
        attribute: CUpointer_attribute,
        ptr: CUdeviceptr,
    ) -> R {
        if attribute != CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            return fail(INVALID);
        }
        let on = value.cast::<u32>().get()? != 0;
        let Some((start, _)) = self.mapping_at(ptr) else {
            return fail(INVALID);
        };
        if let Some(mapping) = self.mappings.get_mut(&start) {
            mapping.sync_memops = on;
        }
        Ok(())
    }

    pub(super) fn cuMemPoolExportToShareableHandle(
        &mut self,
        out: Out<c_void>,
        pool: CUmemoryPool,
        kind: CUmemAllocationHandleType,
        _flags: u64,
    ) -> R {
        let value = self.pool(pool)?;
        let types = self.pools.get(&value).map_or(0, |pool| pool.handle_types.0);
        if kind.0 == 0 || types & kind.0 == 0 {
            return fail(INVALID);
        }
        let fd = self.share_fd(value as u32 | POOL)?;
        out.cast().set(fd)
    }

    pub(super) fn cuMemPoolImportFromShareableHandle(
        &mut self,
        out: Out<CUmemoryPool>,
        handle: *mut c_void,
        _kind: CUmemAllocationHandleType,
        _flags: u64,
    ) -> R {
        let value = self.shared_fd(handle as usize)?;
        if value & POOL == 0 {
            return fail(INVALID);
        }
        let value = u64::from(value & !POOL);
        if let Some(pool) = self.pools.get_mut(&value) {
            pool.imports += 1;
        }
        out.set(value as CUmemoryPool)
    }

    pub(super) fn cuMemPoolExportPointer(
        &mut self,
        out: Out<CUmemPoolPtrExportData>,
        ptr: CUdeviceptr,
    ) -> R {
        if !self.pool_blocks.contains_key(&ptr) {
            return fail(INVALID);
        }
        let mut reserved = [0; 64];
        for (place, byte) in reserved.iter_mut().zip(ptr.to_le_bytes()) {
            *place = byte as _;
        }
        out.set(CUmemPoolPtrExportData { reserved })
    }

    pub(super) fn cuMemPoolImportPointer(
        &mut self,
        out: Out<CUdeviceptr>,
        pool: CUmemoryPool,
        data: Out<CUmemPoolPtrExportData>,
    ) -> R {
        self.pool(pool)?;
        let mut bytes = [0; 8];
        for (place, byte) in bytes.iter_mut().zip(data.get()?.reserved) {
            *place = byte;
        }
        let ptr = u64::from_le_bytes(bytes);
        if !self.pool_blocks.contains_key(&ptr) {
            return fail(INVALID);
        }
        out.set(ptr)
    }
}
