//! Columns of equal capacity with a row count stored on the device.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::buffer::DeviceBuffer;
use crate::driver::Stream;
use crate::dtype::DType;
use crate::error::{Error, ImportFault, InvalidArgument};
use crate::resource::Source;

use super::capsule::{Dlpack, Managed};
use super::peer::Peer;
use super::tensor::Tensor;

/// The fields of a table, in order: the name and the type of each column.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Schema {
    fields: Vec<(String, DType)>,
}

impl Schema {
    /// Creates a schema of names and types.
    pub fn new<N: Into<String>>(fields: impl IntoIterator<Item = (N, DType)>) -> Schema {
        let fields = fields.into_iter().map(|(name, dtype)| (name.into(), dtype));
        Schema {
            fields: fields.collect(),
        }
    }

    /// Returns the fields.
    pub fn fields(&self) -> &[(String, DType)] {
        &self.fields
    }

    /// Returns the number of fields.
    pub fn arity(&self) -> usize {
        self.fields.len()
    }

    /// Returns the size of one row in bytes: that of one element of each field.
    pub fn row_bytes(&self) -> usize {
        self.fields.iter().map(|(_, dtype)| dtype.bytes()).sum()
    }

    fn admits(&self, columns: usize) -> Result<(), Error> {
        let fields = self.arity();
        if columns == fields {
            return Ok(());
        }
        Err(Error::Invalid(InvalidArgument::Arity { columns, fields }))
    }

    /// Returns the position of the first field with a name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|(known, _)| known == name)
    }
}

/// The host does not know the row count. No table has this many rows.
const UNSET: u64 = u64::MAX;

/// Columns with a capacity of `capacity` rows each. The number of valid rows is a `u64` on the device, which kernels
/// may change. The host may keep a copy of it once it is final.
///
/// `Send` and `Sync`.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::{Allocator, Config, driver::Stream};
/// use cualloc::exchange::{DType, Schema, Table};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = Stream::new(&context)?;
/// let schema = Schema::new([("key", DType::U32), ("value", DType::F64)]);
/// let table = Table::with_capacity(&allocator, schema, 1000, &stream)?;
///
/// // A kernel on `stream` fills rows and counts them at this address ...
/// assert_ne!(table.row_count().ptr(), 0);
/// // ... and the host reads the number when it needs it.
/// assert_eq!(table.rows()?, 0);
/// assert_eq!(table.cached_rows(), Some(0));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Table {
    schema: Schema,
    columns: Vec<Tensor>,
    capacity: usize,
    row_count: Tensor,
    cached: AtomicU64,
}

impl Table {
    /// Creates a table of given columns of equal length, its capacity, and a row count, a column of one `u64`. Neither
    /// is read.
    ///
    /// # Errors
    /// [`InvalidArgument::Arity`], [`InvalidArgument::Dimensions`], [`InvalidArgument::FieldType`],
    /// [`InvalidArgument::ColumnRows`]; [`InvalidArgument::DType`] or [`InvalidArgument::Length`] for the row
    /// count.
    pub fn new(schema: Schema, columns: Vec<Tensor>, row_count: Tensor) -> Result<Table, Error> {
        schema.admits(columns.len())?;
        let capacity = columns.first().map_or(Ok(0), Tensor::rows)?;
        for (index, (column, (_, dtype))) in columns.iter().zip(schema.fields()).enumerate() {
            if column.dtype() != *dtype {
                return Err(Error::Invalid(InvalidArgument::FieldType {
                    index,
                    expected: *dtype,
                    found: column.dtype(),
                }));
            }
            let rows = column.rows()?;
            if rows != capacity {
                return Err(Error::Invalid(InvalidArgument::ColumnRows {
                    index,
                    rows,
                    capacity,
                }));
            }
        }
        if row_count.dtype() != DType::U64 {
            return Err(Error::Invalid(InvalidArgument::DType {
                expected: DType::U64,
                found: row_count.dtype(),
            }));
        }
        let found = row_count.rows()?;
        if found != 1 {
            let expected = 1;
            return Err(Error::Invalid(InvalidArgument::Length { expected, found }));
        }
        Ok(Table {
            schema,
            columns,
            capacity,
            row_count,
            cached: AtomicU64::new(UNSET),
        })
    }

    /// Creates an empty table with room for `capacity` rows. Does not wait. Fails like [`Tensor::zeroed`].
    pub fn with_capacity(
        from: &impl Source,
        schema: Schema,
        capacity: usize,
        on: &Stream,
    ) -> Result<Table, Error> {
        let fields = schema.fields().iter();
        let columns = fields
            .map(|(_, dtype)| Tensor::uninit(from, *dtype, &[capacity], on))
            .collect::<Result<_, _>>()?;
        let row_count = Tensor::zeroed(from, DType::U64, &[1], on)?;
        Ok(Table {
            capacity,
            ..Table::new(schema, columns, row_count)?
        })
    }

