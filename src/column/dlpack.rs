//! DLPack tensors, of the legacy and of the versioned form.
//!
//! The structures are declared here: they are few, their layout is fixed for good by their
//! specification (and asserted below), and a crate for them would put its types and its version into
//! this crate's API.

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::driver::Device;

use super::described::{Described, place};
use super::memory::Memory;
use crate::element::ElementType;
use crate::error::ImportFault;

/// The version of the specification that exports follow. Tensors of another major version are refused.
pub const DLPACK_VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };

/// A flag of [`DLManagedTensorVersioned`]: the consumer must not write.
pub const DLPACK_FLAG_READ_ONLY: u64 = 1;

/// The device type of CUDA device memory.
const CUDA: i32 = 2;

/// A version of the specification.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Rises when the layout changes.
    pub major: u32,
    /// Rises when constants are added.
    pub minor: u32,
}

/// Where memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// 2 is CUDA device memory.
    pub device_type: i32,
    /// Ordinal.
    pub device_id: i32,
}

/// What elements are.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDataType {
    /// 0 signed, 1 unsigned, 2 floating point, 6 truth value.
    pub code: u8,
    /// Bits of a lane.
    pub bits: u8,
    /// 1 unless elements are vectors.
    pub lanes: u16,
}

/// A tensor without an owner.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// The memory.
    pub data: *mut c_void,
    /// Where it is.
    pub device: DLDevice,
    /// Dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// One length per dimension.
    pub shape: *mut i64,
    /// One distance per dimension, in elements; null for compact rows.
    pub strides: *mut i64,
    /// From `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with its owner: the legacy form.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// Releases the tensor and this structure.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A tensor with its owner: the versioned form.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Version of the layout from `flags` on.
    pub version: DLPackVersion,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// Releases the tensor and this structure.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`DLPACK_FLAG_READ_ONLY`] and others.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
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

/// What the two forms have in common.
trait Managed: Sized {
    fn make(tensor: DLTensor, context: *mut c_void, read_only: bool) -> Self;
    fn context(&self) -> *mut c_void;
    /// Whether the deleter is the one that exports of this crate have.
    fn is_ours(&self) -> bool;
}

impl Managed for DLManagedTensor {
    fn make(dl_tensor: DLTensor, manager_ctx: *mut c_void, _read_only: bool) -> Self {
        DLManagedTensor {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete::<Self>),
        }
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn is_ours(&self) -> bool {
        let ours: unsafe extern "C" fn(*mut Self) = delete::<Self>;
        self.deleter.is_some_and(|d| ptr::fn_addr_eq(d, ours))
    }
}

