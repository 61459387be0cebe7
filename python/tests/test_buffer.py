"""`cualloc.Buffer` without a GPU, over the simulated driver; each test is a process of its own, as in test_package.py.

What needs NumPy is skipped where it is not installed.
"""

import copy
import ctypes
import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import unittest
from types import SimpleNamespace

import test_package
from test_package import driver, raises, stream

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"


def numpy():
    try:
        import numpy
    except ModuleNotFoundError:
        print("SKIPPED: NumPy is not installed")
        sys.exit(0)
    return numpy


def live(device=0):
    """The requested bytes of live blocks."""
    from cualloc import _library

    gc.collect()
    return _library.stats(device).requested.current


def check():
    from cualloc import _library

    _library.check(0)


class Other:
    """A library's tensor: hands on the capsules of a buffer, and counts."""

    def __init__(self, buffer, **fixed):
        self.buffer, self.fixed, self.asked = buffer, fixed, []

    def __dlpack_device__(self):
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self.buffer.__dlpack__(**dict(asked, **self.fixed))


class Old(Other):
    """A library from before DLPack 1."""

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        return self.buffer.__dlpack__(stream=stream)


def bytes_go_to_the_device_and_back():
    import cualloc
    from cualloc import _library

    driver()
    with cualloc.Buffer(1000) as buffer:
        assert (buffer.nbytes, buffer.device, buffer.dtype, buffer.shape) == (1000, 0, "uint8", (1000,))
        assert buffer.ptr % 512 == 0 and buffer.stream == 1 and not buffer.readonly and live() == 1000
        sent, back = bytes(range(250)) * 4, bytearray(1000)
        for source in (sent, bytearray(sent), memoryview(sent)):
            buffer.copy_from(source)
            buffer.copy_to(back)
            assert back == sent
            back[:] = bytes(1000)
        raises(ValueError, "expected 1000 bytes, found 999 bytes", buffer.copy_from, bytes(999))
        raises(ValueError, "expected 1000 bytes, found 1001 bytes", buffer.copy_to, bytearray(1001))
        raises(BufferError, "not writable", buffer.copy_to, bytes(1000))
        raises(TypeError, "bytes-like", buffer.copy_from, 5)
        raises(BufferError, "not C-contiguous", buffer.copy_from, memoryview(bytes(2000))[::2])
        back += b"not exported any more"
        other = cualloc.Buffer(1000)
        other.copy_from(buffer)
        other.copy_to(memoryview(back)[:1000])
        assert back[:1000] == sent
        raises(ValueError, "found 10 on device 0", other.copy_from, cualloc.Buffer(10))
        second = cualloc.Buffer(1000, 1)
        raises(ValueError, "found 1000 on device 1", other.copy_from, second)
        # Device 0 stays current.
        second.copy_from(sent)
        second.copy_to(memoryview(back)[:1000])
        assert back[:1000] == sent and live(1) == 1000 and cualloc.from_dlpack(second).device == 1
        other.free()
        assert "on device 0: uint8 (1000,), 1000 bytes" in repr(buffer)
    assert live() == 0 and "freed" in repr(buffer)
    empty = cualloc.Buffer(0)
    empty.copy_from(b"")
    assert empty.ptr == 0 == empty.nbytes and cualloc.from_dlpack(empty).shape == (0,)
    check()


def a_buffer_is_freed_once():
    import cualloc
    from cualloc import _library

    library = driver()
    buffer = cualloc.Buffer(5000)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        raises(TypeError, "cannot pickle", copied, buffer)
    buffer.free()
    uses = ("ptr", "device", "stream", "readonly", "__cuda_array_interface__", "__dlpack_device__", "__dlpack__", "free")
    calls = [lambda name=name: getattr(buffer, name)() for name in uses]
    calls += [lambda: buffer.copy_from(bytes(5000)), lambda: buffer.copy_to(bytearray(5000)), buffer.view, buffer.share]
    calls += [lambda: cualloc.Buffer(5000).copy_from(buffer), lambda: buffer.record_stream(None)]
    for call in calls:
        assert raises(cualloc.Error, "the buffer was freed", call).code == _library.NOT_LIVE
    assert live() == 0
    # The last use of a stream that is destroyed afterwards.
    last = stream(library)
    buffer = cualloc.Buffer(5 << 20)
    buffer.free(last)
    assert library.cuStreamDestroy_v2(ctypes.c_void_p(last)) == 0
    assert live() == 0
    held = cualloc.Buffer(3 << 20, stream=stream(library))
    raises(ValueError, "negative", held.free, -5)
    assert held.nbytes == 3 << 20 and live() == 3 << 20, "a free that fails changes nothing"
    check()


