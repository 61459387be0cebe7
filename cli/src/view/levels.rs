//! Curves at several levels of detail.

/// The finest stored level has bins of two to this many rows; finer ones are the rows themselves.
pub const FINEST: u32 = 4;

/// The least and the most of a curve in each bin, for bins of twice the length from level to level. The last level
/// has one bin, and all levels stand one behind the other.
pub struct Levels {
    pub least: Vec<u64>,
    pub most: Vec<u64>,
}

impl Levels {
    pub fn of(curve: &[u64]) -> Levels {
        let least = levels(curve, |bin| bin.iter().copied().min());
        let most = levels(curve, |bin| bin.iter().copied().max());
        Levels { least, most }
    }
}

fn levels(curve: &[u64], of: impl Fn(&[u64]) -> Option<u64>) -> Vec<u64> {
    let mut all: Vec<u64> = curve.chunks(1 << FINEST).filter_map(&of).collect();
    let mut begin = 0;
    while all.len() - begin > 1 {
        let next: Vec<u64> = all[begin..].chunks(2).filter_map(&of).collect();
        begin = all.len();
        all.extend(next);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_says_what_its_rows_say() {
        for rows in [0usize, 1, 15, 16, 17, 33, 1000, 4096] {
            let curve: Vec<u64> = (0..rows as u64)
                .map(|row| row.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20)
                .collect();
            let levels = Levels::of(&curve);
            let (mut bin, mut place) = (1 << FINEST, 0);
            while place < levels.most.len() {
                for rows in curve.chunks(bin) {
                    assert_eq!(Some(&levels.least[place]), rows.iter().min());
                    assert_eq!(Some(&levels.most[place]), rows.iter().max());
                    place += 1;
                }
                bin *= 2;
            }
            assert_eq!(place, levels.least.len());
            assert_eq!(levels.most.last(), curve.iter().max());
        }
    }
}
