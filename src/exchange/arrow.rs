//! Arrow C Device arrays.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_data::ffi::FFI_ArrowArray;
use arrow_schema::{DataType, Field};

use crate::driver::{Device, Event, Stream, sys};

use crate::dtype::DType;
use crate::error::{Error, ImportFault, InvalidArgument, Refused};
use crate::foreign::guarded;
use crate::sync::capture;

use super::layout::{Described, Layout};
use super::peer::Peer;
use super::shared::Shared;
use super::tensor::Tensor;

/// The device type of CUDA device memory.
const CUDA: i32 = 2;

/// The extension type whose storage is one byte per truth value.
const BOOL8: &str = "arrow.bool8";
const EXTENSION_NAME: &str = "ARROW:extension:name";
const EXTENSION_METADATA: &str = "ARROW:extension:metadata";

/// An array in device memory, as the Arrow C Device data interface lays it out. Released on drop, by its
/// own callback, exactly once, unless it was released or moved away before.
///
/// `Send` and `Sync`: the interface lets arrays be released from any thread, and shared access only reads.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, DeviceBuffer, driver::Stream};
/// use cualloc::exchange::{ArrowDeviceArray, DType, Peer, Tensor};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let (ours, theirs) = (Stream::new(&context)?, Stream::new(&context)?);
/// let values = DeviceBuffer::from_slice(&allocator, &[1.5f64, 2.5], &ours)?;
/// let column = Tensor::from_buffer(values, &[2])?;
///
/// // A structure of the consumer's, filled by us.
/// let mut shared = ArrowDeviceArray::empty();
/// // SAFETY: the structure is ours, and holds no array.
/// unsafe { column.to_arrow(&Peer::on(&theirs))?.write_to(&mut shared) };
///
/// // The consumer takes the array out of it.
/// let seen = Tensor::from_arrow(shared.take(), DType::F64, &theirs, Peer::on(&ours))?;
/// assert_eq!(seen.as_slice::<f64>()?.to_vec()?, [1.5, 2.5]);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[repr(C)]
pub struct ArrowDeviceArray {
    array: FFI_ArrowArray,
    device_id: i64,
    device_type: i32,
    sync_event: *mut c_void,
    reserved: [i64; 3],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<FFI_ArrowArray>() == 80);
    assert!(size_of::<ArrowDeviceArray>() == 128 && align_of::<ArrowDeviceArray>() == 8);
    assert!(offset_of!(ArrowDeviceArray, array) == 0);
    assert!(offset_of!(ArrowDeviceArray, device_id) == 80);
    assert!(offset_of!(ArrowDeviceArray, device_type) == 88);
    assert!(offset_of!(ArrowDeviceArray, sync_event) == 96);
    assert!(offset_of!(ArrowDeviceArray, reserved) == 104);
    assert!(size_of::<Fields>() == size_of::<FFI_ArrowArray>());
};

// SAFETY: by the contract of its producer any thread may read it and release it.
unsafe impl Send for ArrowDeviceArray {}
// SAFETY: shared access only reads.
unsafe impl Sync for ArrowDeviceArray {}

/// The fields of an array, as the interface defines them: the accessors of [`FFI_ArrowArray`] panic on malformed
/// structures.
#[repr(C)]
struct Fields {
    length: i64,
    null_count: i64,
    offset: i64,
    n_buffers: i64,
    n_children: i64,
    buffers: *const *const c_void,
    children: *const c_void,
    dictionary: *const c_void,
    release: Option<unsafe extern "C" fn(*mut FFI_ArrowArray)>,
    private_data: *mut c_void,
}

struct Export {
    release: Option<unsafe extern "C" fn(*mut FFI_ArrowArray)>,
    private_data: *mut c_void,
    /// The target of the consumer's pointer.
    handle: sys::CUevent,
    event: Option<Event>,
    shared: Arc<Shared>,
}

