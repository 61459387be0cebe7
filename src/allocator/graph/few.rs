//! A list that usually has one element.

use smallvec::SmallVec;

/// The first element needs no allocation; a request in a capture would otherwise make several.
pub(crate) type Few<T> = SmallVec<[T; 1]>;
