//! The shared allocators behind PyTorch's pluggable interface and its allocator class: functions that C++ code calls.
//!
//! PyTorch does not treat a null pointer as a failure, so the C++ code throws an exception instead
//! (`python/companion.cpp`, `python/cualloc/torch_allocator.cpp`). Hooks for the pools of graphs are in `torch_pools`.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cualloc::allocator::BlockInfo;
use cualloc::error::{InvalidArgument, OutOfMemory};
use cualloc::held::Mutex;
use cualloc::{Allocator, Error};

use crate::blocks::{cualloc_free, try_alloc};
use crate::device::Source;
use crate::entry::{call, try_fast, value};
use crate::results::{
    CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_INVALID_ARGUMENT, CUALLOC_NOT_LIVE,
    CUALLOC_NOT_OURS, CUALLOC_OK, CUALLOC_PANIC, Failure,
};
use crate::stats::{self, cualloc_stats_t};
use crate::{cualloc_block_t, cualloc_t, handle_table, handles, shared};

/// Blocks whose free failed, usually because of a capture: the allocator's handle and the address.
static DEFERRED: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Whether `DEFERRED` is not empty.
static ANY_DEFERRED: AtomicBool = AtomicBool::new(false);

/// Number of open scopes of pools: captures of PyTorch in progress, among others.
pub(crate) static OPEN_SCOPES: AtomicUsize = AtomicUsize::new(0);

/// Retries deferred frees, unless scopes of pools are open: while a capture is in progress, every retry would fail.
#[cold]
#[inline(never)]
pub(crate) fn retry_deferred_frees() {
    if ANY_DEFERRED.load(Ordering::Relaxed) && OPEN_SCOPES.load(Ordering::Relaxed) == 0 {
        free_deferred();
    }
}

/// Frees the blocks whose free failed earlier. Those that fail again stay.
pub(crate) fn free_deferred() {
    if !ANY_DEFERRED.load(Ordering::Relaxed) {
        return;
    }
    // In a forked child, a thread that does not exist there may hold the lock.
    if handle_table::refuse_child().is_err() {
        return;
    }
    ANY_DEFERRED.store(false, Ordering::Relaxed);
    let blocks = std::mem::take(&mut *DEFERRED.lock());
    for (handle, ptr) in blocks {
        free(handle as *mut cualloc_t, ptr);
    }
}

fn free(allocator: *mut cualloc_t, ptr: u64) {
    if allocator.is_null() {
        return;
    }
    // SAFETY: PyTorch submits no more work that uses memory it frees.
    let freed = unsafe { cualloc_free(allocator, ptr) };
    // After these errors there is nothing left to free; after any other the block is still live.
    let over = matches!(
        freed,
        CUALLOC_OK
            | CUALLOC_NOT_LIVE
            | CUALLOC_NOT_OURS
            | CUALLOC_PANIC
            | CUALLOC_CLOSED
            | CUALLOC_CONTEXT_LOST
    );
    if !over {
        call(|| {
            let mut later = DEFERRED.lock();
            later.push((allocator as u64, ptr));
            ANY_DEFERRED.store(true, Ordering::Relaxed);
            Ok(())
        });
    }
}

/// Allocates bytes on a device for use on a stream, as PyTorch requests them: from the device's shared allocator
/// (cualloc_shared), which is created if there is none. Returns null for 0 bytes, which is not a failure, and after
/// every failure, whose code cualloc_last_code() returns. If memory is exhausted, cualloc_last_error() begins with the
/// wording of PyTorch's own error.
///
/// Errors: as cualloc_alloc and cualloc_create.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_alloc(
    bytes: usize,
    device: i32,
    stream: *mut c_void,
) -> *mut c_void {
    if !ANY_DEFERRED.load(Ordering::Relaxed) {
        let mut ptr = 0;
        let out = &raw mut ptr;
        // SAFETY: the caller's contract; the address is a local's.
        let fast = |allocator: &Allocator| unsafe { try_alloc(allocator, bytes, stream, out) };
        // SAFETY: as above.
        let slow =
            |allocator: &Allocator| unsafe { alloc_slow(allocator, (bytes, device), stream, out) };
        if try_fast(shared::made(device), fast, slow).is_some() {
            return std::ptr::with_exposed_provenance_mut(ptr as usize);
        }
    }
    // SAFETY: the caller's contract.
    unsafe { alloc_checked(bytes, device, stream) }
}