/// The callback of exports: never unwinds, may be called from any thread.
///
/// # Safety
/// `array` is null or an unreleased export of [`Tensor::to_arrow`].
unsafe extern "C" fn release(array: *mut FFI_ArrowArray) {
    // SAFETY: the caller's contract.
    let Some(array) = (unsafe { array.as_mut() }) else {
        return;
    };
    let export = array.private_data().cast::<Export>();
    if export.is_null() {
        return;
    }
    // SAFETY: the box of `to_arrow`, given up there and taken back once by the caller's contract.
    let mut export = unsafe { Box::from_raw(export) };
    guarded("releasing an exported array", || {
        // SAFETY: the pair is the one that the array was made with.
        unsafe {
            array.set_private_data(export.private_data);
            array.set_release(export.release);
        }
        if let Some(inner) = export.release {
            // SAFETY: the array is unchanged; its own callback marks it as released.
            unsafe { inner(array) }
        }
        drop(export.event.take());
        drop(export);
    });
    // SAFETY: the array is released, and a released array has no callback.
    unsafe {
        array.set_release(None);
        array.set_private_data(ptr::null_mut());
    }
}

impl ArrowDeviceArray {
    /// Creates a structure without an array, to be filled by a producer.
    pub fn empty() -> Self {
        ArrowDeviceArray {
            array: FFI_ArrowArray::empty(),
            device_id: -1,
            device_type: 0,
            sync_event: ptr::null_mut(),
            reserved: [0; 3],
        }
    }

    /// Splits it into the array, which is released on drop, the device's ordinal and type (2 is CUDA device memory),
    /// and null or a pointer to the handle of an event (`CUevent`) recorded after the work that fills the array. The
    /// event lives until the array is released.
    pub fn into_parts(self) -> (FFI_ArrowArray, i64, i32, *mut c_void) {
        let ArrowDeviceArray {
            array,
            device_id,
            device_type,
            sync_event,
            ..
        } = self;
        (array, device_id, device_type, sync_event)
    }

    /// Moves an array out of a C structure, which is marked as released.
    ///
    /// # Safety
    /// `raw` points to an initialised and writable structure. Its description of the memory and the event holds until
    /// the array is released, which any thread may do. An array does not specify the type of its elements: it is never
    /// converted to a tensor with larger elements than it has. Safe code may read the memory ([`Tensor::from_arrow`]):
    /// the accesses of others until then are complete, or ordered as described at [`Peer`], as for
    /// [`Dlpack::from_raw`](super::Dlpack::from_raw).
    pub unsafe fn from_raw(raw: *mut ArrowDeviceArray) -> Self {
        // SAFETY: the caller's contract.
        unsafe { raw.replace(ArrowDeviceArray::empty()) }
    }

    /// Moves the array into a C structure, whose former contents are overwritten without being released. The owner of
    /// the structure calls its release callback once.
    ///
    /// # Safety
    /// `raw` is aligned and writable.
    pub unsafe fn write_to(self, raw: *mut ArrowDeviceArray) {
        // SAFETY: the caller's contract.
        unsafe { raw.write(self) }
    }

