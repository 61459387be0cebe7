//! Streams that the home of a memory must wait for before the memory is freed: either a failure left them unordered, or
//! they may use the memory until it is freed and no allocator records that.
//!
//! Such streams are rare, so the memory itself holds only a flag.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::kept_stream::KeptStream;
use crate::driver::{Stream, process, sys};
use crate::locks::held::Mutex;

/// Identifies a memory: its allocator and address.
pub(super) type Key = (u64, sys::CUdeviceptr);

static UNORDERED: Mutex<List> = Mutex::new(List {
    all: Vec::new(),
    added: 0,
});

#[derive(Default)]
struct List {
    all: Vec<Unordered>,
    /// The number of streams added so far.
    added: u64,
}

/// A stream that must still be ordered.
#[derive(Clone)]
pub(super) struct Unordered {
    of: Key,
    number: u64,
    pub stream: KeptStream,
    /// The stream's id; for a per-thread default stream, that of the thread that used it.
    pub id: u64,
    /// Whether it may get work until the memory is freed: it is then ordered only at that time.
    pub lasting: bool,
}

/// Records a stream and sets the flag of the memory.
pub(super) fn add(flag: &AtomicBool, of: Key, stream: &Stream, id: u64, lasting: bool) {
    let mut list = process::lock(&UNORDERED);
    list.added += 1;
    let number = list.added;
    let same = |it: &&mut Unordered| (it.of, it.id, it.lasting) == (of, id, lasting);
    match list.all.iter_mut().find(same) {
        // The stream must be ordered again, even if another thread is just ordering its earlier work.
        Some(known) => known.number = number,
        None => list.all.push(Unordered {
            of,
            number,
            stream: KeptStream::new(stream),
            id,
            lasting,
        }),
    }
    flag.store(true, Ordering::Release);
}

pub(super) fn all_of(of: Key) -> Vec<Unordered> {
    let list = process::lock(&UNORDERED);
    list.all.iter().filter(|it| it.of == of).cloned().collect()
}

/// Removes a stream that was ordered, unless it was added again since.
pub(super) fn remove(flag: &AtomicBool, user: &Unordered) {
    let mut list = process::lock(&UNORDERED);
    let at = list.all.iter().position(|it| it.number == user.number);
    let ended = at.map(|at| list.all.swap_remove(at));
    if list.all.iter().all(|it| it.of != user.of) {
        flag.store(false, Ordering::Release);
    }
    drop(list);
    // This may drop the last reference to the stream, which must be destroyed outside the lock.
    drop(ended);
}

/// Removes and returns all streams of a memory that ends.
pub(super) fn take_all_of(of: Key) -> Vec<Unordered> {
    let mut list = process::lock(&UNORDERED);
    list.all.extract_if(.., |it| it.of == of).collect()
}
