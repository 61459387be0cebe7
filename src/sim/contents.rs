//! The bytes of one physical allocation, as intervals.
//!
//! Fills and arithmetic patterns of any length are one interval, so that filling, copying and
//! checking gigabytes costs as much as there are intervals.

#[cfg(unix)]
use super::shared_contents::SharedContents;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The content of an interval, from its first byte on.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// 32-bit words `first + i * step` (step 0 or 1), beginning `phase` bytes into the first one.
    Words { first: u32, step: u32, phase: u8 },
    /// Plain bytes, beginning at an offset.
    Raw(Arc<[u8]>, usize),
}

impl Content {
    /// The content from `offset` bytes further on.
    pub(super) fn skip(&self, offset: u64) -> Content {
        match self {
            Content::Words { first, step, phase } => {
                let at = offset + u64::from(*phase);
                let words = (at / 4) as u32;
                Content::Words {
                    first: first.wrapping_add(words.wrapping_mul(*step)),
                    step: *step,
                    phase: (at % 4) as u8,
                }
            }
            Content::Raw(bytes, start) => Content::Raw(bytes.clone(), start + offset as usize),
        }
    }

    pub(super) fn byte(&self, offset: u64) -> u8 {
        match self {
            Content::Words { first, step, phase } => {
                let at = offset + u64::from(*phase);
                let word = first.wrapping_add(((at / 4) as u32).wrapping_mul(*step));
                word.to_le_bytes()[(at % 4) as usize]
            }
            Content::Raw(bytes, start) => bytes.get(start + offset as usize).copied().unwrap_or(0),
        }
    }

    /// Returns the first `len` bytes. For a fill they are copies of one word, which dominates the cost of downloads.
    pub(super) fn bytes(&self, len: usize) -> Vec<u8> {
        match self {
            Content::Words { first, step, phase } => {
                let phase = usize::from(*phase);
                let words = (phase + len).div_ceil(4);
                let mut bytes = match step {
                    0 => first.to_le_bytes().repeat(words),
                    _ => (0..words as u32)
                        .flat_map(|index| {
                            first.wrapping_add(index.wrapping_mul(*step)).to_le_bytes()
                        })
                        .collect(),
                };
                bytes.drain(..phase);
                bytes.truncate(len);
                bytes
            }
            Content::Raw(raw, start) => {
                let known = raw.get(*start..).unwrap_or_default();
                let mut bytes = known[..len.min(known.len())].to_vec();
                bytes.resize(len, 0);
                bytes
            }
        }
    }

    /// Whether `next` continues this content after `len` bytes.
    fn continues(&self, len: u64, next: &Content) -> bool {
        match (self, next) {
            (
                Content::Words { step, .. },
                Content::Words {
                    first: next_first,
                    step: next_step,
                    phase: next_phase,
                },
            ) => {
                let Content::Words { first, phase, .. } = self.skip(len) else {
                    return false;
                };
                step == next_step && first == *next_first && phase == *next_phase
            }
            _ => false,
        }
    }
}

/// The contents of one physical allocation; bytes outside of all intervals are undefined.
#[derive(Default, Debug)]
pub(super) struct Contents {
    map: BTreeMap<u64, (u64, Content)>,
    /// Has the bytes instead, once other processes may have them, too.
    #[cfg(unix)]
    pub(super) shared: Option<SharedContents>,
}

impl Contents {
    /// Moves the bytes to a file that other processes use.
    #[cfg(unix)]
    pub(super) fn share(&mut self, shared: SharedContents) {
        for (start, (end, content)) in std::mem::take(&mut self.map) {
            let bytes = |offset, len| Some(content.skip(offset).bytes(len));
            shared.write(start, end - start, bytes);
        }
        self.shared = Some(shared);
    }

    /// Cuts the interval that crosses `at` in two.
    fn split(&mut self, at: u64) {
        let Some((&start, &(end, _))) = self.map.range(..at).next_back() else {
            return;
        };
        if end <= at {
            return;
        }
        if let Some(entry) = self.map.get_mut(&start) {
            entry.0 = at;
            let tail = entry.1.skip(at - start);
            self.map.insert(at, (end, tail));
        }
    }

    /// Makes `start..start + len` undefined.
    pub(super) fn clear(&mut self, start: u64, len: u64) {
        #[cfg(unix)]
        if let Some(shared) = &self.shared {
            return shared.write(start, len, |_, _| None);
        }
        let end = start + len;
        self.split(start);
        self.split(end);
        while let Some((&key, _)) = self.map.range(start..end).next() {
            self.map.remove(&key);
        }
    }

    /// Stores `content` in `start..start + len`.
    pub(super) fn write(&mut self, start: u64, len: u64, content: Content) {
        if len == 0 {
            return;
        }
        #[cfg(unix)]
        if let Some(shared) = &self.shared {
            return shared.write(start, len, |offset, len| {
                Some(content.skip(offset).bytes(len))
            });
        }
        // The common case of churn: exactly the same interval again.
        if let Some(entry) = self.map.get_mut(&start)
            && entry.0 == start + len
        {
            entry.1 = content;
            return;
        }
        self.clear(start, len);
        if let Some((&before, entry)) = self.map.range_mut(..start).next_back()
            && entry.0 == start
            && entry.1.continues(start - before, &content)
        {
            entry.0 = start + len;
            return;
        }
        self.map.insert(start, (start + len, content));
    }

