//! The live blocks of an arena, with how many bytes each pool has of them.

use std::collections::HashMap;
use std::collections::hash_map::ValuesMut;
use std::ops::Deref;

use crate::allocator::extent::hash::Mixed;

/// A block as it is counted.
pub(crate) trait Counted {
    /// Its pool.
    fn owner(&self) -> u64;
    fn bytes(&self) -> u64;
}

/// Live blocks by their addresses, in no order.
#[derive(Debug)]
pub(crate) struct Lives<B> {
    blocks: HashMap<u64, B, Mixed>,
    /// Pools that have any, each with its bytes: a capture with many live blocks counts them at each of its requests.
    /// One, or those of a family.
    bytes: Vec<(u64, u64)>,
}

impl<B: Counted> Lives<B> {
    #[inline]
    pub(crate) fn insert(&mut self, addr: u64, live: B) {
        let (owner, bytes) = (live.owner(), live.bytes());
        match self.bytes.iter_mut().find(|(known, _)| *known == owner) {
            Some((_, known)) => *known += bytes,
            None => self.bytes.push((owner, bytes)),
        }
        let before = self.blocks.insert(addr, live);
        debug_assert!(before.is_none(), "an address has one block");
    }

    pub(crate) fn remove(&mut self, addr: u64) -> Option<B> {
        let live = self.blocks.remove(&addr)?;
        let mut pools = self.bytes.iter();
        if let Some(at) = pools.position(|(owner, _)| *owner == live.owner()) {
            self.bytes[at].1 -= live.bytes();
            if self.bytes[at].1 == 0 {
                self.bytes.swap_remove(at);
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
        self.bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of the blocks of a pool.
    pub(crate) fn bytes_of(&self, owner: u64) -> u64 {
        let mut pools = self.bytes.iter();
        pools
            .find(|(known, _)| *known == owner)
            .map_or(0, |(_, bytes)| *bytes)
    }
}

impl<B> Default for Lives<B> {
    fn default() -> Lives<B> {
        Lives {
            blocks: HashMap::default(),
            bytes: Vec::new(),
        }
    }
}

impl<B> Deref for Lives<B> {
    type Target = HashMap<u64, B, Mixed>;

    fn deref(&self) -> &HashMap<u64, B, Mixed> {
        &self.blocks
    }
}
