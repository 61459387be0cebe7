//! The other end of an exchange, in C, and memory that is not ours.

// A part of it is for Arrow.
#![cfg_attr(not(feature = "arrow"), allow(dead_code))]

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use cualloc::Error;
use cualloc::driver::{Context, Stream, sys};
use cualloc::exchange::dlpack::*;
use cualloc::exchange::*;
use libloading::Library;

use crate::common::{Folder, compile, compiler, ordered};

/// As the C side writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    pub data: u64,
    pub rows: i64,
    pub stride: i64,
    pub byte_offset: u64,
    pub device_type: i32,
    pub device_id: i32,
    pub ndim: i32,
    pub code: i32,
    pub bits: i32,
    pub lanes: i32,
    pub major: u32,
    pub minor: u32,
    pub flags: u64,
}

impl Seen {
    /// A tensor that can be imported: `rows` of `f32`.
    pub fn floats(data: u64, rows: i64) -> Seen {
        Seen {
            data,
            rows,
            stride: 1,
            device_type: 2,
            ndim: 1,
            code: 2,
            bits: 32,
            lanes: 1,
            major: 1,
            ..Seen::default()
        }
    }
}

/// As the C side writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SeenArrow {
    pub data: u64,
    pub validity: u64,
    pub length: i64,
    pub null_count: i64,
    pub offset: i64,
    pub n_buffers: i64,
    pub n_children: i64,
    pub device_id: i64,
    pub device_type: i32,
    pub event: u64,
    pub reserved: i64,
    pub released: i32,
}

pub type Released = extern "C" fn(*mut c_void);

/// The C library, compiled once per test program; none, aloud, without a compiler.
pub struct Other(Library);

pub fn other() -> Option<&'static Other> {
    static OTHER: OnceLock<Option<Other>> = OnceLock::new();
    OTHER
        .get_or_init(|| {
            let compiler = compiler()?;
            let folder = Folder::new("exchange");
            let out = folder.file("libexchange.so");
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/exchange.c");
            let arguments = ["-shared", "-fPIC", "-Wall", "-Werror", "-o"].map(Into::into);
            let files = [out.clone().into_os_string(), source.into()];
            compile(&compiler, &[&arguments[..], &files[..]].concat()).unwrap();
            // SAFETY: the library has no initialisers.
            Some(Other(unsafe { Library::new(out) }.unwrap()))
        })
        .as_ref()
}

impl Other {
    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers below give the function's type.
        unsafe { *self.0.get::<T>(name.as_bytes()).unwrap() }
    }

    pub fn see(&self, tensor: *const DLManagedTensor) -> Seen {
        let mut seen = Seen::default();
        // SAFETY: the tensor is alive, as in all calls here.
        unsafe {
            self.function::<unsafe extern "C" fn(*const DLManagedTensor, *mut Seen)>("see_legacy")(
                tensor, &mut seen,
            )
        };
        seen
    }

    pub fn see_versioned(&self, tensor: *const DLManagedTensorVersioned) -> Seen {
        let mut seen = Seen::default();
        // SAFETY: as above.
        unsafe {
            self.function::<unsafe extern "C" fn(*const DLManagedTensorVersioned, *mut Seen)>(
                "see_versioned",
            )(tensor, &mut seen)
        };
        seen
    }

    pub fn delete(&self, tensor: *mut c_void, name: &str) {
        // SAFETY: as above; `name` is a function of one pointer.
        unsafe { self.function::<unsafe extern "C" fn(*mut c_void)>(name)(tensor) }
    }

    pub fn make(&self, seen: &Seen, released: Released, with: *mut c_void) -> *mut DLManagedTensor {
        type Make =
            unsafe extern "C" fn(*const Seen, Released, *mut c_void) -> *mut DLManagedTensor;
        // SAFETY: as above.
        unsafe { self.function::<Make>("make_legacy")(seen, released, with) }
    }

    pub fn make_versioned(
        &self,
        seen: &Seen,
        released: Released,
        with: *mut c_void,
    ) -> *mut DLManagedTensorVersioned {
        type Make = unsafe extern "C" fn(
            *const Seen,
            Released,
            *mut c_void,
        ) -> *mut DLManagedTensorVersioned;
        // SAFETY: as above.
        unsafe { self.function::<Make>("make_versioned")(seen, released, with) }
    }

    pub fn see_arrow(&self, array: *const c_void) -> SeenArrow {
        let mut seen = SeenArrow::default();
        // SAFETY: as above.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_void, *mut SeenArrow)>("see_arrow")(
                array, &mut seen,
            )
        };
        seen
    }

    pub fn make_arrow(
        &self,
        array: *mut c_void,
        seen: &SeenArrow,
        released: Released,
        with: *mut c_void,
    ) {
        type Make = unsafe extern "C" fn(*mut c_void, *const SeenArrow, Released, *mut c_void);
        // SAFETY: as above.
        unsafe { self.function::<Make>("make_arrow")(array, seen, released, with) }
    }

    pub fn new_arrow(&self) -> *mut c_void {
        // SAFETY: as above.
        unsafe { self.function::<unsafe extern "C" fn() -> *mut c_void>("new_arrow")() }
    }

    pub fn move_arrow(&self, from: *mut c_void, to: *mut c_void) {
        // SAFETY: as above.
        unsafe {
            self.function::<unsafe extern "C" fn(*mut c_void, *mut c_void)>("move_arrow")(from, to)
        }
    }

    pub fn layout(&self) -> Vec<usize> {
        let of = self.function::<unsafe extern "C" fn(i32) -> usize>("layout");
        // SAFETY: as above.
        (0..16).map(|index| unsafe { of(index) }).collect()
    }
}

