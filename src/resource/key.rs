//! Keys of blocks, and tables of those that are named by their keys: for those who hold a name instead of the
//! block.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::process;
use crate::locks::held::Locked;

/// Tells a block's life from every other one of the process, also where an address or a record is
/// used again: the resource that made it, its record there, and the record's generation. Resources
/// and generations are counted from 1 and never used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockKey {
    /// The allocator, or the other source of memory, that made the block.
    pub source: u64,
    /// The block's record there.
    pub id: u32,
    /// How often the record was in use, this time included.
    pub generation: u64,
}

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
