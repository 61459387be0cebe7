//! DLPack tensors with an owner, in the legacy and in the versioned form.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::driver::{Device, sys};
use crate::dtype::DType;
use crate::error::{Error, ImportFault};
use crate::foreign::guarded;

use super::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use super::layout::{Described, Layout, MAXIMUM};
use super::shared::Shared;

/// The two forms of a managed tensor. Sealed.
pub trait Managed: sealed::Form + Sized + 'static {
    /// The name of a Python capsule that holds a tensor of this form.
    const CAPSULE: &'static CStr;
    /// The name that a consumer gives the capsule when it takes the tensor over.
    const USED_CAPSULE: &'static CStr;
    /// Whether the form has a flag for read-only tensors.
    const SAYS_READ_ONLY: bool;

    #[doc(hidden)]
    fn make(tensor: DLTensor, context: *mut c_void, deleter: Deleter<Self>, flags: u64) -> Self;
    #[doc(hidden)]
    fn context(&self) -> *mut c_void;
    #[doc(hidden)]
    fn deleter(&self) -> Option<Deleter<Self>>;
    #[doc(hidden)]
    fn version(&self) -> Option<DLPackVersion>;
    /// Returns flags and tensor, if the version is supported.
    #[doc(hidden)]
    fn contents(&self) -> (u64, DLTensor);
}

mod sealed {
    pub trait Form {}
}

impl sealed::Form for DLManagedTensor {}
impl sealed::Form for DLManagedTensorVersioned {}

type Deleter<M> = unsafe extern "C-unwind" fn(*mut M);

impl Managed for DLManagedTensor {
    const CAPSULE: &'static CStr = c"dltensor";
    const USED_CAPSULE: &'static CStr = c"used_dltensor";
    const SAYS_READ_ONLY: bool = false;

    fn make(tensor: DLTensor, context: *mut c_void, deleter: Deleter<Self>, _flags: u64) -> Self {
        DLManagedTensor {
            dl_tensor: tensor,
            manager_ctx: context,
            deleter: Some(deleter),
        }
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }

    fn version(&self) -> Option<DLPackVersion> {
        None
    }

    fn contents(&self) -> (u64, DLTensor) {
        (0, self.dl_tensor)
    }
}

impl Managed for DLManagedTensorVersioned {
    const CAPSULE: &'static CStr = c"dltensor_versioned";
    const USED_CAPSULE: &'static CStr = c"used_dltensor_versioned";
    const SAYS_READ_ONLY: bool = true;

    fn make(tensor: DLTensor, context: *mut c_void, deleter: Deleter<Self>, flags: u64) -> Self {
        DLManagedTensorVersioned {
            version: DLPackVersion::CURRENT,
            manager_ctx: context,
            deleter: Some(deleter),
            flags,
            dl_tensor: tensor,
        }
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }

    fn version(&self) -> Option<DLPackVersion> {
        Some(self.version)
    }

    fn contents(&self) -> (u64, DLTensor) {
        (self.flags, self.dl_tensor)
    }
}

/// An export: one box, named by `manager_ctx`, with everything that its structure points to.
struct Export<M> {
    managed: Option<M>,
    /// The shape, then the strides.
    dimensions: Box<[i64]>,
    shared: Arc<Shared>,
}

/// The deleter of exports. Null is allowed; any thread may call it, and it never unwinds.
///
/// # Safety
/// `managed` is null, or comes from [`Dlpack::export`] and was not deleted yet.
unsafe extern "C-unwind" fn delete<M: Managed>(managed: *mut M) {
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
    guarded("releasing an exported tensor", || drop(export));
}

/// A managed tensor with an owner: released on drop, by its own deleter, exactly once.
///
/// `M` is [`DLManagedTensor`], the legacy form, or [`DLManagedTensorVersioned`]. `Send` and `Sync`: the specification
/// allows deleters to be called from any thread, and nothing is written after creation.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, DeviceBuffer, driver::Stream};
/// use cualloc::exchange::dlpack::DLManagedTensorVersioned;
/// use cualloc::exchange::{Dlpack, Peer, Tensor};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let (ours, theirs) = (Stream::new(&context)?, Stream::new(&context)?);
/// let values = DeviceBuffer::from_slice(&allocator, &[1.0f32, 2.0], &ours)?;
/// let tensor = Tensor::from_buffer(values, &[2])?;
///
/// // What a Python capsule of this name holds.
/// assert_eq!(Dlpack::<DLManagedTensorVersioned>::CAPSULE, c"dltensor_versioned");
/// let raw: *mut DLManagedTensorVersioned = tensor.to_dlpack(&Peer::on(&theirs))?.into_raw();
///
/// // The consumer's side, on its stream, which now waits for ours.
/// // SAFETY: the tensor was just made, and is taken over once.
/// let taken = unsafe { Dlpack::from_raw(raw) }?;
/// let seen = Tensor::from_dlpack(taken, &theirs, Peer::on(&ours))?;
/// assert_eq!(seen.as_slice::<f32>()?.to_vec()?, [1.0, 2.0]);
/// assert_eq!(seen.id(), tensor.id());
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Dlpack<M: Managed>(NonNull<M>);

