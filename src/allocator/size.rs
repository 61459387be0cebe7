//! Sizes: rounding, limits and segment sizes. Pure functions that need no device.
//!
//! The classic constants are those of PyTorch's caching allocator, so that a program keeps its familiar behaviour.

/// Every block starts at a multiple of this many bytes, and its size is a multiple of it.
pub const GRANULE: u64 = 512;

/// Largest request in bytes, above the size of any device.
pub const MAX_REQUEST: u64 = 1 << 40;

/// Largest alignment of a request in bytes: one granule of physical memory.
pub const MAX_ALIGNMENT: u64 = 2 << 20;

/// Granule of physical memory in bytes; it is the driver's granule on every known device.
pub const PHYSICAL_GRANULE: u64 = 2 << 20;

/// Packed policy: rounded requests up to this many bytes are carved from pages of a stream.
pub const PACKED_SMALL_LIMIT: u64 = 64 << 10;

/// Packed policy: bytes of one page of the small arena.
pub const PAGE: u64 = 64 << 10;

/// Granules of a page.
pub(crate) const PAGE_GRANULES: u32 = (PAGE / GRANULE) as u32;

/// Classic policy: rounded requests up to this many bytes belong to the small pool.
pub const CLASSIC_SMALL_LIMIT: u64 = 1 << 20;

/// Classic policy: bytes of a segment of the small pool.
pub const CLASSIC_SMALL_SEGMENT: u64 = 2 << 20;

/// Classic policy: bytes of a segment for requests between the small and the large border.
pub const CLASSIC_MID_SEGMENT: u64 = 20 << 20;

/// Classic policy: requests from this many bytes on get a segment of their own size.
pub const CLASSIC_LARGE_BORDER: u64 = 10 << 20;

/// Classic policy: segments of large requests are multiples of this many bytes.
pub const CLASSIC_LARGE_ROUNDING: u64 = 2 << 20;

/// Rounds a request up to whole granules: 0 to 512 become 512, 513 becomes 1024.
///
/// `None` above [`MAX_REQUEST`]: such a size is reported as an error before any driver call, and never wraps around.
///
/// ```
/// use cualloc::allocator::size::round_size;
/// assert_eq!(round_size(0), Some(512));
/// assert_eq!(round_size(513), Some(1024));
/// assert_eq!(round_size(usize::MAX), None);
/// ```
#[inline]
pub const fn round_size(bytes: usize) -> Option<u64> {
    let bytes = bytes as u64;
    if bytes > MAX_REQUEST {
        return None;
    }
    if bytes <= GRANULE {
        return Some(GRANULE);
    }
    Some(bytes.next_multiple_of(GRANULE))
}

/// Returns the bytes of the segment that the classic policy obtains from the driver for an unrounded request.
///
/// Up to 1 MiB (rounded): 2 MiB; below 10 MiB: 20 MiB; from there on the request rounded up to
/// 2 MiB. `None` above [`MAX_REQUEST`].
///
/// ```
/// use cualloc::allocator::size::classic_segment_size;
/// assert_eq!(classic_segment_size(1 << 20), Some(2 << 20));
/// assert_eq!(classic_segment_size((1 << 20) + 1), Some(20 << 20));
/// assert_eq!(classic_segment_size((10 << 20) + 1), Some(12 << 20));
/// ```
pub const fn classic_segment_size(bytes: usize) -> Option<u64> {
    match round_size(bytes) {
        None => None,
        Some(rounded) => Some(classic_segment_for(rounded)),
    }
}

/// [`classic_segment_size`] for a size that is already rounded.
pub(crate) const fn classic_segment_for(rounded: u64) -> u64 {
    if rounded <= CLASSIC_SMALL_LIMIT {
        CLASSIC_SMALL_SEGMENT
    } else if rounded < CLASSIC_LARGE_BORDER {
        CLASSIC_MID_SEGMENT
    } else {
        rounded.next_multiple_of(CLASSIC_LARGE_ROUNDING)
    }
}

/// Whether the classic policy splits `remainder` bytes off a block of the given pool: in the small
/// pool from one granule on, in the large pool above 1 MiB.
pub(crate) const fn classic_splits(small: bool, remainder: u64) -> bool {
    if small {
        remainder >= GRANULE
    } else {
        remainder > CLASSIC_SMALL_LIMIT
    }
}

/// Returns the granules that a request takes from a free block of `available` granules by the classic policy: its own
/// size, or all if the remainder is not worth a split.
pub(crate) const fn classic_granules(small: bool, available: u64, wanted: u32) -> u32 {
    let remainder = (available - wanted as u64) * GRANULE;
    if classic_splits(small, remainder) {
        wanted
    } else {
        available as u32
    }
}
