//! Streams come and go, and contexts of others.

use cualloc::Error;
use cualloc::driver::Stream;
use cualloc::driver::sys::*;
use cualloc::error::StreamMisuse;

use super::{Done, Held, Kind, Lane, World};
use crate::rng::Rng;
use crate::table::{self, own};

impl World {
    pub(super) fn new_stream(&mut self, a: u32, rng: &mut Rng) {
        let alive = self.lanes.iter().filter(|l| l.alive).count();
        if alive > self.setup.streams + 12 {
            return;
        }
        let place = a as usize % self.places.len();
        if !self.places[place].alive {
            return;
        }
        if rng.chance(35) && !self.places[place].foreign {
            if let Ok(stream) = Stream::new(&self.places[place].context) {
                self.add_stream(stream, place, false);
            }
            return;
        }
        // Some that block, some that do not.
        self.add_raw(place, u32::from(rng.chance(70)));
    }

    /// A handle that only the program knows.
    pub(super) fn add_raw(&mut self, place: usize, flags: u32) {
        self.become_current(place);
        let mut raw: CUstream = std::ptr::null_mut();
        // SAFETY: a context is current, the output is a local.
        let code = own(|f| unsafe { f.cuStreamCreate.unwrap()(&mut raw, flags) });
        if code == CUresult::CUDA_SUCCESS {
            self.add_lane(None, raw as usize, place, false);
        }
    }

    /// Retires the stream at every allocator. Says whether all of them agreed.
    pub fn retire_lane(&mut self, lane: usize) -> Result<bool, String> {
        let mut agreed = true;
        for slot in 0..self.slots.len() {
            self.lanes[lane].kept_in.remove(&slot);
            let it = &self.lanes[lane];
            if !it.raw_in.contains(&slot) && !it.owned_in.contains(&slot) {
                continue;
            }
            self.before_call(slot, lane);
            let allocator = &self.slots[slot].allocator;
            let result = match &it.stream {
                Some(stream) => allocator.retire(stream),
                // SAFETY: live.
                None => unsafe { allocator.retire_raw(it.raw as CUstream) },
            };
            match result {
                Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {
                    self.lanes[lane].raw_in.remove(&slot);
                    self.lanes[lane].owned_in.remove(&slot);
                }
                Err(error) if self.calm() => {
                    return Err(format!("a stream could not be retired: {error:?}"));
                }
                Err(_) => agreed = false,
            }
        }
        self.lanes[lane].epoch += 1;
        Ok(agreed)
    }

    pub(super) fn retire(&mut self, lane: usize) -> Done {
        let it = &self.lanes[lane];
        if !it.alive || it.capturing.is_some() || it.special || !self.places[it.place].alive {
            return Ok(());
        }
        self.retire_lane(lane).map(drop)
    }

    /// The program ends its use of a stream: the handle is destroyed once it was retired.
    pub fn leave(&mut self, lane: usize) -> Done {
        let it = &self.lanes[lane];
        if !it.alive || it.capturing.is_some() || it.special || !self.places[it.place].alive {
            return Ok(());
        }
        let orphaned = |h: &Held| h.orphan && (h.home == lane || h.recorded.contains(&lane));
        if self.held.iter().any(|h| h.due == Some(lane)) {
            return Ok(());
        }
        let foreign = it.stream.is_none();
        if foreign && self.held.iter().any(orphaned) {
            return Ok(());
        }
        let by_handle = it.raw_in.difference(&it.owned_in).next().is_some();
        let unnamed = |h: &Held| matches!(h.kind, Kind::Raw) && h.home == lane;
        let needs = foreign || by_handle || self.held.iter().any(unnamed);
        if needs && !self.retire_lane(lane)? {
            return Ok(());
        }
        // No capture may begin on it from here on.
        table::nothing_inside();
        self.notice_begun();
        let it = &mut self.lanes[lane];
        if it.capturing.is_some() {
            return Ok(());
        }
        it.alive = false;
        match it.stream.take() {
            Some(stream) => drop(stream),
            None => {
                let raw = it.raw as CUstream;
                self.become_current(self.lanes[lane].place);
                // SAFETY: ours, and not used again.
                let _ = own(|f| unsafe { f.cuStreamDestroy_v2.unwrap()(raw) });
            }
        }
        Ok(())
    }

    /// A context of other code is destroyed, after all of its streams were retired and destroyed.
    pub(super) fn leave_context(&mut self) -> Done {
        let Some(place) = (0..self.places.len()).find(|&p| {
            let place = &self.places[p];
            place.foreign && place.alive
        }) else {
            return Ok(());
        };
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].place == place {
                self.leave(lane)?;
            }
        }
        let stays = |lane: &Lane| lane.place == place && lane.alive;
        if self.lanes.iter().any(stays) || !self.kept_of(place) {
            return Ok(());
        }
        self.sim.complete_all();
        self.checker
            .tracker()
            .context_destroyed(self.places[place].raw);
        self.sim
            .destroy_context(self.places[place].raw as CUcontext);
        self.places[place].alive = false;
        // The program's own call.
        self.checker.fail(None);
        let added = self.add_context(0).map_err(|e| e.to_string());
        self.checker.fail(self.setup.fault);
        added
    }

    /// Whether streams of a foreign context are all the program's own handles: a `Stream` that an allocator
    /// keeps would outlive its context.
    fn kept_of(&self, place: usize) -> bool {
        let owned = |lane: &Lane| lane.place == place && !lane.owned_in.is_empty();
        !self.lanes.iter().any(owned)
    }
}