    /// Creates a full table of given columns of equal length, its capacity. Waits for the row count to be written.
    ///
    /// # Errors
    /// [`ImportFault::UnequalRows`], and as [`new`](Self::new) and [`DeviceBuffer::from_slice`].
    pub fn from_columns(
        from: &impl Source,
        schema: Schema,
        columns: Vec<Tensor>,
        on: &Stream,
    ) -> Result<Table, Error> {
        let expected = columns.first().map_or(Ok(0), Tensor::rows)?;
        for column in &columns {
            let actual = column.rows()?;
            if actual != expected {
                return Err(ImportFault::UnequalRows { expected, actual }.into());
            }
        }
        schema.admits(columns.len())?;
        let row_count = DeviceBuffer::from_slice(from, &[expected as u64], on)?;
        let row_count = Tensor::from_buffer(row_count, &[1]).map_err(|refused| refused.error)?;
        let table = Table::new(schema, columns, row_count)?;
        table.set_cached_rows(expected as u64)?;
        Ok(table)
    }

    /// Imports one tensor per field, all with the same number of rows.
    ///
    /// # Errors
    /// As [`Tensor::from_dlpack`] and [`from_columns`](Self::from_columns). All tensors are released.
    pub fn from_dlpack<M: Managed>(
        from: &impl Source,
        schema: Schema,
        tensors: Vec<Dlpack<M>>,
        on: &Stream,
        peer: &Peer,
    ) -> Result<Table, Error> {
        schema.admits(tensors.len())?;
        let mut columns = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            columns.push(Tensor::from_dlpack(tensor, on, peer.clone())?);
        }
        Table::from_columns(from, schema, columns, on)
    }

    /// Exports the logical rows of every column. Waits for the row count if the host does not know it.
    ///
    /// # Errors
    /// As [`rows`](Self::rows) and [`Tensor::to_dlpack`].
    pub fn to_dlpack<M: Managed>(&self, peer: &Peer) -> Result<Vec<Dlpack<M>>, Error> {
        let rows = self.rows()?;
        let columns = self.columns.iter();
        columns
            .map(|column| column.rows_to_dlpack(rows, peer))
            .collect()
    }

    /// Returns the schema.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Returns the columns in the schema's order.
    pub fn columns(&self) -> &[Tensor] {
        &self.columns
    }

    /// Returns the columns, for writing.
    pub fn columns_mut(&mut self) -> &mut [Tensor] {
        &mut self.columns
    }

    /// Returns the column of the field with a name.
    pub fn column(&self, name: &str) -> Option<&Tensor> {
        self.columns.get(self.schema.position(name)?)
    }

    /// Converts the table to its columns.
    pub fn into_columns(self) -> Vec<Tensor> {
        self.columns
    }

    /// Returns the capacity in rows.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether the capacity is 0.
    pub fn is_empty(&self) -> bool {
        self.capacity == 0
    }

    /// Returns the size of the columns in bytes: the capacity times the size of a row, without the row count.
    pub fn byte_len(&self) -> usize {
        self.columns.iter().map(Tensor::byte_len).sum()
    }

    /// Returns the row count's memory, for reading: one `u64`.
    pub fn row_count(&self) -> &Tensor {
        &self.row_count
    }

    /// Returns the row count for writing, also by kernels: the host discards its copy.
    pub fn row_count_mut(&mut self) -> &mut Tensor {
        *self.cached.get_mut() = UNSET;
        &mut self.row_count
    }

    /// Returns the host's copy of the row count, if it has one. Makes no driver call.
    pub fn cached_rows(&self) -> Option<usize> {
        match self.cached.load(Ordering::Acquire) {
            UNSET => None,
            // At most the capacity.
            rows => usize::try_from(rows).ok(),
        }
    }

    /// Sets the host's copy of the row count, which must equal the value that the device has or will have. It can be
    /// set only once; [`row_count_mut`](Self::row_count_mut) clears it.
    ///
    /// # Errors
    /// [`InvalidArgument::Rows`], [`InvalidArgument::RowsAlreadySet`].
    pub fn set_cached_rows(&self, rows: u64) -> Result<(), Error> {
        self.check(rows)?;
        self.cached
            .compare_exchange(UNSET, rows, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(|rows| Error::Invalid(InvalidArgument::RowsAlreadySet { rows }))
    }

    /// Returns the number of logical rows: the host's copy, or else the device's value, which is waited for and becomes
    /// the host's copy.
    ///
    /// # Errors
    /// [`InvalidArgument::Rows`] if the device's row count exceeds the capacity; as for [`Tensor::as_slice`].
    pub fn rows(&self) -> Result<usize, Error> {
        if let Some(rows) = self.cached_rows() {
            return Ok(rows);
        }
        // The value may depend on work ordered on the columns' own streams.
        for column in &self.columns {
            self.row_count.shared.wait_for(column.stream())?;
        }
        let read = self.row_count.as_slice::<u64>()?.to_vec()?;
        let rows = self.check(read.first().copied().unwrap_or(UNSET))?;
        match self.set_cached_rows(rows as u64) {
            // Another thread was faster.
            Ok(()) | Err(Error::Invalid(InvalidArgument::RowsAlreadySet { .. })) => Ok(rows),
            Err(error) => Err(error),
        }
    }

    fn check(&self, rows: u64) -> Result<usize, Error> {
        usize::try_from(rows)
            .ok()
            .filter(|rows| *rows <= self.capacity)
            .ok_or(Error::Invalid(InvalidArgument::Rows {
                rows,
                capacity: self.capacity,
            }))
    }
}
