//! Numbers of sources, and tables of blocks that go by their numbers: for those who hold a name instead of the
//! block.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::process;
use crate::locks::held::Locked;

/// The next number of a source of blocks that is not an allocator: in the half of the range that
/// allocators' numbers, which count up from 1, do not reach.
pub(crate) fn next_source() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Live blocks by number. Numbers count up from 1 and are never used again.
#[derive(Debug)]
pub(crate) struct Table<B> {
    source: u64,
    last: AtomicU64,
    blocks: Mutex<HashMap<u64, Arc<B>>>,
}

impl<B> Default for Table<B> {
    fn default() -> Self {
        Table {
            source: next_source(),
            last: AtomicU64::new(0),
            blocks: Mutex::default(),
        }
    }
}

impl<B> Table<B> {
    fn blocks(&self) -> Locked<'_, HashMap<u64, Arc<B>>> {
        process::lock(&self.blocks)
    }

    /// Tells this table's numbers from those of all others.
    pub(crate) fn source(&self) -> u64 {
        self.source
    }

    /// Keeps a block; its number.
    pub(crate) fn insert(&self, block: B) -> u64 {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.put(number, Arc::new(block));
        number
    }

    /// Keeps a block under a number that it had before.
    pub(crate) fn put(&self, number: u64, block: Arc<B>) {
        self.blocks().insert(number, block);
    }

    /// Takes a block out.
    pub(crate) fn take(&self, number: u64) -> Option<Arc<B>> {
        self.blocks().remove(&number)
    }

    /// A block, for calls that are made without the table's lock.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<B>> {
        self.blocks().get(&number).cloned()
    }
}
