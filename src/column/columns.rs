//! One column.

use std::fmt;
use std::sync::Arc;

use crate::allocator::{Allocator, Block};
use crate::buffer::{BufferError, CHUNK, Staging, end_of, keep};
use crate::driver::{Device, Stream, sys};
use crate::resource::{BlockIdentity, Buffer, Recordable};

use super::dlpack::{Described, DlpackTensor};
use super::element::{Element, ElementType};
use super::error::{ColumnError, ImportError};
use super::memory::{Foreign, Memory};
use super::order::{Consumer, Producer};

/// Where a column's memory came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ColumnSource {
    /// Allocated for it.
    Owned,
    /// Imported as a DLPack tensor.
    Dlpack,
    /// Imported as an Arrow device array.
    Arrow,
}

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
/// # let context = Context::primary(&driver, driver.device(0)?)?;
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
    /// [`ColumnError::TooLarge`], and those of [`Allocator::allocate`].
    pub fn uninit(
        alloc: &Allocator,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, ColumnError> {
        let bytes = bytes_of(element, rows)?;
        let memory = match bytes {
            0 => Memory::empty(stream),
            _ => Memory::block(alloc.allocate(bytes, stream)?, bytes, stream)
                .map_err(|(_, error)| error)?,
        };
        Ok(Column::new(memory, element, rows, false))
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
    ) -> Result<Column, ColumnError> {
        let column = Column::uninit(alloc, element, rows, stream)?;
        if column.byte_len() > 0 {
            let entered = stream.context().enter()?;
            // SAFETY: the memory is the column's, and the stream its home.
            unsafe { entered.memset_d8(column.ptr(), 0, column.byte_len(), stream.raw()) }?;
        }
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
    ) -> Result<Column, ColumnError> {
        let mut column = Column::uninit(alloc, T::TYPE, values.len(), stream)?;
        column.copy_from_slice(values)?;
        Ok(column)
    }

    /// A column of the first `rows` elements of a block.
    ///
    /// # Errors
    /// [`ColumnError::TooLarge`], [`ColumnError::BlockTooSmall`]; with the block.
    ///
    /// # Safety
    /// `stream` is the stream that the block was allocated on, and follows all uses of the block.
    pub unsafe fn from_block(
        block: Block,
        element: ElementType,
        rows: usize,
        stream: &Stream,
    ) -> Result<Column, ImportError<Block>> {
        let error = match bytes_of(element, rows) {
            Err(error) => error,
            Ok(needed) if needed as u64 > block.size() => ColumnError::BlockTooSmall {
                needed,
                usable: block.size(),
            },
            Ok(bytes) => {
                return match Memory::block(block, bytes, stream) {
                    Ok(memory) => Ok(Column::new(memory, element, rows, false)),
                    Err((block, error)) => Err(ImportError {
                        offered: Box::new(block),
                        error: error.into(),
                    }),
                };
            }
        };
        Err(ImportError {
            offered: Box::new(block),
            error,
        })
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
    /// The column, if its memory is imported, empty, lent to consumers whose streams are not known, or
    /// shared with an export that is not released.
    pub fn into_block(self) -> Result<Block, Column> {
        let (element, rows, read_only) = (self.element, self.rows, self.read_only);
        self.memory
            .into_block()
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
    pub fn device(&self) -> Device {
        self.stream().context().device()
    }

    /// The allocator's block under the column: also where our own memory came back through an export.
    /// `None` for memory of somebody else, and where there is none.
    pub fn block(&self) -> Option<BlockIdentity> {
        match self.memory.buffer() {
            Buffer::Block(identity) => Some(identity),
            _ => None,
        }
    }

    /// Whether the memory is somebody else's, whose uses no allocator of this crate tracks.
    pub fn is_external(&self) -> bool {
        self.memory.buffer() == Buffer::External
    }

    /// Whether the producer forbids writing.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Where the memory came from.
    pub fn source(&self) -> ColumnSource {
        match self.memory.source() {
            None => ColumnSource::Owned,
            Some(Foreign::Dlpack(_)) => ColumnSource::Dlpack,
            #[cfg(feature = "arrow")]
            Some(Foreign::Arrow(_)) => ColumnSource::Arrow,
        }
    }

    /// Says that another stream uses the column's memory: it is neither reused nor given back to its
    /// producer before everything is done that the stream was given until then.
    ///
    /// # Errors
    /// Those of [`Block::record_stream`]; [`ColumnError::Capturing`]; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), ColumnError> {
        self.memory.record(stream)
    }

    // ---- contents --------------------------------------------------------------------------

    /// Overwrites all elements, in the order of the column's stream. Waits until that is done.
    ///
    /// # Errors
    /// [`ColumnError::WrongType`], [`ColumnError::WrongLength`], [`ColumnError::ReadOnly`],
    /// [`ColumnError::Capturing`], [`ColumnError::Buffer`], driver errors.
    pub fn copy_from_slice<T: Element>(&mut self, values: &[T]) -> Result<(), ColumnError> {
        self.expect::<T>(values.len())?;
        if self.read_only {
            return Err(ColumnError::ReadOnly);
        }
        if values.is_empty() {
            return Ok(());
        }
        let stream = self.stream();
        super::order::refuse_capture(stream)?;
        let bytes = self.byte_len();
        let mut staging = Staging::new(bytes.min(CHUNK))?;
        for start in (0..bytes).step_by(CHUNK) {
            let part = CHUNK.min(bytes - start);
            let (from, to) = (staging.ptr(), self.ptr() + start as u64);
            // SAFETY: so many bytes of the slice, whose elements have no padding, and room for them.
            unsafe {
                let source = values.as_ptr().cast::<u8>().add(start);
                from.copy_from_nonoverlapping(source, part);
            }
            let entered = stream.context().enter()?;
            // SAFETY: the bytes lie in the column's memory; the staging memory is kept until the copy
            // is over.
            let copied =
                unsafe { entered.copy_host_to_device(to, from.cast(), part, stream.raw()) };
            // Also after a failure: the driver may have taken a part.
            staging = keep(staging, end_of(stream, copied.map_err(BufferError::from)))?;
        }
        Ok(())
    }

    /// All elements, after everything that the column's stream was given so far. Waits.
    ///
    /// # Errors
    /// [`ColumnError::WrongType`], [`ColumnError::Capturing`], [`ColumnError::Buffer`], driver errors.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, ColumnError> {
        self.expect::<T>(self.rows)?;
        let mut bytes = vec![0u8; self.byte_len()];
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let stream = self.stream();
        super::order::refuse_capture(stream)?;
        let entered = stream.context().enter()?;
        // SAFETY: both ranges have so many bytes; the host's is ours, and kept until the copy is over.
        let copied = unsafe {
            entered.copy_device_to_host(
                bytes.as_mut_ptr().cast(),
                self.ptr(),
                bytes.len(),
                stream.raw(),
            )
        };
        bytes = keep(bytes, end_of(stream, copied.map_err(BufferError::from)))?;
        Ok(bytes
            .chunks_exact(size_of::<T>())
            .map(T::from_device)
            .collect())
    }

    fn expect<T: Element>(&self, rows: usize) -> Result<(), ColumnError> {
        if T::TYPE != self.element {
            return Err(ColumnError::WrongType {
                expected: T::TYPE,
                actual: self.element,
            });
        }
        if rows != self.rows {
            return Err(ColumnError::WrongLength {
                expected: self.rows,
                actual: rows,
            });
        }
        Ok(())
    }

    // ---- exchange --------------------------------------------------------------------------

    /// Exports the column as a legacy tensor: one dimension, compact. Does not wait.
    ///
    /// # Errors
    /// [`ColumnError::ReadOnly`], which the legacy form cannot say; [`ColumnError::Capturing`]; driver
    /// errors.
    pub fn to_dlpack(&self, consumer: &Consumer) -> Result<DlpackTensor, ColumnError> {
        self.to_dlpack_rows(self.rows, consumer)
    }

    pub(super) fn to_dlpack_rows(
        &self,
        rows: usize,
        consumer: &Consumer,
    ) -> Result<DlpackTensor, ColumnError> {
        if self.read_only {
            return Err(ColumnError::ReadOnly);
        }
        self.memory.lend(consumer)?;
        let memory = Arc::clone(&self.memory);
        Ok(DlpackTensor::legacy(
            memory,
            self.element,
            rows,
            self.device(),
        ))
    }

    /// Exports the column as a versioned tensor. Does not wait.
    ///
    /// # Errors
    /// [`ColumnError::Capturing`]; driver errors.
    pub fn to_dlpack_versioned(&self, consumer: &Consumer) -> Result<DlpackTensor, ColumnError> {
        self.to_dlpack_versioned_rows(self.rows, consumer)
    }

    pub(super) fn to_dlpack_versioned_rows(
        &self,
        rows: usize,
        consumer: &Consumer,
    ) -> Result<DlpackTensor, ColumnError> {
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
    /// [`ColumnError::Invalid`] for a tensor that is not what a column needs, before any driver call;
    /// [`ColumnError::Capturing`]; driver errors. With the tensor.
    pub fn from_dlpack(
        tensor: DlpackTensor,
        stream: &Stream,
        producer: Producer,
    ) -> Result<Column, ImportError<DlpackTensor>> {
        let returned = tensor.own_memory();
        let ready = || {
            let described = tensor.describe(stream.context().device())?;
            Memory::expect(returned.as_deref(), stream, &producer)?;
            Ok(described)
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
                return Err(ImportError {
                    offered: Box::new(tensor),
                    error,
                });
            }
        };
        let source = Foreign::Dlpack(tensor);
        let memory = Memory::import(source, returned, ptr, bytes, stream, producer);
        Ok(Column::new(memory, element, rows, read_only))
    }
}

fn bytes_of(element: ElementType, rows: usize) -> Result<usize, ColumnError> {
    element
        .bytes_of(rows)
        .ok_or(ColumnError::TooLarge { rows, element })
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

/// Launch recorders track a column by the block under it, and take imported memory for external.
impl Recordable for Column {
    fn buffer(&self) -> Buffer {
        self.memory.buffer()
    }
}
