//! Which thread is in a call with which handle, so that a destroy can wait for the calls of other threads.
//!
//! A call announces its handle in a word that only its thread writes, then looks whether the handle is alive. A
//! destroy makes the handle dead, then looks at the words of all threads. Between the two steps each side needs a
//! full barrier, or both could miss each other. Calls are frequent and destroys are rare, so the destroy makes the
//! barrier for all: the system interrupts every other running thread of the process ([`barrier`]), and a call pays
//! for nothing but two plain stores.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};

use cualloc::allocator::{of_caller, set_of_caller};

use crate::barrier;

/// The word of a thread, on cache lines of its own. Never freed: another thread takes it over.
#[repr(align(128))]
struct Word {
    /// The handle that a call is under way with, or 0.
    busy: AtomicU64,
    /// Whether a thread has it as its own. One that none ever has is lent for single calls.
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

/// All words.
static FIRST: AtomicPtr<Word> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// Calls that the thread is in with lent words. It has no destructor, so that a call from the destructor of another
    /// variable finds it.
    static LENT: Cell<u32> = const { Cell::new(0) };
    static LEAVING: Leaving = const { Leaving(Cell::new(false)) };
}

/// The thread's own word, as long as it has one.
#[inline(always)]
fn own() -> Option<&'static Word> {
    // SAFETY: null, or what `set_own` has kept: words are never freed.
    unsafe { of_caller().cast::<Word>().as_ref() }
}

fn set_own(word: Option<&'static Word>) {
    set_of_caller(word.map_or(ptr::null(), ptr::from_ref).cast());
}

/// Gives the thread's word back when the thread ends.
struct Leaving(Cell<bool>);

impl Drop for Leaving {
    fn drop(&mut self) {
        // One that is busy belongs to a call that never returns: it is lost.
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

/// Gives this thread a word, unless it is ending. Whether it has one.
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

/// An announcement, until it is dropped.
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

/// Announces a handle, which is not 0, on a thread that has a word and is in no other call.
#[inline(always)]
pub(crate) fn announce(handle: u64) -> Option<Announced> {
    let word = own()?;
    if word.busy.load(Ordering::Relaxed) != 0 {
        return None;
    }
    word.busy.store(handle, Ordering::Relaxed);
    // The processor's part of this fence is the barrier of the destroy.
    compiler_fence(Ordering::SeqCst);
    Some(Announced(word))
}

/// [`announce`] for a thread's first call, for calls inside a call (a logger's), and for those of a thread that ends.
#[cold]
pub(crate) fn announce_slowly(handle: u64) -> Announced {
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

/// Whether this thread is in a call already.
pub(crate) fn inside() -> bool {
    LENT.get() > 0 || own().is_some_and(|word| word.busy.load(Ordering::Relaxed) != 0)
}

/// Waits until no call is under way with a handle that was alive when it began; false if that cannot be known here.
/// The handle must be dead by now.
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
            // The call waits for the device.
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
    fn a_wait_is_over_when_the_call_is() {
        if !barrier::prepare() {
            println!("SKIPPED: the system has no barrier for all threads");
            return;
        }
        const HANDLE: u64 = 0x7777_0001;
        let ((begun, has_begun), (end, may_end)) = (channel(), channel::<()>());
        let caller = std::thread::spawn(move || {
            let announced = announce_slowly(HANDLE);
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
    fn a_call_inside_a_call_has_a_word_of_its_own() {
        let outer = announce_slowly(0x7777_0002);
        assert!(inside());
        assert!(announce(0x7777_0003).is_none());
        let inner = announce_slowly(0x7777_0003);
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
        // A thread whose own word is gone is in a call as long as it has a lent one.
        let outer = announce_slowly(0x7777_0002);
        let inner = announce_slowly(0x7777_0003);
        drop(outer);
        assert!(inside());
        drop(inner);
        assert!(!inside());
    }

    #[test]
    fn words_of_ended_threads_are_taken_over() {
        let count = || words().filter(|word| !word.lent).count();
        let one = || drop(announce_slowly(0x7777_0004));
        std::thread::spawn(one).join().unwrap();
        let before = count();
        for _ in 0..100 {
            std::thread::spawn(one).join().unwrap();
        }
        // Other tests begin threads beside this one.
        assert!(count() < before + 50, "{before}, then {}", count());
    }
}