def views_share_the_memory():
    import cualloc

    driver()
    buffer = cualloc.Buffer(96)
    buffer.copy_from(bytes(range(96)))
    view = buffer.view("float32", (2, 3), 16)
    assert (view.shape, view.dtype, view.nbytes, view.ptr) == ((2, 3), "float32", 24, buffer.ptr + 16)
    assert buffer.view("<f8").shape == (12,) and buffer.view("int16", 7).shape == (7,)
    assert view.view("uint8").shape == (24,) and view.view(shape=6).dtype == "float32"
    buffer.free()
    back = bytearray(24)
    view.copy_to(back)
    assert back == bytes(range(16, 40)) and live() == 96
    raises(ValueError, "at most 24 bytes, found 28 bytes", view.view, "float32", 7)
    raises(ValueError, "multiple of the 16 bytes of complex128, found 24", view.view, "complex128")
    raises(ValueError, "negative", view.view, "uint8", (-1, 2))
    raises(ValueError, "found -1 bytes", view.view, "uint8", None, 25)
    raises(TypeError, "found 'float7'", view.view, "float7")
    view.free()
    assert live() == 0
    check()


def types_have_the_names_of_numpy_and_pytorch():
    from cualloc import _dlpack

    class float64:
        pass

    for given, name in [
        ("float32", "float32"), ("<f4", "float32"), ("f4", "float32"), ("|u1", "uint8"), ("|b1", "bool"),
        ("torch.bfloat16", "bfloat16"), (float64, "float64"), (bool, "bool"), ("<c16", "complex128"),
    ]:  # fmt: skip
        assert _dlpack.type_name(given) == name
    for given in (">f4", "float", int, "O", "", None, "[('a', '<i4')]"):
        raises(TypeError, "expected an element type", _dlpack.type_name, given)


def out_of_memory_has_the_report():
    import cualloc
    from cualloc import _library

    driver()
    _library.configure(limit="64M")
    kept = cualloc.Buffer(40 << 20)
    error = raises(MemoryError, "Raise the limit by", cualloc.Buffer, 50 << 20)
    assert isinstance(error, cualloc.OutOfMemory) and error.code == _library.OUT_OF_MEMORY
    assert "holder" in str(error), error
    raises(MemoryError, "more than any device has", cualloc.Buffer, 1 << 70)
    raises(ValueError, "negative", cualloc.Buffer, -1)
    raises(TypeError, "float", cualloc.Buffer, 1.5)
    raises(cualloc.Error, "no device 2", cualloc.Buffer, 1, 2)
    assert live() == 40 << 20
    kept.free()
    assert cualloc.Buffer(50 << 20).nbytes == 50 << 20
    check()


