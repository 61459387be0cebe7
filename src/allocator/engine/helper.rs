//! The thread of an allocator that works ahead of requests: when it begins, what it is asked for, and how it ends.
//!
//! It works in steps of a few handles, and holds the engine in a step alone. Who needs it out of the way, such as a
//! close, stops it and waits for the step under way; whoever asks for something next starts it again. What a step logs is
//! told after it, and nobody waits for the logger: it may itself wait for whoever stops the thread.

use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{JoinHandle, ThreadId, current};

use crate::driver::process;
use crate::driver::steps::Said;
use crate::locks::held::{Locked, locked};

use crate::allocator::physical::Release;
use crate::allocator::physical::ahead::{Asked, Grown, Growths};

/// After a failure so many growths are not followed: the driver may have nothing left.
const PASSED_OVER: u32 = 64;

/// A step of the thread.
pub(crate) enum Work {
    /// Makes memory before it is needed.
    Make(Asked),
    /// Gives back what was claimed for that.
    Repay(Vec<Release>),
}

/// What a step came to.
pub(crate) enum Outcome {
    /// There is more to do of it.
    More(Asked),
    Done,
    Failed,
}

/// Whom the thread works for.
pub(crate) trait Employer: Send + Sync + 'static {
    /// Whether calls make sense at all.
    fn is_usable(&self) -> bool;
    fn step(&self, work: Work) -> Outcome;
    /// Nobody does it.
    fn leave_undone(&self, work: Work);
}

/// The thread of one allocator, and what it is asked for.
#[derive(Debug, Default)]
pub(crate) struct Helper {
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
    /// It tells the logger what it did.
    telling: bool,
    /// It was stopped by somebody who did not wait for that, and takes up nothing more.
    ending: bool,
    /// Which it is: what it calls may come back here.
    thread: Option<ThreadId>,
    /// So many wait for its end, or do what it must not disturb.
    stops: u32,
}

impl State {
    fn is_idle(&self) -> bool {
        self.asked.is_none() && self.repay.is_empty() && !self.stepping && !self.telling
    }

    /// Whether somebody else waits for it to end, or to have nothing to do.
    fn is_other(&self) -> bool {
        self.alive && self.thread != Some(current().id())
    }

    /// Whether nothing is begun now. Nothing is while a capture is known.
    fn rests(&self) -> bool {
        self.passed_over > 0 || self.is_stopped() || process::is_watching()
    }

    /// Whether the thread is to end, or not to begin.
    fn is_stopped(&self) -> bool {
        self.stops > 0 || self.ending
    }

    /// There is no thread any more: who asks for something starts another one.
    fn ended(&mut self) {
        (self.alive, self.stepping, self.telling) = (false, false, false);
        (self.asked, self.thread, self.ending) = (None, None, false);
    }
}

impl Shared {
    fn state(&self) -> Locked<'_, State> {
        locked(&self.state)
    }

    /// Waits for something to do; none if it is to end, which it has done then: nobody leaves it anything more.
    fn next(&self) -> Option<Work> {
        let mut state = self.state();
        loop {
            if state.is_stopped() {
                state.ended();
                drop(state);
                self.changed.notify_all();
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

    /// A step is over: what is left of its work comes again, if nobody asked for other work meanwhile. Nobody waits for
    /// what it still has to tell.
    fn done(&self, outcome: Outcome, said: Said) {
        let mut state = self.state();
        (state.stepping, state.telling) = (false, !said.is_empty());
        match outcome {
            Outcome::More(left) if state.asked.is_none() && !state.is_stopped() => {
                state.asked = Some(left);
            }
            Outcome::More(_) | Outcome::Done => {}
            Outcome::Failed => {
                state.passed_over = PASSED_OVER;
                state.asked = None;
            }
        }
        drop(state);
        self.changed.notify_all();
        if !said.is_empty() {
            said.tell();
            self.state().telling = false;
            self.changed.notify_all();
        }
    }
}

/// Says that the thread is gone, whatever else ended it.
struct Gone<'a>(&'a Shared);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.state().ended();
        self.0.changed.notify_all();
    }
}

