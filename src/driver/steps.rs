//! Steps of work that a thread of the library does aside of all calls of the program: others wait for the end of one, and
//! so does the end of the process. What is logged in a step is kept until it is over, as nobody can tell what a logger
//! waits for.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use log::Level;

/// The end of the process waits no longer than this: the thread may have been ended in its step, as a library's are on
/// Windows, or the driver may never come back.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// It looks again after so long.
const PAUSE: Duration = Duration::from_micros(50);

thread_local! {
    /// Whether the thread is in a step. Without a destructor: it is read while the process ends.
    static HERE: Cell<bool> = const { Cell::new(false) };
    /// What was logged in it, if anything was. No vector, since one is not all zeros when it is empty, and would have a
    /// part of its own among the library's variables for threads: those are to be few bytes.
    static SAID: Cell<Option<Box<Said>>> = const { Cell::new(None) };
}

/// A line of the log.
#[derive(Debug)]
struct Line {
    level: Level,
    target: &'static str,
    text: String,
}

/// Steps under way.
#[derive(Debug)]
pub(super) struct Steps(AtomicUsize);

impl Steps {
    pub(super) const fn new() -> Steps {
        Steps(AtomicUsize::new(0))
    }

    /// Begins a step of the calling thread; none once there is an end to them.
    pub(super) fn begin(&'static self, ended: impl FnOnce() -> bool) -> Option<Step> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let step = Step(self);
        // Either this one is seen by who ended the steps and waits for them, or their end is seen here.
        fence(Ordering::SeqCst);
        if ended() {
            return None;
        }
        HERE.set(true);
        Some(step)
    }

    /// Waits until no step is under way, but for one of the calling thread, after their end was told. Whether that came.
    pub(super) fn await_end(&self, patience: Duration) -> bool {
        fence(Ordering::SeqCst);
        let begun = Instant::now();
        while self.0.load(Ordering::SeqCst) > usize::from(HERE.get()) {
            if begun.elapsed() >= patience {
                return false;
            }
            thread::sleep(PAUSE);
        }
        true
    }
}

/// A step under way.
#[derive(Debug)]
#[must_use]
pub(crate) struct Step(&'static Steps);

impl Step {
    /// It is over: what was logged in it, and is still to be told.
    pub(crate) fn end(self) -> Said {
        drop(self);
        SAID.take().map_or_else(Said::default, |said| *said)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        HERE.set(false);
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What was logged in a step.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Said(Vec<Line>);

impl Said {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells the logger.
    pub(crate) fn tell(self) {
        for Line {
            level,
            target,
            text,
        } in self.0
        {
            log::log!(target: target, level, "{text}");
        }
    }
}

/// Logs a line, after the step if the thread is in one.
pub(crate) fn say(level: Level, target: &'static str, what: fmt::Arguments<'_>) {
    if !HERE.get() {
        return log::log!(target: target, level, "{what}");
    }
    // Whether the logger wants it is asked when it is told.
    if level <= log::max_level() {
        let text = what.to_string();
        let mut said = SAID.take().unwrap_or_default();
        said.0.push(Line {
            level,
            target,
            text,
        });
        SAID.set(Some(said));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn no_step_begins_after_their_end() {
        static STEPS: Steps = Steps::new();
        assert!(STEPS.begin(|| true).is_none());
        assert!(!HERE.get());
        assert!(STEPS.await_end(Duration::ZERO));
    }

    #[test]
    fn the_end_waits_for_steps_of_others_and_not_for_its_own() {
        static STEPS: Steps = Steps::new();
        static OVER: AtomicBool = AtomicBool::new(false);
        let (begun, is_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let other = thread::spawn(move || {
            let step = STEPS.begin(|| false);
            begun.send(step.is_some()).ok();
            may_go_on.recv().ok();
            OVER.store(true, Ordering::SeqCst);
            drop(step);
        });
        assert_eq!(is_begun.recv(), Ok(true));
        assert!(!STEPS.await_end(Duration::ZERO), "another one is under way");
        go_on.send(()).ok();
        assert!(STEPS.await_end(Duration::MAX));
        assert!(OVER.load(Ordering::SeqCst));
        assert!(other.join().is_ok());
        let own = STEPS.begin(|| false);
        assert!(own.is_some() && STEPS.await_end(Duration::ZERO));
        drop(own);
        assert_eq!(STEPS.0.load(Ordering::SeqCst), 0);
    }

    /// A step that is broken off by a panic is over, too.
    #[test]
    fn a_panic_ends_a_step() {
        static STEPS: Steps = Steps::new();
        let ended = thread::spawn(|| {
            let _step = STEPS.begin(|| false);
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(ended.join().is_err());
        assert!(STEPS.await_end(Duration::ZERO));
    }
}
