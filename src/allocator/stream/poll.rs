//! Finding out how many markers of each stream are complete, with few questions.

use std::sync::Arc;

use crate::driver::Event;

use crate::allocator::stream::slot::Slot;

/// Markers to look at, as many times those that were complete the last time.
const LOOK_AHEAD: usize = 4;

/// What asking a marker said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Complete,
    Late,
    /// It stands for nothing: its event fell into a capture.
    Void,
}

/// One stream's markers. They complete in order, so not every one has to be asked.
#[derive(Debug)]
struct Probe {
    stream: u32,
    /// Where its markers begin in the list of all.
    first: usize,
    /// How many markers it has there.
    count: usize,
    /// How many of them are complete.
    done: usize,
    /// The first, counted from 0, that is known not to be complete, or that does not exist.
    late: usize,
    /// How many to go ahead.
    stride: usize,
    /// The stream has more markers than are looked at.
    more: bool,
    /// The bound of the newest one known to be complete.
    newest: Option<u64>,
    /// One of them stands for nothing, and what comes after it was not asked.
    void: bool,
}

/// What asking a stream came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub stream: u32,
    /// The bound of the newest marker that is complete.
    pub newest: Option<u64>,
    /// How many markers are complete.
    pub count: usize,
    /// Whether one is not.
    pub late: bool,
}

impl Probe {
    /// The marker to ask next; `None` once it is known how many are complete.
    ///
    /// As far ahead as went well the last time, farther while that goes well, then by halves.
    fn next(&self) -> Option<usize> {
        let left = self.late - self.done;
        if left == 0 {
            return None;
        }
        let ahead = if self.late == self.count {
            self.stride.min(left)
        } else {
            left.div_ceil(2).min(self.stride)
        };
        Some(self.done + ahead - 1)
    }

    /// What the marker said.
    fn answer(&mut self, at: usize, bound: u64, answer: Answer) {
        match answer {
            Answer::Complete => {
                self.stride = 2 * (at + 1 - self.done);
                self.done = at + 1;
                self.newest = Some(bound);
            }
            Answer::Late => {
                self.late = at;
                self.void = false;
            }
            Answer::Void => {
                self.late = at;
                self.void = true;
            }
        }
    }
}

/// A round of questions. Its memory is used again.
#[derive(Debug, Default)]
pub(crate) struct Poll {
    probes: Vec<Probe>,
    /// Bound and event of each marker that may be asked.
    markers: Vec<(u64, Arc<Event>)>,
    /// Stream and bound of each marker that stands for nothing.
    void: Vec<(u32, u64)>,
}

impl Poll {
    pub(crate) fn is_empty(&self) -> bool {
        self.probes.is_empty()
    }

    /// Adds the oldest markers of a stream.
    pub(crate) fn add(&mut self, stream: u32, slot: &Slot) {
        let stride = slot.stride.max(1) as usize;
        let count = slot.markers.len().min(LOOK_AHEAD * stride);
        self.probes.push(Probe {
            stream,
            first: self.markers.len(),
            count,
            done: 0,
            late: count,
            stride,
            more: count < slot.markers.len(),
            newest: None,
            void: false,
        });
        let looked_at = slot.markers.iter().take(count);
        self.markers
            .extend(looked_at.map(|m| (m.bound, Arc::clone(&m.event))));
    }

    /// Asks until it is known how many are complete, or a question fails.
    pub(crate) fn ask<E>(
        &mut self,
        mut question: impl FnMut(&Event) -> Result<Answer, E>,
    ) -> Result<(), E> {
        for probe in &mut self.probes {
            while let Some(at) = probe.next() {
                let Some((bound, event)) = self.markers.get(probe.first + at) else {
                    break;
                };
                let answer = question(event)?;
                if answer == Answer::Void {
                    self.void.push((probe.stream, *bound));
                }
                probe.answer(at, *bound, answer);
            }
        }
        Ok(())
    }

    /// Lets go of the events: they go back to their pool only from the heap's own hand.
    pub(crate) fn let_go(&mut self) {
        self.markers.clear();
    }

    /// Whether all of a stream that were looked at are complete, and there are more.
    pub(crate) fn goes_on(&self) -> bool {
        self.probes.iter().any(|p| p.more && p.done == p.count)
    }

    pub(crate) fn outcomes(&self) -> impl Iterator<Item = Outcome> + '_ {
        self.probes.iter().map(|p| Outcome {
            stream: p.stream,
            newest: p.newest,
            count: p.done,
            late: p.late < p.count && !p.void,
        })
    }

    /// Stream and bound of each marker that was found to stand for nothing.
    pub(crate) fn take_void(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.void)
    }

    /// Forgets the round, but keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.probes.clear();
        self.markers.clear();
    }
}