def streams_are_numbers_or_objects_of_other_libraries():
    import cualloc

    library = driver()
    made = stream(library)
    objects = (
        SimpleNamespace(cuda_stream=made),
        SimpleNamespace(ptr=made),
        SimpleNamespace(__cuda_stream__=lambda: (0, made)),
    )
    for one in (made, *objects):
        buffer = cualloc.Buffer(1 << 20, stream=one)
        assert buffer.stream == made
        buffer.copy_from(bytes(1 << 20), stream=one)
    for one in (None, 0, 1, SimpleNamespace(cuda_stream=0)):
        assert cualloc.Buffer(10, stream=one).stream == 1
    raises(TypeError, "str", cualloc.Buffer, 10, 0, "stream")
    raises(ValueError, "negative", cualloc.Buffer, 10, 0, -1)
    # A copy on another stream comes after the work of the buffer's own.
    other = stream(library)
    buffer = cualloc.Buffer(1 << 20, stream=made)
    assert library.cuMemsetD8Async(ctypes.c_uint64(buffer.ptr), 7, ctypes.c_size_t(1 << 20), ctypes.c_void_p(made)) == 0
    back = bytearray(1 << 20)
    buffer.copy_to(back, stream=other)
    assert back == b"\7" * (1 << 20)
    second = cualloc.Buffer(1 << 20, stream=other)
    second.copy_from(buffer)
    # The copy is complete before later work of the source.
    assert library.cuMemsetD8Async(ctypes.c_uint64(buffer.ptr), 9, ctypes.c_size_t(1 << 20), ctypes.c_void_p(made)) == 0
    second.copy_to(back)
    assert back == b"\7" * (1 << 20)
    check()


def memory_of_another_allocator_is_copied_on_its_own_stream():
    import cualloc
    from cualloc import _buffer, _dlpack, _library

    library, bytes_ = driver(), 1 << 20
    address, made = ctypes.c_uint64(), stream(library)
    assert library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(bytes_)) == 0
    nothing = _dlpack.address_of(_library.LIBRARY.cualloc_torch_delete)
    memory = _buffer._Memory(address.value, bytes_, 0, made, nothing, None)
    buffer = cualloc.Buffer._new(memory)
    buffer.copy_from(b"\3" * bytes_)
    back = bytearray(bytes_)
    buffer.copy_to(back)
    assert back == b"\3" * bytes_
    back = bytearray(bytes_)
    buffer.copy_to(back, stream(library))
    assert back == b"\3" * bytes_
    del buffer, memory
    assert library.cuMemFree_v2(address) == 0
    check()


def tensors_of_other_libraries_keep_the_memory():
    import cualloc

    library = driver()
    mine, theirs = stream(library), stream(library)
    for kind, fixed in ((Other, {}), (Old, {}), (Other, {"stream": -1}), (Other, {"max_version": None})):
        buffer = cualloc.Buffer(4096, stream=mine).view("float32", (16, 64))
        buffer.copy_from(bytes(range(256)) * 16)
        source = kind(buffer, **fixed)
        taken = cualloc.from_dlpack(source, theirs)
        assert source.asked in ([theirs], [{"stream": theirs, "max_version": (1, 1)}]), source.asked
        assert (taken.ptr, taken.shape, taken.dtype) == (buffer.ptr, (16, 64), "float32")
        assert taken.stream == theirs and not taken.readonly
        # And on from there.
        again = cualloc.from_dlpack(taken.view("uint8"), mine)
        for one in (buffer, taken):
            one.free()
        assert live() == 4096
        back = bytearray(4096)
        again.copy_to(back)
        assert back == bytes(range(256)) * 16
        del again, one, buffer, source, taken
        assert live() == 0
    check()


def capsules_without_a_consumer_release_their_tensors():
    import cualloc

    library = driver()
    for version in (None, (1, 0), (1, 1), (2, 0), (0, 8)):
        buffer = cualloc.Buffer(4096)
        capsule = buffer.__dlpack__(stream=-1, max_version=version)
        assert f'"{(VERSIONED if version and version[0] else LEGACY).decode()}"' in repr(capsule), capsule
        buffer.free()
        assert live() == 4096
        del capsule
        assert live() == 0
    # The consumer's stream is destroyed first.
    theirs = stream(library)
    buffer = cualloc.Buffer(5 << 20)
    capsule = buffer.__dlpack__(stream=theirs)
    assert library.cuStreamDestroy_v2(ctypes.c_void_p(theirs)) == 0
    del capsule
    buffer.free()
    assert live() == 0 and cualloc.Buffer(5 << 20).nbytes == 5 << 20
    # While an exception is raised, which stays.
    buffer = cualloc.Buffer(4096)

    def consume(capsule):
        raise KeyError("mine")

    raises(KeyError, "mine", lambda: consume(buffer.__dlpack__(max_version=(1, 0))))
    # A capsule is taken over once, and a refused one stays as it was.
    capsule = buffer.__dlpack__()
    given = SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=lambda **_: capsule)
    cualloc.from_dlpack(given).free()
    raises(BufferError, "no library has taken over", cualloc.from_dlpack, given)
    wrong = SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=lambda **_: "no capsule")
    raises(BufferError, "expected a DLPack capsule", cualloc.from_dlpack, wrong)
    buffer.free()
    del capsule, given, buffer
    assert live() == 0
    check()


