//! The trait that all sources of memory and all adaptors share.

use std::sync::Arc;

use crate::allocator::Trimmed;
use crate::driver::{Context, Stream};

use super::block::{Access, BlockIdentity, BlockState, DeallocateError, ResourceBlock, Tag};
use super::error::{ResourceError, StreamMisuse};
use super::usage::{Gauge, PoolUsage};

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
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// // The allocator is a resource: the caching one.
/// let block = MemoryResource::allocate(&allocator, 1000, &stream, "weights".into())?;
/// assert_eq!((block.bytes(), block.tag().as_str()), (1000, "weights"));
/// allocator.deallocate(block)?;
///
/// // And so are the pools: a program can swap one for another and compare.
/// use cualloc::pool::{NativeConfig, NativePool};
/// use cualloc::resource::{OwnedBlock, ResourceError, Tag};
/// # use cualloc::driver::Stream;
/// fn work(source: &dyn MemoryResource, stream: &Stream) -> Result<u64, ResourceError> {
///     drop(OwnedBlock::allocate(source, 1 << 20, stream, Tag::default())?);
///     Ok(source.usage()?.used.peak)
/// }
/// let native = NativePool::with_context(&context, NativeConfig::default())?;
/// assert_eq!(work(&allocator, &stream)?, work(&native, &stream)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// Safe code rests on what a resource says: columns write to its blocks and give them back. An
/// implementation hands out memory of `bytes` bytes or more, in the order of the stream it was asked for,
/// to one owner at a time, under a key that is never used again. What was said to be used by
/// [`record_use`](Self::record_use), [`record_stream`](Self::record_stream) or
/// [`finish_use`](Self::finish_use) with success, and everything that the block's own stream was given
/// before [`deallocate`](Self::deallocate), is over before the memory goes to anybody whose work does not
/// come behind it; where [`tracking`](Self::tracking) is [`Tracking::None`] that holds for all work of
/// the [`context`](Self::context). It takes back only blocks that it handed out. An adaptor passes calls on to
/// the resource below it that the block came from, with the same stream, and blocks unchanged.
///
/// ```compile_fail,E0200
/// # use cualloc::driver::{Context, Stream};
/// # use cualloc::resource::*;
/// struct Mine;
/// impl MemoryResource for Mine {
/// #   fn allocate_aligned(&self, _: usize, _: usize, _: &Stream, _: Tag) -> Result<ResourceBlock, ResourceError> { todo!() }
/// #   fn deallocate(&self, _: ResourceBlock) -> Result<(), DeallocateError> { todo!() }
/// #   fn context(&self) -> &Context { todo!() }
/// #   fn outstanding(&self) -> Outstanding { todo!() }
/// #   fn state(&self, _: &BlockIdentity) -> BlockState { todo!() }
///     // ...
/// }
/// ```
pub unsafe trait MemoryResource: Send + Sync {
    /// Allocates `bytes` (at least 1) for use on a stream, at a multiple of `alignment` bytes (a
    /// power of two; 1 where any will do).
    ///
    /// # Errors
    /// Any of [`ResourceError`]; nothing has changed then.
    fn allocate_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError>;