    /// Moves the array out and leaves an empty structure.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, ArrowDeviceArray::empty())
    }

    /// Whether it contains no array.
    pub fn is_released(&self) -> bool {
        self.array.is_released()
    }

    /// The array.
    pub fn array(&self) -> &FFI_ArrowArray {
        &self.array
    }

    fn fields(&self) -> &Fields {
        // SAFETY: both structures have the layout that the interface defines.
        unsafe { &*ptr::from_ref(&self.array).cast::<Fields>() }
    }

    /// Returns the memory under it, if it is an export of this copy of the crate in the process.
    fn own_memory(&self) -> Option<Arc<Shared>> {
        let fields = self.fields();
        let ours: unsafe extern "C" fn(*mut FFI_ArrowArray) = release;
        if !fields.release.is_some_and(|r| ptr::fn_addr_eq(r, ours)) {
            return None;
        }
        // SAFETY: the callback is that of this crate, so the private data is the box of an export, alive while the
        // array is.
        NonNull::new(fields.private_data.cast::<Export>())
            .map(|export| Arc::clone(unsafe { &(*export.as_ptr()).shared }))
    }

    /// Checks all requirements of a tensor.
    fn describe(&self, dtype: DType, device: &Device) -> Result<Described, ImportFault> {
        let fields = self.fields();
        if fields.release.is_none() {
            return Err(ImportFault::Released);
        }
        if self.device_type != CUDA {
            return Err(ImportFault::DeviceType {
                device_type: self.device_type,
            });
        }
        if self.device_id != i64::from(device.raw()) {
            return Err(ImportFault::Device {
                expected: device.ordinal(),
                actual: self.device_id,
            });
        }
        if fields.n_children != 0 || !fields.dictionary.is_null() {
            return Err(ImportFault::Nested);
        }
        if fields.n_buffers != 2 || fields.buffers.is_null() {
            return Err(ImportFault::Buffers {
                buffers: fields.n_buffers,
            });
        }
        // SAFETY: two pointers by the contract of `from_raw`.
        let (validity, data) = unsafe {
            (
                fields.buffers.read_unaligned(),
                fields.buffers.add(1).read_unaligned(),
            )
        };
        if fields.null_count > 0 || (fields.null_count < 0 && !validity.is_null()) {
            return Err(ImportFault::Nulls {
                nulls: fields.null_count,
            });
        }
        let shown = fields.offset as u64;
        let offset = u64::try_from(fields.offset)
            .ok()
            .and_then(|offset| offset.checked_mul(dtype.bytes() as u64));
        let (data, offset) = match fields.length {
            // The pointer of an empty array's buffer has no meaning.
            0 => (0, (Some(0), 0)),
            _ => (data as u64, (offset, shown)),
        };
        Ok(Described {
            read_only: true,
            ..Layout::described(dtype, &[fields.length], None, data, offset)?
        })
    }

    fn wait(&self, stream: &Stream) -> Result<(), Error> {
        let at = self.sync_event.cast::<sys::CUevent>();
        if at.is_null() {
            return Ok(());
        }
        // SAFETY: by the contract of `from_raw` the pointer refers to the handle of a live event.
        let event = unsafe { Event::from_raw(stream.context(), at.read_unaligned()) };
        capture::refuse_capture(stream)?;
        Ok(stream.wait(&event)?)
    }
}

impl Tensor {
    /// Exports a column as an Arrow array without nulls, with an event that covers all work submitted to the tensor's
    /// stream so far. Consumers always wait for the event; the peer determines how the end of their use is detected.
    /// Does not wait.
    ///
    /// The array's type is that of [`DType::arrow_field`].
    ///
    /// # Errors
    /// [`InvalidArgument::Dimensions`] and [`InvalidArgument::Strided`] unless the elements are one-dimensional and
    /// contiguous; [`Error::NotSupported`] for types that Arrow does not have and for host memory;
    /// [`Error::Capturing`]; driver errors.
    pub fn to_arrow(&self, peer: &Peer) -> Result<ArrowDeviceArray, Error> {
        let rows = self.rows()?;
        if rows > 1 && self.strides() != [1] {
            return Err(Error::Invalid(InvalidArgument::Strided));
        }
        let kind = self.dtype().arrow_type().filter(|_| !self.is_host());
        let what = "such a tensor as an Arrow array";
        let kind = kind.ok_or(Error::NotSupported { what })?;
        self.lend(peer)?;
        let event = if self.byte_len() == 0 {
            None
        } else {
            capture::refuse_capture(self.shared.stream())?;
            // The event covers all of it, whatever the consumer's own stream waits for.
            self.shared.gather()?;
            let home = self.shared.stream();
            let event = home.context().enter()?.create_event()?;
            home.mark(&event)?;
            Some(event)
        };
        let buffer = match NonNull::new(ptr::with_exposed_provenance_mut::<u8>(self.ptr() as usize))
        {
            // SAFETY: device memory is not read on the host; the export below keeps it alive.
            Some(start) => unsafe {
                Buffer::from_custom_allocation(start, self.byte_len(), Arc::new(()))
            },
            None => Buffer::from(Vec::<u64>::new()),
        };
        // SAFETY: a primitive array has one buffer of this many elements and no nulls; its contents are not read.
        let data =
            unsafe { ArrayData::new_unchecked(kind, rows, Some(0), None, 0, vec![buffer], vec![]) };
        let mut array = FFI_ArrowArray::new(&data);
        let has_event = event.is_some();
        let export = Box::into_raw(Box::new(Export {
            release: array.release(),
            private_data: array.private_data(),
            handle: event.as_ref().map_or(ptr::null_mut(), Event::raw),
            event,
            shared: Arc::clone(&self.shared),
        }));
        // SAFETY: the box was created above. The callback belongs to it, and forwards to the pair that it replaces.
        let handle = unsafe {
            array.set_private_data(export.cast());
            array.set_release(Some(release));
            &raw mut (*export).handle
        };
        let sync_event = if has_event {
            handle.cast()
        } else {
            ptr::null_mut()
        };
        Ok(ArrowDeviceArray {
            array,
            device_id: self.device().raw().into(),
            device_type: CUDA,
            sync_event,
            reserved: [0; 3],
        })
    }

