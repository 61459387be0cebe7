//! A second allocator on the same device and streams.

use cualloc::{Allocator, Block, Config, Error};

use super::{Done, Handle, Machine, text};

/// It comes with the first block that is taken of it.
#[derive(Default)]
pub(super) struct Other {
    alloc: Option<Allocator>,
    /// With the stream of each.
    blocks: Vec<(Block, usize)>,
}

impl Other {
    pub(super) fn reserved(&self) -> u64 {
        let stats = self.alloc.as_ref().map(Allocator::stats);
        stats.map_or(0, |stats| stats.all.reserved.current)
    }

    pub(super) fn cached(&self) -> u64 {
        self.alloc.as_ref().map_or(0, Allocator::cached)
    }
}

impl Machine<'_> {
    pub(super) fn other(&mut self, stream: u32, bytes: Option<usize>) -> Done {
        let at = self.lane(stream);
        let (number, Handle::Owned(stream)) = (self.lanes[at].number, &self.lanes[at].handle)
        else {
            return Ok(());
        };
        let stream = stream.clone();
        let Some(bytes) = bytes else {
            return match self.other.blocks.is_empty() {
                true => Ok(()),
                false => self.free_other(usize::from(number as u8) % self.other.blocks.len()),
            };
        };
        if self.other.alloc.is_none() {
            let config = Config::new().policy(self.setup.policy).context_checks(true);
            let alloc = Allocator::with_config(&self.context, config);
            self.other.alloc = self.tolerate(alloc)?;
        }
        let Some(alloc) = &self.other.alloc else {
            return Ok(());
        };
        let block = match alloc.allocate(bytes, &stream) {
            Ok(block) => block,
            Err(Error::OutOfMemory(_)) => return Ok(()),
            Err(error) => return self.tolerate(Err::<(), _>(error)).map(drop),
        };
        let ptr = block.ptr();
        self.checker.tracker().handed_out(ptr, block.size(), number);
        self.other.blocks.push((block, number));
        // SAFETY: the block and the stream are alive; no one else uses the block.
        self.own(|entered| unsafe { entered.memset_d8(ptr, 3, bytes, stream.raw()) })
    }

    fn free_other(&mut self, at: usize) -> Done {
        let (block, number) = self.other.blocks.swap_remove(at);
        let (ptr, last) = (block.ptr(), self.position(number));
        match block.free() {
            Ok(()) => {
                self.checker.tracker().freed_after(ptr, &[last]);
                Ok(())
            }
            Err(refused) => {
                self.other.blocks.push((*refused.value, number));
                self.tolerate(Err::<(), _>(refused.error)).map(drop)
            }
        }
    }

    pub(super) fn close_other(&mut self) -> Done {
        while !self.other.blocks.is_empty() {
            self.free_other(0)?;
        }
        match self.other.alloc.take() {
            Some(alloc) => {
                alloc.check().map_err(text)?;
                alloc.close().map_err(text)
            }
            None => Ok(()),
        }
    }
}
