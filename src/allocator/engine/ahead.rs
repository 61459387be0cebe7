//! A thread that makes memory before requests need it, where the settings ask for one.
//!
//! It works in steps of a few handles, and holds the engine in a step alone. Who needs it out of the way, such as a
//! close, stops it and waits for the step under way; the next growth starts it again.

use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;

use crate::driver::process;
use crate::locks::held::{Locked, locked};

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::ahead::{Asked, Growths, Plan};
use crate::allocator::physical::{Fresh, Release, commit};
use crate::error::Error;
use crate::nvtx::{self, Category};

/// After a failure so many growths are not followed: the driver may have nothing left.
const PASSED_OVER: u32 = 64;

/// The thread of one allocator, and what it is asked for.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    asked: Option<Asked>,
    /// What an allocation created beyond the soft cap, and is to go back: claimed for that.
    repay: Vec<Release>,
    growths: Growths,
    /// Growths that are not followed.
    passed_over: u32,
    /// There is a thread, or there will be one at once.
    alive: bool,
    /// It works.
    stepping: bool,
    /// So many wait for its end, or do what it must not disturb.
    stops: u32,
}

impl State {
    fn is_idle(&self) -> bool {
        self.asked.is_none() && self.repay.is_empty() && !self.stepping
    }
}

impl Shared {
    fn state(&self) -> Locked<'_, State> {
        locked(&self.state)
    }

    /// Waits for something to do; none if it is to end.
    fn next(&self) -> Option<Work> {
        let mut state = self.state();
        loop {
            if state.stops > 0 {
                return None;
            }
            let repay = std::mem::take(&mut state.repay);
            let work = match repay.is_empty() {
                true => state.asked.take().map(Work::Make),
                false => Some(Work::Repay(repay)),
            };
            if work.is_some() {
                state.stepping = true;
                return work;
            }
            state = state.wait(&self.changed);
        }
    }

    /// A step is over: what is left of its work comes again, if nobody asked for other work meanwhile.
    fn done(&self, left: Option<Asked>) {
        let mut state = self.state();
        state.stepping = false;
        if state.asked.is_none() && state.stops == 0 {
            state.asked = left;
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// A step of the thread.
enum Work {
    Make(Asked),
    /// Gives back what an allocation created beyond the soft cap.
    Repay(Vec<Release>),
}

/// What a step came to.
enum Outcome {
    /// There is more to do of it.
    More(Asked),
    Done,
    Failed,
}

/// Says that the thread is gone, whatever ended it.
struct Gone<'a>(&'a Shared);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        (state.alive, state.stepping) = (false, false);
        state.asked = None;
        drop(state);
        self.0.changed.notify_all();
    }
}

/// What the thread does: it ends when it is stopped, with its engine, and where calls make no sense any more.
fn run(shared: &Shared, engine: &Weak<Engine>) {
    let _gone = Gone(shared);
    while let Some(work) = shared.next() {
        let Some(engine) = engine.upgrade() else {
            return;
        };
        if engine.usable().is_err() {
            return engine.leave_undone(work);
        }
        let left = match engine.step_ahead(work) {
            Outcome::More(asked) => Some(asked),
            Outcome::Done => None,
            Outcome::Failed => {
                shared.state().passed_over = PASSED_OVER;
                None
            }
        };
        let lost = engine.is_past_use();
        // It may be the last one that holds it.
        drop(engine);
        if lost {
            return;
        }
        shared.done(left);
    }
}

impl Ahead {
    /// Wakes the thread, or starts one. What is to be repaid and nobody repays.
    fn wake(&self, mut state: Locked<'_, State>, engine: &Weak<Engine>) -> Vec<Release> {
        let start = !std::mem::replace(&mut state.alive, true);
        drop(state);
        if !start {
            self.shared.changed.notify_all();
            return Vec::new();
        }
        // Held until the thread can be waited for.
        let mut thread = locked(&self.thread);
        let (shared, engine) = (Arc::clone(&self.shared), engine.clone());
        let spawned = std::thread::Builder::new()
            .name("cualloc-ahead".into())
            .spawn(move || run(&shared, &engine));
        match spawned {
            Ok(handle) => {
                *thread = Some(handle);
                Vec::new()
            }
            Err(error) => {
                drop(thread);
                let left = {
                    let mut state = self.shared.state();
                    state.passed_over = PASSED_OVER;
                    std::mem::take(&mut state.repay)
                };
                drop(Gone(&self.shared));
                log::debug!("there is no thread to make memory ahead: {error}");
                left
            }
        }
    }

