//! The captures known to be in progress.

use super::process;
use super::sys::CUstream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::locks::held::Mutex;
use crate::locks::thread_id::ThreadId;

/// The list is reviewed once per this number of allocations that check for captures.
pub(crate) const REVIEW: u32 = 64;
/// After this number of reviews, the capture of a stream that cannot be queried counts as over.
const OLD: u32 = 64;

/// The streams whose capture was begun through this crate, or that were capturing when last queried. A foreign stream
/// may no longer exist, so it cannot be queried again: a finding stands until it is refuted, and calls watch for it
/// until it has expired.
#[derive(Default)]
pub(super) struct Found {
    /// A Bloom filter with one bit per stream of the list; several streams may share a bit.
    bits: AtomicU64,
    /// Whether [`Findings::joined`] is not empty.
    any_joined: AtomicBool,
    /// The number of the newest finding.
    newest: AtomicU64,
    list: Mutex<Findings>,
}

#[derive(Default)]
struct Findings {
    streams: Vec<Finding>,
    /// Ids of captures that were begun into graphs with existing nodes.
    joined: Vec<u64>,
}

struct Finding {
    stream: usize,
    /// The per-thread handle is a different stream on each thread.
    thread: ThreadId,
    number: u64,
    /// Whether no query of the driver reported this capture: it was begun by this crate, or is only suspected.
    unqueried: bool,
    /// Number of reviews since it was found.
    age: u32,
}

impl Finding {
    fn is_of(&self, stream: usize) -> bool {
        /// The handle that means the calling thread's default stream.
        const PER_THREAD: usize = 2;
        self.stream == stream && (stream != PER_THREAD || self.thread == ThreadId::current())
    }

    fn is_watched(&self) -> bool {
        self.age < OLD
    }
}

impl Found {
    /// Records a capture begun into a graph with existing nodes. Its id is unique within the process.
    pub(super) fn add_joined(&self, capture: u64) {
        self.list.lock().joined.push(capture);
        self.any_joined.store(true, Ordering::Release);
    }

    pub(super) fn is_joined(&self, capture: u64) -> bool {
        self.any_joined.load(Ordering::Acquire) && self.list.lock().joined.contains(&capture)
    }

    #[inline(always)]
    pub(super) fn may_have(&self, stream: CUstream) -> bool {
        self.bits.load(Ordering::Relaxed) & bit(stream as usize) != 0
    }

    /// Adds a stream that is capturing, or about to.
    pub(super) fn add(&self, stream: CUstream, unqueried: bool) {
        let mut list = self.list.lock();
        let last = self.newest.fetch_add(1, Ordering::SeqCst) + 1;
        // Usually the stream was found before and is already watched.
        let mut known = list.streams.iter_mut();
        if let Some(known) = known.find(|finding| finding.is_of(stream as usize))
            && known.is_watched()
        {
            (known.number, known.unqueried, known.age) = (last, unqueried, 0);
            return;
        }
        list.add_unknown(stream, last, unqueried);
        self.bits.store(list.bits(), Ordering::Relaxed);
    }

    /// Returns the number of the newest finding. Read it before querying a stream, and pass it to
    /// [`remove`](Self::remove).
    #[inline(always)]
    pub(super) fn newest(&self) -> u64 {
        self.newest.load(Ordering::Acquire)
    }

    /// Removes a stream that a query reported as not capturing. `asked` is the newest finding at the time of the query;
    /// later findings stay, because their capture may have begun after the answer.
    #[inline(always)]
    pub(super) fn remove(&self, stream: CUstream, asked: u64) {
        if self.may_have(stream) {
            self.drop_all(|finding| finding.is_of(stream as usize) && finding.number <= asked);
        }
    }

    #[cold]
    fn drop_all(&self, gone: impl Fn(&Finding) -> bool) {
        let mut list = self.list.lock();
        list.drop_all(gone);
        self.bits.store(list.bits(), Ordering::Relaxed);
    }

    /// Returns the handle and number of each finding confirmed by a query.
    pub(super) fn all(&self) -> Vec<(usize, u64)> {
        if self.bits.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let list = self.list.lock();
        let found = list.streams.iter().filter(|f| !f.unqueried);
        found.map(|f| (f.stream, f.number)).collect()
    }

    /// Removes a refuted finding.
    pub(super) fn revoke(&self, number: u64) {
        self.drop_all(|finding| finding.number == number);
    }

    /// Returns the handles of the streams that calls watch.
    pub(super) fn watched(&self) -> Vec<usize> {
        let list = self.list.lock();
        let watched = list.streams.iter().filter(|f| f.is_watched());
        watched.map(|f| f.stream).collect()
    }

    /// Counts a review in which a stream could not be queried.
    pub(super) fn age(&self, stream: usize) {
        let mut list = self.list.lock();
        let young = list.streams.iter_mut();
        for finding in young.filter(|f| f.stream == stream && f.is_watched()) {
            finding.age += 1;
            if !finding.is_watched() {
                process::unwatch(1);
            }
        }
    }
}

/// Returns the bit of a stream: handles are addresses of the driver, or small numbers.
#[inline]
fn bit(stream: usize) -> u64 {
    1 << ((stream as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}

impl Findings {
    fn bits(&self) -> u64 {
        let bits = self.streams.iter().map(|f| bit(f.stream));
        bits.fold(0, |all, bit| all | bit)
    }

    #[cold]
    fn add_unknown(&mut self, stream: CUstream, number: u64, unqueried: bool) {
        let finding = Finding {
            stream: stream as usize,
            thread: ThreadId::current(),
            number,
            unqueried,
            age: 0,
        };
        // Watch the new finding before the one it replaces is removed, so that the capture never counts as over in
        // between.
        process::watch();
        self.drop_all(|f| f.is_of(finding.stream));
        self.streams.push(finding);
    }

    fn drop_all(&mut self, gone: impl Fn(&Finding) -> bool) {
        let watched = |list: &[Finding]| list.iter().filter(|f| f.is_watched()).count();
        let before = watched(&self.streams);
        self.streams.retain(|finding| !gone(finding));
        let over = before - watched(&self.streams);
        if over > 0 {
            process::unwatch(over);
        }
    }
}

impl Drop for Findings {
    fn drop(&mut self) {
        self.drop_all(|_| true);
    }
}
