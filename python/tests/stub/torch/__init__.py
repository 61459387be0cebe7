"""A torch with as much of its CUDA side as an allocator meets. Tensors are addresses."""

__version__ = "0.stub"

from torch import _C, backends, cuda


class device:
    def __init__(self, name):
        self.type, _, index = str(name).partition(":")
        self.index = int(index) if index else None


OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
