//! Memory directly from the driver: one driver allocation per block.

use std::collections::HashMap;

use crate::allocator::Request;
use crate::block::{BlockId, BlockState};
use crate::driver::{Context, Stream, process};
use crate::error::{Error, Refused};
use crate::locks::held::{Locked, Mutex};
use crate::sync::order::wait_for_context;

use super::block::RawBlock;
use super::checks::{DRIVER_ALIGNMENT, check_request, next_source, same_device};
use super::traits::MemoryResource;
use super::usage::Usage;

/// Memory directly from the driver, one call per block. A block may be used immediately on every stream of the context.
/// [`deallocate_block`](MemoryResource::deallocate_block) blocks the calling thread until all work of the context, and
/// of the context of the block's stream, is complete, so no use needs to be recorded; uses in further contexts must be
/// complete before.
///
/// ```
/// use cualloc::{Request, resource::{CudaMemory, MemoryResource}};
/// # use cualloc::{driver::Stream, sim::{SimConfig, Simulator}};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let stream = Stream::new(&context)?;
/// let direct = CudaMemory::new(&context);
/// let block = direct.allocate_block(&Request::new(1 << 20), &stream)?;
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
    usage: Usage,
    /// Live blocks, with the context of their stream if that is another one than the resource's.
    live: HashMap<BlockId, Option<Context>>,
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

    fn release(&self, id: &BlockId) -> Result<(), Error> {
        let home = self.table().live.get(id).cloned();
        let home = home.ok_or_else(|| id.gone())?;
        if let Some(home) = &home {
            wait_for_context(home)?;
        }
        wait_for_context(&self.context)?;
        let entered = self.context.enter()?;
        // A second call with this id finds nothing to free.
        self.table().live.remove(id).ok_or_else(|| id.gone())?;
        // SAFETY: allocated by `mem_alloc` and not freed, according to the table; the work of both contexts is
        // complete, and the caller has waited for that of others.
        let freed = unsafe { entered.mem_free(id.ptr()) };
        let mut table = self.table();
        match freed {
            Ok(()) => table.usage.sub(id.bytes() as u64),
            Err(_) => drop(table.live.insert(*id, home)),
        }
        Ok(freed?)
    }
}

// SAFETY: one driver allocation per block; a free comes after all work of the context, and of the stream's.
unsafe impl MemoryResource for CudaMemory {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let bytes = request.bytes();
        check_request(request, DRIVER_ALIGNMENT)?;
        same_device(Some(&self.context), self.ordinal(), stream)?;
        let ptr = self.context.enter()?.mem_alloc(bytes)?;
        let home = Some(stream.context()).filter(|home| home.id() != self.context.id());
        let mut table = self.table();
        table.usage.add(bytes as u64);
        let life = (self.source, table.usage.blocks.total_allocated);
        let block = BlockId::new(life, (ptr, bytes), stream.own_id(), self.ordinal());
        table.live.insert(block, home.cloned());
        // SAFETY: just made by the driver.
        Ok(unsafe { RawBlock::new(block, bytes, request) })
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let returned = block.returned();
        returned
            .and_then(|()| self.release(&block.id()))
            .map_err(|error| Refused::new(block, error))
    }

    fn context(&self) -> Option<&Context> {
        Some(&self.context)
    }

    fn id(&self) -> u64 {
        self.source
    }

    fn usage(&self) -> Result<Usage, Error> {
        let usage = self.table().usage;
        Ok(Usage {
            used: usage.requested,
            reserved: usage.requested,
            ..usage
        })
    }

    fn reset_peak_stats(&self) {
        self.table().usage.reset_peaks();
    }

    fn state(&self, id: &BlockId) -> BlockState {
        BlockState::live_if(self.table().live.contains_key(id))
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let live = self.table().live.len();
        if live > 0 {
            log::warn!("dropping a resource of `cuMemAlloc` with {live} live blocks, which leak");
        }
    }
}
