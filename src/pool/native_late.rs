//! Dropped blocks of the driver's pools that could not go yet.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::process;
use crate::held::Locked;

use super::native::Inner;
use super::native_block::NativeBlock;

/// Each is freed by a later call that may find the capture ended, or the driver willing: one of its pool, or what
/// does the postponed work of the process. Meanwhile it keeps its pool.
static KEPT: Mutex<Kept> = Mutex::new(Kept {
    blocks: Vec::new(),
    tries: 0,
    asked: 0,
});

/// Whether there is any.
static ANY: AtomicBool = AtomicBool::new(false);

#[derive(Default)]
struct Kept {
    blocks: Vec<NativeBlock>,
    /// Threads that try to free some, which are not among those that wait meanwhile.
    tries: usize,
    /// How often somebody asked to have it tried.
    asked: u64,
}

fn kept() -> Locked<'static, Kept> {
    process::lock(&KEPT)
}

/// Keeps a block that nobody can name any more.
pub(super) fn keep(block: NativeBlock) {
    let mut kept = kept();
    kept.blocks.push(block);
    ANY.store(true, Ordering::Release);
    process::BLOCKS.postpone(free_all);
}

/// Tries to free those of a pool.
#[inline]
pub(super) fn free_those_of(pool: &Arc<Inner>) {
    if ANY.load(Ordering::Acquire) && !process::is_gone() {
        free(|block| block.is_of(pool));
    }
}

fn free_all() {
    free(|_| true);
}

#[cold]
fn free(which: impl Fn(&NativeBlock) -> bool) {
    let mut all = kept();
    all.asked += 1;
    loop {
        let asked = all.asked;
        let tried: Vec<NativeBlock> = all.blocks.extract_if(.., |block| which(block)).collect();
        if tried.is_empty() {
            break;
        }
        all.tries += 1;
        drop(all);
        // With the last of them a pool may go.
        let still = tried.into_iter().filter_map(NativeBlock::try_again);
        let still: Vec<NativeBlock> = still.collect();
        all = kept();
        all.tries -= 1;
        all.blocks.extend(still);
        // Another thread that asked meanwhile found none of these.
        if all.asked == asked {
            break;
        }
    }
    if all.blocks.is_empty() && all.tries == 0 {
        ANY.store(false, Ordering::Release);
        process::BLOCKS.nothing_waits();
    }
}
