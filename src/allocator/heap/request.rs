//! Validated requests.

use crate::allocator::cache::stream_cache::Small;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::graph::arena::Fit;
use crate::allocator::request::Request;
use crate::allocator::size::{
    GRANULE, MAX_ALIGNMENT, PACKED_SMALL_LIMIT, PAGE, PHYSICAL_GRANULE, round_size,
};
use crate::error::{Error, InvalidArgument};

/// Granules of the largest small block.
const SMALL_GRANULES: u32 = (PACKED_SMALL_LIMIT / GRANULE) as u32;

// A small block lies in a page.
const _: () = assert!(PACKED_SMALL_LIMIT.is_multiple_of(GRANULE) && PACKED_SMALL_LIMIT <= PAGE);

/// A validated [`Request`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    pub requested: u64,
    granules: u32,
    align: u32,
    /// Whether the block must lie inside one physical handle.
    pub single: bool,
    /// Whether it must take that handle as a whole.
    pub whole: bool,
    /// Whether the block may lie in a view.
    pub views: bool,
}

impl Checked {
    pub(crate) fn new(bytes: usize, alignment: usize) -> Result<Self, Error> {
        if bytes == 0 {
            return Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }));
        }
        let Some(rounded) = round_size(bytes) else {
            return Err(Error::Invalid(InvalidArgument::Size {
                bytes: bytes as u64,
            }));
        };
        if !alignment.is_power_of_two() || alignment as u64 > MAX_ALIGNMENT {
            return Err(Error::Invalid(InvalidArgument::Alignment {
                bytes: alignment as u64,
            }));
        }
        let granules = |bytes: u64| u32::try_from(bytes / GRANULE).unwrap_or(u32::MAX);
        Ok(Checked {
            requested: bytes as u64,
            granules: granules(rounded),
            align: granules((alignment as u64).max(GRANULE)),
            single: false,
            whole: false,
            views: true,
        })
    }

    /// Validates a request.
    pub(crate) fn of(request: &Request) -> Result<Self, Error> {
        let mut checked = Checked::new(request.bytes(), request.alignment())?;
        checked.single = request.single_handle;
        checked.whole = request.whole_handle;
        checked.views = request.views;
        checked.fill_handle();
        Ok(checked)
    }

    /// Returns the request, enlarged by a guard past the requested bytes.
    pub(crate) fn with_guard(&self) -> Result<Self, Error> {
        const LEAST: u64 = 16;
        let bytes = self.requested;
        let rounded = usize::try_from(bytes + LEAST).ok().and_then(round_size);
        let rounded = rounded.ok_or(Error::Invalid(InvalidArgument::Size { bytes }))?;
        let granules = u32::try_from(rounded / GRANULE).unwrap_or(u32::MAX);
        let mut guarded = Checked { granules, ..*self };
        guarded.fill_handle();
        Ok(guarded)
    }

    /// Rounds a request for a whole handle up to the size of one.
    fn fill_handle(&mut self) {
        if self.whole {
            let granule = (PHYSICAL_GRANULE / GRANULE) as u32;
            let granules = self.granules.checked_next_multiple_of(granule);
            self.granules = granules.unwrap_or(u32::MAX);
        }
    }

    /// Whether the block may lie anywhere.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.align == 1 && !self.single && self.views
    }

    /// Returns the request to a graph pool.
    pub(crate) fn fit(&self) -> Fit {
        Fit {
            granules: self.granules,
            align: self.align,
            views: self.views,
        }
    }

    /// Granules of a run that fits the request at any alignment of its start.
    fn span(&self) -> u32 {
        self.granules + self.align - 1
    }

    /// Bytes of such a run.
    pub(crate) fn span_bytes(&self) -> u64 {
        u64::from(self.span()) * GRANULE
    }

    /// Returns the request to a stream cache, if its size allows one.
    #[inline]
    pub(crate) fn small(&self) -> Option<Small> {
        (self.span() <= SMALL_GRANULES).then_some(Small {
            granules: self.granules,
            align: self.align,
            requested: self.requested as u32,
        })
    }

    pub(crate) fn want(&self, space: SpaceId, stream: u32) -> Want {
        Want {
            space,
            stream,
            granules: self.granules,
            align: self.align,
            requested: self.requested,
            single: self.single,
            whole: self.whole,
            views: self.views,
        }
    }
}