def streams_of_consumers_are_those_of_the_standard():
    import cualloc

    library = driver()
    made = stream(library)
    buffer = cualloc.Buffer(1 << 20, stream=made)
    for asked in (None, 1, 2, -1, made, stream(library)):
        capsule = buffer.__dlpack__(stream=asked, max_version=(1, 0))
        assert "dltensor_versioned" in repr(capsule)
    for asked, kind in ((0, ValueError), (-2, ValueError), ("1", TypeError)):
        raises(kind, "", buffer.__dlpack__, stream=asked)
    # The consumer's stream comes after the buffer's.
    theirs = stream(library)
    assert library.cuMemsetD8Async(ctypes.c_uint64(buffer.ptr), 5, ctypes.c_size_t(1 << 20), ctypes.c_void_p(made)) == 0
    capsule, back = buffer.__dlpack__(stream=theirs), bytearray(1 << 20)
    at = (ctypes.c_char * len(back)).from_buffer(back)
    assert library.cuMemcpyDtoHAsync_v2(at, ctypes.c_uint64(buffer.ptr), ctypes.c_size_t(1 << 20), ctypes.c_void_p(theirs)) == 0
    assert library.cuStreamSynchronize(ctypes.c_void_p(theirs)) == 0
    assert back == b"\5" * (1 << 20)
    check()


def requests_of_devices_and_copies():
    import cualloc

    driver()
    buffer = cualloc.Buffer(64)
    buffer.copy_from(bytes(range(64)))
    assert buffer.__dlpack_device__() == (2, 0) == cualloc.Buffer(1, 0).__dlpack_device__()
    assert cualloc.Buffer(1, 1).__dlpack_device__() == (2, 1)
    assert cualloc.from_dlpack(Other(buffer, dl_device=(2, 0))).ptr == buffer.ptr
    raises(BufferError, "DLPack's device (2, 1)", buffer.__dlpack__, dl_device=(2, 1))
    raises(BufferError, "DLPack's device (1, 0)", buffer.__dlpack__, dl_device=(1, 0), copy=False)
    assert cualloc.from_dlpack(Other(buffer, copy=False)).ptr == buffer.ptr
    copied = cualloc.from_dlpack(Other(buffer.view("int32", (4, 4)), copy=True))
    back = bytearray(64)
    copied.copy_to(back)
    assert copied.ptr != buffer.ptr and back == bytes(range(64)) and copied.shape == (4, 4)


