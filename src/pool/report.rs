//! A description of an allocator: sizes of blocks, and fragmentation.

use std::fmt;
use std::ops::Range;

use crate::allocator::{Allocator, BlockState};
use crate::resource::Usage;

/// Smallest size of bucket 1, as a power of two.
const FIRST_BITS: u32 = 5;

/// Numbers of blocks by size, in 32 buckets: below 32 B, then one for each power of two (bucket i from 2^(i+4) up to
/// 2^(i+5)), the last from 2^35 on. Counters saturate.
///
/// ```
/// use cualloc::pool::SizeHistogram;
/// let mut sizes = SizeHistogram::default();
/// for bytes in [16, 100, 100, 4096] {
///     sizes.record(bytes, 1);
/// }
/// assert_eq!(sizes.median(), Some(64..128));
/// assert_eq!(SizeHistogram::range(1), Some(32..64));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SizeHistogram {
    counts: [u64; Self::BUCKETS],
}

impl SizeHistogram {
    /// The number of buckets.
    pub const BUCKETS: usize = 32;

    /// Returns the index of the bucket for a size in bytes.
    pub const fn bucket(bytes: u64) -> usize {
        let bits = u64::BITS - bytes.leading_zeros();
        match bits.saturating_sub(FIRST_BITS) as usize {
            index if index < Self::BUCKETS => index,
            _ => Self::BUCKETS - 1,
        }
    }

    /// Returns the sizes of a bucket in bytes.
    pub const fn range(bucket: usize) -> Option<Range<u64>> {
        match bucket {
            0 => Some(0..1 << FIRST_BITS),
            31 => Some(1 << 35..u64::MAX),
            1..31 => Some(1 << (bucket + 4)..1 << (bucket + 5)),
            _ => None,
        }
    }

    /// Counts blocks of one size.
    pub fn record(&mut self, bytes: u64, blocks: u64) {
        let count = &mut self.counts[Self::bucket(bytes)];
        *count = count.saturating_add(blocks);
    }

    /// Blocks in a bucket; 0 if there is no such bucket.
    pub fn count(&self, bucket: usize) -> u64 {
        self.counts.get(bucket).copied().unwrap_or(0)
    }

    /// Blocks in all buckets.
    pub fn total(&self) -> u64 {
        let counts = self.counts.iter();
        counts.fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Returns the sizes of the bucket of the smallest block that is at least as large as `percent` (0 to 100) of all
    /// blocks. `None` if nothing was counted.
    pub fn percentile(&self, percent: f64) -> Option<Range<u64>> {
        // The sum of saturated counters does not fit into their type.
        let total: u128 = self.counts.iter().map(|c| u128::from(*c)).sum();
        if total == 0 || percent.is_nan() {
            return None;
        }
        let rank = (percent.clamp(0.0, 100.0) / 100.0 * total as f64).ceil() as u128;
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += u128::from(*count);
            seen >= rank.clamp(1, total)
        });
        bucket.and_then(Self::range)
    }

    /// Returns the sizes of the bucket of the median.
    pub fn median(&self) -> Option<Range<u64>> {
        self.percentile(50.0)
    }
}

/// Pieces of free memory.
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
    /// Describes free pieces of the given sizes.
    pub fn of(pieces: impl IntoIterator<Item = u64>) -> Fragmentation {
        let mut sum = Fragmentation::default();
        for bytes in pieces {
            sum.total_free = sum.total_free.saturating_add(bytes);
            sum.largest_free = sum.largest_free.max(bytes);
            sum.count += 1;
        }
        sum
    }

    /// Returns the fraction of free memory outside the largest piece; 0 if nothing is free.
    pub fn ratio(&self) -> f64 {
        match self.total_free {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }

    /// Returns the mean size of free pieces in bytes; 0 if nothing is free.
    pub fn mean(&self) -> u64 {
        self.total_free.checked_div(self.count).unwrap_or(0)
    }
}

/// An allocator's memory at one instant.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PoolReport {
    /// Bytes held from the driver, and blocks allocated and freed.
    pub usage: Usage,
    /// Live blocks by requested size.
    pub sizes: SizeHistogram,
    /// The free memory.
    pub fragmentation: Fragmentation,
}

impl PoolReport {
    /// Describes an allocator, by a walk over its blocks.
    pub fn of(allocator: &Allocator) -> PoolReport {
        let (stats, segments) = allocator.stats_and_snapshot();
        let mut sizes = SizeHistogram::default();
        let mut free = Vec::new();
        for block in segments.into_iter().flat_map(|segment| segment.blocks) {
            match block.state {
                BlockState::Live => sizes.record(block.requested, 1),
                BlockState::Free | BlockState::Pending => free.push(block.size),
                // Lent memory is counted as the block in the view.
                _ => {}
            }
        }
        PoolReport {
            usage: Usage::of(&stats),
            sizes,
            fragmentation: Fragmentation::of(free),
        }
    }

    /// Whether blocks are live.
    pub fn leaks(&self) -> bool {
        self.usage.blocks.current > 0
    }
}

impl fmt::Display for PoolReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, used) = (self.usage.blocks.current, self.usage.used);
        let (held, free) = (self.usage.reserved, self.fragmentation);
        write!(
            f,
            "{blocks} blocks of {} B live (peak {} B), {} B held (peak {} B), {} B free in {} pieces (largest {} B)",
            used.current,
            used.peak,
            held.current,
            held.peak,
            free.total_free,
            free.count,
            free.largest_free,
        )
    }
}