// SAFETY: by the contract of `from_raw` any thread may read the structures and call the deleter.
unsafe impl<M: Managed> Send for Dlpack<M> {}
// SAFETY: shared access only reads.
unsafe impl<M: Managed> Sync for Dlpack<M> {}

impl<M: Managed> Dlpack<M> {
    /// The name of a Python capsule that holds a tensor of this form.
    pub const CAPSULE: &'static CStr = M::CAPSULE;
    /// The name that a consumer gives the capsule when it takes the tensor over: a capsule with this name has nothing
    /// to release.
    pub const USED_CAPSULE: &'static CStr = M::USED_CAPSULE;

    /// Takes over a tensor.
    ///
    /// # Errors
    /// [`ImportFault::Null`].
    ///
    /// # Safety
    /// The structure is valid (for an unknown version, its fields before `flags`), and other code neither uses nor
    /// deletes it from now on. Its description of the memory holds until its deleter is called, which any thread may
    /// do. Shape and strides have `ndim` numbers unless they are null.
    ///
    /// Safe code may read and write the memory through [`Tensor::from_dlpack`](super::Tensor::from_dlpack), which takes
    /// a stream and a [`Peer`](super::Peer): all accesses of others until the deleter is called are complete, or
    /// ordered with that stream as the peer describes.
    pub unsafe fn from_raw(raw: *mut M) -> Result<Self, Error> {
        Ok(Dlpack(NonNull::new(raw).ok_or(ImportFault::Null)?))
    }

    /// Gives up ownership: the holder of the result calls its deleter once, from any thread. Until then the tensor's
    /// memory stays in use.
    pub fn into_raw(self) -> *mut M {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }

    /// Returns the tensor itself.
    ///
    /// # Errors
    /// [`ImportFault::Version`] for an unknown layout.
    pub fn tensor(&self) -> Result<DLTensor, Error> {
        Ok(self.contents()?.1)
    }

    fn contents(&self) -> Result<(u64, DLTensor), ImportFault> {
        match self.managed().version() {
            Some(DLPackVersion { major, minor }) if major != DLPackVersion::CURRENT.major => {
                Err(ImportFault::Version { major, minor })
            }
            _ => Ok(self.managed().contents()),
        }
    }

    fn managed(&self) -> &M {
        // SAFETY: alive by the contract of `from_raw`. For an unknown version only fields are read whose offset is the
        // same in every version.
        unsafe { self.0.as_ref() }
    }

    /// Exports a tensor whose first element is at `ptr`.
    pub(super) fn export(
        shared: Arc<Shared>,
        ptr: sys::CUdeviceptr,
        dtype: DType,
        layout: &Layout,
        device: &Device,
        read_only: bool,
    ) -> Self {
        let ndim = layout.shape.len();
        // A tensor's size is below `isize::MAX`, and so are its lengths.
        let shape = layout.shape.iter().map(|len| *len as i64);
        let strides = layout.strides.iter().map(|stride| *stride as i64);
        let device = match shared.is_host() {
            // Host memory belongs to no device; the specification defines this number for it.
            true => DLDevice {
                device_type: DLDevice::CUDA_HOST,
                device_id: 0,
            },
            false => DLDevice {
                device_type: DLDevice::CUDA,
                device_id: device.raw(),
            },
        };
        let export = Box::into_raw(Box::new(Export::<M> {
            managed: None,
            dimensions: shape.chain(strides).collect(),
            shared,
        }));
        // SAFETY: the box was created above and is not shared yet.
        let Export {
            managed,
            dimensions,
            ..
        } = unsafe { &mut *export };
        let shape = dimensions.as_mut_ptr();
        let tensor = DLTensor {
            data: ptr::without_provenance_mut(ptr as usize),
            device,
            ndim: ndim as i32,
            dtype: dtype.dlpack(),
            shape,
            strides: shape.wrapping_add(ndim),
            byte_offset: 0,
        };
        let flags = match read_only {
            true => DLManagedTensorVersioned::READ_ONLY,
            false => 0,
        };
        let made = M::make(tensor, export.cast(), delete::<M>, flags);
        Dlpack(NonNull::from(managed.insert(made)))
    }

