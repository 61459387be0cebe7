//! One column.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::allocator::Request;
use crate::allocator::{Allocator, Block};
use crate::block::{BlockId, Tag};
use crate::driver::{Device, KernelParam, Stream, sys};
use crate::resource::{LaunchBuffer, MemoryResource, OwnedBlock};

use super::described::Described;
use super::dlpack::DlpackTensor;
use crate::element::{Element, ElementType};
use crate::error::{Error, InvalidArgument, Refused};
use crate::sync::event::EventPools;

use super::memory::{ColumnSource, Foreign, Memory};
use super::order::{Consumer, Producer};

/// Elements of one type, one after the other, in device memory: allocated, or imported from somebody
/// else.
///
/// A column has a home, its [`stream`](Self::stream), in whose order its memory is used and freed. For
/// use on another stream let that stream wait for the home and say so with
/// [`record_stream`](Self::record_stream); what goes out through an export is ordered by it
/// ([`Consumer`]).
///
/// Exports share the memory: it is freed when the column and all of its exports are gone. Dropping an
/// imported column releases it to its producer, see [`Producer`]. Where the end of its uses cannot be
/// waited for (a stream of it is being captured) or nothing can be called (in a forked child), the memory
/// is leaked, with a line in the log.
///
/// `Send` and `Sync`: an address with a lifetime.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Context;
/// use cualloc::{Allocator, Config};
/// use cualloc::column::{Column, ElementType};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let alloc = Allocator::with_config(&context, Config::new())?;
/// let stream = alloc.create_stream()?;
/// let column = Column::from_slice(&alloc, &[3i64, 5, 8], &stream)?;
/// assert_eq!((column.rows(), column.byte_len()), (3, 24));
/// assert_eq!(column.element_type(), ElementType::I64);
/// assert_eq!(column.to_vec::<i64>()?, [3, 5, 8]);
/// assert!(!column.is_external());
/// assert!(column.block().is_some());
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Column {
    pub(super) memory: Arc<Memory>,
    element: ElementType,
    rows: usize,
    read_only: bool,
}

impl Column {
    // ---- making ----------------------------------------------------------------------------