def foreign_tensors_are_described_and_released():
    import cualloc
    from cualloc import _dlpack

    driver()
    memory, released = cualloc.Buffer(4096), []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    deleter = kind(lambda at: released.append(at))

    def tensor(versioned=True, major=1, flags=0, device=(2, 0), dtype=(2, 32, 1), shape=(2, 3), strides=None, offset=0):
        managed = (_dlpack._ManagedVersioned if versioned else _dlpack.Managed)()
        if versioned:
            managed.major, managed.flags = major, flags
        managed.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        steps = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
        managed.tensor = _dlpack.Tensor(memory.ptr, *device, len(shape), *dtype, sizes, steps, offset)
        kept.append((managed, sizes, steps))
        capsule = _dlpack.new_capsule(ctypes.addressof(managed), VERSIONED if versioned else LEGACY, None)
        return SimpleNamespace(__dlpack_device__=lambda: device, __dlpack__=lambda **_: capsule)

    kept = []
    for number, versioned in enumerate((True, False)):
        taken = cualloc.from_dlpack(tensor(versioned, strides=(3, 1), offset=512))
        assert (taken.ptr, taken.shape, taken.dtype) == (memory.ptr + 512, (2, 3), "float32") and len(released) == number
        view = taken.view("uint8")
        taken.free()
        assert len(released) == number
        thread = threading.Thread(target=view.free)
        thread.start()
        thread.join()
        assert released == [ctypes.addressof(one[0]) for one in kept]
    # Sizes of 1 and 0 have any stride.
    for shape, strides in (((1, 6), (77, 1)), ((6, 1), (1, 9)), ((0, 5), (3, 3)), ((), ())):
        assert cualloc.from_dlpack(tensor(shape=shape, strides=strides)).shape == shape
    only = cualloc.from_dlpack(tensor(flags=1))
    assert only.readonly and only.__cuda_array_interface__["data"] == (memory.ptr, True)
    raises(BufferError, "read-only", only.copy_from, bytes(24))
    raises(BufferError, "before version 1", only.__dlpack__)
    assert cualloc.from_dlpack(only).readonly
    only.free()
    gc.collect()
    count = len(released)
    assert count == 7, count
    for words, wrong in [
        ("found version 2", {"major": 2}),
        ("device type 3", {"device": (3, 0)}),
        ("code 2, 32 bits, 4 lanes", {"dtype": (2, 32, 4)}),
        ("code 9, 32 bits", {"dtype": (9, 32, 1)}),
        ("found strides", {"strides": (1, 2)}),
        ("memory of the host", {"device": (1, 0)}),
    ]:
        raises(BufferError, words, cualloc.from_dlpack, tensor(**wrong))
    gc.collect()
    assert len(released) == count, "a refused tensor stays the capsule's"
    check()


def the_array_interface_describes_the_memory():
    import cualloc

    library = driver()
    made = stream(library)
    buffer = cualloc.Buffer(24, stream=made).view("float32", (2, 3))
    assert buffer.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f4",
        "data": (buffer.ptr, False),
        "version": 3,
        "strides": None,
        "stream": made,
    }
    assert cualloc.Buffer(0).__cuda_array_interface__["data"] == (0, False)
    assert cualloc.Buffer(1).__cuda_array_interface__["stream"] == 1
    assert not hasattr(buffer.view("bfloat16"), "__cuda_array_interface__")


def arrays_of_numpy_go_both_ways():
    np = numpy()
    import cualloc

    library = driver()
    made = stream(library)
    for array in (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(24, dtype=np.int64).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
        np.array([True, False]),
        np.array(3 + 4j),
        np.zeros((0, 4), np.uint16),
        np.asfortranarray(np.ones((3, 5), np.float16)),
    ):
        buffer = cualloc.Buffer.from_numpy(array, stream=made)
        assert (buffer.shape, buffer.dtype, buffer.nbytes) == (array.shape, array.dtype.name, array.nbytes)
        back = buffer.to_numpy()
        assert back.dtype == array.dtype and np.array_equal(back, array) and back.flags.c_contiguous
    values = cualloc.Buffer.from_numpy([1.0, 2.0])
    assert values.dtype == "float64"
    assert np.array_equal(values.to_numpy("uint64", (2, 1)), np.array([[1.0], [2.0]]).view("uint64"))
    assert np.array_equal(values.to_numpy(np.float64, 1), [1.0])
    assert np.array_equal(np.from_dlpack(values, device="cpu"), [1.0, 2.0])
    half = values.view("bfloat16", 8)
    if importlib.util.find_spec("ml_dtypes"):
        assert half.to_numpy().dtype.name == "bfloat16"
    else:
        raises(ModuleNotFoundError, "ml_dtypes", half.to_numpy)
    del half
    read = np.arange(16, dtype=np.uint8)
    read.flags.writeable = False
    values.copy_from(read)
    raises(ValueError, "read-only", values.copy_to, read)
    raises(TypeError, "expected an element type", cualloc.Buffer.from_numpy, np.zeros(2, ">f4"))
    raises(TypeError, "expected an element type", cualloc.Buffer.from_numpy, np.array(["text"]))
    # NumPy refuses memory of a device with an exception that is raised while the capsule is collected.
    raises(Exception, "nsupported device", np.from_dlpack, values)
    raises(BufferError, "memory of the host", cualloc.from_dlpack, np.zeros(3))
    del values, buffer, read
    assert live() == 0
    check()


