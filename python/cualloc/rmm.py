"""cualloc as the memory resource of RMM, for RAPIDS in Python.

    import cualloc.rmm

    cualloc.rmm.install()

Each call takes the interpreter's lock, as RMM's callbacks do: C++ programs should use `cualloc_rmm.hpp`.
"""

from cualloc import _library

try:
    import rmm
except ModuleNotFoundError as error:
    raise _library.not_installed(error, "rmm", "RMM") from None


def _handle(stream):
    """Returns the handle of RMM's stream as a number."""
    return _library.stream_number(stream.__cuda_stream__()[1])


def resource(device=0):
    """Returns a memory resource over a device's shared allocator. Keep it as long as its memory is in use, as RMM
    requires of all resources."""
    allocator = _library.allocator(device)
    free_on = _library.LIBRARY.cualloc_free_on

    def allocate(bytes, stream):
        # RMM allows allocations of 0 bytes; their address is 0.
        return _library.allocate(device, bytes, _handle(stream)) if bytes else 0

    def deallocate(address, bytes, stream):
        if address:
            _library.give_back(free_on, allocator, _library.number(address, "an address"), _handle(stream))

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


def install(limit=None, config=None, devices=(0,)):
    """Makes cualloc the resource for everything that RMM allocates on these devices from now on. `limit` and `config`
    are those of `cualloc.torch.install`, and hold for all libraries together."""
    _library.configure(limit, config)
    for device in devices:
        rmm.mr.set_per_device_resource(device, resource(device))
