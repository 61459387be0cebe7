import ctypes
from types import SimpleNamespace


def from_dlpack(capsule):
    """The address, the device and the shape of what a capsule has."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = get(capsule, b"dltensor")
    address, device = ctypes.c_uint64.from_address(at).value, ctypes.c_int32.from_address(at + 12).value
    ndim, shape = ctypes.c_int32.from_address(at + 16).value, ctypes.c_uint64.from_address(at + 24).value
    return SimpleNamespace(data_ptr=address, device=device, shape=tuple((ctypes.c_int64 * ndim).from_address(shape)))
