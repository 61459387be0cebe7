//! Tracks which thread is in a call with which handle, so that a destroy can wait for the calls of other threads.
//!
//! A call announces its handle in a word that only its thread writes, then checks that the handle is alive. A destroy
//! marks the handle dead, then reads the words of all threads. Each side needs a full barrier between its two steps;
//! without one both could miss each other. Calls are frequent and destroys are rare, so the destroy issues the barrier
//! for all threads: the system interrupts every other running thread of the process ([`barrier`]), and a call costs
//! only two plain stores.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};

use cualloc::allocator::{of_caller, set_of_caller};

use crate::barrier;

/// The word of a thread, on cache lines of its own. Never freed: when its thread ends, another takes it over.
#[repr(align(128))]
struct Word {
    /// The handle of the call in progress, or 0.
    busy: AtomicU64,
    /// Whether a thread owns the word. A word without an owner is lent out for single calls.
    taken: AtomicBool,
    lent: bool,
    next: AtomicPtr<Word>,
}

impl Word {
    const fn new(busy: u64, lent: bool) -> Word {
        Word {
            busy: AtomicU64::new(busy),
            taken: AtomicBool::new(true),
            lent,
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

/// The head of the list of all words.
static FIRST: AtomicPtr<Word> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// The number of calls that the thread has in progress with lent words. It has no destructor, so that destructors
    /// of other thread-local variables can make calls.
    static LENT: Cell<u32> = const { Cell::new(0) };
    static LEAVING: ReleaseWord = const { ReleaseWord(Cell::new(false)) };
}

/// Returns the thread's own word while it has one.
#[inline(always)]
fn own() -> Option<&'static Word> {
    // SAFETY: null, or a word stored by `set_own`: words are never freed.
    unsafe { of_caller().cast::<Word>().as_ref() }
}

fn set_own(word: Option<&'static Word>) {
    set_of_caller(word.map_or(ptr::null(), ptr::from_ref).cast());
}

/// Gives the thread's word back when the thread ends.
struct ReleaseWord(Cell<bool>);

impl Drop for ReleaseWord {
    fn drop(&mut self) {
        // A busy word belongs to a call that never returns, so it is not reused.
        let word = own();
        set_own(None);
        if let Some(word) = word
            && word.busy.load(Ordering::Relaxed) == 0
        {
            word.taken.store(false, Ordering::Release);
        }
    }
}

fn words() -> impl Iterator<Item = &'static Word> {
    let at = |word: &AtomicPtr<Word>| {
        // SAFETY: words are never freed.
        unsafe { word.load(Ordering::SeqCst).as_ref() }
    };
    std::iter::successors(at(&FIRST), move |word| at(&word.next))
}

fn add(word: Word) -> &'static Word {
    let word: &'static Word = Box::leak(Box::new(word));
    let mut first = FIRST.load(Ordering::SeqCst);
    loop {
        word.next.store(first, Ordering::Relaxed);
        let added = ptr::from_ref(word).cast_mut();
        match FIRST.compare_exchange(first, added, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return word,
            Err(other) => first = other,
        }
    }
}

/// Gives this thread a word unless it is ending; returns whether it has one.
fn adopt() -> bool {
    if LEAVING.try_with(|leaving| leaving.0.set(true)).is_err() {
        return false;
    }
    let left = words().find(|word| {
        !word.lent
            && word
                .taken
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
    });
    let word = left.unwrap_or_else(|| add(Word::new(0, false)));
    set_own(Some(word));
    true
}

/// An announced call, in effect until dropped.
#[must_use]
pub(crate) struct Announced(&'static Word);

impl Drop for Announced {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.busy.store(0, Ordering::Release);
        if self.0.lent {
            LENT.set(LENT.get() - 1);
        }
    }
}