impl Managed for DLManagedTensorVersioned {
    fn make(dl_tensor: DLTensor, manager_ctx: *mut c_void, read_only: bool) -> Self {
        DLManagedTensorVersioned {
            version: DLPACK_VERSION,
            manager_ctx,
            deleter: Some(delete::<Self>),
            flags: if read_only { DLPACK_FLAG_READ_ONLY } else { 0 },
            dl_tensor,
        }
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn is_ours(&self) -> bool {
        let ours: unsafe extern "C" fn(*mut Self) = delete::<Self>;
        self.deleter.is_some_and(|d| ptr::fn_addr_eq(d, ours))
    }
}

/// An export: everything that its structure points to, in one box, which `manager_ctx` names.
struct Export<M> {
    managed: Option<M>,
    shape: [i64; 1],
    strides: [i64; 1],
    memory: Arc<Memory>,
}

/// Makes an export; the result is owned by whoever holds it and released by its deleter.
fn export<M: Managed>(
    memory: Arc<Memory>,
    element: ElementType,
    rows: usize,
    device: &Device,
    read_only: bool,
) -> NonNull<M> {
    let export = Box::into_raw(Box::new(Export::<M> {
        managed: None,
        // A column's bytes are below `isize::MAX`, and so are its rows.
        shape: [i64::try_from(rows).unwrap_or(i64::MAX)],
        strides: [1],
        memory,
    }));
    // SAFETY: the box was made above and nobody else knows it.
    let (shape, strides, data) = unsafe {
        (
            &raw mut (*export).shape,
            &raw mut (*export).strides,
            if rows == 0 { 0 } else { (*export).memory.ptr() },
        )
    };
    let tensor = DLTensor {
        data: ptr::without_provenance_mut(data as usize),
        device: DLDevice {
            device_type: CUDA,
            device_id: device.raw(),
        },
        ndim: 1,
        dtype: element.dlpack(),
        shape: shape.cast(),
        strides: strides.cast(),
        byte_offset: 0,
    };
    // SAFETY: as above.
    let managed = unsafe { &mut (*export).managed };
    NonNull::from(managed.insert(M::make(tensor, export.cast(), read_only)))
}

/// The deleter of exports. Null is allowed, any thread may call it, and it never unwinds.
///
/// # Safety
/// `managed` is null or an export of [`export`] that was not deleted yet.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: the caller's contract.
    let Some(managed) = (unsafe { managed.as_ref() }) else {
        return;
    };
    let export = managed.context().cast::<Export<M>>();
    if export.is_null() {
        return;
    }
    // SAFETY: the box of `export`, given up there and taken back once by the caller's contract.
    let export = unsafe { Box::from_raw(export) };
    if catch_unwind(AssertUnwindSafe(|| drop(export))).is_err() {
        log::error!("releasing an exported tensor panicked");
    }
}

/// The memory under a tensor if it is an export of this crate (of this copy of it in the process).
///
/// Two functions may share an address only if they do the same; then the context is what ours expects.
///
/// # Safety
/// `managed` is alive.
unsafe fn own_memory<M: Managed>(managed: &M) -> Option<Arc<Memory>> {
    if !managed.is_ours() {
        return None;
    }
    let export = managed.context().cast::<Export<M>>();
    // SAFETY: the deleter is ours, so the context is the box of an export, alive as the tensor is; it
    // is shared with nobody who writes to this field.
    NonNull::new(export).map(|export| Arc::clone(unsafe { &(*export.as_ptr()).memory }))
}

/// A managed tensor with an owner: released on drop, by its own deleter, exactly once.
///
/// `Send` and `Sync`: the specification lets deleters be called from any thread, and nothing here is
/// written after it was made.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Context;
/// use cualloc::{Allocator, Config};
/// use cualloc::column::{Column, Consumer, DlpackTensor, Producer};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let alloc = Allocator::with_config(&context, Config::new())?;
/// let (ours, theirs) = (alloc.create_stream()?, alloc.create_stream()?);
/// let column = Column::from_slice(&alloc, &[1.0f32, 2.0], &ours)?;
///
/// // What a Python capsule named "dltensor_versioned" holds.
/// let raw = column.to_dlpack_versioned(&Consumer::Tracked(theirs.clone()))?.into_raw();
///
/// // The consumer's side, on its stream, which now waits for ours.
/// let cualloc::column::RawDlpack::Versioned(raw) = raw else { unreachable!() };
/// // SAFETY: the tensor was just made, and is taken over once.
/// let tensor = unsafe { DlpackTensor::from_raw_versioned(raw) }?;
/// let seen = Column::from_dlpack(tensor, &theirs, Producer::Ordered)?;
/// assert_eq!(seen.to_vec::<f32>()?, [1.0, 2.0]);
/// assert_eq!(seen.block(), column.block());
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DlpackTensor(Form);

#[derive(Clone, Copy)]
enum Form {
    Legacy(NonNull<DLManagedTensor>),
    Versioned(NonNull<DLManagedTensorVersioned>),
}

// SAFETY: by the contract of `from_raw` any thread may read the structures and call the deleter.
unsafe impl Send for DlpackTensor {}
// SAFETY: shared access only reads.
unsafe impl Sync for DlpackTensor {}

/// A managed tensor as C sees it. Whoever holds it calls the structure's deleter once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawDlpack {
    /// For a capsule named "dltensor".
    Legacy(*mut DLManagedTensor),
    /// For a capsule named "dltensor_versioned".
    Versioned(*mut DLManagedTensorVersioned),
}

