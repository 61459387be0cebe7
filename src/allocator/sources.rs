//! The handles that a stitch may use, and which of them it takes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::handles::Marks;
use super::size::PHYSICAL_GRANULE;

/// From this many handles on, taking the largest first is tried as well,
const MANY_HANDLES: usize = 24;
/// and taken if it needs this many tenths fewer.
const FEWER_TENTHS: usize = 13;

/// One handle that a stitch may use, as far as it is open.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub home: u64,
    pub bytes: u64,
    /// First open byte and end of the open part.
    pub open: (u64, u64),
    /// The handle's number.
    pub number: u32,
}

impl Source {
    fn end(&self) -> u64 {
        self.home + self.bytes
    }

    pub(crate) fn whole(&self) -> bool {
        self.open == (self.home, self.end())
    }

    /// Open bytes from the handle's start on.
    fn prefix(&self) -> u64 {
        if self.open.0 == self.home {
            self.open.1 - self.home
        } else {
            0
        }
    }
}

/// Whole handles next to each other: the longest is the greatest, of equals the one with the lowest
/// address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    bytes: u64,
    home: Reverse<u64>,
    /// Which sources they are.
    first: usize,
    end: usize,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Sources {
    /// By address.
    all: Vec<Source>,
    /// The longest first.
    rows: Vec<Row>,
    /// Whole ones, the largest first.
    by_size: Vec<Source>,
    /// Bytes of the first so many of these.
    sums: Vec<u64>,
    /// Bytes of the smallest whole one.
    smallest: u64,
    /// Open bytes from the start of a handle on, its address, and which source it is.
    fronts: Vec<(u64, u64, usize)>,
}

impl Sources {
    /// From a list by address.
    pub(crate) fn new(all: Vec<Source>) -> Self {
        let mut rows = rows_in(&all, 0, all.len(), |_| true);
        rows.sort_unstable_by(|a, b| b.cmp(a));
        let mut by_size: Vec<Source> = all.iter().filter(|s| s.whole()).copied().collect();
        by_size.sort_unstable_by_key(|s| (Reverse(s.bytes), s.home));
        let mut sum = 0;
        let sums = by_size.iter().map(|s| {
            sum += s.bytes;
            sum
        });
        let fronts = all.iter().enumerate().filter(|(_, s)| s.prefix() > 0);
        let mut fronts: Vec<_> = fronts.map(|(at, s)| (s.prefix(), s.home, at)).collect();
        fronts.sort_unstable();
        Sources {
            sums: sums.collect(),
            smallest: by_size.last().map_or(u64::MAX, |s| s.bytes),
            all,
            rows,
            by_size,
            fronts,
        }
    }

    /// No choice for so many bytes takes fewer handles.
    pub(crate) fn fewest(&self, need: u64) -> usize {
        let last = self.fronts.last().map_or(0, |(bytes, ..)| *bytes);
        match need.checked_sub(last) {
            None | Some(0) => usize::from(need > 0),
            Some(rest) => self.sums.partition_point(|sum| *sum < rest) + 2,
        }
    }

    /// The run with the most bytes in an open tail of one handle and the whole handles behind it; of
    /// whole handles alone if the tail may not be used.
    pub(crate) fn best_head(&self, aligned: bool) -> Option<&[Source]> {
        let mut best: Option<(u64, usize, usize)> = None;
        let mut at = 0;
        while at < self.all.len() {
            let first = at;
            let head = &self.all[first];
            at += 1;
            if !(head.whole() || (!aligned && head.open.0 > head.home && head.open.1 == head.end()))
            {
                continue;
            }
            while let Some(next) = self.all.get(at)
                && next.whole()
                && next.home == self.all[at - 1].end()
            {
                at += 1;
            }
            let bytes = self.all[at - 1].open.1 - head.open.0;
            if best.is_none_or(|(most, ..)| bytes > most) {
                best = Some((bytes, first, at));
            }
        }
        best.map(|(_, first, end)| &self.all[first..end])
    }

