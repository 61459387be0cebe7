"""The C library: its functions, its statistics, and one allocator per device."""

import contextlib
import ctypes
import math
import operator
import os
import threading

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libcualloc.so")

OK, OUT_OF_MEMORY, INVALID_ARGUMENT, NOT_OURS, NOT_LIVE, CAPTURING, CLOSED = range(7)
NO_DRIVER, DRIVER, CONTEXT_LOST, UNSUPPORTED, PANIC, BUSY, SUSPENDED, IO = range(7, 15)


class Error(RuntimeError):
    """A call of the library failed; `code` is the C library's (CUALLOC_...)."""

    def __init__(self, code, text):
        super().__init__(text or f"cualloc failed with code {code}")
        self.code = code


class OutOfMemory(Error, MemoryError):
    """Out of memory: every way to obtain more was tried."""


NO_LIMIT = 2**64 - 1
# Requests for more bytes are rejected by the library as invalid sizes.
MOST = 2**40

SELECT_TAG, SCOPE_THREAD = 3, 5
CONTENTS_DROP, CONTENTS_PINNED, CONTENTS_HOST = range(3)


class Counter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("current", "peak", "total")]


KINDS = ("requested", "allocated", "reserved", "active", "blocks", "segments")


class PoolStats(ctypes.Structure):
    _fields_ = [(kind, Counter) for kind in KINDS]


class Stats(ctypes.Structure):
    """cualloc_stats_t."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((kind, Counter) for kind in KINDS),
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("ooms", "retries", "driver_calls", "hits", "misses"),
                *("limit", "free_bytes", "largest_free", "streams"),
            )
        ),
        ("small_pool", PoolStats),
        ("large_pool", PoolStats),
        ("graph_pools", ctypes.c_uint64),
        ("headroom", ctypes.c_uint64),
        ("regime", ctypes.c_uint64),
        ("ranges", ctypes.c_uint64),
        ("ranges_leaving", ctypes.c_uint64),
        ("pooled", PoolStats),
        ("held", Counter),
    ]


class Footprint(ctypes.Structure):
    """cualloc_footprint_t."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_uint64) for name in ("live", "blocks", "free_bytes", "peak", "physical", "leases")),
    ]


