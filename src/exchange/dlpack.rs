//! The structures of `dlpack.h`.
//!
//! They are declared here because they are few and their layout is fixed by the specification (and asserted below),
//! while a separate crate would make its types and its version part of this crate's API. A panic in a deleter written
//! in Rust ends at the drop that called it.

use std::ffi::c_void;

pub use super::capsule::Managed;

/// A version of the specification.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Incremented when the layout changes.
    pub major: u32,
    /// Incremented when constants are added.
    pub minor: u32,
}

impl DLPackVersion {
    /// The version of exports. Tensors of another major version are rejected.
    pub const CURRENT: DLPackVersion = DLPackVersion { major: 1, minor: 1 };
}

/// The location of memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// [`CUDA`](Self::CUDA), [`CUDA_HOST`](Self::CUDA_HOST) or another.
    pub device_type: i32,
    /// Ordinal; 0 for host memory.
    pub device_id: i32,
}

impl DLDevice {
    /// The type of CUDA device memory.
    pub const CUDA: i32 = 2;
    /// The type of page-locked host memory.
    pub const CUDA_HOST: i32 = 3;
}

/// The element type.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDataType {
    /// 0 signed, 1 unsigned, 2 floating point, 4 `bf16`, 6 truth value, 10 `e4m3fn`, 12 `e5m2`.
    pub code: u8,
    /// Bits of a lane.
    pub bits: u8,
    /// 1 unless the elements are vectors.
    pub lanes: u16,
}

/// A tensor without an owner.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// The memory.
    pub data: *mut c_void,
    /// Its location.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// One length per dimension.
    pub shape: *mut i64,
    /// One stride per dimension, in elements; null for contiguous elements with the last dimension fastest.
    pub strides: *mut i64,
    /// Offset of the first element from `data`, in bytes.
    pub byte_offset: u64,
}

/// A tensor with its owner: the legacy form.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// Private data of the producer.
    pub manager_ctx: *mut c_void,
    /// Releases the tensor and this structure.
    pub deleter: Option<unsafe extern "C-unwind" fn(*mut DLManagedTensor)>,
}

/// A tensor with its owner: the versioned form.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Version of the layout from `flags` on.
    pub version: DLPackVersion,
    /// Private data of the producer.
    pub manager_ctx: *mut c_void,
    /// Releases the tensor and this structure.
    pub deleter: Option<unsafe extern "C-unwind" fn(*mut DLManagedTensorVersioned)>,
    /// A bit set of [`READ_ONLY`](Self::READ_ONLY) and other flags.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

impl DLManagedTensorVersioned {
    /// A flag: the consumer must not write.
    pub const READ_ONLY: u64 = 1;
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<DLPackVersion>() == 8 && size_of::<DLDevice>() == 8);
    assert!(size_of::<DLDataType>() == 4 && offset_of!(DLDataType, lanes) == 2);
    assert!(size_of::<DLTensor>() == 48 && align_of::<DLTensor>() == 8);
    assert!(offset_of!(DLTensor, device) == 8 && offset_of!(DLTensor, ndim) == 16);
    assert!(offset_of!(DLTensor, dtype) == 20 && offset_of!(DLTensor, shape) == 24);
    assert!(offset_of!(DLTensor, strides) == 32 && offset_of!(DLTensor, byte_offset) == 40);
    assert!(size_of::<DLManagedTensor>() == 64);
    assert!(offset_of!(DLManagedTensor, manager_ctx) == 48);
    assert!(offset_of!(DLManagedTensor, deleter) == 56);
    assert!(size_of::<DLManagedTensorVersioned>() == 80);
    assert!(offset_of!(DLManagedTensorVersioned, manager_ctx) == 8);
    assert!(offset_of!(DLManagedTensorVersioned, deleter) == 16);
    assert!(offset_of!(DLManagedTensorVersioned, flags) == 24);
    assert!(offset_of!(DLManagedTensorVersioned, dl_tensor) == 32);
};
