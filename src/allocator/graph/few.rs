//! Lists of mostly one element.

use smallvec::SmallVec;

/// The first element needs no allocation, of which a request in a capture would make several.
pub(crate) type Few<T> = SmallVec<[T; 1]>;
