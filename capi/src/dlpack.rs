//! Memory with several owners, as DLPack tensors: what other libraries own is released by code that needs no
//! interpreter, on any thread, also while a program ends.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, OnceLock};

use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned, DLTensor, Managed};

use crate::cualloc_owner_t;
use crate::entry::{call, give};
use crate::handle_table::{HandleTable, refuse_child};
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};

/// For cualloc_dlpack_export: a DLManagedTensor, not a DLManagedTensorVersioned.
pub const CUALLOC_DLPACK_LEGACY: u64 = 1 << 63;

/// Releases memory: called once, with the data that it was registered with, on any thread. It must not throw.
pub type cualloc_release_t = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// What is released with the last owner.
struct Memory {
    release: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

// SAFETY: the caller of `cualloc_owner_create` guarantees that any thread may release the memory.
unsafe impl Send for Memory {}
// SAFETY: nothing is accessible through a shared reference.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: called once, by the contract of `cualloc_owner_create`.
        unsafe { (self.release)(self.data) }
    }
}

static OWNERS: HandleTable<Arc<Memory>> = HandleTable::new(
    0xca16,
    "the handle belongs to no owner: it was released or never existed",
);

/// Creates an owner of memory. release is called with data once this owner and all tensors exported with it
/// (cualloc_dlpack_export) are released. For a block of a shared allocator (cualloc_shared), release can be
/// cualloc_torch_delete, and data the block's address.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null release or out; CUALLOC_CONTEXT_LOST in a forked child. *out is then
/// null, and release is not called.
///
/// May be called from any thread.
///
/// # Safety
/// `release` may be called with `data`, from any thread. `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_owner_create(
    release: cualloc_release_t,
    data: *mut c_void,
    out: *mut *mut cualloc_owner_t,
) -> i32 {
    let run = || {
        let release = release.ok_or(NULL)?;
        refuse_child()?;
        let owner = OWNERS.add(Arc::new(Memory { release, data }))?;
        Ok(owner as *mut cualloc_owner_t)
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
}

/// Releases an owner. Tensors exported with it keep the memory.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED for an owner that was released before;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_owner_release(owner: *mut cualloc_owner_t) -> i32 {
    call(|| match owner.is_null() {
        true => Err(NULL),
        false => OWNERS.remove(owner as u64).map(drop),
    })
}

/// A tensor with an owner: one box, which `manager_ctx` points to.
struct Export<M> {
    managed: Option<M>,
    /// The shape, then the strides.
    dimensions: Box<[i64]>,
    _memory: Arc<Memory>,
}

/// Deletes an export. Any thread may call it, and it never unwinds.
///
/// # Safety
/// `managed` was created by [`export`] and not deleted yet.
unsafe extern "C-unwind" fn delete<M: Managed>(managed: *mut M) {
    call(|| {
        // SAFETY: the caller's contract.
        drop(unsafe { Box::from_raw((*managed).context().cast::<Export<M>>()) });
        Ok(())
    });
}

/// # Safety
/// The shape and the strides of the tensor have `ndim` numbers, or are null.
unsafe fn export<M: Managed>(memory: Arc<Memory>, mut tensor: DLTensor, flags: u64) -> *mut c_void {
    let ndim = tensor.ndim as usize;
    let mut dimensions = Vec::new();
    for numbers in [tensor.shape, tensor.strides] {
        if !numbers.is_null() {
            // SAFETY: the caller's contract.
            dimensions.extend_from_slice(unsafe { std::slice::from_raw_parts(numbers, ndim) });
        }
    }
    let mut export = Box::new(Export::<M> {
        managed: None,
        dimensions: dimensions.into_boxed_slice(),
        _memory: memory,
    });
    tensor.shape = export.dimensions.as_mut_ptr();
    if !tensor.strides.is_null() {
        tensor.strides = tensor.shape.wrapping_add(ndim);
    }
    let export = Box::into_raw(export);
    let managed = M::make(tensor, export.cast(), delete::<M>, flags);
    // SAFETY: the box was created above and is not shared yet.
    unsafe { std::ptr::from_mut((*export).managed.insert(managed)).cast() }
}

