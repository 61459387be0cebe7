//! The free memory of an arena: which of it a request may use, and how it is split and merged.

use crate::allocator::graph::arena::{Arena, Fit, Part, Piece, Place, Tag};
use crate::allocator::graph::few::Few;
use crate::allocator::size::GRANULE;

/// The best of the offered runs for a request: the shortest, the first on ties.
struct Best {
    fit: Fit,
    /// Its length and its start.
    found: Option<(u64, u64)>,
}

impl Best {
    fn new(fit: Fit) -> Best {
        Best { fit, found: None }
    }

    fn offer(&mut self, (start, end): (u64, u64)) {
        let run = (end - start, start);
        if self.fit.aligned(start) + self.fit.bytes() <= end
            && self.found.is_none_or(|found| run < found)
        {
            self.found = Some(run);
        }
    }

    /// Returns the address of the request.
    fn addr(&self) -> Option<u64> {
        self.found.map(|(_, start)| self.fit.aligned(start))
    }
}

impl Arena {
    /// Returns usable runs of free memory at home: start and end, ascending. The [recent block](Self::merge_recent)
    /// must have been merged.
    pub(crate) fn runs(&self, usable: impl Fn(&Tag) -> bool) -> Vec<(u64, u64)> {
        debug_assert!(self.recent.is_none(), "free memory is among other");
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (at, piece) in &self.free {
            if !usable(&piece.tag) {
                continue;
            }
            let end = at + u64::from(piece.granules) * GRANULE;
            match runs.last_mut() {
                Some(run) if run.1 == *at && !self.homes.spans.contains_key(at) => run.1 = end,
                _ => runs.push((*at, end)),
            }
        }
        runs
    }

    /// Returns the best fit for a request in usable memory: at home, else in a view; the lowest address on ties.
    pub(crate) fn find(&self, fit: Fit, usable: impl Fn(&Tag) -> bool) -> Option<Place> {
        if let Some(home) = self.best_at_home(fit, &usable) {
            let granules = fit.granules;
            return Some(Place {
                addr: home,
                parts: Few::from([Part { home, granules }]),
                open: Vec::new(),
            });
        }
        if self.views.is_empty() || !fit.views {
            return None;
        }
        let mut best = Best::new(fit);
        for run in self.runs_in_views(&self.runs(usable)) {
            best.offer(run);
        }
        let addr = best.addr()?;
        let parts = self.parts_at(addr, fit.granules)?;
        Some(Place {
            addr,
            parts,
            open: Vec::new(),
        })
    }

    /// Returns the best fit for a request at home, without building the list of runs.
    fn best_at_home(&self, fit: Fit, usable: impl Fn(&Tag) -> bool) -> Option<u64> {
        debug_assert!(self.recent.is_none(), "free memory is among other");
        let mut best = Best::new(fit);
        self.each_run(self.free.iter(), usable, |run| best.offer(run));
        best.addr()
    }

