//! Resources, line by line.

mod adaptors;
mod identity;
mod order;
mod pending;
mod rare;
mod sources;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Mutex;

use cualloc::driver::Stream;
use cualloc::resource::*;
use cualloc::{Allocator, Error, Refused, Request, Tag};

use crate::common::*;
use crate::{REFUSAL, ask, outstanding, packed, refusal, take};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that the thread has allocated and not freed.
    static HEAP: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: passes everything on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        let _ = HEAP.try_with(|bytes| bytes.set(bytes.get() + layout.size() as i64));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let _ = HEAP.try_with(|bytes| bytes.set(bytes.get() - layout.size() as i64));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

fn asynchronous(rig: &Rig) -> AccessOrdered {
    AccessOrdered::new(rig.allocator())
}

fn poisoned<R: MemoryResource>(resource: R) -> Sanitizer<R> {
    Sanitizer::new(resource).poison_freed(Some(0xDD))
}

fn fail(rig: &Rig, call: &str) -> bool {
    let Some(sim) = rig.sim() else { return false };
    sim.fail(refusal(call));
    true
}

/// Hands its first block out again and again, under new keys.
struct Twice(Allocator, Mutex<Option<(u64, usize)>>);

// SAFETY: none: the test hands a block out twice on purpose, and its memory is not used.
unsafe impl MemoryResource for Twice {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let mut first = self.1.lock().unwrap();
        if let Some((ptr, size)) = *first {
            // SAFETY: none, see above.
            return unsafe { RawBlock::from_raw_parts(ptr, size, request, stream) };
        }
        let block = MemoryResource::allocate_block(&self.0, request, stream)?;
        *first = Some((block.ptr(), block.size()));
        Ok(block)
    }
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.0.deallocate_block(block)
    }
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.0)
    }
}
