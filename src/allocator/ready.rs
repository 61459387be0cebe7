//! Large blocks that come and go without anything else to do, as almost all of them do.
//!
//! While a stream is alone, all free memory is its own and merged, so the best fit is one look into
//! one index, and nothing is to be asked or waited for. What [`Engine::obtain`] would do for such a
//! request is done here in one go, to the same end: same place, same figures.

use super::engine::Engine;
use super::front::cache;
use super::grant::Grant;
use super::records::SpaceId;
use super::request::Request;
use super::state::State;
use super::streams::StreamKey;

impl Engine {
    /// Frees a large block in the books, if that needs no look at anything else: neither the shelves, nor
    /// captures, nor what comes after the last block. False, with nothing changed, if it does.
    #[inline(never)]
    pub(crate) fn drop_large(&self, id: u32, generation: u32) -> bool {
        let mut state = self.lock();
        let simple = !state.closed && !state.orphaned && state.is_live((id, generation));
        if !simple || state.records[id].shelved {
            return false;
        }
        let after = state.free(id);
        self.finish_free(state, &after);
        true
    }
}

impl State {
    /// Takes a large request out of the stream's own free memory. `None`, with nothing changed that
    /// the ladder would not change, if something else is to be done for it.
    pub(crate) fn take_ready(
        &mut self,
        engine: &Engine,
        key: StreamKey,
        request: &Request,
    ) -> Option<Grant> {
        let StreamKey::Id(id) = key else {
            return None;
        };
        let plain = self.packed && request.is_plain() && request.small().is_none();
        let alone = !self.streams.several() && self.fronts.due.is_empty();
        let calm = self.fronts.crowd == 0 && !self.bursts.debt;
        if !(plain && alone && calm) {
            return None;
        }
        let stream = self.streams.find(key)?;
        let slot = &mut self.streams[stream];
        let front = *slot.fronts.first()?;
        if slot.fronts.len() > 1 || slot.context.device() != engine.device {
            return None;
        }
        // Asked a moment ago, by the call under way.
        slot.capturing = false;
        self.unshelve_loose();
        self.adopt_complete(SpaceId::Large, stream);
        let want = request.want(SpaceId::Large, stream);
        let finder = self.finder(want.space, stream)?;
        let run = (finder.only_own()).then(|| finder.own_run(&want))??;
        let block = run.first;
        self.large.carve(&mut self.records, block, want.granules);
        self.announce(want.requested);
        self.large_request(&want);
        self.stats.rungs.ready += 1;
        self.stats.hits += 1;
        let mut grant = self.granted(block, stream, want.requested, front);
        grant.set_shelved(self.shelve(block, front, true));
        cache::remember(id, front);
        Some(grant)
    }
}