    /// Memory for `rows` elements, with undefined contents. No rows: no memory, no driver call.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], and those of [`Allocator::allocate`].
    pub fn uninit(
        alloc: &Allocator,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Error> {
        let bytes = bytes_of(element, rows)?;
        let memory = match bytes {
            0 => Memory::empty(stream),
            _ => Memory::block(alloc.allocate(bytes, stream)?, bytes, stream)
                .map_err(|(_, error)| error)?,
        };
        Ok(Column::new(memory, element, rows, false))
    }

    pub(super) fn events(&self) -> &EventPools {
        self.memory.events()
    }

    /// [`uninit`](Self::uninit) with memory of any resource, to which it goes back.
    ///
    /// The block is the resource's: a launch recorder over that resource knows the column, and where
    /// accesses are put in order ([`UseTracking::Access`](crate::resource::UseTracking::Access)) the column's
    /// own copies and exports take part in it.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], and those of [`MemoryResource::allocate_block`].
    ///
    /// ```
    /// # #[cfg(feature = "sim")] {
    /// # use cualloc::sim::{SimConfig, Simulator};
    /// # use cualloc::driver::{Context, Stream};
    /// # use cualloc::{Allocator, Config};
    /// use std::sync::Arc;
    /// use cualloc::column::Column;
    /// use cualloc::resource::{AccessOrdered, Launch, MemoryResource};
    ///
    /// # let sim = Simulator::new(SimConfig::default())?;
    /// # let driver = sim.driver()?;
    /// # let context = driver.context(0)?;
    /// # let alloc = Allocator::with_config(&context, Config::new())?;
    /// # let (stream, other) = (Stream::new(&context)?, Stream::new(&context)?);
    /// let resource: Arc<dyn MemoryResource> = Arc::new(AccessOrdered::new(alloc));
    /// let column = Column::from_slice_in(Arc::clone(&resource), &[3i64, 5, 8], &stream)?;
    /// let mut launch = Launch::strict(&resource, &other);
    /// launch.read_write(&column)?;
    /// launch.preflight()?; // the other stream waits for the copy
    /// // ... launch on the other stream ...
    /// launch.commit()?;
    /// assert_eq!(column.to_vec::<i64>()?, [3, 5, 8]); // after the launch
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn uninit_in(
        resource: Arc<dyn MemoryResource>,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Error> {
        let bytes = bytes_of(element, rows)?;
        let memory = match bytes {
            0 => Memory::empty(stream),
            _ => {
                let tag = Tag::new("column");
                let block = resource.allocate_block(&Request::new(bytes).tag(tag), stream)?;
                let identity = block.id();
                let block = OwnedBlock::from_parts(resource, block);
                Memory::resource(block, identity, bytes, stream)
            }
        };
        Ok(Column::new(memory, element, rows, false))
    }

    /// [`zeroed`](Self::zeroed) with memory of any resource.
    ///
    /// # Errors
    /// As [`uninit_in`](Self::uninit_in), and driver errors.
    pub fn zeroed_in(
        resource: Arc<dyn MemoryResource>,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Error> {
        let column = Column::uninit_in(resource, element, rows, stream)?;
        column.set_zero()?;
        Ok(column)
    }

    /// [`from_slice`](Self::from_slice) with memory of any resource.
    ///
    /// # Errors
    /// As [`zeroed_in`](Self::zeroed_in).
    pub fn from_slice_in<T: Element>(
        resource: Arc<dyn MemoryResource>,
        values: &[T],
        stream: &Stream,
    ) -> Result<Column, Error> {
        let mut column = Column::uninit_in(resource, T::TYPE, values.len(), stream)?;
        column.copy_from_slice(values)?;
        Ok(column)
    }

    /// Elements whose bytes are zero. Does not wait.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed(
        alloc: &Allocator,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Error> {
        let column = Column::uninit(alloc, element, rows, stream)?;
        column.set_zero()?;
        Ok(column)
    }

    /// A copy of a slice. Waits until the copy is done.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice<T: Element>(
        alloc: &Allocator,
        values: &[T],
        stream: &Stream,
    ) -> Result<Column, Error> {
        let mut column = Column::uninit(alloc, T::TYPE, values.len(), stream)?;
        column.copy_from_slice(values)?;
        Ok(column)
    }

    /// A column of the first `rows` elements of a block.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`]; with the block.
    ///
    /// # Safety
    /// `stream` is the stream that the block was allocated on, and follows all uses of the block.
    pub unsafe fn from_block(
        block: Block,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Refused<Block>> {
        let error = match bytes_of(element, rows) {
            Err(error) => error,
            Ok(needed) if needed as u64 > block.size() => {
                Error::Invalid(InvalidArgument::TooSmall {
                    needed,
                    usable: block.size() as usize,
                })
            }
            Ok(bytes) => {
                return match Memory::block(block, bytes, stream) {
                    Ok(memory) => Ok(Column::new(memory, element, rows, false)),
                    Err((block, error)) => Err(Refused::new(block, error)),
                };
            }
        };
        Err(Refused::new(block, error))
    }

    /// A column of the first `rows` elements of a resource's block.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`], [`InvalidArgument::TooSmall`], [`Error::Abandoned`]; with the
    /// block.
    ///
    /// # Safety
    /// `stream` is the stream that the block was allocated on, and follows all uses of the block.
    pub unsafe fn from_owned(
        block: OwnedBlock<Arc<dyn MemoryResource>>,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, Refused<OwnedBlock<Arc<dyn MemoryResource>>>> {
        let refused = |block, error| Refused::new(block, error);
        let bytes = match bytes_of(element, rows) {
            Ok(bytes) => bytes,
            Err(error) => return Err(refused(block, error)),
        };
        let usable = block.size();
        if bytes > usable {
            let needed = bytes;
            return Err(refused(
                block,
                Error::Invalid(InvalidArgument::TooSmall { needed, usable }),
            ));
        }
        let Some(identity) = block.id() else {
            return Err(refused(block, Error::Abandoned));
        };
        let memory = Memory::resource(block, identity, bytes, stream);
        Ok(Column::new(memory, element, rows, false))
    }

    pub(super) fn new(
        memory: Arc<Memory>,
        element: ElementType,
        rows: usize,
        read_only: bool,
    ) -> Column {
        Column {
            memory,
            element,
            rows,
            read_only,
        }
    }

    /// Gives up the block.
    ///
    /// # Errors
    /// The column, if its memory is of a resource, imported, empty, lent to consumers whose streams are not
    /// known, or shared with an export that is not released.
    pub fn into_block(self) -> Result<Block, Column> {
        let (element, rows, read_only) = (self.element, self.rows, self.read_only);
        self.memory
            .into_block()
            .map_err(|memory| Column::new(memory, element, rows, read_only))
    }

    /// Gives up the block of a resource.
    ///
    /// # Errors
    /// The column, as with [`into_block`](Self::into_block), or if its memory is not of
    /// [`uninit_in`](Self::uninit_in) and the like.
    pub fn into_owned(self) -> Result<OwnedBlock<Arc<dyn MemoryResource>>, Column> {
        let (element, rows, read_only) = (self.element, self.rows, self.read_only);
        self.memory
            .into_owned()
            .map_err(|memory| Column::new(memory, element, rows, read_only))
    }

    // ---- observation -----------------------------------------------------------------------

    /// Address of the first element; 0 if there is no memory.
    ///
    /// Using it is for `unsafe` code, which answers for the memory's life and for order: work given to
    /// the column's stream while the column lives is in order.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.memory.ptr()
    }

    /// Number of elements.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of the elements.
    pub fn byte_len(&self) -> usize {
        // Checked when the column was made.
        self.rows * self.element.bytes()
    }

    /// Type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.element
    }

    /// The column's home.
    pub fn stream(&self) -> &Stream {
        self.memory.stream()
    }

    /// The device that the memory is on.
    pub fn device(&self) -> &Device {
        self.stream().context().device()
    }

    /// The block under the column, the allocator's or the resource's: also where our own memory came back
    /// through an export. `None` for memory of somebody else, and where there is none.
    pub fn block(&self) -> Option<BlockId> {
        self.memory.id()
    }

    /// Whether the memory is somebody else's, whose uses no allocator of this crate tracks.
    pub fn is_external(&self) -> bool {
        self.memory.is_external()
    }

    /// Whether the producer forbids writing.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Where the memory came from.
    pub fn source(&self) -> ColumnSource {
        self.memory.source()
    }

    /// Says that another stream uses the column's memory: it is neither reused nor given back to its
    /// producer before everything is done that the stream was given until then.
    ///
    /// # Errors
    /// Those of [`Block::record_stream`]; [`Error::Capturing`]; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.memory.record(stream)
    }

    // ---- exchange --------------------------------------------------------------------------

    /// Exports the column as a legacy tensor: one dimension, compact. Does not wait.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], which the legacy form cannot say; [`Error::Capturing`]; driver
    /// errors.
    pub fn to_dlpack(&self, consumer: &Consumer) -> Result<DlpackTensor, Error> {
        self.to_dlpack_rows(self.rows, consumer)
    }

    pub(super) fn to_dlpack_rows(
        &self,
        rows: usize,
        consumer: &Consumer,
    ) -> Result<DlpackTensor, Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        self.holds(rows)?;
        self.memory.lend(consumer)?;
        let memory = Arc::clone(&self.memory);
        Ok(DlpackTensor::legacy(
            memory,
            self.element,
            rows,
            self.device(),
        ))
    }