class Scope(ctypes.Structure):
    """cualloc_scope_t."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int32),
        ("capture", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("stream", "when", "done", "data")),
    ]


class PoolId(ctypes.Structure):
    """cualloc_torch_pool_id_t."""

    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


POOL_ENDED, POOL_OPEN, POOL_GOES_ON = range(3)

STACK_SOURCE = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)


def plain(structure):
    """Converts a structure to dictionaries of numbers, without its size field."""
    fields = ((name, getattr(structure, name)) for name, _ in structure._fields_ if name != "struct_size")
    return {name: plain(value) if isinstance(value, ctypes.Structure) else value for name, value in fields}


def _functions():
    code, handle, pointer = ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p
    number, text = ctypes.c_uint64, ctypes.c_char_p
    to = ctypes.POINTER
    return {
        "cualloc_last_error": (text, []),
        "cualloc_options_new": (handle, []),
        "cualloc_options_free": (None, [handle]),
        "cualloc_options_set": (code, [handle, text, text]),
        "cualloc_shared_options": (code, [handle]),
        "cualloc_shared": (code, [ctypes.c_int32, to(handle)]),
        "cualloc_shared_made": (handle, [ctypes.c_int32]),
        "cualloc_alloc": (code, [handle, ctypes.c_size_t, pointer, to(number)]),
        "cualloc_free": (code, [handle, number]),
        "cualloc_free_on": (code, [handle, number, pointer]),
        "cualloc_record_stream": (code, [handle, number, pointer]),
        "cualloc_adopt_stream": (code, [handle, pointer]),
        "cualloc_retire_stream": (code, [handle, pointer]),
        "cualloc_stream_synchronize": (code, [handle, pointer]),
        "cualloc_stream_wait": (code, [handle, pointer, pointer]),
        "cualloc_copy": (code, [handle, number, number, ctypes.c_size_t, pointer]),
        "cualloc_owner_create": (code, [pointer, pointer, to(handle)]),
        "cualloc_owner_release": (code, [handle]),
        "cualloc_dlpack_export": (code, [handle, pointer, number, to(handle)]),
        "cualloc_dlpack_capsule_destructor": (pointer, [pointer, pointer]),
        "cualloc_share": (code, [handle, number, ctypes.c_uint32, text, ctypes.c_size_t, to(number), to(number)]),
        "cualloc_share_open": (code, [handle, text, to(handle), to(number), to(number)]),
        "cualloc_share_close": (code, [handle]),
        "cualloc_trim": (code, [handle, number, to(number), to(number)]),
        "cualloc_trim_device": (code, [handle, number, to(number), to(number)]),
        "cualloc_empty_cache": (code, [handle, to(number), to(number)]),
        "cualloc_set_limit": (code, [handle, number]),
        **{name: (code, [handle, to(Stats)]) for name in ("cualloc_stats", "cualloc_torch_stats")},
        "cualloc_reset_peaks": (code, [handle]),
        "cualloc_check": (code, [handle]),
        "cualloc_pool_create_tagged": (code, [handle, text, to(handle)]),
        "cualloc_pool_enter": (code, [handle, to(Scope), to(number)]),
        "cualloc_pool_leave": (code, [handle, number]),
        "cualloc_pool_empty_cache": (code, [handle, to(number)]),
        "cualloc_pool_footprint": (code, [handle, to(Footprint)]),
        "cualloc_suspend": (code, [handle, ctypes.c_int32, text, ctypes.c_int32, to(number)]),
        "cualloc_resume": (code, [handle, ctypes.c_int32, text, to(number)]),
        "cualloc_range_create": (code, [handle, number, pointer, to(handle), to(number)]),
        "cualloc_range_commit": (code, [handle, number, number, pointer]),
        "cualloc_range_decommit": (code, [handle, number, number, pointer]),
        "cualloc_range_record": (code, [handle, number, number, pointer]),
        "cualloc_range_stats": (code, [handle, pointer]),
        "cualloc_range_map": (code, [handle, to(number), ctypes.c_size_t]),
        "cualloc_range_destroy": (code, [handle, pointer]),
        "cualloc_torch_delete": (None, [pointer]),
        "cualloc_torch_retry_frees": (None, []),
        "cualloc_torch_record_stream": (code, [pointer, pointer]),
        "cualloc_torch_pool": (handle, [ctypes.c_int32, PoolId]),
        "cualloc_torch_pool_tag": (code, [ctypes.c_int32, PoolId, text]),
        "cualloc_torch_pool_newest": (number, []),
        "cualloc_torch_pool_name": (code, [number, to(ctypes.c_int32), to(PoolId)]),
        "cualloc_torch_pool_state": (code, [number, pointer]),
        "cualloc_torch_pool_abandon": (code, [number, pointer]),
        "cualloc_torch_pool_release": (code, [ctypes.c_int32, PoolId]),
        "cualloc_torch_pool_releases": (number, []),
        "cualloc_record_start": (code, [text]),
        "cualloc_record_start_with_stacks": (code, [text, number]),
        "cualloc_set_stack_source": (None, [STACK_SOURCE, pointer]),
        "cualloc_record_dump": (code, [text]),
        "cualloc_record_snapshot": (code, [text]),
        "cualloc_record_stop": (code, [to(number), to(number)]),
        "cualloc_context": (ctypes.c_uint32, [text]),
        "cualloc_set_context": (ctypes.c_uint32, [ctypes.c_uint32]),
    }


def not_installed(error, module, product):
    """Returns the error of a failed import, with advice if the module itself is not installed."""
    if error.name != module:
        return error
    text = f"cualloc.{module} requires {product}, which is not installed in this environment"
    return ModuleNotFoundError(text, name=module)


def _load():
    try:
        library = ctypes.CDLL(PATH)
    except OSError as error:
        text = f"cannot load the C library of cualloc: {error}; install the wheel (python/build.sh builds it from source)"
        raise ImportError(text, path=PATH) from error
    for name, (result, arguments) in _functions().items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# Calls release the interpreter's lock: an allocation may wait for the device, and the device for a Python callback.
LIBRARY = _load()


def checked(code):
    """Raises the exception for a code other than OK."""
    if code == OK:
        return
    text = LIBRARY.cualloc_last_error().decode("utf-8", "replace")
    raise (OutOfMemory if code == OUT_OF_MEMORY else Error)(code, text)


# The library stores addresses of these objects, so they stay as long as the process.
kept = []


def without_null(text):
    """Encodes a text for the library, which would end it at a null byte."""
    if b"\0" in text:
        raise ValueError("embedded null byte")
    return text


def number(value, what, bits=64):
    """Validates a number for the library: of a negative or too large one ctypes would silently pass only some bits."""
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{what} must not be negative: {value}")
    if bits is not None and value >> bits:
        raise OverflowError(f"{what} must fit into {bits} bits: {value} has {value.bit_length()}")
    return value


def stream_number(stream):
    """Returns a stream's handle for the library; None is the default stream."""
    return None if stream is None else number(stream, "the handle of a stream")


