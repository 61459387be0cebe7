"""Flags of libraries: attributes that call a function of the C++ part, which they know from their beginning."""

import types

from torch import _C


class ContextProp:
    def __init__(self, getter, setter):
        self.getter, self.setter = getter, setter

    def __get__(self, module, kind):
        return self.getter()

    def __set__(self, module, value):
        self.setter(value)


class CudnnModule(types.ModuleType):
    benchmark = ContextProp(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark)


cudnn = CudnnModule("torch.backends.cudnn")
