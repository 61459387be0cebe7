"""Growable ranges as tensors: addresses that are reserved once, whose memory is committed and decommitted."""

import ctypes
import math

import torch
from torch.utils import dlpack

from cualloc import _dlpack, _library
from cualloc._library import LIBRARY, checked, number


class _Options(ctypes.Structure):
    """cualloc_range_options_t."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_uint64) for name in ("granule", "stripes", "stripe_stride")),
        ("tag", ctypes.c_char_p),
    ]


class _Stats(ctypes.Structure):
    """cualloc_range_stats_t."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_uint64) for name in ("reserved", "committed", "leaving", "granule")),
    ]


_NAME = b"dltensor"


def _tensor(address, device, shape):
    """Returns a uint8 tensor over addresses, which need not have memory."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    _, code, bits = _dlpack.TYPES["uint8"]
    managed = _dlpack.Managed(_dlpack.Tensor(address, _dlpack.CUDA, device, len(shape), code, bits, 1, sizes))
    # The tensor refers to them as long as it lives.
    _library.kept.append((managed, sizes))
    return dlpack.from_dlpack(_dlpack.new_capsule(ctypes.addressof(managed), _NAME, None))


class Range:
    """Reserved addresses in which memory is committed and decommitted, in the order of the current stream. Made by
    `reserve`. Sizes and offsets are bytes of one stripe.

    `tensor` is a uint8 tensor over all addresses: only committed parts of it may be used, also by captured graphs."""

    def __init__(self, nbytes, granule, stripes, tag, device):
        self._range, self._device = None, device
        stripes = number(stripes, "the number of stripes")
        if tag is not None:
            # `sleep` and `wake` know the tag from here on.
            _library.tag_pool(device, str(tag))
            tag = str(tag).encode()
        options = _Options(ctypes.sizeof(_Options), number(granule or 0, "a granule"), stripes, 0, tag)
        made, base = ctypes.c_void_p(), ctypes.c_uint64()
        nbytes, allocator = number(nbytes, "a number of bytes"), _library.allocator(device)
        reserve = LIBRARY.cualloc_range_create
        checked(reserve(allocator, nbytes, ctypes.byref(options), ctypes.byref(made), ctypes.byref(base)))
        self._range = made.value
        self.nbytes = self._stats().reserved // max(stripes, 1)
        self.tensor = _tensor(base.value, device, (stripes, self.nbytes) if stripes > 1 else (self.nbytes,))

    def _stats(self):
        stats = _Stats(struct_size=ctypes.sizeof(_Stats))
        checked(LIBRARY.cualloc_range_stats(self._range, ctypes.byref(stats)))
        return stats

    def _call(self, function, lo, hi, stream=None):
        stream = torch.cuda.current_stream(self._device) if stream is None else stream
        lo, hi = number(lo, "an offset"), number(hi, "an offset")
        if lo > hi:
            raise ValueError(f"expected lo <= hi, found {lo} and {hi}")
        checked(function(self._range, lo, hi - lo, stream.cuda_stream))

    def commit(self, lo, hi):
        """Gives memory, with undefined contents, to all granules that overlap the bytes from `lo` to `hi`; those with
        memory stay as they are. Without enough memory it raises cualloc.OutOfMemory, which states how much is missing,
        and changes nothing."""
        self._call(LIBRARY.cualloc_range_commit, lo, hi)

    def decommit(self, lo, hi):
        """Takes the memory of all granules inside the bytes from `lo` to `hi`. It serves other requests once the work
        of the current stream so far has ended, and that of the streams given to `record`."""
        self._call(LIBRARY.cualloc_range_decommit, lo, hi)

    def record(self, lo, hi, stream):
        """Records that another stream uses the granules that overlap the bytes from `lo` to `hi`, until they are
        decommitted."""
        self._call(LIBRARY.cualloc_range_record, lo, hi, stream)

    @property
    def committed(self):
        """The bytes of committed memory, over all stripes."""
        return self._stats().committed

    def map(self):
        """Returns for each granule of a stripe whether it is committed."""
        count = self.nbytes // self._stats().granule
        words = (ctypes.c_uint64 * math.ceil(count / 64))()
        checked(LIBRARY.cualloc_range_map(self._range, words, len(words)))
        return [bool(words[at // 64] >> at % 64 & 1) for at in range(count)]

    def close(self):
        """Takes all memory, as `decommit` does, and returns the addresses: `tensor` must not be used any more."""
        if self._range is not None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            checked(LIBRARY.cualloc_range_destroy(self._range, stream))
            self._range = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
