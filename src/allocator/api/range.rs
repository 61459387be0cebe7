//! The public type of growable ranges.

use std::fmt;
use std::ops::Range as Span;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::allocator::api::Allocator;
use crate::allocator::engine::naming::Named;
use crate::allocator::range::{Layout, State, run};
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::block::Tag;
use crate::driver::{Stream, sys};
use crate::error::{Error, InvalidArgument};

/// The largest granule.
const GRANULE_MAX: u64 = 64 << 20;

/// Options of [`Allocator::reserve_range`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RangeOptions {
    /// Bytes that are committed together: a power of two from 2 MiB to 64 MiB; 0 means 2 MiB.
    pub granule: u64,
    /// Number of equal parts that are committed together; 0 means 1.
    pub stripes: u64,
    /// Bytes from the start of one stripe to that of the next, in whole granules; 0 for stripes without a gap.
    pub stripe_stride: u64,
    /// The tag by which the range is suspended together with other memory, and named in out-of-memory reports.
    pub tag: Tag,
}

impl Default for RangeOptions {
    fn default() -> Self {
        RangeOptions {
            granule: 0,
            stripes: 0,
            stripe_stride: 0,
            tag: Tag::NONE,
        }
    }
}

impl RangeOptions {
    /// Returns options for one stripe with granules of 2 MiB, without a tag.
    pub fn new() -> RangeOptions {
        RangeOptions::default()
    }

    /// Sets the granule in bytes.
    pub fn granule(mut self, bytes: u64) -> Self {
        self.granule = bytes;
        self
    }

    /// Sets the number of stripes, and the distance of their starts in bytes.
    pub fn stripes(mut self, count: u64, stride: u64) -> Self {
        (self.stripes, self.stripe_stride) = (count, stride);
        self
    }

    /// Sets the tag.
    pub fn tag(mut self, tag: impl Into<Tag>) -> Self {
        self.tag = tag.into();
        self
    }

    /// Returns the layout of a range, at address 0.
    fn layout(&self, bytes: u64) -> Result<Layout, Error> {
        let invalid = |what, value| Err(InvalidArgument::Setting { what, value }.into());
        let granule = match self.granule {
            0 => PHYSICAL_GRANULE,
            bytes => bytes,
        };
        if !granule.is_power_of_two() || !(PHYSICAL_GRANULE..=GRANULE_MAX).contains(&granule) {
            return invalid("granule", granule);
        }
        let rounded = bytes
            .checked_next_multiple_of(granule)
            .filter(|bytes| *bytes > 0);
        let Some(bytes) = rounded else {
            return Err(InvalidArgument::Size { bytes }.into());
        };
        let stripes = self.stripes.max(1);
        let stride = match self.stripe_stride {
            0 => bytes,
            stride => stride,
        };
        if stripes > 1 && (stride < bytes || !stride.is_multiple_of(granule)) {
            return invalid("stripe_stride", stride);
        }
        let stride = if stripes > 1 { stride } else { bytes };
        match stride.checked_mul(stripes).filter(|span| *span < 1 << 47) {
            Some(_) => Ok(Layout {
                base: 0,
                bytes,
                stripes,
                stride,
                granule,
            }),
            None => invalid("stripes", stripes),
        }
    }
}

/// Sizes of a [`Range`], in bytes over all stripes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RangeStats {
    /// Bytes of reserved addresses with memory or without; gaps between stripes do not count.
    pub reserved: u64,
    /// Bytes of committed memory.
    pub committed: u64,
    /// Bytes of memory that was decommitted and has not left the range.
    pub leaving: u64,
    /// Bytes of a granule in one stripe.
    pub granule: u64,
}

