//! The trait that all sources of memory and all adaptors share.

use std::sync::Arc;

use crate::allocator::{Allocator, Request, Trimmed};
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream};
use crate::error::{Error, Refused, StreamMisuse};

use super::block::{Access, RawBlock};
use super::usage::Usage;

/// What a resource tracks of the use of its blocks on other streams than their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UseTracking {
    /// Nothing: no use is accepted.
    None,
    /// [`record_use`](MemoryResource::record_use) delays reuse; the order of reads and writes is the caller's.
    Reuse,
    /// Also [`prepare_use`](MemoryResource::prepare_use) and [`finish_use`](MemoryResource::finish_use) put reads and
    /// writes of several streams in order.
    Access,
}

/// A source of device memory, or an adaptor over one.
///
/// Generic code over `R: MemoryResource` is compiled for its stack and has no indirect call;
/// `Arc<dyn MemoryResource>` is a resource too, where a stack is chosen at run time.
///
/// All calls may come from any thread. Of all resources memory belongs to the order of the stream that it was
/// allocated on, and a deallocated block is not handed out to work that could overlap with work queued before the
/// deallocation.
///
/// ```
/// use cualloc::{Request, resource::MemoryResource};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// // The allocator is a resource: the caching one.
/// let block = MemoryResource::allocate_block(&allocator, &Request::new(1000).tag("weights"), &stream)?;
/// assert_eq!((block.id().bytes(), block.tag().as_str()), (1000, "weights"));
/// allocator.deallocate_block(block)?;
///
/// // And so are the pools: a program can swap one for another and compare.
/// use cualloc::{DeviceBuffer, Error, driver::Stream, pool::{DriverPool, DriverPoolConfig}};
/// use std::sync::Arc;
/// fn work(source: Arc<dyn MemoryResource>, stream: &Stream) -> Result<u64, Error> {
///     drop(DeviceBuffer::<u8>::uninit(&source, 1 << 20, stream)?);
///     Ok(source.usage()?.used.peak)
/// }
/// let native = DriverPool::new(&context, DriverPoolConfig::new())?;
/// assert_eq!(work(Arc::new(allocator), &stream)?, work(Arc::new(native), &stream)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// Safe code relies on it: buffers and tensors write to the blocks of a resource and give them back. An
/// implementation hands out memory of at least the requested bytes, in the order of the requested stream, to one owner
/// at a time, under an identity that is never used again, and takes back only blocks that it handed out. Memory is
/// handed out again only behind, or after the end of, the uses that [`record_use`](Self::record_use),
/// [`record_stream`](Self::record_stream) or [`finish_use`](Self::finish_use) recorded, and the work queued on the
/// block's own stream before [`deallocate_block`](Self::deallocate_block); where
/// [`use_tracking`](Self::use_tracking) is [`UseTracking::None`], all work of the [`context`](Self::context), or without
/// one of the context of the block's stream. An adaptor passes calls on to its [`upstream`](Self::upstream), from which
/// its blocks come, with the same stream, and blocks unchanged.
///
/// A source implements [`context`](Self::context) or [`ordinal`](Self::ordinal), [`usage`](Self::usage),
/// [`state`](Self::state), and the methods for uses where it tracks them. An adaptor names its upstream, which answers
/// every method that the adaptor does not implement.
///
/// ```compile_fail,E0200
/// # use cualloc::{Request, driver::Stream, resource::*};
/// struct Mine;
/// impl MemoryResource for Mine {
/// #   fn allocate_block(&self, _: &Request, _: &Stream) -> cualloc::Result<RawBlock> { todo!() }
/// #   fn deallocate_block(&self, _: RawBlock) -> Result<(), cualloc::Refused<RawBlock>> { todo!() }
/// #   fn ordinal(&self) -> usize { todo!() }
///     // ...
/// }
/// ```
pub unsafe trait MemoryResource: Send + Sync {
    /// Allocates what a request asks for (at least 1 byte) for use on a stream.
    ///
    /// # Errors
    /// Any of [`Error`]; nothing has changed then.
    fn allocate_block(&self, request: &Request, on: &Stream) -> Result<RawBlock, Error>;

    /// Takes a block back.
    ///
    /// # Errors
    /// The block, still allocated, with the reason.
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>>;