    /// [`allocate_aligned`](Self::allocate_aligned) without a wish for the alignment.
    ///
    /// # Errors
    /// As [`allocate_aligned`](Self::allocate_aligned).
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        self.allocate_aligned(bytes, 1, stream, tag)
    }

    /// Takes a block back.
    ///
    /// # Errors
    /// The block, still allocated, with the reason.
    fn deallocate(&self, block: ResourceBlock) -> Result<(), DeallocateError>;

    /// The context that the memory belongs to.
    fn context(&self) -> &Context;

    /// The ordinal of the device.
    fn device(&self) -> usize {
        self.context().device().ordinal()
    }

    /// Bytes that have not left.
    fn outstanding(&self) -> Outstanding;

    /// Waits for the streams that deallocated blocks are pending on; how many bytes left. May block
    /// the calling thread, and nobody else.
    ///
    /// # Errors
    /// Driver errors: what could not be seen complete stays pending, for the next call.
    fn reap(&self) -> Result<u64, ResourceError> {
        Ok(0)
    }

    /// Gives memory that is cached and unused back to the driver until at most `keep` bytes are
    /// held, as [`Allocator::trim`](crate::Allocator::trim) does.
    ///
    /// # Errors
    /// Driver errors.
    fn trim(&self, keep: u64) -> Result<Trimmed, ResourceError> {
        let _ = keep;
        Ok(Trimmed::default())
    }

    /// What is held from the driver and handed out of it; of everything under the resource, also where
    /// others share that. By default what is outstanding, and no memory of peaks.
    ///
    /// # Errors
    /// Driver errors.
    fn usage(&self) -> Result<PoolUsage, ResourceError> {
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
    fn reset_peaks(&self) -> Result<(), ResourceError> {
        Ok(())
    }

    /// Where a block is in its life.
    fn state(&self, block: &BlockIdentity) -> BlockState;

    /// What is known about uses on other streams.
    fn tracking(&self) -> Tracking {
        Tracking::None
    }

    /// Says that work already given to `stream` uses the block, and none later does.
    ///
    /// # Errors
    /// [`StreamMisuse::NotTracked`] where uses are not tracked; [`ResourceError::UseAfterFree`].
    fn record_use(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), ResourceError> {
        let _ = block;
        Err(not_tracked("a use", stream))
    }

    /// Says that `stream` uses the block until it is deallocated, by work that is not told of: the
    /// memory is reused only when everything is done that the stream was given until then, or behind
    /// it.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn record_stream(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), ResourceError> {
        let _ = block;
        Err(not_tracked("a stream", stream))
    }

    /// Lets work that is given to `stream` from now on access the block: queues the waits for it.
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    fn prepare_use(
        &self,
        block: &BlockIdentity,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        let _ = (block, access);
        Err(not_tracked("preparing a use", stream))
    }

    /// Says that the work which [`prepare_use`](Self::prepare_use) made way for was given to
    /// `stream`.
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
    ) -> Result<(), ResourceError> {
        let _ = (block, access);
        Err(not_tracked("finishing a use", stream))
    }
}

/// Uses where reuse is the resource's and order between streams the caller's: on a block's own stream
/// there is nothing to prepare, and elsewhere nothing that could be. `$known` refuses what is not live.
macro_rules! callers_order {
    ($known:ident) => {
        fn prepare_use(
            &self,
            block: &BlockIdentity,
            stream: &Stream,
            _access: Access,
        ) -> Result<(), ResourceError> {
            $known(self, block)?;
            if stream.id()? == block.stream {
                return Ok(());
            }
            Err(not_tracked("preparing a use", stream))
        }

        fn finish_use(
            &self,
            block: &BlockIdentity,
            stream: &Stream,
            _access: Access,
        ) -> Result<(), ResourceError> {
            $crate::resource::count_anyway(self, block, stream, self.record_use(block, stream))
        }
    };
}
pub(crate) use callers_order;

/// What came of recording work that was given already: if the driver refused to mark its end, the
/// stream counts until the block is freed.
pub(crate) fn count_anyway(
    resource: &impl MemoryResource,
    block: &BlockIdentity,
    stream: &Stream,
    recorded: Result<(), ResourceError>,
) -> Result<(), ResourceError> {
    if let Err(error) = &recorded
        && error.driver_error().is_some()
    {
        // The first error is the one to tell of.
        let _ = resource.record_stream(block, stream);
    }
    recorded
}

pub(crate) fn not_tracked(asked: &'static str, stream: &Stream) -> ResourceError {
    match stream.id() {
        Ok(stream) => StreamMisuse::NotTracked { asked, stream }.into(),
        Err(error) => error.into(),
    }
}