/// Exports memory as a DLPack tensor: writes to *out a DLManagedTensorVersioned, or, if flags has the bit
/// CUALLOC_DLPACK_LEGACY, a DLManagedTensor. tensor points to a DLTensor of dlpack.h, which is copied with its shape
/// and strides. The other bits of flags are those of DLManagedTensorVersioned. The consumer calls the tensor's
/// deleter, on any thread. The function orders no streams (cualloc_stream_wait) and records no uses
/// (cualloc_record_stream).
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null argument, a negative number of dimensions, or dimensions without a
/// shape; CUALLOC_CLOSED for an owner that was released; CUALLOC_CONTEXT_LOST in a forked child. *out is then null.
///
/// May be called from any thread.
///
/// # Safety
/// `tensor` is null or points to a DLTensor of the owner's memory, whose shape and strides have ndim numbers or are
/// null. `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_dlpack_export(
    owner: *mut cualloc_owner_t,
    tensor: *const c_void,
    flags: u64,
    out: *mut *mut c_void,
) -> i32 {
    let run = || {
        if owner.is_null() || tensor.is_null() {
            return Err(NULL);
        }
        // SAFETY: not null, and the caller's contract.
        let tensor = unsafe { tensor.cast::<DLTensor>().read() };
        if tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape.is_null()) {
            let why = "expected a tensor with a shape";
            return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
        }
        let memory = OWNERS.with(owner as u64, |memory| Arc::clone(memory))?;
        // SAFETY: the caller's contract.
        Ok(unsafe {
            match flags & CUALLOC_DLPACK_LEGACY {
                0 => export::<DLManagedTensorVersioned>(memory, tensor, flags),
                _ => export::<DLManagedTensor>(memory, tensor, flags),
            }
        })
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
}

/// Two functions of Python's C API, which a process with an interpreter has.
struct Python {
    is_valid: unsafe extern "C" fn(*mut c_void, *const c_char) -> i32,
    pointer: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
}

static PYTHON: OnceLock<Python> = OnceLock::new();

/// Returns the destructor (PyCapsule_Destructor) of Python capsules that hold tensors of cualloc_dlpack_export: it
/// deletes a tensor that no consumer has taken over, runs no Python code, and leaves a pending exception as it is. The
/// arguments are the functions PyCapsule_IsValid and PyCapsule_GetPointer of the process; only the first call uses
/// them. Null if one of them is null.
///
/// May be called from any thread.
///
/// # Safety
/// Both are null, or the functions of these names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_dlpack_capsule_destructor(
    is_valid: Option<unsafe extern "C" fn(*mut c_void, *const c_char) -> i32>,
    pointer: Option<unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>,
) -> Option<unsafe extern "C" fn(capsule: *mut c_void)> {
    let (is_valid, pointer) = (is_valid?, pointer?);
    PYTHON.get_or_init(|| Python { is_valid, pointer });
    Some(delete_capsule)
}

/// # Safety
/// Called by the interpreter, with a capsule of a tensor of [`export`].
unsafe extern "C" fn delete_capsule(capsule: *mut c_void) {
    // SAFETY: the caller's contract.
    unsafe {
        delete_unused::<DLManagedTensorVersioned>(capsule);
        delete_unused::<DLManagedTensor>(capsule);
    }
}

/// Deletes the tensor of a capsule that has this form's name, and not the name that a consumer gives it.
///
/// # Safety
/// As [`delete_capsule`].
unsafe fn delete_unused<M: Managed>(capsule: *mut c_void) {
    let name: &CStr = M::CAPSULE;
    let Some(python) = PYTHON.get() else { return };
    // SAFETY: the caller's contract; capsules with this name hold tensors of this form.
    unsafe {
        if (python.is_valid)(capsule, name.as_ptr()) != 0 {
            delete((python.pointer)(capsule, name.as_ptr()).cast::<M>());
        }
    }
}