/// Announces a handle other than 0, on a thread that owns a word and is in no other call.
#[inline(always)]
pub(crate) fn announce(handle: u64) -> Option<Announced> {
    let word = own()?;
    if word.busy.load(Ordering::Relaxed) != 0 {
        return None;
    }
    word.busy.store(handle, Ordering::Relaxed);
    // The processor's half of this fence is the barrier issued by the destroy.
    compiler_fence(Ordering::SeqCst);
    Some(Announced(word))
}

/// [`announce`] for a thread's first call, for nested calls (such as a logger's), and for calls of an ending thread.
#[cold]
pub(crate) fn announce_any(handle: u64) -> Announced {
    if own().is_none()
        && adopt()
        && let Some(announced) = announce(handle)
    {
        return announced;
    }
    let free = words().find(|word| {
        word.lent
            && word
                .busy
                .compare_exchange(0, handle, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
    });
    let word = free.unwrap_or_else(|| add(Word::new(handle, true)));
    LENT.set(LENT.get() + 1);
    Announced(word)
}

/// Whether this thread is already in a call.
pub(crate) fn inside() -> bool {
    LENT.get() > 0 || own().is_some_and(|word| word.busy.load(Ordering::Relaxed) != 0)
}

/// Waits until every call that found the handle alive has ended; returns false if that cannot be determined here. The
/// handle must already be dead.
pub(crate) fn wait_for(handle: u64) -> bool {
    if !barrier::for_all_threads() {
        return false;
    }
    let busy = || words().any(|word| word.busy.load(Ordering::Acquire) == handle);
    let mut turns = 0;
    while busy() {
        turns += 1;
        match turns {
            ..100 => std::hint::spin_loop(),
            100..1000 => std::thread::yield_now(),
            // The call is waiting for the device.
            _ => std::thread::sleep(std::time::Duration::from_micros(50)),
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_wait_ends_with_its_call() {
        if !barrier::prepare() {
            println!("SKIPPED: the system has no barrier for all threads");
            return;
        }
        const HANDLE: u64 = 0x7777_0001;
        let ((begun, has_begun), (end, may_end)) = (channel(), channel::<()>());
        let caller = std::thread::spawn(move || {
            let announced = announce_any(HANDLE);
            begun.send(()).unwrap();
            may_end.recv().unwrap();
            drop(announced);
        });
        has_begun.recv().unwrap();
        let (waits, has_waited) = channel();
        let waiter = std::thread::spawn(move || {
            assert!(wait_for(HANDLE));
            waits.send(()).unwrap();
        });
        assert!(has_waited.try_recv().is_err(), "the call is under way");
        end.send(()).unwrap();
        caller.join().unwrap();
        waiter.join().unwrap();
        has_waited.recv().unwrap();
        assert!(wait_for(HANDLE), "and now at once");
    }

    #[test]
    fn a_nested_call_has_its_own_word() {
        let outer = announce_any(0x7777_0002);
        assert!(inside());
        assert!(announce(0x7777_0003).is_none());
        let inner = announce_any(0x7777_0003);
        let now = || {
            words()
                .map(|word| word.busy.load(Ordering::Relaxed))
                .collect::<Vec<_>>()
        };
        assert!(now().contains(&0x7777_0002) && now().contains(&0x7777_0003));
        drop(inner);
        assert!(now().contains(&0x7777_0002) && !now().contains(&0x7777_0003));
        drop(outer);
        assert!(!inside());
        // A thread that has lost its own word counts as being in a call while it has a lent one.
        let outer = announce_any(0x7777_0002);
        let inner = announce_any(0x7777_0003);
        drop(outer);
        assert!(inside());
        drop(inner);
        assert!(!inside());
    }

    #[test]
    fn words_of_ended_threads_are_taken_over() {
        let count = || words().filter(|word| !word.lent).count();
        let one = || drop(announce_any(0x7777_0004));
        std::thread::spawn(one).join().unwrap();
        let before = count();
        for _ in 0..100 {
            std::thread::spawn(one).join().unwrap();
        }
        // Other tests start threads concurrently.
        assert!(count() < before + 50, "{before}, then {}", count());
    }
}
