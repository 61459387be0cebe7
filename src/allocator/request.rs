//! What a program asks for: so many bytes, and wishes about where they lie.

use std::alloc::Layout;
use std::any::TypeId;

use crate::allocator::size;
use crate::block::Tag;
use crate::error::{Error, InvalidArgument};

/// What is asked for: a number of bytes, with wishes.
///
/// Without wishes a block begins at a multiple of 512 bytes, may lie in a view, and may be made for the
/// request. Numbers are checked when the request is used, so building one cannot fail.
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
    pub(crate) views: bool,
    pub(crate) cached_only: bool,
    pub(crate) tag: Tag,
    /// What lies in the block, if that was said: a typed pool keeps blocks apart by it.
    pub(crate) element: Option<Element>,
}

/// A type of elements, of which each has at least one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Element {
    pub id: TypeId,
    pub bytes: usize,
}

impl Request {
    /// Every request is rounded up to a multiple of so many bytes, and every block begins at one.
    pub const ROUNDING: usize = size::GRANULE as usize;
    /// The largest request that is valid, in bytes.
    pub const MAX_BYTES: usize = size::MAX_REQUEST as usize;
    /// The largest alignment that can be asked for, in bytes.
    pub const MAX_ALIGNMENT: usize = size::MAX_ALIGNMENT as usize;

    /// Asks for `bytes`, which must be at least 1.
    pub const fn new(bytes: usize) -> Self {
        Request {
            bytes,
            alignment: 1,
            single_handle: false,
            views: true,
            cached_only: false,
            tag: Tag::NONE,
            element: None,
        }
    }

    /// Asks for room for `len` values of a type, at its alignment.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`] if there is no number for so many bytes.
    pub fn array<T: 'static>(len: usize) -> Result<Self, Error> {
        match len.checked_mul(size_of::<T>()) {
            Some(bytes) => Ok(Request::new(bytes).align(align_of::<T>()).of::<T>()),
            None => Err(Error::Invalid(InvalidArgument::Size { bytes: u64::MAX })),
        }
    }

    /// The block begins at a multiple of `bytes`: a power of two up to [`MAX_ALIGNMENT`](Self::MAX_ALIGNMENT).
    pub const fn align(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// The block lies inside one physical handle, so that it can be exported or registered as one.
    /// Under the classic policy every block lies in one segment anyway. A block for which no free
    /// handle is large enough costs a new one, where two would have done. Graph pools have no such blocks: where one of
    /// them would serve the request, that is [`Error::NotSupported`].
    pub const fn single_handle(mut self) -> Self {
        self.single_handle = true;
        self
    }

    /// The block comes from cached memory which the stream may use without a wait, or not at all: the driver
    /// is not asked for memory, nothing is waited for, and nothing is given back.
    pub const fn cached_only(mut self) -> Self {
        self.cached_only = true;
        self
    }

    /// Whether the block may lie in a view; it may unless this says no. See
    /// [`Config::views`](crate::allocator::Config::views) for what views do not promise.
    pub const fn views(mut self, on: bool) -> Self {
        self.views = on;
        self
    }

    /// The block has a label, for logs and figures.
    pub fn tag(mut self, tag: impl Into<Tag>) -> Self {
        self.tag = tag.into();
        self
    }

    /// The block is for elements of a type.
    pub(crate) fn of<T: 'static>(mut self) -> Self {
        self.element = (size_of::<T>() > 0).then(|| Element {
            id: TypeId::of::<T>(),
            bytes: size_of::<T>(),
        });
        self
    }

    /// The same wishes for another number of bytes.
    pub(crate) fn resized(&self, bytes: usize) -> Self {
        Request { bytes, ..*self }
    }

    /// Bytes asked for.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The alignment asked for, in bytes: 1 without a wish.
    pub const fn alignment(&self) -> usize {
        self.alignment
    }

    /// The bytes that a block for so many has: the next multiple of [`ROUNDING`](Self::ROUNDING), which for
    /// none is one of them. `None` above [`MAX_BYTES`](Self::MAX_BYTES).
    pub const fn round(bytes: usize) -> Option<usize> {
        match size::round_size(bytes) {
            Some(rounded) => Some(rounded as usize),
            None => None,
        }
    }

    /// Whether nothing is asked about where the block lies.
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
