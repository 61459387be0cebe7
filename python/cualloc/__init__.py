"""cualloc, a caching GPU memory allocator, for Python libraries.

    import cualloc.torch; cualloc.torch.install()    PyTorch, before CUDA is used
    import cualloc.cupy;  cualloc.cupy.install()     CuPy
    import cualloc.rmm;   cualloc.rmm.install()      RAPIDS

    cualloc.Buffer(nbytes)                           bytes on a device, exchanged with NumPy and others

All of them share one allocator per device, so memory that one library has freed is available to the others.
"""

from cualloc._buffer import Buffer, from_dlpack
from cualloc._library import Error, OutOfMemory, configure
from cualloc._version import __version__

__all__ = ["Buffer", "Error", "OutOfMemory", "__version__", "configure", "from_dlpack"]
