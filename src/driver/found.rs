//! Streams that were found capturing.

use super::process;
use super::sys::CUstream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use crate::locks::held::locked;

/// The streams that were capturing when somebody last asked, through this crate. Nobody can say of a
/// stream of the caller's whether it still exists, so what was found stands until it is found otherwise.
#[derive(Default)]
pub(super) struct Found {
    any: AtomicBool,
    list: Mutex<Findings>,
}

#[derive(Default)]
struct Findings {
    last: u64,
    streams: Vec<Finding>,
}

struct Finding {
    stream: usize,
    /// The per-thread handle is a different stream on each thread.
    thread: Option<ThreadId>,
    number: u64,
}

impl Finding {
    fn is_of(&self, stream: usize) -> bool {
        /// The handle of the calling thread's default stream.
        const PER_THREAD: usize = 2;
        self.stream == stream
            && (stream != PER_THREAD || self.thread == Some(std::thread::current().id()))
    }
}

impl Found {
    /// A stream captures.
    #[cold]
    pub(super) fn add(&self, stream: CUstream) {
        process::captures_streams();
        let mut list = locked(&self.list);
        list.streams.retain(|f| !f.is_of(stream as usize));
        list.last += 1;
        let number = list.last;
        list.streams.push(Finding {
            stream: stream as usize,
            thread: Some(std::thread::current().id()),
            number,
        });
        self.any.store(true, Ordering::Relaxed);
    }

    /// A stream does not capture.
    #[inline]
    pub(super) fn remove(&self, stream: CUstream) {
        if self.any.load(Ordering::Relaxed) {
            self.retain(|finding| !finding.is_of(stream as usize));
        }
    }

    #[cold]
    fn retain(&self, keep: impl FnMut(&Finding) -> bool) {
        let mut list = locked(&self.list);
        list.streams.retain(keep);
        self.any.store(!list.streams.is_empty(), Ordering::Relaxed);
    }

    /// All findings: handle and number.
    pub(super) fn all(&self) -> Vec<(usize, u64)> {
        if !self.any.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let list = locked(&self.list);
        list.streams.iter().map(|f| (f.stream, f.number)).collect()
    }

    /// Forgets a finding that was refuted.
    pub(super) fn refute(&self, number: u64) {
        self.retain(|finding| finding.number != number);
    }
}