/// Counts releases. `with` is a leaked counter.
pub extern "C" fn count(with: *mut c_void) {
    // SAFETY: made by `counter`.
    unsafe { &*with.cast::<AtomicU64>() }.fetch_add(1, Ordering::SeqCst);
}

/// A counter for [`count`], for the rest of the process.
pub fn counter() -> &'static AtomicU64 {
    Box::leak(Box::new(AtomicU64::new(0)))
}

pub fn with(counter: &'static AtomicU64) -> *mut c_void {
    (counter as *const AtomicU64).cast_mut().cast()
}

pub fn released(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::SeqCst)
}

/// Device memory that no allocator of ours knows.
pub struct Plain<'a> {
    context: &'a Context,
    pub ptr: sys::CUdeviceptr,
}

impl Plain<'_> {
    pub fn new(context: &Context, bytes: usize) -> Plain<'_> {
        let ptr = context.enter().unwrap().mem_alloc(bytes).unwrap();
        Plain { context, ptr }
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        let entered = self.context.enter().unwrap();
        // SAFETY: allocated above, freed once.
        unsafe { entered.mem_free(self.ptr) }.unwrap();
    }
}

/// An import of foreign memory, of either form, with a count of its releases.
pub fn foreign_tensor(
    other: &Other,
    seen: &Seen,
    versioned: bool,
    stream: &Stream,
    peer: Peer,
) -> (Result<Tensor, Error>, &'static AtomicU64) {
    let counter = counter();
    let tensor = if versioned {
        let made = other.make_versioned(seen, count, with(counter));
        import(made, counter, stream, peer)
    } else {
        import(
            other.make(seen, count, with(counter)),
            counter,
            stream,
            peer,
        )
    };
    (tensor, counter)
}

/// Makes a tensor of a structure. What is refused is given back, and released once, when it is dropped.
fn import<M: Managed>(
    made: *mut M,
    counter: &AtomicU64,
    stream: &Stream,
    peer: Peer,
) -> Result<Tensor, Error> {
    // SAFETY: the other side makes valid structures, which are taken over once.
    let tensor = unsafe { Dlpack::from_raw(made) }.unwrap();
    Tensor::from_dlpack(tensor, stream, peer).map_err(|refused| {
        assert_eq!(released(counter), 0, "the tensor is given back");
        drop(refused.value);
        assert_eq!(released(counter), 1);
        refused.error
    })
}

/// An export of either form, which its drop releases.
pub fn lent(tensor: &Tensor, versioned: bool, peer: &Peer) -> Box<dyn std::any::Any> {
    match versioned {
        false => Box::new(tensor.to_dlpack::<DLManagedTensor>(peer).unwrap()),
        true => Box::new(tensor.to_dlpack::<DLManagedTensorVersioned>(peer).unwrap()),
    }
}

/// The result of reimporting an export of either form on a stream.
pub fn returned(tensor: &Tensor, versioned: bool, peer: &Peer, on: &Stream) -> Tensor {
    fn back<M: Managed>(tensor: &Tensor, peer: &Peer, on: &Stream) -> Tensor {
        let out = tensor.to_dlpack::<M>(peer).unwrap();
        Tensor::from_dlpack(out, on, ordered()).unwrap()
    }
    match versioned {
        false => back::<DLManagedTensor>(tensor, peer, on),
        true => back::<DLManagedTensorVersioned>(tensor, peer, on),
    }
}
