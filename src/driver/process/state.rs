//! The process-wide state word, and the copies of it that hot paths read.
//!
//! A call that is served by the cache of its stream reads a copy in that cache: the copy lies on a cache line that the
//! call touches anyway, while the process-wide word would cost one more line, and its address another.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::locks::held::Mutex;

pub(super) const FORKED: u32 = 1;
pub(super) const EXITING: u32 = 2;
pub(super) const CAPTURES: u32 = 4;
pub(super) const RECORDS: u32 = 8;
pub(super) const TOOL: u32 = 16;
/// Together with [`RECORDS`]: stacks are recorded, too.
pub(super) const SAMPLES: u32 = 32;
/// Derived from the others: set if only [`RECORDS`] is set. It is the sign bit, so that one comparison with 0
/// distinguishes it from the other states.
const RECORDS_ALONE: u32 = 1 << 31;
/// The conditions that calls must check for.
pub(super) const LOOK_OUT: u32 = FORKED | EXITING | CAPTURES;
/// The bits of a recording.
pub(super) const RECORDING: u32 = RECORDS | SAMPLES;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Now(u32);

impl Now {
    /// See [`super::is_normal`].
    #[inline(always)]
    pub(crate) fn is_normal(self) -> bool {
        self.0 == 0
    }

    /// True while a recording is running and nothing else keeps calls from their caches.
    #[inline(always)]
    pub(crate) fn only_records(self) -> bool {
        !self.is_normal() && self.0 & (LOOK_OUT | TOOL) == 0
    }

    /// True while a recording without stacks is running and nothing else keeps calls from their caches.
    #[inline(always)]
    pub(crate) fn only_records_blocks(self) -> bool {
        (self.0 as i32) < 0
    }
}

/// The state word, or a copy of it.
#[derive(Debug, Default)]
pub(crate) struct State(AtomicU32);

/// The word and its copies.
///
/// Alone on its cache lines: it is read by many calls, and written when captures begin and end.
#[derive(Default)]
#[repr(align(128))]
struct FollowedState {
    state: State,
    /// Copies are never removed, so the list can be walked without a lock, which a forked child could not take.
    first: OnceLock<&'static Follower>,
    last: Mutex<Option<&'static Follower>>,
}

struct Follower {
    copy: &'static State,
    next: OnceLock<&'static Follower>,
}

static PROCESS: FollowedState = FollowedState {
    state: State(AtomicU32::new(0)),
    first: OnceLock::new(),
    last: Mutex::new(None),
};

impl State {
    /// Sets some bits and clears others atomically.
    fn change(&self, set: u32, clear: u32) {
        let changed = |old: u32| match (old | set) & !(clear | RECORDS_ALONE) {
            RECORDS => RECORDS | RECORDS_ALONE,
            new => new,
        };
        // The closure always returns a value.
        let _ = self
            .0
            .fetch_update(Ordering::SeqCst, Ordering::Relaxed, |old| {
                Some(changed(old))
            });
    }

    /// Returns the current state; a copy is valid once it [follows](follow) the word.
    #[inline(always)]
    pub(crate) fn now(&self) -> Now {
        Now(self.0.load(Ordering::Relaxed))
    }
}

impl FollowedState {
    fn change(&self, set: u32, clear: u32) {
        self.state.change(set, clear);
        // Either the new follower is seen here, or it sees the change.
        fence(Ordering::SeqCst);
        let mut at = self.first.get();
        while let Some(follower) = at {
            follower.copy.change(set, clear);
            at = follower.next.get();
        }
    }

    fn follow(&self, copy: &'static State) {
        self.follow_with(copy, || {});
    }