    /// Whether there are so many rows: a table's columns can be exchanged for shorter ones.
    fn holds(&self, rows: usize) -> Result<(), Error> {
        if rows <= self.rows {
            return Ok(());
        }
        Err(Error::Invalid(InvalidArgument::Rows {
            rows: rows as u64,
            capacity: self.rows,
        }))
    }

    /// Exports the column as a versioned tensor. Does not wait.
    ///
    /// # Errors
    /// [`Error::Capturing`]; driver errors.
    pub fn to_dlpack_versioned(&self, consumer: &Consumer) -> Result<DlpackTensor, Error> {
        self.to_dlpack_versioned_rows(self.rows, consumer)
    }

    pub(super) fn to_dlpack_versioned_rows(
        &self,
        rows: usize,
        consumer: &Consumer,
    ) -> Result<DlpackTensor, Error> {
        self.holds(rows)?;
        self.memory.lend(consumer)?;
        let memory = Arc::clone(&self.memory);
        let device = self.device();
        Ok(DlpackTensor::versioned(
            memory,
            self.element,
            rows,
            device,
            self.read_only,
        ))
    }

    /// Makes a column of a tensor, for use on a stream of the tensor's device. Does not wait on the
    /// host.
    ///
    /// # Errors
    /// [`Error::Import`] for a tensor that is not what a column needs, before any driver call;
    /// [`Error::Capturing`]; driver errors. With the tensor.
    pub fn from_dlpack(
        tensor: DlpackTensor,
        stream: &Stream,
        producer: Producer,
    ) -> Result<Column, Refused<DlpackTensor>> {
        let returned = tensor.own_memory();
        let ready = || {
            let described = tensor.describe(stream.context().device())?;
            Memory::expect(returned.as_deref(), &described, stream, &producer)?;
            Ok::<_, Error>(described)
        };
        let Described {
            ptr,
            rows,
            bytes,
            element,
            read_only,
        } = match ready() {
            Ok(described) => described,
            Err(error) => {
                return Err(Refused::new(tensor, error));
            }
        };
        let source = Foreign::new(ColumnSource::Dlpack, tensor);
        let memory = Memory::import(source, returned, ptr, bytes, stream, producer);
        Ok(Column::new(memory, element, rows, read_only))
    }
}

fn bytes_of(element: ElementType, rows: usize) -> Result<usize, Error> {
    element
        .bytes_of(rows)
        .ok_or(Error::Invalid(InvalidArgument::TooLarge {
            len: rows,
            element_bytes: element.bytes(),
        }))
}

// SAFETY: the address of its first element is what the driver reads.
unsafe impl KernelParam for Column {
    fn as_param(&self) -> *const c_void {
        self.memory.param()
    }
}

impl fmt::Debug for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Column")
            .field("element", &self.element)
            .field("rows", &self.rows)
            .field("ptr", &format_args!("{:#x}", self.ptr()))
            .field("source", &self.source())
            .field("block", &self.block())
            .finish_non_exhaustive()
    }
}

/// A [`Launch`](crate::resource::Launch) tracks a column by the block under it, and takes imported memory for external.
impl LaunchBuffer for Column {
    fn launch_id(&self) -> Option<BlockId> {
        self.memory.id()
    }

    fn is_external(&self) -> bool {
        self.memory.is_external()
    }
}
