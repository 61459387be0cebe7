//! Batches: the frees under the open ticket of a stream, until a marker covers them.

use std::sync::Arc;

use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{BATCH_FREES, Batch, EAGER_BATCHES, StreamKey};
use crate::driver::process;

/// A stream with more incomplete markers has a backlog: a nearly idle one completes its last few within microseconds.
const FEW_MARKERS: usize = 8;

impl Streams {
    /// Closes the open batch of a stream: later frees get a later ticket, so a marker recorded after this covers
    /// everything up to the bound. `StreamCaches::close_batch` also updates the caches.
    pub(crate) fn close_batch(&mut self, stream: u32) -> Batch {
        let slot = &mut self.slots[stream as usize];
        let bound = slot.open;
        slot.open += 1;
        let uses = std::mem::take(&mut slot.open_uses);
        let bytes = std::mem::take(&mut slot.open_bytes);
        slot.eager_batches = slot.eager_batches.saturating_sub(1);
        if slot.listed {
            self.unlist(stream);
        }
        let slot = &self.slots[stream as usize];
        Batch {
            stream,
            bound,
            row: Arc::clone(&slot.row),
            uses,
            bytes,
        }
    }

    /// Counts a use under the open ticket of a stream. Returns whether the batch should get its marker now.
    #[inline]
    pub(crate) fn count_use(&mut self, stream: u32, bytes: u64) -> bool {
        self.note_call(stream);
        let slot = &mut self.slots[stream as usize];
        slot.open_uses = slot.open_uses.saturating_add(1);
        slot.open_bytes += bytes;
        if !self.several() || !self.is_full(stream) {
            return false;
        }
        let slot = &self.slots[stream as usize];
        let waits = slot.eager_batches == 0 && slot.holder.is_lasting();
        // If streams may be capturing, the owner's free records the marker, not a later query of another stream.
        if waits && !self.eager_markers && process::is_unwatched() {
            self.list(stream);
            return false;
        }
        true
    }

    /// Lists a closed batch again whose marker was not recorded.
    pub(crate) fn relist_batch(&mut self, stream: u32) {
        let slot = &mut self.slots[stream as usize];
        slot.open_uses = slot.open_uses.max(BATCH_FREES);
        self.list_full(stream);
    }

    /// Records that a marker of the stream was incomplete when queried.
    pub(crate) fn note_backlog(&mut self, stream: u32) {
        let slot = &mut self.slots[stream as usize];
        if slot.markers.len() > FEW_MARKERS {
            slot.eager_batches = EAGER_BATCHES;
        }
    }

    /// Whether the open batch of a stream should get its marker. Bytes without a marker cost the other streams memory
    /// rather than time, so on a stream that can be marked at any time they may be a share of the memory. On a stream
    /// with a backlog they may be twice that, because a marker would complete only after all earlier ones: a pipeline
    /// over three streams then records a tenth to a third fewer markers. With four times the share, sharded training
    /// holds 1.072 of what it requests instead of 1.061.
    fn is_full(&self, stream: u32) -> bool {
        let slot = &self.slots[stream as usize];
        let share = slot.open_bytes.saturating_mul(self.active() as u64);
        let may_wait = slot.holder.is_lasting() && slot.open_uses < BATCH_FREES;
        let backlog = u32::from(slot.markers.len() > FEW_MARKERS);
        slot.is_full() && !(may_wait && share >> backlog < self.unmarked_bytes)
    }

    /// Lists the open batch of a stream if it should get its marker.
    pub(crate) fn list_full(&mut self, stream: u32) {
        if self.is_full(stream) {
            self.list(stream);
        }
    }

    /// Lists every batch that is large enough for a marker, although the share of [`unmarked_bytes`] is not used up.
    ///
    /// [`unmarked_bytes`]: Self::unmarked_bytes
    pub(crate) fn list_unmarked(&mut self) {
        for stream in self.slots() {
            if self.slots[stream as usize].is_full() {
                self.list(stream);
            }
        }
    }

    fn list(&mut self, stream: u32) {
        let slot = &mut self.slots[stream as usize];
        let kept = slot.in_use && slot.holder.is_lasting() && !slot.is_unusable();
        if kept && !slot.listed {
            slot.listed = true;
            self.full.push(stream);
        }
    }

    pub(super) fn unlist(&mut self, stream: u32) {
        self.slots[stream as usize].listed = false;
        self.full.retain(|listed| *listed != stream);
    }

    /// Lists the full batches that needed no marker while there was only one stream.
    pub(super) fn list_deferred_batches(&mut self) {
        if self.active() == 2 {
            for stream in self.slots() {
                self.list_full(stream);
            }
        }
    }

    /// Returns the full batches without a marker, of the wanted streams.
    pub(crate) fn full_batches(&self, wanted: impl Fn(u32) -> bool) -> Vec<(u32, StreamKey)> {
        let full = self.full.iter().copied();
        full.filter(|stream| wanted(*stream))
            .map(|stream| (stream, self[stream].key))
            .collect()
    }
}