    /// Chooses handles for `need` bytes: those of `lead` first, then rows of whole ones by length, and
    /// as the last one the smallest open front that is enough. Returns them with the bytes that are
    /// missing, in whole granules. Handles that are `used` have their place already.
    pub(crate) fn gather(
        &self,
        lead: &[Source],
        need: u64,
        used: &Marks,
    ) -> (Vec<(u64, u64)>, u64) {
        let mut by_rows = self.filling(lead, need, used);
        self.fill_rows(&mut by_rows, used);
        let by_rows = self.finish(by_rows);
        if by_rows.0.len() <= MANY_HANDLES {
            return by_rows;
        }
        let mut by_size = self.filling(lead, need, used);
        for source in &self.by_size {
            if by_size.left < self.smallest {
                break;
            }
            by_size.offer(source);
        }
        let by_size = self.finish(by_size);
        if by_size.1 <= by_rows.1 && by_size.0.len() * FEWER_TENTHS <= by_rows.0.len() * 10 {
            by_size
        } else {
            by_rows
        }
    }

    fn filling(&self, lead: &[Source], need: u64, used: &Marks) -> Filling {
        let mut filling = Filling {
            adds: Vec::new(),
            left: need,
            taken: used.clone(),
        };
        lead.iter().for_each(|source| filling.offer(source));
        filling
    }

    /// Offers rows, the longest first. A row of which some handles are used falls into shorter ones.
    fn fill_rows(&self, filling: &mut Filling, used: &Marks) {
        let mut parts: BinaryHeap<Row> = BinaryHeap::new();
        let mut rows = self.rows.iter().copied().peekable();
        while filling.left >= self.smallest {
            let part = parts.peek().copied();
            let row = match rows.peek().copied() {
                Some(row) if part.is_none_or(|part| row > part) => {
                    rows.next();
                    let open = |at: usize| !used.has(self.all[at].number);
                    if !(row.first..row.end).all(open) {
                        parts.extend(rows_in(&self.all, row.first, row.end, open));
                        continue;
                    }
                    row
                }
                _ => match parts.pop() {
                    Some(part) => part,
                    None => return,
                },
            };
            for source in &self.all[row.first..row.end] {
                filling.offer(source);
            }
        }
    }

    /// Adds the last handle.
    fn finish(&self, mut filling: Filling) -> (Vec<(u64, u64)>, u64) {
        let Filling { left, taken, .. } = &filling;
        if *left > 0 {
            let enough = self.fronts.partition_point(|(bytes, ..)| bytes < left);
            let enough = self.fronts[enough..].iter().map(|(.., at)| &self.all[*at]);
            if let Some(last) = enough.into_iter().find(|s| !taken.has(s.number)) {
                filling.adds.push((last.home, last.bytes));
                filling.left = 0;
            }
        }
        let missing = filling.left.next_multiple_of(PHYSICAL_GRANULE);
        (filling.adds, missing)
    }
}

/// A choice under way.
struct Filling {
    adds: Vec<(u64, u64)>,
    left: u64,
    taken: Marks,
}

impl Filling {
    /// Takes a handle if it is needed whole, and has no place yet.
    fn offer(&mut self, source: &Source) {
        if source.bytes <= self.left && !self.taken.has(source.number) {
            self.taken.set(source.number);
            self.adds.push((source.home, source.bytes));
            self.left -= source.bytes;
        }
    }
}

/// Rows of whole sources in a part of the list, as far as they may be used.
fn rows_in(all: &[Source], first: usize, end: usize, open: impl Fn(usize) -> bool) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (at, source) in all.iter().enumerate().take(end).skip(first) {
        if !source.whole() || !open(at) {
            continue;
        }
        match rows.last_mut() {
            Some(row) if row.end == at && all[at - 1].end() == source.home => {
                row.bytes += source.bytes;
                row.end += 1;
            }
            _ => rows.push(Row {
                bytes: source.bytes,
                home: Reverse(source.home),
                first: at,
                end: at + 1,
            }),
        }
    }
    rows
}
