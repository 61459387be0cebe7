//! Tensors and tables in device memory, and their exchange with other libraries.
//!
//! A [`Tensor`] is memory of any [`MemoryResource`](crate::resource::MemoryResource), an
//! [`Allocator`](crate::Allocator) for one, or was imported from somebody else; its elements are of a type
//! known at run time. A [`Table`] is tensors of one dimension, its columns, with a row count that lives on
//! the device. They go out and come in as DLPack tensors ([`Dlpack`], of the legacy and of the versioned
//! form) and, with the feature `arrow`, as Arrow C Device arrays (`ArrowDeviceArray`), without a copy.
//!
//! # Who may use what when
//! Every exchange orders the streams that take part, or the other side says that it does so itself: what it
//! says is a [`Peer`]. Memory that went out is reused only when the consumer has released it and its work is
//! done; memory that came in is released to its producer only when our work is done, or in its order.
//!
//! # Identity
//! [`Tensor::id`] names the block under a tensor, also when the tensor went out and came back through an
//! export; [`Tensor::is_external`] says that the memory is somebody else's.

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
