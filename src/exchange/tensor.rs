//! Elements of a type known at run time.

use std::ffi::c_void;
use std::sync::Arc;

use crate::allocator::Request;
use crate::block::BlockId;
use crate::buffer::{
    DeviceBuffer, DeviceCopy, DeviceSlice, DeviceSliceMut, Memory, PinnedBuffer, Pod,
};
use crate::driver::kept_stream::KeptStream;
use crate::driver::{Device, KernelParam, Stream, StreamKind, process, sys};
use crate::dtype::DType;
use crate::error::{Error, InvalidArgument, Refused, StreamMisuse};
use crate::resource::{LaunchBuffer, Source};
use crate::sync::order::wait_until_idle;

use super::capsule::{Dlpack, Managed};
use super::layout::{Described, Layout};
use super::peer::Peer;
use super::shared::{Kept, Shared};

/// A Rust type that can be a tensor's element. Sealed.
///
/// Types that Rust does not have are read and written as unsigned integers of the same size: `u8` for truth values and
/// 8-bit floating point, `u16` for 16-bit floating point. With the feature `half`, its `f16` and `bf16` are elements, too.
pub trait Element: DeviceCopy + Pod + sealed::Typed {
    /// The element type.
    const DTYPE: DType;
}

mod sealed {
    pub trait Typed {}
}

macro_rules! elements {
    ($($rust:ty: $of:ident),*) => {$(
        impl sealed::Typed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$of;
        }
        const _: () = assert!(size_of::<$rust>() == DType::$of.bytes());
    )*};
}
elements!(i8: I8, i16: I16, i32: I32, i64: I64, u8: U8, u16: U16, u32: U32, u64: U64, f32: F32, f64: F64);
#[cfg(feature = "half")]
elements!(half::f16: F16, half::bf16: BF16);

/// Elements of a type known at run time in up to 32 dimensions: in device memory of any resource, in imported memory,
/// or in page-locked host memory. A column is a one-dimensional tensor.
///
/// A tensor has a home, its [`stream`](Self::stream), in whose order its memory is used and freed. The slices of a
/// tensor have the operations of a buffer, with [the same order](crate::buffer). For kernels on another stream, make
/// that stream wait for the home and record the use with [`record_stream`](Self::record_stream). Exports order the
/// streams involved ([`Peer`]).
///
/// Exports share the memory: it is freed with the last of the tensor and its exports. Dropping an imported tensor
/// releases it to its producer. If the end of its uses cannot be waited for (because one of its streams is capturing),
/// an allocator frees its memory later, and other memory is leaked and logged; in a forked child all of it is leaked.
///
/// `Send` and `Sync`: an address with a lifetime.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, driver::Stream};
/// use cualloc::DeviceBuffer;
/// use cualloc::exchange::{DType, Tensor};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = Stream::new(&context)?;
/// let values = DeviceBuffer::from_slice(&allocator, &[3i64, 5, 8, 13], &stream)?;
/// let tensor = Tensor::from_buffer(values, &[2, 2])?;
/// assert_eq!((tensor.shape(), tensor.strides()), (&[2, 2][..], &[2, 1][..]));
/// assert_eq!((tensor.dtype(), tensor.byte_len()), (DType::I64, 32));
/// assert_eq!(tensor.as_slice::<i64>()?.to_vec()?, [3, 5, 8, 13]);
/// assert!(!tensor.is_external());
///
/// // Any resource will do, and types that Rust does not have.
/// let halves = Tensor::zeroed(&allocator, DType::F16, &[8, 3, 224, 224], &stream)?;
/// assert_eq!(halves.byte_len(), 2 * 8 * 3 * 224 * 224);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Tensor {
    pub(super) shared: Arc<Shared>,
    /// The returned memory of our own, if the tensor was imported from our own export.
    returned: Option<ReturnStream>,
    /// The address of the first element, for kernels.
    ptr: sys::CUdeviceptr,
    dtype: DType,
    layout: Layout,
    read_only: bool,
}

