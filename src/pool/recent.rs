//! A map that finds what it found last without hashing.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::Hash;

use crate::allocator::Mixed;

/// See the text of the module.
pub(super) struct Recent<K, V> {
    /// All keys with their values, in no order.
    entries: Vec<(K, V)>,
    /// The place in `entries` of each key.
    places: HashMap<K, usize, Mixed>,
    /// The place in `entries` of the key that was found last.
    last: usize,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Recent {
            entries: Vec::new(),
            places: HashMap::default(),
            last: 0,
        }
    }
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// The value of a key.
    #[inline(always)]
    pub fn get(&mut self, key: &K) -> Option<&mut V> {
        match self.entries.get(self.last) {
            Some((last, _)) if last == key => {}
            _ => self.last = self.find(key)?,
        }
        self.entries.get_mut(self.last).map(|(_, value)| value)
    }

    /// The value of the key that was found last, if it is this one.
    #[inline(always)]
    pub fn again(&mut self, key: &K) -> Option<&mut V> {
        let (last, value) = self.entries.get_mut(self.last)?;
        (last == key).then_some(value)
    }

    #[inline(never)]
    fn find(&self, key: &K) -> Option<usize> {
        self.places.get(key).copied()
    }

    /// Enters a key that is not there.
    #[cold]
    pub fn insert(&mut self, key: K, value: V) {
        self.places.insert(key, self.entries.len());
        self.entries.push((key, value));
    }

    /// Removes a key with its value.
    #[cold]
    pub fn remove(&mut self, key: &K) {
        let Some(place) = self.places.remove(key) else {
            return;
        };
        self.entries.swap_remove(place);
        if let Some((moved, _)) = self.entries.get(place) {
            self.places.insert(*moved, place);
        }
    }

    /// Removes all keys.
    #[cold]
    pub fn clear(&mut self) {
        self.places.clear();
        self.entries.clear();
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        self.entries.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_key_leaves_the_others_where_they_are_found() {
        let mut map = Recent::default();
        for key in 0..4 {
            map.insert(key, key * 10);
        }
        let mut found = |key| map.get(&key).copied();
        assert_eq!([0, 3, 3, 1].map(&mut found), [0, 30, 30, 10].map(Some));
        map.remove(&1);
        map.remove(&7);
        let mut found = |key| map.get(&key).copied();
        let after = [1, 3, 0, 2, 1].map(&mut found);
        assert_eq!(after, [None, Some(30), Some(0), Some(20), None]);
        assert_eq!(map.len(), map.iter().count());
        map.clear();
        assert_eq!(map.get(&3), None);
        assert_eq!(map.len(), 0);
    }
}
