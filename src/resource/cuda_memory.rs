//! Memory straight from the driver: one driver allocation per block.

use std::collections::HashMap;

use crate::allocator::{Counter, Request};
use crate::driver::{Context, Stream, process};
use crate::locks::held::{Locked, Mutex};

use super::block::RawBlock;
use super::checks::{DRIVER_ALIGNMENT, check_request, same_device};
use super::table::next_source;
use super::traits::MemoryResource;
use super::usage::Usage;
use crate::block::{BlockId, BlockState};
use crate::error::{Error, Refused};
use crate::sync::order::wait_for_context;

/// Memory straight from the driver, one call per block. Both calls are synchronous and the stream
/// plays no part: a block may be used on every stream of the context as soon as it is there, and
/// [`deallocate_block`](MemoryResource::deallocate_block) blocks the calling thread until all work of the
/// context, and of the context of the block's stream, is complete, so that no use needs to be recorded; its
/// bytes leave at once.
///
/// Work on streams of further contexts is not waited for: uses there must be complete before.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::resource::{CudaMemory, MemoryResource};
/// # use cualloc::{driver::{Context, Stream}, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let stream = Stream::new(&context)?;
/// let direct = CudaMemory::new(&context);
/// let block = direct.allocate_block(&Request::new(1 << 20).tag("scratch"), &stream)?;
/// assert_eq!(direct.usage()?.requested.current, 1 << 20);
/// direct.deallocate_block(block)?;
/// assert_eq!(direct.usage()?.outstanding(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudaMemory {
    context: Context,
    source: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    generation: u64,
    live: Counter,
    count: Counter,
    blocks: HashMap<u64, Live>,
}

/// What is known of a live block.
#[derive(Debug, Clone)]
struct Live {
    id: BlockId,
    /// The context of the stream that it was allocated on, if it is another one than the resource's.
    home: Option<Context>,
}

impl CudaMemory {
    /// A resource of a context.
    pub fn new(context: &Context) -> CudaMemory {
        CudaMemory {
            context: context.clone(),
            source: next_source(),
            table: Mutex::default(),
        }
    }

    fn table(&self) -> Locked<'_, Table> {
        process::lock(&self.table)
    }

    fn knows(&self, id: &BlockId) -> Result<Live, Error> {
        match self.table().blocks.get(&id.ptr()) {
            Some(live) if live.id == *id => Ok(live.clone()),
            _ => Err(id.gone()),
        }
    }

    fn release(&self, id: &BlockId) -> Result<(), Error> {
        let live = self.knows(id)?;
        if let Some(home) = &live.home {
            wait_for_context(home)?;
        }
        wait_for_context(&self.context)?;
        let entered = self.context.enter()?;
        // Out of the table before the address can be given to somebody else.
        self.table().blocks.remove(&id.ptr());
        // SAFETY: made by `mem_alloc` here and not yet freed, as the table said; the work of the
        // context and of the stream's is complete, and that of others is the caller's to have waited for.
        if let Err(error) = unsafe { entered.mem_free(id.ptr()) } {
            self.table().blocks.insert(id.ptr(), live);
            return Err(error.into());
        }
        let mut table = self.table();
        table.live.sub(id.bytes() as u64);
        table.count.sub(1);
        Ok(())
    }
}

// SAFETY: one driver allocation per block; a free comes after all work of the context, and of the stream's.
unsafe impl MemoryResource for CudaMemory {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let bytes = request.bytes();
        check_request(request, DRIVER_ALIGNMENT)?;
        same_device(Some(&self.context), self.ordinal(), stream)?;
        let id = stream.id()?;
        let ptr = self.context.enter()?.mem_alloc(bytes)?;
        let (ours, home) = (self.context.id(), stream.context());
        let home = (home.id() != ours).then(|| home.clone());
        let mut table = self.table();
        table.generation += 1;
        let life = (self.source, table.generation);
        let block = BlockId::new(life, (ptr, bytes), id, self.ordinal());
        table.blocks.insert(ptr, Live { id: block, home });
        table.live.add(bytes as u64);
        table.count.add(1);
        // SAFETY: just made by the driver.
        Ok(unsafe { RawBlock::new(block, bytes, request) })
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let returned = block.returned();
        returned
            .and_then(|()| self.release(&block.id()))
            .map_err(|error| Refused::new(block, error))
    }

    fn ordinal(&self) -> usize {
        self.context.device().ordinal()
    }

    fn context(&self) -> Option<&Context> {
        Some(&self.context)
    }

    fn id(&self) -> u64 {
        self.source
    }

    fn usage(&self) -> Result<Usage, Error> {
        let table = self.table();
        Ok(Usage {
            requested: table.live,
            used: table.live,
            reserved: table.live,
            blocks: table.count,
            ..Usage::default()
        })
    }

    fn reset_peak_stats(&self) {
        let mut table = self.table();
        table.live.reset_peak();
        table.count.reset_peak();
    }

    fn state(&self, id: &BlockId) -> BlockState {
        match self.knows(id) {
            Ok(_) => BlockState::Live,
            Err(_) => BlockState::Free,
        }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let live = self.table().blocks.len();
        if live > 0 {
            log::warn!("dropping a resource of `cuMemAlloc` with {live} live blocks, which leak");
        }
    }
}
