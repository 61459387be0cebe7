//! The end of a program: injected failures end, so the allocator must recover completely.

use cualloc::Error;
use cualloc::driver::sys::*;
use cualloc::driver::{Context, DriverError, Stream};
use cualloc::error::StreamMisuse;
use cualloc::sim::{Mode, Simulator};

use super::rng::Rng;
use super::run::given_up;
use super::table::{Checker, nothing_inside};
use super::world::{Done, Kind, World};

impl World {
    pub fn end(mut self) -> Done {
        let mut rng = Rng::new(self.setup.seed);
        nothing_inside();
        self.spares_captures()?;
        while self.lanes.iter().any(|l| l.capturing.is_some()) {
            self.end_capture(0)?;
        }
        self.checker.fail(None);
        self.current = None;
        self.become_current(self.slots[0].place);
        self.sim.complete_all();
        let stashed = std::mem::take(&mut *self.stash.lock().unwrap());
        self.held.extend(stashed);
        for slot in 0..self.slots.len() {
            self.slots[slot].allocator.remove_relief_hook("judge");
            self.slots[slot].allocator.set_limit(None);
            self.heals(slot)?;
        }
        self.give_back(&mut rng)?;
        if self.setup.has_invalid_handles() && !self.keeps_distrust() {
            self.retire_foreign()?;
        }
        for slot in 0..self.slots.len() {
            self.strip(slot);
            self.marked(slot)?;
        }
        self.sim.complete_all();
        for slot in 0..self.slots.len() {
            self.close(slot)?;
        }
        self.let_go()
    }

    /// Requests go well again.
    fn heals(&mut self, slot: usize) -> Done {
        let place = self.slots[slot].place;
        self.become_current(place);
        let context = self.places[place].context.clone();
        let stream = Stream::new(&context).map_err(|e| format!("no stream at the end: {e}"))?;
        self.add_stream(stream.clone(), place, false);
        let lane = self.lanes.len() - 1;
        for bytes in [1000, 9 << 20] {
            let mut block = self.slots[slot].allocator.allocate(bytes, &stream);
            if matches!(block, Err(Error::Closed)) {
                // It was closed in the program, and the next one could not be made then.
                self.fresh(slot)?;
                block = self.slots[slot].allocator.allocate(bytes, &stream);
            }
            let block = block.map_err(|e| format!("{bytes} bytes at the end: {e:?}"))?;
            self.told(slot, lane, true);
            let at = (block.ptr(), bytes as u64);
            self.handed_out(slot, lane, at, Kind::Block(block))?;
            self.work_on(lane, at.0, at.1, 2);
        }
        Ok(())
    }

    /// Every block and guard goes.
    fn give_back(&mut self, rng: &mut Rng) -> Done {
        while !self.held.is_empty() {
            let last = self.held.len() - 1;
            let before = self.held.len();
            match &self.held[last].kind {
                Kind::Layered(_) => self.free_layered(last, rng)?,
                _ => self.free(last, rng)?,
            }
            if self.held.len() == before {
                return Err("a block cannot be freed although nothing fails any more".to_owned());
            }
        }
        while !self.guards.is_empty() {
            self.unguard(0);
        }
        self.checker.tracker().take_violation().map_or(Ok(()), Err)
    }

    /// Once all work is done and the raw streams are marked, nothing waits for anything.
    fn marked(&mut self, slot: usize) -> Done {
        let mut pending = 0;
        // A page of small blocks may need a mark after the trim that fetched it.
        for _ in 0..6 {
            self.mark_all(slot)?;
            self.sim.complete_all();
            let trimmed = self.slots[slot].allocator.trim(0);
            pending = trimmed
                .map_err(|e| format!("a trim at the end: {e:?}"))?
                .pending;
        }
        if pending > 0 && !self.keeps_distrust() {
            return Err(format!("all work is done, and {pending} bytes wait for it"));
        }
        self.slots[slot]
            .allocator
            .check()
            .map_err(|e| format!("the heap is wrong at the end: {e}"))
    }

