//! The direct resource: one driver allocation per block.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::size::round_size;
use crate::driver::{Context, Stream, process};
use crate::locks::held::Locked;

use super::block::{BlockIdentity, BlockState, ResourceBlock, Tag};
use super::key::{BlockKey, next_source};
use super::traits::{MemoryResource, Outstanding};
use super::usage::{Gauge, PoolUsage};
use crate::error::{Error, InvalidArgument, Refused};

/// What `cuMemAlloc` aligns to.
const ALIGNMENT: usize = 256;

/// Memory straight from the driver, one call per block. Both calls are synchronous and the stream
/// plays no part: a block may be used on every stream of the context as soon as it is there, and
/// [`deallocate_block`](MemoryResource::deallocate_block) blocks the calling thread until all work of the
/// context, and of the context of the block's stream, is complete, so that no use needs to be recorded; its
/// bytes leave at once.
///
/// Work on streams of further contexts is not waited for: uses there must be complete before.
///
/// ```
/// use cualloc::resource::{DirectResource, MemoryResource};
/// # use cualloc::{driver::{Context, Stream}, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let stream = Stream::new(&context)?;
/// let direct = DirectResource::new(&context);
/// let block = direct.allocate_block(1 << 20, &stream, "scratch".into())?;
/// assert_eq!(direct.outstanding().live, 1 << 20);
/// direct.deallocate_block(block)?;
/// assert_eq!(direct.outstanding().total(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DirectResource {
    context: Context,
    source: u64,
    generation: AtomicU64,
    live: AtomicU64,
    /// The most of them.
    peak: AtomicU64,
    blocks: Mutex<HashMap<u64, Live>>,
}

/// What is known of a live block.
#[derive(Debug, Clone)]
struct Live {
    key: BlockKey,
    /// The context of the stream that it was allocated on, if it is another one than the resource's.
    home: Option<Context>,
}

impl DirectResource {
    /// A resource of a context.
    pub fn new(context: &Context) -> DirectResource {
        DirectResource {
            context: context.clone(),
            source: next_source(),
            generation: AtomicU64::new(0),
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            blocks: Mutex::default(),
        }
    }

    fn blocks(&self) -> Locked<'_, HashMap<u64, Live>> {
        process::lock(&self.blocks)
    }

    fn knows(&self, block: &BlockIdentity) -> Result<Live, Error> {
        match self.blocks().get(&block.ptr) {
            Some(live) if live.key == block.key => Ok(live.clone()),
            _ => Err(block.gone()),
        }
    }

    fn release(&self, block: &BlockIdentity) -> Result<(), Error> {
        let live = self.knows(block)?;
        if let Some(home) = &live.home {
            home.enter()?.synchronize()?;
        }
        let entered = self.context.enter()?;
        entered.synchronize()?;
        // Out of the table before the address can be given to somebody else.
        self.blocks().remove(&block.ptr);
        // SAFETY: made by `mem_alloc` here and not yet freed, as the table said; the work of the
        // context and of the stream's is complete, and that of others is the caller's to have waited for.
        if let Err(error) = unsafe { entered.mem_free(block.ptr) } {
            self.blocks().insert(block.ptr, live);
            return Err(error.into());
        }
        self.live.fetch_sub(block.bytes as u64, Ordering::AcqRel);
        Ok(())
    }
}

// SAFETY: one driver allocation per block; a free comes after all work of the context, and of the stream's.
unsafe impl MemoryResource for DirectResource {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        if bytes == 0 || round_size(bytes).is_none() {
            let bytes = bytes as u64;
            return Err(Error::Invalid(InvalidArgument::Size { bytes }));
        }
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            return Err(Error::Invalid(InvalidArgument::Alignment {
                bytes: alignment as u64,
            }));
        }
        super::ordered::same_place(&self.context, stream)?;
        let id = stream.id()?;
        let ptr = self.context.enter()?.mem_alloc(bytes)?;
        let key = BlockKey {
            source: self.source,
            id: 0,
            generation: self.generation.fetch_add(1, Ordering::Relaxed) + 1,
        };
        let (ours, home) = (self.context.id(), stream.context());
        let home = (home.id() != ours).then(|| home.clone());
        self.blocks().insert(ptr, Live { key, home });
        let now = self.live.fetch_add(bytes as u64, Ordering::AcqRel) + bytes as u64;
        self.peak.fetch_max(now, Ordering::AcqRel);
        let identity = BlockIdentity {
            key,
            ptr,
            bytes,
            stream: id,
            device: self.context.device().ordinal(),
        };
        // SAFETY: just made by the driver.
        Ok(unsafe { ResourceBlock::new(identity, bytes as u64, alignment, tag) })
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        let returned = block.returned();
        returned
            .and_then(|()| self.release(&block.identity()))
            .map_err(|error| Refused::new(block, error))
    }

    fn context(&self) -> &Context {
        &self.context
    }

    fn usage(&self) -> Result<PoolUsage, Error> {
        let current = self.live.load(Ordering::Acquire);
        let peak = self.peak.load(Ordering::Acquire).max(current);
        let all = Gauge { current, peak };
        Ok(PoolUsage {
            reserved: all,
            used: all,
        })
    }

    fn reset_peaks(&self) -> Result<(), Error> {
        // No peak is lost to allocations at the same time.
        self.peak.store(0, Ordering::Release);
        let now = self.live.load(Ordering::Acquire);
        self.peak.fetch_max(now, Ordering::AcqRel);
        Ok(())
    }

    fn outstanding(&self) -> Outstanding {
        Outstanding {
            live: self.live.load(Ordering::Acquire),
            pending: 0,
        }
    }

    fn state(&self, block: &BlockIdentity) -> BlockState {
        match self.knows(block) {
            Ok(_) => BlockState::Live,
            Err(_) => BlockState::Freed,
        }
    }
}

impl Drop for DirectResource {
    fn drop(&mut self) {
        let live = self.blocks().len();
        if live > 0 {
            log::warn!("a direct resource goes with {live} live blocks, which leak");
        }
    }
}
