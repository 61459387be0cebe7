//! Stream caches that have no stream.

use std::sync::atomic::Ordering;

use super::StreamCache;
use crate::driver::process;
use crate::locks::held::Mutex;

/// The pool of stream caches that wait for a stream.
#[derive(Debug)]
pub(crate) struct StreamCachePool {
    waiting: Mutex<Vec<&'static StreamCache>>,
    made: std::sync::atomic::AtomicU32,
}

impl StreamCachePool {
    pub(crate) const fn new() -> Self {
        StreamCachePool {
            waiting: Mutex::new(Vec::new()),
            made: std::sync::atomic::AtomicU32::new(0),
        }
    }

    /// Takes a stream cache without a stream.
    pub(crate) fn take(&self) -> &'static StreamCache {
        let waiting = self.waiting.lock().pop();
        waiting.unwrap_or_else(|| {
            let rank = self.made.fetch_add(1, Ordering::Relaxed);
            let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(rank)));
            process::follow(&cache.lock.beside);
            cache
        })
    }

    /// Drops the rings of a finished recording.
    pub(crate) fn clear_taps(&self) {
        let waiting = self.waiting.lock();
        for cache in waiting.iter() {
            cache.lock().event_writer.clear();
        }
    }

    /// Takes back a stream cache after its stream: it has no pages and no live blocks.
    pub(crate) fn give_back(&self, cache: &'static StreamCache) {
        let former = {
            let mut inner = cache.lock();
            let mut former = std::mem::take(&mut *inner);
            inner.event_writer = std::mem::take(&mut former.event_writer);
            former
        };
        self.waiting.lock().push(cache);
        // This may be the last reference to an allocator, so it is dropped outside the locks.
        drop(former);
    }
}
