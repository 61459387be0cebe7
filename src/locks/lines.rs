//! Lines of the log that wait until their thread holds nothing that other calls wait for.
//!
//! A call that uses a stream's handle, or memory that may be suspended, is waited for: by the retirement of the stream,
//! or by the suspension. No lock is held, but a logger that makes such a call on the same thread would wait for itself.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use log::Level;

/// A line of the log.
type Line = (Level, &'static str, String);

thread_local! {
    /// How many [`KeptLines`] the thread has. Without a destructor, since blocks are freed while a thread ends.
    static KEEPERS: Cell<u32> = const { Cell::new(0) };
    static KEPT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Keeps the lines that the calling thread [says](say), and logs them when it is dropped. Declared before what the
/// thread is waited for, it is dropped after that.
#[derive(Debug)]
#[must_use]
pub(crate) struct KeptLines {
    /// It stays on its thread.
    _here: PhantomData<*const ()>,
}

pub(crate) fn keep_lines() -> KeptLines {
    KEEPERS.set(KEEPERS.get() + 1);
    KeptLines { _here: PhantomData }
}

impl Drop for KeptLines {
    fn drop(&mut self) {
        KEEPERS.set(KEEPERS.get() - 1);
        if KEEPERS.get() > 0 {
            return;
        }
        for (level, target, line) in KEPT.try_with(Cell::take).unwrap_or_default() {
            log::log!(target: target, level, "{line}");
        }
    }
}

/// Logs a line, later if the thread has [`KeptLines`].
pub(crate) fn say(level: Level, target: &'static str, what: fmt::Arguments<'_>) {
    if KEEPERS.get() == 0 {
        return log::log!(target: target, level, "{what}");
    }
    if level <= log::max_level() {
        // A thread that ends may have lost its variables.
        let _ = KEPT.try_with(|kept| {
            let mut lines = kept.take();
            lines.push((level, target, what.to_string()));
            kept.set(lines);
        });
    }
}
