//! Steps of random programs.

use cualloc::Error;
use cualloc::driver::sys;
use cualloc::error::StreamMisuse;

use super::{Done, Machine, text};
use crate::checker::table::Fault;
use crate::program::{Act, Bad, Relief, Step, failing};
use crate::rng::Rng;

impl Machine<'_> {
    /// The bytes of the next request, if there is to be one: no more blocks than the program's most, or, under a limit
    /// that is to be filled, none while memory is being freed. These are often more than any piece of what is free.
    fn wish(&mut self, rng: &mut Rng) -> Option<usize> {
        let wishes = &self.setup.wishes;
        let Some(limit) = wishes.fill else {
            return (self.blocks.len() < wishes.most).then(|| wishes.bytes(rng));
        };
        let room = (limit / 100 * 96).saturating_sub(self.figures.requested);
        self.freeing = room < if self.freeing { limit / 4 } else { limit / 12 };
        let bytes = match rng.below(100) {
            0..3 => rng.log_uniform(64 << 10),
            3..6 => room / 100 * (20 + rng.below(40)),
            _ => room / 100 * (80 + rng.below(18)),
        };
        (!self.freeing).then_some(bytes.max(1) as usize)
    }

    /// A step of a random program.
    pub fn step(&mut self, step: &Step) -> Done {
        let (Step { act, a, b, .. }, rng) = (*step, &mut step.rng());
        let (setup, wishes) = (self.setup, &self.setup.wishes);
        if self.in_views > 0 {
            self.summary.beside_views += 1;
            self.summary.trims_beside += u64::from(act == Act::Trim);
            self.summary.faults_beside += u64::from(act == Act::Fail);
        }
        let part = (b as u8, (b >> 8) as u8);
        let nothing_or = |bytes: u64, rng: &mut Rng| match rng.chance(55) {
            true => 0,
            false => rng.below(bytes),
        };
        match act {
            Act::Alloc => match self.wish(rng) {
                Some(bytes) => self.allocate(wishes.want(b, bytes, 6, rng)),
                None => self.free(a, rng.chance(50)),
            },
            Act::Place if self.blocks.len() < wishes.most => {
                let bytes = wishes.bytes(rng);
                let want = wishes.want(b, bytes, 20, rng);
                self.place(want, rng.chance(55), rng.chance(50))
            }
            Act::GiveBack | Act::Place => self.free(a, rng.chance(50)),
            Act::Again => self.again(b, wishes.bytes(rng), rng.below(6)),
            Act::Cached => self.take_cached(b, wishes.bytes(rng)),
            Act::Guard => self.guard(a, part),
            Act::Unguard => self.unguard(a),
            Act::Segments => self.segments(a, part),
            Act::Absurd => {
                let (bytes, alignment) = match rng.below(3) {
                    0 => (0, 1),
                    1 => (usize::MAX - rng.index(1024), 1),
                    _ => (4096, rng.pick(&[0, 3, 4 << 20])),
                };
                self.absurd(b, bytes, alignment)
            }
            Act::IntoRaw => {
                if let Some(at) = self.block(a)
                    && let Some(block) = self.blocks[at].block.take()
                {
                    block.into_raw();
                }
                Ok(())
            }
            Act::FreeBad => self.free_bad(a, rng.pick(&[Bad::Foreign, Bad::Interior, Bad::Double])),
            Act::RecordStream => self.record_stream(a, b, rng.chance(20)),
            Act::RecordUse => self.record_use(a, b, rng.chance(50)),
            Act::Use => self.use_block(a, b, rng.chance(70)),
            Act::Wait => {
                let (from, to) = (self.lane(a), self.lane(b));
                let at = self.position(self.lanes[from].number);
                self.order(self.lanes[to].number, at)
            }
            Act::HostSync => {
                let raw = self.lanes[self.lane(b)].raw();
                // SAFETY: a live stream of the context.
                self.own(|entered| unsafe { entered.stream_synchronize(raw) })
            }
            Act::NewStream => self.new_stream(rng.chance(50)),
            Act::Retire => self.leave(b, true),
            Act::Leave => self.leave(b, false),
            Act::Limit | Act::LimitTo => {
                self.limit = match act {
                    Act::Limit => rng.chance(65).then(|| wishes.limit(rng)),
                    _ => Some(u64::from(a) << 20),
                };
                self.alloc.set_limit(self.limit);
                Ok(())
            }
            Act::Trim => {
                let keep = nothing_or(wishes.fill.unwrap_or(wishes.base), rng);
                let result = self.alloc.trim(keep);
                self.tolerate(result).map(drop)
            }
            Act::EmptyCache => {
                let result = self.alloc.empty_cache();
                self.tolerate(result).map(drop)
            }
            Act::Spare => self.spare(a),
            Act::Hook => {
                let kinds = [
                    Relief::Nothing,
                    Relief::All,
                    Relief::Trim,
                    Relief::Synchronize,
                    Relief::Allocate,
                ];
                self.hook(rng.chance(85).then(|| rng.pick(&kinds)), b)
            }
            Act::Look => self.look(),
            Act::Other => self.other(b, rng.chance(50).then(|| wishes.bytes(rng))),
            Act::Reopen => self.reopen(),
            Act::Reserve => self.reserve(b, wishes.bytes(rng)),
            Act::Mark => {
                let raw = self.lanes[self.lane(b)].raw();
                // SAFETY: a live stream of the context.
                match unsafe { self.alloc.mark_raw(raw) } {
                    Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
                    result => self.tolerate(result).map(drop),
                }
            }
            Act::Synchronize => {
                let result = self.alloc.synchronize();
                self.tolerate(result).map(drop)
            }
            Act::ResetPeaks => {
                self.alloc.reset_peaks();
                self.figures.peak = self.figures.requested;
                Ok(())
            }
            Act::Check => self.alloc.check().map_err(text),
            Act::Complete => {
                let ready = self.sim.ready_streams();
                if !ready.is_empty() {
                    self.sim.complete_stream(rng.pick(&ready), 1 + rng.index(6));
                }
                Ok(())
            }
            Act::CompleteAll => {
                self.sim.complete_all();
                Ok(())
            }
            Act::Fail => {
                let codes = [
                    sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
                    sys::CUresult::CUDA_ERROR_INVALID_VALUE,
                    sys::CUresult::CUDA_ERROR_NOT_PERMITTED,
                ];
                self.checker.fail(Some(Fault {
                    name: failing(rng),
                    permille: rng.pick(&[50, 200, 1000]),
                    code: rng.pick(&codes),
                    executed: setup.executed,
                }));
                self.armed = true;
                self.summary.faults += 1;
                Ok(())
            }
            Act::Mend => {
                self.mend();
                Ok(())
            }
            Act::Taken => self.take_memory(nothing_or(wishes.base * 2, rng)),
        }
    }
}
