//! The interface of NVTX version 3 to a tool: the used parts of its core and of its memory extension.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The version of NVTX with these layouts.
pub(super) const VERSION: u16 = 3;
/// The memory extension's number, and the version of its layouts.
pub(super) const MEMORY: u16 = 1;
pub(super) const COMPATIBLE: u16 = 0x0102;
/// The number of functions of the memory extension that a tool may set.
pub(super) const SLOTS: usize = 63;
/// The number of functions of domains, including an unused one.
pub(super) const DOMAIN_FUNCTIONS: usize = 16;
/// The module of them.
pub(super) const DOMAINS: c_int = 5;
/// Tables that a tool requests.
pub(super) const CALLBACKS: u32 = 1;
pub(super) const VERSION_INFO: u32 = 3;

/// A heap from which regions are allocated.
pub(super) const SUBALLOCATOR: u32 = 1;
/// Memory given by virtual addresses; also a region identified by its address.
pub(super) const BY_ADDRESS: u32 = 1;
/// A zero-terminated text.
pub(super) const TEXT: u32 = 1;

/// The handle that a tool or a domain returns for an object.
pub(super) type Handle = *mut c_void;

macro_rules! functions {
    ($($(#[$meta:meta])* $table:ident in $words:ident: { $($name:ident $place:literal ($($arg:ty),*) $(-> $of:ty)?;)* })*) => {$(
        $(#[$meta])*
        pub(super) struct $table;
        impl $table {
            $(pub(super) fn $name() -> Option<unsafe extern "C" fn($($arg),*) $(-> $of)?> {
                // SAFETY: NVTX says that a tool puts a function of this type there.
                unsafe { function(&$words[$place]) }
            })*
        }
    )*};
}

// Each with its index in the table.
functions! {
    /// Functions of domains, as set by the tool.
    Domain in DOMAIN_WORDS: {
        mark 1 (Handle, *const Attributes);
        push 4 (Handle, *const Attributes) -> c_int;
        pop 5 (Handle) -> c_int;
        name_category 8 (Handle, u32, *const c_char);
        create 12 (*const c_char) -> Handle;
    }
    /// Functions of the memory extension, null where the tool has none. The tool may set them at any time.
    Memory in MEMORY_WORDS: {
        register_heap 0 (Handle, *const HeapDescription) -> Handle;
        unregister_heap 1 (Handle, Handle);
        register_regions 3 (Handle, *const Register);
        unregister_regions 5 (Handle, *const Unregister);
        name_regions 6 (Handle, *const Names);
    }
}

pub(super) static DOMAIN_WORDS: [AtomicUsize; DOMAIN_FUNCTIONS] =
    [const { AtomicUsize::new(0) }; DOMAIN_FUNCTIONS];
pub(super) static MEMORY_WORDS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

/// # Safety
/// The word is 0, or a function of type `F`.
unsafe fn function<F: Copy>(word: &AtomicUsize) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    let word: *const c_void = ptr::with_exposed_provenance(word.load(Ordering::Acquire));
    // SAFETY: as the caller says; a function is as long as a pointer.
    (!word.is_null()).then(|| unsafe { std::mem::transmute_copy(&word) })
}

pub(super) type ExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// The structure with which a library registers with the core; 0 if it does not take part.
pub(super) type Attach = unsafe extern "C" fn(ExportTable) -> c_int;
/// The same for an extension.
pub(super) type AttachExtension = unsafe extern "C" fn(*mut Module) -> c_int;

/// The table with which a tool finds the functions of a module.
#[repr(C)]
pub(super) struct Callbacks {
    pub bytes: usize,
    pub table: unsafe extern "C" fn(c_int, *mut *const *mut usize, *mut u32) -> c_int,
}

/// The table that reports the version of NVTX.
#[repr(C)]
pub(super) struct Version {
    pub bytes: usize,
    pub version: u32,
    pub reserved: u32,
    pub told: unsafe extern "C" fn(u32),
}

/// Functions of an extension, to be set by a tool.
#[repr(C)]
pub(super) struct Segment {
    pub number: usize,
    pub slots: usize,
    pub functions: *mut usize,
}

#[repr(C)]
pub(super) struct Module {
    pub version: u16,
    pub bytes: u16,
    pub module: u16,
    pub compatible: u16,
    pub segments: usize,
    pub first: *mut Segment,
    pub export: usize,
    pub info: usize,
}

#[repr(C)]
pub(super) struct Attributes {
    pub version: u16,
    pub bytes: u16,
    pub category: u32,
    pub color_type: i32,
    pub color: u32,
    pub payload_type: i32,
    pub reserved: i32,
    pub payload: u64,
    pub text_type: i32,
    pub text: *const c_char,
}

#[repr(C)]
pub(super) struct Range {
    pub bytes: usize,
    pub at: *const c_void,
}

#[repr(C)]
pub(super) struct HeapDescription {
    pub compatible: u16,
    pub bytes: u16,
    pub reserved: u32,
    pub usage: u32,
    pub memory: u32,
    pub range_bytes: usize,
    pub range: *const Range,
    pub category: u32,
    pub text_type: u32,
    pub text: *const c_char,
}

/// Regions of a heap that are allocated.
#[repr(C)]
pub(super) struct Register {
    pub compatible: u16,
    pub bytes: u16,
    pub memory: u32,
    pub heap: Handle,
    pub count: usize,
    pub element: usize,
    pub ranges: *const Range,
    pub handles: *mut Handle,
}

/// Regions that are freed.
#[repr(C)]
pub(super) struct Unregister {
    pub compatible: u16,
    pub bytes: u16,
    pub by: u32,
    pub count: usize,
    pub element: usize,
    pub regions: *const *const c_void,
}

/// A region's name.
#[repr(C)]
pub(super) struct Name {
    pub by: u32,
    pub text_type: u32,
    pub region: *const c_void,
    pub text: *const c_char,
    pub category: u32,
    pub reserved: u32,
}

/// Names of regions.
#[repr(C)]
pub(super) struct Names {
    pub compatible: u16,
    pub bytes: u16,
    pub reserved: u32,
    pub count: usize,
    pub element: usize,
    pub names: *const Name,
    pub reserved_end: usize,
}
