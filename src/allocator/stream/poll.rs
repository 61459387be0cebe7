//! Polling: determines how many markers of each stream are complete, with few queries.

use std::sync::Arc;

use crate::driver::Event;

use crate::allocator::stream::slot::Slot;

/// Markers to examine, as a multiple of the number found complete last time.
const LOOK_AHEAD: usize = 4;

/// Result of querying a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Complete,
    Late,
    /// The marker is invalid: its event fell into a capture.
    Void,
}

/// The markers of one stream. They complete in order, so not every one has to be queried.
#[derive(Debug)]
struct Probe {
    stream: u32,
    /// Index of its first marker in the list of all.
    first: usize,
    /// Number of its markers in the list.
    count: usize,
    /// Number of markers known to be complete.
    done: usize,
    /// Index of the first marker that is known to be incomplete, or `count`.
    late: usize,
    /// Number of markers to advance.
    stride: usize,
    /// Whether the stream has more markers than are examined.
    more: bool,
    /// Bound of the newest marker known to be complete.
    newest: Option<u64>,
    /// Whether a marker is invalid, and the markers after it were not queried.
    void: bool,
}

/// Outcome of querying a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub stream: u32,
    /// Bound of the newest complete marker.
    pub newest: Option<u64>,
    /// Number of complete markers.
    pub count: usize,
    /// Whether a marker is incomplete.
    pub late: bool,
}

impl Probe {
    /// Returns the marker to query next; `None` once the number of complete markers is known.
    ///
    /// The search starts as far ahead as it got last time, doubles while markers are complete, and then bisects.
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

    /// Applies the result of a query.
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

/// A round of queries, whose memory is reused.
#[derive(Debug, Default)]
pub(crate) struct Poll {
    probes: Vec<Probe>,
    /// Bound and event of each marker that may be queried.
    markers: Vec<(u64, Arc<Event>)>,
    /// Stream and bound of each invalid marker.
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

    /// Queries markers until the number of complete ones is known, or a query fails.
    pub(crate) fn query<E>(
        &mut self,
        mut query: impl FnMut(&Event) -> Result<Answer, E>,
    ) -> Result<(), E> {
        for probe in &mut self.probes {
            while let Some(at) = probe.next() {
                let Some((bound, event)) = self.markers.get(probe.first + at) else {
                    break;
                };
                let answer = query(event)?;
                if answer == Answer::Void {
                    self.void.push((probe.stream, *bound));
                }
                probe.answer(at, *bound, answer);
            }
        }
        Ok(())
    }

    /// Drops the events, because only the heap's own references may return to their pool.
    pub(crate) fn drop_events(&mut self) {
        self.markers.clear();
    }

    /// Whether all examined markers of a stream are complete, and it has more.
    pub(crate) fn has_more(&self) -> bool {
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

    /// Returns the stream and bound of each invalid marker.
    pub(crate) fn take_void(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.void)
    }

    /// Clears the round, but keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.probes.clear();
        self.markers.clear();
    }
}