    /// Returns the memory under the tensor, if it is an export of this copy of the crate in the process.
    ///
    /// Two functions share an address only if they are identical; then the context is as this function expects.
    pub(super) fn own_memory(&self) -> Option<Arc<Shared>> {
        let (managed, ours) = (self.managed(), delete::<M> as Deleter<M>);
        if !managed.deleter().is_some_and(|d| ptr::fn_addr_eq(d, ours)) {
            return None;
        }
        let export = NonNull::new(managed.context().cast::<Export<M>>());
        // SAFETY: the deleter is that of this crate, so the context is the box of an export, alive while the tensor is;
        // this field is not written any more.
        export.map(|export| Arc::clone(unsafe { &(*export.as_ptr()).shared }))
    }

    /// Checks all requirements of a tensor.
    pub(super) fn describe(&self, device: &Device) -> Result<Described, Error> {
        let (flags, tensor) = self.contents()?;
        let DLDevice {
            device_type,
            device_id,
        } = tensor.device;
        let host = device_type == DLDevice::CUDA_HOST;
        if !host && device_type != DLDevice::CUDA {
            return Err(ImportFault::DeviceType { device_type }.into());
        }
        // Host memory is accessible from all devices.
        if !host && device_id != device.raw() {
            return Err(ImportFault::Device {
                expected: device.ordinal(),
                actual: device_id.into(),
            }
            .into());
        }
        let ndim = usize::try_from(tensor.ndim).ok();
        let ndim = ndim.filter(|ndim| *ndim <= MAXIMUM);
        let ndim = ndim.ok_or(ImportFault::Dimensions { ndim: tensor.ndim })?;
        if ndim > 0 && tensor.shape.is_null() {
            return Err(ImportFault::NoShape.into());
        }
        let numbers = |at: *mut i64| -> Vec<i64> {
            let numbers = (0..ndim).map(|index| at.wrapping_add(index));
            // SAFETY: the array has this many numbers by the contract of `from_raw`.
            numbers.map(|at| unsafe { at.read_unaligned() }).collect()
        };
        let shape = numbers(tensor.shape);
        let strides = (!tensor.strides.is_null()).then(|| numbers(tensor.strides));
        let offset = (Some(tensor.byte_offset), tensor.byte_offset);
        let data = tensor.data as u64;
        let dtype = DType::from_dlpack(tensor.dtype)?;
        Ok(Described {
            read_only: flags & DLManagedTensorVersioned::READ_ONLY != 0,
            host,
            ..Layout::described(dtype, &shape, strides.as_deref(), data, offset)?
        })
    }
}

debug_fields!([M: Managed] Dlpack<M>, self =>
    version: self.managed().version(), tensor: self.tensor()
);

impl<M: Managed> Drop for Dlpack<M> {
    fn drop(&mut self) {
        let Some(deleter) = self.managed().deleter() else {
            return;
        };
        let raw = self.0.as_ptr();
        // SAFETY: alive and owned by the contract of `from_raw`; deleted only here.
        guarded("the deleter of a tensor", || unsafe { deleter(raw) });
    }
}

impl DType {
    /// Returns DLPack's encoding of the type.
    pub const fn dlpack(self) -> DLDataType {
        let code = match self {
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
            DType::F16 | DType::F32 | DType::F64 => 2,
            DType::BF16 => 4,
            DType::Bool => 6,
            DType::F8E4M3 => 10,
            DType::F8E5M2 => 12,
        };
        DLDataType {
            code,
            bits: self.bytes() as u8 * 8,
            lanes: 1,
        }
    }

    /// Returns the type with DLPack's encoding.
    ///
    /// # Errors
    /// [`ImportFault::DType`].
    pub fn from_dlpack(dtype: DLDataType) -> Result<DType, ImportFault> {
        let mut all = DType::ALL.iter().copied();
        all.find(|known| known.dlpack() == dtype)
            .ok_or(ImportFault::DType {
                code: dtype.code,
                bits: dtype.bits,
                lanes: dtype.lanes,
            })
    }
}
