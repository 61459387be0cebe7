"""The structures of DLPack, Python capsules that hold them, and element types."""

import ctypes
from ctypes import PYFUNCTYPE, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object

from cualloc._library import LIBRARY, checked

CPU, CUDA = 1, 2
# Memory that CUDA moves between the host and devices is accessible from all of them.
_MANAGED = 13
READ_ONLY, _LEGACY_FORM = 1, 1 << 63
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {_LEGACY: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}
for _name in (*_USED, *_USED.values()):
    # Capsules refer to the bytes as long as they live, which may be longer than this module.
    ctypes.pythonapi.Py_IncRef(py_object(_name))

# By name: the type in NumPy's notation (None: NumPy has none), DLPack's code, and the bits of an element.
TYPES = {
    "bool": ("|b1", 6, 8),
    **{f"int{bits}": (f"{'<|'[bits == 8]}i{bits // 8}", 0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"{'<|'[bits == 8]}u{bits // 8}", 1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (f"<f{bits // 8}", 2, bits) for bits in (16, 32, 64)},
    **{f"complex{bits}": (f"<c{bits // 8}", 5, bits) for bits in (64, 128)},
    "bfloat16": (None, 4, 16),
    "float8_e4m3fn": (None, 10, 8),
    "float8_e5m2": (None, 12, 8),
}


def type_name(dtype):
    """Returns the name of an element type: of a name, a type in NumPy's notation, or a type of NumPy or PyTorch."""
    name = str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]
    for known, (text, _, _) in TYPES.items():
        if name == known or text is not None and name.lstrip("<|=") == text[1:]:
            return known
    raise TypeError(f"expected an element type among {', '.join(TYPES)}, found {dtype!r}")


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]
    flags = 0


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


# Prototypes of our own, since those of ctypes.pythonapi are shared by all modules of the process.
new_capsule = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_is_valid = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))


def address_of(function):
    """Returns the address of a function of a library."""
    return ctypes.cast(function, c_void_p).value


# A destructor in the library: one in Python would replace an exception that is pending when a capsule is collected.
_DESTRUCTOR = LIBRARY.cualloc_dlpack_capsule_destructor(address_of(_is_valid), address_of(_pointer))


def exported(owner, address, device, name, shape, flags, versioned):
    """Returns a capsule with a tensor of an owner's memory."""
    _, code, bits = TYPES[name]
    sizes = (c_int64 * len(shape))(*shape)
    steps = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        steps[at - 1] = steps[at] * max(shape[at], 1)
    # Consumers of the first versions of DLPack 1 expect strides.
    strides = (c_int64 * len(shape))(*steps)
    tensor = Tensor(address, CUDA, device, len(shape), code, bits, 1, sizes, strides, 0)
    made = c_void_p()
    flags = flags if versioned else _LEGACY_FORM
    checked(LIBRARY.cualloc_dlpack_export(owner, ctypes.byref(tensor), flags, ctypes.byref(made)))
    return new_capsule(made.value, _VERSIONED if versioned else _LEGACY, _DESTRUCTOR)


class Import:
    """A tensor of another library in device memory, contiguous. The capsule owns it until `take`."""

    def __init__(self, capsule):
        if _is_valid(capsule, _VERSIONED):
            self._name, form = _VERSIONED, _ManagedVersioned
        elif _is_valid(capsule, _LEGACY):
            self._name, form = _LEGACY, Managed
        else:
            raise BufferError("expected a DLPack capsule that no library has taken over")
        self._capsule, self.managed = capsule, _pointer(capsule, self._name)
        managed = form.from_address(self.managed)
        if form is _ManagedVersioned and managed.major != 1:
            raise BufferError(f"expected version 1 of DLPack, found version {managed.major}")
        tensor = managed.tensor
        if tensor.device_type not in (CUDA, _MANAGED):
            text = f"expected memory of a CUDA device, found DLPack's device type {tensor.device_type}"
            raise BufferError(f"{text}: copy memory of the host with Buffer.from_numpy")
        found = (tensor.code, tensor.bits)
        names = [name for name, (_, *known) in TYPES.items() if tuple(known) == found and tensor.lanes == 1]
        if not names:
            raise BufferError(f"expected a known element type, found code {found[0]}, {found[1]} bits, {tensor.lanes} lanes")
        self.dtype, self.device, self.deleter = names[0], tensor.device_id, managed.deleter
        self.shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.read_only = bool(managed.flags & READ_ONLY)
        step = 1
        for at in reversed(range(tensor.ndim if tensor.strides and 0 not in self.shape else 0)):
            if self.shape[at] != 1 and tensor.strides[at] != step:
                raise BufferError("expected a contiguous tensor, found strides: make a contiguous copy first")
            step *= self.shape[at]

    def take(self):
        """Takes the tensor over: its deleter must be called once from now on."""
        _rename(self._capsule, _USED[self._name])