def a_token_opens_the_memory():
    import cualloc

    driver()
    buffer = cualloc.Buffer(1 << 20)
    buffer.copy_from(b"\3" * (1 << 20))
    token = buffer.share()
    assert token.startswith("cualloc") and " " not in token
    raises(ValueError, "512 bytes after", buffer.view("uint8", 8, 512).share)
    opened = cualloc.Buffer.open_shared(token)
    back = bytearray(16)
    opened.view("uint8", 16).copy_to(back)
    assert back == b"\3" * 16 and opened.nbytes >= 1 << 20 and opened.ptr != buffer.ptr
    opened.free()
    other = """
import sys
sys.path.insert(0, sys.argv[2])
import test_package, cualloc
test_package.driver()
values = cualloc.Buffer.open_shared(sys.argv[1]).view("uint8", 16)
back = bytearray(16)
values.copy_to(back)
assert back == b"\\3" * 16, back
values.copy_from(b"\\4" * 16)
"""
    subprocess.run([sys.executable, "-c", other, token, os.path.dirname(__file__)], check=True)
    buffer.view("uint8", 16).copy_to(back)
    assert back == b"\4" * 16
    buffer.free()
    assert raises(cualloc.Error, "freed", cualloc.Buffer.open_shared, token).code == 4
    raises(cualloc.Error, "", cualloc.Buffer.open_shared, "no token")
    check()


def the_first_program_of_the_page_runs():
    numpy()
    driver()
    import contextlib
    import io

    text = next(text for name, text in test_package.snippets() if name == "python.md")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text, "python.md", "exec"), {})
    assert said.getvalue().splitlines() == [
        "(2, 3) float32 24 bytes on device 0",
        "[[0. 1. 2.]",
        " [3. 4. 5.]]",
        "0",
    ], said.getvalue()


def it_ends_with_live_buffers_and_capsules():
    import builtins

    import cualloc

    driver()
    buffer = cualloc.Buffer(1 << 20)
    capsules = [buffer.__dlpack__(max_version=version) for version in (None, (1, 0))]
    # In a global name, in a name of a module that ends last, in a cycle, and in another thread.
    globals()["kept"] = [buffer, cualloc.from_dlpack(buffer), buffer.view("float32")]
    builtins.kept = [*capsules, cualloc.from_dlpack(buffer), buffer.__dlpack__()]
    cycle = [buffer.__dlpack__()]
    cycle.append(cycle)
    begun = threading.Event()

    def hold(one):
        begun.set()
        threading.Event().wait()

    threading.Thread(target=hold, args=(buffer.__dlpack__(),), daemon=True).start()
    assert begun.wait(60)


def a_forked_child_leaves_the_memory_alone():
    import cualloc

    driver()
    buffer = cualloc.Buffer(1 << 20)
    capsule = buffer.__dlpack__()
    child = os.fork()
    if child == 0:
        del capsule
        buffer.free()
        try:
            cualloc.Buffer(5)
        except cualloc.Error:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0 and live() == 1 << 20
    buffer.copy_from(bytes(1 << 20))
    del capsule
    buffer.free()
    assert live() == 0
    check()


def threads_export_and_release():
    import cualloc

    driver()
    buffer = cualloc.Buffer(1 << 20)

    def work():
        for _ in range(300):
            taken = cualloc.from_dlpack(buffer)
            capsule = taken.__dlpack__(stream=-1)
            taken.free()
            del capsule

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live() == 1 << 20
    buffer.free()
    assert live() == 0
    check()


def cases():
    """Every function of this file without arguments but for those that help others."""
    return test_package.cases(globals(), {"numpy", "check", "cases"})


class Buffers(unittest.TestCase):
    pass


test_package.add_tests(Buffers, cases(), __file__)

if __name__ == "__main__":
    cases()[sys.argv[1]]()
