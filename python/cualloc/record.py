"""Recordings of what the allocators of the process do, and what a thread is doing meanwhile.

    cualloc.record.start("run.rec")
    with cualloc.record.context("train;forward"):
        ...
    cualloc.record.stop()

`cualloc view`, `replay`, `advise` and `export` read the file. CUALLOC_RECORD=run.rec records a program without a change
to it, but without contexts.
"""

import atexit
import contextlib
import ctypes
import os
import sys

from cualloc import _library as _l

__all__ = ["start", "stop", "dump", "snapshot", "context"]


def start(path=None, stacks=0):
    """Begins to record to a file, or to memory, of which `dump` writes what is newest. One recording runs at a time.

    With `stacks` about one allocation in each so many bytes is recorded with the stack of its thread: Python's functions,
    or native ones where there are none. Some hundreds of KiB can stay on."""
    stacks = _l.number(stacks, "a number of bytes between stacks")
    path = None if path is None else _l.without_null(os.fsencode(path))
    _l.checked(_l.LIBRARY.cualloc_record_start_with_stacks(path, stacks))
    if stacks:
        _l.LIBRARY.cualloc_set_stack_source(_SOURCE, None)


def dump(path):
    """Writes what the recording has in memory now to a file. The recording goes on."""
    _l.checked(_l.LIBRARY.cualloc_record_dump(_l.without_null(os.fsencode(path))))


def snapshot(path):
    """Writes a file of what the recording has in memory now as a memory snapshot of PyTorch's, for its viewer. The
    recording goes on."""
    _l.checked(_l.LIBRARY.cualloc_record_snapshot(_l.without_null(os.fsencode(path))))


def stop():
    """Ends the recording. Returns how many events its file has (0 without one), and how many came too fast for it."""
    events, lost = ctypes.c_uint64(), ctypes.c_uint64()
    _without_source()
    _l.checked(_l.LIBRARY.cualloc_record_stop(ctypes.byref(events), ctypes.byref(lost)))
    return events.value, lost.value


_PACKAGE = os.path.dirname(__file__) + os.sep
_MOST_FRAMES = 64
_MOST_PLACES = 65535
_known = {}


def _where(_):
    """The context that stands for the Python functions of the thread; 0 if there are none."""
    try:
        frame, place = sys._getframe(1), []
        # What calls this package counts, not the package.
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        while frame is not None and len(place) < _MOST_FRAMES:
            place.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        if not place:
            return 0
        place = tuple(place)
        number = _known.get(place)
        if number is None:
            names = [f"{os.path.basename(code.co_filename)}:{line}:{code.co_name}" for code, line in place]
            name = ";".join(part.replace(";", ",") for part in reversed(names)).encode(errors="replace")
            number = _l.LIBRARY.cualloc_context(name)
            # A program that makes functions as it runs has places without end.
            if len(_known) < _MOST_PLACES:
                _known[place] = number
        return number
    except ValueError:
        # The thread has no Python function.
        return 0


_SOURCE = _l.STACK_SOURCE(_where)
# The library may have its address still when this module is loaded anew.
_l.kept.append(_SOURCE)


@atexit.register
def _without_source():
    """Nothing of Python may be called when it is about to end."""
    _l.LIBRARY.cualloc_set_stack_source(_l.STACK_SOURCE(), None)


@contextlib.contextmanager
def context(name):
    """What the thread allocates and frees within has this name; parts between semicolons are a stack, outermost first.
    A program may have 65535 names; those that come later are none."""
    before = _l.LIBRARY.cualloc_set_context(_l.LIBRARY.cualloc_context(_l.without_null(name.encode())))
    try:
        yield
    finally:
        _l.LIBRARY.cualloc_set_context(before)
