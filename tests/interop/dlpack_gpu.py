"""Hands device memory to PyTorch and CuPy through DLPack, takes theirs, and checks every value.

    cargo build --example dlpack_capsule
    python3 tests/interop/dlpack_gpu.py [--library PATH] [--only torch|cupy] [--simulated]

--simulated needs neither a GPU nor an array library: the two ends are this script and the library over
the simulated driver. Exit code 0 only if everything that was to run ran and held.
"""

import argparse
import ctypes
import gc
import os
import sys
from ctypes import (
    POINTER,
    PYFUNCTYPE,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}
CUDA = 2

# Prototypes of our own: those of ctypes.pythonapi are shared by everybody in the process. Capsules are
# passed as plain pointers, since a destructor gets one that is already dying.
capsule_new = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))
capsule_is_valid = PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", pythonapi))
capsule_pointer = PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", pythonapi))
capsule_rename = PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_SetName", pythonapi))
Destructor = PYFUNCTYPE(None, c_void_p)


class Library:
    """The C functions of tests/equipment/dlpack_capsule.rs."""

    def __init__(self, path):
        # CDLL lets go of the interpreter's lock in calls: deleters of other libraries take it themselves.
        lib = ctypes.CDLL(path)
        for name, result, arguments in [
            ("error", c_char_p, []),
            ("open", c_void_p, [c_int]),
            ("close", c_int, [c_void_p]),
            ("live_bytes", c_uint64, [c_void_p]),
            ("freed_bytes", c_uint64, [c_void_p]),
            ("stream", c_uint64, [c_void_p]),
            ("column", c_void_p, [c_void_p, POINTER(c_float), c_size_t]),
            ("column_free", None, [c_void_p]),
            ("column_ptr", c_uint64, [c_void_p]),
            ("column_rows", c_uint64, [c_void_p]),
            ("column_external", c_int, [c_void_p]),
            ("column_read", c_int, [c_void_p, POINTER(c_float), c_size_t]),
            ("export", c_void_p, [c_void_p, c_int, c_int, c_int64]),
            ("import", c_void_p, [c_void_p, c_void_p, c_int]),
            ("delete", None, [c_void_p, c_int]),
        ]:
            function = getattr(lib, "capsule_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name + "_", function)

        # A capsule without a consumer still owns its tensor.
        def drop(capsule):
            for name, versioned in ((LEGACY, 0), (VERSIONED, 1)):
                if capsule_is_valid(capsule, name):
                    self.delete_(capsule_pointer(capsule, name), versioned)

        self.destructor = Destructor(drop)

    def check(self, result):
        if result is None or result == -1:
            raise RuntimeError((self.error_() or b"unknown error").decode())
        return result


class Session:
    def __init__(self, library, simulated):
        self.library = library
        self.handle = library.check(library.open_(int(simulated)))

    def live(self):
        return self.library.live_bytes_(self.handle)

    def freed(self):
        return self.library.freed_bytes_(self.handle)

    def stream(self):
        return self.library.stream_(self.handle)

    def column(self, values):
        array = (c_float * len(values))(*values)
        made = self.library.column_(self.handle, array, len(values))
        return Column(self, self.library.check(made))

    def take(self, capsule):
        """Consumes a capsule, as the protocol says: its name changes, so that its destructor does
        nothing."""
        address = id(capsule)
        for name, versioned in ((LEGACY, 0), (VERSIONED, 1)):
            if capsule_is_valid(address, name):
                tensor = capsule_pointer(address, name)
                capsule_rename(address, USED[name])
                made = self.library.import_(self.handle, tensor, versioned)
                return Column(self, self.library.check(made)), name
        raise TypeError(f"no DLPack capsule: {capsule!r}")

    def close(self):
        self.library.check(self.library.close_(self.handle))


class Column:
    """What array libraries ask for: __dlpack__ and __dlpack_device__."""

    def __init__(self, session, handle):
        self.session, self.library, self.handle = session, session.library, handle
        self.form = VERSIONED
        self.asked = []

    def __dlpack_device__(self):
        return (CUDA, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append((stream, max_version))
        if copy:
            raise BufferError("no copies")
        if dl_device is not None and tuple(map(int, dl_device)) != (CUDA, 0):
            raise BufferError(f"not on {dl_device}")
        versioned = self.form == VERSIONED and max_version is not None and max_version[0] >= 1
        name = VERSIONED if versioned else LEGACY
        tensor = self.library.check(
            self.library.export_(
                self.handle, int(versioned), int(stream is not None), int(stream or 0)
            )
        )
        destructor = ctypes.cast(self.library.destructor, c_void_p)
        return capsule_new(tensor, name, destructor)

    def ptr(self):
        return self.library.column_ptr_(self.handle)

    def external(self):
        return bool(self.library.column_external_(self.handle))

    def values(self):
        rows = self.library.column_rows_(self.handle)
        out = (c_float * rows)()
        self.library.check(self.library.column_read_(self.handle, out, rows))
        return list(out)

    def free(self):
        handle, self.handle = self.handle, None
        self.library.column_free_(handle)


def expect(found, wanted, what):
    if found != wanted:
        raise AssertionError(f"{what}: {found!r}, expected {wanted!r}")


def numbers(rows, first=0.0):
    return [first + row for row in range(rows)]


ROWS = 100_003


class Torch:
    name = "torch"

    def __init__(self):
        import torch

        self.lib = torch
        torch.zeros(1, device="cuda")
        self.version = torch.__version__

    def take(self, column):
        return self.lib.from_dlpack(column)

    def ptr(self, array):
        return array.data_ptr()

    def make(self, rows):
        return self.lib.arange(rows, dtype=self.lib.float32, device="cuda")

    def add(self, array, number):
        array.add_(number)

    def give(self, array, stream):
        return array.__dlpack__(stream=stream)

    def give_versioned(self, array, stream):
        return array.__dlpack__(stream=stream, max_version=(1, 0))

    def values(self, array):
        return array.cpu().tolist()

    def held(self):
        return self.lib.cuda.memory_allocated()

    def settle(self):
        self.lib.cuda.synchronize()

    def on_stream(self):
        return self.lib.cuda.stream(self.lib.cuda.Stream())


class Cupy:
    name = "cupy"

    def __init__(self):
        import cupy

        self.lib = cupy
        cupy.zeros(1)
        self.version = cupy.__version__

    def take(self, column):
        return self.lib.from_dlpack(column)

    def ptr(self, array):
        return array.data.ptr

    def make(self, rows):
        return self.lib.arange(rows, dtype=self.lib.float32)

    def add(self, array, number):
        array += number

    def give(self, array, stream):
        return array.__dlpack__(stream=stream)

    def give_versioned(self, array, stream):
        return array.__dlpack__(stream=stream, max_version=(1, 0))

    def values(self, array):
        return self.lib.asnumpy(array).tolist()

    def held(self):
        return self.lib.get_default_memory_pool().used_bytes()

    def settle(self):
        self.lib.cuda.runtime.deviceSynchronize()

    def on_stream(self):
        return self.lib.cuda.Stream(non_blocking=True)


def ours_to_theirs(session, them, form):
    """They see our values in our memory, without a copy, and we see what they write."""
    expect(session.live(), 0, "live bytes before")
    freed = session.freed()
    column = session.column(numbers(ROWS))
    column.form = form
    held = session.live()
    ptr = column.ptr()
    array = them.take(column)
    expect(them.ptr(array), ptr, "address")
    expect(them.values(array), numbers(ROWS), "values they read")
    them.add(array, 0.5)
    them.settle()
    expect(column.values(), numbers(ROWS, 0.5), "values they wrote")
    asked = column.asked[-1]
    # We let go first: their array keeps the memory.
    column.free()
    gc.collect()
    expect(session.live(), held, "live bytes while they hold it")
    expect(them.values(array), numbers(ROWS, 0.5), "values they still read")
    del array
    gc.collect()
    expect(session.live(), 0, "live bytes after they let go")
    expect(session.freed() - freed, held, "bytes freed, each once")
    return asked


def theirs_to_ours(session, them, give):
    """We see their values in their memory, without a copy, and our hold keeps it."""
    them.settle()
    gc.collect()
    before = them.held()
    array = them.make(ROWS)
    them.add(array, 0.25)
    ptr = them.ptr(array)
    held = them.held()
    # Not synchronised: they let our stream wait.
    column, name = session.take(give(array, session.stream()))
    expect(column.ptr(), ptr, "address")
    expect(column.external(), True, "external")
    expect(column.values(), numbers(ROWS, 0.25), "values we read")
    del array
    gc.collect()
    expect(them.held(), held, "their bytes while we hold them")
    expect(column.values(), numbers(ROWS, 0.25), "values we still read")
    column.free()
    gc.collect()
    expect(them.held(), before, "their bytes after we let go")
    return name


def there_and_back(session, them):
    """Our memory through their array and back to us: their deleter, then ours."""
    column = session.column(numbers(ROWS))
    held = session.live()
    array = them.take(column)
    back, _ = session.take(them.give(array, session.stream()))
    expect(back.ptr(), column.ptr(), "address")
    column.free()
    del array
    gc.collect()
    expect(session.live(), held, "live bytes while the way back lives")
    expect(back.values(), numbers(ROWS), "values at the end")
    back.free()
    gc.collect()
    expect(session.live(), 0, "live bytes at the end")


def unused_capsule(session):
    """A capsule without a consumer is freed by its destructor; one that is imported again belongs to the importer."""
    for form in (LEGACY, VERSIONED):
        column = session.column(numbers(1000))
        column.form = form
        capsule = column.__dlpack__(stream=-1, max_version=(1, 0))
        column.free()
        if session.live() == 0:
            raise AssertionError("the capsule does not keep the memory")
        del capsule
        gc.collect()
        expect(session.live(), 0, "live bytes after an unused capsule")

        column = session.column(numbers(1000, 7.0))
        column.form = form
        capsule = column.__dlpack__(stream=session.stream(), max_version=(1, 0))
        back, name = session.take(capsule)
        expect(name, form, "form")
        expect(back.external(), False, "external")
        column.free()
        del capsule
        gc.collect()
        expect(back.values(), numbers(1000, 7.0), "values")
        back.free()
        expect(session.live(), 0, "live bytes after a round trip")


def exchange(session, them):
    for form in (LEGACY, VERSIONED):
        asked = ours_to_theirs(session, them, form)
        print(f"  {them.name} took {form.decode()}, asked for stream, max_version = {asked}")
        with them.on_stream():
            asked = ours_to_theirs(session, them, form)
        print(f"  {them.name} on a stream of its own: stream, max_version = {asked}")
    for give in (them.give, them.give_versioned):
        name = theirs_to_ours(session, them, give)
        print(f"  {them.name} gave {name.decode()}")
    with them.on_stream():
        theirs_to_ours(session, them, them.give)
    there_and_back(session, them)
    for _ in range(50):
        ours_to_theirs(session, them, VERSIONED)
        theirs_to_ours(session, them, them.give)
    print(f"{them.name} {them.version}: ok")


def main():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    library = os.path.join(root, "target", "debug", "examples", "libdlpack_capsule.so")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=library, help="the built example")
    parser.add_argument("--only", choices=["torch", "cupy"])
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()

    session = Session(Library(options.library), options.simulated)
    unused_capsule(session)
    print("capsules: ok")
    if not options.simulated:
        for kind in (Torch, Cupy):
            if options.only in (None, kind.name):
                exchange(session, kind())
    session.close()
    print("closed with nothing live")
    return 0


if __name__ == "__main__":
    sys.exit(main())
