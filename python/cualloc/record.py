"""Recordings of what the allocators of the process do, and what a thread is doing meanwhile.

    cualloc.record.start("run.rec")
    with cualloc.record.context("train;forward"):
        ...
    cualloc.record.stop()

`cualloc view`, `replay`, `advise` and `export` read the file. CUALLOC_RECORD=run.rec records a program without a change
to it, but without contexts.
"""

import contextlib
import ctypes
import os

from cualloc import _library as _l

__all__ = ["start", "stop", "dump", "context"]


def start(path=None):
    """Begins to record to a file, or to memory, of which `dump` writes what is newest. One recording runs at a time."""
    _l.checked(_l.LIBRARY.cualloc_record_start(None if path is None else os.fsencode(path)))


def dump(path):
    """Writes what the recording has in memory now to a file. The recording goes on."""
    _l.checked(_l.LIBRARY.cualloc_record_dump(os.fsencode(path)))


def stop():
    """Ends the recording. Returns how many events its file has (0 without one), and how many came too fast for it."""
    events, lost = ctypes.c_uint64(), ctypes.c_uint64()
    _l.checked(_l.LIBRARY.cualloc_record_stop(ctypes.byref(events), ctypes.byref(lost)))
    return events.value, lost.value


@contextlib.contextmanager
def context(name):
    """What the thread allocates and frees within has this name; parts between semicolons are a stack, outermost first.
    A program may have 65536 names; those that come later are none."""
    before = _l.LIBRARY.cualloc_set_context(_l.LIBRARY.cualloc_context(name.encode()))
    try:
        yield
    finally:
        _l.LIBRARY.cualloc_set_context(before)