    /// Nothing is asked for any more, and the thread has ended; none begins before this is undone. What was to be
    /// repaid and was not.
    fn stop(&self) -> Vec<Release> {
        let mut state = self.shared.state();
        state.stops += 1;
        state.asked = None;
        let left = std::mem::take(&mut state.repay);
        self.shared.changed.notify_all();
        while state.alive {
            state = state.wait(&self.shared.changed);
        }
        drop(state);
        let thread = locked(&self.thread).take();
        // It may have panicked: nothing of what it works on is left half done then.
        let _ended = thread.map(JoinHandle::join);
        left
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let thread = match self.thread.get_mut() {
            Ok(thread) => thread.take(),
            Err(poisoned) => poisoned.into_inner().take(),
        };
        if process::is_forked_child() {
            // It does not exist here, and may have held the lock.
            return std::mem::forget(thread);
        }
        // The last engine may go on the thread itself, so nobody waits for it.
        self.shared.state().stops += 1;
        self.shared.changed.notify_all();
    }
}

/// Keeps the thread from working while it lives.
pub(crate) struct Stopped<'a>(&'a Ahead);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.shared.state().stops -= 1;
    }
}

impl Engine {
    /// Memory was made for a large request: more may be made before the next one needs it.
    pub(crate) fn grow_ahead(&self, want: &Want, fresh: &Fresh) {
        let Some(ahead) = &self.ahead else {
            return;
        };
        if want.space != SpaceId::Large || want.in_one_handle() {
            return;
        }
        let mut state = ahead.shared.state();
        let bytes = state.growths.count(fresh.bytes());
        if state.passed_over > 0 || state.stops > 0 || process::is_watching() {
            state.passed_over = state.passed_over.saturating_sub(1);
            return;
        }
        state.asked = Some(Asked {
            want: *want,
            end: fresh.addr + fresh.bytes(),
            bytes,
            leased: false,
        });
        let left = ahead.wake(state, &self.me);
        self.leave_undone(Work::Repay(left));
    }

    /// Leaves it to the thread to give back what was claimed for that; what it does not.
    pub(crate) fn repay_later(&self, plan: Vec<Release>) -> Vec<Release> {
        let Some(ahead) = self.ahead.as_ref().filter(|_| !plan.is_empty()) else {
            return plan;
        };
        let bytes = bytes_of(&plan);
        self.lock().ahead.under_way += bytes;
        let mut state = ahead.shared.state();
        let busy = !state.repay.is_empty() || state.passed_over > 0 || state.stops > 0;
        let left = if busy || process::is_watching() {
            drop(state);
            plan
        } else {
            state.repay = plan;
            ahead.wake(state, &self.me)
        };
        if !left.is_empty() {
            self.lock().ahead.under_way -= bytes;
        }
        left
    }

    /// Nobody does it now: what was claimed is free memory again.
    fn leave_undone(&self, work: Work) {
        let Work::Repay(plan) = work else {
            return;
        };
        if plan.is_empty() {
            return;
        }
        let mut heap = self.lock();
        heap.ahead.under_way -= bytes_of(&plan);
        plan.into_iter().for_each(|release| heap.keep(release));
    }

    /// Has the thread end, and waits for the step that it is in; none begins while the result lives.
    pub(crate) fn stop_ahead(&self) -> Option<Stopped<'_>> {
        let ahead = self.ahead.as_ref()?;
        if process::is_gone() {
            return None;
        }
        let left = ahead.stop();
        self.leave_undone(Work::Repay(left));
        Some(Stopped(ahead))
    }

    /// Waits until nothing is left to be done ahead.
    pub(crate) fn await_ahead(&self) {
        let Some(ahead) = &self.ahead else {
            return;
        };
        if process::is_gone() {
            return;
        }
        let mut state = ahead.shared.state();
        while state.alive && !state.is_idle() {
            state = state.wait(&ahead.shared.changed);
        }
    }

    /// One step. No call of the driver is made while a capture is known.
    fn step_ahead(&self, work: Work) -> Outcome {
        if process::is_watching() {
            self.leave_undone(work);
            return Outcome::Done;
        }
        match work {
            Work::Make(asked) => self.make_ahead(asked),
            Work::Repay(plan) => {
                self.repay_ahead(plan);
                Outcome::Done
            }
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
        match error {
            Error::ContextLost(error) => {
                log::warn!("allocator {}: nothing more is made ahead: {error}", self.id);
            }
            error => log::debug!("allocator {}: nothing was made ahead: {error}", self.id),
        }
        Outcome::Failed
    }

    fn repay_ahead(&self, plan: Vec<Release>) {
        let bytes = bytes_of(&plan);
        self.repay_all(plan);
        let mut heap = self.lock();
        heap.ahead.had_lock = true;
        heap.ahead.under_way -= bytes;
    }
}

fn bytes_of(plan: &[Release]) -> u64 {
    plan.iter().map(|release| release.bytes).sum()
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests;
