"""How long PyTorch is in the allocator, where there is a compiler."""

import ctypes
import os
import shutil
import subprocess
import tempfile


def install(**settings):
    """cualloc.torch.install() with functions between that take their time. A library with `timed_spent` (nanoseconds) and
    `timed_calls`; none where there is no g++, and then nothing is between."""
    import torch

    import cualloc.torch
    from cualloc import _library

    if not shutil.which("g++"):
        cualloc.torch.install(**settings)
        return None
    # The parts that it is linked with are loaded already.
    cualloc.torch._companion()
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "timed.cpp")
    with tempfile.TemporaryDirectory() as folder:
        built = os.path.join(folder, "timed.so")
        parts = [source, cualloc.torch._COMPANION, _library.PATH]
        subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *parts, "-o", built], check=True)
        original = torch.cuda.memory.CUDAPluggableAllocator
        torch.cuda.memory.CUDAPluggableAllocator = lambda *_: original(built, "timed_alloc", "timed_free")
        try:
            cualloc.torch.install(**settings)
        finally:
            torch.cuda.memory.CUDAPluggableAllocator = original
        library = ctypes.CDLL(built)
    for name in ("timed_spent", "timed_calls"):
        getattr(library, name).restype = ctypes.c_uint64
    return library
