"""Bytes on a device, which NumPy, PyTorch, CuPy and other libraries exchange without copies, or copy."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from cualloc import _dlpack, _library
from cualloc._library import LIBRARY, checked, number

_LEGACY_STREAM = 1
_DELETE_BLOCK = _dlpack.address_of(LIBRARY.cualloc_torch_delete)
_CLOSE_IMPORT = _dlpack.address_of(LIBRARY.cualloc_share_close)


class _PyBuffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in ("shape", "strides", "suboffsets", "internal")),
    ]


_WRITABLE = 1
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


def _handle(stream):
    """Returns the handle of a stream: of a number, or of a stream of PyTorch, CuPy, RMM or cuda.core."""
    if stream is None:
        return _LEGACY_STREAM
    for name in ("__cuda_stream__", "cuda_stream", "ptr"):
        if (found := getattr(stream, name, None)) is not None:
            stream = found()[1] if callable(found) else found
            break
    return number(stream, "the handle of a stream") or _LEGACY_STREAM


class _Memory:
    """Memory that buffers and exported tensors own together: released with the last of them."""

    __slots__ = ("address", "nbytes", "device", "stream", "read_only", "owner", "_release")

    def __init__(self, address, nbytes, device, stream, release, data, read_only=False):
        made = ctypes.c_void_p()
        checked(LIBRARY.cualloc_owner_create(release, data, ctypes.byref(made)))
        self.address, self.nbytes, self.device = address, nbytes, device
        self.stream, self.read_only, self.owner = stream, read_only, made.value
        # Stored here so that it still exists while the interpreter ends.
        self._release = LIBRARY.cualloc_owner_release

    def __del__(self):
        if getattr(self, "_release", None) is not None:
            self._release(self.owner)


class Buffer:
    """Bytes in the memory of a device, from the allocator that all libraries of the process share.

    The contents are undefined at first. The memory is used in the order of `stream`: the handle of a stream as a
    number, or a stream of PyTorch, CuPy, RMM or cuda.core; None is the legacy default stream. Other streams must wait
    for that one, and their use must be recorded (`record_stream`); copies and `__dlpack__` do both.
    The memory is released with the buffer, its views, and the tensors that other libraries made of it by DLPack,
    whichever is last, and reused in the order of the streams. Without enough memory, cualloc.OutOfMemory (a
    MemoryError) has the allocator's report.

        with cualloc.Buffer(1 << 20) as buffer:
            buffer.copy_from(bytes(1 << 20))
            values = buffer.to_numpy("float32", (512, 512))
            tensor = torch.from_dlpack(buffer.view("float32", (512, 512)))
    """

    __slots__ = ("_memory", "_ptr", "_nbytes", "_dtype", "_shape", "__weakref__")

    def __init__(self, nbytes: int, device: int = 0, stream: Any = None) -> None:
        stream, device = _handle(stream), _library.device_number(device)
        LIBRARY.cualloc_torch_retry_frees()
        nbytes = number(nbytes, "a number of bytes", None)
        address = _library.allocate(device, nbytes, stream) if nbytes else 0
        self._over(_Memory(address, nbytes, device, stream, _DELETE_BLOCK, address))

    def _over(self, memory, dtype="uint8", shape=None, offset=0):
        self._memory, self._ptr, self._dtype = memory, memory.address + offset, dtype
        self._shape = (memory.nbytes,) if shape is None else shape
        self._nbytes = math.prod(self._shape) * (_dlpack.TYPES[dtype][2] // 8)
        return self

    @classmethod
    def _new(cls, *arguments):
        return object.__new__(cls)._over(*arguments)

    def _live(self):
        if self._memory is None:
            raise _library.Error(_library.NOT_LIVE, "the buffer was freed")
        return self._memory

    @property
    def ptr(self) -> int:
        """The address of the first byte."""
        self._live()
        return self._ptr

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self._nbytes

    @property
    def device(self) -> int:
        """The number of the device."""
        return self._live().device

    @property
    def stream(self) -> int:
        """The handle of the stream in whose order the memory is used."""
        return self._live().stream

    @property
    def dtype(self) -> str:
        """The name of the element type, such as "float32"."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions, in elements."""
        return self._shape

    @property
    def readonly(self) -> bool:
        """Whether the library that the memory comes from forbids writes."""
        return self._live().read_only

    def __repr__(self) -> str:
        state = "freed" if self._memory is None else f"{self._ptr:#x} on device {self._memory.device}"
        return f"<cualloc.Buffer {state}: {self._dtype} {self._shape}, {self._nbytes} bytes>"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle or copy a buffer of device memory: `share` gives a token for another process")

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self.free()

    def free(self, stream: Any = None) -> None:
        """Ends this buffer's use of the memory; `stream` is that of the last use, if it is not the buffer's own. Views
        and tensors of other libraries keep the memory."""
        self._live()
        if stream is not None:
            self.record_stream(stream)
        self._memory = None

    def record_stream(self, stream: Any) -> None:
        """Records that another stream uses the memory: once released, it is reused only after the work submitted to
        that stream before the release has completed."""
        memory, stream = self._live(), _handle(stream)
        if stream != memory.stream:
            checked(LIBRARY.cualloc_torch_record_stream(self._ptr, stream))

    def _begin_use(self, stream):
        """Orders a stream (None: the buffer's own) after the buffer's own, and records the use. Returns the handle."""
        memory = self._live()
        stream = memory.stream if stream is None else _handle(stream)
        if stream != memory.stream:
            checked(LIBRARY.cualloc_stream_wait(_library.allocator(memory.device), stream, memory.stream))
            self.record_stream(stream)
        return stream

    def view(self, dtype: Any = None, shape: int | tuple[int, ...] | None = None, offset: int = 0) -> Buffer:
        """Returns the same memory, from `offset` bytes on, with another element type or shape. Without a shape it is
        one dimension of all elements that the bytes have room for."""
        memory = self._live()
        offset, name = number(offset, "an offset"), self._dtype if dtype is None else _dlpack.type_name(dtype)
        size, room = _dlpack.TYPES[name][2] // 8, self._nbytes - offset
        if shape is None:
            if room < 0 or room % size:
                raise ValueError(f"expected a multiple of the {size} bytes of {name}, found {room} bytes")
            shape = room // size
        shape = tuple(number(part, "a size") for part in (shape if isinstance(shape, (tuple, list)) else (shape,)))
        if math.prod(shape) * size > room:
            raise ValueError(f"expected a view of at most {room} bytes, found {math.prod(shape) * size} bytes")
        return self._new(memory, name, shape, self._ptr - memory.address + offset)

    # ---- copies ----------------------------------------------------------------------------------------------------

    def _copy(self, other, flags, stream):
        """Copies from an object with the buffer protocol, or, with _WRITABLE, to one, and waits."""
        memory, there = self._live(), _PyBuffer()
        _get_buffer(other, ctypes.byref(there), flags)
        try:
            if there.len != self._nbytes:
                raise ValueError(f"expected {self._nbytes} bytes, found {there.len} bytes")
            stream, allocator = self._begin_use(stream), _library.allocator(memory.device)
            ways = (self._ptr, there.buf) if flags != _WRITABLE else (there.buf, self._ptr)
            if self._nbytes:
                checked(LIBRARY.cualloc_copy(allocator, *ways, self._nbytes, stream))
                waited = LIBRARY.cualloc_stream_synchronize(allocator, stream)
                if waited != _library.OK:
                    # The copy may not be complete, so the memory of the host stays as long as the process.
                    kept, there = there, None
                    _library.kept.append(kept)
                checked(waited)
        finally:
            if there is not None:
                _release_buffer(ctypes.byref(there))

    def copy_from(self, source: Any, stream: Any = None) -> None:
        """Copies as many bytes from the host, from a contiguous object with the buffer protocol such as bytes or an
        array of NumPy, and returns when they are on the device; or from another buffer, and returns before. Without
        `stream` the copy is on the buffer's own."""
        if self.readonly:
            raise BufferError("cannot copy to the buffer: its memory is read-only")
        if not isinstance(source, Buffer):
            return self._copy(source, 0, stream)
        if (source.nbytes, source.device) != (self._nbytes, self.device):
            found = f"found {source.nbytes} on device {source.device}"
            raise ValueError(f"expected {self._nbytes} bytes on device {self.device}, {found}")
        stream, memory = self._begin_use(stream), source._live()
        source._begin_use(stream)
        if self._nbytes:
            allocator = _library.allocator(self.device)
            checked(LIBRARY.cualloc_copy(allocator, self._ptr, source.ptr, self._nbytes, stream))
            # Later work on the two buffers comes after the copy.
            for later in {self.stream, memory.stream} - {stream}:
                checked(LIBRARY.cualloc_stream_wait(allocator, later, stream))

    def copy_to(self, target: Any, stream: Any = None) -> None:
        """Copies all bytes to the host, to a contiguous writable object with the buffer protocol, and returns when they
        are there. Without `stream` the copy is on the buffer's own."""
        self._copy(target, _WRITABLE, stream)

    def to_numpy(self, dtype: Any = None, shape: int | tuple[int, ...] | None = None, stream: Any = None) -> Any:
        """Returns a copy of the contents as an array of NumPy; `dtype` and `shape` are those of `view`."""
        import numpy

        view = self if dtype is None and shape is None else self.view(dtype, shape)
        if view.dtype.startswith(("bfloat", "float8")):
            import ml_dtypes  # noqa: F401  NumPy finds these types by name once it is imported.
        array = numpy.empty(view.shape, view.dtype)
        view.copy_to(array, stream)
        return array

    @classmethod
    def from_numpy(cls, array: Any, device: int = 0, stream: Any = None) -> Buffer:
        """Returns a new buffer with a copy of an array of NumPy, or of what NumPy makes an array of."""
        import numpy

        array = numpy.asarray(array, order="C")
        name = _dlpack.type_name(array.dtype)
        buffer = cls(array.nbytes, device, stream).view(name, array.shape)
        buffer.copy_from(array)
        return buffer

    # ---- exchange --------------------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's interface. The consumer keeps the buffer alive; uses by streams other than the buffer's
        must be recorded."""
        memory, text = self._live(), _dlpack.TYPES[self._dtype][0]
        if text is None:
            raise AttributeError(f"the CUDA array interface has no type {self._dtype}")
        return {
            "shape": self._shape,
            "typestr": text,
            "data": (self._ptr if self._nbytes else 0, memory.read_only),
            "version": 3,
            "strides": None,
            "stream": memory.stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """The type of the device in DLPack's numbers, and its number."""
        return (_dlpack.CUDA, self._live().device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports the memory as the array API standard describes. The consumer's stream (None and 1: the legacy default
        stream, 2: the thread's own) waits for the buffer's, and its use is recorded; with -1 the consumer does both. A
        copy on the host can be requested by `dl_device`."""
        memory = self._live()
        if dl_device is not None and (wanted := tuple(map(int, dl_device))) != self.__dlpack_device__():
            if wanted != (_dlpack.CPU, 0) or copy is False:
                raise BufferError(f"cannot export memory of device {memory.device} as memory of DLPack's device {wanted}")
            return self.to_numpy().__dlpack__()
        if stream == 0:
            raise ValueError("expected 1 or 2 for a default stream, found 0")
        if copy:
            copied = type(self)(self._nbytes, memory.device, memory.stream)
            copied.copy_from(self.view("uint8"))
            return copied.view(self._dtype, self._shape).__dlpack__(stream=stream, max_version=max_version)
        versioned = max_version is not None and max_version[0] >= 1
        if memory.read_only and not versioned:
            raise BufferError("cannot export read-only memory to a consumer of DLPack before version 1")
        if stream != -1:
            self._begin_use(_handle(stream))
        flags = _dlpack.READ_ONLY if memory.read_only else 0
        shape = (self._ptr if self._nbytes else None, memory.device, self._dtype, self._shape)
        return _dlpack.exported(memory.owner, *shape, flags, versioned)

    @classmethod
    def from_dlpack(cls, source: Any, stream: Any = None) -> Buffer:
        """Returns the memory of another library's array or tensor, without a copy: contiguous, in the memory of a
        device. `stream` is the buffer's own, which waits for the library's. The library keeps its memory until the
        buffer, its views and its tensors are released."""
        kind, _ = source.__dlpack_device__()
        stream = _handle(stream)
        if int(kind) == _dlpack.CPU:
            raise BufferError("expected memory of a CUDA device, found memory of the host: copy it with Buffer.from_numpy")
        try:
            capsule = source.__dlpack__(stream=stream, max_version=(1, 1))
        except TypeError:
            capsule = source.__dlpack__(stream=stream)
        found = _dlpack.Import(capsule)
        nbytes = math.prod(found.shape) * (_dlpack.TYPES[found.dtype][2] // 8)
        release = (found.deleter, found.managed) if found.deleter else (_DELETE_BLOCK, None)
        memory = _Memory(found.address, nbytes, found.device, stream, *release, found.read_only)
        found.take()
        return cls._new(memory, found.dtype, found.shape)

    # ---- processes -------------------------------------------------------------------------------------------------

    def share(self) -> str:
        """Returns a token, a short text, by which other processes of this machine and user open the buffer
        (`open_shared`) as long as it is live. Waits for the work of the buffer's stream."""
        memory, token, offset = self._live(), ctypes.create_string_buffer(256), ctypes.c_uint64()
        allocator = _library.allocator(memory.device)
        checked(LIBRARY.cualloc_stream_synchronize(allocator, memory.stream))
        checked(LIBRARY.cualloc_share(allocator, self._ptr, 0, token, len(token), ctypes.byref(offset), None))
        if offset.value:
            raise ValueError(f"cannot share a view: it begins {offset.value} bytes after its buffer")
        return token.value.decode()

    @classmethod
    def open_shared(cls, token: str, device: int = 0, stream: Any = None) -> Buffer:
        """Returns the memory of a token of `share`: all bytes of the block, which may be more than were requested. Its
        release waits for all work of the device's context."""
        device, stream = _library.device_number(device), _handle(stream)
        made, address, nbytes = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        token, results = _library.without_null(token.encode()), map(ctypes.byref, (made, address, nbytes))
        checked(LIBRARY.cualloc_share_open(_library.allocator(device), token, *results))
        return cls._new(_Memory(address.value, nbytes.value, device, stream, _CLOSE_IMPORT, made.value))


def from_dlpack(source: Any, stream: Any = None) -> Buffer:
    """Buffer.from_dlpack."""
    return Buffer.from_dlpack(source, stream)
