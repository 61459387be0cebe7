"""The time that PyTorch spends in its allocator, measured by the same functions for every allocator."""

import ctypes
import os

from cualloc import _shim

_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meter.cpp")


class Meter:
    def __init__(self, folder):
        """Begins to time the current allocator; a program calls this before it uses the device. `folder` keeps the
        compiled functions."""
        path = os.path.join(folder, "meter.so")
        if not os.path.exists(path):
            _shim.build(_SOURCE, path)
        self._library = ctypes.CDLL(path)
        self._library.meter_own_cost.restype = ctypes.c_double
        self._own = self._library.meter_own_cost()
        self._library.meter_start()

    def reset(self):
        self._library.meter_reset()

    def stop(self):
        self._library.meter_stop()

    def figures(self):
        """Calls, mean nanoseconds and quantiles (upper bounds, powers of two) of allocations and frees, and the sum."""
        found, total = {}, 0
        for which, name in enumerate(("alloc", "free")):
            row = (ctypes.c_uint64 * 66)()
            self._library.meter_read(which, row)
            calls, spent, by_bits = row[0], row[1], row[2:]
            spent = max(0, spent - calls * self._own)
            total += spent
            found[f"{name}_calls"], found[f"{name}_ns"] = calls, round(spent / max(calls, 1))
            for quantile in (0.5, 0.99, 0.999):
                seen = 0
                for bits, count in enumerate(by_bits):
                    seen += count
                    if calls and seen >= quantile * calls:
                        found[f"{name}_{100 * quantile:g}%_ns"] = 1 << bits
                        break
        found["inside_ms"] = round(total / 1e6, 2)
        return found
