//! The trait that all sources of memory and all adaptors share.

use std::sync::Arc;

use crate::allocator::{Allocator, Request, Trimmed};
use crate::block::{Access, BlockId, BlockState};
use crate::driver::{Context, Stream};
use crate::error::{Error, Refused, StreamMisuse};

use super::block::RawBlock;
use super::usage::Usage;

/// How a resource tracks the use of its blocks on streams other than their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UseTracking {
    /// No use is accepted.
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
/// All calls may come from any thread. Memory is in the order of the stream that it was allocated on, and a deallocated
/// block is not handed out to work that could overlap with work queued before the deallocation.
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
/// // So are the pools, which can be swapped for each other.
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
/// Safe code such as buffers writes to the blocks of a resource. An implementation hands out at least the requested
/// bytes, in the order of the requested stream, to one owner at a time, under an identity that is never reused, and
/// takes back only its own blocks. Memory is handed out again only ordered after the recorded uses
/// ([`record_use`](Self::record_use), [`record_stream`](Self::record_stream), [`finish_use`](Self::finish_use)) and the
/// work queued on the block's own stream before [`deallocate_block`](Self::deallocate_block); with
/// [`UseTracking::None`], after all work of the [`context`](Self::context), or else of the context of the block's
/// stream. An adaptor passes calls on to its [`upstream`](Self::upstream), with stream and blocks unchanged.
///
/// A source implements [`context`](Self::context) or [`ordinal`](Self::ordinal), [`usage`](Self::usage),
/// [`state`](Self::state), and the methods for uses if it tracks them. For an adaptor, the methods that it does not
/// implement are those of its upstream.
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
    /// Allocates memory for use on a stream.
    ///
    /// # Errors
    /// Any; then nothing has changed.
    fn allocate_block(&self, request: &Request, on: &Stream) -> Result<RawBlock, Error>;

    /// Takes a block back.
    ///
    /// # Errors
    /// The block, still allocated, with the reason.
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>>;

    /// Deallocates a block if that requires neither a driver call nor a wait. Otherwise returns false and changes at
    /// most the block's note.
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

    /// The resource that an adaptor's blocks come from; none for a source of memory.
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        None
    }

    /// The context that the memory belongs to; none if it is that of each block's stream.
    fn context(&self) -> Option<&Context> {
        self.upstream()?.context()
    }

    /// The number of the source of memory, unique in the process: the [`source`](BlockId::source) of its blocks; 0 if
    /// it has none.
    fn id(&self) -> u64 {
        self.upstream().map_or(0, MemoryResource::id)
    }

    /// Memory held from the driver and handed out, including that of other users of the same source.
    ///
    /// # Errors
    /// Driver errors.
    fn usage(&self) -> Result<Usage, Error> {
        self.upstream()
            .map_or_else(|| Ok(Usage::default()), MemoryResource::usage)
    }

    /// Bytes that every budget below has room for, without a [`reap`](Self::reap); none if there is no budget.
    #[doc(hidden)]
    fn headroom(&self) -> Option<u64> {
        self.upstream()?.headroom()
    }

    /// Waits for the streams that deallocated blocks are pending on, and returns how many bytes left. Blocks only the
    /// calling thread.
    ///
    /// # Errors
    /// Driver errors; what is not known to be complete stays pending.
    fn reap(&self) -> Result<u64, Error> {
        self.upstream().map_or(Ok(0), MemoryResource::reap)
    }

    /// Releases unused memory to the driver until at most `keep` bytes are held ([`Allocator::trim`]).
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

    /// The state of a block.
    fn state(&self, id: &BlockId) -> BlockState {
        self.upstream()
            .map_or(BlockState::Free, |below| below.state(id))
    }

    /// How uses on other streams are tracked.
    fn use_tracking(&self) -> UseTracking {
        self.upstream()
            .map_or(UseTracking::None, MemoryResource::use_tracking)
    }

    /// Records that work already queued on `stream` uses the block, and later work does not.
    ///
    /// # Errors
    /// [`StreamMisuse::NotTracked`] where uses are not tracked; [`Error::UseAfterFree`].
    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_use(id, stream),
            None => Err(not_tracked("a use", stream)),
        }
    }

    /// Records that `stream` uses the block until it is deallocated: the memory is reused only after all work queued on
    /// the stream before. Fails like [`record_use`](Self::record_use).
    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_stream(id, stream),
            None => Err(not_tracked("a stream", stream)),
        }
    }

    /// Queues the waits that later work on `stream` needs before it accesses the block. With [`UseTracking::Reuse`]
    /// only the block's own stream is accepted, since the caller orders others. Fails like
    /// [`record_use`](Self::record_use).
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

    /// Records that the work for which [`prepare_use`](Self::prepare_use) was called is queued on `stream`.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use). After a driver error the block counts as used by all work queued on
    /// `stream` until the block is needed next; with [`UseTracking::Reuse`] by
    /// [`record_stream`](Self::record_stream), if that succeeds.
    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.finish_use(id, stream, access),
            None => {
                let recorded = self.record_use(id, stream);
                if is_unmarked(&recorded) {
                    // The first error is the one that is returned.
                    let _ = self.record_stream(id, stream);
                }
                recorded
            }
        }
    }

    /// The resource as an allocator, if it is one, for owners of memory to call directly.
    #[doc(hidden)]
    #[inline]
    fn as_allocator(&self) -> Option<&Allocator> {
        None
    }

    /// The allocator that the resource's blocks come from, if any.
    #[doc(hidden)]
    #[inline]
    fn allocator_under(&self) -> Option<&Allocator> {
        match self.as_allocator() {
            Some(allocator) => Some(allocator),
            None => self.upstream()?.allocator_under(),
        }
    }

    /// Whether the stream of a block was retired, or is about to be, so that its allocator considers the stream's last
    /// marker the end of its work: later work must be recorded before the block is freed.
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

/// A resource of which owners of memory can keep a handle: an [`Allocator`], a pool, an [`Arc`] of a stack.
pub trait Source: MemoryResource + Clone + 'static {}

impl<R: MemoryResource + Clone + 'static> Source for R {}

/// Whether the driver failed to mark the end of queued work, so that its stream counts until the block is freed.
pub(crate) fn is_unmarked(recorded: &Result<(), Error>) -> bool {
    matches!(recorded, Err(error) if error.driver_error().is_some())
}

fn not_tracked(asked: &'static str, stream: &Stream) -> Error {
    let stream = stream.own_id();
    StreamMisuse::NotTracked { asked, stream }.into()
}

/// Implements [`MemoryResource`] for handles to a resource; the last expression is the handle that owners keep.
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
