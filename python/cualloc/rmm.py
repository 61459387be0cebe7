"""cualloc as the memory resource of RMM, for RAPIDS in Python.

    import cualloc.rmm

    cualloc.rmm.install()

Each call takes the interpreter's lock, as RMM's callbacks do: programs in C++ use `cualloc_rmm.hpp`.
"""

from cualloc import _library

try:
    import rmm
except ModuleNotFoundError as error:
    raise _library.not_installed(error, "rmm", "RMM") from None


def _handle(stream):
    """The handle of RMM's stream, a number."""
    return _library.stream_number(stream.__cuda_stream__()[1])


def resource(device=0):
    """A memory resource over a device's shared allocator. Keep it for as long as memory of it is used, as RMM says of all
    of them."""
    allocator = _library.allocator(device)
    free_on = _library.LIBRARY.cualloc_free_on

    def allocate(bytes, stream):
        # RMM has no memory of nothing, but an address for it.
        return _library.allocate(device, bytes, _handle(stream)) if bytes else 0

    def deallocate(address, bytes, stream):
        if address:
            _library.give_back(free_on, allocator, _library.number(address, "an address"), _handle(stream))

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


def install(limit=None, config=None, devices=(0,)):
    """Makes cualloc the resource of all memory that RMM asks for on these devices from now on. `limit` and `config` are
    those of `cualloc.torch.install`, and are for all libraries together."""
    _library.configure(limit, config)
    for device in devices:
        rmm.mr.set_per_device_resource(device, resource(device))
