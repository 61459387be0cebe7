//! DLPack tensors with an owner, of the legacy and of the versioned form.

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
    /// The name of a Python capsule that holds one.
    const CAPSULE: &'static CStr;
    /// The name that a consumer gives the capsule when it takes the tensor over.
    const USED_CAPSULE: &'static CStr;
    /// Whether the form can say that writing is forbidden.
    const SAYS_READ_ONLY: bool;

    #[doc(hidden)]
    fn make(tensor: DLTensor, context: *mut c_void, deleter: Deleter<Self>, flags: u64) -> Self;
    #[doc(hidden)]
    fn context(&self) -> *mut c_void;
    #[doc(hidden)]
    fn deleter(&self) -> Option<Deleter<Self>>;
    #[doc(hidden)]
    fn version(&self) -> Option<DLPackVersion>;
    /// Flags and tensor, of a version that is known.
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

/// An export: everything that its structure points to, in one box, which `manager_ctx` names.
struct Export<M> {
    managed: Option<M>,
    /// The shape, then the strides.
    dimensions: Box<[i64]>,
    shared: Arc<Shared>,
}

/// The deleter of exports. Null is allowed, any thread may call it, and it never unwinds.
///
/// # Safety
/// `managed` is null or of [`Dlpack::export`] and was not deleted yet.
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
/// `M` is [`DLManagedTensor`], the legacy form, or [`DLManagedTensorVersioned`]. `Send` and `Sync`: the
/// specification lets deleters be called from any thread, and nothing here is written after it was made.
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
    /// The name that a consumer gives the capsule when it takes the tensor over: whose name it is has nothing to
    /// release.
    pub const USED_CAPSULE: &'static CStr = M::USED_CAPSULE;

    /// Takes over a tensor.
    ///
    /// # Errors
    /// [`ImportFault::Null`].
    ///
    /// # Safety
    /// The structure is valid (of a version that is not known, its fields before `flags`) and nobody else uses or
    /// deletes it from now on. What it says about its memory is true until its deleter is called, which any
    /// thread may do. Shape and strides have `ndim` numbers where they are not null.
    ///
    /// Safe code may read and write the memory through [`Tensor::from_dlpack`](super::Tensor::from_dlpack), for
    /// which it names a stream and a [`Peer`](super::Peer): what others do with the memory until the deleter is
    /// called is in order with that stream by what is said there, or over.
    pub unsafe fn from_raw(raw: *mut M) -> Result<Self, Error> {
        Ok(Dlpack(NonNull::new(raw).ok_or(ImportFault::Null)?))
    }

    /// Gives up ownership: the holder of the result calls its deleter once, from any thread. The tensor's memory
    /// stays in use until then.
    pub fn into_raw(self) -> *mut M {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }

    /// The tensor itself.
    ///
    /// # Errors
    /// [`ImportFault::Version`] if the layout is not known.
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
        // SAFETY: alive by the contract of `from_raw`. What is read of a version that is not known stands where it
        // does in every version.
        unsafe { self.0.as_ref() }
    }

    /// Makes an export of a tensor whose first element is at `ptr`.
    pub(super) fn export(
        shared: Arc<Shared>,
        ptr: sys::CUdeviceptr,
        dtype: DType,
        layout: &Layout,
        device: &Device,
        read_only: bool,
    ) -> Self {
        let ndim = layout.shape.len();
        // A tensor's bytes are below `isize::MAX`, and so are its lengths.
        let shape = layout.shape.iter().map(|len| *len as i64);
        let strides = layout.strides.iter().map(|stride| *stride as i64);
        let device = match shared.is_host() {
            // Of no device, for which the specification has this number.
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
        // SAFETY: the box was made above and nobody else knows it.
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

    /// The memory under the tensor if it is an export of this crate (of this copy of it in the process).
    ///
    /// Two functions may share an address only if they do the same; then the context is what ours expects.
    pub(super) fn own_memory(&self) -> Option<Arc<Shared>> {
        let (managed, ours) = (self.managed(), delete::<M> as Deleter<M>);
        if !managed.deleter().is_some_and(|d| ptr::fn_addr_eq(d, ours)) {
            return None;
        }
        let export = NonNull::new(managed.context().cast::<Export<M>>());
        // SAFETY: the deleter is ours, so the context is the box of an export, alive as the tensor is; it is
        // shared with nobody who writes to this field.
        export.map(|export| Arc::clone(unsafe { &(*export.as_ptr()).shared }))
    }

    /// Checks everything that a tensor needs.
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
        // All devices reach the host's.
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
            // SAFETY: so many numbers by the contract of `from_raw`.
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
        // SAFETY: alive and ours by the contract of `from_raw`; deleted here alone.
        guarded("the deleter of a tensor", || unsafe { deleter(raw) });
    }
}

impl DType {
    /// The type as DLPack writes it.
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

    /// The type that DLPack writes so.
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
