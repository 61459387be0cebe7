//! Makes a failing random program small.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};

/// How long a failing program is shrunk.
const SHRINKING: Duration = Duration::from_secs(20);

/// Why a program failed, and at which step; the last is one beyond its end.
#[derive(Debug, Clone)]
pub struct Failure {
    pub step: usize,
    pub what: String,
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
    /// The last panic of this thread while it was quiet.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Turns a panic into an error and keeps it off the terminal: there are many attempts, and the last is reported by its text.
pub fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match QUIET.get() {
            true => PANIC.set(info.to_string()),
            false => usual(info),
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(before);
    result.unwrap_or_else(|_| Err(format!("panic: {}", PANIC.take())))
}

/// The text before the first number: a shorter program may fail in another way as well.
fn kind(what: &str) -> &str {
    what.split(|c: char| c.is_ascii_digit())
        .next()
        .unwrap_or("")
}

/// The smallest program found in some time that still fails like the first, and how. `simpler` are steps that may
/// replace one.
pub fn shrink<S: Clone>(
    steps: &[S],
    first: Failure,
    mut attempt: impl FnMut(&[S]) -> Result<(), Failure>,
    simpler: impl Fn(&S) -> Vec<S>,
) -> (Vec<S>, Failure) {
    let started = Instant::now();
    let wanted = kind(&first.what).to_owned();
    let mut fails = |steps: &[S]| {
        let in_time = started.elapsed() < SHRINKING;
        let failure = in_time.then(|| attempt(steps).err()).flatten()?;
        failure.what.starts_with(&wanted).then_some(failure)
    };
    let (mut best, mut last) = (steps.to_vec(), first);
    let end = (last.step + 1).min(best.len());
    match fails(&best[..end]) {
        Some(failure) => last = failure,
        None => return (best, last),
    }
    best.truncate(end);
    let mut chunk = best.len() / 2;
    while chunk > 0 {
        let mut at = 0;
        while at < best.len() {
            let mut shorter = best.clone();
            shorter.drain(at..(at + chunk).min(best.len()));
            match fails(&shorter) {
                Some(failure) => {
                    shorter.truncate(failure.step + 1);
                    (best, last) = (shorter, failure);
                }
                None => at += chunk,
            }
        }
        chunk /= 2;
    }
    for _ in 0..12 {
        let mut progress = false;
        for at in 0..best.len() {
            for step in simpler(&best[at]) {
                let mut trial = best.clone();
                trial[at] = step;
                if let Some(failure) = fails(&trial) {
                    (best, last, progress) = (trial, failure, true);
                    break;
                }
            }
        }
        if !progress {
            break;
        }
    }
    (best, last)
}
