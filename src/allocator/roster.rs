//! Which streams there are, as far as memory depends on it: coming, going, and what is shared between
//! them.

use crate::driver::Context;

use super::records::{COMPLETE, SpaceId};
use super::space::Space;
use super::state::State;
use super::streams::{Holder, StreamKey};
use super::uses::Uses;

/// Idle streams of the caller are forgotten above this number of known streams.
const MANY_STREAMS: usize = 64;

impl State {
    pub(crate) fn adopt(
        &mut self,
        key: StreamKey,
        raw: usize,
        context: Context,
        holder: Holder,
    ) -> u32 {
        if let Some(stream) = self.streams.find(key) {
            return stream;
        }
        let stream = self.streams.add(key, raw, context, holder);
        self.streams_changed();
        stream
    }

    /// With one stream, memory needs no tags to be told apart and merges freely; with several it
    /// must not.
    pub(crate) fn streams_changed(&mut self) {
        self.stats.streams = self.streams.len() as u64;
        if !self.packed {
            return;
        }
        let single = !self.streams.several();
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.parts(space);
            if space.merge_own != single {
                space.merge_own = single;
                if single {
                    let classes: Vec<u32> = space.pending_streams().collect();
                    for class in classes {
                        space.recoalesce(records, class);
                    }
                }
            }
        }
        if !single {
            // Memory that was never used, or not for long, is everybody's from now on.
            for space in [SpaceId::Large, SpaceId::Small] {
                let classes: Vec<u32> = self
                    .space(space)
                    .into_iter()
                    .flat_map(Space::pending_streams)
                    .collect();
                for class in classes {
                    self.settle_class(space, class);
                }
            }
        }
    }

    /// While one stream exists, complete memory is as good as its own, and merges with it.
    pub(crate) fn adopt_complete(&mut self, space: SpaceId, stream: u32) {
        let (space, records) = self.parts(space);
        if !space.merge_own {
            return;
        }
        while let Some(entry) = space.index(COMPLETE).and_then(|i| i.largest()) {
            space.retag(records, entry.id, Uses::one(stream, 0));
        }
    }

    /// Makes the next marker of a stream cover everything that it may still touch: live blocks, and
    /// what was freed inside its pages, which no batch counts.
    pub(crate) fn prepare_last_marker(&mut self, stream: u32) {
        self.flush_pages_of(stream);
        let pages = self.has_pages(stream);
        let slot = &mut self.streams[stream];
        if slot.live > 0 || pages {
            slot.open_uses += 1;
        }
    }

    fn has_pages(&self, stream: u32) -> bool {
        self.space(SpaceId::Pages(stream))
            .is_some_and(|s| !s.regions().is_empty())
    }

    /// Gives back the slot of a stream that nothing refers to.
    pub(crate) fn recycle(&mut self, stream: u32) {
        let many = self.streams.len() > MANY_STREAMS;
        let forgettable = matches!(self.streams[stream].holder, Holder::Foreign) && many;
        if forgettable && self.has_pages(stream) {
            // What was freed in its pages is counted from here on: later, when it is complete.
            self.flush_pages_of(stream);
            return;
        }
        let slot = &mut self.streams[stream];
        let quiet = slot.live == 0 && slot.calls == 0 && slot.open_uses == 0;
        let idle = slot.in_use && quiet && slot.completed + 1 >= slot.open;
        if !idle {
            return;
        }
        match slot.holder {
            Holder::Retired => {}
            // A caller's stream that comes again is simply registered again.
            Holder::Foreign if many => slot.holder = Holder::Retired,
            _ => return,
        }
        self.flush_pages_of(stream);
        self.release_class(stream);
        if self.streams.recycle(stream) {
            self.streams_changed();
        }
    }

    /// Everything that was tagged with a drained stream is complete.
    fn release_class(&mut self, stream: u32) {
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.parts(space);
            while let Some(entry) = space.index(stream).and_then(|i| i.largest()) {
                space.retag(records, entry.id, Uses::None);
            }
        }
        if let Some(pages) = self.pages.get_mut(stream as usize)
            && pages.as_ref().is_some_and(|p| p.regions().is_empty())
        {
            *pages = None;
        }
    }
}
