//! Log lines delayed until their thread holds nothing that other calls wait for.
//!
//! The retirement of a stream, or a suspension, waits for calls that use the stream's handle, or the memory. Such a
//! call holds no lock, but if its logger retired the stream or suspended the memory on the same thread, it would wait
//! for itself.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use log::Level;

type Line = (Level, &'static str, String);

thread_local! {
    /// The number of [`KeptLines`] of the thread. It has no destructor, since blocks are freed while a thread ends.
    static KEEPERS: Cell<u32> = const { Cell::new(0) };
    static KEPT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Keeps the lines that the calling thread [logs](log), and writes them when it is dropped. It must be declared before
/// the use that others wait for, so that it is dropped after it.
#[derive(Debug)]
#[must_use]
pub(crate) struct KeptLines {
    /// It must stay on its thread.
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

/// Logs a line, delayed if the thread has [`KeptLines`].
pub(crate) fn log(level: Level, target: &'static str, what: fmt::Arguments<'_>) {
    if KEEPERS.get() == 0 {
        return log::log!(target: target, level, "{what}");
    }
    if level <= log::max_level() {
        // An ending thread may have lost its variables.
        let _ = KEPT.try_with(|kept| {
            let mut lines = kept.take();
            lines.push((level, target, what.to_string()));
            kept.set(lines);
        });
    }
}
