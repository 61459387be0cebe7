//! Stream caches that have no stream.

use std::sync::atomic::Ordering;

use super::StreamCache;
use crate::driver::process;
use crate::locks::held::Mutex;

/// Stream caches that wait for a stream.
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

    /// A stream cache without a stream.
    pub(crate) fn take(&self) -> &'static StreamCache {
        let waiting = self.waiting.lock().pop();
        waiting.unwrap_or_else(|| {
            let rank = self.made.fetch_add(1, Ordering::Relaxed);
            let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(rank)));
            process::follow(&cache.lock.beside);
            cache
        })
    }

    /// Lets go of the rings of a recording that is over.
    pub(crate) fn clear_taps(&self) {
        let waiting = self.waiting.lock();
        for cache in waiting.iter() {
            cache.lock().tap.clear();
        }
    }

    /// Takes back a stream cache whose stream is gone: it has no pages, and nothing live.
    pub(crate) fn give_back(&self, cache: &'static StreamCache) {
        let former = {
            let mut inner = cache.lock();
            let mut former = std::mem::take(&mut *inner);
            inner.tap = std::mem::take(&mut former.tap);
            former
        };
        self.waiting.lock().push(cache);
        // The last user of an allocator may go with it: outside the locks.
        drop(former);
    }
}
