"""The package beside a real PyTorch that is built with CUDA, of whichever version, without a GPU:

    real_torch.py subclass|pluggable

What is bound to the loaded libraries is tried, the error that is thrown among it; memory needs a GPU (gpu_edges.py)."""

import ctypes
import sys
import warnings

import torch

import cualloc.torch as ours


def raises(words, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except RuntimeError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"{call} did not fail")


subclass = sys.argv[1] == "subclass"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ours.install(limit="1G", subclass=subclass)
    torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark == subclass
works = ours.capabilities()
assert works["out_of_memory"] == "torch.OutOfMemoryError" or any("RuntimeError" in str(one.message) for one in said)
assert works["installed"] and works["interface"] == sys.argv[1]
assert torch.cuda.get_allocator_backend() == ("cualloc" if subclass else "pluggable")
assert torch.cuda.memory_allocated(0) == torch.cuda.max_memory_reserved(0) == 0
ours.install(limit="1G")
raises("other settings", ours.install, limit="2G")
assert torch.cuda.memory_snapshot() == []
if not subclass or torch.cuda.is_available():
    torch.cuda.memory._record_memory_history()
    assert torch.cuda.memory._snapshot()["segments"] == []
    torch.cuda.memory._record_memory_history(None)
if hasattr(torch.cuda, "MemPool") and not subclass:
    raises("graph_pool_handle", torch.cuda.MemPool)
    raises("cudagraph_trees", torch._C._cuda_checkPoolLiveAllocations, 0, (0, 1), set())
torch.cuda.empty_cache()
# Through PyTorch to our function and back, as far as it goes where no driver is.
if not torch.cuda.is_available():
    alloc = ours._companion().cualloc_torch_alloc_or_throw
    alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    assert alloc(0, 0, None) is None
ours.check(0)
print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}: {works}")
print("well")
