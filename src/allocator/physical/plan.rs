//! What is to be given back to the driver, and in which sizes memory is asked for, as values.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::size::PHYSICAL_GRANULE;

/// Memory to give back.
#[derive(Debug)]
pub(crate) struct Release {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    pub addr: u64,
    pub bytes: u64,
    pub handle: Option<u64>,
}

/// Sizes of the handles for `bytes`: whole ones, then halves down to the granule.
pub(crate) fn tile(bytes: u64, size: u64) -> Vec<u64> {
    let (mut sizes, mut left, mut size) = (Vec::new(), bytes, size.max(PHYSICAL_GRANULE));
    while left > 0 {
        if size <= left {
            sizes.push(size);
            left -= size;
        } else {
            size = (size / 2 / PHYSICAL_GRANULE * PHYSICAL_GRANULE).max(PHYSICAL_GRANULE);
        }
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiling_covers_exactly_with_the_fewest_pieces_of_halving_size() {
        let mib = 1 << 20;
        assert_eq!(tile(14 * mib, 8 * mib), [8 * mib, 4 * mib, 2 * mib]);
        assert_eq!(tile(6 * mib, 6 * mib), [6 * mib]);
        assert_eq!(tile(2 * mib, 64 * mib), [2 * mib]);
        for granules in 1..200 {
            for size in [1, 2, 3, 5, 8, 16] {
                let sizes = tile(granules * PHYSICAL_GRANULE, size * PHYSICAL_GRANULE);
                assert_eq!(sizes.iter().sum::<u64>(), granules * PHYSICAL_GRANULE);
                assert!(
                    sizes
                        .iter()
                        .all(|s| s % PHYSICAL_GRANULE == 0 && *s <= size * PHYSICAL_GRANULE)
                );
            }
        }
    }
}
