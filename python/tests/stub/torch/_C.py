"""What PyTorch's C++ part has of allocators, in Python: calls by address what it would call."""

import ctypes

_VOID, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class PoolId(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


_FUNCTIONS = {
    "alloc": ctypes.CFUNCTYPE(_VOID, _SIZE, _INT, _VOID),
    "free": ctypes.CFUNCTYPE(None, _VOID, _SIZE, _INT, _VOID),
    "set_init_fn": ctypes.CFUNCTYPE(None, _INT),
    "set_reset_fn": ctypes.CFUNCTYPE(None),
    "set_base_alloc_fn": ctypes.CFUNCTYPE(_VOID, _VOID, ctypes.POINTER(_SIZE)),
    "set_memory_fraction_fn": ctypes.CFUNCTYPE(None, ctypes.c_double, _INT),
    "set_record_stream_fn": ctypes.CFUNCTYPE(None, _VOID, _VOID),
    # An address, which C++ calls: it takes a std::function.
    "set_begin_allocate_to_pool": _VOID,
    "set_end_allocate_to_pool_fn": ctypes.CFUNCTYPE(None, _INT, PoolId),
    "set_release_pool": ctypes.CFUNCTYPE(None, _INT, PoolId),
}


class _CUDAPluggableAllocator:
    def __init__(self, alloc, free):
        self.functions = {"alloc": _FUNCTIONS["alloc"](alloc), "free": _FUNCTIONS["free"](free)}

    def __getattr__(self, name):
        if name not in _FUNCTIONS:
            raise AttributeError(name)

        def setter(address):
            self.functions[name] = _FUNCTIONS[name](address)
            if name == "set_init_fn":
                self.functions[name](0)

        return setter


current = None
initialized = False


def _cuda_customAllocator(alloc, free):
    return _CUDAPluggableAllocator(alloc, free)


def _cuda_changeCurrentAllocator(allocator):
    global current
    if initialized or current is not None:
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator


def _does_not(*_):
    raise RuntimeError("CUDAPluggableAllocator does not yet support this")


for _name in (
    *("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats"),
    *("_cuda_getMemoryFraction", "_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
    *("_accelerator_resetAccumulatedStats", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState"),
    *("_cuda_checkPoolLiveAllocations", "_cuda_memorySnapshot", "_cuda_record_memory_history"),
):
    globals()[_name] = _does_not


def _cuda_emptyCache():
    current.functions["set_reset_fn"]()


def _cuda_setMemoryFraction(fraction, device):
    current.functions["set_memory_fraction_fn"](fraction, device)


benchmark = False


def _get_cudnn_benchmark():
    return benchmark


def _set_cudnn_benchmark(on):
    global benchmark
    benchmark = on
