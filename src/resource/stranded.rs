//! Blocks without an owner that a resource could not take back yet.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::process;

use super::block::RawBlock;
use crate::locks::held::Mutex;

/// A later call tries again with each of them.
#[derive(Debug, Default)]
pub(super) struct Stranded {
    any: AtomicBool,
    blocks: Mutex<Vec<RawBlock>>,
}

impl Stranded {
    pub(super) fn keep(&self, block: RawBlock) {
        process::lock(&self.blocks).push(block);
        self.any.store(true, Ordering::Release);
    }

    /// All of them, which are the caller's to give back or to keep again.
    pub(super) fn take(&self) -> Vec<RawBlock> {
        if !self.any.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut *process::lock(&self.blocks))
    }
}

impl Drop for Stranded {
    fn drop(&mut self) {
        let lost = if process::is_gone() {
            0
        } else {
            self.take().len()
        };
        if lost > 0 {
            log::warn!("{lost} blocks without an owner leak with their resource");
        }
    }
}