    /// Takes a block back if that needs neither a driver call nor the end of a stream's work. If not it is false, and
    /// nothing has changed except where the block is entered.
    #[doc(hidden)]
    #[inline]
    fn try_take_back(&self, _block: &mut RawBlock) -> bool {
        false
    }

    /// The ordinal of the device.
    #[inline]
    fn ordinal(&self) -> usize {
        match self.upstream() {
            Some(below) => below.ordinal(),
            None => self.context().map_or(0, |home| home.device().ordinal()),
        }
    }

    /// The resource that an adaptor's blocks come from, which answers every call that the adaptor does not
    /// answer itself; none for a source of memory.
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        None
    }

    /// The context that the memory belongs to; none where it is that of each block's stream.
    fn context(&self) -> Option<&Context> {
        self.upstream()?.context()
    }

    /// A number that no other source of memory in the process has, the [`source`](BlockId::source) of its blocks; 0
    /// of a source that has none. An adaptor has that of its upstream.
    fn id(&self) -> u64 {
        self.upstream().map_or(0, MemoryResource::id)
    }

    /// Memory held from the driver and handed out, of everything under the resource, also where others share that.
    /// The default of a source is nothing.
    ///
    /// # Errors
    /// Driver errors.
    fn usage(&self) -> Result<Usage, Error> {
        self.upstream()
            .map_or_else(|| Ok(Usage::default()), MemoryResource::usage)
    }

    /// Bytes that every budget below still has room for; none if there is no budget. More may fit once pending
    /// bytes were [reaped](Self::reap), and less where the device is short of memory.
    #[doc(hidden)]
    fn headroom(&self) -> Option<u64> {
        self.upstream()?.headroom()
    }

    /// Waits for the streams that deallocated blocks are pending on, and returns how many bytes left. May block the
    /// calling thread, and no other one.
    ///
    /// # Errors
    /// Driver errors: what could not be seen complete stays pending, for the next call.
    fn reap(&self) -> Result<u64, Error> {
        self.upstream().map_or(Ok(0), MemoryResource::reap)
    }

    /// Gives memory that is cached and unused back to the driver until at most `keep` bytes are
    /// held, as [`Allocator::trim`](crate::Allocator::trim) does.
    ///
    /// # Errors
    /// Driver errors.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        self.upstream()
            .map_or_else(|| Ok(Trimmed::default()), |below| below.trim(keep))
    }

    /// Sets the peaks of [`usage`](Self::usage) to the current values.
    fn reset_peak_stats(&self) {
        if let Some(below) = self.upstream() {
            below.reset_peak_stats();
        }
    }

    /// Sets the sums of [`usage`](Self::usage) since the start to 0.
    fn reset_accumulated_stats(&self) {
        if let Some(below) = self.upstream() {
            below.reset_accumulated_stats();
        }
    }

    /// Where a block is in its life. The default of a source knows no block.
    fn state(&self, id: &BlockId) -> BlockState {
        self.upstream()
            .map_or(BlockState::Free, |below| below.state(id))
    }

    /// What is known about uses on other streams.
    fn use_tracking(&self) -> UseTracking {
        self.upstream()
            .map_or(UseTracking::None, MemoryResource::use_tracking)
    }

    /// Records that work already queued on `stream` uses the block, and none later does.
    ///
    /// # Errors
    /// [`StreamMisuse::NotTracked`] where uses are not tracked; [`Error::UseAfterFree`].
    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_use(id, stream),
            None => Err(not_tracked("a use", stream)),
        }
    }

    /// Records that `stream` uses the block until it is deallocated: the memory is reused only after, or behind, all
    /// work that is queued on the stream until then.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_stream(id, stream),
            None => Err(not_tracked("a stream", stream)),
        }
    }

    /// Queues the waits that later work on `stream` needs before it accesses the block. The default of a source that
    /// tracks [`UseTracking::Reuse`] does nothing on the block's own stream, and refuses others, whose order is the
    /// caller's.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn prepare_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        if let Some(below) = self.upstream() {
            return below.prepare_use(id, stream, access);
        }
        if self.use_tracking() != UseTracking::None {
            if self.state(id) != BlockState::Live {
                return Err(id.gone());
            }
            if stream.own_id() == id.stream_id() {
                return Ok(());
            }
        }
        Err(not_tracked("preparing a use", stream))
    }

    /// Records that the work which [`prepare_use`](Self::prepare_use) was called for is queued on `stream`. The default
    /// of a source is [`record_use`](Self::record_use).
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use). After a driver error the block counts as used by all work that is queued on
    /// `stream` until the block is needed next. That takes no further driver call under [`UseTracking::Access`], and on
    /// the block's own stream. Under [`UseTracking::Reuse`] another stream is recorded as
    /// [`record_stream`](Self::record_stream) does; if that fails too, the use counts only once it is recorded.
    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.finish_use(id, stream, access),
            None => {
                let recorded = self.record_use(id, stream);
                if must_last(&recorded) {
                    // The first error is the one that is returned.
                    let _ = self.record_stream(id, stream);
                }
                recorded
            }
        }
    }

    /// The resource as an allocator, if it is one: owners of memory call it directly then.
    #[doc(hidden)]
    #[inline]
    fn as_allocator(&self) -> Option<&Allocator> {
        None
    }

    /// The allocator that the resource's blocks come from, if they come from one.
    #[doc(hidden)]
    #[inline]
    fn allocator_under(&self) -> Option<&Allocator> {
        match self.as_allocator() {
            Some(allocator) => Some(allocator),
            None => self.upstream()?.allocator_under(),
        }
    }

    /// Whether the stream of a block was retired, or is about to be, so that the allocator which the block comes from
    /// takes its last marker for the end of all its work: later work on it must be recorded before the block is freed.
    #[doc(hidden)]
    #[inline]
    fn has_retired_stream(&self, block: &RawBlock) -> bool {
        self.upstream()
            .is_some_and(|below| below.has_retired_stream(block))
    }

    /// The resource, for owners of its blocks to keep.
    #[doc(hidden)]
    fn shared(&self) -> Arc<dyn MemoryResource>
    where
        Self: Sized + Clone + 'static,
    {
        Arc::new(self.clone())
    }
}

