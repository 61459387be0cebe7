//! Where a reclaim to more memory stands: a cursor over stages, and what is remembered beside it.

use std::sync::Arc;

use crate::allocator::engine::hooks::{Hooks, ReliefHook};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::cut::Cut;
use crate::allocator::heap::growth::Growth;
use crate::allocator::heap::one_handle::Place;
use crate::allocator::physical::plan::Release;
use crate::allocator::report::GrowthReason;
use crate::allocator::stream::finder::Run;
use crate::allocator::stream::slot::StreamKey;
use crate::allocator::view::mapping::{Stitch, ViewRun};
use crate::driver::{DriverError, Event};

/// How far a reclaim has come since memory last became complete, or the driver's again. Whatever makes it so
/// moves the cursor back to the first stage, since each stage may then find what it did not find before.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The heap was looked at as it is.
    #[default]
    Fit,
    /// The caches of large blocks hold nothing back.
    CachesEmptied,
    /// The caches of small blocks gave back the pages that they can do without.
    Flushed,
    /// Idle views are gone.
    Evicted,
}

/// Whether a reclaim cut a view short. What was cut served the request no better before.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortened {
    #[default]
    No,
    /// In the last step.
    Now,
    Before,
}

/// What the driver is known to answer to a request for memory.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) enum Answer {
    /// An earlier refusal of another reclaim counts, if there was one.
    #[default]
    Known,
    /// The earlier refusal was forgotten.
    AskedAgain,
    /// The driver refused this reclaim.
    Refused(DriverError),
}

/// The steps that the program and the device notice.
pub(crate) enum LastResort {
    /// Hooks that are still to be asked, once somebody looked for them.
    Hooks(Option<std::vec::IntoIter<ReliefHook>>),
    /// The contexts were waited for.
    Synchronised,
}

/// A reclaim to more memory for one request.
pub(crate) struct Reclaim<'a> {
    hooks: &'a Hooks,
    /// Bytes of memory of the device.
    pub total_memory: u64,
    /// Whether views may be used, as far as is known before the next step.
    pub views: bool,
    pub stage: Stage,
    pub shortened: Shortened,
    /// A stitch was refused; no other is tried until there may be more memory for it.
    pub unstitched: bool,
    /// Memory was made for a stitch.
    pub supplied: bool,
    /// What earlier failures left behind was tried once more.
    pub retried: bool,
    /// A marker of the asking stream was tried since the last hook ran.
    pub marked: bool,
    /// No more address space can be had; what there is may do.
    pub cramped: bool,
    pub answer: Answer,
    pub last_resort: LastResort,
    /// A failure that another step might have made up for.
    pub failure: Option<DriverError>,
}

impl<'a> Reclaim<'a> {
    pub(crate) fn new(hooks: &'a Hooks, total_memory: u64) -> Self {
        Reclaim {
            hooks,
            total_memory,
            views: false,
            stage: Stage::Fit,
            shortened: Shortened::No,
            unstitched: false,
            supplied: false,
            retried: false,
            marked: false,
            cramped: false,
            answer: Answer::Known,
            last_resort: LastResort::Hooks(None),
            failure: None,
        }
    }

    /// The driver's error that an out-of-memory error names.
    pub(crate) fn cause(&self) -> Option<DriverError> {
        match self.answer {
            Answer::Refused(error) => Some(error),
            Answer::Known | Answer::AskedAgain => self.failure,
        }
    }

    /// The next hook to ask.
    pub(crate) fn next_hook(&mut self) -> Option<ReliefHook> {
        match &mut self.last_resort {
            LastResort::Hooks(hooks) => hooks
                .get_or_insert_with(|| self.hooks.all().into_iter())
                .next(),
            LastResort::Synchronised => None,
        }
    }

    /// Notes a step that is about to be taken.
    pub(crate) fn note(&mut self, step: &Step) {
        if self.shortened == Shortened::Now {
            self.shortened = Shortened::Before;
        }
        match step {
            Step::EmptyCaches => self.stage = Stage::CachesEmptied,
            Step::Flush => self.stage = Stage::Flushed,
            Step::Retry => self.retried = true,
            Step::Evict(_) => self.stage = Stage::Evicted,
            Step::Shorten(_) => self.shortened = Shortened::Now,
            Step::Supply(..) => self.supplied = true,
            // What the driver had no memory for it may have now.
            Step::Release(_) => self.unstitched = false,
            Step::Mark(_) => {
                self.marked = true;
                // The stream may be idle: then what it freed is complete at once.
                self.begin_again();
            }
            Step::AskAgain => self.answer = Answer::AskedAgain,
            Step::HostWait(..) => self.begin_again(),
            Step::Hook(..) => {
                self.begin_again();
                // What a hook frees may itself be marked.
                self.marked = false;
            }
            Step::Synchronise => {
                self.last_resort = LastResort::Synchronised;
                self.begin_again();
            }
            _ => {}
        }
    }

    /// Moves the cursor back: memory becomes complete, so pages may be whole, views idle, and handles free to
    /// stitch.
    fn begin_again(&mut self) {
        self.stage = Stage::Fit;
        self.unstitched = false;
    }

    /// The driver had no memory, or no addresses, for a view. There is always growth.
    pub(crate) fn give_up_stitch(&mut self, error: DriverError) {
        self.unstitched = true;
        self.failure = Some(error);
    }
}

/// The next step of a reclaim.
pub(crate) enum Step {
    Take(Run),
    /// Takes a run behind waits.
    Wait(Run),
    Place(Place),
    View(ViewRun),
    Stitch(Box<Stitch>, GrowthReason),
    Evict(Vec<u64>),
    /// Cuts a view short for a stitch.
    Shorten(Cut),
    /// Lets idle views go for their addresses.
    MakeWay(Vec<u64>),
    /// Reserves so many bytes of address space.
    Reserve(SpaceId, u64),
    Grow(Growth, GrowthReason),
    /// Makes memory that a stitch lacks, as free memory.
    Supply(Growth, GrowthReason),
    Flush,
    /// Takes out of the caches of large blocks what nobody holds.
    EmptyCaches,
    /// Tries again to release what an earlier failure left behind.
    Retry,
    Release(Vec<Release>),
    /// Marks the asking stream, which has this key.
    Mark(StreamKey),
    /// Memory that the driver refused earlier may be there now.
    AskAgain,
    /// Waits on the host for the marker of a stream up to a bound.
    HostWait(u32, u64, Arc<Event>),
    /// Asks a hook for so many bytes.
    Hook(ReliefHook, u64),
    Synchronise,
    Fail,
}

impl Step {
    /// Whether a request that comes to this step is not served by what was ready.
    pub(crate) fn is_miss(&self) -> bool {
        use Step::{Fail, Grow, Hook, HostWait, Release, Stitch, Supply, Synchronise};
        matches!(
            self,
            Stitch(..)
                | Grow(..)
                | Supply(..)
                | Release(_)
                | HostWait(..)
                | Hook(..)
                | Synchronise
                | Fail
        )
    }
}
