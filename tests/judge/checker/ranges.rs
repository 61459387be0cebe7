//! Who used which bytes, and until when.

use std::collections::BTreeMap;

/// A position of a stream: its number, and how many things were submitted to it up to there.
pub type Position = (usize, u64);

#[derive(Clone)]
struct Piece {
    end: u64,
    /// The last position of each stream that used it.
    uses: Vec<Position>,
}

/// Uses by bytes, in disjoint pieces.
#[derive(Clone, Default)]
pub struct Ranges(BTreeMap<u64, Piece>);

impl Ranges {
    /// Makes a border at a byte.
    fn cut(&mut self, at: u64) {
        let Some((_, piece)) = self.0.range_mut(..at).next_back() else {
            return;
        };
        if piece.end > at {
            let rest = Piece {
                end: piece.end,
                uses: piece.uses.clone(),
            };
            piece.end = at;
            self.0.insert(at, rest);
        }
    }

    /// A stream uses `from..to` until a position.
    pub fn add(&mut self, from: u64, to: u64, (stream, position): Position) {
        if from >= to {
            return;
        }
        self.cut(from);
        self.cut(to);
        let (mut at, mut holes) = (from, Vec::new());
        for (&start, piece) in self.0.range_mut(from..to) {
            if start > at {
                holes.push((at, start));
            }
            at = piece.end;
            match piece.uses.iter_mut().find(|(other, _)| *other == stream) {
                Some(last) => last.1 = last.1.max(position),
                None => piece.uses.push((stream, position)),
            }
        }
        if at < to {
            holes.push((at, to));
        }
        for (start, end) in holes {
            let uses = vec![(stream, position)];
            self.0.insert(start, Piece { end, uses });
        }
    }

    /// The first use of a range that `fine` does not pass, and where it was. What it passes under `done`
    /// for good is forgotten.
    pub fn find(
        &mut self,
        from: u64,
        to: u64,
        done: impl Fn(Position) -> bool,
        fine: impl Fn(Position) -> bool,
    ) -> Option<(u64, Position)> {
        let first = self.0.range(..=from).next_back();
        let first = first.map_or(from, |(&start, piece)| match piece.end > from {
            true => start,
            false => from,
        });
        let mut empty = Vec::new();
        let mut found = None;
        for (&start, piece) in self.0.range_mut(first..to) {
            piece.uses.retain(|&position| !done(position));
            if piece.uses.is_empty() {
                empty.push(start);
            }
            if let Some(&bad) = piece.uses.iter().find(|&&position| !fine(position)) {
                found = Some((start.max(from), bad));
                break;
            }
        }
        for start in empty {
            self.0.remove(&start);
        }
        found
    }

    /// Forgets a range.
    pub fn forget(&mut self, from: u64, to: u64) {
        self.cut(from);
        self.cut(to);
        let starts: Vec<u64> = self.0.range(from..to).map(|(&start, _)| start).collect();
        for start in starts {
            self.0.remove(&start);
        }
    }
}
