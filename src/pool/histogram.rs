//! How large blocks are.

use std::ops::Range;

/// Smallest size of bucket 1, as a power of two.
const FIRST_BITS: u32 = 5;

/// Numbers of blocks by size, in 32 buckets: below 32 B, then one for each power of two (bucket i holds
/// sizes from 2^(i+4) up to 2^(i+5)), the last from 2^35 on. Counters stop at their largest value.
///
/// ```
/// use cualloc::pool::SizeHistogram;
/// let mut sizes = SizeHistogram::default();
/// for bytes in [16, 100, 100, 4096] {
///     sizes.record(bytes);
/// }
/// assert_eq!(sizes.median(), Some(64..128));
/// assert_eq!(SizeHistogram::range(1), Some(32..64));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SizeHistogram {
    counts: [u64; Self::BUCKETS],
}

impl SizeHistogram {
    /// How many buckets there are.
    pub const BUCKETS: usize = 32;

    /// Index of the bucket for a size in bytes.
    pub const fn bucket(bytes: u64) -> usize {
        let bits = u64::BITS - bytes.leading_zeros();
        if bits <= FIRST_BITS {
            return 0;
        }
        let index = (bits - FIRST_BITS) as usize;
        if index < Self::BUCKETS {
            index
        } else {
            Self::BUCKETS - 1
        }
    }

    /// The sizes of a bucket in bytes; the last ends with the largest number. `None` if there is no
    /// such bucket.
    pub const fn range(bucket: usize) -> Option<Range<u64>> {
        match bucket {
            0 => Some(0..1 << FIRST_BITS),
            31 => Some(1 << 35..u64::MAX),
            1..31 => Some(1 << (bucket + 4)..1 << (bucket + 5)),
            _ => None,
        }
    }

    /// Counts one block.
    pub fn record(&mut self, bytes: u64) {
        self.add(bytes, 1);
    }

    /// Counts several blocks of one size.
    pub fn add(&mut self, bytes: u64, blocks: u64) {
        let count = &mut self.counts[Self::bucket(bytes)];
        *count = count.saturating_add(blocks);
    }

    /// Blocks in a bucket; 0 if there is no such bucket.
    pub fn count(&self, bucket: usize) -> u64 {
        self.counts.get(bucket).copied().unwrap_or(0)
    }

    /// Blocks in all buckets.
    pub fn total(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum: u64, count| sum.saturating_add(*count))
    }

    /// The sizes of the bucket in which the block lies that is as large as or larger than `percent` of
    /// all (0 to 100, else the nearer of the two). `None` if nothing was counted.
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

    /// The sizes of the bucket in which the median lies.
    pub fn median(&self) -> Option<Range<u64>> {
        self.percentile(50.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S3.21
    #[test]
    fn s3_21_histogram_has_32_buckets_by_powers_of_two() {
        for (bytes, bucket) in [
            (0, 0),
            (31, 0),
            (32, 1),
            (63, 1),
            (64, 2),
            ((1 << 35) - 1, 30),
            (1 << 35, 31),
            (u64::MAX, 31),
        ] {
            assert_eq!(SizeHistogram::bucket(bytes), bucket, "{bytes}");
        }
        for bucket in 0..SizeHistogram::BUCKETS {
            let range = SizeHistogram::range(bucket).unwrap();
            assert_eq!(SizeHistogram::bucket(range.start), bucket);
            assert_eq!(SizeHistogram::bucket(range.end - 1), bucket);
        }
        assert_eq!(SizeHistogram::range(32), None);

        let mut sizes = SizeHistogram::default();
        assert_eq!(sizes.median(), None);
        for bytes in 1..=100 {
            sizes.record(bytes);
        }
        assert_eq!(sizes.percentile(0.0), Some(0..32));
        assert_eq!(sizes.percentile(31.0), Some(0..32));
        assert_eq!(sizes.percentile(32.0), Some(32..64));
        assert_eq!(sizes.median(), Some(32..64));
        assert_eq!(sizes.percentile(250.0), Some(64..128));
        assert_eq!(sizes.percentile(f64::NAN), None);

        sizes.add(1 << 20, u64::MAX);
        sizes.add(1 << 20, 5);
        assert_eq!(sizes.count(SizeHistogram::bucket(1 << 20)), u64::MAX);
        assert_eq!(sizes.total(), u64::MAX);
        assert_eq!(sizes.median(), Some(1 << 20..1 << 21));
    }
}
