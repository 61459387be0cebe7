"""cualloc as CuPy's allocator of GPU memory.

    import cualloc.cupy

    cualloc.cupy.install()

Arrays created from then on use memory of the current device's shared allocator, in the order of the stream that is
current at their creation. An array is also freed in the order of that stream, whenever it is collected, so a use by
another stream must be recorded: `record_stream(array, stream)`.
"""

import functools

from cualloc import _library

try:
    import cupy
except ModuleNotFoundError as error:
    raise _library.not_installed(error, "cupy", "CuPy") from None


class Block:
    """A block of GPU memory, freed with its last reference. `ptr` is its address, `device` the number of its device."""

    __slots__ = ("ptr", "device", "_allocator", "_free")

    def __init__(self, bytes, device, stream):
        self._free = None
        self.device = device
        self._allocator = _library.allocator(device)
        self.ptr = _library.allocate(device, bytes, stream)
        # Stored here so that it still exists during interpreter shutdown.
        self._free = functools.partial(_library.give_back, _library.LIBRARY.cualloc_free)

    def record_stream(self, stream):
        """Records that another stream, given by its handle (a number), uses the memory."""
        handle = _library.stream_number(stream)
        _library.checked(_library.LIBRARY.cualloc_record_stream(self._allocator, self.ptr, handle))

    def __del__(self):
        if self._free is not None:
            self._free(self._allocator, self.ptr)


def malloc(bytes):
    """Allocates bytes on the current device for the current stream: the allocation function for
    `cupy.cuda.set_allocator` and `cupy.cuda.using_allocator`."""
    device = cupy.cuda.device.get_device_id()
    if bytes == 0:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device), 0)
    try:
        block = Block(bytes, device, cupy.cuda.get_current_stream().ptr)
    except _library.OutOfMemory as error:
        figures = _library.stats(device)
        limit = 0 if figures.limit == _library.NO_LIMIT else figures.limit
        raise cupy.cuda.memory.OutOfMemoryError(bytes, figures.allocated.current, limit) from error
    memory = cupy.cuda.UnownedMemory(block.ptr, bytes, block, device)
    return cupy.cuda.MemoryPointer(memory, 0)


def install(limit=None, config=None):
    """Makes cualloc the allocator for everything that CuPy allocates from now on; existing arrays stay where they are.
    `limit` and `config` are those of `cualloc.torch.install`, and hold for PyTorch and CuPy together."""
    _library.configure(limit, config)
    cupy.cuda.set_allocator(malloc)


def record_stream(array, stream):
    """Records that a stream uses an array created for another stream. Once the array is freed, its memory is reused
    only after the work submitted to this stream before the free has completed. Arrays in other memory are ignored."""
    memory = array.data.mem
    if isinstance(owner := getattr(memory, "_owner", None), Block):
        owner.record_stream(stream.ptr)