def device_number(device):
    """Returns a device's number for the library, which takes a signed integer."""
    return number(device, "the number of a device", 31)


# ---- one allocator per device --------------------------------------------------------------------------------------

_lock = threading.RLock()
_settings = None
_made = {}


def settings_of(limit, config):
    """Combines a limit (bytes, "40G", "80%", or a fraction below 1) and a configuration ("tune.views=off,..." or a
    dictionary) to settings of the library."""
    if config is None:
        settings = {}
    elif isinstance(config, str):
        pairs = (part.partition("=") for part in config.split(",") if part.strip())
        settings = {key.strip(): value.strip() for key, _, value in pairs}
    else:
        settings = {key: _written(value) for key, value in dict(config).items()}
    if limit is not None:
        if "limit" in settings:
            raise ValueError("the limit is given twice: as limit and in config")
        if isinstance(limit, (int, float)):
            number(math.floor(limit), "the limit")
        settings["limit"] = f"{limit * 100:g}%" if isinstance(limit, float) and limit <= 1 else _written(limit)
    return settings


def _written(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(int(value)) if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _options(settings):
    options = LIBRARY.cualloc_options_new()
    try:
        for key, value in settings.items():
            checked(LIBRARY.cualloc_options_set(options, without_null(key.encode()), without_null(value.encode())))
        yield options
    finally:
        LIBRARY.cualloc_options_free(options)


def configure(limit=None, config=None):
    """Sets what the allocators are created with. Without arguments, or with the settings of an earlier call, it changes
    nothing."""
    global _settings
    settings = settings_of(limit, config)
    with _lock:
        if not settings or settings == _settings:
            return
        if _settings is not None:
            raise RuntimeError(f"cualloc is set up with other settings: {_settings}, found {settings}")
        with _options(settings) as options:
            checked(LIBRARY.cualloc_shared_options(options))
        _settings = settings


def allocator(device):
    """Returns the handle of a device's allocator, which is created if there is none."""
    handle = _made.get(device)
    if handle is None:
        made, device = ctypes.c_void_p(), device_number(device)
        checked(LIBRARY.cualloc_shared(device, ctypes.byref(made)))
        handle = _made[device] = made.value
    return handle


# Frees that failed during a capture: the function and its arguments.
_postponed = []


def give_back(function, *arguments):
    """Calls a function of the library that frees. A free that fails because of a capture is repeated by a later
    call."""
    if function(*arguments) == CAPTURING:
        _postponed.append((function, arguments))


def _make_up():
    """Repeats deferred frees; those that still fail stay deferred."""
    for _ in range(len(_postponed)):
        try:
            function, arguments = _postponed.pop(0)
        except IndexError:  # Another thread has it.
            return
        give_back(function, *arguments)


def allocate(device, bytes, stream):
    """Allocates bytes for use on a stream (its handle, a number) and returns the address."""
    stream = stream_number(stream)
    # Rejected here, because such a number may not even fit into size_t.
    if number(bytes, "a number of bytes", None) > MOST:
        raise OutOfMemory(OUT_OF_MEMORY, f"out of memory: {bytes} bytes are more than any device has")
    _make_up()
    address = ctypes.c_uint64()
    checked(LIBRARY.cualloc_alloc(allocator(device), bytes, stream, ctypes.byref(address)))
    return address.value


def _known(device):
    """Returns the handle of a device's allocator, if there is one."""
    return LIBRARY.cualloc_shared_made(device_number(device))


def stats(device, function=LIBRARY.cualloc_stats):
    """Returns the statistics of a device's allocator as a structure. Does not create an allocator."""
    figures = Stats(struct_size=ctypes.sizeof(Stats), limit=NO_LIMIT)
    if made := _known(device):
        checked(function(made, ctypes.byref(figures)))
    return figures


def _pool_id(id):
    return PoolId(*(number(part, "a part of a pool's id") for part in id))


def graph_pool(device, id):
    """Returns the statistics of a PyTorch pool, identified by its id of two numbers; None if there is no such pool."""
    pool = LIBRARY.cualloc_torch_pool(device_number(device), _pool_id(id))
    figures = Footprint(struct_size=ctypes.sizeof(Footprint))
    code = LIBRARY.cualloc_pool_footprint(pool, ctypes.byref(figures)) if pool else CLOSED
    if code == CLOSED:  # It may have been released meanwhile.
        return None
    checked(code)
    return plain(figures)


def empty_pool(device, id):
    """Releases the free memory of a PyTorch pool, identified by its id. Returns the bytes."""
    pool, released = LIBRARY.cualloc_torch_pool(device_number(device), _pool_id(id)), ctypes.c_uint64()
    _make_up()
    LIBRARY.cualloc_torch_retry_frees()
    code = LIBRARY.cualloc_pool_empty_cache(pool, ctypes.byref(released)) if pool else CLOSED
    checked(OK if code == CLOSED else code)
    return released.value


# The pools of tagged memory, by device and tag. They live as long as the process.
_tagged = {}


def tags():
    """Returns the device and tag of all tagged memory."""
    with _lock:
        return list(_tagged)


def tag_pool(device, tag):
    """Returns the pool of a tag on a device, which is created if there is none; from then on the tag is known."""
    with _lock:
        pool = _tagged.get((device, tag))
        if pool is None:
            made = ctypes.c_void_p()
            checked(LIBRARY.cualloc_pool_create_tagged(allocator(device), without_null(tag.encode()), ctypes.byref(made)))
            pool = _tagged[device, tag] = made.value
        return pool


def set_pool_tag(device, id, tag):
    """Sets the tag of a PyTorch pool, identified by its id; from then on the tag is known."""
    tag_pool(device, tag)
    checked(LIBRARY.cualloc_torch_pool_tag(device_number(device), _pool_id(id), without_null(tag.encode())))


@contextlib.contextmanager
def tagged(device, tag):
    """Tags everything that the thread allocates on a device within the context manager."""
    pool = tag_pool(device, tag)
    which, number = Scope(struct_size=ctypes.sizeof(Scope), kind=SCOPE_THREAD), ctypes.c_uint64()
    checked(LIBRARY.cualloc_pool_enter(pool, ctypes.byref(which), ctypes.byref(number)))
    try:
        yield
    finally:
        checked(LIBRARY.cualloc_pool_leave(pool, number))


def suspend(device, tag, contents):
    """Suspends the memory of a tag. Returns the bytes returned to the driver; None if it was already suspended."""
    bytes = ctypes.c_uint64()
    code = LIBRARY.cualloc_suspend(allocator(device), SELECT_TAG, without_null(tag.encode()), contents, ctypes.byref(bytes))
    if code == SUSPENDED:
        return None
    checked(code)
    return bytes.value


def resume(device, tag):
    """Resumes the memory of a tag. Returns the restored bytes; None if it was not suspended."""
    bytes = ctypes.c_uint64()
    code = LIBRARY.cualloc_resume(allocator(device), SELECT_TAG, without_null(tag.encode()), ctypes.byref(bytes))
    if code == SUSPENDED:
        return None
    checked(code)
    return bytes.value


def reset_peaks(device):
    """Sets the peaks of a device's allocator to the current values."""
    if made := _known(device):
        checked(LIBRARY.cualloc_reset_peaks(made))


def check(device):
    """Recomputes and verifies all statistics of a device's allocator."""
    if made := _known(device):
        checked(LIBRARY.cualloc_check(made))


def trim(device, keep, host=True):
    """Returns memory to the driver until at most `keep` bytes are reserved, with `host` also page-locked memory of the
    host. Returns the bytes given back, and the bytes that pending work kept from being given back."""
    release = LIBRARY.cualloc_trim if host else LIBRARY.cualloc_trim_device
    keep = number(keep, "a number of bytes to keep")
    _make_up()
    released, pending = ctypes.c_uint64(), ctypes.c_uint64()
    if made := _known(device):
        checked(release(made, keep, ctypes.byref(released), ctypes.byref(pending)))
    return released.value, pending.value
