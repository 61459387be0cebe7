//! Tensors and tables in device memory, and their exchange with other libraries.
//!
//! A [`Tensor`] is memory of any [`MemoryResource`](crate::resource::MemoryResource), such as an
//! [`Allocator`](crate::Allocator), or imported memory, with elements of a type known at run time. A [`Table`] consists
//! of one-dimensional tensors, its columns, and a row count stored on the device. Both are exchanged without copies as
//! DLPack tensors ([`Dlpack`], in the legacy and in the versioned form) and, with the feature `arrow`, as Arrow C
//! Device arrays (`ArrowDeviceArray`).
//!
//! # Ordering
//! Every exchange orders the streams involved, unless the other side does so itself, as described by a [`Peer`].
//! Exported memory is reused only when the consumer has released it and its work is complete. Imported memory is
//! released to its producer only when our work is complete, or in stream order.
//!
//! # Identity
//! [`Tensor::id`] identifies the block under a tensor, even after an export and reimport; [`Tensor::is_external`]
//! reports foreign memory.

#[cfg(feature = "arrow")]
mod arrow;
mod capsule;
pub mod dlpack;
mod layout;
mod peer;
mod shared;
mod table;
mod tensor;

pub use crate::dtype::DType;
#[cfg(feature = "arrow")]
pub use arrow::ArrowDeviceArray;
pub use capsule::Dlpack;
pub use peer::Peer;
pub use table::{Schema, Table};
pub use tensor::{Element, Tensor};