/// What typed owners take memory from: any resource of which a handle can be kept. An
/// [`Allocator`](crate::Allocator), a pool, an [`Arc`] of a stack.
pub trait Source: MemoryResource + Clone + 'static {}

impl<R: MemoryResource + Clone + 'static> Source for R {}

/// Whether the driver refused to mark the end of work that is queued already: its stream counts until the block is
/// freed.
pub(crate) fn must_last(recorded: &Result<(), Error>) -> bool {
    matches!(recorded, Err(error) if error.driver_error().is_some())
}

fn not_tracked(asked: &'static str, stream: &Stream) -> Error {
    let stream = stream.own_id();
    StreamMisuse::NotTracked { asked, stream }.into()
}

/// Implements [`MemoryResource`] for handles to a resource, and for the owners of its blocks to keep what is given.
macro_rules! forward {
    ($([$($generics:tt)*] $handle:ty, $self:ident => $target:expr $(, $shared:expr)?;)*) => {$(
        // SAFETY: passes everything on.
        unsafe impl $($generics)* MemoryResource for $handle {
            #[inline]
            fn allocate_block(&$self, request: &Request, on: &Stream) -> Result<RawBlock, Error> {
                $target.allocate_block(request, on)
            }
            #[inline]
            fn deallocate_block(&$self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
                $target.deallocate_block(block)
            }
            #[inline]
            fn try_take_back(&$self, block: &mut RawBlock) -> bool {
                $target.try_take_back(block)
            }
            #[inline]
            fn upstream(&$self) -> Option<&dyn MemoryResource> {
                Some(&$target)
            }
            #[inline]
            fn as_allocator(&$self) -> Option<&Allocator> {
                $target.as_allocator()
            }
            #[inline]
            fn allocator_under(&$self) -> Option<&Allocator> {
                $target.allocator_under()
            }
            $(
                #[inline]
                fn shared(&$self) -> Arc<dyn MemoryResource>
                where
                    Self: Sized + Clone + 'static,
                {
                    $shared
                }
            )?
        }
    )*};
}
pub(crate) use forward;

forward! {
    [<R: MemoryResource>] &R, self => (**self);
    [<R: MemoryResource>] Arc<R>, self => (**self), Arc::<R>::clone(self);
    [<R: MemoryResource>] Box<R>, self => (**self);
    [] &dyn MemoryResource, self => (**self);
    [] Arc<dyn MemoryResource>, self => (**self), Arc::clone(self);
    [] Box<dyn MemoryResource>, self => (**self);
}