/// Reserved addresses in which memory is committed and decommitted in stream order: memory that grows in place, such as a
/// key-value cache. The guide's page on ranges explains it.
///
/// Offsets count the bytes of one stripe. All methods may be called from any thread. Dropping the range decommits its
/// memory behind the work of the streams that its commits and [`record`](Self::record) named; its addresses are free once
/// that work is complete. A [`SegmentHook`](crate::allocator::SegmentHook) must not commit: the call would wait for the
/// one that runs the hook.
///
#[cfg_attr(feature = "sim", doc = "```")]
#[cfg_attr(not(feature = "sim"), doc = "```ignore")]
/// use cualloc::allocator::{Allocator, Config, Policy, RangeOptions};
/// use cualloc::driver::Context;
/// use cualloc::sim::{SimConfig, Simulator};
///
/// # fn main() -> cualloc::Result {
/// let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// let context = Context::primary(&sim.driver()?.device(0)?)?;
/// let allocator = Allocator::with_config(&context, Config::new().policy(Policy::Packed))?;
/// let stream = allocator.create_stream()?;
///
/// let cache = allocator.reserve_range(64 << 30, RangeOptions::new().granule(32 << 20))?;
/// cache.commit(0..128 << 20, &stream)?;
/// // Kernels on the stream use the first 128 MiB from `cache.base()` on.
/// cache.decommit(64 << 20..128 << 20, &stream)?;
/// assert_eq!(cache.stats()?.committed, 64 << 20);
/// cache.close(&stream)?;
/// # Ok(())
/// # }
/// ```
pub struct Range {
    allocator: Allocator,
    id: u64,
    layout: Layout,
    /// Whether it was ended.
    closed: AtomicBool,
}

impl Allocator {
    /// Reserves addresses for at least `bytes` per stripe, without memory. Memory that is committed there counts towards
    /// the limit. The allocator cannot be closed while the range exists.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::OutOfMemory`] if the driver refuses the addresses, whose size it names;
    /// [`Error::NotSupported`] under the classic policy; [`Error::Closed`], driver errors.
    pub fn reserve_range(&self, bytes: u64, options: RangeOptions) -> Result<Range, Error> {
        let layout = options.layout(bytes)?;
        let (id, layout) = run::reserve(self.engine(), layout, options.tag)?;
        Ok(Range {
            allocator: self.clone(),
            id,
            layout,
            closed: AtomicBool::new(false),
        })
    }
}

impl Range {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Returns the first address.
    pub fn base(&self) -> sys::CUdeviceptr {
        self.layout.base
    }