    /// Whether contexts that the allocators distrust stay so until they are closed: in every second program.
    fn keeps_distrust(&self) -> bool {
        self.setup.has_invalid_handles() && !self.setup.seed.is_multiple_of(2)
    }

    /// The streams of contexts of others are retired, which ends any distrust.
    fn retire_foreign(&mut self) -> Done {
        for lane in 0..self.lanes.len() {
            let place = &self.places[self.lanes[lane].place];
            if self.lanes[lane].alive && place.alive && place.foreign && !self.retire_lane(lane)? {
                return Err("a stream of another context cannot be retired".to_owned());
            }
        }
        Ok(())
    }

    fn mark_all(&mut self, slot: usize) -> Done {
        for lane in 0..self.lanes.len() {
            let it = &self.lanes[lane];
            if !it.alive || !self.places[it.place].alive || !it.raw_in.contains(&slot) {
                continue;
            }
            self.become_current(self.slots[slot].place);
            // SAFETY: the stream is live.
            match unsafe { self.slots[slot].allocator.mark_raw(it.raw as CUstream) } {
                Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
                Err(error) => return Err(format!("a mark at the end: {error:?}")),
            }
        }
        self.become_current(self.slots[slot].place);
        Ok(())
    }

    fn close(&mut self, slot: usize) -> Done {
        self.become_current(self.slots[slot].place);
        let allocator = &self.slots[slot].allocator;
        match allocator.synchronize() {
            Err(Error::Driver(error)) if self.keeps_distrust() && is_invalid_handle(error) => {}
            waited => waited.map_err(|e| format!("synchronize at the end: {e:?}"))?,
        }
        allocator
            .close()
            .map_err(|e| format!("close at the end: {e:?}"))?;
        allocator
            .check()
            .map_err(|e| format!("the heap is wrong after close: {e}"))?;
        let all = allocator.stats().all;
        if all.reserved.current > 0 || all.allocations.current > 0 {
            return Err(format!("closed, and holds memory: {all:?}"));
        }
        self.checker.tracker().take_violation().map_or(Ok(()), Err)
    }

    fn let_go(mut self) -> Done {
        self.slots.clear();
        self.helper = None;
        for lane in 0..self.lanes.len() {
            let it = &mut self.lanes[lane];
            if !it.alive || it.special {
                continue;
            }
            if it.stream.take().is_none() {
                let raw = it.raw as CUstream;
                let place = it.place;
                if self.places[place].alive {
                    self.become_current(place);
                    // SAFETY: ours, and not used again.
                    let _ = super::table::own(|f| unsafe { f.cuStreamDestroy_v2.unwrap()(raw) });
                }
            }
        }
        self.lanes.clear();
        // What could not be destroyed with the last object of a context goes with the next one.
        for place in self.places.drain(..).filter(|it| it.foreign && it.alive) {
            // SAFETY: the context is alive.
            let next = unsafe { Context::from_raw(&self.driver, place.raw as CUcontext) };
            drop(next.map_err(|e| format!("a context at the end: {e}"))?);
        }
        let violation = self.checker.tracker().take_violation();
        self.sim.set_mode(Mode::Instant);
        after(&self.sim, &self.checker)?;
        violation.map_or(Ok(()), Err)
    }
}

fn is_invalid_handle(error: DriverError) -> bool {
    error.code() == CUresult::CUDA_ERROR_INVALID_HANDLE
}

/// What is left when everything was given back.
pub fn after(sim: &Simulator, checker: &Checker) -> Done {
    let leaks = checker.unexplained(sim.leaks());
    if given_up() == 0 && !leaks.is_empty() {
        return Err(format!("left after all was given back: {leaks:?}"));
    }
    match sim.take_reports().first() {
        Some(report) => Err(format!("the simulator reports: {report}")),
        None => Ok(()),
    }
}