/// The methods of an adaptor that only pass through.
macro_rules! forward {
    ($($inner:tt)+) => {
        #[inline]
        fn context(&self) -> &$crate::driver::Context {
            self.$($inner)+.context()
        }
        #[inline]
        fn device(&self) -> usize {
            $crate::resource::MemoryResource::device(&self.$($inner)+)
        }
        #[inline]
        fn usage(
            &self,
        ) -> Result<$crate::resource::PoolUsage, $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::usage(&self.$($inner)+)
        }
        #[inline]
        fn reset_peaks(&self) -> Result<(), $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::reset_peaks(&self.$($inner)+)
        }
        #[inline]
        fn outstanding(&self) -> $crate::resource::Outstanding {
            $crate::resource::MemoryResource::outstanding(&self.$($inner)+)
        }
        #[inline]
        fn trim(
            &self,
            keep: u64,
        ) -> Result<$crate::allocator::Trimmed, $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::trim(&self.$($inner)+, keep)
        }
        #[inline]
        fn state(
            &self,
            block: &$crate::resource::BlockIdentity,
        ) -> $crate::resource::BlockState {
            $crate::resource::MemoryResource::state(&self.$($inner)+, block)
        }
        #[inline]
        fn tracking(&self) -> $crate::resource::Tracking {
            $crate::resource::MemoryResource::tracking(&self.$($inner)+)
        }
        #[inline]
        fn prepare_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
            access: $crate::resource::Access,
        ) -> Result<(), $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::prepare_use(&self.$($inner)+, block, stream, access)
        }
    };
}
/// And those that say that something was used.
macro_rules! forward_uses {
    ($($inner:tt)+) => {
        #[inline]
        fn record_stream(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
        ) -> Result<(), $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::record_stream(&self.$($inner)+, block, stream)
        }
        #[inline]
        fn record_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
        ) -> Result<(), $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::record_use(&self.$($inner)+, block, stream)
        }
        #[inline]
        fn finish_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
            access: $crate::resource::Access,
        ) -> Result<(), $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::finish_use(&self.$($inner)+, block, stream, access)
        }
    };
}
/// And the one that makes bytes leave.
macro_rules! forward_reap {
    ($($inner:tt)+) => {
        #[inline]
        fn reap(&self) -> Result<u64, $crate::resource::ResourceError> {
            $crate::resource::MemoryResource::reap(&self.$($inner)+)
        }
    };
}
pub(crate) use {forward, forward_reap, forward_uses};

macro_rules! pointer {
    ($($pointer:ty),*) => {$(
        // SAFETY: passes everything on.
        unsafe impl<R: MemoryResource + ?Sized> MemoryResource for $pointer {
            #[inline]
            fn allocate_aligned(
                &self,
                bytes: usize,
                alignment: usize,
                stream: &Stream,
                tag: Tag,
            ) -> Result<ResourceBlock, ResourceError> {
                (**self).allocate_aligned(bytes, alignment, stream, tag)
            }
            #[inline]
            fn deallocate(&self, block: ResourceBlock) -> Result<(), DeallocateError> {
                (**self).deallocate(block)
            }
            fn context(&self) -> &Context {
                (**self).context()
            }
            fn device(&self) -> usize {
                (**self).device()
            }
            fn usage(&self) -> Result<PoolUsage, ResourceError> {
                (**self).usage()
            }
            fn reset_peaks(&self) -> Result<(), ResourceError> {
                (**self).reset_peaks()
            }
            fn record_stream(
                &self,
                block: &BlockIdentity,
                stream: &Stream,
            ) -> Result<(), ResourceError> {
                (**self).record_stream(block, stream)
            }
            fn outstanding(&self) -> Outstanding {
                (**self).outstanding()
            }
            fn reap(&self) -> Result<u64, ResourceError> {
                (**self).reap()
            }
            fn trim(&self, keep: u64) -> Result<Trimmed, ResourceError> {
                (**self).trim(keep)
            }
            fn state(&self, block: &BlockIdentity) -> BlockState {
                (**self).state(block)
            }
            fn tracking(&self) -> Tracking {
                (**self).tracking()
            }
            fn record_use(
                &self,
                block: &BlockIdentity,
                stream: &Stream,
            ) -> Result<(), ResourceError> {
                (**self).record_use(block, stream)
            }
            fn prepare_use(
                &self,
                block: &BlockIdentity,
                stream: &Stream,
                access: Access,
            ) -> Result<(), ResourceError> {
                (**self).prepare_use(block, stream, access)
            }
            fn finish_use(
                &self,
                block: &BlockIdentity,
                stream: &Stream,
                access: Access,
            ) -> Result<(), ResourceError> {
                (**self).finish_use(block, stream, access)
            }
        }
    )*};
}
pointer!(&R, Arc<R>, Box<R>);