/// The slow path of [`cualloc_torch_alloc`].
///
/// # Safety
/// As [`cualloc_torch_alloc`]; `out` is writable.
#[inline(never)]
unsafe fn alloc_slow(
    allocator: &Allocator,
    (bytes, device): (usize, i32),
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    if bytes == 0 {
        return CUALLOC_OK;
    }
    // SAFETY: the caller's contract.
    match unsafe { allocator.allocate_raw(bytes, stream.cast()) } {
        Ok(ptr) => {
            // SAFETY: the caller's contract.
            unsafe { out.write(ptr) };
            CUALLOC_OK
        }
        Err(error) => call(|| {
            Err(to_torch_wording(
                handles::convert_error(allocator, error),
                bytes,
                device,
            ))
        }),
    }
}

/// [`cualloc_torch_alloc`] if the allocator may not exist yet, or frees are deferred.
///
/// # Safety
/// As [`cualloc_torch_alloc`].
#[cold]
#[inline(never)]
unsafe fn alloc_checked(bytes: usize, device: i32, stream: *mut c_void) -> *mut c_void {
    let ptr = value(|| {
        if bytes == 0 {
            return Ok(0);
        }
        retry_deferred_frees();
        let allocator = match shared::made(device) {
            none if none.is_null() => shared::of(device)?,
            made => made,
        };
        let made = handles::with(allocator, |allocator| {
            // SAFETY: the caller's contract.
            unsafe { allocator.allocate_raw(bytes, stream.cast()) }
        });
        made.map_err(|failure| to_torch_wording(failure, bytes, device))
    });
    std::ptr::with_exposed_provenance_mut(ptr as usize)
}

/// Converts an out-of-memory error to PyTorch's wording. A request for more bytes than any device has counts as one.
#[cold]
#[inline(never)]
fn to_torch_wording(failure: Failure, bytes: usize, device: i32) -> Failure {
    match failure {
        Failure::Library(Error::OutOfMemory(picture)) => Failure::Torch(picture),
        Failure::Library(Error::Invalid(InvalidArgument::Size { .. })) => {
            let mut picture = OutOfMemory::default();
            picture.requested = bytes as u64;
            picture.device = usize::try_from(device).unwrap_or_default();
            // The remaining figures are filled in as far as the allocator and the driver can provide them.
            let _asked = handles::with(shared::made(device), |allocator| {
                let stats = allocator.stats();
                picture.limit = stats.limit;
                picture.reserved = stats.all.reserved.current;
                picture.allocated = stats.all.allocated.current;
                picture.cached = stats.cached();
                picture.graph_pools = stats.graph_pools;
                let info = allocator.context().mem_info()?;
                picture.driver_free = Some(info.free);
                picture.driver_total = Some(info.total);
                Ok(())
            });
            Failure::Torch(Box::new(picture))
        }
        failure => failure,
    }
}

/// Frees a block returned by cualloc_torch_alloc. Never waits and never reports an error: a null pointer is ignored,
/// and memory is left alone if its context is lost, in a forked child and while the process exits. If a block cannot be
/// freed now, for example because a stream is being captured, a later call frees it.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_free(
    ptr: *mut c_void,
    _bytes: usize,
    device: i32,
    _stream: *mut c_void,
) {
    if !ptr.is_null() {
        free(shared::made(device), ptr.addr() as u64);
    }
}

/// Like cualloc_torch_free, for a block of any device: finds the device by the address.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_delete(ptr: *mut c_void) {
    if ptr.is_null() {
        return;
    }
    let address = ptr.addr() as u64;
    let mut allocators = shared::all();
    match (allocators.next(), allocators.next()) {
        (Some(only), None) => free(only, address),
        _ => delete_of_several(address),
    }
}

/// Does the work of [`cualloc_torch_delete`] unless exactly one device has an allocator. Asks first the allocator that
/// owned the block which this thread freed last.
#[inline(never)]
fn delete_of_several(address: u64) {
    thread_local! {
        static LAST: Cell<u64> = const { Cell::new(0) };
    }
    let last = std::iter::once(LAST.get() as *mut cualloc_t).filter(|last| !last.is_null());
    let owns = |allocator: &Allocator| Ok(allocator.owns(address));
    let owner = last
        .chain(shared::all())
        .find(|allocator| handles::with(*allocator, owns).unwrap_or(false));
    if let Some(owner) = owner {
        LAST.set(owner as u64);
        free(owner, address);
    }
}

/// Retries the frees that cualloc_torch_free and cualloc_torch_delete deferred. Those that fail again stay deferred.
///
/// May be called from any thread, with any current context.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_retry_frees() {
    call(|| {
        free_deferred();
        Ok(())
    });
}

