//! Where plain allocations lie: in units of the device, small ones together in one.

use super::address::Addresses;
use super::call::{R, fail};
use super::physical::Slab;
use super::physical::{Mapping, Origin, Props};
use super::state::State;
use crate::driver::sys::CUresult;

/// Plain allocations are rounded up to this.
const ALIGN: u64 = 512;

/// `cuMemAlloc` takes a multiple of this from the device; allocations of at most half of it share one with others of
/// their context.
const UNIT: u64 = 2 << 20;
const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;

impl State {
    /// An unused range of plain addresses.
    pub(super) fn plain_range(&mut self, bytes: u64, align: u64) -> R<u64> {
        if !self.quarantine.is_empty() && !self.anything_pending() {
            for (start, bytes) in std::mem::take(&mut self.quarantine) {
                self.plain.give(start, bytes);
            }
        }
        self.plain.take(bytes, align).ok_or(OUT_OF_MEMORY)
    }

    /// Gives a range of plain addresses back, later if anything is pending.
    pub(super) fn give_plain_range(&mut self, start: u64, bytes: u64) {
        let pending = self.anything_pending();
        let (mut start, mut bytes) = (start, bytes);
        let slab = self.slabs.range_mut(..=start).next_back();
        if let Some((&first, slab)) = slab.filter(|(first, slab)| start < **first + slab.bytes) {
            slab.live -= 1;
            if slab.live > 0 {
                match pending {
                    true => slab.quarantine.push((start, bytes)),
                    false => slab.free.give(start, bytes),
                }
                return;
            }
            let device = self.ctxs[slab.ctx].device;
            (start, bytes) = (first, slab.bytes);
            self.devices[device].used -= bytes;
            self.slabs.remove(&first);
        }
        if pending {
            self.quarantine.push((start, bytes));
        } else {
            self.plain.give(start, bytes);
        }
    }

    /// Room for a small allocation in a unit that the context has, or a new one.
    fn slab_range(&mut self, ctx: usize, bytes: u64) -> R<u64> {
        let pending = self.anything_pending();
        for slab in self.slabs.values_mut().filter(|slab| slab.ctx == ctx) {
            if !pending {
                for (start, bytes) in slab.quarantine.drain(..) {
                    slab.free.give(start, bytes);
                }
            }
            if let Some(at) = slab.free.take(bytes, ALIGN) {
                slab.live += 1;
                return Ok(at);
            }
        }
        let device = self.ctxs[ctx].device;
        if UNIT > self.free_bytes(device) {
            return fail(OUT_OF_MEMORY);
        }
        let start = self.plain_range(UNIT, UNIT)?;
        self.devices[device].used += UNIT;
        let mut free = Addresses::new(start, start + UNIT);
        let at = free.take(bytes, ALIGN).ok_or(OUT_OF_MEMORY)?;
        let slab = Slab {
            ctx,
            bytes: UNIT,
            live: 1,
            free,
            quarantine: Vec::new(),
        };
        self.slabs.insert(start, slab);
        Ok(at)
    }

    /// Memory as `cuMemAlloc` gives it.
    pub(super) fn new_plain(&mut self, ctx: usize, bytes: u64) -> R<u64> {
        let device = self.ctxs[ctx].device;
        let rounded = bytes.checked_next_multiple_of(UNIT).ok_or(OUT_OF_MEMORY)?;
        let bytes = bytes.next_multiple_of(ALIGN);
        let (address, charged) = if bytes <= UNIT / 2 {
            (self.slab_range(ctx, bytes)?, 0)
        } else if rounded > self.free_bytes(device) {
            return fail(OUT_OF_MEMORY);
        } else {
            (self.plain_range(bytes, ALIGN)?, rounded)
        };
        let alloc = self.create_charged(device, bytes, charged, (0, Props::default()))?;
        let access = self.plain_access(device);
        self.map(address, alloc, Origin::Plain(ctx), access);
        Ok(address)
    }

    /// Frees all plain memory of a context whose work is complete.
    pub(super) fn free_plain_of(&mut self, ctx: usize) {
        let mine = |mapping: &Mapping| {
            mapping.origin == Origin::Plain(ctx) || mapping.origin == Origin::Ipc(ctx)
        };
        let list: Vec<(u64, u64)> = self
            .mappings
            .iter()
            .filter(|(_, mapping)| mine(mapping))
            .map(|(&start, mapping)| (start, mapping.bytes))
            .collect();
        for (start, bytes) in list {
            self.unmap(start);
            self.give_plain_range(start, bytes);
        }
    }
}
