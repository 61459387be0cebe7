//! Which free memory fits a request: best fit over runs of adjacent pieces.
//!
//! A *run* is a maximal sequence of adjacent free pieces that the asking stream may use: each one
//! complete, pending on that stream alone, or ordered behind it by a wait already made. Runs may
//! join pieces of several classes, so the index of one class cannot answer alone; what it cannot
//! answer is found by walking the pending pieces, of which there are few: they become complete and
//! merge as markers are observed.

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

/// Runs of each class that are looked at for one that spares whole handles.
const SPARING_RUNS: usize = 16;

impl Streams {
    /// The waits after which a stream may use what the shards were. A wait also covers everything that the marker's
    /// stream had followed, so the newest markers come first.
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
    /// One piece.
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

    /// Whether a request fits, aligned as it asks.
    fn holds(&self, want: &Want) -> bool {
        self.granules >= u64::from(want.skip(self.addr)) + u64::from(want.granules)
    }
}

/// Which pieces a request may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Those that its stream may use without a wait.
    Ready,
    /// Those that it may use after waits which can be made, in runs that need one.
    Waits,
}

/// The view of one request on the free pieces.
pub(crate) struct Finder<'a> {
    pub records: &'a Records,
    pub streams: &'a Streams,
    pub space: &'a Space,
    /// The asking stream.
    pub stream: u32,
}

/// Bytes of handles that a run has as a whole, and has no more once a request lies in it.
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

    /// Whether a piece may be used by the stream, if need be after waits that can be made.
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

    /// Of the ready runs around the shortest pieces that hold the request, the one in which it takes the
    /// fewest bytes of handles that are open as a whole; of equal ones the best fit.
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

    /// Best fit where all free memory is the stream's own and merged: the index has the answer.
    #[inline]
    pub(crate) fn own_run(&self, want: &Want) -> Option<Run> {
        let fitting = self.space.index(self.stream)?.iter_from(want.granules);
        fitting.map(Run::alone).find(|run| run.holds(want))
    }

    /// Whether the stream's own pieces are all there is and adjacent ones are merged.
    pub(crate) fn only_own(&self) -> bool {
        self.space.merge_own
            && self
                .space
                .index(self.stream)
                .is_some_and(|own| own.len() == self.space.piece_count())
    }

    /// The best of a run and those of ready pieces, of at most `most` granules.
    fn best_pending(&self, want: &Want, mut best: Option<Run>, most: u64) -> Option<Run> {
        self.pending_runs(want, most, Reach::Ready, |run| {
            let better = run.better(best);
            best = Some(better);
            better.granules
        });
        best
    }

    /// The run that can be used after waits of which the newest marker is the oldest.
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

    /// Whether a piece that is pending on one stream alone may be usable. What is complete there is everybody's
    /// already, unless memory never changes streams.
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

    /// Whether runs are found by their pieces of a class. Those of complete pieces alone are found without a walk,
    /// and those that need no wait were looked at before others are.
    fn is_wanted(&self, class: u32, reach: Reach) -> bool {
        class != COMPLETE && (reach != Reach::Waits || class != self.stream)
    }

    /// Looks at the runs of at most so many granules that hold a request, and have a piece in them that
    /// is wanted. `look` says how many granules are of interest from then on.
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
                // A run is as long as each of its pieces at least, and these come by length.
                if u64::from(entry.granules) > most {
                    return false;
                }
                if let Some(run) = self.run_led_by(entry.id, usable, wanted)
                    && run.granules <= most
                    && run.holds(want)
                {
                    most = look(run);
                }
                true
            });
        }
    }

    /// The order number of the newest marker that the head of a run has to wait for.
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

    /// The run around a piece that is wanted, if that piece is the first such of the run (so that every run is
    /// looked at once).
    fn run_led_by(
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

    /// The run that begins with a piece.
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

    /// Granules of usable pieces directly before an extent, and the first of them.
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

    /// Granules of usable pieces directly behind an extent.
    pub(crate) fn usable_behind(&self, id: u32, usable: impl Fn(u32) -> bool) -> u64 {
        match self.records[id].next {
            NIL => 0,
            next => self.extend(next, usable).granules,
        }
    }
}
