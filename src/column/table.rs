//! Columns of equal capacity with a row count that the device keeps.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::Allocator;
use crate::driver::{Stream, sys};

use super::columns::Column;
use super::dlpack::DlpackTensor;
use super::order::{Consumer, Producer, order};
use crate::element::ElementType;
use crate::error::{Error, ImportFault, InvalidArgument};

/// A column's name and type.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Its elements.
    pub element: ElementType,
}

/// The fields of a table, in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Schema {
    fields: Vec<Field>,
}

impl Schema {
    /// A schema of names and types.
    pub fn new<N: Into<String>>(fields: impl IntoIterator<Item = (N, ElementType)>) -> Schema {
        let fields = fields.into_iter().map(|(name, element)| Field {
            name: name.into(),
            element,
        });
        Schema {
            fields: fields.collect(),
        }
    }

    /// The fields.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Their number.
    pub fn arity(&self) -> usize {
        self.fields.len()
    }

    /// Bytes of one row: those of one element of each field.
    pub fn row_bytes(&self) -> usize {
        self.fields.iter().map(|field| field.element.bytes()).sum()
    }

    /// Position of the first field of a name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }
}

/// The host does not know the row count. No table has so many rows.
const UNSET: u64 = u64::MAX;

/// Columns that all have room for `capacity` rows, of which the first so many count as one number on
/// the device says: a `u64`, which kernels may change. The host may keep a copy of it, once it is final.
///
/// `Send` and `Sync`.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Context;
/// use cualloc::{Allocator, Config};
/// use cualloc::column::{ElementType, Schema, Table};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// let alloc = Allocator::with_config(&context, Config::new())?;
/// let stream = alloc.create_stream()?;
/// let schema = Schema::new([("key", ElementType::U32), ("value", ElementType::F64)]);
/// let table = Table::with_capacity(&alloc, schema, 1000, &stream)?;
///
/// // A kernel on `stream` fills rows and counts them at this address ...
/// assert_ne!(table.row_count_ptr(), 0);
/// // ... and the host reads the number when it needs it.
/// assert_eq!(table.rows()?, 0);
/// assert_eq!(table.cached_rows(), Some(0));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Table {
    schema: Schema,
    columns: Vec<Column>,
    capacity: usize,
    row_count: Column,
    cached: AtomicU64,
}

impl Table {
    /// A table of given columns and row count, a column of one `u64`. Neither is read.
    ///
    /// # Errors
    /// [`InvalidArgument::Arity`], [`InvalidArgument::FieldType`], [`InvalidArgument::ColumnRows`];
    /// [`InvalidArgument::DType`] or [`InvalidArgument::Length`] for the row count.
    pub fn new(
        schema: Schema,
        columns: Vec<Column>,
        capacity: usize,
        row_count: Column,
    ) -> Result<Table, Error> {
        if columns.len() != schema.arity() {
            return Err(Error::Invalid(InvalidArgument::Arity {
                columns: columns.len(),
                fields: schema.arity(),
            }));
        }
        for (index, (column, field)) in columns.iter().zip(schema.fields()).enumerate() {
            if column.element_type() != field.element {
                return Err(Error::Invalid(InvalidArgument::FieldType {
                    index,
                    expected: field.element,
                    found: column.element_type(),
                }));
            }
            if column.rows() != capacity {
                return Err(Error::Invalid(InvalidArgument::ColumnRows {
                    index,
                    rows: column.rows(),
                    capacity,
                }));
            }
        }
        if row_count.element_type() != ElementType::U64 {
            return Err(Error::Invalid(InvalidArgument::DType {
                expected: ElementType::U64,
                found: row_count.element_type(),
            }));
        }
        if row_count.rows() != 1 {
            return Err(Error::Invalid(InvalidArgument::Length {
                expected: 1,
                found: row_count.rows(),
            }));
        }
        Ok(Table {
            schema,
            columns,
            capacity,
            row_count,
            cached: AtomicU64::new(UNSET),
        })
    }

    /// A table with room for `capacity` rows, of which it has none. Does not wait.
    ///
    /// # Errors
    /// Those of [`Column::zeroed`].
    pub fn with_capacity(
        alloc: &Allocator,
        schema: Schema,
        capacity: usize,
        stream: &Stream,
    ) -> Result<Table, Error> {
        let columns = schema
            .fields()
            .iter()
            .map(|field| Column::uninit(alloc, field.element, capacity, stream))
            .collect::<Result<_, _>>()?;
        let row_count = Column::zeroed(alloc, ElementType::U64, 1, stream)?;
        Table::new(schema, columns, capacity, row_count)
    }

