"""Recordings of what the allocators of the process do, and the contexts of threads.

    cualloc.record.start("run.rec")
    with cualloc.record.context("train;forward"):
        ...
    cualloc.record.stop()

`cualloc view`, `replay`, `advise` and `export` read the file. CUALLOC_RECORD=run.rec records an unmodified program, but
without contexts.
"""

import atexit
import contextlib
import ctypes
import os
import sys

from cualloc import _library as _l

__all__ = ["start", "stop", "dump", "snapshot", "context"]


def start(path=None, stacks=0):
    """Starts recording to a file, or to memory, whose newest events `dump` writes. One recording runs at a time.

    With `stacks`, about one allocation per this number of bytes is recorded with the stack of its thread: Python
    functions, or native ones if there are none. A rate of some hundreds of KiB is cheap enough to leave on."""
    stacks = _l.number(stacks, "a number of bytes between stacks")
    path = None if path is None else _l.without_null(os.fsencode(path))
    _l.checked(_l.LIBRARY.cualloc_record_start_with_stacks(path, stacks))
    if stacks:
        _l.LIBRARY.cualloc_set_stack_source(_SOURCE, None)


def dump(path):
    """Writes the recording's current contents in memory to a file. The recording goes on."""
    _l.checked(_l.LIBRARY.cualloc_record_dump(_l.without_null(os.fsencode(path))))


def snapshot(path):
    """Writes the recording's current contents in memory as a PyTorch memory snapshot, for PyTorch's viewer. The
    recording goes on."""
    _l.checked(_l.LIBRARY.cualloc_record_snapshot(_l.without_null(os.fsencode(path))))


def stop():
    """Stops the recording. Returns the number of events in its file (0 without a file), and the number of events lost
    because they came too fast."""
    events, lost = ctypes.c_uint64(), ctypes.c_uint64()
    _without_source()
    _l.checked(_l.LIBRARY.cualloc_record_stop(ctypes.byref(events), ctypes.byref(lost)))
    return events.value, lost.value


_PACKAGE = os.path.dirname(__file__) + os.sep
_MOST_FRAMES = 64
_MOST_PLACES = 65535
_known = {}


def _where(_):
    """Returns the context for the Python stack of the thread; 0 if it runs no Python function."""
    try:
        frame, place = sys._getframe(1), []
        # Frames of this package are skipped.
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
            # A program that creates functions at run time may have unboundedly many places.
            if len(_known) < _MOST_PLACES:
                _known[place] = number
        return number
    except ValueError:
        # The thread runs no Python function.
        return 0


_SOURCE = _l.STACK_SOURCE(_where)
# The library may still have the old address when this module is reloaded.
_l.kept.append(_SOURCE)


@atexit.register
def _without_source():
    """Removes the source before the interpreter ends, when no Python function may be called any more."""
    _l.LIBRARY.cualloc_set_stack_source(_l.STACK_SOURCE(), None)


@contextlib.contextmanager
def context(name):
    """Names everything that the thread allocates and frees within the context manager; parts separated by semicolons
    are a stack, outermost first. A program may use 65535 names; further names are ignored."""
    before = _l.LIBRARY.cualloc_set_context(_l.LIBRARY.cualloc_context(_l.without_null(name.encode())))
    try:
        yield
    finally:
        _l.LIBRARY.cualloc_set_context(before)
