"""cualloc, a caching allocator of GPU memory, for Python's libraries.

    import cualloc.torch; cualloc.torch.install()    PyTorch, before CUDA is used
    import cualloc.cupy;  cualloc.cupy.install()     CuPy
    import cualloc.rmm;   cualloc.rmm.install()      RAPIDS

All of them share one allocator for each device, so memory that one of them has freed serves the others.
"""

from cualloc._library import Error, OutOfMemory
from cualloc._version import __version__

__all__ = ["Error", "OutOfMemory", "__version__"]