impl RawDlpack {
    /// The structure's address.
    pub fn address(self) -> *mut c_void {
        match self {
            RawDlpack::Legacy(raw) => raw.cast(),
            RawDlpack::Versioned(raw) => raw.cast(),
        }
    }
}

impl DlpackTensor {
    /// Takes over a legacy tensor.
    ///
    /// # Errors
    /// [`ImportFault::Null`].
    ///
    /// # Safety
    /// The structure is valid and nobody else uses or deletes it from now on. What it says about its
    /// memory is true until its deleter is called, which any thread may do. Shape and strides have
    /// `ndim` numbers where they are not null.
    ///
    /// Safe code may read and write the memory through a column made of the tensor
    /// ([`Column::from_dlpack`](super::Column::from_dlpack)), for which it names a stream and a producer:
    /// all elements hold values, and what others do with the memory until the deleter is called is in order
    /// with that stream by what is said of [`Producer`](super::Producer), or over.
    pub unsafe fn from_raw(raw: *mut DLManagedTensor) -> Result<Self, ImportFault> {
        let raw = NonNull::new(raw).ok_or(ImportFault::Null)?;
        Ok(DlpackTensor(Form::Legacy(raw)))
    }

    /// Takes over a versioned tensor.
    ///
    /// # Errors
    /// [`ImportFault::Null`].
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw); of a version that is not known only the fields before `flags`.
    pub unsafe fn from_raw_versioned(
        raw: *mut DLManagedTensorVersioned,
    ) -> Result<Self, ImportFault> {
        let raw = NonNull::new(raw).ok_or(ImportFault::Null)?;
        Ok(DlpackTensor(Form::Versioned(raw)))
    }

    /// Gives up ownership: the holder of the result calls its deleter once, from any thread. The
    /// tensor's memory stays in use until then.
    pub fn into_raw(self) -> RawDlpack {
        let form = self.0;
        std::mem::forget(self);
        match form {
            Form::Legacy(raw) => RawDlpack::Legacy(raw.as_ptr()),
            Form::Versioned(raw) => RawDlpack::Versioned(raw.as_ptr()),
        }
    }

    /// The version; none for a legacy tensor.
    pub fn version(&self) -> Option<DLPackVersion> {
        match self.0 {
            Form::Legacy(_) => None,
            // SAFETY: alive by the contract of `from_raw_versioned`.
            Form::Versioned(raw) => Some(unsafe { (*raw.as_ptr()).version }),
        }
    }

    /// The tensor itself.
    ///
    /// # Errors
    /// [`ImportFault::Version`] if the layout is not known.
    pub fn tensor(&self) -> Result<DLTensor, ImportFault> {
        match (self.0, self.version()) {
            // SAFETY: alive by the contract of `from_raw`.
            (Form::Legacy(raw), _) => Ok(unsafe { (*raw.as_ptr()).dl_tensor }),
            (_, Some(DLPackVersion { major, minor })) if major != DLPACK_VERSION.major => {
                Err(ImportFault::Version { major, minor })
            }
            // SAFETY: as above, and the layout is the one declared here.
            (Form::Versioned(raw), _) => Ok(unsafe { (*raw.as_ptr()).dl_tensor }),
        }
    }

    /// Whether writing is forbidden. A legacy tensor cannot say so.
    fn is_read_only(&self) -> bool {
        match self.0 {
            Form::Legacy(_) => false,
            // SAFETY: alive by the contract of `from_raw_versioned`; of a known version, see `tensor`.
            Form::Versioned(raw) => unsafe { (*raw.as_ptr()).flags & DLPACK_FLAG_READ_ONLY != 0 },
        }
    }

    pub(super) fn legacy(
        memory: Arc<Memory>,
        element: ElementType,
        rows: usize,
        device: &Device,
    ) -> Self {
        DlpackTensor(Form::Legacy(export(memory, element, rows, device, false)))
    }

    pub(super) fn versioned(
        memory: Arc<Memory>,
        element: ElementType,
        rows: usize,
        device: &Device,
        read_only: bool,
    ) -> Self {
        DlpackTensor(Form::Versioned(export(
            memory, element, rows, device, read_only,
        )))
    }

    /// The memory under it, if it is an export of this crate.
    pub(super) fn own_memory(&self) -> Option<Arc<Memory>> {
        match self.0 {
            // SAFETY: alive by the contract of `from_raw`.
            Form::Legacy(raw) => unsafe { own_memory(&*raw.as_ptr()) },
            // SAFETY: alive by the contract of `from_raw_versioned`.
            Form::Versioned(raw) => unsafe { own_memory(&*raw.as_ptr()) },
        }
    }

    /// Checks everything that a column needs.
    pub(super) fn describe(&self, device: &Device) -> Result<Described, ImportFault> {
        let tensor = self.tensor()?;
        if tensor.device.device_type != CUDA {
            return Err(ImportFault::DeviceType {
                device_type: tensor.device.device_type,
            });
        }
        if tensor.device.device_id != device.raw() {
            return Err(ImportFault::Device {
                expected: device.ordinal(),
                actual: tensor.device.device_id.into(),
            });
        }
        if tensor.ndim != 1 {
            return Err(ImportFault::Dimensions { ndim: tensor.ndim });
        }
        if tensor.shape.is_null() {
            return Err(ImportFault::NoShape);
        }
        // SAFETY: one number by the contract of `from_raw`.
        let rows = unsafe { tensor.shape.read_unaligned() };
        if !tensor.strides.is_null() {
            // SAFETY: as above.
            let stride = unsafe { tensor.strides.read_unaligned() };
            if stride != 1 {
                return Err(ImportFault::Stride { stride });
            }
        }
        let element = ElementType::from_dlpack(tensor.dtype)?;
        let (rows, ptr) = place(
            element,
            rows,
            tensor.data as u64,
            tensor.byte_offset,
            Some(tensor.byte_offset),
        )?;
        Ok(Described {
            ptr,
            rows,
            bytes: rows * element.bytes(),
            element,
            read_only: self.is_read_only(),
        })
    }
}

