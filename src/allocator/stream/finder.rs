//! The search for free memory that fits a request: best fit over runs of adjacent pieces.
//!
//! A *run* is a maximal sequence of adjacent free pieces that the requesting stream may use: each one complete, pending
//! on that stream alone, or ordered before it by an earlier wait. A run may join pieces of several classes, so the
//! index of one class is not sufficient. The remaining runs are found by walking the pending pieces. There are few of
//! them, because pieces complete and merge as markers are observed.

use std::sync::Arc;

use crate::allocator::extent::handle::Handles;
use crate::allocator::extent::index::Entry;
use crate::allocator::extent::record::{COMPLETE, MIXED, NIL, Records};
use crate::allocator::extent::space::{Shard, Space};
use crate::allocator::extent::uses::Use;
use crate::allocator::extent::want::Want;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::PendingWait;

/// Number of runs of each class that are examined for one that preserves whole handles.
const SPARING_RUNS: usize = 16;

impl Streams {
    /// Returns the waits after which a stream may use the shards. A wait also covers everything that the marker's
    /// stream was ordered behind, so the newest markers come first.
    pub(crate) fn waits_for(&self, stream: u32, shards: &[Shard]) -> Vec<PendingWait> {
        let mut needed: Vec<Use> = shards
            .iter()
            .flat_map(|s| s.uses.as_slice())
            .filter(|u| !self.ready(stream, u))
            .copied()
            .collect();
        needed.sort_unstable_by_key(|u| std::cmp::Reverse(self.marker(u).map_or(0, |m| m.order)));
        let mut waits: Vec<PendingWait> = Vec::new();
        for u in needed {
            let opened = |w: &PendingWait| {
                (w.stream == u.stream && u.ticket <= w.bound)
                    || w.row
                        .get(u.stream as usize)
                        .is_some_and(|known| u.ticket <= *known)
            };
            if waits.iter().any(opened) {
                continue;
            }
            if let Some(marker) = self.marker(&u) {
                waits.push(PendingWait {
                    stream: u.stream,
                    bound: marker.bound,
                    event: Arc::clone(&marker.event),
                    row: Arc::clone(&marker.row),
                });
            }
        }
        waits
    }
}

/// A place for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first piece.
    pub first: u32,
    pub addr: u64,
    /// Granules of the whole run.
    pub granules: u64,
}

impl Run {
    /// A run of one piece.
    #[inline]
    fn alone(entry: Entry) -> Run {
        Run {
            first: entry.id,
            addr: entry.addr,
            granules: u64::from(entry.granules),
        }
    }

    fn better(self, other: Option<Run>) -> Run {
        match other {
            Some(o) if (o.granules, o.addr) <= (self.granules, self.addr) => o,
            _ => self,
        }
    }

    /// Whether a request fits at its alignment.
    fn holds(&self, want: &Want) -> bool {
        self.granules >= u64::from(want.skip(self.addr)) + u64::from(want.granules)
    }
}

/// The pieces that a request may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Those that its stream may use without a wait.
    Ready,
    /// Those that it may use after possible waits, in runs that need at least one.
    Waits,
}

/// The free pieces as seen by one request.
pub(crate) struct Finder<'a> {
    pub records: &'a Records,
    pub streams: &'a Streams,
    pub space: &'a Space,
    /// The requesting stream.
    pub stream: u32,
}

/// Bytes of handles that lie wholly in a run, and would no longer be wholly free after the request is placed there.
fn broken(want: &Want, run: Run, handles: &Handles) -> u64 {
    let start = run.addr + u64::from(want.skip(run.addr)) * GRANULE;
    let (end, stop) = (
        run.addr + run.granules * GRANULE,
        start + u64::from(want.granules) * GRANULE,
    );
    let (mut at, mut bytes) = (start, 0);
    while at < stop {
        let handle = handles.get(handles.at(at));
        if handle.end() <= at {
            break;
        }
        if handle.home >= run.addr && handle.end() <= end {
            bytes += handle.end() - handle.home;
        }
        at = handle.end();
    }
    bytes
}

