//! Lists of mostly one: the first element needs no memory of its own, which a request in a capture would feel.

use std::iter::Chain;
use std::ops::{Deref, DerefMut};
use std::{fmt, option, vec};

/// A list that holds none, one, or many elements.
#[derive(Clone)]
pub(crate) enum Few<T> {
    None,
    One(T),
    Many(Vec<T>),
}

impl<T> Few<T> {
    #[inline]
    pub(crate) fn push(&mut self, element: T) {
        *self = match std::mem::take(self) {
            Few::None => Few::One(element),
            Few::One(first) => Few::Many(vec![first, element]),
            Few::Many(mut all) => {
                all.push(element);
                Few::Many(all)
            }
        };
    }

    /// Takes out those that go; how many.
    pub(crate) fn take_out(
        &mut self,
        mut goes: impl FnMut(&T) -> bool,
        mut to: impl FnMut(T),
    ) -> usize {
        match self {
            Few::None => 0,
            Few::One(one) => {
                let one = goes(one);
                if one && let Few::One(one) = std::mem::take(self) {
                    to(one);
                }
                usize::from(one)
            }
            Few::Many(all) => {
                let before = all.len();
                all.extract_if(.., |element| goes(element))
                    .for_each(&mut to);
                before - all.len()
            }
        }
    }

    /// Keeps those that stay.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&T) -> bool) {
        self.take_out(|element| !stays(element), drop);
    }
}

impl<T> Default for Few<T> {
    #[inline]
    fn default() -> Few<T> {
        Few::None
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Few::None => &[],
            Few::One(one) => std::slice::from_ref(one),
            Few::Many(all) => all,
        }
    }
}

impl<T> DerefMut for Few<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Few::None => &mut [],
            Few::One(one) => std::slice::from_mut(one),
            Few::Many(all) => all,
        }
    }
}

impl<T> Extend<T> for Few<T> {
    #[inline]
    fn extend<I: IntoIterator<Item = T>>(&mut self, more: I) {
        more.into_iter().for_each(|element| self.push(element));
    }
}

impl<T> FromIterator<T> for Few<T> {
    #[inline]
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Few<T> {
        let mut all = all.into_iter();
        let mut few = match all.next() {
            Some(first) => Few::One(first),
            None => return Few::None,
        };
        few.extend(all);
        few
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = Chain<option::IntoIter<T>, vec::IntoIter<T>>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        let (one, many) = match self {
            Few::None => (None, Vec::new()),
            Few::One(one) => (Some(one), Vec::new()),
            Few::Many(all) => (None, all),
        };
        one.into_iter().chain(many)
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Equal are lists of equal elements.
impl<T: PartialEq> PartialEq for Few<T> {
    #[inline]
    fn eq(&self, other: &Few<T>) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T: fmt::Debug> fmt::Debug for Few<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_few_is_a_list() {
        for count in 0..5 {
            let mut few: Few<usize> = (0..count).collect();
            assert_eq!(*few, *(0..count).collect::<Vec<_>>());
            few.iter_mut().for_each(|element| *element *= 3);
            let mut gone = Vec::new();
            let went = few.take_out(|element| *element % 2 == 1, |element| gone.push(element));
            assert_eq!(went, gone.len());
            let kept: Few<usize> = (0..count)
                .filter(|at| at % 2 == 0)
                .map(|at| at * 3)
                .collect();
            assert_eq!(few, kept, "one and one of many are the same");
            few.retain(|element| *element > 0);
            assert!(!few.contains(&0));
        }
    }
}
