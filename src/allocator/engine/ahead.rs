//! What an allocator has its helper do, where the settings ask for one: memory is made before requests need it, and what
//! a burst left beyond the soft cap goes back.

use log::Level;

use crate::driver::{process, steps};

use crate::allocator::engine::Engine;
use crate::allocator::engine::helper::{Employer, Outcome, Stopped, Work};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::ahead::{Asked, Grown, Plan};
use crate::allocator::physical::{Fresh, Release, commit};
use crate::error::Error;
use crate::nvtx::{self, Category};

impl Employer for Engine {
    fn is_usable(&self) -> bool {
        self.usable().is_ok()
    }

    fn step(&self, work: Work) -> Outcome {
        // No call of the driver is made while a capture is known.
        if process::is_watching() {
            self.leave_undone(work);
            return Outcome::Done;
        }
        match work {
            Work::Make(asked) => self.make_ahead(asked),
            Work::Repay(plan) => {
                let bytes = bytes_of(&plan);
                self.repay_all(plan);
                let mut heap = self.lock();
                heap.ahead.had_lock = true;
                heap.ahead.under_way -= bytes;
                heap.ahead.going -= bytes;
                Outcome::Done
            }
        }
    }

    /// What was claimed is free memory again.
    fn leave_undone(&self, work: Work) {
        let Work::Repay(plan) = work else {
            return;
        };
        if plan.is_empty() {
            return;
        }
        let mut heap = self.lock();
        heap.ahead.under_way -= bytes_of(&plan);
        heap.ahead.going -= bytes_of(&plan);
        plan.into_iter().for_each(|release| heap.keep(release));
    }
}

impl Engine {
    /// Notes that memory was made for a large request, until that is over.
    pub(crate) fn note_grown(&self, heap: &mut Heap, want: &Want, fresh: &Fresh) {
        if self.helper.is_some() && want.space == SpaceId::Large && !want.in_one_handle() {
            let bytes = fresh.bytes();
            heap.ahead.grown = Some(Grown {
                want: *want,
                end: fresh.addr + bytes,
                bytes,
            });
        }
    }

    /// A request is over: what it made memory for, if it did.
    #[inline]
    pub(crate) fn take_grown(&self, heap: &mut Heap) -> Option<Grown> {
        self.helper.as_ref().and_then(|_| heap.ahead.grown.take())
    }

    /// More may be made before the next request needs it.
    pub(crate) fn grow_ahead(&self, grown: &Grown) {
        if let Some(helper) = &self.helper {
            let left = helper.ask(&self.me, grown);
            self.leave_undone(Work::Repay(left));
        }
    }

    /// Leaves it to the helper to give back what was claimed for that; what it does not.
    pub(crate) fn repay_later(&self, plan: Vec<Release>) -> Vec<Release> {
        let Some(helper) = self.helper.as_ref().filter(|_| !plan.is_empty()) else {
            return plan;
        };
        let bytes = bytes_of(&plan);
        {
            let mut heap = self.lock();
            heap.ahead.under_way += bytes;
            heap.ahead.going += bytes;
        }
        let left = helper.repay(&self.me, plan);
        if !left.is_empty() {
            let mut heap = self.lock();
            heap.ahead.under_way -= bytes;
            heap.ahead.going -= bytes;
        }
        left
    }

    /// Has the helper end, and waits for the step that it is in, but not for a logger that it calls; none begins while
    /// the result lives.
    pub(crate) fn stop_ahead(&self) -> Option<Stopped<'_>> {
        let helper = self.helper.as_ref()?;
        if process::is_gone() {
            return None;
        }
        let (stopped, left) = helper.stop();
        self.leave_undone(Work::Repay(left));
        Some(stopped)
    }

    /// [`stop_ahead`](Self::stop_ahead), and waits until nothing of the thread is left.
    pub(crate) fn end_ahead(&self) -> Option<Stopped<'_>> {
        let stopped = self.stop_ahead()?;
        stopped.join();
        Some(stopped)
    }

    /// Waits until nothing is left to be done ahead, nor told of it.
    pub(crate) fn await_ahead(&self) {
        if let Some(helper) = &self.helper
            && !process::is_gone()
        {
            helper.await_idle();
        }
    }

    fn make_ahead(&self, mut asked: Asked) -> Outcome {
        let plan = {
            let mut heap = self.lock();
            heap.ahead.had_lock = true;
            heap.plan_ahead(&asked)
        };
        match plan {
            Plan::Nothing => Outcome::Done,
            Plan::Lease(bytes) => {
                asked.leased = true;
                match self.reserve_span(SpaceId::Large, bytes) {
                    Ok(()) => Outcome::More(asked),
                    Err(error) => self.not_ahead(&error),
                }
            }
            Plan::Make(fresh) => {
                let _span = nvtx::span(Category::Grow, || format!("{} bytes ahead", fresh.bytes()));
                let made = commit::map(&self.maker(), &fresh);
                let mut heap = self.lock();
                heap.ahead.had_lock = true;
                match made {
                    Ok(handles) => {
                        heap.made_ahead(&asked, &fresh, &handles);
                        asked.end += fresh.bytes();
                        Outcome::More(asked)
                    }
                    Err(failure) => {
                        let error = failure.error;
                        heap.not_made_ahead(fresh, failure);
                        drop(heap);
                        self.not_ahead(&self.error(error))
                    }
                }
            }
        }
    }

    /// No request is told of a failure here: each asks the driver itself.
    fn not_ahead(&self, error: &Error) -> Outcome {
        let (level, what) = match error {
            Error::ContextLost(_) => (Level::Warn, "nothing more is made ahead"),
            _ => (Level::Debug, "nothing was made ahead"),
        };
        let error: &dyn std::fmt::Display = match error {
            Error::ContextLost(cause) => cause,
            error => error,
        };
        steps::say(
            level,
            module_path!(),
            format_args!("allocator {}: {what}: {error}", self.id),
        );
        Outcome::Failed
    }
}

fn bytes_of(plan: &[Release]) -> u64 {
    plan.iter().map(|release| release.bytes).sum()
}
