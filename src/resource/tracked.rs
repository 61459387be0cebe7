//! The tracking adaptor: which blocks are live, by name.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::driver::{Context, Stream, process};
use crate::locks::held::Locked;

use super::block::{BlockIdentity, ResourceBlock, Tag};
use super::key::BlockKey;
use super::traits::MemoryResource;
use crate::error::{Error, Refused};

/// A block that a [`Tracked`] adaptor knows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBlock {
    /// Who it is.
    pub identity: BlockIdentity,
    /// Its label.
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
/// use cualloc::resource::{MemoryResource, Tracked};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let tracked = Tracked::new(allocator);
/// let block = tracked.allocate_block(1000, &stream, "cache".into())?;
/// tracked.name(&block.identity(), "layer 3")?;
/// assert_eq!(tracked.live()[0].name.as_deref(), Some("layer 3"));
/// assert_eq!(tracked.bytes_by_tag(), [("cache".into(), 1000)]);
/// tracked.deallocate_block(block)?;
/// assert!(tracked.live().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tracked<R> {
    inner: R,
    live: Mutex<HashMap<BlockKey, LiveBlock>>,
}

impl<R: MemoryResource> Tracked<R> {
    /// Over another resource.
    pub fn new(inner: R) -> Self {
        Tracked {
            inner,
            live: Mutex::default(),
        }
    }

    fn map(&self) -> Locked<'_, HashMap<BlockKey, LiveBlock>> {
        process::lock(&self.live)
    }

    /// Gives a live block a name.
    ///
    /// # Errors
    /// [`Error::UseAfterFree`].
    pub fn name(&self, block: &BlockIdentity, name: impl Into<String>) -> Result<(), Error> {
        match self.map().get_mut(&block.key) {
            Some(live) => {
                live.name = Some(name.into());
                Ok(())
            }
            None => Err(block.gone()),
        }
    }

    /// All live blocks, by address.
    pub fn live(&self) -> Vec<LiveBlock> {
        let mut live: Vec<LiveBlock> = self.map().values().cloned().collect();
        live.sort_by_key(|block| (block.identity.ptr, block.identity.key));
        live
    }

    /// Live bytes of each label, most first.
    pub fn bytes_by_tag(&self) -> Vec<(Tag, u64)> {
        let mut sums: HashMap<Tag, u64> = HashMap::new();
        for block in self.map().values() {
            *sums.entry(block.tag).or_default() += block.identity.bytes as u64;
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(tag, bytes)| (std::cmp::Reverse(*bytes), *tag));
        sums
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Tracked<R> {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        let block = self
            .inner
            .allocate_block_aligned(bytes, alignment, stream, tag)?;
        let identity = block.identity();
        let live = LiveBlock {
            identity,
            tag,
            name: None,
        };
        self.map().insert(identity.key, live);
        Ok(block)
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        let key = block.identity().key;
        let entry = self.map().remove(&key);
        self.inner.deallocate_block(block).inspect_err(|_| {
            if let Some(entry) = entry {
                self.map().insert(key, entry);
            }
        })
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