struct ReturnStream {
    shared: Arc<Shared>,
    stream: KeptStream,
    /// For the per-thread default stream, that of the importing thread.
    stream_id: u64,
    #[expect(dead_code, reason = "kept for its drop")]
    kept: Kept,
}

impl Tensor {
    /// Allocates memory for uninitialised elements of a non-zero size. Without elements it allocates nothing and makes
    /// no driver call.
    ///
    /// # Errors
    /// [`InvalidArgument::Dimensions`] above 32, [`InvalidArgument::TooLarge`], and those of
    /// [`DeviceBuffer::uninit_with`].
    pub fn uninit(
        from: &impl Source,
        dtype: DType,
        shape: &[usize],
        on: &Stream,
    ) -> Result<Tensor, Error> {
        let (layout, bytes) = Layout::compact(dtype, shape)?;
        if bytes == 0 {
            return Ok(Tensor::new(Shared::empty(on), 0, dtype, layout));
        }
        let request = Request::new(bytes).align(dtype.bytes()).tag("tensor");
        let memory = DeviceBuffer::<u8>::uninit_with(from, request, on)?.into_memory();
        Ok(Tensor::over(memory, bytes, dtype, layout, on))
    }

    /// Allocates elements whose bytes are zero. Does not wait.
    ///
    /// # Errors
    /// As for [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed(
        from: &impl Source,
        dtype: DType,
        shape: &[usize],
        on: &Stream,
    ) -> Result<Tensor, Error> {
        let tensor = Tensor::uninit(from, dtype, shape, on)?;
        let bytes = DeviceSlice::<u8>::new(tensor.shared.memory(), tensor.ptr, tensor.byte_len());
        // SAFETY: the tensor is not shared yet.
        unsafe { DeviceSliceMut::new(bytes) }.set_zero(on)?;
        Ok(tensor)
    }

    /// Creates a tensor of a buffer's elements, as many as the shape has.
    ///
    /// # Errors
    /// [`InvalidArgument::Dimensions`], [`InvalidArgument::TooLarge`], [`InvalidArgument::Length`];
    /// [`Error::NotSupported`] for a buffer without memory, which has no stream: use [`uninit`](Self::uninit) to create
    /// an empty tensor. They return the buffer.
    pub fn from_buffer<T: Element>(
        buffer: DeviceBuffer<T>,
        shape: &[usize],
    ) -> Result<Tensor, Refused<DeviceBuffer<T>>> {
        let (layout, bytes) = match shaped::<T>(shape, buffer.len()) {
            Ok(layout) => layout,
            Err(error) => return Err(Refused::new(buffer, error)),
        };
        let Some(on) = buffer.stream().cloned() else {
            let what = "a tensor of a buffer without memory";
            return Err(Refused::new(buffer, Error::NotSupported { what }));
        };
        let memory = buffer.into_memory();
        Ok(Tensor::over(memory, bytes, T::DTYPE, layout, &on))
    }

    /// Converts the tensor to a buffer.
    ///
    /// # Errors
    /// [`InvalidArgument::DType`]; [`Error::NotSupported`] if the memory is imported, host memory, or empty, was lent
    /// to peers whose streams are unknown, or is shared with an unreleased export; they return the tensor.
    pub fn into_buffer<T: Element>(mut self) -> Result<DeviceBuffer<T>, Refused<Tensor>> {
        if let Err(error) = self.expect::<T>() {
            return Err(Refused::new(self, error));
        }
        let len = self.layout.len();
        if self.returned.is_none() && !self.read_only {
            match self.shared.into_memory() {
                Ok(memory) => return Ok(DeviceBuffer::from_memory(memory, len)),
                Err(shared) => self.shared = shared,
            }
        }
        let what = "a buffer of memory that is not a tensor's alone";
        Err(Refused::new(self, Error::NotSupported { what }))
    }

    /// Creates a tensor of a page-locked buffer's elements, for export with DLPack's device type `kDLCUDAHost`. Its
    /// home is the legacy default stream of the buffer's context, to which no work is submitted. Memory of a pool
    /// returns to the pool after the work of the consumers.
    ///
    /// # Errors
    /// As [`from_buffer`](Self::from_buffer); [`Error::InFlight`] while recorded work may use the memory,
    /// [`Error::Stale`] for that of an earlier generation of its pool; driver errors.
    pub fn from_pinned<T: Element>(
        mut buffer: PinnedBuffer<T>,
        shape: &[usize],
    ) -> Result<Tensor, Refused<PinnedBuffer<T>>> {
        let (layout, bytes) = match shaped::<T>(shape, buffer.len()) {
            Ok(layout) => layout,
            Err(error) => return Err(Refused::new(buffer, error)),
        };
        if let Err(error) = buffer.block.ready() {
            return Err(Refused::new(buffer, error));
        }
        let Some(on) = buffer.block.context().map(Stream::legacy) else {
            let what = "a tensor of a buffer without memory";
            return Err(Refused::new(buffer, Error::NotSupported { what }));
        };
        let ptr = buffer.as_ptr() as u64;
        let shared = Shared::pinned(buffer.block, ptr, bytes, &on);
        Ok(Tensor::new(shared, ptr, T::DTYPE, layout))
    }

    fn new(shared: Arc<Shared>, ptr: sys::CUdeviceptr, dtype: DType, layout: Layout) -> Tensor {
        Tensor {
            shared,
            returned: None,
            ptr,
            dtype,
            layout,
            read_only: false,
        }
    }

    /// Creates a tensor of the elements from the start of a memory on.
    fn over(
        memory: Option<Memory>,
        bytes: usize,
        dtype: DType,
        layout: Layout,
        on: &Stream,
    ) -> Tensor {
        let ptr = memory.as_ref().map_or(0, Memory::ptr);
        let shared = match memory {
            Some(memory) => Shared::of_memory(memory, bytes),
            None => Shared::empty(on),
        };
        Tensor::new(shared, ptr, dtype, layout)
    }

    /// Creates a tensor of memory accepted for import, and of our own memory behind it, if any.
    pub(super) fn import<K: Send + Sync + 'static>(
        kept: K,
        described: Result<Described, Error>,
        returned: Option<Arc<Shared>>,
        ready: impl FnOnce(&K) -> Result<(), Error>,
        on: &Stream,
        peer: Peer,
    ) -> Result<Tensor, Refused<K>> {
        let prepared = described.and_then(|described| {
            Shared::expect(returned.as_deref(), &described, on, &peer)?;
            ready(&kept)?;
            // Makes no driver call for most streams, and is needed only with memory.
            let id = if described.bytes == 0 { 0 } else { on.id()? };
            Ok((described, id))
        });
        let (described, stream_id) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(Refused::new(kept, error)),
        };
        let (shared, returned) = match returned {
            Some(shared) => {
                let returned = ReturnStream {
                    shared: Arc::clone(&shared),
                    stream: KeptStream::new(on),
                    stream_id,
                    kept: Box::new(kept),
                };
                (shared, Some(returned))
            }
            None => (Shared::import(kept, &described, on, stream_id, peer), None),
        };
        Ok(Tensor {
            shared,
            returned,
            ptr: described.ptr,
            dtype: described.dtype,
            layout: described.layout,
            read_only: described.read_only,
        })
    }

    /// Returns the address of the first element; 0 if there is no memory.
    ///
    /// Using it requires `unsafe` code, which is responsible for the memory's lifetime and for order: work submitted to
    /// the tensor's stream while the tensor lives is ordered.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Returns the length of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// Returns the stride of each dimension, in elements.
    pub fn strides(&self) -> &[isize] {
        &self.layout.strides
    }

    /// Returns the size of the elements in bytes.
    pub fn byte_len(&self) -> usize {
        // Checked when the tensor was created.
        self.layout.len() * self.dtype.bytes()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the tensor's home. For our own memory that came back, this is the importing stream: operations of the
    /// tensor's slices come after everything submitted to it before.
    pub fn stream(&self) -> &Stream {
        match &self.returned {
            Some(returned) => returned.stream.stream(),
            None => self.shared.stream(),
        }
    }

    /// Returns the device of the tensor's home.
    pub fn device(&self) -> &Device {
        self.stream().context().device()
    }

    /// Returns the id of the block under the tensor, also for our own memory that came back through an export. `None`
    /// for foreign memory, host memory, and without memory.
    pub fn id(&self) -> Option<BlockId> {
        self.shared.id()
    }

    /// Whether the memory is foreign, so that no allocator of this crate tracks its uses.
    pub fn is_external(&self) -> bool {
        self.shared.is_external()
    }

    /// Whether the producer forbids writing.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether it is page-locked host memory.
    pub fn is_host(&self) -> bool {
        self.shared.is_host()
    }

    /// Records that another stream uses the tensor's memory: it is neither reused nor returned to its producer before
    /// the work submitted to that stream by then is complete.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.shared.record(stream)
    }

    /// Returns all elements, for reading.
    ///
    /// # Errors
    /// [`InvalidArgument::DType`]; [`InvalidArgument::Strided`] if the elements are not contiguous with the last
    /// dimension fastest; [`Error::NotSupported`] for host memory; for our own memory that came back
    /// [`Error::Capturing`], [`StreamMisuse::WrongThread`] and driver errors.
    pub fn as_slice<T: Element>(&self) -> Result<DeviceSlice<'_, T>, Error> {
        self.expect::<T>()?;
        if self.is_host() {
            let what = "a slice of the device in memory of the host";
            return Err(Error::NotSupported { what });
        }
        if let Some(returned) = &self.returned
            && self.byte_len() > 0
        {
            if !returned.is_at_home() {
                return Err(StreamMisuse::WrongThread.into());
            }
            self.shared.wait_for(returned.stream.stream())?;
        }
        let memory = self.shared.memory();
        Ok(DeviceSlice::new(memory, self.ptr, self.layout.len()))
    }

    /// Returns all elements, for writing.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], and as [`as_slice`](Self::as_slice).
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<DeviceSliceMut<'_, T>, Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        let all = self.as_slice()?;
        // SAFETY: the tensor is borrowed exclusively for the lifetime of the result; operations of other owners of the
        // memory take turns with its own.
        Ok(unsafe { DeviceSliceMut::new(all) })
    }

    fn expect<T: Element>(&self) -> Result<(), Error> {
        let (expected, found) = (T::DTYPE, self.dtype);
        if expected != found && expected != found.stored() {
            return Err(Error::Invalid(InvalidArgument::DType { expected, found }));
        }
        match self.layout.is_compact() {
            true => Ok(()),
            false => Err(Error::Invalid(InvalidArgument::Strided)),
        }
    }

    pub(super) fn rows(&self) -> Result<usize, Error> {
        match self.shape() {
            [rows] => Ok(*rows),
            shape => Err(Error::Invalid(InvalidArgument::Dimensions {
                found: shape.len(),
                most: 1,
            })),
        }
    }

    /// Exports the tensor, in the legacy or the versioned form. Does not wait.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] for a read-only tensor in the legacy form, which has no flag for that; [`Error::Capturing`];
    /// driver errors.
    pub fn to_dlpack<M: Managed>(&self, peer: &Peer) -> Result<Dlpack<M>, Error> {
        self.export(self.layout.clone(), peer)
    }

    /// Like [`to_dlpack`](Self::to_dlpack), but exports only the first rows of a column.
    pub(super) fn rows_to_dlpack<M: Managed>(
        &self,
        rows: usize,
        peer: &Peer,
    ) -> Result<Dlpack<M>, Error> {
        let capacity = self.rows()?;
        if rows > capacity {
            let rows = rows as u64;
            return Err(Error::Invalid(InvalidArgument::Rows { rows, capacity }));
        }
        let mut layout = self.layout.clone();
        layout.shape[0] = rows;
        self.export(layout, peer)
    }

    fn export<M: Managed>(&self, layout: Layout, peer: &Peer) -> Result<Dlpack<M>, Error> {
        if self.read_only && !M::SAYS_READ_ONLY {
            return Err(Error::ReadOnly);
        }
        self.lend(peer)?;
        let shared = Arc::clone(&self.shared);
        let ptr = if layout.len() == 0 { 0 } else { self.ptr };
        let device = self.device();
        Ok(Dlpack::export(
            shared,
            ptr,
            self.dtype,
            &layout,
            device,
            self.read_only,
        ))
    }

    /// Passes the memory to the other side, ordered after the work submitted to the tensor's home.
    pub(super) fn lend(&self, peer: &Peer) -> Result<(), Error> {
        if let Some(returned) = &self.returned
            && self.byte_len() > 0
        {
            match returned.is_at_home() {
                true => self.shared.wait_for(self.stream())?,
                // On this thread the handle means this thread's stream, not the intended one.
                false => wait_until_idle(self.stream().context())?,
            }
        }
        self.shared.lend(peer)
    }

    /// Imports an exported tensor, for use on a stream of its device. Does not wait on the host.
    ///
    /// # Errors
    /// [`Error::Import`] for an unsuitable tensor, before any driver call; [`Error::Capturing`]; driver errors. They
    /// return the offered tensor.
    pub fn from_dlpack<M: Managed>(
        tensor: Dlpack<M>,
        on: &Stream,
        peer: Peer,
    ) -> Result<Tensor, Refused<Dlpack<M>>> {
        let returned = tensor.own_memory();
        let described = tensor.describe(on.context().device());
        Tensor::import(tensor, described, returned, |_| Ok(()), on, peer)
    }
}