/// What the thread does: it ends when it is stopped, with its engine, and where calls make no sense any more.
fn run<E: Employer>(shared: &Shared, employer: &Weak<E>) {
    let gone = Gone(shared);
    shared.state().thread = Some(current().id());
    while let Some(work) = shared.next() {
        let Some(employer) = employer.upgrade() else {
            return;
        };
        let Some(step) = process::begin_step().filter(|_| employer.is_usable()) else {
            return employer.leave_undone(work);
        };
        let outcome = employer.step(work);
        let usable = employer.is_usable();
        // It may be the last one that holds it.
        drop(employer);
        shared.done(outcome, step.end());
        if !usable {
            return;
        }
    }
    // There may be another one already.
    std::mem::forget(gone);
}

impl Helper {
    /// Memory was made for a request: as much is to be free behind it. What was to be repaid, and nobody does it.
    pub(crate) fn ask<E: Employer>(&self, employer: &Weak<E>, grown: &Grown) -> Vec<Release> {
        let mut state = self.shared.state();
        let bytes = state.growths.count(grown.bytes);
        if state.rests() {
            state.passed_over = state.passed_over.saturating_sub(1);
            return Vec::new();
        }
        state.asked = Some(Asked {
            want: grown.want,
            end: grown.end,
            bytes,
            leased: false,
        });
        self.wake(state, employer)
    }

    /// Has claimed memory given back; what is left to the caller.
    pub(crate) fn repay<E: Employer>(
        &self,
        employer: &Weak<E>,
        plan: Vec<Release>,
    ) -> Vec<Release> {
        let mut state = self.shared.state();
        if state.rests() || !state.repay.is_empty() {
            return plan;
        }
        state.repay = plan;
        self.wake(state, employer)
    }

    /// Wakes the thread, or starts one. What is to be repaid and nobody does it.
    fn wake<E: Employer>(&self, mut state: Locked<'_, State>, employer: &Weak<E>) -> Vec<Release> {
        let start = !std::mem::replace(&mut state.alive, true);
        drop(state);
        if !start {
            self.shared.changed.notify_all();
            return Vec::new();
        }
        // Held until the thread can be waited for.
        let mut thread = locked(&self.thread);
        let (shared, employer) = (Arc::clone(&self.shared), employer.clone());
        let spawned = std::thread::Builder::new()
            .name("cualloc-ahead".into())
            .spawn(move || run(&shared, &employer));
        match spawned {
            Ok(handle) => {
                *thread = Some(handle);
                Vec::new()
            }
            Err(error) => {
                drop(thread);
                let left = {
                    let mut state = self.shared.state();
                    state.ended();
                    state.passed_over = PASSED_OVER;
                    std::mem::take(&mut state.repay)
                };
                self.shared.changed.notify_all();
                log::debug!("there is no thread to make memory ahead: {error}");
                left
            }
        }
    }

    /// Has the thread end, and waits for the step that it is in; none begins while the result lives. On the thread
    /// itself nothing is waited for, nor for its logger: it ends when it comes back. Also what was to be repaid and was
    /// not.
    pub(crate) fn stop(&self) -> (Stopped<'_>, Vec<Release>) {
        let mut state = self.shared.state();
        state.stops += 1;
        state.asked = None;
        let left = std::mem::take(&mut state.repay);
        self.shared.changed.notify_all();
        while state.is_other() && !state.telling {
            state = state.wait(&self.shared.changed);
        }
        state.ending = state.alive;
        (Stopped(self), left)
    }

    /// Waits until nothing is left to do.
    pub(crate) fn await_idle(&self) {
        let mut state = self.shared.state();
        while state.is_other() && !state.is_idle() {
            state = state.wait(&self.shared.changed);
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let thread = match self.thread.get_mut() {
            Ok(thread) => thread.take(),
            Err(poisoned) => poisoned.into_inner().take(),
        };
        if process::is_gone() {
            // It does not exist in a child, nor at the end of some processes, and may have held the lock.
            return std::mem::forget(thread);
        }
        // The last engine may go on the thread itself, so nobody waits for it.
        self.shared.state().stops += 1;
        self.shared.changed.notify_all();
    }
}

/// Keeps the thread from working while it lives.
pub(crate) struct Stopped<'a>(&'a Helper);

impl Stopped<'_> {
    /// Waits until nothing of the thread is left, unless it still has to tell something, or is the calling one.
    pub(crate) fn join(&self) {
        // None starts meanwhile.
        if self.0.shared.state().alive {
            return;
        }
        let thread = locked(&self.0.thread).take();
        // Of a panic it has told itself.
        let _ended = thread.map(JoinHandle::join);
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.shared.state().stops -= 1;
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests;
