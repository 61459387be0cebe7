//! A pool described.

use std::fmt;

use crate::allocator::{Allocator, BlockState, SegmentInfo};
use crate::resource::Usage;

use super::histogram::SizeHistogram;

/// In what pieces free memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Fragmentation {
    /// Free bytes.
    pub total_free: u64,
    /// The largest free piece in bytes.
    pub largest_free: u64,
    /// Free pieces.
    pub count: u64,
}

impl Fragmentation {
    /// Of free pieces of the given sizes.
    pub fn of(pieces: impl IntoIterator<Item = u64>) -> Fragmentation {
        pieces
            .into_iter()
            .fold(Fragmentation::default(), |sum, bytes| Fragmentation {
                total_free: sum.total_free.saturating_add(bytes),
                largest_free: sum.largest_free.max(bytes),
                count: sum.count + 1,
            })
    }

    /// The share of free memory that is not in the largest piece: 0 if all is in one piece or nothing
    /// is free.
    pub fn ratio(&self) -> f64 {
        if self.total_free == 0 {
            return 0.0;
        }
        1.0 - self.largest_free as f64 / self.total_free as f64
    }

    /// Bytes of a free piece on average; 0 if nothing is free.
    pub fn mean(&self) -> u64 {
        self.total_free.checked_div(self.count).unwrap_or(0)
    }
}

/// An allocator's memory at one instant.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PoolReport {
    /// The bytes held, and the blocks handed out.
    pub usage: Usage,
    /// Allocations since the start.
    pub allocations: u64,
    /// Frees since the start.
    pub frees: u64,
    /// Live blocks by the size that was asked for.
    pub sizes: SizeHistogram,
    /// The free memory.
    pub fragmentation: Fragmentation,
}

impl PoolReport {
    /// Describes an allocator. Costs a walk over its blocks.
    pub fn of(allocator: &Allocator) -> PoolReport {
        let (stats, segments) = allocator.stats_and_snapshot();
        let mut sizes = SizeHistogram::default();
        let mut free = Vec::new();
        let blocks = |segment: &SegmentInfo| segment.blocks.clone();
        for block in segments.iter().flat_map(blocks) {
            match block.state {
                BlockState::Live => sizes.record(block.requested),
                BlockState::Free | BlockState::Pending => free.push(block.size),
                // Lent memory is counted as the block in the view.
                _ => {}
            }
        }
        PoolReport {
            usage: Usage::of(&stats),
            allocations: stats.all.allocations.total_allocated,
            frees: stats.all.allocations.total_freed,
            sizes,
            fragmentation: Fragmentation::of(free),
        }
    }

    /// Live blocks.
    pub fn live(&self) -> u64 {
        self.allocations.saturating_sub(self.frees)
    }

    /// Whether blocks are live: a leak, if the program thinks that it has freed all.
    pub fn leaks(&self) -> bool {
        self.live() > 0
    }
}

impl fmt::Display for PoolReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} blocks of {} B live (peak {} B), {} B held (peak {} B), {} B free in {} pieces (largest {} B)",
            self.live(),
            self.usage.used.current,
            self.usage.used.peak,
            self.usage.reserved.current,
            self.usage.reserved.peak,
            self.fragmentation.total_free,
            self.fragmentation.count,
            self.fragmentation.largest_free,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S3.22
    #[test]
    fn s3_22_fragmentation_is_what_is_not_in_the_largest_piece() {
        let none = Fragmentation::of([]);
        assert_eq!((none.ratio(), none.mean()), (0.0, 0));
        let one = Fragmentation::of([4096]);
        assert_eq!((one.ratio(), one.mean()), (0.0, 4096));
        let some = Fragmentation::of([1024, 512, 512]);
        assert_eq!(
            (some.total_free, some.largest_free, some.count),
            (2048, 1024, 3)
        );
        assert_eq!((some.ratio(), some.mean()), (0.5, 682));
    }
}
