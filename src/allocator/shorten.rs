//! Views that are cut short to be continued otherwise.
//!
//! A stitch continues a view behind its open end. Work that never comes to rest leaves long open runs in
//! the middle of views as well; the bound on mappings would have idle views go for each new one. So the
//! end of such a view goes instead, if nobody can reach memory through it, and the view is continued
//! where its longest open run ends.

use super::engine::Engine;
use super::error::Error;
use super::plan::LEVELS;
use super::size::GRANULE;
use super::state::{State, Want};
use super::view::{Openings, Seg, View};

/// A cut is worth it if the request lacks so much less then.
const WORTH_PERCENT: u64 = 95;

/// A view, and how many of its handles stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub base: u64,
    pub keep: usize,
}

impl View {
    /// Granules from the base on which have to stay for the blocks in it.
    fn held(&self) -> u32 {
        self.blocks.iter().map(|(_, end)| *end).max().unwrap_or(0)
    }

    /// The longest open run behind which the view may be cut and can be continued for a request of so
    /// many granules: its length, at most the request's, and how many handles stay.
    fn best_cut(&self, open: &Openings, need: u32) -> Option<(u32, usize)> {
        let held = self.held();
        let (mut offset, mut run) = (0, 0u32);
        let mut best: Option<(u32, usize)> = None;
        for (at, seg) in self.segs.iter().enumerate() {
            let (front, back) = open.borders.of(seg.handle);
            run = if front == seg.granules {
                run + front
            } else {
                back
            };
            offset += seg.granules;
            let length = run.min(need);
            if offset >= held
                && length > best.map_or(0, |(most, _)| most)
                && self.room - offset >= need - length
            {
                best = Some((length, at + 1));
            }
        }
        best
    }
}

impl State {
    /// The view to cut before a stitch, if the request would lack fewer bytes then.
    pub(crate) fn plan_cut(&self, want: &Want, open: &Openings) -> Option<Cut> {
        if self.level + 1 < LEVELS || want.align > 1 {
            return None;
        }
        let mut best: Option<(u32, Cut)> = None;
        for (base, view) in &self.views {
            if self.may_cut(view)
                && let Some((run, keep)) = view.best_cut(open, want.granules)
                && keep < view.segs.len()
                && best.is_none_or(|(most, _)| run > most)
            {
                best = Some((run, Cut { base: *base, keep }));
            }
        }
        let (run, cut) = best?;
        let need = u64::from(want.granules) * GRANULE;
        let suffixes = self.best_suffixes(need, open);
        let suffix = suffixes.first().map_or(0, |(suffix, _)| *suffix);
        let (before, after) = (need - suffix, need - u64::from(run) * GRANULE);
        (after * 100 <= before * WORTH_PERCENT).then_some(cut)
    }

    /// Whether mappings of a view may go in which no block lies.
    fn may_cut(&self, view: &View) -> bool {
        let over = |u| self.streams.complete(u);
        // Whoever else holds it may be about to have a block in it.
        let held = view.live as usize != view.blocks.len();
        !view.dead && !view.busy && !held && view.uses.as_slice().iter().all(over)
    }

    /// Takes the handles behind a cut out of a view; it keeps the address space. Returns them with
    /// the address at which they are mapped.
    fn cut_view(&mut self, cut: Cut) -> Option<(u64, Vec<Seg>)> {
        let view = self.views.get(&cut.base)?;
        let left: u32 = view
            .segs
            .iter()
            .take(cut.keep)
            .map(|seg| seg.granules)
            .sum();
        if !self.may_cut(view) || view.held() > left {
            return None;
        }
        let view = self.views.get_mut(&cut.base)?;
        let gone = view.segs.split_off(cut.keep.min(view.segs.len()));
        view.granules = left;
        // Nobody may extend it, or let it go, before its end is unmapped.
        view.busy = true;
        view.live += 1;
        self.grid.shorten(view.place, view.room, left);
        Some((cut.base + u64::from(left) * GRANULE, gone))
    }

    /// The end of a view is unmapped, or stays.
    fn cut_done(&mut self, cut: Cut, gone: Vec<Seg>, unmapped: bool) {
        if let Some(view) = self.views.get_mut(&cut.base) {
            view.busy = false;
            view.live -= 1;
        }
        self.stats.rungs.shortened += u64::from(unmapped);
        if !unmapped {
            self.extend_view(cut.base, gone);
            return;
        }
        for seg in gone {
            if let Some(holding) = self.holdings.get_mut(&seg.home) {
                holding.views -= 1;
            }
        }
    }
}

impl Engine {
    /// Unmaps the end of a view. If that fails, the view stays as it was.
    pub(crate) fn shorten(&self, cut: Cut) -> Result<(), Error> {
        let taken = self.lock().cut_view(cut);
        let Some((at, gone)) = taken.filter(|(_, gone)| !gone.is_empty()) else {
            return Ok(());
        };
        let bytes = gone.iter().map(|seg| u64::from(seg.granules)).sum::<u64>() * GRANULE;
        let unmapped = self.context.enter().and_then(|entered| {
            // SAFETY: the view's last mappings, whole; no block lies in them, nobody else takes them
            // away, and every use through the view's addresses was seen complete by the host.
            unsafe { entered.mem_unmap(at, bytes as usize) }
        });
        let mut state = self.lock();
        if unmapped.is_ok() {
            state.lookup.forget(at, bytes);
        }
        state.cut_done(cut, gone, unmapped.is_ok());
        drop(state);
        unmapped.map_err(|error| self.error(error))
    }
}
