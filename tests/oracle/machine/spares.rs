//! Blocks that the program can do without, and the hook that gives them back.

use std::sync::{Arc, Mutex, PoisonError};

use cualloc::allocator::BlockInfo;
use cualloc::driver::Stream;
use cualloc::{Allocator, Policy};

use super::blocks::uses_of;
use super::{Done, Handle, Held, Machine};
use crate::checker::table::checker;
use crate::program::Relief;

const NAME: &str = "spares";

/// The blocks left to the hook.
#[derive(Default)]
pub(super) struct Spares(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    held: Vec<Held>,
    /// Freed by the hook, and not yet taken off the model's figures.
    spent: Vec<Held>,
    /// The hook runs: one that allocates may be called again.
    busy: bool,
}

impl Spares {
    fn with<T>(&self, f: impl FnOnce(&mut Lists) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn spent(&self) -> Vec<Held> {
        self.with(|lists| std::mem::take(&mut lists.spent))
    }

    /// Frees the block that was left first; its bytes. A fault may keep it.
    fn free_first(&self) -> u64 {
        let first = self.with(|lists| (!lists.held.is_empty()).then(|| lists.held.remove(0)));
        let Some(mut held) = first else {
            return 0;
        };
        let uses = uses_of(&checker(), &held);
        match held.block.take().map(cualloc::Block::free) {
            Some(Err(refused)) => {
                held.block = Some(*refused.value);
                self.with(|lists| lists.held.push(held));
                0
            }
            _ => {
                checker().tracker().freed_after(held.ptr, &uses);
                let size = held.size;
                self.with(|lists| lists.spent.push(held));
                size
            }
        }
    }

    fn relieve(&self, relief: Relief, (alloc, stream, owner): &(Allocator, Stream, usize)) -> u64 {
        let mut freed = self.free_first();
        match relief {
            Relief::Nothing => {}
            Relief::All => loop {
                match self.free_first() {
                    0 => break,
                    more => freed += more,
                }
            },
            Relief::Trim => freed += alloc.trim(0).map_or(0, |trimmed| trimmed.released),
            Relief::Synchronize => drop(alloc.synchronize()),
            Relief::Allocate => {
                if let Ok(block) = alloc.allocate(3000, stream) {
                    let (start, checker) = (block.ptr(), checker());
                    checker.tracker().handed_out(start, block.size(), *owner);
                    let last = checker.tracker().position(*owner);
                    drop(block);
                    checker.tracker().freed_after(start, &[last]);
                }
            }
        }
        freed
    }
}

impl Machine<'_> {
    /// Whether one of the live blocks is such.
    pub(super) fn any_held(&self, mut such: impl FnMut(&Held) -> bool) -> bool {
        let mut held = self.blocks.iter().chain(&self.deferred);
        held.any(&mut such) || self.spares.with(|lists| lists.held.iter().any(such))
    }

    pub(super) fn spare(&mut self, pick: u32) -> Done {
        if let Some(at) = self.block(pick)
            && self.blocks[at].block.is_some()
        {
            let held = self.blocks.swap_remove(at);
            self.spares.with(|lists| lists.held.push(held));
        }
        Ok(())
    }

    pub(super) fn hook(&mut self, relief: Option<Relief>, stream: u32) -> Done {
        let lane = &self.lanes[self.lane(stream)];
        let (Some(relief), Handle::Owned(stream)) = (relief, &lane.handle) else {
            self.alloc.remove_relief_hook(NAME);
            return Ok(());
        };
        let relief = match relief {
            // It may raise the peak, which is exact without stream caches.
            Relief::Allocate if self.setup.policy == Policy::Classic => Relief::Nothing,
            other => other,
        };
        let spares = Arc::clone(&self.spares);
        let with = (self.alloc.clone(), stream.clone(), lane.number);
        self.alloc
            .add_relief_hook(cualloc::allocator::ReliefHook::new(NAME, move |_| {
                if spares.with(|lists| std::mem::replace(&mut lists.busy, true)) {
                    return 0;
                }
                let freed = spares.relieve(relief, &with);
                spares.with(|lists| lists.busy = false);
                freed
            }));
        Ok(())
    }

    /// The hook goes, and what was left to it is the program's again.
    pub(super) fn take_spares(&mut self) {
        self.alloc.remove_relief_hook(NAME);
        self.late(None);
        let held = self.spares.with(|lists| std::mem::take(&mut lists.held));
        self.blocks.extend(held);
    }

    /// Compares what the allocator tells of itself with the model.
    pub(super) fn look(&mut self) -> Done {
        self.late(None);
        if let Some(held) = self.blocks.first() {
            let (ptr, last) = (held.ptr, held.ptr + held.size - 1);
            let told = |at| self.alloc.block_of(at);
            let right = |info: &BlockInfo| {
                info.address == ptr && info.size == held.size && info.requested == held.requested
            };
            for at in [ptr, last] {
                let info = told(at);
                if !info.as_ref().is_some_and(right) {
                    return Err(format!("{at:#x} is in a block: {info:?}"));
                }
            }
        }
        let cached = self.alloc.cached();
        let stats = self.alloc.stats();
        if cached != stats.cached() {
            return Err(format!(
                "{cached} bytes cached, {} by the statistics",
                stats.cached()
            ));
        }
        let (_, snapshot) = self.alloc.stats_and_snapshot();
        self.compare_live(&snapshot)
    }
}
