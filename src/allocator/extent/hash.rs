//! A cheap hash for keys made of ids and sizes.

use std::hash::{BuildHasherDefault, Hasher};

/// Builds [`Mix`].
pub(crate) type Mixed = BuildHasherDefault<Mix>;

/// Multiplicative hashing (Knuth, "The Art of Computer Programming" 3, 6.4), word by word, for keys that no adversary
/// chooses: it takes a few instructions, where the standard hasher takes dozens.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(32) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    /// Hash tables use the lowest and the highest bits, but the low bits of the product do not depend on the high bits
    /// of the word.
    #[inline]
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    #[test]
    fn ids_and_sizes_are_distinguished() {
        let hash = |key: (u64, usize)| Mixed::default().hash_one(key);
        let keys = (0..64_u64).flat_map(|stream| (9..40).map(move |bit| (stream, 1_usize << bit)));
        // A table of 4096 slots indexed by the low bits, which are all zero in powers of two.
        let low: HashSet<_> = keys.clone().map(|key| hash(key) & 4095).collect();
        let all = keys.count();
        assert!(low.len() > all / 2, "{} of {all}", low.len());
        assert_eq!(hash((1, 2)), hash((1, 2)));
        assert_ne!(hash((1, 2)), hash((2, 1)));
    }
}
