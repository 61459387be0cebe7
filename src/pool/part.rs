//! What a pool has on one device: an allocator, a threshold for what that holds without need, and a table of
//! buffers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Block, Config, Policy, Request, Trimmed, size};
use crate::driver::{Context, Driver, Stream};

use super::table::{Key, Table};
use super::{RareLog, device_of};
use crate::error::Error;

/// The threshold that keeps everything.
const NONE: u64 = u64::MAX;

/// See the text of the module. The allocator is made on first use.
pub(super) struct Part {
    pub ordinal: usize,
    pub table: Table,
    /// `None` stands for the process-wide driver.
    driver: Option<Driver>,
    config: Config,
    allocator: OnceLock<Allocator>,
    threshold: AtomicU64,
    log: RareLog,
}

impl Part {
    /// For a device of a driver, by default the process-wide one.
    pub fn new(driver: Option<Driver>, ordinal: usize, config: Config) -> Part {
        Part {
            ordinal,
            table: Table::default(),
            driver,
            config,
            allocator: OnceLock::new(),
            threshold: AtomicU64::new(NONE),
            log: RareLog::default(),
        }
    }

    /// Over an allocator that others may use as well.
    pub fn over(allocator: &Allocator) -> Part {
        let context = allocator.context();
        let part = Part::new(
            Some(context.driver().clone()),
            context.device().ordinal(),
            Config::new(),
        );
        Part {
            allocator: OnceLock::from(allocator.clone()),
            ..part
        }
    }

    /// The allocator, if it was made.
    pub fn made(&self) -> Option<&Allocator> {
        self.allocator.get()
    }

    /// The allocator, made on first use. A failure is not remembered.
    pub fn allocator(&self) -> Result<&Allocator, Error> {
        if let Some(allocator) = self.allocator.get() {
            return Ok(allocator);
        }
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => Driver::load()?,
        };
        let device = device_of(&driver, self.ordinal)?;
        let context = Context::primary(&device)?;
        // Two threads may both get here: one of the two allocators, which holds nothing yet, goes.
        let made = Allocator::with_config(&context, self.config.clone())?;
        Ok(self.allocator.get_or_init(|| made))
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// A block from cached memory that the stream may use without a wait: at the address that was returned
    /// last with this key, else the best fit.
    pub fn cached_block(
        &self,
        key: &Key,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Option<Block>, Error> {
        if let Some(block) = self.hit(key, alignment, stream) {
            return Ok(Some(block));
        }
        self.search(key, alignment, stream)
    }

    /// The last returned block again, if it is the next one of its size that the stream's cache hands out, as
    /// it mostly is; where no return is remembered, any that is at hand.
    #[inline]
    fn hit(&self, key: &Key, alignment: usize, stream: &Stream) -> Option<Block> {
        let engine = self.made()?.engine();
        if !engine.unwatched() || alignment as u64 > size::GRANULE {
            return None;
        }
        let (id, bytes) = (stream.id_at_hand(), key.1);
        let grant = self.table.hit(key, |last| match last {
            Some(address) => engine.hit_at(id, bytes, address),
            None => engine.hit(id, bytes).ok(),
        })?;
        Some(Block::new(engine, grant, bytes))
    }

    /// A cached block by the addresses of the last returns.
    #[inline(never)]
    fn search(&self, key: &Key, alignment: usize, stream: &Stream) -> Result<Option<Block>, Error> {
        let allocator = self.allocator()?;
        allocator.engine().usable()?;
        let hints = self.table.hints(key);
        let near = hints.as_slice();
        let request = Request::new(key.1).align(alignment);
        let (block, free) = allocator.allocate_near(request, stream, near)?;
        self.table.answered(key, &hints, block.is_some(), &free);
        Ok(block)
    }

    /// A cached block as [`cached_block`](Self::cached_block), else a new one.
    #[inline]
    pub fn block(&self, key: &Key, alignment: usize, stream: &Stream) -> Result<Block, Error> {
        if let Some(block) = self.hit(key, alignment, stream) {
            self.release(true);
            return Ok(block);
        }
        self.searched_or_new(key, alignment, stream)
    }

    #[inline(never)]
    fn searched_or_new(
        &self,
        key: &Key,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Block, Error> {
        let found = self.search(key, alignment, stream)?;
        self.release(true);
        if let Some(found) = found {
            return Ok(found);
        }
        let request = Request::new(key.1).align(alignment);
        self.allocator()?.allocate_with(request, stream)
    }

    // ---- surplus ---------------------------------------------------------------------------

    /// The bytes that may be held without need; `None` for any number.
    pub fn threshold(&self) -> Option<u64> {
        match self.threshold.load(Ordering::Relaxed) {
            NONE => None,
            bytes => Some(bytes),
        }
    }

    /// Sets the threshold, and gives back at once what is above it.
    pub fn set_threshold(&self, bytes: Option<u64>) -> Result<(), Error> {
        let bytes = bytes.unwrap_or(NONE);
        self.threshold.store(bytes, Ordering::Relaxed);
        self.trim(bytes).map(drop)
    }

    /// Bytes held and not in live blocks.
    pub fn cached(&self) -> u64 {
        self.made()
            .map_or(0, |allocator| allocator.stats().cached())
    }

    /// Gives unused memory back until at most `keep` bytes of it are held.
    pub fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        match self.made() {
            Some(allocator) => Ok(allocator.trim(keep)?),
            None => Ok(Trimmed::default()),
        }
    }

    /// A relief hook for others, which does not keep this.
    pub fn relief(self: &Arc<Self>) -> impl Fn(u64) -> u64 + Send + Sync + use<> {
        let part = Arc::downgrade(self);
        move |missing| {
            let Some(part) = part.upgrade() else {
                return 0;
            };
            let Some(allocator) = part.made() else {
                return 0;
            };
            let keep = allocator.cached().saturating_sub(missing);
            allocator.trim(keep).map_or(0, |done| done.released)
        }
    }

    /// Gives back what is above the threshold. `may_wait` says whether that may be by a call which
    /// waits for running work.
    #[inline]
    pub fn release(&self, may_wait: bool) {
        if self.threshold.load(Ordering::Relaxed) != NONE {
            self.release_surplus(may_wait);
        }
    }

    #[cold]
    fn release_surplus(&self, may_wait: bool) {
        let (Some(allocator), Some(threshold)) = (self.made(), self.threshold()) else {
            return;
        };
        if allocator.cached() <= threshold {
            return;
        }
        if !may_wait && allocator.policy() == Policy::Classic {
            return;
        }
        if let Err(error) = allocator.trim(threshold)
            && let Some(count) = self.log.due()
        {
            log::warn!("surplus could not be given back ({count} such events): {error}");
        }
    }
}
