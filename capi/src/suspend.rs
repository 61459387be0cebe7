//! Suspending memory: it returns to the driver and keeps its addresses.

use std::ffi::c_void;

use cualloc::Allocator;
use cualloc::allocator::{Contents, Select};

use crate::entry::give;
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
use crate::{cualloc_t, handles, pool_table, tags};

/// All memory of the allocator; `which` is ignored.
pub const CUALLOC_SELECT_ALL: i32 = 0;

/// The memory of a graph pool; `which` is its handle (cualloc_pool_create).
pub const CUALLOC_SELECT_POOL: i32 = 2;

/// The memory of all graph pools and ranges with a tag (cualloc_pool_create_tagged, cualloc_torch_pool_tag,
/// cualloc_range_create); `which` is the zero-terminated text of the tag.
pub const CUALLOC_SELECT_TAG: i32 = 3;

/// Contents are lost: they are undefined after the resume until they are written.
pub const CUALLOC_CONTENTS_DROP: i32 = 0;
/// Contents are kept in page-locked host memory, which is cached for the next suspend until a trim.
pub const CUALLOC_CONTENTS_PINNED: i32 = 1;
/// Contents are kept in plain host memory.
pub const CUALLOC_CONTENTS_HOST: i32 = 2;

/// Resolves a selection and runs a call with it.
///
/// # Safety
/// As for cualloc_suspend.
unsafe fn with_selection<T>(
    handle: *mut cualloc_t,
    (select, which): (i32, *mut c_void),
    run: impl FnOnce(&Allocator, Select<'_>) -> Result<T, cualloc::Error>,
) -> Result<T, Failure> {
    let entered = handles::enter(handle)?;
    let allocator = entered.allocator();
    let done = match select {
        CUALLOC_SELECT_ALL => run(allocator, Select::Allocator),
        CUALLOC_SELECT_POOL => {
            return pool_table::with_of(handle, which.cast(), |allocator, pool| {
                run(allocator, Select::Pool(pool))
            });
        }
        CUALLOC_SELECT_TAG => {
            // SAFETY: the caller's contract.
            let tag = unsafe { tags::known(which.cast_const().cast()) }?;
            run(allocator, Select::Tag(tag))
        }
        _ => {
            let why = "unknown selection of memory";
            return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
        }
    };
    done.map_err(|error| handles::convert_error(allocator, error))
}

/// Returns memory to the driver and keeps its addresses, so that other processes can use the memory until
/// cualloc_resume. select is one of CUALLOC_SELECT_..., and which identifies the selected pool or tag; contents is one
/// of CUALLOC_CONTENTS_... Blocks stay live, and may be freed while suspended. Waits for all work of the contexts
/// involved. Writes the number of bytes returned to the driver to *bytes.
///
/// Errors: CUALLOC_SUSPENDED if the memory is already suspended; CUALLOC_BUSY while a guard keeps memory or a call on
/// another thread holds some; CUALLOC_CAPTURING; CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT
/// for a null handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. Nothing is suspended then, with one exception: if the driver
/// fails a call and then also fails to undo the earlier ones, the memory is suspended, and cualloc_resume restores it.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// Until cualloc_resume has succeeded no work that uses the memory is submitted to a device. Discarded contents are
/// written before they are read. `which` is, for CUALLOC_SELECT_TAG, null or a zero-terminated text; `bytes` is
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_suspend(
    allocator: *mut cualloc_t,
    select: i32,
    which: *mut c_void,
    contents: i32,
    bytes: *mut u64,
) -> i32 {
    let run = || {
        let contents = match contents {
            CUALLOC_CONTENTS_DROP => Contents::Drop,
            CUALLOC_CONTENTS_PINNED => Contents::Pinned,
            CUALLOC_CONTENTS_HOST => Contents::Host,
            _ => {
                let why = "an unknown way with contents";
                return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
            }
        };
        // SAFETY: the caller's contract.
        let done = unsafe {
            with_selection(allocator, (select, which), |allocator, select| {
                allocator.suspend(select, contents)
            })
        }?;
        Ok(done.bytes)
    };
    // SAFETY: the caller's contract.
    unsafe { give(bytes, run) }
}

/// Restores suspended memory at its addresses, with access for all devices that had it and with the contents that were
/// kept. Writes the number of restored bytes to *bytes.
///
/// Errors: CUALLOC_OUT_OF_MEMORY (the text states how many bytes are missing); CUALLOC_SUSPENDED if none of the memory
/// is suspended; CUALLOC_BUSY while a call on another thread suspends or resumes; CUALLOC_INVALID_ARGUMENT for a null
/// handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. The memory then stays suspended, and the call may be repeated.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `which` is, for CUALLOC_SELECT_TAG, null or a zero-terminated text; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_resume(
    allocator: *mut cualloc_t,
    select: i32,
    which: *mut c_void,
    bytes: *mut u64,
) -> i32 {
    let resume = |allocator: &Allocator, select: Select<'_>| allocator.resume(select);
    // SAFETY: the caller's contract.
    unsafe {
        give(bytes, || {
            Ok(with_selection(allocator, (select, which), resume)?.bytes)
        })
    }
}