    /// Returns the bytes of a stripe, in whole granules.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes
    }

    /// Gives memory to all granules that overlap a range of bytes. The contents of new memory are undefined. Granules
    /// with memory stay as they are. The memory may be used on `stream` from here on, and on streams ordered after it.
    ///
    /// Idle memory of the allocator in handles of the granule's size is used first; the rest is created. If there is too
    /// little, the call makes room like a request of the allocator, except on a capturing stream, where it waits for
    /// nothing and calls no hook. If a granule was decommitted and may still be in use, the stream waits for that use on
    /// the device, because the address allows no other memory.
    ///
    /// # Errors
    /// On an error no granule has changed: [`Error::OutOfMemory`], whose
    /// [`requested`](crate::error::OutOfMemory::requested) and [`missing`](crate::error::OutOfMemory::missing) name the
    /// bytes to be created and those that are short; [`Error::Invalid`], [`Error::Suspended`], [`Error::WrongDevice`],
    /// [`Error::Closed`], driver errors.
    pub fn commit(&self, bytes: Span<u64>, stream: &Stream) -> Result<(), Error> {
        let engine = self.allocator.engine();
        run::commit(engine, self.id, &bytes, Some(&engine.named(stream)?))
    }

    /// [`commit`](Self::commit), by the stream's handle.
    ///
    /// # Errors
    /// As [`commit`](Self::commit), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// As for [`Allocator::mark_raw`]; the stream is retired before it is destroyed.
    pub unsafe fn commit_raw(&self, bytes: Span<u64>, stream: sys::CUstream) -> Result<(), Error> {
        let engine = self.allocator.engine();
        // SAFETY: the caller's contract.
        match unsafe { engine.named_raw(stream) } {
            Ok(named) => run::commit(engine, self.id, &bytes, Some(&named)),
            // Drivers do not identify a capturing stream.
            Err(Error::Capturing { .. }) => run::commit(engine, self.id, &bytes, None),
            Err(error) => Err(error),
        }
    }

    /// Removes the memory of all granules that lie inside a range of bytes. It serves other requests once the work
    /// submitted to `stream` so far is complete, and that of the streams [recorded](Self::record) for the granules. The
    /// memory must not be used any more, not even by a captured graph: a range has no lease of graphs.
    ///
    /// With the debug mode [`quarantine`](crate::allocator::DebugModes::quarantine) the call waits on the host for that
    /// work and unmaps the memory, so that a later use is a fault.
    ///
    /// # Errors
    /// [`Error::Capturing`] while the stream is capturing, [`Error::Suspended`], [`Error::Invalid`], [`Error::Closed`],
    /// driver errors.
    pub fn decommit(&self, bytes: Span<u64>, stream: &Stream) -> Result<(), Error> {
        self.decommit_named(&bytes, &self.allocator.engine().named(stream)?)
    }

    /// [`decommit`](Self::decommit), by the stream's handle.
    ///
    /// # Errors
    /// As [`decommit`](Self::decommit), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// As for [`commit_raw`](Self::commit_raw).
    pub unsafe fn decommit_raw(
        &self,
        bytes: Span<u64>,
        stream: sys::CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        self.decommit_named(&bytes, &unsafe {
            self.allocator.engine().named_raw(stream)
        }?)
    }

    fn decommit_named(&self, bytes: &Span<u64>, named: &Named<'_>) -> Result<(), Error> {
        run::decommit(self.allocator.engine(), self.id, bytes, named)
    }

    /// Records that another stream uses the granules that overlap a range of bytes: their next decommit covers all work
    /// submitted to it until then.
    ///
    /// # Errors
    /// As [`decommit`](Self::decommit).
    pub fn record(&self, bytes: Span<u64>, stream: &Stream) -> Result<(), Error> {
        let engine = self.allocator.engine();
        run::record(engine, self.id, &bytes, &engine.named(stream)?)
    }

    /// [`record`](Self::record), by the stream's handle.
    ///
    /// # Errors
    /// As [`record`](Self::record), and [`Error::WrongContext`].
    ///
    /// # Safety
    /// As for [`commit_raw`](Self::commit_raw).
    pub unsafe fn record_raw(&self, bytes: Span<u64>, stream: sys::CUstream) -> Result<(), Error> {
        let engine = self.allocator.engine();
        // SAFETY: the caller's contract.
        run::record(engine, self.id, &bytes, &unsafe {
            engine.named_raw(stream)
        }?)
    }

    /// Returns the sizes.
    ///
    /// # Errors
    /// [`Error::Closed`], a lost context.
    pub fn stats(&self) -> Result<RangeStats, Error> {
        let mut heap = self.allocator.engine().open()?;
        let range = heap.ranges.live(self.id)?;
        Ok(RangeStats {
            reserved: self.layout.bytes * self.layout.stripes,
            committed: range.bytes(State::Committed),
            leaving: range.bytes(State::Leaving),
            granule: self.layout.granule,
        })
    }

    /// Returns for each granule of a stripe whether it is committed, 64 in a word, the first in the lowest bit.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn committed_map(&self) -> Result<Vec<u64>, Error> {
        let granules = self.layout.bytes / self.layout.granule;
        let mut map = vec![0; granules.div_ceil(64) as usize];
        let mut heap = self.allocator.engine().open()?;
        let range = heap.ranges.live(self.id)?;
        for (index, _) in range
            .granules()
            .filter(|(_, g)| g.state == State::Committed)
        {
            map[index as usize / 64] |= 1 << (index % 64);
        }
        Ok(map)
    }

    /// Ends the range: decommits all its memory, as [`decommit`](Self::decommit) does, and frees its addresses once the
    /// memory has left the range. On an error the range is dropped.
    ///
    /// # Errors
    /// As [`decommit`](Self::decommit).
    pub fn close(self, stream: &Stream) -> Result<(), Error> {
        let named = self.allocator.engine().named(stream)?;
        self.end(Some(&named))
    }

    /// Ends the range as [`close`](Self::close) does, by the stream's handle. After an error the range remains open.
    ///
    /// # Errors
    /// As [`decommit_raw`](Self::decommit_raw).
    ///
    /// # Safety
    /// As for [`commit_raw`](Self::commit_raw).
    pub unsafe fn close_raw(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let named = unsafe { self.allocator.engine().named_raw(stream) }?;
        self.end(Some(&named))
    }

    fn end(&self, named: Option<&Named<'_>>) -> Result<(), Error> {
        run::destroy(self.allocator.engine(), self.id, named)?;
        self.closed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if !self.closed.load(Ordering::Relaxed) {
            // Fails if nothing can be released any more; the memory that is left returns with the allocator.
            let _ended = self.end(None);
        }
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Range")
            .field("base", &self.layout.base)
            .field("stats", &self.stats().ok())
            .finish_non_exhaustive()
    }
}
