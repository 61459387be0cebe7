//! The trait that all sources of memory and all adaptors share.

use std::fmt;
use std::sync::Arc;

use crate::allocator::Trimmed;
use crate::driver::{Context, Stream, sys};

use super::block::{Access, BlockIdentity, BlockState, ResourceBlock, Tag};
use super::error::{DeallocateError, ResourceError, StreamMisuse};

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
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait MemoryResource: Send + Sync {
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
    /// `stream` by everything that the stream has been given when the block is needed next.
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
        fn outstanding(&self) -> $crate::resource::Outstanding {
            self.$($inner)+.outstanding()
        }
        #[inline]
        fn trim(
            &self,
            keep: u64,
        ) -> Result<$crate::allocator::Trimmed, $crate::resource::ResourceError> {
            self.$($inner)+.trim(keep)
        }
        #[inline]
        fn state(
            &self,
            block: &$crate::resource::BlockIdentity,
        ) -> $crate::resource::BlockState {
            self.$($inner)+.state(block)
        }
        #[inline]
        fn tracking(&self) -> $crate::resource::Tracking {
            self.$($inner)+.tracking()
        }
        #[inline]
        fn prepare_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
            access: $crate::resource::Access,
        ) -> Result<(), $crate::resource::ResourceError> {
            self.$($inner)+.prepare_use(block, stream, access)
        }
    };
}
/// And those that say that something was used.
macro_rules! forward_uses {
    ($($inner:tt)+) => {
        #[inline]
        fn record_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
        ) -> Result<(), $crate::resource::ResourceError> {
            self.$($inner)+.record_use(block, stream)
        }
        #[inline]
        fn finish_use(
            &self,
            block: &$crate::resource::BlockIdentity,
            stream: &$crate::driver::Stream,
            access: $crate::resource::Access,
        ) -> Result<(), $crate::resource::ResourceError> {
            self.$($inner)+.finish_use(block, stream, access)
        }
    };
}
/// And the one that makes bytes leave.
macro_rules! forward_reap {
    ($($inner:tt)+) => {
        #[inline]
        fn reap(&self) -> Result<u64, $crate::resource::ResourceError> {
            self.$($inner)+.reap()
        }
    };
}
pub(crate) use {forward, forward_reap, forward_uses};

macro_rules! pointer {
    ($($pointer:ty),*) => {$(
        impl<R: MemoryResource + ?Sized> MemoryResource for $pointer {
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

/// A block that goes back to its resource when it is dropped.
///
/// `R` is a handle to the resource: a reference, an [`Arc`], or a resource that is cheap to clone.
pub struct OwnedBlock<R: MemoryResource> {
    resource: R,
    block: Option<ResourceBlock>,
}

impl<R: MemoryResource> OwnedBlock<R> {
    /// Allocates.
    ///
    /// # Errors
    /// As [`MemoryResource::allocate_aligned`].
    pub fn allocate(
        resource: R,
        bytes: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<Self, ResourceError> {
        let block = resource.allocate(bytes, stream, tag)?;
        Ok(Self::from_parts(resource, block))
    }

    /// Owns a block of the resource.
    pub fn from_parts(resource: R, block: ResourceBlock) -> Self {
        OwnedBlock {
            resource,
            block: Some(block),
        }
    }

    /// Gives up ownership.
    pub fn into_block(mut self) -> Option<ResourceBlock> {
        self.block.take()
    }

    /// The first byte's address.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.block.as_ref().map_or(0, ResourceBlock::ptr)
    }

    /// Its size in bytes, as it was asked for.
    pub fn bytes(&self) -> usize {
        self.block.as_ref().map_or(0, ResourceBlock::bytes)
    }

    /// Who it is. `None` never occurs while the block is owned.
    pub fn identity(&self) -> Option<BlockIdentity> {
        self.block.as_ref().map(ResourceBlock::identity)
    }

    /// The block.
    pub fn block(&self) -> Option<&ResourceBlock> {
        self.block.as_ref()
    }

    /// The resource that it goes back to.
    pub fn resource(&self) -> &R {
        &self.resource
    }

    /// Deallocates; unlike a drop it reports failures, and gives the block back with them.
    ///
    /// # Errors
    /// As [`MemoryResource::deallocate`].
    pub fn free(mut self) -> Result<(), DeallocateError> {
        match self.block.take() {
            Some(block) => self.resource.deallocate(block),
            None => Ok(()),
        }
    }
}

impl<R: MemoryResource> Drop for OwnedBlock<R> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take()
            && let Err(failure) = self.resource.deallocate(block)
        {
            super::log_rarely(&failure.error, "a dropped block leaks");
        }
    }
}

impl<R: MemoryResource> fmt::Debug for OwnedBlock<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedBlock").field(&self.block).finish()
    }
}
