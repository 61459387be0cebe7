//! Columns and tables in device memory, and their exchange with other libraries.
//!
//! A [`Column`] is memory of the [`Allocator`](crate::Allocator) or of any
//! [`MemoryResource`](crate::resource::MemoryResource), or was imported from somebody else; a
//! [`Table`] is columns with a row count that lives on the device. Columns go out and come in as DLPack
//! tensors ([`DlpackTensor`], of the legacy and of the versioned form) and, with the feature `arrow`, as
//! Arrow C Device arrays (`ArrowDeviceArray`), without a copy.
//!
//! # Who may use what when
//! Every exchange orders the streams that take part, or the other side says that it does so itself:
//! [`Consumer`] for exports, [`Producer`] for imports. Memory that went out is reused only when the
//! consumer has released it and its work is done; memory that came in is released to its producer only
//! when our work is done, or in its order.
//!
//! # Identity
//! [`Column::block`] names the block under a column, also when the column went out and came
//! back through an export; [`Column::is_external`] says that the memory is somebody else's.

#[cfg(feature = "arrow")]
mod arrow;
mod columns;
mod contents;
mod described;
mod dlpack;
mod memory;
mod order;
mod table;

pub use crate::element::{Element, ElementType};
#[cfg(feature = "arrow")]
pub use arrow::{ArrowDeviceArray, ArrowParts, FFI_ArrowArray, FFI_ArrowSchema};
pub use columns::Column;
pub use dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_READ_ONLY,
    DLPACK_VERSION, DLPackVersion, DLTensor, DlpackTensor, RawDlpack,
};
pub use memory::ColumnSource;
pub use order::{Consumer, Producer};
pub use table::{Field, Schema, Table};
