//! Where a climb to more memory stands.

use std::sync::Arc;

use crate::allocator::extent::plan::{Growth, Release};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::cut::Cut;
use crate::allocator::heap::one_handle::Place;
use crate::allocator::physical::LEVELS;
use crate::allocator::stream::finder::Run;
use crate::allocator::view::mapping::{Stitch, ViewRun};

/// A ready extent is passed over for one that needs a wait if it is longer than this many times the
/// other (plus a page), by level of the stitching budget. The longer one is what the request would take:
/// where it leaves handles whole that is not the best fit, and such a piece waits sooner.
pub(crate) const TOLERANCES: [u64; LEVELS] = [16, 8, 2, 1, 0, 0];

pub(crate) const TOLERANCE_SLACK: u64 =
    crate::allocator::size::PAGE / crate::allocator::size::GRANULE;

/// What a climb has done already.
#[derive(Default)]
pub(crate) struct Climb {
    /// Shelves hold nothing back.
    pub settled: bool,
    pub flushed: bool,
    pub retried: bool,
    pub evicted: bool,
    /// A stitch was refused; no other is tried until there may be more memory for it.
    pub unstitched: bool,
    /// A view was cut short for the request,
    pub shortened: bool,
    /// in the last step. What was cut served the request no better before, as far as this thread knows.
    pub just_cut: bool,
    /// Memory was made for a stitch.
    pub supplied: bool,
    pub marked: bool,
    pub asked_again: bool,
    /// No more address space can be had; what there is may do.
    pub cramped: bool,
    pub hooks: Option<std::vec::IntoIter<crate::allocator::engine::hooks::ReliefHook>>,
    pub synchronised: bool,
    pub missed: bool,
    /// The driver's last refusal.
    pub refusal: Option<crate::driver::DriverError>,
    /// A failure that another rung might have made up for.
    pub failure: Option<crate::driver::DriverError>,
}

impl Climb {
    /// Notes a step that is about to be taken.
    pub(crate) fn note(&mut self, step: &Step) {
        self.missed |= step.is_miss();
        self.just_cut = matches!(step, Step::Shorten(_));
        match step {
            Step::Settle => self.settled = true,
            Step::Flush => self.flushed = true,
            Step::Retry => self.retried = true,
            Step::Evict(_) => self.evicted = true,
            Step::Shorten(_) => self.shortened = true,
            Step::Supply(_) => self.supplied = true,
            // What the driver had no memory for it may have now.
            Step::Release(_) => self.unstitched = false,
            Step::Mark => {
                self.marked = true;
                // The stream may be idle: then what it freed is complete at once.
                self.look_again();
            }
            Step::AskAgain => self.asked_again = true,
            Step::HostWait(..) => self.look_again(),
            Step::Hook(..) => {
                self.look_again();
                // What a hook frees may itself be marked.
                self.marked = false;
            }
            Step::Synchronise => {
                self.synchronised = true;
                self.look_again();
            }
            _ => {}
        }
    }

    /// Memory becomes complete: pages may be whole then, views idle, and handles free to stitch.
    pub(crate) fn look_again(&mut self) {
        self.settled = false;
        self.flushed = false;
        self.evicted = false;
        self.unstitched = false;
    }
}

/// The next rung.
pub(crate) enum Step {
    Take(Run),
    Wait(Run),
    Place(Place),
    View(ViewRun),
    Stitch(Box<Stitch>),
    Evict(Vec<u64>),
    /// Cuts a view short for a stitch.
    Shorten(Cut),
    /// Lets idle views go for their addresses.
    MakeWay(Vec<u64>),
    Reserve(SpaceId, u64),
    Grow(Growth),
    /// Makes memory that a stitch lacks, as free memory.
    Supply(Growth),
    Flush,
    /// Takes off the shelves what nobody holds.
    Settle,
    /// Tries again to release what an earlier failure left behind.
    Retry,
    Release(Vec<Release>),
    Mark,
    /// Memory that the driver refused earlier may be there now.
    AskAgain,
    HostWait(u32, u64, Arc<crate::driver::Event>),
    Hook(crate::allocator::engine::hooks::ReliefHook, u64),
    Synchronise,
    Fail,
}

impl Step {
    /// Whether a request that comes to this is not served by what was ready.
    pub(crate) fn is_miss(&self) -> bool {
        use Step::{Fail, Grow, Hook, HostWait, Release, Stitch, Supply, Synchronise};
        matches!(
            self,
            Stitch(_)
                | Grow(_)
                | Supply(_)
                | Release(_)
                | HostWait(..)
                | Hook(..)
                | Synchronise
                | Fail
        )
    }
}

/// Views that stand idle go before there is more address space for views than so many times the
/// device's memory.
pub(crate) const VIEW_ADDRESSES: u64 = 8;
