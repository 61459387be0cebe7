//! Streams that the home of a memory has to wait for: a failure left them unordered with it, or they may use the
//! memory until it goes, and nobody else keeps a record of it.
//!
//! There are hardly ever any, so they are not kept in the memory, which has only a flag of them.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Stream, process, sys};
use crate::locks::held::Mutex;

/// A memory: its allocator, and its address there.
pub(super) type Key = (u64, sys::CUdeviceptr);

static LATE: Mutex<List> = Mutex::new(List {
    all: Vec::new(),
    noted: 0,
});

#[derive(Default)]
struct List {
    all: Vec<Late>,
    /// How many were noted so far.
    noted: u64,
}

/// A stream that is still to be ordered.
#[derive(Clone)]
pub(super) struct Late {
    of: Key,
    number: u64,
    pub stream: KeptStream,
    /// The stream's id; of a per-thread default stream that of the thread which used it.
    pub id: u64,
    /// Whether it may be given work until the memory goes: only then it is ordered.
    pub lasting: bool,
}

/// Notes a stream; the flag is that of the memory.
pub(super) fn note(flag: &AtomicBool, of: Key, stream: &Stream, id: u64, lasting: bool) {
    let mut list = process::lock(&LATE);
    list.noted += 1;
    let number = list.noted;
    let same = |it: &&mut Late| (it.of, it.id, it.lasting) == (of, id, lasting);
    match list.all.iter_mut().find(same) {
        // It is to be ordered anew, even if somebody is about to order what it was given before.
        Some(known) => known.number = number,
        None => list.all.push(Late {
            of,
            number,
            stream: KeptStream::new(stream),
            id,
            lasting,
        }),
    }
    flag.store(true, Ordering::Release);
}

/// Those of a memory.
pub(super) fn all_of(of: Key) -> Vec<Late> {
    let list = process::lock(&LATE);
    list.all.iter().filter(|it| it.of == of).cloned().collect()
}

/// One was ordered, with all that it was given before it was noted.
pub(super) fn made_up(flag: &AtomicBool, late: &Late) {
    let mut list = process::lock(&LATE);
    let at = list.all.iter().position(|it| it.number == late.number);
    let ended = at.map(|at| list.all.swap_remove(at));
    if list.all.iter().all(|it| it.of != late.of) {
        flag.store(false, Ordering::Release);
    }
    drop(list);
    // It may be the last to hold its stream, which is destroyed outside the lock.
    drop(ended);
}

/// The memory ends: gives up all of its.
pub(super) fn take_all_of(of: Key) -> Vec<Late> {
    let mut list = process::lock(&LATE);
    list.all.extract_if(.., |it| it.of == of).collect()
}
