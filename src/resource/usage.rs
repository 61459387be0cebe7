//! What a source of memory holds and hands out.

use crate::allocator::{self, Allocator};

/// A quantity now, and the most it was. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauge {
    /// Now.
    pub current: u64,
    /// The most since the start or the last reset.
    pub peak: u64,
}

impl From<allocator::Counter> for Gauge {
    fn from(counter: allocator::Counter) -> Gauge {
        Gauge {
            current: counter.current,
            peak: counter.peak,
        }
    }
}

/// What a source of memory holds and hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUsage {
    /// Bytes held from the driver.
    pub reserved: Gauge,
    /// Bytes in live blocks, as the source rounds them.
    pub used: Gauge,
}

impl PoolUsage {
    /// Bytes held and not in live blocks.
    pub fn unused(&self) -> u64 {
        self.reserved.current.saturating_sub(self.used.current)
    }

    /// That of an allocator.
    pub(crate) fn of(allocator: &Allocator) -> PoolUsage {
        let all = allocator.stats().all;
        PoolUsage {
            reserved: all.reserved.into(),
            used: all.allocated.into(),
        }
    }
}