    /// A full table of given columns, all of which have equally many rows: its capacity. Waits for the
    /// row count to be written.
    ///
    /// # Errors
    /// [`ImportFault::UnequalRows`], and as [`new`](Self::new) and [`Column::from_slice`].
    pub fn from_columns(
        alloc: &Allocator,
        schema: Schema,
        columns: Vec<Column>,
        stream: &Stream,
    ) -> Result<Table, Error> {
        let expected = columns.first().map_or(0, Column::rows);
        if let Some(other) = columns.iter().find(|column| column.rows() != expected) {
            return Err(ImportFault::UnequalRows {
                expected,
                actual: other.rows(),
            }
            .into());
        }
        if columns.len() != schema.arity() {
            return Err(Error::Invalid(InvalidArgument::Arity {
                columns: columns.len(),
                fields: schema.arity(),
            }));
        }
        let row_count = Column::from_slice(alloc, &[expected as u64], stream)?;
        let table = Table::new(schema, columns, expected, row_count)?;
        table.set_cached_rows(expected as u64)?;
        Ok(table)
    }

    /// Imports one tensor per field, all with equally many rows.
    ///
    /// # Errors
    /// As [`Column::from_dlpack`] and [`from_columns`](Self::from_columns). All tensors are released.
    pub fn from_dlpack(
        alloc: &Allocator,
        schema: Schema,
        tensors: Vec<DlpackTensor>,
        stream: &Stream,
        producer: &Producer,
    ) -> Result<Table, Error> {
        if tensors.len() != schema.arity() {
            return Err(Error::Invalid(InvalidArgument::Arity {
                columns: tensors.len(),
                fields: schema.arity(),
            }));
        }
        let mut columns = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            columns.push(Column::from_dlpack(tensor, stream, producer.clone())?);
        }
        Table::from_columns(alloc, schema, columns, stream)
    }

    /// Exports the logical rows of every column as legacy tensors. Waits for the row count if the host
    /// does not know it.
    ///
    /// # Errors
    /// As [`rows`](Self::rows) and [`Column::to_dlpack`].
    pub fn to_dlpack(&self, consumer: &Consumer) -> Result<Vec<DlpackTensor>, Error> {
        let rows = self.rows()?;
        self.columns
            .iter()
            .map(|column| column.to_dlpack_rows(rows, consumer))
            .collect()
    }

    /// As [`to_dlpack`](Self::to_dlpack), as versioned tensors.
    ///
    /// # Errors
    /// As [`rows`](Self::rows) and [`Column::to_dlpack_versioned`].
    pub fn to_dlpack_versioned(&self, consumer: &Consumer) -> Result<Vec<DlpackTensor>, Error> {
        let rows = self.rows()?;
        self.columns
            .iter()
            .map(|column| column.to_dlpack_versioned_rows(rows, consumer))
            .collect()
    }

    /// The schema.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The columns, in the schema's order.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The columns, for writing.
    pub fn columns_mut(&mut self) -> &mut [Column] {
        &mut self.columns
    }

    /// The column of a field's name.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.get(self.schema.position(name)?)
    }

    /// The columns, given up.
    pub fn into_columns(self) -> Vec<Column> {
        self.columns
    }

    /// Rows there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether there is no room for a row.
    pub fn is_empty(&self) -> bool {
        self.capacity == 0
    }

    /// Bytes of the columns: the capacity times the bytes of a row, without the row count.
    pub fn byte_len(&self) -> usize {
        self.columns.iter().map(Column::byte_len).sum()
    }

    /// Address of the row count, a `u64`, for reading.
    pub fn row_count_ptr(&self) -> sys::CUdeviceptr {
        self.row_count.ptr()
    }

    /// Address of the row count for writing: the host forgets its copy.
    pub fn row_count_mut_ptr(&mut self) -> sys::CUdeviceptr {
        *self.cached.get_mut() = UNSET;
        self.row_count.ptr()
    }

    /// The row count's memory.
    pub fn row_count(&self) -> &Column {
        &self.row_count
    }

    /// The host's copy of the row count; none if it has none. Makes no driver call.
    pub fn cached_rows(&self) -> Option<usize> {
        match self.cached.load(Ordering::Acquire) {
            UNSET => None,
            // At most the capacity.
            rows => usize::try_from(rows).ok(),
        }
    }

    /// Gives the host its copy of the row count, which must be what the device has or will have. It can
    /// be set once; only [`row_count_mut_ptr`](Self::row_count_mut_ptr) ends it.
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

    /// Logical rows: the host's copy, or else the device's number, for which it waits, and which becomes
    /// the host's copy.
    ///
    /// # Errors
    /// [`InvalidArgument::Rows`] if the device counts more rows than there is room for; as
    /// [`Column::to_vec`].
    pub fn rows(&self) -> Result<usize, Error> {
        if let Some(rows) = self.cached_rows() {
            return Ok(rows);
        }
        // The number may depend on work in the columns' own order.
        for column in &self.columns {
            order(
                column.stream(),
                self.row_count.stream(),
                self.row_count.events(),
            )?;
        }
        let read = self.row_count.to_vec::<u64>()?;
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
