"""The package beside a real PyTorch that is built with CUDA, of whichever version, without a GPU:

    real_torch.py subclass|pluggable|refused

What is bound to the loaded libraries is tried, the error that is thrown among it; memory needs a GPU (gpu_edges.py).
`refused` puts libraries that do not fit in the place of one that was built with the package."""

import ctypes
import os
import sys
import tempfile
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


def altered(folder, change):
    """A folder with the header of PyTorch's class, changed."""
    name = "c10/cuda/CUDACachingAllocator.h"
    with open(os.path.join(os.path.dirname(torch.__file__), "include", name), encoding="utf-8") as file:
        text = file.read()
    place = os.path.join(folder, name)
    os.makedirs(os.path.dirname(place))
    with open(place, "w", encoding="utf-8") as file:
        file.write(change(text))
    assert change(text) != text
    return folder


def libraries_that_do_not_fit_are_refused():
    from cualloc import _shim

    first, last = "virtual void* raw_alloc(size_t nbytes) = 0;", "virtual void raw_delete(void* ptr) = 0;"
    changes = {
        "expected a table of": lambda text: text.replace(first, first + " virtual void added() {}", 1),
        "expected the virtual function raw_": lambda text: text.replace(last, "", 1).replace(first, last + first, 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
        built = os.path.join(folder, "built.so")
        _shim._built = lambda: built
        with open(built, "w", encoding="utf-8") as file:
            file.write("no library")
        paths = {"file too short": built}
        for number, (words, change) in enumerate(changes.items()):
            paths[words] = os.path.join(folder, f"{number}.so")
            os.environ["CXX"] = f"g++ -O0 -I{altered(os.path.join(folder, str(number)), change)}"
            _shim.build(_shim._SOURCE, paths[words], _shim._LIBRARY)
        del os.environ["CXX"]
        for words, built in paths.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                assert _shim.load()._name != built
            assert len(said) == 1 and words in str(said[0].message), [str(one.message) for one in said]
        # The one that was compiled instead fits.
        (built,) = (os.path.join(_shim._cache(), name) for name in os.listdir(_shim._cache()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _shim.load()._name == built


def failed_compilations_are_remembered():
    from cualloc import _shim

    def unavailable():
        try:
            _shim.load()
        except _shim.Unavailable as error:
            return str(error)
        raise AssertionError("a compiler that fails compiled the library")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
        compiler, count = os.path.join(folder, "c++"), os.path.join(folder, "count")
        with open(compiler, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\necho >> {count}\necho 'c.cpp:1: error: no such thing' >&2\nexit 1\n")
        os.chmod(compiler, 0o755)
        os.environ["CXX"] = compiler
        texts = [unavailable() for _ in range(3)]
        assert all("error: no such thing" in text for text in texts), texts
        assert "stored in" not in texts[0] and "stored in" in texts[1] == texts[2], texts
        assert os.path.getsize(count) == 1
        # Another command is another compilation.
        os.environ["CXX"] = f"{compiler} -O1"
        assert "stored in" not in unavailable() and os.path.getsize(count) == 2


if sys.argv[1] == "refused":
    failed_compilations_are_remembered()
    libraries_that_do_not_fit_are_refused()
    print("well")
    sys.exit()
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
