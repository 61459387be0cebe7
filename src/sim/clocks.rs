//! Vector clocks: the operations that are known to have happened before.

/// For each queue, the newest operation that is known to come before.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    /// The newest operation of `queue` that comes before; 0 if none does.
    pub(super) fn get(&self, queue: u32) -> u64 {
        self.0.get(queue as usize).copied().unwrap_or(0)
    }

    /// Whether the operation `seq` of `queue` comes before.
    pub(super) fn covers(&self, queue: u32, seq: u64) -> bool {
        self.get(queue) >= seq
    }

    /// Whether all operations of `other` come before.
    pub(super) fn includes(&self, other: &Clock) -> bool {
        (0u32..)
            .zip(&other.0)
            .all(|(queue, seq)| self.covers(queue, *seq))
    }

    /// Adds the operation `seq` of `queue`, and so all earlier ones of that queue.
    pub(super) fn raise(&mut self, queue: u32, seq: u64) {
        let index = queue as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] = self.0[index].max(seq);
    }

    /// Adds all operations of `other`; returns whether any was new.
    pub(super) fn merge(&mut self, other: &Clock) -> bool {
        let mut news = false;
        for (index, &seq) in other.0.iter().enumerate() {
            if self.get(index as u32) < seq {
                self.raise(index as u32, seq);
                news = true;
            }
        }
        news
    }

    /// Keeps the operations that are in both.
    pub(super) fn intersect(&mut self, other: &Clock) {
        for (index, seq) in self.0.iter_mut().enumerate() {
            *seq = (*seq).min(other.get(index as u32));
        }
    }
}