    /// Imports an array of a given type ([`DType::from_arrow_field`]) as a tensor, for use on a stream of the array's
    /// device, which waits for the array's event. The tensor is read-only, as arrays are. Does not wait on the host.
    ///
    /// # Errors
    /// [`Error::Import`] for an unsuitable array, or one of our own with fewer bytes than that many elements of the
    /// type, before any driver call; [`Error::Capturing`]; driver errors. They return the array.
    pub fn from_arrow(
        array: ArrowDeviceArray,
        dtype: DType,
        on: &Stream,
        peer: Peer,
    ) -> Result<Tensor, Refused<ArrowDeviceArray>> {
        let returned = array.own_memory();
        let described = array.describe(dtype, on.context().device());
        let described = described.map_err(Error::from);
        let ready = |array: &ArrowDeviceArray| array.wait(on);
        Tensor::import(array, described, returned, ready, on, peer)
    }
}

impl DType {
    /// Returns Arrow's storage type: one byte for a truth value. None if Arrow has no such type.
    fn arrow_type(self) -> Option<DataType> {
        Some(match self {
            DType::Bool | DType::I8 => DataType::Int8,
            DType::I16 => DataType::Int16,
            DType::I32 => DataType::Int32,
            DType::I64 => DataType::Int64,
            DType::U8 => DataType::UInt8,
            DType::U16 => DataType::UInt16,
            DType::U32 => DataType::UInt32,
            DType::U64 => DataType::UInt64,
            DType::F16 => DataType::Float16,
            DType::F32 => DataType::Float32,
            DType::F64 => DataType::Float64,
            DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => return None,
        })
    }

    /// Returns a field of this type, without nulls; it can be converted to `FFI_ArrowSchema`. None if Arrow does not
    /// have the type. Truth values use the canonical extension type `arrow.bool8`, since Arrow's own type packs them
    /// into bits.
    pub fn arrow_field(self, name: impl Into<String>) -> Option<Field> {
        let field = Field::new(name, self.arrow_type()?, false);
        if self != DType::Bool {
            return Some(field);
        }
        Some(
            field.with_metadata(HashMap::from(
                [(EXTENSION_NAME, BOOL8), (EXTENSION_METADATA, "")]
                    .map(|(key, value)| (key.to_owned(), value.to_owned())),
            )),
        )
    }

    /// Returns the type of a field; none if tensors do not support it.
    pub fn from_arrow_field(field: &Field) -> Option<DType> {
        let bool8 = field.metadata().get(EXTENSION_NAME).map(String::as_str) == Some(BOOL8);
        DType::ALL.iter().copied().find(|dtype| {
            dtype.arrow_type().as_ref() == Some(field.data_type())
                && bool8 == (*dtype == DType::Bool)
        })
    }
}
