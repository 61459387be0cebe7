//! Captures that are under way, as far as is known.

use super::process;
use super::sys::CUstream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::locks::held::Mutex;
use crate::locks::thread_id::ThreadId;

/// The list is looked through once in so many allocations that have to look out for captures.
pub(crate) const REVIEW: u32 = 64;
/// So many looks in which nobody could be asked about a stream: its capture is taken for over.
const OLD: u32 = 64;

/// The streams whose capture was begun through this crate, or that were capturing when somebody last asked. Nobody
/// can say of a stream of the caller's whether it still exists, so what was found stands until it is found otherwise.
/// Calls look out for it as long as it is young.
#[derive(Default)]
pub(super) struct Found {
    /// A bit for each stream in the list, which others may share.
    bits: AtomicU64,
    /// Whether there is anything in [`Findings::joined`].
    any_joined: AtomicBool,
    /// The number of the newest finding.
    newest: AtomicU64,
    list: Mutex<Findings>,
}

#[derive(Default)]
struct Findings {
    streams: Vec<Finding>,
    /// Ids of captures that were begun into graphs with nodes.
    joined: Vec<u64>,
}

struct Finding {
    stream: usize,
    /// The per-thread handle is a different stream on each thread.
    thread: ThreadId,
    number: u64,
    /// Begun here, or suspected: no question has found it.
    unasked: bool,
    /// Looks since it was found.
    age: u32,
}

impl Finding {
    fn is_of(&self, stream: usize) -> bool {
        /// The handle of the calling thread's default stream.
        const PER_THREAD: usize = 2;
        self.stream == stream && (stream != PER_THREAD || self.thread == ThreadId::current())
    }

    fn is_watched(&self) -> bool {
        self.age < OLD
    }
}

impl Found {
    /// A capture was begun into a graph that has nodes. Its id is unique while the process lives.
    pub(super) fn add_joined(&self, capture: u64) {
        self.list.lock().joined.push(capture);
        self.any_joined.store(true, Ordering::Release);
    }

    /// Whether a capture was begun into a graph that has nodes.
    pub(super) fn is_joined(&self, capture: u64) -> bool {
        self.any_joined.load(Ordering::Acquire) && self.list.lock().joined.contains(&capture)
    }

    /// Whether a stream may be in the list.
    #[inline(always)]
    pub(super) fn may_have(&self, stream: CUstream) -> bool {
        self.bits.load(Ordering::Relaxed) & bit(stream as usize) != 0
    }

    /// A stream captures, or is about to.
    pub(super) fn add(&self, stream: CUstream, unasked: bool) {
        let mut list = self.list.lock();
        let last = self.newest.fetch_add(1, Ordering::SeqCst) + 1;
        // Mostly one that was found before, and is watched.
        let mut known = list.streams.iter_mut();
        if let Some(known) = known.find(|finding| finding.is_of(stream as usize))
            && known.is_watched()
        {
            (known.number, known.unasked, known.age) = (last, unasked, 0);
            return;
        }
        list.add_unknown(stream, last, unasked);
        self.bits.store(list.bits(), Ordering::Relaxed);
    }

    /// The number of the newest finding: to be read before a stream is asked, for [`remove`](Self::remove).
    #[inline(always)]
    pub(super) fn newest(&self) -> u64 {
        self.newest.load(Ordering::Acquire)
    }

    /// A stream does not capture, as far as an answer says that was asked for when this was the newest finding. What was
    /// noted since stands: its capture may have begun behind the answer.
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

    /// Those that a question found: handle and number.
    pub(super) fn all(&self) -> Vec<(usize, u64)> {
        if self.bits.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let list = self.list.lock();
        let found = list.streams.iter().filter(|f| !f.unasked);
        found.map(|f| (f.stream, f.number)).collect()
    }

    /// Forgets a finding that was refuted.
    pub(super) fn refute(&self, number: u64) {
        self.drop_all(|finding| finding.number == number);
    }

    /// The streams that calls look out for, by their handles.
    pub(super) fn watched(&self) -> Vec<usize> {
        let list = self.list.lock();
        let watched = list.streams.iter().filter(|f| f.is_watched());
        watched.map(|f| f.stream).collect()
    }

    /// Nobody could be asked about a stream.
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

/// The bit of a stream: handles are addresses of the driver's, or small.
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
    fn add_unknown(&mut self, stream: CUstream, number: u64, unasked: bool) {
        let finding = Finding {
            stream: stream as usize,
            thread: ThreadId::current(),
            number,
            unasked,
            age: 0,
        };
        // Before the one that it replaces goes, so that nobody takes it for over.
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
