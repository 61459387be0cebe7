//! The trait that all sources of memory and all adaptors share.

use std::sync::Arc;

use crate::allocator::Trimmed;
use crate::driver::{Context, Stream};

use super::block::{Access, BlockIdentity, BlockState, ResourceBlock, Tag};
use super::usage::{Gauge, PoolUsage};
use crate::error::{Error, Refused, StreamMisuse};

/// Bytes that have not left a resource, at one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outstanding {
    /// In blocks that are allocated, as they were asked for.
    pub live: u64,
    /// In blocks that are deallocated while work on their stream may still use them.
    pub pending: u64,
}

impl Outstanding {
    /// Both together.
    pub fn total(self) -> u64 {
        self.live + self.pending
    }
}

/// What a resource knows about the use of its blocks on other streams than their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tracking {
    /// Nothing: no use is accepted.
    None,
    /// [`record_use`](MemoryResource::record_use) keeps memory from being reused too early; the
    /// order of reads and writes among streams is the caller's.
    Reuse,
    /// Also [`prepare_use`](MemoryResource::prepare_use) and
    /// [`finish_use`](MemoryResource::finish_use): reads and writes of several streams are put in
    /// order.
    Access,
}

/// A source of device memory, or an adaptor over one.
///
/// Generic code over `R: MemoryResource` is compiled for its stack and has no indirect call;
/// `Arc<dyn MemoryResource>` is a resource too, where a stack is chosen at run time.
///
/// All calls may come from any thread. What is said of streams holds for all resources: memory
/// belongs to the order of the stream that it was allocated on, and a deallocated block is not
/// given to anybody whose work could meet work that was queued before the deallocation.
///
/// ```
/// use cualloc::resource::MemoryResource;
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// // The allocator is a resource: the caching one.
/// let block = MemoryResource::allocate_block(&allocator, 1000, &stream, "weights".into())?;
/// assert_eq!((block.bytes(), block.tag().as_str()), (1000, "weights"));
/// allocator.deallocate_block(block)?;
///
/// // And so are the pools: a program can swap one for another and compare.
/// use cualloc::pool::{NativeConfig, NativePool};
/// use cualloc::Error;
/// use cualloc::resource::{OwnedBlock, Tag};
/// # use cualloc::driver::Stream;
/// fn work(source: &dyn MemoryResource, stream: &Stream) -> Result<u64, Error> {
///     drop(OwnedBlock::allocate(source, 1 << 20, stream, Tag::default())?);
///     Ok(source.usage()?.used.peak)
/// }
/// let native = NativePool::with_context(&context, NativeConfig::default())?;
/// assert_eq!(work(&allocator, &stream)?, work(&native, &stream)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// Safe code rests on what a resource says: columns write to its blocks and give them back. An implementation
/// hands out memory of `bytes` bytes or more, in the order of the stream it was asked for, to one owner at a
/// time, under a key that is never used again. What was said to be used by [`record_use`](Self::record_use),
/// [`record_stream`](Self::record_stream) or [`finish_use`](Self::finish_use) with success, and everything that
/// the block's own stream was given before [`deallocate_block`](Self::deallocate_block), is over before the
/// memory goes to anybody whose work does not come behind it; where [`tracking`](Self::tracking) is
/// [`Tracking::None`] that holds for all work of the [`context`](Self::context). It takes back only blocks that
/// it handed out. An adaptor passes calls on to its [`upstream`](Self::upstream), from which its blocks come,
/// with the same stream, and blocks unchanged.
///
/// A source writes [`outstanding`](Self::outstanding) and [`state`](Self::state), and what is said of uses
/// where it tracks them; an adaptor names its upstream and writes what it changes.
///
/// ```compile_fail,E0200
/// # use cualloc::driver::{Context, Stream};
/// # use cualloc::resource::*;
/// struct Mine;
/// impl MemoryResource for Mine {
/// #   fn allocate_block_aligned(&self, _: usize, _: usize, _: &Stream, _: Tag) -> Result<ResourceBlock, Error> { todo!() }
/// #   fn deallocate_block(&self, _: ResourceBlock) -> Result<(), Refused<ResourceBlock>> { todo!() }
/// #   fn context(&self) -> &Context { todo!() }
///     // ...
/// }
/// ```
pub unsafe trait MemoryResource: Send + Sync {
    /// Allocates `bytes` (at least 1) for use on a stream, at a multiple of `alignment` bytes (a
    /// power of two; 1 where any will do).
    ///
    /// # Errors
    /// Any of [`Error`]; nothing has changed then.
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error>;

    /// [`allocate_block_aligned`](Self::allocate_block_aligned) without a wish for the alignment.
    ///
    /// # Errors
    /// As [`allocate_block_aligned`](Self::allocate_block_aligned).
    #[inline]
    fn allocate_block(
        &self,
        bytes: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        self.allocate_block_aligned(bytes, 1, stream, tag)
    }

    /// Takes a block back.
    ///
    /// # Errors
    /// The block, still allocated, with the reason.
    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>>;

    /// The context that the memory belongs to.
    fn context(&self) -> &Context;