impl fmt::Debug for DlpackTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DlpackTensor")
            .field("version", &self.version())
            .field("tensor", &self.tensor())
            .finish()
    }
}

impl Drop for DlpackTensor {
    fn drop(&mut self) {
        match self.0 {
            Form::Legacy(raw) => {
                // SAFETY: alive and ours by the contract of `from_raw`; deleted here alone.
                unsafe {
                    if let Some(deleter) = (*raw.as_ptr()).deleter {
                        deleter(raw.as_ptr());
                    }
                }
            }
            Form::Versioned(raw) => {
                // SAFETY: as above; the deleter stands where it does in every version.
                unsafe {
                    if let Some(deleter) = (*raw.as_ptr()).deleter {
                        deleter(raw.as_ptr());
                    }
                }
            }
        }
    }
}

impl ElementType {
    /// The type as DLPack writes it.
    pub const fn dlpack(self) -> DLDataType {
        let (code, bits) = match self {
            ElementType::I32 => (0, 32),
            ElementType::I64 => (0, 64),
            ElementType::U32 => (1, 32),
            ElementType::U64 => (1, 64),
            ElementType::F32 => (2, 32),
            ElementType::F64 => (2, 64),
            ElementType::Bool => (6, 8),
        };
        DLDataType {
            code,
            bits,
            lanes: 1,
        }
    }

    /// The type that DLPack writes so.
    ///
    /// # Errors
    /// [`ImportFault::ElementType`].
    pub fn from_dlpack(dtype: DLDataType) -> Result<ElementType, ImportFault> {
        ElementType::ALL
            .into_iter()
            .find(|element| element.dlpack() == dtype)
            .ok_or(ImportFault::ElementType {
                code: dtype.code,
                bits: dtype.bits,
                lanes: dtype.lanes,
            })
    }
}
