//! The tracking adaptor: which blocks are live, by name.

use std::collections::HashMap;

use crate::allocator::Request;
use crate::driver::{Stream, process};
use crate::locks::held::{Locked, Mutex};

use super::block::RawBlock;
use super::traits::MemoryResource;
use crate::block::{BlockId, Tag};
use crate::error::{Error, Refused};

/// A block that a [`Tracking`] adaptor knows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBlock {
    /// The identity of the block.
    pub id: BlockId,
    /// The label of the request.
    pub tag: Tag,
    /// The name it was given, if it was.
    pub name: Option<String>,
}

/// Knows the live blocks that were allocated through it, their labels and names: for reports of what
/// is there, and of what was never given back.
///
/// A block's entry goes before the block goes down, so that another thread which gets its address
/// finds no entry of it; a failed deallocation puts the entry back.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::resource::{MemoryResource, Tracking};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let tracked = Tracking::new(allocator);
/// let block = tracked.allocate_block(&Request::new(1000).tag("cache"), &stream)?;
/// tracked.name(&block.id(), "layer 3")?;
/// assert_eq!(tracked.live()[0].name.as_deref(), Some("layer 3"));
/// assert_eq!(tracked.bytes_by_tag(), [("cache".into(), 1000)]);
/// tracked.deallocate_block(block)?;
/// assert!(tracked.live().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tracking<R> {
    inner: R,
    live: Mutex<HashMap<BlockId, LiveBlock>>,
}

impl<R: MemoryResource> Tracking<R> {
    /// Over another resource.
    pub fn new(inner: R) -> Self {
        Tracking {
            inner,
            live: Mutex::default(),
        }
    }

    fn map(&self) -> Locked<'_, HashMap<BlockId, LiveBlock>> {
        process::lock(&self.live)
    }

    /// Gives a live block a name.
    ///
    /// # Errors
    /// [`Error::UseAfterFree`].
    pub fn name(&self, block: &BlockId, name: impl Into<String>) -> Result<(), Error> {
        // Code that is not ours: without the lock.
        let name = name.into();
        match self.map().get_mut(block) {
            Some(live) => {
                live.name = Some(name);
                Ok(())
            }
            None => Err(block.gone()),
        }
    }

    /// All live blocks, by address.
    pub fn live(&self) -> Vec<LiveBlock> {
        let mut live: Vec<LiveBlock> = self.map().values().cloned().collect();
        live.sort_by_key(|block| (block.id.ptr(), block.id.generation()));
        live
    }

    /// Live bytes of each label, most first.
    pub fn bytes_by_tag(&self) -> Vec<(Tag, u64)> {
        let mut sums: HashMap<Tag, u64> = HashMap::new();
        for block in self.map().values() {
            *sums.entry(block.tag).or_default() += block.id.bytes() as u64;
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(tag, bytes)| (std::cmp::Reverse(*bytes), *tag));
        sums
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Gives up the adaptor.
    pub fn into_inner(self) -> R {
        self.inner
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Tracking<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let block = self.inner.allocate_block(request, stream)?;
        let id = block.id();
        let live = LiveBlock {
            id,
            tag: request.tag,
            name: None,
        };
        self.map().insert(id, live);
        Ok(block)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let key = block.id();
        let entry = self.map().remove(&key);
        self.inner.deallocate_block(block).inspect_err(|_| {
            if let Some(entry) = entry {
                self.map().insert(key, entry);
            }
        })
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