    /// The resource that an adaptor's blocks come from, which answers every call that the adaptor does not
    /// answer itself; none for a source of memory.
    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        None
    }

    /// The ordinal of the device.
    fn device(&self) -> usize {
        self.context().device().ordinal()
    }

    /// Bytes that have not left. A source that does not say has none.
    fn outstanding(&self) -> Outstanding {
        self.upstream()
            .map(MemoryResource::outstanding)
            .unwrap_or_default()
    }

    /// Bytes that every budget on the way down still has room for; none if there is no budget. More may
    /// fit once pending bytes were [reaped](Self::reap), and less where the device is short.
    fn headroom(&self) -> Option<u64> {
        self.upstream()?.headroom()
    }

    /// Waits for the streams that deallocated blocks are pending on; how many bytes left. May block
    /// the calling thread, and nobody else.
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

    /// What is held from the driver and handed out of it; of everything under the resource, also where
    /// others share that. Of a source by default what is outstanding, and no memory of peaks.
    ///
    /// # Errors
    /// Driver errors.
    fn usage(&self) -> Result<PoolUsage, Error> {
        if let Some(below) = self.upstream() {
            return below.usage();
        }
        let current = self.outstanding().total();
        let all = Gauge {
            current,
            peak: current,
        };
        Ok(PoolUsage {
            reserved: all,
            used: all,
        })
    }

    /// Sets the peaks of [`usage`](Self::usage) to the current values.
    ///
    /// # Errors
    /// Driver errors.
    fn reset_peaks(&self) -> Result<(), Error> {
        self.upstream().map_or(Ok(()), MemoryResource::reset_peaks)
    }

    /// Where a block is in its life. A source that does not say knows no block.
    fn state(&self, block: &BlockIdentity) -> BlockState {
        self.upstream()
            .map_or(BlockState::Freed, |below| below.state(block))
    }

    /// What is known about uses on other streams.
    fn tracking(&self) -> Tracking {
        self.upstream()
            .map_or(Tracking::None, MemoryResource::tracking)
    }

    /// Says that work already given to `stream` uses the block, and none later does.
    ///
    /// # Errors
    /// [`StreamMisuse::NotTracked`] where uses are not tracked; [`Error::UseAfterFree`].
    fn record_use(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_use(block, stream),
            None => Err(not_tracked("a use", stream)),
        }
    }

    /// Says that `stream` uses the block until it is deallocated, by work that is not told of: the
    /// memory is reused only when everything is done that the stream was given until then, or behind
    /// it.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn record_stream(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.record_stream(block, stream),
            None => Err(not_tracked("a stream", stream)),
        }
    }

    /// Lets work that is given to `stream` from now on access the block: queues the waits for it.
    /// Of a source that tracks [`Tracking::Reuse`] by default nothing on the block's own stream, and
    /// refused on others, whose order is the caller's.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn prepare_use(
        &self,
        block: &BlockIdentity,
        stream: &Stream,
        access: Access,
    ) -> Result<(), Error> {
        if let Some(below) = self.upstream() {
            return below.prepare_use(block, stream, access);
        }
        if self.tracking() != Tracking::None {
            if self.state(block) != BlockState::Live {
                return Err(block.gone());
            }
            if stream.id()? == block.stream {
                return Ok(());
            }
        }
        Err(not_tracked("preparing a use", stream))
    }

    /// Says that the work which [`prepare_use`](Self::prepare_use) made way for was given to
    /// `stream`. Of a source by default what [`record_use`](Self::record_use) says.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use). After a driver error the block counts as used on
    /// `stream` by everything that the stream has been given when the block is needed next. That takes
    /// no further question to the driver under [`Tracking::Access`], and on the block's own stream.
    /// Under [`Tracking::Reuse`] another stream is recorded as [`record_stream`](Self::record_stream)
    /// does; if that is refused too, the use counts only once it is recorded.
    fn finish_use(
        &self,
        block: &BlockIdentity,
        stream: &Stream,
        access: Access,
    ) -> Result<(), Error> {
        match self.upstream() {
            Some(below) => below.finish_use(block, stream, access),
            None => {
                let recorded = self.record_use(block, stream);
                if must_last(&recorded) {
                    // The first error is the one to tell of.
                    let _ = self.record_stream(block, stream);
                }
                recorded
            }
        }
    }
}

/// Whether the driver refused to mark the end of work that was given already: its stream counts until the
/// block is freed.
pub(crate) fn must_last(recorded: &Result<(), Error>) -> bool {
    matches!(recorded, Err(error) if error.driver_error().is_some())
}

fn not_tracked(asked: &'static str, stream: &Stream) -> Error {
    match stream.id() {
        Ok(stream) => StreamMisuse::NotTracked { asked, stream }.into(),
        Err(error) => error.into(),
    }
}

macro_rules! pointer {
    ($([$($generics:tt)*] $pointer:ty),* $(,)?) => {$(
        // SAFETY: passes everything on.
        unsafe impl $($generics)* MemoryResource for $pointer {
            #[inline]
            fn allocate_block_aligned(
                &self,
                bytes: usize,
                alignment: usize,
                stream: &Stream,
                tag: Tag,
            ) -> Result<ResourceBlock, Error> {
                (**self).allocate_block_aligned(bytes, alignment, stream, tag)
            }
            #[inline]
            fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
                (**self).deallocate_block(block)
            }
            fn context(&self) -> &Context {
                (**self).context()
            }
            #[inline]
            fn upstream(&self) -> Option<&dyn MemoryResource> {
                Some(&**self)
            }
        }
    )*};
}
pointer! {
    [<R: MemoryResource>] &R,
    [<R: MemoryResource>] Arc<R>,
    [<R: MemoryResource>] Box<R>,
    [] &dyn MemoryResource,
    [] Arc<dyn MemoryResource>,
    [] Box<dyn MemoryResource>,
}
