//! Allocation requests: a size, and constraints on where the block lies.

use std::alloc::Layout;
use std::any::TypeId;

use crate::allocator::size;
use crate::block::Tag;
use crate::error::{Error, InvalidArgument};

/// An allocation request: a size, and constraints on where the block lies.
///
/// Without constraints a block begins at a multiple of 512 bytes, may lie in a view, and may use memory that is added
/// for it. Values are validated when the request is used, so building a request cannot fail.
///
/// ```
/// use cualloc::allocator::Request;
///
/// let request = Request::new(1 << 20).align(4096).single_handle();
/// assert_eq!((request.bytes(), request.alignment()), (1 << 20, 4096));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    bytes: usize,
    alignment: usize,
    pub(crate) single_handle: bool,
    pub(crate) whole_handle: bool,
    pub(crate) views: bool,
    pub(crate) cached_only: bool,
    pub(crate) tag: Tag,
    /// The element type of the block, if there is one: a typed pool keeps blocks of different types apart.
    pub(crate) element: Option<Element>,
}

/// An element type with a size of at least one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Element {
    pub id: TypeId,
    pub bytes: usize,
}

impl Request {
    /// Rounding of requests in bytes: sizes are rounded up to a multiple of it, and every block begins at a multiple of
    /// it.
    pub const ROUNDING: usize = size::GRANULE as usize;
    /// The largest valid request, in bytes.
    pub const MAX_BYTES: usize = size::MAX_REQUEST as usize;
    /// The largest valid alignment, in bytes.
    pub const MAX_ALIGNMENT: usize = size::MAX_ALIGNMENT as usize;

    /// Creates a request for `bytes`, which must be at least 1.
    pub const fn new(bytes: usize) -> Self {
        Request {
            bytes,
            alignment: 1,
            single_handle: false,
            whole_handle: false,
            views: true,
            cached_only: false,
            tag: Tag::NONE,
            element: None,
        }
    }

    /// Creates a request for `len` values of a type, at the alignment of the type.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] if the number of bytes overflows.
    pub fn array<T: 'static>(len: usize) -> Result<Self, Error> {
        match len.checked_mul(size_of::<T>()) {
            Some(bytes) => Ok(Request::new(bytes).align(align_of::<T>()).of::<T>()),
            None => Err(Error::Invalid(InvalidArgument::Size { bytes: u64::MAX })),
        }
    }

    /// Places the block at a multiple of `bytes`: a power of two up to [`MAX_ALIGNMENT`](Self::MAX_ALIGNMENT).
    pub const fn align(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Places the block inside one physical handle, so that it can be exported or registered as a unit. Under the
    /// classic policy every block lies in one segment anyway. If no free handle is large enough, a new one is created,
    /// even where two free ones would have sufficed. Graph pools do not support such blocks: a request that a graph
    /// pool would serve fails with [`Error::NotSupported`].
    pub const fn single_handle(mut self) -> Self {
        self.single_handle = true;
        self
    }

    /// Places the block alone in one physical handle, so that an export of the block exposes nothing else
    /// ([`share`](crate::guide::sharing)). The size is rounded up to a multiple of 2 MiB. Otherwise like
    /// [`single_handle`](Self::single_handle).
    pub const fn whole_handle(mut self) -> Self {
        self.whole_handle = true;
        self.single_handle()
    }

    /// Serves the request only from cached memory that the stream may use without a wait: the allocator obtains no
    /// memory from the driver, waits for nothing and releases nothing.
    pub const fn cached_only(mut self) -> Self {
        self.cached_only = true;
        self
    }

    /// Sets whether the block may lie in a view; the default is yes. [`Config::views`](crate::allocator::Config::views)
    /// states the limits of views.
    pub const fn views(mut self, on: bool) -> Self {
        self.views = on;
        self
    }

    /// Sets the block's label for logs and statistics.
    pub fn tag(mut self, tag: impl Into<Tag>) -> Self {
        self.tag = tag.into();
        self
    }

    /// Sets the element type of the block.
    pub(crate) fn of<T: 'static>(mut self) -> Self {
        self.element = (size_of::<T>() > 0).then(|| Element {
            id: TypeId::of::<T>(),
            bytes: size_of::<T>(),
        });
        self
    }

    /// Returns the same constraints with another size.
    pub(crate) fn resized(&self, bytes: usize) -> Self {
        Request { bytes, ..*self }
    }

    /// Requested bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Requested alignment in bytes; 1 if none was requested.
    pub const fn alignment(&self) -> usize {
        self.alignment
    }

    /// Returns the size of a block for a request of `bytes`: the next multiple of [`ROUNDING`](Self::ROUNDING), and at
    /// least one of them. `None` above [`MAX_BYTES`](Self::MAX_BYTES).
    pub const fn round(bytes: usize) -> Option<usize> {
        match size::round_size(bytes) {
            Some(rounded) => Some(rounded as usize),
            None => None,
        }
    }

    /// Whether the request has no constraint on where the block lies.
    #[inline]
    pub(crate) const fn is_plain(&self) -> bool {
        self.alignment <= Self::ROUNDING && !self.single_handle && self.views
    }
}

impl From<Layout> for Request {
    fn from(layout: Layout) -> Self {
        Request::new(layout.size()).align(layout.align())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_values_has_their_size_and_alignment() -> Result<(), Error> {
        let request = Request::array::<u64>(3)?;
        assert_eq!((request.bytes(), request.alignment()), (24, 8));
        let layout = Request::from(Layout::new::<[u64; 3]>());
        assert_eq!((layout.bytes(), layout.alignment()), (24, 8));
        let too_many = Request::array::<u64>(usize::MAX / 4);
        assert!(matches!(
            too_many,
            Err(Error::Invalid(InvalidArgument::Size { .. }))
        ));
        Ok(())
    }

    #[test]
    fn bytes_are_rounded_up_and_none_are_some() {
        assert_eq!(Request::round(0), Some(Request::ROUNDING));
        assert_eq!(Request::round(513), Some(1024));
        assert_eq!(Request::round(Request::MAX_BYTES), Some(Request::MAX_BYTES));
        assert_eq!(Request::round(Request::MAX_BYTES + 1), None);
    }
}