    /// Visits each usable run of these pieces, which are sorted.
    fn each_run<'a>(
        &self,
        pieces: impl Iterator<Item = (&'a u64, &'a Piece)>,
        usable: impl Fn(&Tag) -> bool,
        mut look: impl FnMut((u64, u64)),
    ) {
        let mut run: Option<(u64, u64)> = None;
        for (at, piece) in pieces {
            if !usable(&piece.tag) {
                continue;
            }
            let end = at + u64::from(piece.granules) * GRANULE;
            run = match run {
                Some((start, before)) if before == *at && !self.homes.spans.contains_key(at) => {
                    Some((start, end))
                }
                ended => {
                    ended.into_iter().for_each(&mut look);
                    Some((*at, end))
                }
            };
        }
        run.into_iter().for_each(look);
    }

    /// Whether the most recently freed block is the best fit for a request, as far as that can be decided without a
    /// search. A run of exactly the requested length is not split, and is the best if no other run of that length lies
    /// lower. If all other free memory lies after it, there is no other run than the one that it begins.
    pub(crate) fn recent_fits(&self, fit: Fit, usable: impl Fn(&Tag) -> bool) -> bool {
        self.recent.as_ref().is_some_and(|(home, piece)| {
            piece.granules == fit.granules
                && fit.aligned(*home) == *home
                && usable(&piece.tag)
                && (self.free_from(*home)
                    || !(self.has_beside(*home, piece.granules, &usable)
                        || self.has_equal_below(*home, fit, &usable)))
        })
    }

    /// Whether a run of exactly the requested length lies below an address.
    fn has_equal_below(&self, home: u64, fit: Fit, usable: impl Fn(&Tag) -> bool) -> bool {
        let mut any = false;
        self.each_run(self.free.range(..home), usable, |(start, end)| {
            any |= end - start == fit.bytes() && fit.aligned(start) == start;
        });
        any
    }

    /// Whether all other free memory is at most one piece, which lies after an address.
    fn free_from(&self, home: u64) -> bool {
        self.free.len() <= 1 && self.free.keys().all(|at| *at > home)
    }

    /// Whether usable memory is adjacent to a range, so that both form one run.
    fn has_beside(&self, home: u64, granules: u32, usable: impl Fn(&Tag) -> bool) -> bool {
        let end = home + u64::from(granules) * GRANULE;
        let one =
            |at: u64, piece: &Piece| !self.homes.spans.contains_key(&at) && usable(&piece.tag);
        let before = self.free.range(..home).next_back();
        before.is_some_and(|(start, piece)| {
            start + u64::from(piece.granules) * GRANULE == home && one(home, piece)
        }) || self.free.get(&end).is_some_and(|piece| one(end, piece))
    }

    /// Takes the most recently freed block.
    pub(crate) fn take_recent(&mut self) -> Option<Place> {
        let (home, piece) = self.recent.take()?;
        let granules = piece.granules;
        Some(Place {
            addr: home,
            parts: Few::from([Part { home, granules }]),
            open: piece.tag.pending,
        })
    }

    /// Adds the most recently freed block to the other free memory.
    pub(crate) fn merge_recent(&mut self) {
        if let Some((home, Piece { granules, tag })) = self.recent.take() {
            self.put(Part { home, granules }, tag);
        }
    }

    /// Returns the parts of views that show usable runs.
    fn runs_in_views(&self, runs: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut seen: Vec<(u64, u64)> = Vec::new();
        for (base, view) in &self.views {
            let (mut offset, before) = (0, seen.len());
            for (home, bytes) in &view.handles {
                let first = runs.partition_point(|run| run.1 <= *home);
                let inside = runs[first..].iter().take_while(|run| run.0 < home + bytes);
                for (start, end) in inside {
                    let from = base + offset + start.max(home) - home;
                    let to = base + offset + end.min(&(home + bytes)) - home;
                    let own = seen.len() > before;
                    match seen.last_mut() {
                        Some(last) if own && last.1 == from => last.1 = to,
                        _ => seen.push((from, to)),
                    }
                }
                offset += bytes;
            }
        }
        seen
    }

    /// Takes free memory out of circulation, and returns its former tags. All of it must be free.
    pub(crate) fn take(&mut self, part: Part) -> Vec<(Part, Tag)> {
        let mut taken = Vec::new();
        self.take_each(part, |part, tag| taken.push((part, tag.clone())));
        taken
    }

    /// Like [`take`](Self::take), but passes the former tags to a closure.
    pub(crate) fn take_each(&mut self, part: Part, mut was: impl FnMut(Part, &Tag)) {
        self.merge_recent();
        let mut at = part.home;
        while at < part.end() {
            let (start, mut piece) = match self.free.remove(&at) {
                Some(piece) => (at, piece),
                None => {
                    let before = self.free.range(..at).next_back();
                    let Some(start) = before.map(|(start, _)| *start) else {
                        break;
                    };
                    let Some(piece) = self.free.remove(&start) else {
                        break;
                    };
                    (start, piece)
                }
            };
            let end = start + u64::from(piece.granules) * GRANULE;
            if end <= at {
                self.free.insert(start, piece);
                break;
            }
            let stop = end.min(part.end());
            let granules = |from, to| ((to - from) / GRANULE) as u32;
            let taken = Part {
                home: at,
                granules: granules(at, stop),
            };
            was(taken, &piece.tag);
            if start < at {
                let left = Piece {
                    granules: granules(start, at),
                    tag: match stop < end {
                        true => piece.tag.clone(),
                        false => std::mem::take(&mut piece.tag),
                    },
                };
                self.free.insert(start, left);
            }
            if stop < end {
                piece.granules = granules(stop, end);
                self.free.insert(stop, piece);
            }
            at = stop;
        }
        debug_assert!(at >= part.end(), "taken memory was free");
    }

    /// Makes memory free.
    pub(crate) fn put(&mut self, part: Part, tag: Tag) {
        let (mut home, mut end) = (part.home, part.end());
        if let Some((start, before)) = self.free.range(..home).next_back()
            && start + u64::from(before.granules) * GRANULE == home
            && before.tag == tag
            && !self.homes.spans.contains_key(&home)
        {
            home = *start;
        }
        if let Some(behind) = self.free.get(&end)
            && behind.tag == tag
            && !self.homes.spans.contains_key(&end)
        {
            let granules = behind.granules;
            self.free.remove(&end);
            end += u64::from(granules) * GRANULE;
        }
        let granules = ((end - home) / GRANULE) as u32;
        self.free.insert(home, Piece { granules, tag });
    }

    /// Changes the tags of free memory, and merges neighbours whose tags have become equal.
    pub(crate) fn retag(&mut self, change: impl Fn(&mut Tag)) {
        self.merge_recent();
        for (home, mut piece) in std::mem::take(&mut self.free) {
            change(&mut piece.tag);
            let part = Part {
                home,
                granules: piece.granules,
            };
            self.put(part, piece.tag);
        }
        let aside = self.aside.values_mut().flatten();
        aside.for_each(|(_, tag)| change(tag));
    }

    /// Iterates over the tags of free memory, including memory that plans in progress have set aside.
    pub(crate) fn tags(&self) -> impl Iterator<Item = (Part, &Tag)> {
        let recent = self.recent.iter().map(|(home, piece)| (home, piece));
        let free = self.free.iter().chain(recent).map(|(home, piece)| {
            let part = Part {
                home: *home,
                granules: piece.granules,
            };
            (part, &piece.tag)
        });
        let aside = self.aside.values().flatten();
        free.chain(aside.map(|(part, tag)| (*part, tag)))
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let recent = self.recent.iter().map(|(_, piece)| piece);
        let pieces = self.free.values().chain(recent);
        pieces.map(|piece| u64::from(piece.granules)).sum::<u64>() * GRANULE
    }
}