impl ReturnStream {
    /// Whether the home's handle is valid on the calling thread.
    fn is_at_home(&self) -> bool {
        let stream = self.stream.stream();
        stream.kind() != StreamKind::PerThreadDefault || stream.own_id() == self.stream_id
    }
}

impl Drop for ReturnStream {
    fn drop(&mut self) {
        // The stream is recorded with the owner again, as at the import: the stream may have been retired since,
        // and this counts for work submitted to it later.
        if process::is_unavailable() {
            return;
        }
        let recorded = self.stream.with(|stream| {
            let stream = stream.filter(|_| self.is_at_home());
            stream.is_some_and(|stream| self.shared.record(stream).is_ok())
        });
        if !recorded {
            let context = self.stream.stream().context();
            self.shared.lend_untracked(context);
        }
    }
}

/// Returns the layout of a shape that must have this many elements, and their size in bytes.
fn shaped<T: Element>(shape: &[usize], found: usize) -> Result<(Layout, usize), Error> {
    let (layout, bytes) = Layout::compact(T::DTYPE, shape)?;
    let expected = layout.len();
    if expected != found {
        return Err(Error::Invalid(InvalidArgument::Length { expected, found }));
    }
    Ok((layout, bytes))
}

// SAFETY: the driver reads the parameter's value, the address of the first element, from the field `ptr`.
unsafe impl KernelParam for Tensor {
    fn as_param(&self) -> *const c_void {
        (&raw const self.ptr).cast()
    }
}

debug_fields!(Tensor, self =>
    dtype: self.dtype,
    shape: self.shape(),
    strides: self.strides(),
    ptr: format_args!("{:#x}", self.ptr),
    id: self.id(),
);

/// A [`Launch`](crate::resource::Launch) tracks a tensor by the block under it; imported memory counts as external.
impl LaunchBuffer for Tensor {
    fn launch_id(&self) -> Option<BlockId> {
        self.id()
    }

    fn is_external(&self) -> bool {
        self.shared.is_external()
    }
}
