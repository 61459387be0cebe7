//! Checkpoints of graph pools by handle.

use std::ffi::c_void;
use std::sync::Arc;

use cualloc::allocator::Checkpoint;

use crate::entry::{call, give};
use crate::handle_table::HandleTable;
use crate::results::{Failure, NULL};
use crate::{cualloc_checkpoint_t, cualloc_pool_t, pool_table};

static CHECKPOINTS: HandleTable<Arc<Checkpoint>> = HandleTable::new(
    0xca13,
    "the handle belongs to no checkpoint: it was freed or never existed",
);

fn find(handle: *const cualloc_checkpoint_t) -> Result<Arc<Checkpoint>, Failure> {
    if handle.is_null() {
        return Err(NULL);
    }
    CHECKPOINTS.with(handle as u64, |found| Arc::clone(found))
}

/// Called once for each block of a checkpoint, with the data of the call, the address of the block's first byte, and
/// its size in bytes. It must not throw. It may call the library.
pub type cualloc_checkpoint_block_t =
    Option<unsafe extern "C" fn(data: *mut c_void, address: u64, bytes: u64)>;

/// Creates a checkpoint of a graph pool: the blocks that are live in it now. cualloc_pool_restore returns to it.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out; CUALLOC_CLOSED for a pool that was released;
/// CUALLOC_CONTEXT_LOST. *out is then null.
///
/// May be called from any thread, also during a capture.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_checkpoint(
    pool: *mut cualloc_pool_t,
    out: *mut *mut cualloc_checkpoint_t,
) -> i32 {
    let make = || {
        let made = pool_table::with(pool, |pool, _| pool.checkpoint())?;
        Ok(CHECKPOINTS.add(Arc::new(made))? as *mut cualloc_checkpoint_t)
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, make) }
}

/// Calls a function for each block of a checkpoint, by ascending address.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null checkpoint or function; CUALLOC_CLOSED for a checkpoint that was freed;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread. No lock is held while the function runs.
///
/// # Safety
/// It is safe to call `visit` with `data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_checkpoint_visit(
    checkpoint: *const cualloc_checkpoint_t,
    visit: cualloc_checkpoint_block_t,
    data: *mut c_void,
) -> i32 {
    call(|| {
        let visit = visit.ok_or(NULL)?;
        for (address, bytes) in find(checkpoint)?.blocks() {
            // SAFETY: the caller's contract.
            unsafe { visit(data, address, bytes) };
        }
        Ok(())
    })
}

/// Makes exactly the blocks of a checkpoint live in its pool, each at its address. Blocks that are live now but not in
/// the checkpoint cease to be live: they must not be freed any more, because a later block may have the same address.
/// Blocks of the checkpoint that are not live now become live again, and are freed with cualloc_free. Checkpoints of a
/// pool may be restored in any order and any number of times.
///
/// Does not wait for device work: memory of blocks that cease to be live is reused after the work that uses it has
/// ended, as after a free.
///
/// Errors: CUALLOC_BUSY while a capture in progress or a call of another thread uses the pool; CUALLOC_SUSPENDED for a
/// suspended pool; CUALLOC_INVALID_ARGUMENT for a null pool or checkpoint, a checkpoint of another pool, or one whose
/// memory the pool has returned since; CUALLOC_CLOSED for a pool that was released or a checkpoint that was freed;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. After an error nothing has changed.
///
/// May be called from any thread.
///
/// # Safety
/// Blocks that are live now but not in the checkpoint are used only by graphs that were captured with them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_restore(
    pool: *mut cualloc_pool_t,
    checkpoint: *const cualloc_checkpoint_t,
) -> i32 {
    call(|| {
        let to = find(checkpoint)?;
        pool_table::with(pool, |pool, _| {
            // SAFETY: the caller's contract.
            let restored = unsafe { pool.restore(&to) }?;
            for block in restored.revived {
                // The caller frees it by its address.
                let _address = block.into_raw();
            }
            Ok(())
        })
    })
}

/// Frees a checkpoint. Blocks are not affected. Null is ignored.
///
/// Errors: CUALLOC_CLOSED for a checkpoint that was freed before; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_checkpoint_free(checkpoint: *mut cualloc_checkpoint_t) -> i32 {
    call(|| match checkpoint.is_null() {
        true => Ok(()),
        false => CHECKPOINTS.remove(checkpoint as u64).map(drop),
    })
}
