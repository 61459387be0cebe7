//! Memory that goes back to the driver and keeps its addresses.

use std::ffi::c_void;

use cualloc::Allocator;
use cualloc::allocator::{Contents, Select};

use crate::entry::give;
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
use crate::{cualloc_t, handles, pool_table, tags};

/// Everything that the allocator has; `which` is not looked at.
pub const CUALLOC_SELECT_ALL: i32 = 0;

/// The memory of a graph pool; `which` is its handle (cualloc_pool_create).
pub const CUALLOC_SELECT_POOL: i32 = 2;

/// The memory of all graph pools with a tag (cualloc_pool_create_tagged); `which` is the tag's text, which ends with a
/// zero.
pub const CUALLOC_SELECT_TAG: i32 = 3;

/// Contents are lost: nobody may read them afterwards before they are written.
pub const CUALLOC_CONTENTS_DROP: i32 = 0;
/// Contents are kept in page-locked host memory, which is kept for the next time, until a trim.
pub const CUALLOC_CONTENTS_PINNED: i32 = 1;
/// Contents are kept in plain host memory.
pub const CUALLOC_CONTENTS_HOST: i32 = 2;

/// Finds out what is meant, and does something with it.
///
/// # Safety
/// As cualloc_suspend.
unsafe fn selected<T>(
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
            let why = "an unknown selection of memory";
            return Err(Failure::Said(CUALLOC_INVALID_ARGUMENT, why));
        }
    };
    done.map_err(|error| handles::judged(allocator, error))
}

/// Gives memory back to the driver and keeps its addresses, so that other processes can have it until cualloc_resume.
/// select is one of CUALLOC_SELECT_.. and which says of what; contents is one of CUALLOC_CONTENTS_... Blocks stay live,
/// and may be freed meanwhile. Waits for all work of the contexts involved. *bytes is what the driver has back.
///
/// Errors: CUALLOC_SUSPENDED if it is suspended already, CUALLOC_BUSY while a guard keeps memory or a call on another
/// thread holds some, CUALLOC_CAPTURING, CUALLOC_UNSUPPORTED under the classic policy, CUALLOC_INVALID_ARGUMENT for a
/// null handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has, CUALLOC_CLOSED,
/// CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Nothing is suspended then; but if the driver, after it refused a call, refuses to take back what was done, the memory is
/// suspended, and cualloc_resume brings it back.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// Until cualloc_resume has succeeded nobody gives a device work that uses the memory. Contents that are not kept are
/// not read before they are written. `which` is, for CUALLOC_SELECT_TAG, null or a text that ends with a zero; `bytes` is
/// null or may be written.
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
                return Err(Failure::Said(CUALLOC_INVALID_ARGUMENT, why));
            }
        };
        // SAFETY: the caller's contract.
        let done = unsafe {
            selected(allocator, (select, which), |allocator, select| {
                allocator.suspend(select, contents)
            })
        }?;
        Ok(done.bytes)
    };
    // SAFETY: the caller's contract.
    unsafe { give(bytes, run) }
}

/// Brings suspended memory back to its addresses, with access for all devices that had it and with the contents that
/// were kept. *bytes is what is there again.
///
/// Errors: CUALLOC_OUT_OF_MEMORY: the text says how many bytes are missing; CUALLOC_SUSPENDED if nothing of it is
/// suspended, CUALLOC_BUSY while a call on another thread suspends or resumes, CUALLOC_INVALID_ARGUMENT for a null
/// handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has, CUALLOC_CLOSED,
/// CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. It is suspended as before then, and may be tried again.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `which` is, for CUALLOC_SELECT_TAG, null or a text that ends with a zero; `bytes` is null or may be written.
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
            Ok(selected(allocator, (select, which), resume)?.bytes)
        })
    }
}
