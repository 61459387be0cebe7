//! The live blocks of an arena, with how many bytes each pool has of them.

use std::collections::BTreeMap;
use std::collections::btree_map::ValuesMut;
use std::ops::Deref;

/// A block as it is counted.
pub(crate) trait Counted {
    /// Its pool.
    fn owner(&self) -> u64;
    fn bytes(&self) -> u64;
}

/// Live blocks by their addresses.
#[derive(Debug)]
pub(crate) struct Lives<B> {
    blocks: BTreeMap<u64, B>,
    /// Bytes of each pool that has any: a capture with many live blocks counts them at each of its requests.
    bytes: BTreeMap<u64, u64>,
}

impl<B: Counted> Lives<B> {
    pub(crate) fn insert(&mut self, addr: u64, live: B) {
        *self.bytes.entry(live.owner()).or_default() += live.bytes();
        let before = self.blocks.insert(addr, live);
        debug_assert!(before.is_none(), "an address has one block");
    }

    pub(crate) fn remove(&mut self, addr: u64) -> Option<B> {
        let live = self.blocks.remove(&addr)?;
        if let Some(bytes) = self.bytes.get_mut(&live.owner()) {
            *bytes -= live.bytes();
            if *bytes == 0 {
                self.bytes.remove(&live.owner());
            }
        }
        Some(live)
    }

    /// Owner and size of a block stay as they are.
    pub(crate) fn get_mut(&mut self, addr: u64) -> Option<&mut B> {
        self.blocks.get_mut(&addr)
    }

    /// As [`get_mut`](Self::get_mut), of all.
    pub(crate) fn values_mut(&mut self) -> ValuesMut<'_, u64, B> {
        self.blocks.values_mut()
    }

    /// Bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.values().sum()
    }

    /// Bytes of the blocks of a pool.
    pub(crate) fn bytes_of(&self, owner: u64) -> u64 {
        self.bytes.get(&owner).copied().unwrap_or(0)
    }
}

impl<B> Default for Lives<B> {
    fn default() -> Lives<B> {
        Lives {
            blocks: BTreeMap::new(),
            bytes: BTreeMap::new(),
        }
    }
}

impl<B> Deref for Lives<B> {
    type Target = BTreeMap<u64, B>;

    fn deref(&self) -> &BTreeMap<u64, B> {
        &self.blocks
    }
}