impl Finder<'_> {
    /// Whether a piece may be used by the stream without a wait.
    pub(crate) fn ready(&self, id: u32) -> bool {
        let hot = &self.records[id];
        hot.is_free()
            && (hot.stream == COMPLETE
                || hot.stream == self.stream
                || self
                    .records
                    .cold(id)
                    .uses
                    .as_slice()
                    .iter()
                    .all(|u| self.streams.ready(self.stream, u)))
    }

    /// Whether a piece is ready, or with `pending` usable behind waits as well.
    pub(crate) fn is_usable(&self, id: u32, pending: bool) -> bool {
        match pending {
            true => self.reachable(id),
            false => self.ready(id),
        }
    }

    /// Whether the stream may use a piece, if necessary after possible waits.
    pub(crate) fn reachable(&self, id: u32) -> bool {
        let hot = &self.records[id];
        hot.is_free()
            && self
                .records
                .cold(id)
                .uses
                .as_slice()
                .iter()
                .all(|u| self.streams.ready(self.stream, u) || self.streams.is_covered(u))
    }

    /// Best fit over ready runs, the lowest address on ties.
    pub(crate) fn ready_run(&self, want: &Want) -> Option<Run> {
        if self.only_own() {
            return self.own_run(want);
        }
        let mut best = None;
        let lone = |id: u32| {
            let hot = &self.records[id];
            (hot.prev == NIL || !self.ready(hot.prev)) && (hot.next == NIL || !self.ready(hot.next))
        };
        if let Some(complete) = self.space.index(COMPLETE)
            && let Some(run) = complete
                .iter_from(want.granules)
                .map(Run::alone)
                .find(|r| lone(r.first) && r.holds(want))
        {
            best = Some(run);
        }
        let most = best.map_or(u64::MAX, |best: Run| best.granules);
        self.best_pending(want, best, most)
    }

    /// Returns, among the ready runs around the shortest pieces that fit the request, the one in which it breaks up the
    /// fewest bytes of wholly free handles; the best fit among equals.
    pub(crate) fn handle_preserving_run(&self, want: &Want, best: Run, handles: &Handles) -> Run {
        let mut least = broken(want, best, handles);
        let mut preserving = best;
        if least == 0 {
            return best;
        }
        for class in self.space.pending_streams().chain([MIXED, COMPLETE]) {
            let Some(index) = self.space.index(class) else {
                continue;
            };
            let fitting = index.iter_from(want.granules).take(SPARING_RUNS);
            for entry in fitting.filter(|entry| self.ready(entry.id)) {
                let (first, _) = self.usable_before(entry.id, |id| self.ready(id));
                let run = self.extend(first, |id| self.ready(id));
                let bytes = broken(want, run, handles);
                if run.holds(want)
                    && (bytes, run.granules, run.addr)
                        < (least, preserving.granules, preserving.addr)
                {
                    (least, preserving) = (bytes, run);
                    if least == 0 {
                        return preserving;
                    }
                }
            }
        }
        preserving
    }

    /// Returns the best fit where all free memory is the stream's own and merged: one index has the answer.
    #[inline]
    fn own_run(&self, want: &Want) -> Option<Run> {
        let fitting = self.space.index(self.stream)?.iter_from(want.granules);
        fitting.map(Run::alone).find(|run| run.holds(want))
    }

    /// Whether all pieces are the stream's own, and adjacent ones are merged.
    fn only_own(&self) -> bool {
        self.space.merge_own
            && self
                .space
                .index(self.stream)
                .is_some_and(|own| own.len() == self.space.piece_count())
    }

    /// Returns the better of a run and the runs of ready pieces, of at most `most` granules.
    fn best_pending(&self, want: &Want, mut best: Option<Run>, most: u64) -> Option<Run> {
        self.pending_runs(want, most, Reach::Ready, |run| {
            let better = run.better(best);
            best = Some(better);
            better.granules
        });
        best
    }

    /// Returns the run whose newest marker to wait for is the oldest.
    pub(crate) fn oldest_run(&self, want: &Want) -> Option<Run> {
        let mut oldest: Option<(u64, Run)> = None;
        self.pending_runs(want, u64::MAX, Reach::Waits, |run| {
            let age = self.newest_marker(run, want.skip(run.addr) + want.granules);
            if oldest.is_none_or(|(a, r)| (age, run.granules, run.addr) < (a, r.granules, r.addr)) {
                oldest = Some((age, run));
            }
            u64::MAX
        });
        oldest.map(|(_, run)| run)
    }

    /// Whether a piece that is pending on one stream alone may be usable. Complete pieces there are already available
    /// to all streams, unless memory never changes streams.
    fn may_reach(&self, class: u32, reach: Reach) -> bool {
        let streams = self.streams;
        let completed = streams[class].completed;
        let known = streams[self.stream].row.get(class as usize);
        self.is_wanted(class, reach)
            && (class == self.stream
                || self.space.merge_own
                || known.is_some_and(|known| *known > completed)
                || reach != Reach::Ready && streams[class].newest().is_some())
    }

    /// Whether runs are searched by their pieces of a class. Runs of complete pieces alone are found without a walk,
    /// and runs without a wait were examined earlier.
    fn is_wanted(&self, class: u32, reach: Reach) -> bool {
        class != COMPLETE && (reach != Reach::Waits || class != self.stream)
    }

    /// Visits the runs of at most `most` granules that fit a request and contain a wanted piece. `look` returns the
    /// length that is of interest from then on.
    fn pending_runs(
        &self,
        want: &Want,
        mut most: u64,
        reach: Reach,
        mut look: impl FnMut(Run) -> u64,
    ) {
        let usable = |id: u32| match reach {
            Reach::Ready => self.ready(id),
            Reach::Waits => self.reachable(id),
        };
        let wanted = |id: u32| self.is_wanted(self.records[id].stream, reach);
        let classes = self.space.pending_streams();
        let classes = classes.filter(|class| self.may_reach(*class, reach));
        for class in classes.chain([MIXED]) {
            let Some(index) = self.space.index(class) else {
                continue;
            };
            index.look_at_each(|entry| {
                // A run is at least as long as each of its pieces, and the pieces are visited by length.
                if u64::from(entry.granules) > most {
                    return false;
                }
                if let Some(run) = self.run_from_head(entry.id, usable, wanted)
                    && run.granules <= most
                    && run.holds(want)
                {
                    most = look(run);
                }
                true
            });
        }
    }

    /// Returns the order number of the newest marker that the head of a run has to wait for.
    fn newest_marker(&self, run: Run, granules: u32) -> u64 {
        let (mut at, mut left, mut newest) = (run.first, u64::from(granules), 0);
        loop {
            for u in self.records.cold(at).uses.as_slice() {
                if !self.streams.ready(self.stream, u) {
                    newest = newest.max(self.streams.marker(u).map_or(u64::MAX, |m| m.order));
                }
            }
            let size = u64::from(self.records[at].granules);
            if size >= left {
                return newest;
            }
            left -= size;
            at = self.records[at].next;
        }
    }

    /// Returns the run around a wanted piece, if that is the first wanted piece of the run, so that every run is
    /// visited once.
    fn run_from_head(
        &self,
        id: u32,
        usable: impl Fn(u32) -> bool,
        wanted: impl Fn(u32) -> bool,
    ) -> Option<Run> {
        if !usable(id) {
            return None;
        }
        let mut first = id;
        while let prev = self.records[first].prev
            && prev != NIL
            && usable(prev)
        {
            if wanted(prev) {
                return None;
            }
            first = prev;
        }
        Some(self.extend(first, usable))
    }

    /// Returns the run that begins with a piece.
    fn extend(&self, first: u32, usable: impl Fn(u32) -> bool) -> Run {
        let (mut granules, mut at) = (0, first);
        while at != NIL && usable(at) {
            granules += u64::from(self.records[at].granules);
            at = self.records[at].next;
        }
        Run {
            first,
            addr: self.records[first].addr,
            granules,
        }
    }

    /// Returns the first of the usable pieces directly before an extent, and their granules.
    pub(crate) fn usable_before(&self, id: u32, usable: impl Fn(u32) -> bool) -> (u32, u64) {
        let (mut first, mut granules) = (id, 0);
        while let prev = self.records[first].prev
            && prev != NIL
            && usable(prev)
        {
            first = prev;
            granules += u64::from(self.records[prev].granules);
        }
        (first, granules)
    }

    /// Returns the granules of usable pieces directly after an extent.
    pub(crate) fn usable_behind(&self, id: u32, usable: impl Fn(u32) -> bool) -> u64 {
        match self.records[id].next {
            NIL => 0,
            next => self.extend(next, usable).granules,
        }
    }
}
