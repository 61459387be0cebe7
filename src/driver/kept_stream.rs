//! Streams that are used after the call that passed them.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Weak};

use super::process;
use super::stream::{Stream, StreamKind};
use super::sys::CUstream;
use super::table::Driver;
use crate::locks::held::Mutex;
use crate::locks::lines::keep_lines;

/// A stream that a free will use, although no allocator keeps a record of it. The owner of a borrowed stream may
/// destroy it earlier, once an allocator has retired it: [`retire`] removes the stream from here.
#[derive(Clone, Debug)]
pub(crate) struct KeptStream {
    stream: Stream,
    /// Present for a borrowed stream.
    loan: Option<Arc<Loan>>,
}

/// The state shared by all keepers of one borrowed stream.
#[derive(Debug)]
struct Loan {
    key: Key,
    uses: Mutex<Uses>,
    unused: Condvar,
}

#[derive(Debug, Default)]
struct Uses {
    under_way: usize,
    retired: bool,
}

/// A driver's library and the handle of a stream. After a retirement the same handle may belong to another stream.
type Key = (usize, usize);

static LOANS: Mutex<Option<HashMap<Key, Weak<Loan>>>> = Mutex::new(None);

impl KeptStream {
    pub(crate) fn new(stream: &Stream) -> KeptStream {
        // In a forked child, a thread that does not exist there may hold the locks, and streams are not used.
        let is_lent = stream.kind() == StreamKind::Borrowed && !process::is_forked_child();
        KeptStream {
            stream: stream.clone(),
            loan: is_lent.then(|| Loan::of(key(stream.context().driver(), stream.raw()))),
        }
    }

    /// Returns the stream for identification only: its handle may belong to another stream by now.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Calls `run` with the stream, or with none if it was retired. A retirement waits until `run` returns.
    pub(crate) fn with<T>(&self, run: impl FnOnce(Option<&Stream>) -> T) -> T {
        let Some(loan) = &self.loan else {
            return run(Some(&self.stream));
        };
        // Log lines are held back: a logger that retires the stream would wait for this use.
        let _lines = keep_lines();
        let under_way = loan.begin();
        run(under_way.as_ref().map(|_| &self.stream))
    }
}

fn key(driver: &Driver, stream: CUstream) -> Key {
    (driver.library_number(), stream.addr())
}

impl Loan {
    fn of(key: Key) -> Arc<Loan> {
        let mut loans = LOANS.lock();
        let loans = loans.get_or_insert_default();
        if let Some(loan) = loans.get(&key).and_then(Weak::upgrade) {
            return loan;
        }
        let loan = Arc::new(Loan {
            key,
            uses: Mutex::default(),
            unused: Condvar::new(),
        });
        loans.insert(key, Arc::downgrade(&loan));
        loan
    }

    fn begin(&self) -> Option<UseInProgress<'_>> {
        if process::is_forked_child() {
            return None;
        }
        let mut uses = self.uses.lock();
        if uses.retired {
            return None;
        }
        uses.under_way += 1;
        Some(UseInProgress(self))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if process::is_unavailable() {
            return;
        }
        if let Some(loans) = &mut *LOANS.lock()
            && let Some(loan) = loans.get(&self.key)
            && loan.strong_count() == 0
        {
            loans.remove(&self.key);
        }
    }
}

/// A use of a stream, in effect until dropped.
struct UseInProgress<'a>(&'a Loan);

impl Drop for UseInProgress<'_> {
    fn drop(&mut self) {
        let mut uses = self.0.uses.lock();
        uses.under_way -= 1;
        if uses.under_way == 0 {
            self.0.unused.notify_all();
        }
    }
}

/// Removes the stream with this handle from all its keepers, and waits for the uses in progress.
pub(crate) fn retire(driver: &Driver, stream: CUstream) {
    let key = key(driver, stream);
    let loan = LOANS.lock().as_mut().and_then(|loans| loans.remove(&key));
    if let Some(loan) = loan.and_then(|loan| loan.upgrade()) {
        let mut uses = loan.uses.lock();
        uses.retired = true;
        while uses.under_way > 0 {
            uses = uses.wait(&loan.unused);
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
