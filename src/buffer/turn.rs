//! Turns: one thread at a time queues operations on memory with several owners.
//!
//! A turn is not a lock: driver calls are made while one is taken, and a resource or logger of the program called in
//! between may use the same memory on the same thread, or other memory on any thread.

use std::cell::Cell;
use std::sync::Condvar;

use super::unordered::Key;
use crate::driver::process;
use crate::error::Error;
use crate::locks::held::Mutex;

/// The memories whose turn is taken, each with the thread that holds it.
static TAKEN: Mutex<Vec<(Key, usize)>> = Mutex::new(Vec::new());
static GIVEN_BACK: Condvar = Condvar::new();

thread_local! {
    /// Its address identifies the thread. It has no destructor, since buffers may be dropped in destructors of other
    /// thread-local variables.
    static THREAD: Cell<u8> = const { Cell::new(0) };
}

/// The turns of some memories, held by the calling thread until dropped.
#[must_use]
pub(super) struct Turn {
    keys: Vec<Key>,
    thread: usize,
}

impl Turn {
    /// Waits until no other thread holds a turn of these memories, and takes all of them together.
    pub(super) fn take(keys: Vec<Key>) -> Result<Turn, Error> {
        let thread = THREAD.with(|thread| std::ptr::from_ref(thread).addr());
        if !keys.is_empty() {
            // A thread of the parent may have held the lock.
            if process::is_forked_child() {
                return Err(Error::ForkedChild);
            }
            let others = |taken: &[(Key, usize)]| {
                let mut taken = taken.iter();
                taken.any(|(key, other)| *other != thread && keys.contains(key))
            };
            let mut taken = TAKEN.lock();
            while others(&taken) {
                taken = taken.wait(&GIVEN_BACK);
            }
            taken.extend(keys.iter().map(|key| (*key, thread)));
        }
        Ok(Turn { keys, thread })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let mut taken = TAKEN.lock();
        for key in &self.keys {
            let own = taken.iter().position(|own| *own == (*key, self.thread));
            own.map(|at| taken.swap_remove(at));
        }
        drop(taken);
        GIVEN_BACK.notify_all();
    }
}