    /// Calls `visit(offset, len, content)` for each piece of `start..start + len` in order; `None`
    /// is undefined.
    pub(super) fn read(
        &self,
        start: u64,
        len: u64,
        mut visit: impl FnMut(u64, u64, Option<Content>),
    ) {
        #[cfg(unix)]
        if let Some(shared) = &self.shared {
            return shared.read(start, len, |offset, bytes| {
                let len = bytes.len() as u64;
                visit(offset, len, Some(Content::Raw(bytes.into(), 0)));
            });
        }
        let end = start + len;
        let mut at = start;
        let first = self
            .map
            .range(..=start)
            .next_back()
            .map_or(start, |(&key, _)| key);
        for (&key, (stop, content)) in self.map.range(first..end) {
            if *stop <= at {
                continue;
            }
            if key > at {
                visit(at - start, key - at, None);
                at = key;
            }
            let until = (*stop).min(end);
            visit(at - start, until - at, Some(content.skip(at - key)));
            at = until;
        }
        if at < end {
            visit(at - start, end - at, None);
        }
    }
}

/// How many of the `words` 32-bit words of `content` differ from `expected + i`.
pub(super) fn mismatches(content: &Content, words: u64, expected: u32) -> u64 {
    match content {
        Content::Words {
            first,
            step: 1,
            phase: 0,
        } => {
            if *first == expected {
                0
            } else {
                words
            }
        }
        Content::Words {
            first,
            step: 0,
            phase: 0,
        } => {
            // Word i matches where i = first - expected (mod 2^32).
            let hit = u64::from(first.wrapping_sub(expected));
            let hits = if words > hit {
                (words - hit - 1) / (1 << 32) + 1
            } else {
                0
            };
            words - hits
        }
        _ => (0..words)
            .filter(|&index| {
                let at = index * 4;
                let word = u32::from_le_bytes([
                    content.byte(at),
                    content.byte(at + 1),
                    content.byte(at + 2),
                    content.byte(at + 3),
                ]);
                word != expected.wrapping_add(index as u32)
            })
            .count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator of random numbers, so that runs repeat.
    fn random(state: &mut u64, below: u64) -> u64 {
        *state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (*state >> 33) % below
    }

    #[test]
    fn intervals_hold_what_an_array_of_bytes_holds() {
        const SIZE: u64 = 400;
        for seed in 0..200 {
            let mut state = seed;
            let mut contents = Contents::default();
            let mut model = vec![None; SIZE as usize];
            for _ in 0..60 {
                let start = random(&mut state, SIZE);
                let len = random(&mut state, SIZE - start) + 1;
                let content = match random(&mut state, 4) {
                    0 => None,
                    1 => {
                        let bytes = (0..len).map(|_| random(&mut state, 256) as u8);
                        Some(Content::Raw(bytes.collect(), 0))
                    }
                    step => Some(Content::Words {
                        first: random(&mut state, 3) as u32,
                        step: step as u32 - 2,
                        phase: random(&mut state, 4) as u8,
                    }),
                };
                match &content {
                    Some(content) => contents.write(start, len, content.clone()),
                    None => contents.clear(start, len),
                }
                for at in 0..len {
                    model[(start + at) as usize] = content.as_ref().map(|content| content.byte(at));
                }
                let from = random(&mut state, SIZE);
                let mut found = Vec::new();
                contents.read(from, SIZE - from, |offset, len, content| {
                    assert_eq!(offset, found.len() as u64);
                    match content {
                        Some(content) => {
                            let bytes: Vec<u8> = (0..len).map(|at| content.byte(at)).collect();
                            assert_eq!(content.bytes(len as usize), bytes);
                            found.extend(bytes.into_iter().map(Some));
                        }
                        None => found.resize(found.len() + len as usize, None),
                    }
                });
                assert_eq!(found, model[from as usize..]);
            }
        }
    }

    #[test]
    fn mismatches_agree_with_comparing_word_by_word() {
        let contents = [
            Content::Words {
                first: 7,
                step: 1,
                phase: 0,
            },
            Content::Words {
                first: 9,
                step: 0,
                phase: 0,
            },
            Content::Words {
                first: 0x0707_0707,
                step: 0,
                phase: 2,
            },
            Content::Raw((0..200).collect::<Vec<u8>>().into(), 3),
        ];
        for content in contents {
            for expected in [0, 7, 8, 9, u32::MAX, 0x0707_0700] {
                let slow = (0..20).filter(|&index| {
                    let bytes = [0, 1, 2, 3].map(|byte| content.byte(index * 4 + byte));
                    u32::from_le_bytes(bytes) != expected.wrapping_add(index as u32)
                });
                assert_eq!(mismatches(&content, 20, expected), slow.count() as u64);
            }
        }
        let constant = Content::Words {
            first: 5,
            step: 0,
            phase: 0,
        };
        let two_rounds = (1 << 32) + 10;
        assert_eq!(mismatches(&constant, two_rounds, 0), two_rounds - 2);
    }
}
