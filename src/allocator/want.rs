//! What a request asks of an arena, and what is left to do of it.

use std::sync::Arc;

use crate::driver::Event;

use super::records::SpaceId;
use super::size::{GRANULE, PAGE};
use super::slot::StreamKey;

/// Granules of a page.
pub(crate) const PAGE_GRANULES: u32 = (PAGE / GRANULE) as u32;

/// What a caller asks of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub space: SpaceId,
    pub stream: u32,
    pub granules: u32,
    /// Alignment in granules.
    pub align: u32,
    /// Bytes as the user asked for.
    pub requested: u64,
    /// The block lies inside one physical handle.
    pub single: bool,
    /// The block may lie in a view.
    pub views: bool,
}

impl Want {
    /// Granules of a run in which the request surely fits, whatever the run's address.
    pub(crate) fn span(&self) -> u32 {
        self.granules + self.align - 1
    }

    /// Granules between the start of a run and the first aligned address in it.
    pub(crate) fn skip(&self, addr: u64) -> u32 {
        let align = u64::from(self.align) * GRANULE;
        ((addr.next_multiple_of(align) - addr) / GRANULE) as u32
    }
}

/// A wait that has to be queued before a taken block may be used.
#[derive(Debug)]
pub(crate) struct PendingWait {
    pub stream: u32,
    pub bound: u64,
    pub event: Arc<Event>,
    pub row: Arc<[u64]>,
}

/// What a free left to do outside the lock.
#[derive(Debug, Default)]
pub(crate) struct AfterFree {
    /// Streams whose batch is full: mostly none or one.
    pub(crate) full: Option<(u32, StreamKey)>,
    pub(crate) more: Vec<(u32, StreamKey)>,
}

impl AfterFree {
    /// A stream is to be marked.
    pub(crate) fn mark(&mut self, stream: u32, key: StreamKey) {
        match self.full {
            None => self.full = Some((stream, key)),
            Some(_) => self.more.push((stream, key)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.full.is_none()
    }

    /// The streams to be marked.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (u32, StreamKey)> + '_ {
        self.full.iter().chain(&self.more).copied()
    }
}