/// PyTorch's hook when a pluggable allocator is set (with 0 devices) and when CUDA is initialised: loads the driver, so
/// that the first allocation finds it. If there is no driver, that allocation reports the error.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_init(device_count: i32) {
    if device_count > 0 {
        call(|| Source::Cuda.driver().map(drop));
    }
}

/// PyTorch's hook for torch.cuda.empty_cache(): calls cualloc_empty_cache for all shared allocators.
///
/// May be called from any thread, with any current context.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_reset() {
    call(|| {
        retry_deferred_frees();
        Ok(())
    });
    for allocator in shared::all() {
        call(|| handles::with(allocator, Allocator::empty_cache).map(drop));
    }
}

/// PyTorch's hook for torch.cuda.set_per_process_memory_fraction(): limits the bytes reserved from the driver to this
/// fraction of the device's memory.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a fraction outside 0 to 1; as cualloc_create. Nothing has changed then.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_torch_fraction(fraction: f64, device: i32) -> i32 {
    call(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let why = "the fraction of the device's memory is not from 0 to 1";
            return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
        }
        let allocator = shared::of(device)?;
        let total = handles::with(allocator, |allocator| {
            Ok(allocator.context().device().total_memory()?)
        })?;
        handles::with(allocator, |allocator| {
            allocator.set_limit(Some((total as f64 * fraction) as u64));
            Ok(())
        })
    })
}

/// PyTorch's hook for the block that contains an address, on any device: returns the address of its first byte, and
/// writes its size to *bytes. For memory of others, returns the address itself and writes 0.
///
/// May be called from any thread.
///
/// # Safety
/// `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_base(ptr: *mut c_void, bytes: *mut usize) -> *mut c_void {
    let address = ptr.addr() as u64;
    let (base, size) = value(|| {
        let found = shared::all().find_map(|allocator| block_around(allocator, address));
        Ok(found.map(|block| (block.address as usize, block.size)))
    })
    .unwrap_or((ptr.expose_provenance(), 0));
    if !bytes.is_null() {
        // SAFETY: the caller's contract.
        unsafe { bytes.write(usize::try_from(size).unwrap_or(usize::MAX)) };
    }
    std::ptr::with_exposed_provenance_mut(base)
}

/// As cualloc_stats, with the quantities as PyTorch defines them: the figures of all blocks and of large_pool include
/// graph pools, and reserved is held. Peaks of other bytes are then upper bounds, but not above the peak of held.
///
/// Errors: as cualloc_stats.
///
/// May be called from any thread.
///
/// # Safety
/// As cualloc_stats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_stats(
    allocator: *mut cualloc_t,
    out: *mut cualloc_stats_t,
) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { stats::report(allocator, out, stats::with_graph_pools) })
}

fn block_around(allocator: *mut cualloc_t, address: u64) -> Option<BlockInfo> {
    handles::with(allocator, |allocator| allocator.block_around(address)).ok()
}

/// Describes the block that contains an address, on any device: writes the device's number to *device, and the block to
/// *block. Returns whether there is one.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// Both pointers are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_block(
    ptr: *mut c_void,
    device: *mut i32,
    block: *mut cualloc_block_t,
) -> bool {
    let found = value(|| {
        let address = ptr.addr() as u64;
        Ok(shared::all().find_map(|allocator| block_around(allocator, address)))
    });
    let Some(found) = found else { return false };
    if !device.is_null() {
        let ordinal = found.device.and_then(|ordinal| i32::try_from(ordinal).ok());
        // SAFETY: the caller's contract.
        unsafe { device.write(ordinal.unwrap_or(-1)) };
    }
    if !block.is_null() {
        // SAFETY: the caller's contract.
        unsafe { block.write((&found).into()) };
    }
    true
}

/// PyTorch's hook for Tensor.record_stream: cualloc_record_stream for the block that contains an address, on any
/// device. Returns CUALLOC_OK for null and for memory of others, since a tensor may use memory of another allocator.
///
/// Errors: as cualloc_record_stream, except CUALLOC_NOT_OURS.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_record_stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) -> i32 {
    call(|| {
        for allocator in shared::all() {
            let recorded = handles::with(allocator, |allocator| {
                // SAFETY: the caller's contract.
                unsafe { allocator.record_stream_raw(ptr.addr() as u64, stream.cast()) }
            });
            match recorded {
                Err(Failure::Library(Error::NotOurs { .. })) => {}
                recorded => return recorded,
            }
        }
        Ok(())
    })
}