    /// [`follow`](Self::follow), calling `between` after each read of the word and before the write.
    fn follow_with(&self, copy: &'static State, mut between: impl FnMut()) {
        // In a forked child nothing else is checked any more, and a thread that does not exist there may hold the lock.
        if self.state.0.load(Ordering::Relaxed) & FORKED == 0 {
            let follower: &'static Follower = Box::leak(Box::new(Follower {
                copy,
                next: OnceLock::new(),
            }));
            let mut last = self.last.lock();
            let place = last.map_or(&self.first, |last| &last.next);
            // The empty place is at the end of the list.
            if place.set(follower).is_ok() {
                *last = Some(follower);
            }
        }
        fence(Ordering::SeqCst);
        // Changes are applied to the copy from now on. A change between the load and the store is overwritten by the
        // store, but then the word has changed, too, and the loop repeats.
        let word = &self.state.0;
        loop {
            let bits = word.load(Ordering::SeqCst);
            between();
            copy.0.store(bits, Ordering::SeqCst);
            if word.load(Ordering::SeqCst) == bits {
                return;
            }
        }
    }
}

#[inline(always)]
pub(super) fn now_bits() -> u32 {
    PROCESS.state.0.load(Ordering::Relaxed)
}

/// Sets some bits and clears others, also in all copies. Two threads must not change the same bit at the same time;
/// different bits may change concurrently.
pub(super) fn change(set: u32, clear: u32) {
    PROCESS.change(set, clear);
}

/// Makes a copy follow the word forever. On return it equals the word.
pub(crate) fn follow(copy: &'static State) {
    PROCESS.follow(copy);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_is_alone_while_there_is_nothing_else() {
        let state = State::default();
        let now = || state.now();
        let alone = || (now().only_records_blocks(), now().only_records());
        assert!(now().is_normal() && alone() == (false, false));
        state.change(RECORDS, 0);
        assert_eq!(alone(), (true, true));
        for other in [FORKED, EXITING, CAPTURES, TOOL] {
            state.change(other, 0);
            assert_eq!(alone(), (false, false), "{other}");
            assert!(now().0 & other != 0 && !now().is_normal());
            state.change(0, other);
            assert_eq!(alone(), (true, true), "{other}");
        }
        state.change(SAMPLES, 0);
        assert_eq!(alone(), (false, true));
        state.change(CAPTURES, 0);
        state.change(0, RECORDING);
        assert_eq!(now().0, CAPTURES);
        state.change(0, CAPTURES);
        assert!(now().is_normal());
    }

    fn leaked<T: Default>() -> &'static T {
        Box::leak(Box::default())
    }

    #[test]
    fn a_change_lost_with_the_copys_first_value_is_detected() {
        for changes in [
            [(CAPTURES, 0)].as_slice(),
            &[(RECORDS, 0), (CAPTURES, RECORDS)],
        ] {
            let process: &FollowedState = leaked();
            let copy: &State = leaked();
            process.change(TOOL, 0);
            let mut left = changes.iter();
            let mut reads = 0;
            process.follow_with(copy, || {
                reads += 1;
                if let Some((set, clear)) = left.next() {
                    // From here on changes reach the copy too; the value that `follow` stores overwrites them.
                    process.change(*set, *clear);
                    assert_eq!(copy.now().0 & set, *set);
                }
            });
            assert_eq!(copy.now().0, TOOL | CAPTURES);
            // One read more than there were changes: no read waits for a change that did not come.
            assert_eq!(reads, changes.len() + 1);
        }
    }

    #[test]
    fn copies_made_while_the_word_changes_follow_it() {
        let process: &'static FollowedState = leaked();
        let copies: Vec<&'static State> = std::thread::scope(|scope| {
            for bit in [CAPTURES, TOOL, RECORDS] {
                scope.spawn(move || {
                    for _ in 0..500 {
                        process.change(bit, 0);
                        process.change(0, bit);
                    }
                    process.change(bit, 0);
                });
            }
            let make = || {
                (0..200).map(|_| {
                    let copy = leaked();
                    process.follow(copy);
                    copy
                })
            };
            let others = scope.spawn(move || make().collect::<Vec<_>>());
            let mut copies: Vec<_> = make().collect();
            copies.extend(others.join().into_iter().flatten());
            copies
        });
        assert_eq!(copies.len(), 400);
        let all = CAPTURES | TOOL | RECORDS;
        assert!(copies.iter().all(|copy| copy.now().0 == all));
        process.change(0, all);
        assert!(copies.iter().all(|copy| copy.now().is_normal()));
    }
}
