//! Steps that begin and end allocators, and their hooks.

use std::sync::Arc;

use cualloc::allocator::Allocator;

use super::table::checker;
use super::world::{Done, Held, Kind, Lane, Slot, World};

impl World {
    /// A hook that frees what was put aside, trims, or allocates.
    pub(super) fn hook(&mut self, slot: usize, a: u32) -> Done {
        let allocator = self.slots[slot].allocator.clone();
        if a.is_multiple_of(4) {
            allocator.remove_relief_hook("judge");
            self.slots[slot].hooked = false;
            return Ok(());
        }
        let stash = Arc::clone(&self.stash);
        let inner = allocator.clone();
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new(
            "judge",
            move |missing| {
                if a % 5 == 1 {
                    let _ = inner.trim(0);
                }
                let mut freed = 0;
                while freed < missing {
                    let next = stash.lock().unwrap().pop();
                    let Some(held) = next else { break };
                    freed += held.bytes;
                    let Kind::Block(block) = held.kind else { break };
                    checker().tracker().freed(held.ptr);
                    drop(block);
                    if a.is_multiple_of(3) {
                        break;
                    }
                }
                if a % 5 == 2 {
                    let _ = inner.stats();
                    drop(inner.snapshot());
                }
                freed
            },
        ));
        self.slots[slot].hooked = true;
        Ok(())
    }

    pub(super) fn unhook(&mut self, slot: usize) {
        self.slots[slot].allocator.remove_relief_hook("judge");
        self.slots[slot].hooked = false;
    }

    pub fn forget_slot(&mut self, slot: usize) {
        for lane in &mut self.lanes {
            lane.raw_in.remove(&slot);
            lane.owned_in.remove(&slot);
            lane.kept_in.remove(&slot);
        }
    }

    pub(super) fn fresh(&mut self, slot: usize) -> Done {
        let context = self.places[self.slots[slot].place].context.clone();
        match Allocator::with_config(&context, self.config()) {
            Ok(allocator) => {
                let place = self.slots[slot].place;
                let new = Slot {
                    allocator,
                    place,
                    layers: Default::default(),
                    hooked: false,
                };
                self.slots[slot] = new;
                self.forget_slot(slot);
                Ok(())
            }
            Err(error) => self.refused("no new allocator", &error),
        }
    }

    /// Closes an allocator, which must say why if it does not; a new one takes its place.
    pub(super) fn reopen(&mut self, slot: usize) -> Done {
        super::table::nothing_inside();
        let of = |h: &Held| h.slot == slot && !h.orphan;
        let live = self.held.iter().any(of) || self.stash.lock().unwrap().iter().any(of);
        let guarded = self.guards.iter().any(|(s, _, _)| *s == slot);
        let orphans = self.held.iter().any(|h| h.slot == slot && h.orphan);
        if self.slots[slot].layers.is_empty() && !orphans {
            self.become_current(self.slots[slot].place);
            let allocator = self.slots[slot].allocator.clone();
            // Also by a thread without a context.
            let result = match self.setup.seed.is_multiple_of(2) {
                true => self.helped(move || allocator.close())?,
                false => allocator.close(),
            };
            match result {
                Ok(()) if live || guarded => {
                    return Err("an allocator with live blocks was closed".to_owned());
                }
                Ok(()) => {
                    self.unhook(slot);
                    let stats = self.slots[slot].allocator.stats();
                    if stats.all.reserved.current != 0 {
                        return Err(format!("closed, and holds memory: {:?}", stats.all));
                    }
                    return self.fresh(slot);
                }
                Err(error) if live || guarded => drop(error),
                Err(error) => return self.refused("close was refused", &error),
            }
        }
        Ok(())
    }

    /// The last handle goes while blocks are live.
    pub(super) fn abandon(&mut self, slot: usize) -> Done {
        super::table::nothing_inside();
        let plain = |h: &Held| {
            let kept = |lane: &usize| self.lanes[*lane].stream.is_some();
            matches!(h.kind, Kind::Block(_)) && kept(&h.home) && h.recorded.iter().all(kept)
        };
        let fits = |h: &Held| h.slot != slot || h.orphan || plain(h);
        let stashed = self.stash.lock().unwrap();
        if !self.held.iter().all(fits)
            || !self.slots[slot].layers.is_empty()
            || stashed.iter().any(|h| h.slot == slot)
            || self.guards.iter().any(|(s, _, _)| *s == slot)
        {
            return Ok(());
        }
        drop(stashed);
        // Without a handle, streams of a context that other code destroys cannot be retired.
        let known = |lane: &Lane| lane.raw_in.contains(&slot) || lane.owned_in.contains(&slot);
        let mut lanes = self.lanes.iter();
        if lanes.any(|lane| lane.alive && self.places[lane.place].foreign && known(lane)) {
            return Ok(());
        }
        // What raw streams were told of must be marked, or it waits for the context.
        self.unhook(slot);
        let before = self.slots[slot].allocator.id();
        self.abandoned = true;
        self.fresh(slot)?;
        if self.slots[slot].allocator.id() != before {
            for held in &mut self.held {
                held.orphan |= held.slot == slot;
            }
        }
        Ok(())
    }
}
